"""`copy.deepcopy` of sharded modules: units of their own over copies of the shards."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn

from .attributes import install_parameters, watch
from .collect import managed_modules
from .conversions import layout_of
from .post_forward import PostForward
from .unit import Phase, Unit, containers, unit_of

_UNDERWAY = "fsdpx: what is being copied"


class _Copying(NamedTuple):
    """The state of one `copy.deepcopy`.

    Attributes:
        twins: The copies of units met so far.
        modules: Copies of modules whose calls are a unit's, and that unit.
    """

    twins: dict[Unit, Unit]
    modules: list[tuple[nn.Module, Unit]]


def copy_sharded(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """What `__deepcopy__` of a sharded module returns: a second sharded model, on the same ranks.

    Each rank copies what it has; nothing is communicated. The copy has no gradients, as copies of
    plain modules have none.

    Args:
        module: Between steps.
        memo: Of `copy.deepcopy`.

    Raises:
        RuntimeError: If its forward or backward runs, or its class copies itself in its own way.
    """
    if _UNDERWAY in memo:  # a unit inside of what is being copied
        return _copy_module(module, memo)
    copying = memo[_UNDERWAY] = _Copying({}, [])
    try:
        made = _copy_module(module, memo)
        for unit, twin in list(copying.twins.items()):
            twin.modules = tuple(copy.deepcopy(each, memo) for each in unit.modules)
    finally:
        del memo[_UNDERWAY]
    for each, twin in copying.modules:
        each.__dict__["_fsdpx_unit"] = twin
    for unit, twin in copying.twins.items():
        _settle_in(unit, twin, memo)
    return made


def _twin(unit: Unit, memo: dict[Any, Any]) -> Unit:
    if unit.pins or unit.phase is not Phase.IDLE:
        raise RuntimeError(
            f"fsdpx: unit '{unit.name}' can't be copied while its forward or backward runs: use "
            "copy.deepcopy between steps"
        )
    with torch.inference_mode(False):
        twin = unit.twin(layout_of(unit))
        if unit.post_forward is not None:
            twin.post_forward = PostForward(twin, unit.post_forward.group.size)
    for group in (unit.group.process_group, unit.group.replicate_group):
        memo[id(group)] = group  # the same ranks
    for old, new in zip(unit.parameters, twin.parameters, strict=True):
        memo[id(old.sharded)], memo[id(old.leaf)] = new.sharded, new.leaf
    return twin


def _copy_module(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """The module itself, with copies of all that it holds except its unit."""
    if _copies_itself(module):
        raise RuntimeError(
            f"fsdpx: the sharded module {type(module).__name__} cannot be copied, as its class has "
            "a __deepcopy__ of its own: copy the model before fully_shard"
        )
    copying, unit = memo[_UNDERWAY], unit_of(module)
    made: Any = object.__new__(type(module))
    memo[id(module)] = made
    if unit is not None:
        if unit not in copying.twins:
            copying.twins[unit] = _twin(unit, memo)
        copying.modules.append((made, copying.twins[unit]))
    state = {key: value for key, value in module.__dict__.items() if key != "_fsdpx_unit"}
    made.__setstate__(copy.deepcopy(state, memo))
    return made  # type: ignore[no-any-return]


def _copies_itself(module: nn.Module) -> bool:
    kinds = [cls for cls in type(module).__mro__ if not cls.__module__.startswith("fsdpx.")]
    # The mixed-in class has the module of the class that it shards.
    return any("__deepcopy__" in vars(cls) for cls in kinds)


def _settle_in(unit: Unit, twin: Unit, memo: dict[Any, Any]) -> None:
    """Gives the copied unit the copied modules."""
    for old, new in zip(unit.parameters, twin.parameters, strict=True):
        held = [(memo.get(id(owner)), name) for owner, name in old.owners]
        new.owners = [(owner, name) for owner, name in held if owner is not None]
    watch(twin, managed_modules(twin.modules, twin))
    install_parameters(twin)
    twin.native.swap_out()  # what unshard() had put into the originals' attributes
    twin.containers = [(m, len(m._modules)) for m in containers(twin.modules)]
