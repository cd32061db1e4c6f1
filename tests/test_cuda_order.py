"""Streams of a training step on CUDA: no event wait is missing, and none is there for nothing.

Each kind of wait is left out, and an order must then give other numbers. The simulation leaves out
what the test names by the operations that the wait orders: (stream, its next operation, stream of
the event, the operation before it).
"""

from __future__ import annotations

import re
from typing import Any

import cudasim
import pytest
from cuda_training import Result, Training, poisoned, train
from ranks import run_ranks

pytestmark = [pytest.mark.simulation, pytest.mark.timeout(600)]

NUM_STEPS = 4
LIMIT = 300  # seconds of each run
ORDERS = [("late", 1), *(("random", seed) for seed in range(8))]
Kind = tuple[str, str, str, str]
TRAINING = Training(comm="nccl", num_steps=NUM_STEPS)
# No gather in backward makes the streams wait for each other.
STAGE_2 = Training(comm="nccl", num_steps=NUM_STEPS, zero_stage=2)
FEW = Training(comm="nccl", num_steps=NUM_STEPS, few=2)
# Kinds of waits in a step, by what goes wrong without them. The memset makes freed parameters NaN.
WAITS: dict[str, Kind] = {
    "gathers read shards that the optimizer writes": ("comm", "kernel", "compute", "operator"),
    "gathers write where freed parameters are in use": ("comm", "kernel", "compute", "memset"),
    "units compute before they are gathered": ("compute", "operator", "comm", "AllGather"),
    "gradients are packed into a buffer that is in use": ("compute", "kernel", "comm", "kernel"),
    "gradients are reduced before they are packed": ("comm", "ReduceScatter", "compute", "kernel"),
    "optimizers read gradients before they are reduced": ("compute", "operator", "comm", "kernel"),
}
# Another, of units that are resharded to a smaller group.
COPIES_FIRST: Kind = ("comm", "kernel", "compute", "memcpy")


def family(operation: str) -> str:
    if operation.startswith("aten."):
        return "operator"
    return "kernel" if operation.startswith("_Z") else re.split(r"\W", operation)[0]


def kind_of(wait: dict[str, Any]) -> Kind:
    stream, other = (
        "compute" if s == 0 else "comm" for s in (wait["stream"], wait["event_stream"])
    )
    return stream, family(wait["before"]), other, family(wait["after"])


def waits_of_steps(rank: int, world_size: int, training: Training) -> list[list[Kind]]:
    """Kinds of the waits of each step, in the order of their issue."""
    steps: list[list[Kind]] = []

    def after_step(step: int) -> None:
        steps.append([kind_of(wait) for wait in cudasim.waits()])
        cudasim.reset()

    cudasim.reset()
    with poisoned():
        train(rank, world_size, training, "cuda", after_step)
    return steps


def train_without(
    rank: int, world_size: int, training: Training, waits: list[Kind], left_out: Kind | None
) -> list[Result]:
    """In each of the orders; from the second step on, without the waits of this kind."""
    indices = [i for i, kind in enumerate(waits) if kind == left_out]

    def after_step(step: int) -> None:
        if step == 0:
            cudasim.drop_waits(len(waits), indices)

    results = []
    for order, seed in ORDERS:
        cudasim.reset()
        cudasim.configure(order=order, seed=seed, timeout_s=20)
        with poisoned():
            results.append(train(rank, world_size, training, "cuda", after_step))
    return results


def steady_waits(training: Training, num_ranks: int = 2) -> list[Kind]:
    first, *later = run_ranks(num_ranks, waits_of_steps, training, timeout=LIMIT)[0]
    assert later[0] == later[1] == later[2], "steps differ in what waits for what"
    assert len(first) <= len(later[0])
    return later[0]


def test_all_kinds_of_waits_are_known() -> None:
    assert set(steady_waits(TRAINING)) == set(WAITS.values())


@pytest.mark.parametrize("wrong", WAITS)
def test_without_a_wait_some_order_fails(wrong: str) -> None:
    training = STAGE_2 if "buffer" in wrong else TRAINING
    waits = steady_waits(training)
    right = run_ranks(2, train_without, training, waits, None, timeout=LIMIT)
    assert len({result for results in right for result in results}) == 2  # losses of two ranks
    left_out = run_ranks(2, train_without, training, waits, WAITS[wrong], timeout=LIMIT)
    assert left_out != right


def test_smaller_groups_gather_copies_after_these_are_made() -> None:
    waits = steady_waits(FEW, 4)
    assert set(waits) == {*WAITS.values(), COPIES_FIRST}
    right = run_ranks(4, train_without, FEW, waits, None, timeout=LIMIT)
    assert len({result.losses for results in right for result in results}) == 4
    assert run_ranks(4, train_without, FEW, waits, COPIES_FIRST, timeout=LIMIT) != right
