"""The harness itself: results, failures, crashes and time limits of ranks."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks


def add_up(rank: int, world_size: int, value: int) -> tuple[int, float, int]:
    total = torch.tensor([float(rank + value)])
    dist.all_reduce(total)
    return rank, total.item(), os.getpid()


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("rank 1 only")


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


def crash_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)


def test_results_come_in_rank_order_from_lasting_workers() -> None:
    first = run_ranks(2, add_up, 3)
    again = run_ranks(2, add_up, 4)
    assert [r[:2] for r in first] == [(0, 7.0), (1, 7.0)]
    assert [r[:2] for r in again] == [(0, 9.0), (1, 9.0)]
    assert [r[2] for r in first] == [r[2] for r in again]


def test_an_exception_comes_back_with_its_traceback() -> None:
    with pytest.raises(RankError, match="fail_on_one") as info:
        run_ranks(2, fail_on_one)
    (failure,) = info.value.failures
    assert failure.rank == 1
    assert isinstance(failure.exception, KeyError)


@pytest.mark.parametrize(("fn", "what"), [(hang_on_one, "within 1.0 s"), (crash_on_one, "code 7")])
def test_stuck_and_dead_workers_are_replaced(fn: object, what: str) -> None:
    assert callable(fn)
    with pytest.raises(RankError, match=what):
        run_ranks(2, fn, timeout=1.0)
    assert [r[1] for r in run_ranks(2, add_up, 3)] == [7.0, 7.0]
