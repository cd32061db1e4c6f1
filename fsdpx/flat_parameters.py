"""A few large tensors for the optimizer in place of hundreds of small ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as utility_types

from .layout import Entry, Ranges, UnitLayout
from .parameter import ShardedTensor, Spec, WaitingGradient
from .unit import Unit, units


class FlatParameter(ShardedTensor):
    """Parameters of one unit that lie side by side in its flat shard, as one 1-D parameter.

    It views their memory, and its gradient is theirs: nothing is copied. It works element by
    element only; what optimizers keep for it is a `ShardedTensor` alike.
    """

    _unit: Unit
    _layout: UnitLayout  # the unit's when this was made
    _segment: int
    _flat: torch.Tensor  # the flat shard
    _start: int  # there
    _members: dict[int, str]  # index in the unit -> name in the model

    @staticmethod
    def make(unit: Unit, segment: int, entries: Sequence[Entry], names: Sequence[str]) -> Any:
        """The given neighbours of a segment as one parameter."""
        rank, share = unit.group.rank, unit.layout.segments[segment].shard_numel
        begin, end = entries[0].offset, entries[-1].offset + entries[-1].numel
        ranges = Ranges(begin, end - begin, share, unit.group.size)
        title = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        spec = Spec(title, (end - begin,), ranges, rank, unit.group.process_group)
        start = min(max(begin - rank * share, 0), share)
        flat = unit.shards.flat[segment]
        made: Any = ShardedTensor.__new__(
            FlatParameter, flat[start : start + spec.end - spec.begin], spec, requires_grad=True
        )
        made._is_param = True
        made._unit, made._layout = unit, unit.layout
        made._segment, made._flat, made._start = segment, flat, start
        made._members = dict(zip((entry.index for entry in entries), names, strict=True))
        return made

    def split_by_name(self, value: ShardedTensor) -> dict[str, ShardedTensor]:
        """Views of something alike (optimizer state, say) by the names of the parameters."""
        unit, found = self._unit, {}
        for index, name in self._members.items():
            start, length = unit.layout.local_slice(index, unit.group.rank)
            at = start - self._start if length else 0
            piece = value.to_local()[at : at + length]
            found[name] = ShardedTensor(piece, unit.parameters[index].sharded._spec)
        return found

    @property
    def grad(self) -> ShardedTensor | None:
        """The gradients of all members, with zeros where some have none; None if no one has.
        Setting None drops them.
        """
        self._follow()
        members = [self._unit.parameters[index].sharded.grad for index in self._members]
        if all(gradient is None for gradient in members):
            return None
        waiting = [gradient for gradient in members if isinstance(gradient, WaitingGradient)]
        if waiting:
            made = WaitingGradient.make(self)
            made.members = waiting
            return made
        length = self._spec.end - self._spec.begin
        flat = self._flat_gradient()[self._start : self._start + length]
        return ShardedTensor(flat, self._spec)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise RuntimeError(
                f"flat_parameters: the gradient of '{self._spec.name}' is its members': set .grad "
                "of those"
            )
        for index in self._members:
            self._unit.parameters[index].sharded.grad = None

    def check_before_step(self) -> None:
        """Raises if only some members have a gradient: a step would take the others' for zeros."""
        missing = [
            name
            for index, name in self._members.items()
            if self._unit.parameters[index].sharded.grad is None
        ]
        if missing and len(missing) < len(self._members):
            raise RuntimeError(
                f"flat_parameters: parameter '{missing[0]}' has no gradient (unused or frozen), "
                "though others in the same flat tensor have: put it into a group of its own, or "
                "give the optimizer model.parameters()"
            )

    @torch.no_grad()
    def _flat_gradient(self) -> torch.Tensor:
        unit = self._unit
        gradients = unit.listener.gradients[unit].buffers if unit.listener else {}
        if self._segment not in gradients:
            raise RuntimeError(
                f"flat_parameters: the gradients of '{self._spec.name}' must come from a backward "
                "of the model"
            )
        buffer = gradients[self._segment]
        for index in self._members:
            parameter, view = unit.parameters[index].sharded, buffer.gradients[index]
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:  # the user's own
                view.copy_(parameter.grad.detach())
                parameter.grad = view
        return buffer.flat  # type: ignore[no-any-return]

    def _follow(self) -> None:
        """Takes the memory that the unit has now: `to_empty()` moves it.

        Raises:
            RuntimeError: The unit has other dtypes now.
        """
        if self._unit.layout is not self._layout or self._unit.shards.first_moved() is not None:
            raise RuntimeError(
                f"flat_parameters: '{self._spec.name}' is of the model before it was converted or "
                "moved (to(), half(), to_empty()): run a forward, call flat_parameters again, and "
                "give its result to a new optimizer"
            )
        flat = self._unit.shards.flat[self._segment]
        if flat is not self._flat:
            length = self._spec.end - self._spec.begin
            self._flat, self._local = flat, flat[self._start : self._start + length]


