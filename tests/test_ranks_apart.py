"""Ranks that go apart: every rank gets an error that says who is where, and the way on works."""

from __future__ import annotations

import contextlib
import copy
import datetime
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from conformance.parts import (
    assert_grads,
    backward_of_all_ranks,
    batch_of,
    grads_of,
    mean_square,
    shard_linears,
)
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdpx
from fsdpx import CommTimeout, DesyncError

LIMIT = 2.0  # seconds that ranks wait for each other; connecting must not take longer either
LATE = 3.0

Program = Callable[[nn.Module, int], None]


def train(model: nn.Module, rank: int, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        mean_square(model, batch_of(rank)).backward()


@contextlib.contextmanager
def fault(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    """For rank 0: what fails inside ends when the other ranks have given up."""
    with handle:
        try:
            yield
        finally:
            time.sleep(LATE)


def fail(*args: object) -> None:
    raise ValueError("told to fail")


def raises_in_forward(model: nn.Module, rank: int) -> None:
    if rank == 0:
        with fault(model[2].register_forward_pre_hook(fail)):
            train(model, rank)
    train(model, rank)


def raises_in_backward(model: nn.Module, rank: int) -> None:
    if rank == 0:
        with fault(model[2].register_full_backward_hook(fail)):
            train(model, rank)
    train(model, rank)


def skips_a_batch(model: nn.Module, rank: int) -> None:
    if rank == 0:
        with contextlib.suppress(ValueError), model[2].register_forward_pre_hook(fail):
            train(model, rank)
    train(model, rank, 2)


def runs_more_forwards(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        for _ in range(2 + rank):
            model(batch_of(rank))
    train(model, rank, 2)


def runs_more_steps(model: nn.Module, rank: int) -> None:
    train(model, rank, 2 + rank)
    if rank == 0:
        time.sleep(LATE)


def comes_late(model: nn.Module, rank: int) -> None:
    if rank == 0:
        time.sleep(LATE)
    train(model, rank)


def reduces_later(model: nn.Module, rank: int) -> None:
    with fsdpx.no_sync(model) if rank == 0 else contextlib.nullcontext():
        train(model, rank)
    train(model, rank)


def go_apart(rank: int, world_size: int, kind: str, program: Program) -> tuple[str, str, float]:
    """Runs the program after two clean steps, then three clean steps after a reset.

    Returns:
        The kind of error that ended the program, its message, and after how many seconds.
    """
    waits = program not in (skips_a_batch, runs_more_forwards, reduces_later)
    limit = datetime.timedelta(seconds=LIMIT if waits else 30)
    group = dist.new_group(list(range(world_size)), timeout=limit)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 5))
    reference = copy.deepcopy(model)
    shard_linears(model, mesh=DeviceMesh.from_group(group, "cpu"), comm=kind)
    train(model, rank, 2)
    began = time.monotonic()
    outcome = ("", "", 0.0)
    try:
        program(model, rank)
    except (ValueError, DesyncError) as error:
        outcome = (type(error).__name__, str(error), time.monotonic() - began)
    dist.barrier()
    model.reset_iter_state()
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        mean_square(model, batch_of(rank + step)).backward()
        backward_of_all_ranks(reference, world_size, step=step)
        assert_grads(model, grads_of(reference))
    return outcome


# What rank 0 and rank 1 get, and what rank 1's message says of rank 0 and of itself.
CASES = {
    raises_in_forward: ("ValueError", "CommTimeout", ["ValueError in forward 1 of unit '2'"]),
    raises_in_backward: ("ValueError", "CommTimeout", ["then raised in backward of step 3"]),
    skips_a_batch: (
        "DesyncError",
        "DesyncError",
        [
            "rank 0 does all_gather of unit '0' in forward 2 of step 3",
            "rank 1 does all_gather of unit '3' in backward of step 3",
        ],
    ),
    runs_more_forwards: (
        "DesyncError",
        "DesyncError",
        [
            "rank 0 does all_gather of unit '3' in backward of step 3",
            "rank 1 does all_gather of unit '0' in forward 4 of step 3",
        ],
    ),
    runs_more_steps: ("", "CommTimeout", ["all_gather of unit '0' in forward 1 of step 5"]),
    comes_late: (
        "CommTimeout",
        "CommTimeout",
        ["all_gather of unit '0' in forward 1 of step 3", "raise the time limit"],
    ),
    reduces_later: (
        "DesyncError",
        "DesyncError",
        [
            "rank 0 does all_gather of unit '0' in forward 1 of step 4",
            "rank 1 does reduce_scatter of unit '3' in backward of step 3",
        ],
    ),
}


@pytest.mark.parametrize("kind", ["shm", "c10d"])
@pytest.mark.parametrize("program", CASES, ids=lambda program: program.__name__)
def test_every_rank_learns_who_is_where(kind: str, program: Program) -> None:
    first, second, parts = CASES[program]
    outcomes = run_ranks(2, go_apart, kind, program)
    if kind == "c10d" and program is comes_late:
        first = "DesyncError"  # the connection was closed when it came
    assert [outcome[0] for outcome in outcomes] == [first, second]
    message = outcomes[1][1]
    for part in [*parts, "The last that all did alike was", "call reset_iter_state()"]:
        assert part in message
    assert message.count("fsdpx:") == 1
    for name, text, seconds in outcomes:
        assert name == "ValueError" or not text or "on all ranks" in text
        assert seconds < LATE + 4 * LIMIT


def resets_alone(model: nn.Module, rank: int) -> None:
    if rank == 0:
        model.reset_iter_state()
    else:
        train(model, rank)


@pytest.mark.parametrize("kind", ["shm", "c10d"])
def test_a_reset_on_one_rank_is_told_to_the_others(kind: str) -> None:
    name, message, _ = run_ranks(2, go_apart, kind, resets_alone)[1]
    assert name == ("DesyncError" if kind == "shm" else "CommTimeout")
    assert "rank 0 has left" in message or "0 has finished" in message


def reset_one_of_two(rank: int, world_size: int, kind: str) -> None:
    """Models of one group share its communicator: a reset of one leaves the other in order."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(2)]
    references = copy.deepcopy(models)
    for model in models:
        shard_linears(model, comm=kind)
    for number in (0, 1, 1, 0):
        train(models[number], rank)
        backward_of_all_ranks(references[number], world_size)
        models[0].reset_iter_state()
    for model, reference in zip(models, references, strict=True):
        assert_grads(model, grads_of(reference))


@pytest.mark.parametrize("kind", ["shm", "c10d"])
def test_a_reset_leaves_other_models_in_order(kind: str) -> None:
    run_ranks(2, reset_one_of_two, kind)


def test_a_passed_limit_is_a_kind_of_desync() -> None:
    assert issubclass(CommTimeout, DesyncError)
