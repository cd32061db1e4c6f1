"""FSDP1's mixed precision beyond parameters: inputs of the outermost wrapper, buffers, modules to
leave out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fsdpx.hooks import cast_floating


def compute_in_full_precision(module: nn.Module) -> None:
    """Casts a module's floating inputs to float32, and its outputs back to what the first input
    was.
    """
    if "_fsdpx_input_dtypes" in module.__dict__:
        return
    dtypes: list[torch.dtype | None] = []  # of the running calls, innermost last
    module.__dict__["_fsdpx_input_dtypes"] = dtypes

    def widen(module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        floating = (
            t.dtype for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()
        )
        dtypes.append(next(floating, None))
        return cast_floating((args, kwargs), torch.float32)

    def narrow(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        dtype = dtypes.pop() if dtypes else None
        return output if dtype is None else cast_floating(output, dtype)

    module.register_forward_pre_hook(widen, with_kwargs=True)
    module.register_forward_hook(narrow, with_kwargs=True, always_call=False)


def cast_buffers(
    modules: set[nn.Module], dtype: torch.dtype | None
) -> dict[tuple[nn.Module, str], torch.dtype]:
    """Casts the floating buffers of `modules`.

    Returns:
        The dtypes that they had, by module and name; state dicts have these.
    """
    before = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            if dtype is not None and buffer is not None and buffer.is_floating_point():
                before[module, name] = buffer.dtype
                module._buffers[name] = buffer.to(dtype)
    return before
