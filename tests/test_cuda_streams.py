"""Programs that compute on streams of their own: the numbers of one stream, in every order.

In simulation. A rank's model branches to a side stream inside a unit, or trains on one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import cudasim
import pytest
import torch
from cuda_training import poisoned
from ranks import run_ranks
from torch import Tensor, nn

import fsdpx

pytestmark = [pytest.mark.simulation, pytest.mark.timeout(300)]
LIMIT = 240.0
WIDTH = 12
ORDERS = [("late", 1), *(("random", seed) for seed in range(6))]


@contextlib.contextmanager
def on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """On another stream, between what comes before and after on the current one."""
    if stream is None:
        yield
        return
    outer = torch.cuda.current_stream()
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        yield
    outer.wait_stream(stream)


class Branches(nn.Module):
    """A unit whose weights are read on two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.side: torch.cuda.Stream | None = None

    def forward(self, x: Tensor) -> Tensor:
        with on(self.side):
            left: Tensor = self.left(x).tanh()
        right: Tensor = self.right(x)
        return left + right


def train(rank: int, side: torch.cuda.Stream | None, own: torch.cuda.Stream | None) -> list[float]:
    """Sums of the weights after each step; branches on `side`, everything else on `own`."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Branches() for _ in range(3))).cuda()
    for block in model:
        block.side = side
        fsdpx.fully_shard(block, comm="nccl", reshard_after_forward=True)
    fsdpx.fully_shard(model, comm="nccl")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank)).cuda()
    sums: list[float] = []
    for _ in range(3):
        with on(own):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sums.append(sum(p.full_tensor().double().sum().item() for p in model.parameters()))
    return sums


def compare(rank: int, world_size: int, uses: str) -> None:
    expected = train(rank, None, None)
    stream = torch.cuda.Stream()
    streams = {"branch": (stream, None), "whole": (None, stream)}[uses]
    for order, seed in ORDERS:
        cudasim.configure(order=order, seed=seed)
        with poisoned():
            assert train(rank, *streams) == expected, (order, seed)


@pytest.mark.parametrize("uses", ["branch", "whole"])
def test_streams_of_the_user(uses: str) -> None:
    run_ranks(2, compare, uses, timeout=LIMIT)


def waits_for_the_side_stream(rank: int, world_size: int) -> int:
    """How often the communication stream waits for it."""
    side = torch.cuda.Stream()
    with cudasim_waits() as waits:
        train(rank, side, None)
    named = [(w["stream"], w["event_stream"]) for w in waits if w["after"].startswith("AllGather")]
    (comm,) = {event_stream for _, event_stream in named}
    (other,) = {stream for stream, _ in named} - {0}
    return sum((w["stream"], w["event_stream"]) == (comm, other) for w in waits)


@contextlib.contextmanager
def cudasim_waits() -> Iterator[list[dict[str, Any]]]:
    waits: list[dict[str, Any]] = []
    cudasim.reset()
    yield waits
    waits += cudasim.waits()


def test_a_place_is_free_once_all_streams_have_read_it() -> None:
    for count in run_ranks(2, waits_for_the_side_stream, timeout=LIMIT):
        assert count >= 3  # in each backward at least one of the blocks
