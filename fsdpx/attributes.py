"""What the attributes of a sharded module are: sharded parameters, or full ones while it computes.

[Note: Attributes] `module._parameters` holds the sharded parameters for good, so everything that
iterates over a model sees those. A module's own code reads full parameters: during forward they lie
in the instance's `__dict__` (csrc/torch_attributes.h); inside a backward, where recomputation may
read them without a forward of the unit, a subclass of dict answers for `_parameters`; and lists in
`__dict__` that hold parameters (`nn.LSTM._flat_weights`) hold the full ones for good.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .shards import Managed
from .torch_private import NO_BACKWARD, current_backward
from .unit import Unit


class Parameters(dict[str, Any]):
    """A module's `_parameters`: single reads inside a backward give full parameters, all else
    sharded ones.
    """

    def __init__(self, parameters: Mapping[str, Any], unit: Unit) -> None:
        super().__init__(parameters)
        self.unit = unit
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


def watch(unit: Unit, modules: Iterable[nn.Module]) -> None:
    """Lets the unit know what is registered with its modules, also those without parameters."""
    for module in modules:
        parameters = module.__dict__["_parameters"]
        if not isinstance(parameters, Parameters):
            parameters = module.__dict__["_parameters"] = Parameters(parameters, unit)
            unit.dictionaries.append(parameters)


def install_parameters(unit: Unit) -> None:
    """Puts the unit's sharded parameters where the originals were."""
    for managed in unit.parameters:
        for module, name in managed.owners:
            install(unit, managed, module, name)


def install(unit: Unit, managed: Managed, module: nn.Module, name: str) -> None:
    """Makes a managed parameter the attribute `name` of a module."""
    parameters = module.__dict__["_parameters"]
    assert isinstance(parameters, Parameters)
    dict.__setitem__(parameters, name, managed.sharded)
    parameters.full[id(managed.sharded)] = managed.leaf
    parameters.sharded[id(managed.leaf)] = managed.sharded
    unit.native.add_attribute(module.__dict__, name, managed.leaf, parameters, managed.sharded)


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
