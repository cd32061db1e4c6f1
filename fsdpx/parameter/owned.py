"""Tensors that one rank has: what is computed from a parameter that is never cut.

With ``granularity="parameter"`` a parameter lies whole on one rank, its owner. Operators that do
not work element by element (a matrix product, a transpose, the norms of rows) run there, on
ordinary tensors. The other ranks follow with shapes alone (meta tensors), so all ranks run the same
program, and nothing is communicated until a number is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fsdpx.layout import Ranges
from fsdpx.parameter import collectives
from fsdpx.parameter.spec import Spec
from fsdpx.parameter.tensor import ShardedTensor, refuse_for

aten = torch.ops.aten

_TO_PYTHON = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)


class OwnedTensor(torch.Tensor):
    """A value on its owner, a shape elsewhere; made by operators only.

    Attributes:
        _value: An ordinary tensor on the owner, a meta tensor elsewhere.
        _source: Spec of the parameter (or gradient) that it was computed from.
    """

    _value: torch.Tensor
    _source: Spec

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[OwnedTensor], value: torch.Tensor, source: Spec, device: torch.device
    ) -> OwnedTensor:
        """Makes one; `device` is where the owner has it."""
        made: OwnedTensor = torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=device
        )
        made._value, made._source = value, source
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: Any = None
    ) -> str:
        owner = f"computed from {self._source.name!r} by rank {self._source.owner}"
        return f"OwnedTensor({owner}, shape={tuple(self.shape)}, dtype={self.dtype})"


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the owner of its operands.

    Raises:
        RuntimeError: If they have no common owner, or the result would be lost or differ by rank.
    """
    if func._schema.name.startswith("aten::_foreach_") and len(args[0]) > 1:
        return _one_by_one(func, args, kwargs)
    source, device = _common_source(func, args, kwargs)
    _check(func, source, args, kwargs)
    here = source.rank == source.owner
    if not here and "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    given: dict[int, Any] = {}

    def operand(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        local = _local(value, here)
        given[id(local)] = value
        return local

    local_args, local_kwargs = pytree.tree_map(operand, (args, kwargs))
    if func in _TO_PYTHON:
        number = func(*local_args, **local_kwargs) if here else None
        return collectives.broadcast_number(number, source, device, args[0].dtype)
    result = func(*local_args, **local_kwargs)

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return given[id(value)] if id(value) in given else OwnedTensor(value, source, device)

    return pytree.tree_map(wrap, result)


def new(
    func: OpOverload, source: ShardedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ShardedTensor:
    """`new_zeros` and the like of a gradient: state of another shape, with the same owner."""
    spec = source._spec
    shape = torch.Size(args[0])
    numel, here = shape.numel(), spec.rank == spec.owner
    ranges = Ranges(spec.owner * numel, numel, numel, len(spec.ranges))
    local = func(source._local, (numel if here else 0,), *args[1:], **kwargs)
    return ShardedTensor(local, Spec(spec.name, shape, ranges, spec.rank, spec.group, whole=True))


def operand_of(value: OwnedTensor, spec: Spec, func: OpOverload) -> torch.Tensor:
    """The counterpart of an owned operand beside a piece with `spec`, of which it is the owner's.

    Returns:
        On the owner its elements in order (without dimensions if it has none), elsewhere nothing.
    """
    if not spec.whole or not _same_owner(spec, value._source):
        refuse_for(spec, func, f"has an operand that only rank {value._source.owner} has")
    here = spec.rank == spec.owner
    if not value.dim():
        return value._value if here else torch.ones((), dtype=value.dtype, device=value.device)
    if here:
        return value._value.expand(spec.shape).reshape(-1)
    return torch.empty(0, dtype=value.dtype, device=value.device)


def _same_owner(one: Spec, other: Spec) -> bool:
    return one.owner == other.owner and one.group == other.group


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]


def _common_source(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Spec, torch.device]:
    found = []
    for value in _tensors(args, kwargs):
        if isinstance(value, ShardedTensor):
            if not value._spec.whole:
                refuse_for(value._spec, func, "does not work element by element")
            found.append((value._spec, value.device))
        elif isinstance(value, OwnedTensor):
            found.append((value._source, value.device))
    source, device = found[0]
    for other, _ in found[1:]:
        if not _same_owner(source, other):
            refuse_for(
                source,
                func,
                f"has operands that lie on different ranks ({source.name!r} on {source.owner}, "
                f"{other.name!r} on {other.owner})",
            )
    return source, device


def _check(func: OpOverload, source: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.Tag.nondeterministic_seeded in func.tags:
        refuse_for(source, func, "would draw random numbers on one rank only")
    if torch.is_grad_enabled() and any(value.requires_grad for value in _tensors(args, kwargs)):
        refuse_for(
            source,
            func,
            "of a parameter that requires grad would silently get no gradient; for a value to look "
            "at, call it under torch.no_grad() or on .detach()",
        )
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            written = args[number] if number < len(args) else kwargs.get(argument.name)
            for target in _tensors((written,), {}):
                if not isinstance(target, OwnedTensor | ShardedTensor):
                    refuse_for(source, func, "would write what one rank has into a plain tensor")


def _local(value: torch.Tensor, here: bool) -> torch.Tensor:
    if isinstance(value, OwnedTensor):
        return value._value
    if isinstance(value, ShardedTensor):
        if here:
            return value._local.view(value._spec.shape)
        return torch.empty(value._spec.shape, dtype=value.dtype, device="meta")
    return value if here else value.to("meta")


def _one_by_one(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator on lists whose places may have different owners."""
    count = len(args[0])

    def at(place: int, value: Any) -> Any:
        listed = isinstance(value, list | tuple) and len(value) == count
        return [value[place]] if listed else value

    parts = []
    for place in range(count):
        one = [at(place, value) for value in args]
        parts.append(func(*one, **{key: at(place, value) for key, value in kwargs.items()}))
    return None if func._schema.is_mutable else [part[0] for part in parts]
