"""Optimizers of torch on sharded models, step by step beside the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from fsdpx import ShardedTensor, fully_shard


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Linear(5, 5))


def shard(model: nn.Sequential, granularity: Any = "element") -> nn.Sequential:
    for index in (0, 2):
        fully_shard(model[index], granularity=granularity)
    fully_shard(model, granularity=granularity)
    return model


def batches(step: int, world_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(4, 6, generator=generator) for _ in range(world_size)]


def train(
    model: nn.Module, reference: nn.Module, optimizers: Any, steps: Any, rank: int, size: int
) -> float:
    """Steps both with the same gradients; the largest difference of weights."""
    for step in steps:
        inputs = batches(step, size)
        model.zero_grad()
        model(inputs[rank]).square().mean().backward()
        for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
            whole.grad = sharded.grad.full_tensor()
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((p.full_tensor() - q).abs().max().item() for p, q in pairs)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


# ---- rows and matrices

WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("Muon", {}),
    ("Muon", {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    ("Adafactor", {"foreach": False}),
    ("Adafactor", {"foreach": True, "weight_decay": 0.1}),
    ("AdamW", {"foreach": True}),
]


def _whole(rank: int, size: int) -> list[float]:
    differences = []
    for name, options in WHOLE:
        reference, model = make(), shard(make(), "parameter")
        chosen = matrices if name == "Muon" else lambda m: list(m.parameters())
        optimizers = [getattr(torch.optim, name)(chosen(m), **options) for m in (model, reference)]
        differences.append(train(model, reference, optimizers, range(3), rank, size))
    return differences


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_optimizers_of_whole_matrices(world_size: int) -> None:
    for found in run_ranks(world_size, _whole):
        assert found == [0.0] * len(WHOLE)


def _cut(rank: int, size: int, name: str, granularity: str) -> str:
    model = shard(make(), granularity)
    optimizer = getattr(torch.optim, name)(matrices(model))
    model(batches(0, size)[rank]).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("granularity", ["element", "row"])
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_cut_matrices_are_refused_by_name(name: str, granularity: str) -> None:
    for message in run_ranks(2, _cut, name, granularity):
        assert "'0.weight' (8, 6) is sharded" in message
        assert 'granularity="parameter"' in message


def _by_function(rank: int, size: int) -> tuple[float, list[bool]]:
    reference, model = make(), make()
    shard(model, lambda name, p: "parameter" if p.ndim == 2 else "element")
    muons = [torch.optim.Muon(matrices(m)) for m in (model, reference)]
    rest = [
        torch.optim.AdamW([p for p in m.parameters() if p.ndim < 2]) for m in (model, reference)
    ]
    difference = train(model, reference, [*muons, *rest], range(3), rank, size)
    return difference, [p._spec.whole for p in model.parameters()]


def test_granularity_may_depend_on_the_parameter() -> None:
    for difference, whole in run_ranks(2, _by_function):
        assert difference == 0.0
        assert whole == [True, False] * 3


def _resume(rank: int, size: int) -> float:
    """Whole state of an unsharded optimizer goes on in the sharded one."""
    reference, model = make(), shard(make(), "parameter")
    mine, theirs = (torch.optim.Adafactor(m.parameters()) for m in (model, reference))
    train(model, reference, [mine, theirs], range(2), rank, size)
    saved = mine.state_dict()
    fresh = torch.optim.Adafactor(model.parameters())
    fresh.load_state_dict(saved)
    return train(model, reference, [fresh, theirs], range(2, 4), rank, size)


def test_state_of_rows_and_columns_is_saved_and_loaded() -> None:
    assert run_ranks(2, _resume) == [0.0, 0.0]


# ---- optimizers that were made before

EARLY: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),  # has state from the start
    "ASGD": lambda p: torch.optim.ASGD(p),
}


def _early(rank: int, size: int, name: str, stepped: bool) -> float:
    reference, model = make(), make()
    optimizers = [EARLY[name](list(m.parameters())) for m in (model, reference)]
    if stepped:
        for m, optimizer in zip((model, reference), optimizers, strict=True):
            m(batches(9, 1)[0]).sum().backward()
            optimizer.step()
    shard(model)
    difference = train(model, reference, optimizers, range(3), rank, size)
    state = optimizers[0].state[next(model.parameters())]
    kept = [v for k, v in state.items() if isinstance(v, Tensor) and v.dim()]
    assert all(type(value) is ShardedTensor for value in kept)
    return difference


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", EARLY)
def test_optimizers_made_before_wrapping_go_on(name: str, stepped: bool) -> None:
    differences = run_ranks(2, _early, name, stepped)
    assert max(differences) <= (1e-7 if name == "fused" else 0.0)


def test_whole_state_that_is_loaded_is_sharded_at_the_next_step() -> None:
    reference, model = make(), shard(make())
    theirs, mine = (torch.optim.Adam(m.parameters()) for m in (reference, model))
    train(model, reference, [theirs, mine], range(2), 0, 1)
    other = torch.optim.Adam(model.parameters())
    other.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert train(model, reference, [theirs, other], range(2, 4), 0, 1) == 0.0


def test_a_parameter_that_only_gave_its_values_is_refused_in_an_optimizer() -> None:
    model = shard(make())
    mine = nn.Parameter(torch.ones(8, 6))
    model[0].weight = mine
    optimizer = torch.optim.SGD([mine], lr=1.0)
    model(batches(0, 1)[0]).sum().backward()
    with pytest.raises(RuntimeError, match=r"SGD holds a parameter .* sharded parameter 'weight'"):
        optimizer.step()