for _types in (optimizer_types, utility_types):
    _types.append(FlatParameter)  # type: ignore[arg-type]  # `type(p) in types`, so by name


Group = dict[str, Any]


@overload
def flat_parameters(model: nn.Module, groups: None = None) -> list[Any]: ...
@overload
def flat_parameters(model: nn.Module, groups: Iterable[Group]) -> list[Group]: ...


def flat_parameters(model: nn.Module, groups: Iterable[Group] | None = None) -> list[Any]:
    """What to give an optimizer that works element by element, in place of `model.parameters()`.

    Parameters of a unit that lie side by side, train, and are in the same group become one 1-D
    tensor over the same memory. Updates, gradients, `zero_grad` and clipping act as for the
    parameters themselves, in a fraction of the host time. Frozen and unsharded parameters stay as
    they are.

    Args:
        model: After `fully_shard`.
        groups: Parameter groups as `torch.optim` takes them. None: one of all parameters.

    Returns:
        Parameters, or groups with the same options.

    Raises:
        ValueError: If a parameter is in two groups, or the model has no units.

        opt = torch.optim.AdamW(fsdpx.flat_parameters(model, [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]))
    """
    if not units(model):
        raise ValueError("flat_parameters: the model has no units: call fully_shard first")
    given: list[Group] = [dict(g) for g in groups or [{"params": model.parameters()}]]
    for group in given:
        group["params"] = list(group["params"])
    names = {id(p): name for name, p in model.named_parameters()}
    member_of = _membership(given, names)
    flats = list(_runs(model, member_of, names))
    for number, group in enumerate(given):
        mine = [flat for at, flat in flats if at == number]
        covered = {id(flat._unit.parameters[i].sharded) for flat in mine for i in flat._members}
        group["params"] = [*mine, *(p for p in group["params"] if id(p) not in covered)]
    return given if groups is not None else list(given[0]["params"])


def _membership(groups: Sequence[Group], names: dict[int, str]) -> dict[int, int]:
    """The group's number of every parameter, by id."""
    member_of: dict[int, int] = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if member_of.setdefault(id(parameter), number) != number:
                name = names.get(id(parameter), "?")
                raise ValueError(f"flat_parameters: parameter '{name}' is in two groups")
    return member_of


def _runs(
    model: nn.Module, member_of: dict[int, int], names: dict[int, str]
) -> Iterator[tuple[int, FlatParameter]]:
    """Neighbours of the same group, with the number of that group."""
    for unit in units(model):
        for number, segment in enumerate(unit.layout.segments):
            run: list[Entry] = []
            group: int | None = None
            for entry in (*segment.entries, None):
                parameter = unit.parameters[entry.index].sharded if entry else None
                trains = parameter is not None and parameter.requires_grad
                now = member_of.get(id(parameter)) if trains else None
                if run and now != group:
                    named = [names[id(unit.parameters[e.index].sharded)] for e in run]
                    yield group or 0, FlatParameter.make(unit, number, run, named)
                    run = []
                group = now
                if entry is not None and now is not None:
                    run.append(entry)
