"""Modules and parameters that a wrapper leaves as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fsdpx.unit import unit_of


@dataclass
class Ignored:
    """What a wrapper neither shards, moves, casts nor reduces.

    Attributes:
        modules: With all modules below, except wrappers and what these hold.
        parameters: Of these modules, and others.
    """

    modules: set[nn.Module] = field(default_factory=set)
    parameters: set[nn.Parameter] = field(default_factory=set)


def resolve_ignored(modules: Any, states: Any) -> Ignored:
    """Reads FSDP1's `ignored_modules` and `ignored_states`.

    Args:
        modules: Modules, or None.
        states: Parameters, or modules, or None; not both arguments.

    Raises:
        TypeError, ValueError: If they are something else; the message names the argument.
    """
    if modules is not None and states is not None:
        raise ValueError(
            "FullyShardedDataParallel: give ignored_modules or ignored_states, not both"
        )
    name = "ignored_modules" if states is None else "ignored_states"
    given = list(_iterate(name, states if modules is None else modules))
    ignored = Ignored()
    for each in given:
        if isinstance(each, nn.Module):
            _add_module(ignored, each, name)
        elif isinstance(each, nn.Parameter) and modules is None:
            ignored.parameters.add(each)
        else:
            raise TypeError(
                f"FullyShardedDataParallel: {name} must hold modules"
                f"{'' if modules is not None else ' or parameters'}, got {type(each).__name__}"
            )
    return ignored


def _iterate(name: str, value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise TypeError(
            f"FullyShardedDataParallel: {name} must be an iterable, got {type(value).__name__}"
        )
    return value


def _add_module(ignored: Ignored, module: nn.Module, name: str) -> None:
    if unit_of(module) is not None:
        raise ValueError(
            f"FullyShardedDataParallel: {name} holds {type(module).__name__}, which is sharded "
            "already"
        )
    ignored.modules.add(module)
    ignored.parameters.update(p for p in module._parameters.values() if p is not None)
    for child in module.children():
        if unit_of(child) is None:
            _add_module(ignored, child, name)
