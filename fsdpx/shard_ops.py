"""Passes over a rank's flat shard: its squared norm, and an AdamW step that also casts.

On CPU they are native; on CUDA they are enqueued on torch's current stream and nothing waits. Both
give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdpx import _C
from fsdpx.dtypes import BFLOAT16, dtype_code
from fsdpx.ops import runs_on, stream_of

_NORMED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_GRADS = (torch.float32, torch.float16, torch.bfloat16)


def norm_and_check(src: Tensor) -> Tensor:
    """The squared norm, and whether all elements are finite, in one pass.

    Args:
        src: Contiguous; float32, float64, float16 or bfloat16; on CPU or CUDA.

    Returns:
        Two elements on `src`'s device, float32 (float64 for float64): the squared norm, added in a
        fixed order, and 1 where some element is infinite or NaN, else 0.

    Raises:
        ValueError: The dtype, layout or device is none of these.
    """
    _check("norm_and_check", "src", src, _NORMED, src)
    wide = torch.float64 if src.dtype == torch.float64 else torch.float32
    code, numel = dtype_code(src.dtype), src.numel()
    if src.device.type == "cpu":
        return torch.tensor(_C.norm_and_check(src.data_ptr(), code, numel), dtype=wide)
    out = torch.empty(2, dtype=wide, device=src.device)
    workspace = torch.empty(_C.NORM_WORKSPACE_BYTES, dtype=torch.uint8, device=src.device)
    with stream_of(src.device) as stream:
        _C.device_norm_and_check(
            src.data_ptr(), code, numel, workspace.data_ptr(), out.data_ptr(), stream
        )
    return out


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    grad_scale: float = 1.0,
    maximize: bool = False,
    copy: Tensor | None = None,
) -> None:
    """One step of `torch.optim.AdamW` in float32, in place, in one pass over the state.

    Args:
        param, exp_avg, exp_avg_sq: float32, contiguous, of one size and device (CPU or CUDA).
        grad: float32, float16 or bfloat16, as many elements.
        step: Number of this update; the first is 1.
        lr, betas, eps, weight_decay, maximize: As in `torch.optim.AdamW`.
        grad_scale: Factor of the gradient (clipping, loss scaling).
        copy: float16 or bfloat16, as many elements: receives the new parameters, which is what the
            next all-gather sends.

    Raises:
        ValueError: A dtype, size, layout or device does not fit, or `step` is below 1.
    """
    for name, tensor in (("param", param), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        _check("adamw", name, tensor, (torch.float32,), param)
    _check("adamw", "grad", grad, _GRADS, param)
    if copy is not None:
        _check("adamw", "copy", copy, (torch.float16, torch.bfloat16), param)
    shard = (
        param.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        grad.data_ptr(),
        dtype_code(grad.dtype),
        0 if copy is None else copy.data_ptr(),
        BFLOAT16 if copy is None else dtype_code(copy.dtype),
        param.numel(),
    )
    options = (lr, betas, eps, weight_decay, step, grad_scale, maximize)
    if param.device.type == "cpu":
        _C.adamw(shard, *options)
    else:
        with stream_of(param.device) as stream:
            _C.device_adamw(shard, *options, stream)
    for tensor in (param, exp_avg, exp_avg_sq, *([] if copy is None else [copy])):
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _check(
    function: str, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], like: Tensor
) -> None:
    def fail(problem: str) -> ValueError:
        return ValueError(f"fsdpx.shard_ops.{function}: {name} {problem}")

    if tensor.dtype not in dtypes:
        raise fail(f"is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise fail("is not contiguous; a shard is a flat piece of memory")
    if tensor.device.type != "cpu" and not runs_on(tensor.device):
        raise fail(f"is on {tensor.device}; CPU, or CUDA in a build with it, can do this")
    if tensor.device != like.device or tensor.numel() != like.numel():
        raise fail(
            f"has {tensor.numel()} elements on {tensor.device}, the parameter {like.numel()} on "
            f"{like.device}"
        )
