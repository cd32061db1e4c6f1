"""What an operand contributes to this rank's part of an element-wise operation."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from fsdpx.parameter.owned import OwnedTensor, operand_of
from fsdpx.parameter.spec import Spec
from fsdpx.parameter.tensor import ShardedTensor, refuse_for

UNSHARDED_TARGET = (
    "would write a sharded value into an unsharded tensor (optimizer state that was loaded whole? "
    "set_optimizer_state_dict of torch.distributed.checkpoint.state_dict shards it)"
)


def local_operand(value: Any, spec: Spec, func: OpOverload) -> Any:
    """The local counterpart of an operand beside a tensor with `spec`.

    Args:
        value: Sharded alike: its piece. Plain without dimensions, or no tensor: itself. Plain of
            the global shape or broadcastable to it: its slice.
        spec: Of the tensor that decides.
        func: For the message.

    Raises:
        RuntimeError: For anything else, naming both.
    """
    if isinstance(value, ShardedTensor):
        other = value._spec
        if other is spec or other.same_sharding(spec):
            return value._local
        mine, theirs = (f"{s.name!r} {tuple(s.shape)} [{s.begin}, {s.end})" for s in (spec, other))
        refuse_for(spec, func, f"has operands that are sharded differently, {mine} and {theirs}")
    if isinstance(value, OwnedTensor):
        return operand_of(value, spec, func)
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    try:
        return spec.piece(value)
    except RuntimeError:
        shape = tuple(value.shape)
        refuse_for(spec, func, f"has an operand of shape {shape}, which does not broadcast to it")


def is_tensor_list(values: Any) -> bool:
    """Whether an argument is a list of tensors."""
    return isinstance(values, list | tuple) and bool(values) and isinstance(values[0], torch.Tensor)
