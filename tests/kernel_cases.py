"""Inputs and comparisons that the tests of the kernels share."""

from __future__ import annotations

import torch
from cudasim.shipped import SimulatedPasses
from torch import Tensor

from fsdpx import _C

EIGHTHS = [torch.float8_e4m3fn, torch.float8_e5m2]
SMALL = [torch.float16, torch.bfloat16, *EIGHTHS]
FLOATING = [torch.float32, torch.float64, *SMALL]
OPAQUE = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def available_isas() -> list[str]:
    """The instruction sets that this machine has."""
    found = []
    for name in ("avx512", "avx2", "portable"):
        try:
            _C.set_isa(name)
        except ValueError:
            continue
        found.append(name)
    _C.set_isa("auto")
    return found


ISAS = available_isas()


def bits_of(tensor: Tensor) -> Tensor:
    """The bits of each element as an integer."""
    return tensor.view(_BITS[tensor.itemsize])


def random_bits(numel: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    """Elements with random bits: half of them any pattern, half near 1 so that sums matter."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        return raw < 128
    any_bits = raw.view(dtype).clone()
    if not dtype.is_floating_point:
        return any_bits
    ordinary = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.where(torch.rand(numel, generator=generator) < 0.5, any_bits, ordinary)


def every_value(dtype: torch.dtype) -> Tensor:
    """All bit patterns of a type of 8 or 16 bits, in ascending order."""
    codes = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32)
    return codes.to(torch.uint16 if dtype.itemsize == 2 else torch.uint8).view(dtype)


def misaligned(tensor: Tensor, shift: int) -> Tensor:
    """A copy `shift` elements after an aligned address, with an element on either side of it."""
    room = torch.zeros(tensor.numel() + shift + 18, dtype=tensor.dtype)
    place = room[16 + shift : 16 + shift + tensor.numel()]
    place.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return place


def assert_bitwise(actual: Tensor, expected: Tensor) -> None:
    """Same dtype, shape and bits; NaNs equal one another. Names the first difference."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    equal = bits_of(actual) == bits_of(expected)
    equal |= actual.isnan() & expected.isnan()
    if not equal.all():
        first = int((~equal).reshape(-1).nonzero()[0])
        a, e = actual.reshape(-1)[first], expected.reshape(-1)[first]
        raise AssertionError(
            f"{int((~equal).sum())} of {equal.numel()} elements differ, first [{first}]: "
            f"{a.item()} ({int(bits_of(a)):#x}) instead of {e.item()} ({int(bits_of(e)):#x})"
        )


def upload(cuda: SimulatedPasses, tensor: Tensor, shift: int = 0) -> int:
    """The address of a copy that lies `shift` elements after an aligned address."""
    raw = tensor.contiguous().view(torch.uint8).numpy()
    return cuda.memory.upload(raw, shift=shift * tensor.itemsize)
