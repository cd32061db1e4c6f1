"""Shards plain modules by hand, so that sharded tensors can be tested without an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fsdpx.layout import Granularity, ParameterInfo, plan_unit
from fsdpx.parameter import ShardedTensor, Spec


@dataclass
class Shard:
    """One unit: its flat tensors by segment, and its parameters by name."""

    flats: list[torch.Tensor]
    parameters: dict[str, ShardedTensor]


def shard_tensors(
    named: Iterable[tuple[str, torch.Tensor]],
    rank: int = 0,
    world_size: int = 1,
    granularity: Granularity | Sequence[Granularity] = "element",
    group: dist.ProcessGroup | None = None,
) -> Shard:
    """This rank's shard of tensors that every rank holds whole.

    Args:
        named: Names and values.
        rank: Of this process.
        world_size: Number of shares.
        granularity: As for `plan_unit`.
        group: The default group if None and there are several ranks and one is initialised.
    """
    named = list(named)
    if group is None and world_size > 1 and dist.is_initialized():
        group = dist.group.WORLD
    infos = [
        ParameterInfo(name, tuple(t.shape), t.dtype, t.dtype, t.dtype, t.requires_grad)
        for name, t in named
    ]
    layout = plan_unit(infos, world_size, granularity)
    flats = [torch.zeros(segment.shard_numel, dtype=segment.dtype) for segment in layout.segments]
    parameters = {}
    for index, (name, tensor) in enumerate(named):
        number, _ = layout.place(index)
        spec = Spec(name, tensor.shape, layout.ranges(index), rank, group)
        start, length = layout.local_slice(index, rank)
        local = flats[number][start : start + length]
        local.copy_(spec.piece(tensor.detach()))
        made = ShardedTensor(local, spec, tensor.requires_grad)
        made._is_param = True
        parameters[name] = made
    for flat in flats:
        torch._C._autograd._unsafe_set_version_counter((flat,), (0,))
    return Shard(flats, parameters)


def shard_module(
    module: nn.Module, rank: int = 0, world_size: int = 1, granularity: Granularity = "element"
) -> list[Shard]:
    """Replaces a module's parameters by sharded ones; a unit for every child, one for the rest."""
    shards = []
    for name, child in [*module.named_children(), ("", module)]:
        named = child.named_parameters(prefix=name, recurse=child is not module)
        shard = shard_tensors(named, rank, world_size, granularity)
        shards.append(shard)
        for fqn, parameter in shard.parameters.items():
            path, _, leaf = fqn.rpartition(".")
            setattr(module.get_submodule(path), leaf, parameter)
    return shards


def set_gradients(module: nn.Module, gradients: dict[str, torch.Tensor | None]) -> None:
    """Gives every parameter this rank's piece of its gradient."""
    for name, parameter in module.named_parameters():
        gradient = gradients[name]
        if gradient is None or not isinstance(parameter, ShardedTensor):
            parameter.grad = gradient
        else:
            piece = parameter._spec.piece(gradient).clone()
            parameter.grad = ShardedTensor(piece, parameter._spec)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole value of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor.detach()


class Model(nn.Module):
    """Shapes that cut badly: odd sizes, a bias, no dimensions, no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(7, 30)
        self.c = nn.LayerNorm(30)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))


def pair(
    rank: int, world_size: int, make: Callable[[], nn.Module] = Model, seed: int = 0
) -> tuple[nn.Module, nn.Module]:
    """The same model sharded and unsharded."""
    torch.manual_seed(seed)
    reference = make()
    module = copy.deepcopy(reference)
    shard_module(module, rank, world_size)
    return module, reference


def random_gradients(reference: nn.Module, seed: int) -> dict[str, torch.Tensor | None]:
    """Equal on all ranks for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in reference.named_parameters()
    }


def piece_of(full: torch.Tensor, begin: int, end: int, name: str = "layer.w") -> ShardedTensor:
    """What the second of three ranks holds."""
    ranges = [(0, begin), (begin, end), (end, full.numel())]
    spec = Spec(name, full.shape, ranges, 1, None)
    return ShardedTensor(spec.piece(full.detach()).clone(), spec, full.requires_grad)


def trained(begin: int = 3, end: int = 17) -> ShardedTensor:
    made = piece_of(torch.arange(35.0).view(7, 5).requires_grad_(), begin, end)
    made._is_param = True
    return made
