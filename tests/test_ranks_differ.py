"""Ranks that do different things: the right numbers, or the same named error everywhere."""

import copy
from collections.abc import Iterable

import pytest
import torch
from ranks import run_ranks, stop_pool
from torch import Tensor, nn

from fsdpx import DesyncError, fully_shard

KINDS = ("shm", "c10d")


class Chain(nn.Module):
    """Five layers and a head of its own; a skipped one runs, but its output is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
        self.head = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor, skipped: set[int]) -> Tensor:
        for index, layer in enumerate(self.layers):
            y = layer(x)
            if index not in skipped:
                x = torch.tanh(y)
        return x @ self.head


class Branches(nn.Module):
    """Two layers, of which one runs."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, out_features)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.first(x) if branch == 0 else self.second(x)


def shard(model: nn.Module, kind: str, prefetch: int = 1) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, comm=kind, prefetch=prefetch)
    return fully_shard(model, comm=kind, prefetch=prefetch)


def inputs(rank: int) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(rank))


def train_skipping(
    rank: int,
    world_size: int,
    kind: str,
    steps: list[list[set[int]]],
    frozen: Iterable[int] = (),
    prefetch: int = 1,
) -> list[float]:
    """The largest gradient error of each step, with skips by rank."""
    torch.manual_seed(0)
    reference = Chain()
    for index in frozen:
        reference.layers[index].requires_grad_(False)
    model = shard(copy.deepcopy(reference), kind, prefetch)
    errors = []
    for skipped in steps:
        model(inputs(rank), skipped[rank]).sum().backward()
        for each in range(world_size):
            (reference(inputs(each), skipped[each]).sum() / world_size).backward()
        worst = 0.0
        for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
            assert (sharded.grad is None) == (whole.grad is None)
            if whole.grad is not None:
                worst = max(worst, (sharded.grad.full_tensor() - whole.grad).abs().max().item())
        errors.append(worst)
        model.zero_grad()
        reference.zero_grad()
    return errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skipped", [[set(), {2}], [{1}, {3}], [{0, 4}, set()], [{2}, {2}]])
def test_unit_unused_on_some_ranks_counts_as_zeros(kind: str, skipped: list[set[int]]) -> None:
    assert run_ranks(2, train_skipping, kind, 4 * [skipped]) == [[0.0] * 4] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("frozen", [{3}, {1, 2, 3}, {0, 1, 4}])
def test_frozen_unit_unused_on_some_ranks(kind: str, frozen: set[int], prefetch: int) -> None:
    steps = [[set(), frozen], [frozen, set()], [frozen, frozen], [{1, 2}, {3}], [{4}, {0, 2}]]
    assert run_ranks(2, train_skipping, kind, steps, frozen, prefetch) == [[0.0] * 5] * 2


def run_branches(rank: int, world_size: int, kind: str, out_features: int) -> str:
    torch.manual_seed(0)
    model = shard(Branches(out_features), kind)
    try:
        model(inputs(rank), rank).sum().backward()
    except DesyncError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_features", [6, 9])
def test_different_branches_are_an_error_that_names_both(kind: str, out_features: int) -> None:
    try:
        messages = run_ranks(2, run_branches, kind, out_features)
    finally:
        stop_pool(2)  # a communicator whose ranks differ stays broken
    for message in messages:
        assert "rank 0 does all_gather of unit 'first'" in message
        assert "rank 1 does all_gather of unit 'second'" in message


def edit_and_forward(rank: int, world_size: int, kind: str, kept: bool) -> float:
    """Writes to the shards, on rank 1 in more steps than on rank 0, between two forwards."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1, bias=False))
    model = shard(copy.deepcopy(reference), kind)
    model.set_reshard_after_forward(not kept)
    x = inputs(0)
    with torch.no_grad():
        model(x)
        for parameter in model.parameters():
            local = parameter.to_local()
            for piece in local.split(1 + 2 * (1 - rank)) if local.numel() else ():
                piece.mul_(2.0)
        for whole in reference.parameters():
            whole.mul_(2.0)
        return (model(x) - reference(x)).abs().max().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [False, True])
def test_writes_need_not_be_alike_on_all_ranks(kind: str, kept: bool) -> None:
    assert run_ranks(2, edit_and_forward, kind, kept) == [0.0, 0.0]
