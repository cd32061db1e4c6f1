"""The only file that touches module internals: when a module is called, and what its attributes
are.

[Note: Attributes] `module._parameters` holds the sharded parameters for good, so everything that
iterates over a model sees those. A module's own code reads full parameters: during forward they lie
in the instance's `__dict__` (csrc/torch_attributes.h); inside a backward, where recomputation may
read them without a forward of the unit, a subclass of dict answers for `_parameters`; and lists in
`__dict__` that hold parameters (`nn.LSTM._flat_weights`) hold the full ones for good.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import _C
from .schedule import Schedule
from .shards import Managed
from .torch_private import NO_BACKWARD, current_backward, leave_to_eager
from .unit import Unit, unit_of, units

# ---- Attributes


class Parameters(dict[str, Any]):
    """A module's `_parameters`: single reads inside a backward give full parameters, all else
    sharded ones.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self.full: dict[int, nn.Parameter] = {}  # id(sharded) -> full
        self.sharded: dict[int, torch.Tensor] = {}  # id(full) -> sharded

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        if current_backward() == NO_BACKWARD:
            return value
        return self.full.get(id(value), value)

    def __setitem__(self, name: str, value: Any) -> None:
        # torch.func.functional_call reads a parameter, replaces it and puts back what it read.
        dict.__setitem__(self, name, self.sharded.get(id(value), value))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: copy.deepcopy(value, memo) for name, value in self.items()}

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def install_parameters(unit: Unit) -> None:
    """Puts the unit's sharded parameters where the originals were."""
    for managed in unit.parameters:
        for module, name in managed.owners:
            parameters = module.__dict__["_parameters"]
            if not isinstance(parameters, Parameters):
                parameters = module.__dict__["_parameters"] = Parameters(parameters)
            dict.__setitem__(parameters, name, managed.sharded)
            parameters.full[id(managed.sharded)] = managed.leaf
            parameters.sharded[id(managed.leaf)] = managed.sharded
            unit.native.add_attribute(
                module.__dict__, name, managed.leaf, parameters, managed.sharded
            )


def replace_in_lists(modules: set[nn.Module], originals: dict[int, Managed]) -> None:
    """Lets lists of parameters in the modules' `__dict__` hold the full ones.

    Args:
        modules: Whose attributes to look at.
        originals: Parameters by the id that they had before sharding.
    """
    for module in modules:
        for value in module.__dict__.values():
            if isinstance(value, list) and any(id(item) in originals for item in value):
                value[:] = [originals[id(i)].leaf if id(i) in originals else i for i in value]


# ---- Calls


def run_forward(
    unit: Unit, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Calls a module's forward with its unit gathered, inputs and outputs cast by the policy."""
    schedule = unit.listener or make_schedule(module)
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


def make_schedule(root: nn.Module) -> Schedule:
    """Makes one schedule for `root`'s units and all below it; an earlier one of a part of them
    ends.

    Collective: the ranks agree on communicators and memory here.
    """
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
