"""Whole parameters outside of forward."""

import copy

import pytest
import torch
from ranks import run_ranks
from torch import nn

import fsdpx
from fsdpx import MixedPrecisionPolicy, ShardedTensor, fully_shard
from fsdpx.unit import units


def models(**options: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5, bias=False))
    model = copy.deepcopy(reference)
    for index in (0, 2):
        fully_shard(model[index], **options)
    return fully_shard(model, **options), reference


def read_and_edit(rank: int, world_size: int, low_precision: bool) -> list[float]:
    """What whole parameters differ by inside, and what shards and outputs differ by afterwards."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low_precision else None)
    model, reference = models(mp_policy=policy)
    x = torch.randn(3, 6)
    with fsdpx.full_parameters(model), torch.no_grad():
        inside = (model[0].weight.float() - reference[0].weight).abs().max().item()
        assert isinstance(next(model.parameters()), ShardedTensor)
        for _ in range(1 + rank):  # gathers nothing, so ranks may differ
            model(x)
        model[0].weight[1].fill_(2.0)
    with torch.no_grad():
        reference[0].weight[1].fill_(2.0)
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        after = max((a.full_tensor() - b).abs().max().item() for a, b in pairs)
        output = (model(x).float() - reference(x)).abs().max().item()
    assert not any(unit.held for unit in units(model))
    return [inside, after, output]


@pytest.mark.parametrize("world_size", [1, 3])
def test_edits_last(world_size: int) -> None:
    assert run_ranks(world_size, read_and_edit, False) == [[0.0, 0.0, 0.0]] * world_size


def test_edits_leave_what_low_precision_cannot_hold() -> None:
    for inside, after, output in run_ranks(2, read_and_edit, True):
        assert 0.0 < inside < 0.01
        assert after == 0.0
        assert output < 0.05


def test_edits_can_be_thrown_away() -> None:
    model, reference = models()
    with fsdpx.full_parameters(model, writeback=False), torch.no_grad():
        model[0].weight.zero_()
    x = torch.randn(3, 6)
    assert torch.equal(model(x), reference(x))
    model(x).sum().backward()
    assert not any(unit.is_gathered for unit in units(model))


def test_training_goes_on_inside() -> None:
    model, reference = models()
    x = torch.randn(3, 6)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    with fsdpx.full_parameters(model):
        for _ in range(2):
            for each, optimizer in zip((model, reference), optimizers, strict=True):
                each(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(sharded.full_tensor(), whole)


def edit_both(model: nn.Module) -> None:
    with fsdpx.full_parameters(model), torch.no_grad():
        model[0].weight.zero_()
        next(model.parameters()).mul_(2.0)


def test_shard_and_whole_edited_at_once_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"unit '0'.*in place"):
        edit_both(models()[0])


def test_not_inside_a_forward() -> None:
    class Peeks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with fsdpx.full_parameters(self):
                return super().forward(x)

    model = fully_shard(Peeks(2, 2))
    with pytest.raises(RuntimeError, match=r"forward or backward of unit .* runs"):
        model(torch.ones(1, 2))


def test_needs_units() -> None:
    with (
        pytest.raises(ValueError, match="call fully_shard first"),
        fsdpx.full_parameters(nn.Linear(2, 2)),
    ):
        pass
