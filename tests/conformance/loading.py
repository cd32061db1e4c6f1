"""Going on from saved states: schedulers, averages, frozen parameters, keys that do not match."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdpx import fully_shard

from .parameters import LowRank
from .parts import (
    Pair,
    assert_close,
    assert_weights,
    backward_of_all_ranks,
    batch_of,
    mean_square,
    shard_linears,
    small_mlp,
    whole,
)
from .registry import case


@case("training goes on with a scheduler, from saved states")
def scheduler_goes_on(rank: int, world_size: int) -> None:
    def make(model: nn.Module) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        return [model, optimizer, schedule]

    def step(parts: list[Any], backward: Callable[[nn.Module], None]) -> None:
        backward(parts[0])
        parts[1].step()
        parts[2].step()
        parts[1].zero_grad()

    reference = make(small_mlp())
    parts = make(shard_linears(small_mlp()))
    for number in range(6):
        if number == 3:
            states = [copy.deepcopy(part.state_dict()) for part in parts]
            parts = make(shard_linears(small_mlp()))
            for part, state in zip(parts, states, strict=True):
                part.load_state_dict(state)
        x = batch_of(rank + number)
        step(parts, lambda model, x=x: mean_square(model, x).backward())
        step(
            reference, functools.partial(backward_of_all_ranks, world_size=world_size, step=number)
        )
    assert_weights(parts[0], reference[0])


@case("strict was ignored, or errors named wrapped keys")
def keys_that_do_not_match(rank: int, world_size: int) -> None:
    model = shard_linears(small_mlp())
    states = {name: whole(value).clone() for name, value in model.state_dict().items()}
    del states["0.bias"]
    states["extra"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r'(?s)Missing.*"0\.bias".*Unexpected.*"extra"'):
        model.load_state_dict(states)
    keys = model.load_state_dict(states, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["0.bias"], ["extra"])
    states["0.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict(states, strict=False)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = small_mlp()


@case("a state dict with a prefix, into a model that holds the sharded one")
def prefixes(rank: int, world_size: int) -> None:
    model = shard_linears(small_mlp())
    states = model.state_dict(prefix="model.")
    assert set(model[0].state_dict(prefix="a.")) == {"a.weight", "a.bias"}
    holder = Holder()
    holder.model[0].weight.data.zero_()
    shard_linears(holder.model)
    holder.load_state_dict({name: whole(value) for name, value in states.items()})
    assert_weights(holder.model, small_mlp())


@case("an average of the weights, saved and loaded")
def averaged_model(rank: int, world_size: int) -> None:
    pair = Pair(small_mlp())
    pair.optimize(torch.optim.SGD, lr=0.3)
    averages = [
        AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for each in pair.both
    ]
    for step in range(3):
        pair.backward(rank, world_size, step=step)
        pair.step()
        for average, each in zip(averages, pair.both, strict=True):
            average.update_parameters(each)
    states = averages[0].state_dict()
    expected = averages[1].state_dict()
    assert {n: v.shape for n, v in states.items()} == {n: v.shape for n, v in expected.items()}
    averages[0].load_state_dict(states)
    assert_weights(averages[0].module, averages[1].module)
    assert_close(averages[0](batch_of(0)), averages[1](batch_of(0)), "output of the average")


@case("optimizer state of parameters that are unfrozen or frozen later was dropped")
def optimizer_state_of_frozen_parameters(rank: int, world_size: int) -> None:
    model = small_mlp()
    model[0].requires_grad_(False)
    pair = Pair(model)
    pair.optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in pair.both]
    for step, frozen in enumerate([None, 2]):
        pair.backward(rank, world_size, step=step)
        pair.step()
        for each in pair.both:
            each.requires_grad_(True)
            if frozen is not None:
                each[frozen].requires_grad_(False)
    pair.backward(rank, world_size, step=2)
    pair.step()
    pair.assert_weights()
    options = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(pair.model, pair.optimizers[0], options=options)
    if rank == 0:
        assert set(states["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@case("adapters saved whole, beside frozen weights that weight decay must not move")
def adapters_under_weight_decay(rank: int, world_size: int) -> None:
    def shard(model: nn.Sequential) -> None:
        for unit in model:
            fully_shard(unit)
        fully_shard(model)

    torch.manual_seed(0)
    pair = Pair(nn.Sequential(LowRank(), LowRank(), LowRank()), shard)
    pair.optimizers = [
        torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.3) for each in pair.both
    ]
    for _ in range(3):
        pair.backward(rank, world_size)
        pair.step()
    pair.assert_weights()
    expected = dict(pair.reference.named_parameters())
    for name, parameter in pair.model.named_parameters():
        if parameter.requires_grad:
            assert whole(parameter.detach()).shape == expected[name].shape
        else:
            assert parameter.grad is None
