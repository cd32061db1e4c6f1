"""Reading and editing whole parameters outside of forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from .hooks import make_schedules
from .parameter import ShardedTensor
from .schedule import AroundForwards, Schedule
from .shards import Managed, take_edits
from .unit import Unit, units


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
        offload_to_cpu: On CPU ranks whole parameters are in CPU memory anyway; refused on others.
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
    if offload_to_cpu and any(unit.device.type != "cpu" for unit in found):
        raise NotImplementedError(
            "full_parameters: offload_to_cpu=True is not supported on GPUs: read "
            "parameter.full_tensor().cpu() one by one, or use summon_full_params"
        )
    schedules = make_schedules(model)
    with hold(schedules, writeback, rank0_only, with_grads):
        yield


def check_options(caller: str, writeback: bool, rank0_only: bool) -> None:
    if writeback and rank0_only:
        raise ValueError(
            f"{caller}: rank0_only=True needs writeback=False: other ranks could not take over "
            "what the first one writes"
        )


@contextlib.contextmanager
def hold(
    schedules: Mapping[Unit, Schedule], writeback: bool, rank0_only: bool, with_grads: bool
) -> Iterator[list[Unit]]:
    """Keeps units gathered; yields those whose whole parameters this rank can read.

    Units that a context around this one holds are left to it.
    """
    schedules = {unit: schedule for unit, schedule in schedules.items() if not unit.held}
    for unit, schedule in schedules.items():
        if not schedule.is_idle:
            raise RuntimeError(
                f"full_parameters: a forward or backward of unit '{unit.name}' runs; "
                "use it between steps"
            )
        if with_grads:
            schedule.gradients[unit].check_none_waits()
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
    refusal = AroundForwards(_refuse_forward, lambda: None)
    try:
        with around_forwards(schedules, [refusal] if with_grads else []):
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


def _refuse_forward(unit: Unit) -> None:
    raise RuntimeError(
        f"fsdpx: unit '{unit.name}': there is no forward inside full_parameters or "
        "summon_full_params with with_grads=True: leave it first"
    )


@contextlib.contextmanager
def around_forwards(units: Iterable[Unit], actions: list[AroundForwards]) -> Iterator[None]:
    """Lets outermost forwards of these units' models come with actions."""
    units = list(units)
    for schedule in _schedules(units):
        schedule.around_forwards += actions
    try:
        yield
    finally:
        for schedule in _schedules(units):  # an outer module may have been called first inside
            schedule.around_forwards = [a for a in schedule.around_forwards if a not in actions]


def _schedules(units: Iterable[Unit]) -> list[Schedule]:
    return list(dict.fromkeys(unit.listener for unit in units))


def _with_gradients(unit: Unit) -> list[tuple[Managed, ShardedTensor]]:
    found = [(managed, managed.sharded.grad) for managed in unit.parameters]
    return [(managed, grad) for managed, grad in found if isinstance(grad, ShardedTensor)]


def _show_gradients(unit: Unit) -> None:
    for managed, gradient in _with_gradients(unit):
        managed.leaf.grad = gradient.full_tensor().to(managed.leaf.dtype)


def _hide_gradients(unit: Unit, writeback: bool) -> None:
    with torch.no_grad():
        for managed, gradient in _with_gradients(unit):
            full = managed.leaf.grad
            if writeback and full is not None:
                take_edits(full, gradient)
            elif writeback:
                managed.sharded.grad = None
    for managed in unit.parameters:
        managed.leaf.grad = None
