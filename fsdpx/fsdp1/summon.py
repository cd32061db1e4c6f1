"""FSDP1's `summon_full_params`: iteration over a model, too, gives whole parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdpx.full_parameters import around_forwards, check_options, hold
from fsdpx.hooks import make_schedules
from fsdpx.schedule import AroundForwards
from fsdpx.shards import Managed, take_edits
from fsdpx.unit import Unit, unit_of


@contextlib.contextmanager
def summon(
    module: nn.Module,
    recurse: bool,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Iterator[None]:
    """See `FullyShardedDataParallel.summon_full_params`."""
    check_options("summon_full_params", writeback, rank0_only)
    schedules = make_schedules(module)
    found = [unit for unit in schedules if recurse or unit is unit_of(module)]
    found = [unit for unit in found if not _is_summoned(unit)]
    exact = {unit: schedules[unit] for unit in found if _gathers_as_is(unit, offload_to_cpu)}
    others = [unit for unit in found if unit not in exact]
    with contextlib.ExitStack() as stack:
        readable = stack.enter_context(hold(exact, writeback, rank0_only, with_grads))
        for unit in readable:
            _show(unit, [managed.leaf for managed in unit.parameters])
            stack.callback(_show_shards, unit)
        stack.enter_context(_copies(others, writeback, rank0_only, with_grads, offload_to_cpu))
        yield


def _is_summoned(unit: Unit) -> bool:
    """Whether a context around shows the unit's parameters already."""
    return any(_held_by(managed) is not managed.sharded for managed in unit.parameters)


def _held_by(managed: Managed) -> Any:
    module, name = managed.owners[0]
    return dict.get(module.__dict__["_parameters"], name)


def _gathers_as_is(unit: Unit, offload: bool) -> bool:
    """Whether gathered parameters have the precision of the sharded ones, in the memory wanted."""
    if offload and unit.device.type != "cpu":
        return False
    return all(m.leaf.dtype == m.sharded.dtype for m in unit.parameters)


def _show(unit: Unit, parameters: list[torch.Tensor]) -> None:
    """Makes these what the unit's modules have as parameters."""
    for managed, parameter in zip(unit.parameters, parameters, strict=True):
        for module, name in managed.owners:
            held: Any = module._parameters
            dict.__setitem__(held, name, parameter)


def _show_shards(unit: Unit) -> None:
    _show(unit, [managed.sharded for managed in unit.parameters])


@contextlib.contextmanager
def _copies(
    units: list[Unit], writeback: bool, rank0_only: bool, with_grads: bool, offload: bool
) -> Iterator[None]:
    """Shows copies of units that gather in a lower precision, or elsewhere.

    Forwards take over what was edited before, and gather as ever.
    """
    whole = {unit: [_copy(m, with_grads, offload) for m in unit.parameters] for unit in units}
    if rank0_only:
        whole = {unit: copies for unit, copies in whole.items() if unit.group.is_first}

    def settle(called: Unit) -> None:
        if with_grads or not writeback:
            _check_unedited(called, whole, with_grads)
        else:
            _take_all(whole, with_grads=False)
        hide()

    def hide() -> None:
        for unit in whole:
            _show_shards(unit)

    def show() -> None:
        for unit, copies in whole.items():
            _show(unit, list(copies))

    show()
    try:
        with around_forwards(units, [AroundForwards(settle, show)]):
            yield
    finally:
        hide()
        if writeback:
            _take_all(whole, with_grads)


def _copy(managed: Managed, with_grads: bool, offload: bool) -> nn.Parameter:
    def whole(sharded: Any) -> torch.Tensor:
        full: torch.Tensor = sharded.full_tensor()
        return full.cpu() if offload else full

    sharded = managed.sharded
    copy = nn.Parameter(whole(sharded), requires_grad=sharded.requires_grad)
    if with_grads and sharded.grad is not None:
        copy.grad = whole(sharded.grad)
    return copy


def _check_unedited(called: Unit, whole: dict[Unit, list[nn.Parameter]], with_grads: bool) -> None:
    why = "with_grads=True"
    if not with_grads:
        pairs = [(m.sharded, copy) for u, c in whole.items() for m, copy in _pairs(u, c)]
        same = all(torch.equal(s._spec.piece(c).to(s.device), s.to_local()) for s, c in pairs)
        # Agreed on: this rank may hold nothing of what was edited.
        if not called.on_any_rank([not same], called.comm)[0]:
            return
        why = "edits that writeback=False throws away"
    raise RuntimeError(
        f"fsdpx: unit '{called.name}': there is no forward inside summon_full_params with {why}: "
        "leave it first"
    )


def _pairs(unit: Unit, copies: list[nn.Parameter]) -> list[tuple[Managed, nn.Parameter]]:
    return list(zip(unit.parameters, copies, strict=True))


def _take_all(whole: dict[Unit, list[nn.Parameter]], with_grads: bool) -> None:
    for unit, copies in whole.items():
        for managed, copy in _pairs(unit, copies):
            _take(managed.sharded, copy, with_grads)


@torch.no_grad()
def _take(sharded: Any, copy: nn.Parameter, with_grads: bool) -> None:
    take_edits(copy, sharded)
    if with_grads and copy.grad is None:
        sharded.grad = None
    elif with_grads and sharded.grad is not None:
        take_edits(copy.grad, sharded.grad)  # type: ignore[arg-type]
