"""What `fsdpx.ops` computes, written with torch operators: slow, obvious, and on any device.

The tests compare the native passes with it bit by bit (NaN with NaN).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def accumulation_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The type that arithmetic between elements of `a` and `b` runs in."""
    return torch.float64 if torch.float64 in (a, b) else torch.float32


def round_to(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds float32 or float64 values once, to the nearest `dtype`, ties to even."""
    if wide.dtype == torch.float64 and dtype.itemsize < 4:
        wide = _round_to_odd(wide)  # torch would round twice, by way of the nearest float32
    return wide.to(dtype)


def _round_to_odd(wide: Tensor) -> Tensor:
    """float32 next to each float64; where inexact, the neighbour whose last bit is 1.

    A second rounding, to a type with at least two bits less, then gives what one rounding would.
    """
    nearest = wide.to(torch.float32)
    bits = nearest.view(torch.int32)
    towards = torch.where(nearest.double().abs() < wide.abs(), 1, -1).to(torch.int32)
    step = (nearest.double() != wide) & ~wide.isnan() & (bits % 2 == 0)
    return torch.where(step, bits + towards, bits).view(torch.float32)


def cast(src: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> Tensor:
    """out[i] = scale * src[i] (+ out[i]); both have the same number of elements."""
    return reduce([src], out, scale=scale, accumulate=accumulate)


def reduce(
    srcs: Sequence[Tensor], out: Tensor, *, scale: float = 1.0, accumulate: bool = False
) -> Tensor:
    """out[i] = scale * (srcs[0][i] + srcs[1][i] + ...) (+ out[i]), added in the order of `srcs`."""
    first = srcs[0]
    if len(srcs) == 1 and first.dtype == out.dtype and scale == 1.0 and not accumulate:
        return out.copy_(first.detach().reshape(out.shape))
    wide = accumulation_dtype(first.dtype, out.dtype)
    total = first.detach().reshape(-1).to(wide)
    for src in srcs[1:]:
        total = total + src.detach().reshape(-1).to(wide)
    total = total * torch.tensor(scale, dtype=torch.float64).to(wide).item()
    if accumulate:
        total = total + out.detach().reshape(-1).to(wide)
    return out.detach().copy_(round_to(total, out.dtype).reshape(out.shape))


def pack(
    tensors: Sequence[Tensor],
    out: Tensor,
    *,
    offsets: Sequence[int] | None = None,
    scale: float = 1.0,
    accumulate: bool = False,
) -> Tensor:
    """Writes tensors into 1-D `out`; without `accumulate` zeros what none of them covers."""
    result = out.detach().clone() if accumulate else torch.zeros_like(out)
    position = 0
    for i, tensor in enumerate(tensors):
        position = offsets[i] if offsets is not None else position
        piece = result[position : position + tensor.numel()]
        cast(tensor.reshape(-1), piece, scale=scale, accumulate=accumulate)
        position += tensor.numel()
    return out.detach().copy_(result)


def unpack(
    flat: Tensor,
    outs: Sequence[Tensor],
    *,
    offsets: Sequence[int] | None = None,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Reads tensors back from 1-D `flat`, in the order and at the offsets of `pack`."""
    position = 0
    for i, out in enumerate(outs):
        position = offsets[i] if offsets is not None else position
        piece = flat[position : position + out.numel()]
        cast(piece.reshape(out.shape), out, scale=scale, accumulate=accumulate)
        position += out.numel()
