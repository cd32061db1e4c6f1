"""Gathered copies that outlive the weights they were made of, and when things are first called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdpx
from fsdpx import fully_shard

from .parts import (
    Pair,
    assert_close,
    batch_of,
    mean_square,
    shard_linears,
    small_mlp,
    whole,
)
from .registry import case


def check_eval_before_step(rank: int, world_size: int, shard: Callable[[nn.Module], Any]) -> None:
    """A forward between backward and step does not hide the step from the next forward."""
    pair = Pair(small_mlp(), shard)
    pair.optimize(torch.optim.SGD, lr=0.5)
    pair.backward(rank, world_size)
    with torch.no_grad():
        pair.model(batch_of(rank))
    pair.step()
    with torch.no_grad():
        outputs = [each(batch_of(rank)) for each in pair.both]
    assert_close(outputs[0], outputs[1], "output after the step")


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
    pair = Pair(nn.Linear(6, 5), fully_shard)
    with torch.no_grad():
        pair.model(batch_of(rank))
    pair.optimize(torch.optim.SGD, lr=1.0)
    pair.backward(rank, world_size)
    pair.step()
    pair.model.reshard()
    pair.assert_weights()


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
    pair = Pair(small_mlp())
    with torch.inference_mode():
        pair.model(batch_of(rank))
    pair.backward(rank, world_size)
    pair.assert_grads()


@case("a child's forward before the root's first one breaks root detection")
def child_before_root(rank: int, world_size: int) -> None:
    pair = Pair(small_mlp())
    with torch.no_grad():
        pair.model[0](batch_of(rank))
    pair.backward(rank, world_size)
    pair.assert_grads()


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


CHANGED = "parameters of unit '2' were changed"


def halve(model: nn.Module) -> None:
    """Changes the weights in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def load_doubled(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


@case("weights changed between forward and backward: gradients of weights that forward never saw")
def change_between_forward_and_backward(rank: int, world_size: int) -> None:
    for change in (halve, load_doubled):
        for kept in (False, True):
            model = shard_linears(small_mlp(), reshard_after_forward=not kept)
            loss = mean_square(model, batch_of(rank))
            change(model)
            with pytest.raises(RuntimeError, match=CHANGED):
                loss.backward()
            pair = Pair(small_mlp())  # the next step of another model is not disturbed
            pair.backward(rank, world_size)
            pair.assert_grads()


@case("a graph older than the latest step, when a newer forward has gathered new weights")
def backward_of_a_graph_before_the_step(rank: int, world_size: int) -> None:
    model = shard_linears(small_mlp())
    earlier = mean_square(model, batch_of(rank))
    halve(model)
    mean_square(model, batch_of(rank)).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        earlier.backward()


@case("a weight that backward does not read may change before it, as in a plain model")
def change_of_a_weight_that_backward_does_not_read(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    pair = Pair(nn.Linear(6, 5), fully_shard, reshard_after_forward=True)
    losses = [mean_square(pair.model, batch_of(rank))]
    losses += [mean_square(pair.reference, batch_of(each)) / world_size for each in range(2)]
    for each in pair.both:
        halve(each)
    for loss in losses:
        loss.backward()
    pair.assert_grads()


@case("zero_grad between micro-batches without synchronisation: the first one came back later")
def zero_grad_forgets_unsynchronised_gradients(rank: int, world_size: int) -> None:
    for set_to_none in (True, False):
        pair = Pair(small_mlp())
        with fsdpx.no_sync(pair.model):
            pair.backward(rank, world_size, step=3)
        for each in pair.both:
            each.zero_grad(set_to_none)
        pair.backward(rank, world_size)
        pair.assert_grads()
