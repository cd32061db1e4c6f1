"""Kinds of parameter: 0-dim, non-contiguous, integer, mixed dtypes, frozen beside trainable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdpx import fully_shard

from .parts import (
    Pair,
    assert_close,
    backward_of_all_ranks,
    batch_of,
    check_one_step,
    mean_square,
    small_mlp,
    whole,
)
from .registry import case


class Scaled(nn.Module):
    """A linear layer and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Transposed(nn.Module):
    """A linear layer whose weight is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 5)
        weight = self.linear.weight.detach()
        self.linear.weight = nn.Parameter(weight.t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Coded(nn.Module):
    """A linear layer beside frozen integer codes and their scales, of odd lengths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 5)
        self.codes = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
        self.scales = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.codes.float().sum() / 21 * self.scales.sum()


def check_training(
    model: nn.Module,
    rank: int,
    world_size: int,
    shard: Callable[..., Any] = fully_shard,
) -> None:
    """Shapes stay, and a clipped step of AdamW is that of the reference."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    pair = Pair(model, shard)
    pair.optimize(torch.optim.AdamW, lr=0.1)
    pair.backward(rank, world_size)
    norms = [whole(nn.utils.clip_grad_norm_(each.parameters(), 0.5)) for each in pair.both]
    assert_close(norms[0], norms[1], "norm")
    pair.step()
    assert {n: whole(p.detach()).shape for n, p in model.named_parameters()} == shapes
    pair.assert_weights()
    assert_close(model(batch_of(rank)), pair.reference(batch_of(rank)), "output")


@case("a 0-dim parameter: refused, or 1-D after loading")
def param_scalar(rank: int, world_size: int) -> None:
    check_training(Scaled(), rank, world_size)


@case("a weight that is not contiguous: refused or laid out anew")
def param_transposed(rank: int, world_size: int) -> None:
    check_training(Transposed(), rank, world_size)


class Nothing(nn.Module):
    """Its only parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


@case("a unit without elements, and layers without outputs or inputs: crashed, or lost their shape")
def units_without_elements(rank: int, world_size: int) -> None:
    def shard(model: nn.Sequential) -> None:
        for unit in model:
            fully_shard(unit)
        fully_shard(model)

    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), Nothing(), nn.Linear(8, 0), nn.Linear(0, 3)]
    check_training(nn.Sequential(*layers), rank, world_size, shard)


@case("frozen integer parameters in a unit that trains")
def param_integer_frozen(rank: int, world_size: int) -> None:
    check_training(Coded(), rank, world_size)


class TwoDtypes(nn.Module):
    """An fp32 and a bf16 layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.in_fp32 = nn.Linear(6, 8)
        self.in_bf16 = nn.Linear(8, 5).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.in_bf16(self.in_fp32(x).bfloat16()).float()


@case("bf16 and fp32 parameters in one unit: an assertion without names")
def param_mixed_dtypes(rank: int, world_size: int) -> None:
    check_one_step(TwoDtypes(), rank, world_size, shard=fully_shard, limit=2e-2)


class LowRank(nn.Module):
    """A frozen layer with trainable factors beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.base.requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@case("frozen and trainable parameters in one unit: refused, leaked or half saved")
def lora_mixture(rank: int, world_size: int) -> None:
    def shard(model: nn.Sequential) -> None:
        for unit in model:
            fully_shard(unit)
        fully_shard(model)

    torch.manual_seed(0)
    pair = Pair(nn.Sequential(LowRank(), LowRank(), LowRank()), shard)
    pair.optimize(torch.optim.AdamW, lr=0.1)
    for _ in range(2):
        pair.backward(rank, world_size)
        pair.step()
    pair.assert_weights()


@case("unfreezing between steps is lost")
def freeze_then_unfreeze(rank: int, world_size: int) -> None:
    model = small_mlp()
    model[0].requires_grad_(False)
    pair = Pair(model, reshard_after_forward=False)
    pair.backward(rank, world_size)
    with torch.no_grad():
        model(batch_of(rank))
    for each in pair.both:
        each.requires_grad_(True)
    pair.zero_grad()
    pair.backward(rank, world_size)
    pair.assert_grads()


@case("a parameter that is frozen between forward and backward gets a gradient all the same")
def frozen_before_backward(rank: int, world_size: int) -> None:
    pair = Pair(small_mlp())
    loss = mean_square(pair.model, batch_of(rank))
    pair.model[0].weight.requires_grad_(False)
    loss.backward()
    pair.reference[0].weight.requires_grad_(False)
    backward_of_all_ranks(pair.reference, world_size)
    assert pair.model[0].weight.grad is None
    pair.assert_grads()
