"""What happens when a sharded module is called."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import _C
from .changes import settle_changes
from .schedule import Schedule
from .torch_private import is_traced, leave_to_eager, outside_of_transforms
from .unit import Unit, unit_of, units

# ---- Calls


def run_forward(
    unit: Unit, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Calls a module's forward with its unit gathered, inputs and outputs cast by the policy."""
    schedule = unit.listener or make_schedule(module)
    if schedule.is_idle:
        _refuse_tracing(module)
        regrown = settle_changes(schedule.units) and unit is schedule.units[0]
        if regrown or not schedule.is_connected:
            schedule = make_schedule(module)
        schedule.settle_conversions()
    schedule.begin_forward(unit)
    ok = False
    try:
        policy = unit.options.mp_policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
        output = call(*args, **kwargs)
        if policy.output_dtype is not None:
            output = cast_floating(output, policy.output_dtype)
        ok = True
        return output
    finally:
        schedule.end_forward(unit, ok)


def _refuse_tracing(module: nn.Module) -> None:
    if is_traced():
        raise RuntimeError(
            f"fsdpx: the sharded module {type(module).__name__} can't be traced or exported: its "
            "parameters come and go; load its whole state dict into a plain model, and trace that"
        )


def make_schedule(root: nn.Module) -> Schedule:
    """Makes one schedule for `root`'s units and all below it; an earlier one of a part of them
    ends.

    Collective: the ranks agree on communicators and memory here.
    """
    _refuse_tracing(root)
    names, levels = {}, {}
    for name, module in root.named_modules():
        unit = unit_of(module)
        if unit is not None and unit not in names:
            names[unit] = name
            enclosing = {unit_of(m) for m in _ancestors(root, name)} - {None, unit}
            levels[unit] = len(enclosing)
    for old in {id(u.listener): u.listener for u in names if u.listener}.values():
        if not old.is_idle:
            raise RuntimeError(
                f"fsdpx: module '{type(root).__name__}' is called for the first time while a "
                "forward or backward of "
                "one of its units runs: call the outermost module first"
            )
        old.close()
    for unit, name in names.items():
        unit.rename(name or unit.class_name)
        for managed in unit.parameters:
            managed.sharded._spec.rename(f"{name}.{managed.name}" if name else managed.name)
        unit.forget_closed()
    with outside_of_transforms():  # set-up uses tensors as plain memory
        return Schedule(list(names), levels)


def _ancestors(root: nn.Module, name: str) -> list[nn.Module]:
    found, module = [root], root
    for part in name.split(".")[:-1] if name else []:
        module = getattr(module, part)
        found.append(module)
    return found if name else []


def schedule_of(module: nn.Module, unit: Unit) -> Schedule:
    """The schedule of a unit, made now if the model was never called."""
    schedule: Schedule = unit.listener or make_schedule(module)
    return schedule


def make_schedules(module: nn.Module) -> dict[Unit, Schedule]:
    """The schedules of all units of a model, made now for those that were never called."""
    found = {}
    for outer in module.modules():
        unit = unit_of(outer)
        if unit is not None:
            schedule_of(outer, unit)
            found[unit] = unit.listener
    return found


def all_schedules(module: nn.Module) -> list[Schedule]:
    found = (unit.listener for unit in units(module))
    return list(dict.fromkeys(schedule for schedule in found if schedule is not None))


_sharded_classes: dict[type[nn.Module], type] = {}


def sharded_class(cls: type[nn.Module], base: type) -> type:
    """`cls` with `base` (FSDPModule) mixed in; a call of an instance is one of its unit."""

    def call_unit(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit = unit_of(self)
        call = functools.partial(cls.__call__, self)
        if unit is None:
            return call(*args, **kwargs)
        return run_forward(unit, self, call, args, kwargs)

    leave_to_eager(call_unit)
    if cls not in _sharded_classes:
        body = {"__call__": call_unit, "__module__": cls.__module__}
        _sharded_classes[cls] = type(f"FSDP{cls.__name__}", (base, cls), body)
    return _sharded_classes[cls]


# ---- Casts


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating tensors in a nest of containers; what the caller holds is not changed.

    Tuples, lists, dicts, dataclasses and every pytree node are looked into.
    """
    return _C.cast_inputs(value, dtype, functools.partial(_cast_other, dtype=dtype))


def _cast_other(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, dtype)
    leaves, spec = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return value
    cast = [cast_floating(leaf, dtype) for leaf in leaves]
    if all(a is b for a, b in zip(leaves, cast, strict=True)):
        return value
    return pytree.tree_unflatten(cast, spec)


def _cast_dataclass(value: Any, dtype: torch.dtype) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            before = getattr(value, field.name)
            after = cast_floating(before, dtype)
            if after is not before:
                changed[field.name] = after
    if not changed:
        return value
    result = copy.copy(value)
    for name, after in changed.items():
        object.__setattr__(result, name, after)  # frozen ones too: it is our copy
    return result
