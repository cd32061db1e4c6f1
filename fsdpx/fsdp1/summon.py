"""FSDP1's `summon_full_params`: iteration over a model, too, gives whole parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdpx.full_parameters import check_options, copied, hold, is_copied
from fsdpx.hooks import make_schedules
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
    found = [unit for unit in found if not is_copied(unit)]
    exact = {unit: schedules[unit] for unit in found if _gathers_as_is(unit, offload_to_cpu)}
    others = [unit for unit in found if unit not in exact]
    with contextlib.ExitStack() as stack:
        readable = stack.enter_context(hold(exact, writeback, rank0_only, with_grads))
        for unit in readable:
            _show(unit, [managed.leaf for managed in unit.parameters])
            stack.callback(_show, unit, None)
        copies = copied(others, _show, writeback, rank0_only, with_grads, offload_to_cpu)
        stack.enter_context(copies)
        yield


def _gathers_as_is(unit: Unit, offload: bool) -> bool:
    """Whether gathered parameters have the precision of the sharded ones, in the memory wanted."""
    if offload and unit.device.type != "cpu":
        return False
    return all(m.leaf.dtype == m.sharded.dtype for m in unit.parameters)


def _show(unit: Unit, parameters: Sequence[torch.Tensor] | None) -> None:
    for number, managed in enumerate(unit.parameters):
        shown = managed.sharded if parameters is None else parameters[number]
        for module, name in managed.owners:
            held: Any = module._parameters
            dict.__setitem__(held, name, shown)
