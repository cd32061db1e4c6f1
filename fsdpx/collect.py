"""Finds the parameters that one `fully_shard` call manages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from .parameter import ShardedTensor
from .shards import Managed, original_of
from .unit import Unit, unit_of


def managed_modules(modules: Sequence[nn.Module], own: Unit | None = None) -> set[nn.Module]:
    """The modules whose parameters belong to a unit: all below, except below other units.

    Args:
        modules: That the unit is, or will be, made of.
        own: The unit, if it is made.
    """
    found: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in found or unit_of(module) not in (None, own):
            return
        found.add(module)
        for child in module.children():
            visit(child)

    for module in modules:
        visit(module)
    return found


def collect(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter], device: torch.device
) -> list[Managed]:
    """The unit's parameters in registration order; one that several modules hold appears once."""
    managed = managed_modules(modules)
    ignored_ids = {id(parameter) for parameter in ignored}
    found: dict[int, Managed] = {}
    for root in modules:
        for prefix, module in root.named_modules():
            if module not in managed:
                continue
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in ignored_ids:
                    continue
                path = f"{prefix}.{name}" if prefix else name
                _check_module(path, module)
                _check_parameter(path, parameter, device)
                entry = found.setdefault(id(parameter), Managed(path, parameter, []))
                if (module, name) not in entry.owners:
                    entry.owners.append((module, name))
    _check_memory(found.values())
    return list(found.values())


def _check_memory(parameters: Iterable[Managed]) -> None:
    """Refuses parameters that are two views of the same memory: shards would be copies of it."""
    spans = []
    for managed in parameters:
        original = original_of(managed)
        if original.numel() and original.is_contiguous() and not original.is_meta:
            spans.append((original.data_ptr(), original.nbytes, managed.name))
    for (begin, num_bytes, name), (following, _, other) in itertools.pairwise(sorted(spans)):
        if following < begin + num_bytes:
            raise ValueError(
                f"fully_shard: parameters '{name}' and '{other}' are different objects over the "
                "same memory: tie them by assigning one parameter to both modules"
            )


def _check_module(path: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"fully_shard: parameter '{path}' belongs to a TorchScript module, which would go on "
            "with the whole parameter of its own: use the module that was scripted or traced, or "
            "name it in ignored_params"
        )


def _check_parameter(path: str, parameter: torch.Tensor, device: torch.device) -> None:
    if isinstance(parameter, ShardedTensor):
        raise ValueError(
            f"fully_shard: parameter '{path}' is shared with '{parameter._spec.name}', which is "
            f"already in the unit of {parameter._module or 'another module'}: shard the module "
            "that encloses both, without sharding them on their own"
        )
    if type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ValueError(
            f"fully_shard: parameter '{path}' is a {type(parameter).__name__}, a tensor that "
            "computes in its own way, which flat shards cannot hold: store plain tensors, or "
            "name it in ignored_params"
        )
    if parameter.layout is not torch.strided:
        raise ValueError(
            f"fully_shard: parameter '{path}' has layout {parameter.layout}: make it dense"
        )
    if parameter.is_complex():
        raise ValueError(
            f"fully_shard: parameter '{path}' is complex: store its real and imaginary parts, or "
            "ignore it"
        )
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(
            f"fully_shard: parameter '{path}' is not initialised: run a lazy module once before"
        )
    if parameter.device.type not in ("cpu", "meta", device.type):
        raise ValueError(
            f"fully_shard: parameter '{path}' is on {parameter.device}, its mesh on {device}: move "
            "the model, or give a mesh on its device"
        )
