"""The virtual clock of a step: what overlaps. A steady step waits for nothing, allocates nothing.

Three units of 100 us forward and 200 us backward, 95 us for each all-gather and reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cudasim
import pytest
import torch
import torch.distributed as dist
from cuda_training import Training, batches, shard
from ranks import run_ranks
from torch import Tensor, nn

import fsdpx

pytestmark = [pytest.mark.simulation, pytest.mark.timeout(600)]

FORWARD, BACKWARD, LINK = 100, 200, 95
COSTS = {"launch_us": 0, "mem_gbps": "inf", "host_gbps": "inf", "link_gbps": "inf", "link_us": LINK}
Spans = list[tuple[str, int, int]]


class Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        cudasim.busy(FORWARD, f"forward {number}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        cudasim.busy(BACKWARD, f"backward {ctx.number}")
        return grads[0], None


class Unit(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Busy.apply(self.linear(x), self.number)
        return out


def meet() -> None:
    """A barrier of the hosts."""
    dist.all_reduce(torch.zeros(1))


def timeline(rank: int, world_size: int, order: str, prefetch: int) -> Spans:
    """Of the second step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Unit(number) for number in (1, 2, 3)))
    mesh = dist.init_device_mesh("cuda", (world_size,))
    for unit in model:
        fsdpx.fully_shard(unit, mesh=mesh, comm="nccl", prefetch=prefetch)
    fsdpx.fully_shard(model, mesh=mesh, comm="nccl", prefetch=prefetch)
    x = torch.randn(4, 8).cuda()
    cudasim.configure(order=order, **COSTS)
    for _ in range(2):
        meet()
        cudasim.reset()
        meet()
        model(x).sum().backward()
    spans = ((s["name"].split("(")[0], s["start_us"], s["end_us"]) for s in cudasim.trace())
    return sorted((s for s in spans if s[1] != s[2]), key=lambda s: (s[1], s[0]))


def compute(*begins: int) -> Iterator[tuple[str, int, int]]:
    """Forward of units 1, 2, 3, then backward of 3, 2, 1."""
    names = ["forward 1", "forward 2", "forward 3", "backward 3", "backward 2", "backward 1"]
    for name, begin in zip(names, begins, strict=True):
        yield name, begin, begin + (FORWARD if "forward" in name else BACKWARD)


def collectives(name: str, *begins: int) -> Iterator[tuple[str, int, int]]:
    for begin in begins:
        yield name, begin, begin + LINK


# Exposed: the first gather and the last reduce-scatter. The last unit stays gathered from forward
# to backward, whose first gather then overlaps with its forward.
PREFETCHED = [
    *compute(95, 195, 295, 395, 595, 795),
    *collectives("AllGather", 0, 95, 195, 295, 395),
    *collectives("ReduceScatter", 595, 795, 995),
]
# Every gather is exposed.
SERIAL = [
    *compute(95, 290, 485, 585, 880, 1175),
    *collectives("AllGather", 0, 195, 390, 785, 1080),
    *collectives("ReduceScatter", 880, 1175, 1375),
]


@pytest.mark.parametrize("order", cudasim.ORDERS)
@pytest.mark.parametrize(("prefetch", "expected"), [(1, PREFETCHED), (0, SERIAL)])
def test_the_timeline_is_exact(order: str, prefetch: int, expected: Spans) -> None:
    first, second = run_ranks(2, timeline, order, prefetch, timeout=300)
    assert first == second == sorted(expected, key=lambda s: (s[1], s[0]))


# ---- A steady step

KINDS = ("nvlink", "nvlink-copy", "nccl", "c10d")


def legacy_stream() -> int:
    """The number of the default stream, which a graph cannot capture."""
    cudasim.busy(1, "legacy", 0)
    return next(span["stream"] for span in cudasim.trace() if span["name"] == "legacy")


def count_steps(rank: int, world_size: int, training: Training) -> list[dict[str, int]]:
    """What the host does in each step, and how much runs on the legacy stream.

    Of a model that computes on a stream of its own, as the capture of a graph needs it.
    """
    counted, legacy = [], legacy_stream()
    with torch.cuda.stream(torch.cuda.Stream()):
        model = shard(training, "cuda", world_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for micro_batches in list(batches(training, rank, "cuda")):
            cudasim.reset()
            for x, y in micro_batches:
                (model(x).float() - y).square().mean().backward()
            fsdpx.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            counters = cudasim.counters()
            counters["legacy"] = sum(span["stream"] == legacy for span in cudasim.trace())
            counted.append(counters)
    cudasim.finish()
    return counted


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("comm", KINDS)
def test_a_steady_step_neither_waits_nor_allocates(comm: str, low: bool) -> None:
    training = Training(comm=comm, low=low, num_steps=5, num_micro_batches=2)
    for steps in run_ranks(2, count_steps, training, timeout=300):
        for step in steps[3:]:
            asked = {key: step[key] for key in ("host_waits", "allocations", "frees", "legacy")}
            assert not any(asked.values()), asked
            assert step["launches"] > 0
