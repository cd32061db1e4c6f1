"""Whole training steps of the CUDA build: the numbers of the CPU run, in every order of streams.

In the simulation the same bits come out, as torch's own operators run on the CPU there; on a real
GPU the losses agree within rounding. Freed parameters are NaN.
"""

from __future__ import annotations

import itertools

import cudasim
import pytest
from cuda_training import Training, run_orders
from ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

COMMS = ("nvlink", "nccl", "c10d")
EXACT = ("auto", "nvlink")  # adds in rank order, as on CPU
ORDERS = [("eager", 1), ("late", 1), *(("random", seed) for seed in range(3))]
# Random orders of each case of `test_every_order`; together at least 200.
NUM_SEEDS = 20


def check(world_size: int, training: Training, orders: list[tuple[str, int]], exact: bool) -> None:
    for cpu, *results in run_ranks(world_size, run_orders, training, orders, timeout=600):
        if exact and cudasim.active:
            assert set(results) == {cpu}
            continue
        limit = 2e-2 if training.low else 1e-5
        assert len(set(results)) == 1 or not cudasim.active
        assert results[0].losses == pytest.approx(cpu.losses, rel=limit)


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("world_size", "comm"), [(1, "auto"), *itertools.product((2, 4), COMMS)])
def test_every_order(world_size: int, comm: str, low: bool) -> None:
    orders = [("eager", 1), ("late", 1), *(("random", seed) for seed in range(NUM_SEEDS))]
    check(world_size, Training(comm=comm, low=low), orders, exact=comm in EXACT)


WAYS = {
    "prefetch 0": Training(prefetch=0),
    "prefetch 2": Training(prefetch=2),
    "accumulation": Training(num_micro_batches=3, sync_each=False),
    "dropped": Training(num_micro_batches=3, sync_each=False, drops=True),
    "taken by grad": Training(taken=True),
    "several backwards": Training(num_micro_batches=2),
    "frozen": Training(frozen=True, num_steps=3),
    "another dtype": Training(converted=True, num_steps=3),
    "checkpointing": Training(checkpoint=True, low=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_train(way: str) -> None:
    check(2, WAYS[way], ORDERS, exact=True)


def test_hsdp() -> None:
    check(4, Training(replicas=2), ORDERS, exact=True)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("comm", ["nvlink", "nvlink-copy", "nccl", "c10d"])
def test_smaller_groups(comm: str, prefetch: int) -> None:
    training = Training(comm=comm, few=2, prefetch=prefetch, low=True, num_micro_batches=2)
    check(4, training, ORDERS, exact=comm.startswith("nvlink"))
