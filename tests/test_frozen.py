"""Frozen parameters, in and across units, changing from step to step.

After the behaviours that FSDP2's own tests check: mixed `requires_grad` within a unit and across
units, several forwards, freezing and unfreezing between steps.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import fsdpx
from fsdpx import fully_shard

NUM_BLOCKS = 3


def make() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(NUM_BLOCKS)]
    return nn.Sequential(*blocks)


def shard(model: nn.Sequential, **options: object) -> nn.Sequential:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


# Which parameters train in a step: (name of the parameter, number of its block, step).
SCHEDULES: dict[str, Callable[[str, int, int], bool]] = {
    "biases frozen": lambda name, block, step: not name.endswith("bias"),
    "weights frozen": lambda name, block, step: name.endswith("bias"),
    "a block frozen": lambda name, block, step: block != 1,
    "the first block frozen": lambda name, block, step: block != 0,
    "the last block trains": lambda name, block, step: block == NUM_BLOCKS - 1,
    "one block each step": lambda name, block, step: block == step % NUM_BLOCKS,
    "halves in turns": lambda name, block, step: (block + step) % 2 == 0,
    "all unfrozen later": lambda name, block, step: step > 1 or (block == 0 and "2" in name),
}


def _trains(rank: int, size: int, trains: str, reshard: bool, num_forwards: int) -> None:
    model, reference = shard(make(), reshard_after_forward=reshard), make()
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (model, reference)]
    for step in range(4):
        for each in (model, reference):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(SCHEDULES[trains](name, int(name[0]), step))
        before = [p.detach().full_tensor() for p in model.parameters()]
        for number in range(num_forwards):
            generator = torch.Generator().manual_seed(10 * step + number)
            inputs = torch.randn(4 * size, 6, generator=generator)
            model(inputs[4 * rank :][:4]).square().mean().backward()
            reference(inputs).square().mean().backward()
        pairs = list(zip(model.named_parameters(), reference.parameters(), strict=True))
        for (name, mine), theirs in pairs:
            assert (mine.grad is None) == (theirs.grad is None), (name, step)
            if theirs.grad is not None:
                assert torch.allclose(mine.grad.full_tensor(), theirs.grad, atol=1e-6), (name, step)
                theirs.grad.copy_(mine.grad.full_tensor())  # Adam turns rounding into signs
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for ((name, mine), theirs), old in zip(pairs, before, strict=True):
            now = mine.detach().full_tensor()
            assert torch.equal(now, old) != mine.requires_grad, (name, step)
            assert torch.equal(now, theirs), (name, step)


@pytest.mark.parametrize(("reshard", "num_forwards"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("trains", SCHEDULES)
def test_steps_equal_the_unsharded_models(trains: str, reshard: bool, num_forwards: int) -> None:
    run_ranks(2, _trains, trains, reshard, num_forwards)


def reductions(model: nn.Module, inputs: Tensor) -> list[str]:
    """Units whose gradients a step reduces."""
    with fsdpx.record_timeline(model) as timeline:
        model(inputs).sum().backward()
    return [r.unit for r in timeline.records if r.operation == "reduce_scatter"]


def test_frozen_units_are_not_reduced() -> None:
    model = shard(make())
    inputs = torch.randn(4, 6)
    model[1].requires_grad_(False)
    assert sorted(reductions(model, inputs)) == ["0", "2"]
    model.requires_grad_(False)
    model[2][0].bias.requires_grad_(True)
    assert reductions(model, inputs) == ["2"]
    model.requires_grad_(True)
    assert sorted(reductions(model, inputs)) == ["0", "1", "2"]


def gathers(model: nn.Module, inputs: Tensor) -> list[str]:
    with fsdpx.record_timeline(model) as timeline:
        model(inputs).sum().backward()
    return [r.unit for r in timeline.records if r.operation == "all_gather"]


def test_frozen_units_that_backward_need_not_read_are_gathered_once() -> None:
    model = shard(make())
    counts = []
    for frozen in ([0], [0, 1], [0], [0, 1]):
        for index, block in enumerate(model):
            block.requires_grad_(index not in frozen)
        for _ in range(2):
            found = gathers(model, torch.ones(4, 6))
            counts.append([found.count(name) for name in "012"])
    known, learning = [[1, 2, 2], [1, 1, 2]], [[2, 2, 2], [2, 2, 2]]
    assert counts[0::2] == [*learning, *known]
    assert counts[1::2] == [*known, *known]


def test_a_frozen_model_gives_gradients_of_its_input() -> None:
    model, reference = shard(make()).requires_grad_(False), make().requires_grad_(False)
    inputs = [torch.ones(4, 6, requires_grad=True) for _ in range(2)]
    for each, x in zip((model, reference), inputs, strict=True):
        each(x).square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert all(p.grad is None for p in model.parameters())
    assert not any(unit.is_gathered for unit in fsdpx.unit.units(model))
