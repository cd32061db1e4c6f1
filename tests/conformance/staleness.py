"""Gathered copies that outlive the weights they were made of, and when things are first called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdpx import fully_shard

from .parts import (
    assert_close,
    assert_grads,
    assert_weights,
    backward_of_all_ranks,
    batch_of,
    mean_square,
    reference_grads,
    shard_linears,
    small_mlp,
    whole,
)
from .registry import case


def check_eval_before_step(rank: int, world_size: int, shard: Callable[[nn.Module], Any]) -> None:
    """A forward between backward and step does not hide the step from the next forward."""
    model = small_mlp()
    reference = copy.deepcopy(model)
    shard(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    backward_of_all_ranks(reference, world_size)
    mean_square(model, batch_of(rank)).backward()
    with torch.no_grad():
        model(batch_of(rank))
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        assert_close(model(batch_of(rank)), reference(batch_of(rank)), "output after the step")


@case("evaluation before the optimizer's step, units kept gathered: the update was not seen")
def eval_between_backward_and_step_kept(rank: int, world_size: int) -> None:
    keep = {"reshard_after_forward": False}
    check_eval_before_step(rank, world_size, lambda model: shard_linears(model, **keep))


@case("the same with only the root as a unit")
def eval_between_backward_and_step_root(rank: int, world_size: int) -> None:
    check_eval_before_step(rank, world_size, fully_shard)


@case("the same with every layer as a unit")
def eval_between_backward_and_step(rank: int, world_size: int) -> None:
    check_eval_before_step(rank, world_size, shard_linears)


@case("a forward before the optimizer is built: parameters never changed")
def optimizer_built_after_a_forward(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    reference = copy.deepcopy(model)
    fully_shard(model)
    with torch.no_grad():
        model(batch_of(rank))
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, reference)]
    mean_square(model, batch_of(rank)).backward()
    backward_of_all_ranks(reference, world_size)
    for optimizer in optimizers:
        optimizer.step()
    model.reshard()
    assert_weights(model, reference)


@case("loading after a forward without gradients: the old weights stayed")
def load_after_no_grad_forward(rank: int, world_size: int) -> None:
    model = fully_shard(nn.Linear(6, 5))
    with torch.no_grad():
        zeros = {name: value * 0 for name, value in model.state_dict().items()}
        model(batch_of(rank))
        model.load_state_dict(zeros)
        assert_close(model(batch_of(rank)), torch.zeros(4, 5), "output of zero weights")


@case("a first forward under inference_mode breaks training")
def inference_mode_first(rank: int, world_size: int) -> None:
    model = small_mlp()
    expected = reference_grads(model, world_size)
    shard_linears(model)
    with torch.inference_mode():
        model(batch_of(rank))
    mean_square(model, batch_of(rank)).backward()
    assert_grads(model, expected)


@case("a child's forward before the root's first one breaks root detection")
def child_before_root(rank: int, world_size: int) -> None:
    model = small_mlp()
    expected = reference_grads(model, world_size)
    shard_linears(model)
    with torch.no_grad():
        model[0](batch_of(rank))
    mean_square(model, batch_of(rank)).backward()
    assert_grads(model, expected)


@case("a state dict that shares memory with the gathered parameters")
def state_dict_is_not_aliased_when_gathered(rank: int, world_size: int) -> None:
    model = shard_linears(small_mlp())
    saved = whole(model.state_dict()["0.weight"]).clone()
    before = saved.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(batch_of(rank)).sum().backward()
    optimizer.step()
    assert torch.equal(saved, before)
    assert not torch.equal(whole(model.state_dict()["0.weight"]), before)
