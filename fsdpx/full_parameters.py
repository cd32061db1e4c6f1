"""Reading and editing whole parameters outside of forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from .hooks import schedule_of
from .unit import unit_of, units


@contextlib.contextmanager
def full_parameters(model: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Inside, the attributes of the model's modules are whole parameters, and stay gathered.

    Forwards inside gather nothing, so ranks may run different numbers of them. All ranks enter and
    leave alike. `model.parameters()` still yields the sharded parameters.

    Args:
        model: A module that `fully_shard` was called on, or one that holds such modules.
        writeback: Whether in-place edits of whole parameters (under `torch.no_grad()`) last. Each
            rank keeps what it wrote to its own share, so all ranks must write the same.

    Raises:
        ValueError: If the model has no units.
        RuntimeError: If a forward or backward of the model runs.
    """
    found = units(model)
    if not found:
        raise ValueError("full_parameters: the model has no units: call fully_shard first")
    first = next(m for m in model.modules() if unit_of(m) is not None)
    schedules = {unit: schedule_of(first, unit) for unit in found}
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
    try:
        yield
    finally:
        for unit, schedule in schedules.items():
            if writeback:
                unit.write_back()
            schedule.reshard(unit)
