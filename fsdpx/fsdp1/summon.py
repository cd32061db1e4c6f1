"""FSDP1's `summon_full_params`: iteration over a model, too, gives whole parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdpx.full_parameters import check_options, hold, refuse_forward
from fsdpx.shards import Managed, take_edits
from fsdpx.unit import Unit, unit_of, units

NAME = "summon_full_params"


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
    check_options(NAME, writeback, rank0_only)
    own = unit_of(module)
    found = units(module) if recurse else [own] if own is not None else []
    found = [unit for unit in found if not unit.held and not unit.before_forward]
    if not found:
        yield
        return
    root = next(m for m in module.modules() if unit_of(m) is not None)
    exact = [unit for unit in found if _gathers_as_is(unit)]
    with contextlib.ExitStack() as stack:
        readable = stack.enter_context(hold(root, exact, writeback, rank0_only, with_grads))
        for unit in readable:
            _show(unit, [managed.leaf for managed in unit.parameters])
            stack.callback(_show, unit, [managed.sharded for managed in unit.parameters])
        for unit in found:
            if unit not in exact:
                stack.enter_context(_copies(unit, writeback, rank0_only, with_grads))
        yield


def _gathers_as_is(unit: Unit) -> bool:
    """Whether gathered parameters have the precision of the sharded ones."""
    return all(m.leaf.dtype == m.sharded.dtype for m in unit.parameters)


def _show(unit: Unit, parameters: list[torch.Tensor]) -> None:
    """Makes these what the unit's modules have as parameters."""
    for managed, parameter in zip(unit.parameters, parameters, strict=True):
        for module, name in managed.owners:
            held: Any = module._parameters
            dict.__setitem__(held, name, parameter)


@contextlib.contextmanager
def _copies(unit: Unit, writeback: bool, rank0_only: bool, with_grads: bool) -> Iterator[None]:
    """Shows copies in full precision of a unit that gathers in a lower one."""
    drop = rank0_only and not unit.group.is_first
    copies: list[torch.Tensor] = []
    for managed in unit.parameters:
        copy = _copy(managed, with_grads)
        copies.append(managed.sharded if drop else copy)
    pairs = [] if drop else list(zip(unit.parameters, copies, strict=True))

    def settle() -> None:
        for managed, copy in pairs:
            if writeback:
                _take(managed, copy, with_grads)
            elif not torch.equal(managed.sharded._spec.piece(copy), managed.sharded.to_local()):
                refuse_forward(unit, "edits that writeback=False throws away")

    forbid = functools.partial(refuse_forward, unit, "with_grads=True")
    unit.before_forward = forbid if with_grads else settle
    _show(unit, copies)
    try:
        yield
    finally:
        unit.before_forward = None
        _show(unit, [managed.sharded for managed in unit.parameters])
        if writeback:
            settle()


def _copy(managed: Managed, with_grads: bool) -> nn.Parameter:
    sharded = managed.sharded
    copy = nn.Parameter(sharded.full_tensor(), requires_grad=sharded.requires_grad)
    if with_grads and sharded.grad is not None:
        copy.grad = sharded.grad.full_tensor()  # type: ignore[attr-defined]
    return copy


def _take(managed: Managed, copy: torch.Tensor, with_grads: bool) -> None:
    sharded = managed.sharded
    with torch.no_grad():
        take_edits(copy, sharded)
        if with_grads and copy.grad is None:
            sharded.grad = None
        elif with_grads and sharded.grad is not None:
            take_edits(copy.grad, sharded.grad)  # type: ignore[arg-type]
