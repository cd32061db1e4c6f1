"""`flat_parameters`: the optimizer sees a few flat tensors and does what it would do to all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import fsdpx
from fsdpx import FlatParameter, ShardedTensor, fully_shard


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 5), nn.Linear(5, 5))


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for index in (0, 2):
        fully_shard(model[index], **options)
    fully_shard(model, **options)
    return model


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.3},
    ]


def batch(seed: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.01, "foreach": True},
    "Adam": {"lr": 0.01, "foreach": False},
    "RMSprop": {"lr": 0.01},
    "Adagrad": {"lr": 0.1},
}


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().full_tensor() for p in model.parameters()]


def _flat_equals_separate(rank: int, size: int, granularity: str) -> None:
    for name, options in OPTIMIZERS.items():
        one, other = (shard(make(), granularity=granularity) for _ in range(2))
        flat = getattr(torch.optim, name)(fsdpx.flat_parameters(one, groups(one)), **options)
        separate = getattr(torch.optim, name)(groups(other), **options)
        for seed in range(4):
            for model, optimizer in ((one, flat), (other, separate)):
                optimizer.zero_grad(set_to_none=seed != 2)
                model(batch(seed * size + rank)).square().mean().backward()
            params = [p for group in flat.param_groups for p in group["params"]]
            found = torch.nn.utils.clip_grad_norm_(params, 0.1)
            assert torch.allclose(found, torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1))
            for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
                theirs.grad.copy_(mine.grad.full_tensor())
            flat.step()
            separate.step()
            for mine, theirs in zip(values(one), values(other), strict=True):
                assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("granularity", ["element", "row", "parameter"])
def test_steps_equal_those_of_separate_parameters(granularity: str) -> None:
    run_ranks(3, _flat_equals_separate, granularity)


def test_few_tensors_over_the_same_memory() -> None:
    model = shard(make())
    flats = fsdpx.flat_parameters(model)
    assert len(flats) == 3
    assert all(type(flat) is FlatParameter for flat in flats)
    assert all(isinstance(flat, nn.Parameter) for flat in flats)
    with torch.no_grad():
        flats[0].zero_()
    assert not any(p.detach().any() for p in (*model[1].parameters(), *model[3].parameters()))
    assert all(p.detach().any() for p in (*model[0].parameters(), *model[2].parameters()))
    assert len(fsdpx.flat_parameters(model, groups(model))[0]["params"]) >= 3


def test_edits_are_seen_by_the_next_forward() -> None:
    model = shard(make(), reshard_after_forward=False)
    before = model(batch(0))
    with torch.no_grad():
        for flat in fsdpx.flat_parameters(model):
            flat.mul_(2.0)
    assert not torch.equal(model(batch(0)), before)


def test_frozen_and_ignored_parameters_stay_as_they_are() -> None:
    model = make()
    model[0].bias.requires_grad_(False)
    ignored = model[1].weight
    shard(model, ignored_params={ignored})
    flats = fsdpx.flat_parameters(model)
    kept = [p for p in flats if type(p) is not FlatParameter]
    assert len(kept) == 2
    assert kept[0] is model[0].bias
    assert kept[1] is ignored
    optimizer = torch.optim.SGD(flats, lr=1.0)
    before = values(model[0])
    model(batch(0)).sum().backward()
    optimizer.step()
    after = values(model[0])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])
    model[0].bias.requires_grad_(True)  # unfrozen later: the optimizer has it
    model(batch(0)).sum().backward()
    optimizer.step()
    assert not torch.equal(before[1], values(model[0])[1])


def test_a_missing_gradient_among_others_is_refused_by_name() -> None:
    model = shard(make())
    optimizer = torch.optim.SGD(fsdpx.flat_parameters(model), lr=1.0)
    model(batch(0)).sum().backward()
    model[0].bias.grad = None
    with pytest.raises(RuntimeError, match=r"'0.bias' has no gradient .* group of its own"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # none has one: nothing to do


def test_gradients_of_the_users_own_making_count() -> None:
    model = shard(make())
    flats = fsdpx.flat_parameters(model)
    model(batch(0)).sum().backward()
    model[0].weight.grad = torch.ones(9, 6)
    assert torch.equal(flats[1].grad.norm() ** 2, model[0].bias.grad.norm() ** 2 + 54)
    with pytest.raises(RuntimeError, match=r"set \.grad of those"):
        flats[1].grad = flats[1].detach()


def test_memory_that_to_empty_moved_is_followed() -> None:
    model = shard(make())
    optimizer = torch.optim.SGD(fsdpx.flat_parameters(model), lr=1.0)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model(batch(0)).square().sum().backward()
    gradient = model[0].weight.grad.full_tensor()
    optimizer.step()
    assert torch.equal(model[0].weight.full_tensor(), 0.5 - gradient)


def test_state_by_the_names_of_the_parameters() -> None:
    model, other = shard(make()), shard(make())
    flats = fsdpx.flat_parameters(model)
    mine, theirs = torch.optim.Adam(flats), torch.optim.Adam(other.parameters())
    for each, optimizer in ((model, mine), (other, theirs)):
        each(batch(0)).sum().backward()
        optimizer.step()
    found: dict[str, ShardedTensor] = {}
    for flat in flats:
        found |= flat.split_by_name(mine.state[flat]["exp_avg"])
    for name, parameter in other.named_parameters():
        assert torch.equal(found[name], theirs.state[parameter]["exp_avg"]), name


def test_optimizers_resume() -> None:
    model = shard(make())
    mine = torch.optim.Adam(fsdpx.flat_parameters(model))
    model(batch(0)).sum().backward()
    mine.step()
    fresh = torch.optim.Adam(fsdpx.flat_parameters(model), lr=0.7)
    fresh.load_state_dict(copy.deepcopy(mine.state_dict()))
    before = values(model)
    mine.step()
    after = values(model)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    fresh.step()
    assert all(torch.equal(a, b) for a, b in zip(after, values(model), strict=True))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="call fully_shard first"):
        fsdpx.flat_parameters(make())
    model = shard(make())
    twice = [{"params": [model[0].weight]}, {"params": [model[0].weight]}]
    with pytest.raises(ValueError, match=r"'0.weight' is in two groups"):
        fsdpx.flat_parameters(model, twice)
