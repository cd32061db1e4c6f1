"""Which way backward takes to the weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdpx import fully_shard

from .parts import (
    assert_close,
    assert_grads,
    batch_of,
    check_one_step,
    mean_square,
    reference_grads,
    shard_linears,
    small_mlp,
    whole,
)
from .registry import case

# A unit that is also the root would stay gathered until backward.
shard_and_free = functools.partial(fully_shard, reshard_after_forward=True)


class Caches(nn.Module):
    """Stores an activation from the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.cached = self.first(torch.relu(self.first(x)))
        return self.second(self.cached)


@case("the loss is taken on an activation that the module stored")
def loss_on_stored_activation(rank: int, world_size: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        return model.cached.sum()

    check_one_step(Caches(), rank, world_size, loss=loss, shard=shard_and_free)


class ReturnsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).unsqueeze(0).squeeze(0)


class EditsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = ReturnsView()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(self.linear(x))
        output += 1.0
        return output


@case("a unit's output is a view and the caller edits it in place")
def inplace_on_view_output(rank: int, world_size: int) -> None:
    def shard(model: EditsView) -> None:
        shard_and_free(model.inner)
        fully_shard(model)

    check_one_step(EditsView(), rank, world_size, shard=shard)


@case("a loss with the gradient's norm: backward through backward")
def gradient_penalty(rank: int, world_size: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return grad.pow(2).sum() + mean_square(model, x)

    layers = small_mlp()
    smooth = nn.Sequential(layers[0], nn.Tanh(), layers[2])
    check_one_step(smooth, rank, world_size, loss=loss)


@case("two backwards from one forward: storage of size 0")
def retain_graph_twice(rank: int, world_size: int) -> None:
    def both(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return y.pow(2).mean() + y.sum()

    model = small_mlp()
    expected = reference_grads(model, world_size, both)
    shard_linears(model)
    y = model(batch_of(rank))
    y.pow(2).mean().backward(retain_graph=True)
    y.sum().backward()
    assert_grads(model, expected)


@case("several forwards, then several backwards")
def two_forwards_two_backwards(rank: int, world_size: int) -> None:
    def both(model: nn.Module, x: Tensor) -> Tensor:
        return mean_square(model, x) + mean_square(model, x * 2)

    model = small_mlp()
    expected = reference_grads(model, world_size, both)
    shard_linears(model)
    x = batch_of(rank)
    first, second = mean_square(model, x), mean_square(model, x * 2)
    first.backward()
    second.backward()
    assert_grads(model, expected)


class UsesThrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(6, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(self.shared(x))
        return self.out(self.shared(x))


@case("one unit three times in a forward")
def unit_used_three_times(rank: int, world_size: int) -> None:
    check_one_step(UsesThrice(), rank, world_size)


class SavesWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class KeepsResults(nn.Module):
    """Appends what its custom function gives to a list; its output depends on no weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6, bias=False)
        self.results: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.results.append(SavesWeight.apply(x, self.linear.weight))
        return x.sum()


@case("a custom function's result leaves the unit by a list")
def custom_function_result_kept_in_list(rank: int, world_size: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        return model.results.pop().pow(2).mean()

    check_one_step(KeepsResults(), rank, world_size, loss=loss, shard=shard_and_free)


class Dropping(nn.Module):
    """Blocks with dropout, called under a checkpoint of some kind or none."""

    def __init__(self, *, checkpoints: bool, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpoints, self.reentrant = checkpoints, reentrant
        blocks = [[nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)] for _ in range(3)]
        self.blocks = nn.ModuleList([nn.Sequential(*parts) for parts in blocks])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpoints:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return x


def check_checkpoint(rank: int, *, reentrant: bool) -> None:
    """Recomputing activations changes no bit of the gradients."""
    plain = Dropping(checkpoints=False)
    recomputed = Dropping(checkpoints=True, reentrant=reentrant)
    x = batch_of(rank).requires_grad_()
    for model in (plain, recomputed):
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        torch.manual_seed(5)
        model(x).pow(2).sum().backward()
    pairs = zip(plain.parameters(), recomputed.named_parameters(), strict=True)
    for expected, (name, actual) in pairs:
        assert_close(whole(actual.grad), whole(expected.grad), name, limit=0.0)


@case("activation checkpointing around units")
def checkpoint_outside(rank: int, world_size: int) -> None:
    check_checkpoint(rank, reentrant=False)


@case("the same, reentrant")
def checkpoint_outside_reentrant(rank: int, world_size: int) -> None:
    check_checkpoint(rank, reentrant=True)
