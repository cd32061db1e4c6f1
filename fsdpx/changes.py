"""Changes of a model after `fully_shard`: parameters and modules added, replaced or moved.

[Note: Changes] torch calls a hook whenever a parameter or module is registered with a module. Ours
marks the unit that manages that module; the next outermost forward looks through the modules of
marked units, and only of those. It takes in what it can and refuses the rest by name, so that no
parameter is left out of gathers and reductions unnoticed.

A parameter assigned in place of one of the same shape, dtype and device (or of one on the meta
device) only gives its values: the sharded parameter, which optimizers hold, stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from .attributes import Parameters, install, watch
from .collect import managed_modules
from .parameter import ShardedTensor, fill, mark_copied
from .shards import Managed
from .unit import Unit, containers, unit_of


def settle_changes(units: Sequence[Unit]) -> bool:
    """Takes in what was changed since the last forward.

    Returns:
        Whether there are new units below.

    Raises:
        RuntimeError: For a parameter that no unit manages.
    """
    found = False
    for unit in units:
        if unit.changed or _has_grown(unit):
            found |= _settle(unit)
    return found


def _has_grown(unit: Unit) -> bool:
    return any(len(module._modules) != count for module, count in unit.containers)


def _settle(unit: Unit) -> bool:
    known = {id(managed.sharded): managed for managed in unit.parameters}
    modules = managed_modules(unit.modules, unit)
    watch(unit, modules)
    for root in unit.modules:
        for prefix, module in root.named_modules():
            for name, parameter in module._parameters.items() if module in modules else ():
                path = f"{prefix}.{name}" if prefix else name
                if id(parameter) in known:
                    _take_in(unit, known[id(parameter)], module, name)
                elif isinstance(parameter, nn.Parameter) and id(parameter) not in unit.ignored:
                    _refuse(unit, path, parameter, _managed_at(unit, module, name))
    unit.containers = [(m, len(m._modules)) for m in containers(unit.modules)]
    unit.changed = False
    below = {unit_of(m) for root in unit.modules for m in root.modules()} - {None}
    return any(other is not None and other.listener is not unit.listener for other in below)


def _take_in(unit: Unit, managed: Managed, module: nn.Module, name: str) -> None:
    """A parameter of the unit is held by a further module now."""
    if any(owner is module and at == name for owner, at in managed.owners):
        return
    managed.owners.append((module, name))
    install(unit, managed, module, name)


def _managed_at(unit: Unit, module: nn.Module, name: str) -> Managed | None:
    owned = ((managed, owner, at) for managed in unit.parameters for owner, at in managed.owners)
    return next((m for m, owner, at in owned if owner is module and at == name), None)


def _refuse(unit: Unit, path: str, parameter: nn.Parameter, before: Managed | None) -> None:
    where = f"fsdpx: parameter '{path}' of unit '{unit.name}'"
    if isinstance(parameter, ShardedTensor) and parameter._leaf is not None:
        raise RuntimeError(
            f"{where} is '{parameter._spec.name}' of another unit since fully_shard: tie "
            "parameters before, in a module that encloses both and is one unit"
        )
    if before is None:
        raise RuntimeError(
            f"{where} was added after fully_shard, so it would not be sharded or reduced: call "
            "fully_shard on the new module too, or add it before (ignored_params leaves it alone)"
        )
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        now = "an uninitialised one"
    else:
        now = f"{_form(parameter)}"
    raise RuntimeError(
        f"{where}, {_form(before.sharded)}, was replaced after fully_shard by {now}: replace it "
        "before; new values alone go in with parameter.copy_() or load_state_dict()"
    )


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


# ---- Called by torch


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
    parameters = module.__dict__.get("_parameters")
    if not isinstance(parameters, Parameters) or id(parameter) in parameters.sharded:
        return None
    now: Any = dict.get(parameters, name)
    if now is parameter:
        return None
    if id(now) not in parameters.full or not _only_values(now, parameter):
        parameters.unit.changed = True
        return None
    with torch.no_grad():
        fill(now, parameter)
    now.requires_grad_(parameter.requires_grad)
    mark_copied(parameter, now._spec.name)
    return now


def _only_values(now: Any, then: torch.Tensor) -> bool:
    """Whether assigning `then` in place of the sharded `now` changes no more than values."""
    if isinstance(then, ShardedTensor) and then._leaf is not None:
        return False  # another unit's
    if isinstance(then, nn.parameter.UninitializedParameter):
        return False
    device = now.is_meta or now.device == then.device
    return bool(device and (now.shape, now.dtype) == (then.shape, then.dtype))


def _on_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    parameters = module.__dict__.get("_parameters")
    if isinstance(parameters, Parameters):
        parameters.unit.changed = True


register_module_parameter_registration_hook(_on_parameter)
register_module_module_registration_hook(_on_module)
