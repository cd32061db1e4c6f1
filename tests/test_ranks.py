"""The harness itself: results, failures, crashes and time limits of ranks."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, refused, run_ranks


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


DUPLICATE = "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0"
NOT_MAPPED = "ValueError: fsdpx: comm kind 'nvlink' is impossible: rank 1 maps nothing of rank 0"


@pytest.mark.parametrize(
    ("num_gpus", "peers", "text", "reason"),
    [
        (1, True, DUPLICATE, "refuses several ranks on one GPU"),
        (2, True, DUPLICATE, None),
        (2, False, NOT_MAPPED, r"GPUs \(0, 1\) cannot map each other's memory: .*rank 1"),
        (2, True, NOT_MAPPED, None),
        (2, False, "AssertionError: 1 != 2", None),
    ],
)
def test_what_gpus_cannot_do_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, peers: bool, text: str, reason: str | None
) -> None:
    monkeypatch.setattr("cudasim.active", False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: peers)
    found = refused(2, text)
    assert found is None if reason is None else re.search(reason, str(found))
