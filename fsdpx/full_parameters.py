"""Reading and editing whole parameters outside of forward."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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
        offload_to_cpu: Whether whole parameters live in CPU memory, in their own dtypes, and take
            none on the GPU; on CPU ranks they are there anyway. A forward inside gathers as ever,
            so ranks run the same ones.
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
    schedules = make_schedules(model)
    elsewhere = [unit for unit in found if offload_to_cpu and unit.device.type != "cpu"]
    here = {unit: schedule for unit, schedule in schedules.items() if unit not in elsewhere}
    copies = copied(elsewhere, _show_as_attributes, writeback, rank0_only, with_grads, offload=True)
    with hold(here, writeback, rank0_only, with_grads), copies:
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
    schedules = {unit: s for unit, s in schedules.items() if not unit.held and not is_copied(unit)}
    _check_idle(schedules)
    if with_grads:
        for unit, schedule in schedules.items():
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


def _check_idle(units: Iterable[Unit]) -> None:
    for unit in units:
        if not unit.listener.is_idle:
            raise RuntimeError(
                f"full_parameters: a forward or backward of unit '{unit.name}' runs; "
                "use it between steps"
            )


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
        managed.leaf.grad = gradient.full_tensor().to(managed.leaf.device, managed.leaf.dtype)


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


# ---- Copies: whole parameters in another precision than gathered ones, or elsewhere

Show = Callable[[Unit, Sequence[torch.Tensor] | None], None]
"""Makes these what a unit's modules have for parameters; None: the sharded ones again."""


def _show_as_attributes(unit: Unit, parameters: Sequence[torch.Tensor] | None) -> None:
    for number, managed in enumerate(unit.parameters):
        for module, name in managed.owners:
            if parameters is not None:
                module.__dict__[name] = parameters[number]
            else:
                module.__dict__.pop(name, None)


def is_copied(unit: Unit) -> bool:
    """Whether a context around shows copies of the unit's parameters."""
    for managed in unit.parameters:
        module, name = managed.owners[0]
        shown = module.__dict__.get(name, managed.leaf)
        held = dict.get(module.__dict__["_parameters"], name)
        if shown is not managed.leaf or held is not managed.sharded:
            return True
    return False


@contextlib.contextmanager
def copied(
    units: Iterable[Unit],
    show: Show,
    writeback: bool,
    rank0_only: bool,
    with_grads: bool,
    offload: bool,
) -> Iterator[None]:
    """Shows copies of whole parameters; those in CPU memory if `offload`. Collective.

    Forwards take over what was edited before, and gather as ever. Units that a context around this
    one shows are left to it.
    """
    units = [unit for unit in units if not unit.held and not is_copied(unit)]
    _check_idle(units)
    whole: dict[Unit, list[nn.Parameter]] = {}
    for unit in units:
        place = torch.device("cpu") if offload else unit.device
        copies = (_copy(managed, with_grads, place) for managed in unit.parameters)
        if rank0_only and not unit.group.is_first:
            collections.deque(copies, maxlen=0)
        else:
            whole[unit] = list(copies)

    def settle(called: Unit) -> None:
        if with_grads or not writeback:
            _check_unedited(called, whole, with_grads)
        else:
            _take_all(whole, with_grads=False)
        hide()

    def hide() -> None:
        for unit in whole:
            show(unit, None)

    def show_all() -> None:
        for unit, copies in whole.items():
            show(unit, copies)

    show_all()
    try:
        with around_forwards(units, [AroundForwards(settle, show_all)]):
            yield
    finally:
        hide()
        if writeback:
            _take_all(whole, with_grads)


def _copy(managed: Managed, with_grads: bool, device: torch.device) -> nn.Parameter:
    sharded: Any = managed.sharded
    copy = nn.Parameter(sharded.full_tensor().to(device), requires_grad=sharded.requires_grad)
    if with_grads and sharded.grad is not None:
        copy.grad = sharded.grad.full_tensor().to(device)
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
