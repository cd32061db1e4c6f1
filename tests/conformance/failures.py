"""Exceptions, on all ranks and on one; ranks that do not do the same."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdpx import fully_shard

from .parts import (
    Pair,
    assert_close,
    assert_grads,
    backward_of_all_ranks,
    batch_of,
    grads_of,
    mean_square,
    shard_linears,
    small_mlp,
    whole,
)
from .registry import case


class Fails(torch.autograd.Function):
    """The identity; its backward raises when told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_backward: bool) -> Tensor:
        ctx.in_backward = in_backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.in_backward:
            raise RuntimeError("told to fail")
        return grad, None


class Fuse(nn.Module):
    """Passes its input on, or fails."""

    in_forward = False
    in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        if self.in_forward:
            raise RuntimeError("told to fail")
        return Fails.apply(x, self.in_backward)


def fused_mlp() -> tuple[nn.Sequential, Fuse]:
    """The small model with a fuse between its layers."""
    first, activation, last = small_mlp()
    fuse = Fuse()
    return nn.Sequential(first, fuse, activation, last), fuse


@case("an exception in forward, then a step")
def exception_in_forward(rank: int, world_size: int) -> None:
    model, fuse = fused_mlp()
    reference, _ = fused_mlp()
    backward_of_all_ranks(reference, world_size)
    shard_linears(model)
    fuse.in_forward = True
    with pytest.raises(RuntimeError, match="told to fail"):
        model(batch_of(rank))
    fuse.in_forward = False
    mean_square(model, batch_of(rank)).backward()
    assert_grads(model, grads_of(reference))


@case("an exception in backward spoils every later gradient")
def exception_in_backward_then_three_steps(rank: int, world_size: int) -> None:
    model, fuse = fused_mlp()
    reference, _ = fused_mlp()
    backward_of_all_ranks(reference, world_size)
    shard_linears(model)
    fuse.in_backward = True
    loss = mean_square(model, batch_of(rank))
    with pytest.raises(RuntimeError, match="told to fail"):
        loss.backward()
    fuse.in_backward = False
    for _ in range(3):
        model.zero_grad()
        mean_square(model, batch_of(rank)).backward()
        assert_grads(model, grads_of(reference))


@case("a hook that runs after accumulation raises: the step's other gradients came back later")
def exception_in_post_accumulate_hook(rank: int, world_size: int) -> None:
    def fail(parameter: Tensor) -> None:
        raise RuntimeError("told to fail")

    pair = Pair(small_mlp())
    handle = pair.model[0].weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(RuntimeError, match="told to fail"):
        mean_square(pair.model, batch_of(rank)).backward()
    handle.remove()
    for _ in range(2):
        pair.zero_grad()
        pair.backward(rank, world_size)
        pair.assert_grads()


class Branches(nn.Module):
    """Uses one of two layers of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.even = nn.Linear(6, 6, bias=False)
        self.odd = nn.Linear(6, 6, bias=False)
        self.out = nn.Linear(6, 1, bias=False)

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.out((self.odd if number % 2 else self.even)(x))


@case("ranks take different branches inside a unit: their gradients mixed silently")
def branches_in_one_unit(rank: int, world_size: int) -> None:
    reference = Branches()
    losses = [reference(batch_of(each), each).sum() for each in range(world_size)]
    (torch.stack(losses).sum() / world_size).backward()
    model = fully_shard(Branches())
    model(batch_of(rank), rank).sum().backward()
    expected = grads_of(reference)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name}: a rank that did not use it has no gradient"
        assert_close(whole(parameter.grad), expected[name], name)


@case("one rank raises and the others wait for ever")
def one_rank_raises(rank: int, world_size: int) -> None:
    limit = datetime.timedelta(seconds=4)
    group = dist.new_group(list(range(world_size)), timeout=limit)
    model, fuse = fused_mlp()
    shard_linears(model, mesh=DeviceMesh.from_group(group, "cpu"))
    fuse.in_forward = rank == 0
    began = time.monotonic()
    with pytest.raises(Exception) as raised:  # noqa: PT011  # which kind is not the point
        mean_square(model, batch_of(rank)).backward()
    took = time.monotonic() - began
    assert took < 5 * limit.total_seconds(), f"rank {rank} waited for {took:.0f} s"
    message = str(raised.value)
    for part in ("told to fail",) if rank == 0 else ("rank 0", "of unit '"):
        assert part in message, message
