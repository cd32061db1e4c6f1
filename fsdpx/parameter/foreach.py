"""Operators on lists of tensors: `torch._foreach_*` and the fused optimizers' kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fsdpx.parameter.operands import UNSHARDED_TARGET, is_tensor_list, local_operand
from fsdpx.parameter.spec import Spec
from fsdpx.parameter.table import Handler, family
from fsdpx.parameter.tensor import ShardedTensor, first_spec, refuse, refuse_for

# By name: `_foreach_mm` and reductions exist as well.
_FOREACH = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc
    exp expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal
    round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero
"""
FOREACH = frozenset(_FOREACH.split())
FUSED = frozenset(["_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"])

_PLAIN_ARGUMENTS = frozenset(["state_steps"])


@family
def _lists(func: OpOverload) -> Handler | None:
    name = func._schema.name.removeprefix("aten::")
    if func._overloadname.endswith("out"):
        return None
    if name.removeprefix("_foreach_").rstrip("_") in FOREACH and name.startswith("_foreach_"):
        return foreach_ if func._schema.is_mutable else foreach
    return fused if name in FUSED else None


def foreach(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator that makes new tensors on the lists of pieces; some may be plain."""
    specs = _specs([value for value in args if is_tensor_list(value)])
    local = [_pieces(v, specs, func) if is_tensor_list(v) else v for v in args]
    return [
        part if spec is None else ShardedTensor(part, spec)
        for part, spec in zip(func(*local, **kwargs), specs, strict=True)
    ]


def foreach_(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs an operator that changes the tensors of its first list."""
    specs = _specs(args[:1])
    func(*[_pieces(v, specs, func) if is_tensor_list(v) else v for v in args], **kwargs)


def fused(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs a fused optimizer's kernel on the lists of pieces; step counters are plain."""
    specs = _specs(args[:1])
    names = [argument.name for argument in func._schema.arguments]
    local = [
        _pieces(value, specs, func, zero_dim=True)
        if is_tensor_list(value) and name not in _PLAIN_ARGUMENTS
        else value
        for name, value in zip(names, args, strict=False)
    ]
    for name, value in kwargs.items():
        if is_tensor_list(value) and name not in _PLAIN_ARGUMENTS:
            refuse(func, args, kwargs)
    func(*local, **kwargs)


def _specs(lists: Sequence[Sequence[torch.Tensor]]) -> list[Spec | None]:
    """What decides at each place: the first sharded tensor there."""
    found = _own_specs(lists[0])
    for more in lists[1:]:
        if all(found) or len(more) != len(found):
            break
        found = [a or b for a, b in zip(found, _own_specs(more), strict=True)]
    return found


def _own_specs(tensors: Sequence[Any]) -> list[Spec | None]:
    try:
        return [tensor._spec for tensor in tensors]
    except AttributeError:  # a plain tensor among them
        return [getattr(tensor, "_spec", None) for tensor in tensors]


def _pieces(
    tensors: Sequence[Any],
    specs: Sequence[Spec | None],
    func: OpOverload,
    zero_dim: bool = False,
) -> list[torch.Tensor]:
    if len(tensors) != len(specs):
        raise RuntimeError(
            f"{func}: tensor lists must have the same number of tensors, got {len(specs)} and "
            f"{len(tensors)}"
        )
    owns = _own_specs(tensors)
    if owns == specs:  # by identity, nearly always
        with contextlib.suppress(AttributeError):  # plain ones at the same places
            return [tensor._local for tensor in tensors]
    pieces: list[torch.Tensor] = []
    for tensor, spec, own in zip(tensors, specs, owns, strict=True):
        if own is spec:
            pieces.append(tensor if own is None else tensor._local)
        elif spec is None:
            refuse_for(first_spec((tensor,), {}), func, UNSHARDED_TARGET)
        elif zero_dim and own is None and not tensor.dim():
            pieces.append(spec.piece(tensor))
        else:
            pieces.append(local_operand(tensor, spec, func))
    return pieces
