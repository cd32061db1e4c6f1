"""Reading and editing whole parameters outside of forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from .hooks import schedule_of
from .parameter import ShardedTensor
from .shards import Managed, take_edits
from .unit import Unit, unit_of, units


@contextlib.contextmanager
def full_parameters(
    model: nn.Module,
    *,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Inside, the attributes of the model's modules are whole parameters, and stay gathered.

    Forwards inside gather nothing, so ranks may run different numbers of them. All ranks enter and
    leave alike. `model.parameters()` still yields the sharded parameters.

    Args:
        model: A module that `fully_shard` was called on, or one that holds such modules.
        writeback: Whether edits of whole parameters (under `torch.no_grad()`) last. Each rank keeps
            what it wrote to its own share, so all ranks must write the same.
        rank0_only: Whether only the first rank has whole parameters inside; it cannot run a forward
            alone, and nothing is written back.
        offload_to_cpu: Whole parameters live in CPU memory; on CPU ranks they do anyway.
        with_grads: Whether the whole parameters have whole gradients, which may be edited too.
            There is no forward inside then.

    Raises:
        ValueError: If the model has no units, or both `writeback` and `rank0_only` are given.
        RuntimeError: If a forward or backward of the model runs.
    """
    found = units(model)
    if not found:
        raise ValueError("full_parameters: the model has no units: call fully_shard first")
    check_options("full_parameters", writeback, rank0_only)
    first = next(m for m in model.modules() if unit_of(m) is not None)
    with hold(first, found, writeback, rank0_only, with_grads):
        yield


def check_options(caller: str, writeback: bool, rank0_only: bool) -> None:
    if writeback and rank0_only:
        raise ValueError(
            f"{caller}: rank0_only=True needs writeback=False: other ranks could not take over "
            "what the first one writes"
        )


@contextlib.contextmanager
def hold(
    root: nn.Module, found: Sequence[Unit], writeback: bool, rank0_only: bool, with_grads: bool
) -> Iterator[list[Unit]]:
    """Keeps units gathered; yields those whose whole parameters this rank can read.

    Units that a context around this one holds are left to it.
    """
    schedules = {unit: schedule_of(root, unit) for unit in found if not unit.held}
    for unit, schedule in schedules.items():
        if not schedule.is_idle:
            raise RuntimeError(
                f"full_parameters: a forward or backward of unit '{unit.name}' runs; "
                "use it between steps"
            )
    for unit, schedule in schedules.items():
        schedule.unshard(unit)
        unit.held = True
    for unit, schedule in schedules.items():
        schedule.finish_unshard(unit)
        if with_grads:
            _show_gradients(unit)
        if rank0_only and not unit.group.is_first:
            _hide_gradients(unit, writeback=False)
            schedule.reshard(unit)
    mine = [unit for unit in schedules if unit.held]
    # What they are views of, should `.data` be assigned.
    views = {m.leaf: m.leaf.detach() for unit in mine for m in unit.parameters}
    try:
        yield mine
    finally:
        for unit in mine:
            if writeback:
                unit.write_back()
            if with_grads:
                _hide_gradients(unit, writeback)
            for managed in unit.parameters:
                if managed.leaf.data_ptr() != views[managed.leaf].data_ptr():
                    managed.leaf.data = views[managed.leaf]
            schedules[unit].reshard(unit)


def refuse_forward(unit: Unit, where: str) -> None:
    raise RuntimeError(
        f"fsdpx: unit '{unit.name}': there is no forward inside full_parameters or "
        f"summon_full_params with {where}: leave it first"
    )


def _with_gradients(unit: Unit) -> list[tuple[Managed, ShardedTensor]]:
    found = [(managed, managed.sharded.grad) for managed in unit.parameters]
    return [(managed, grad) for managed, grad in found if isinstance(grad, ShardedTensor)]


def _show_gradients(unit: Unit) -> None:
    unit.before_forward = functools.partial(refuse_forward, unit, "with_grads=True")
    for managed, gradient in _with_gradients(unit):
        managed.leaf.grad = gradient.full_tensor().to(managed.leaf.dtype)


def _hide_gradients(unit: Unit, writeback: bool) -> None:
    unit.before_forward = None
    with torch.no_grad():
        for managed, gradient in _with_gradients(unit):
            full = managed.leaf.grad
            if writeback and full is not None:
                take_edits(full, gradient)
            elif writeback:
                managed.sharded.grad = None
    for managed in unit.parameters:
        managed.leaf.grad = None
