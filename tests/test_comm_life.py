"""When communicators come and go: ranks that do not come, groups that end, the order of closing."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import fsdpx.comm
from fsdpx import CommTimeout
from fsdpx.comm import Communicator

LIMIT = 1.0  # seconds
WORKER = "fsdpx-comm"  # name of the thread


def assert_it_works(comm: Communicator) -> None:
    total = torch.ones(3)
    comm.all_reduce(total).wait()
    assert total.tolist() == [float(comm.size)] * 3


def workers() -> int:
    """How many threads of communicators this process has."""
    names = (task / "comm" for task in Path("/proc/self/task").iterdir())
    return sum(name.read_text().strip() == WORKER for name in names if name.exists())


def some_stay_away(rank: int, world_size: int, kind: str) -> str:
    group = dist.new_group(range(world_size))
    text = ""
    if rank == 1:
        with pytest.raises(CommTimeout) as caught:
            fsdpx.comm.create(group, kind=kind, timeout=LIMIT)
        text = str(caught.value)
    dist.barrier()
    comm = fsdpx.comm.create(group, kind=kind, timeout=60.0)
    assert_it_works(comm)
    comm.close()
    return text


@pytest.mark.parametrize("kind", ["shm", "c10d"])
def test_ranks_that_do_not_come_are_named_and_may_come_later(kind: str) -> None:
    text = run_ranks(3, some_stay_away, kind)[1]
    assert f"of 3 ranks, 0, 2 did not come within {LIMIT:g} s" in text
    assert kind in text


def groups_end(_rank: int, world_size: int) -> tuple[int, int]:
    """Threads before, and after groups whose communicators nobody closed."""
    before = workers()
    for _ in range(3):
        group = dist.new_group(range(world_size))
        comm = fsdpx.comm.create(group, kind="shm")
        assert_it_works(comm)
        assert fsdpx.comm.create(group, kind="shm") is comm
        gone = weakref.ref(comm)
        del comm
        assert gone() is not None  # the group keeps it
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert gone() is None
    deadline = time.monotonic() + 10.0
    while workers() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, workers()


def test_communicators_end_with_their_groups() -> None:
    for before, after in run_ranks(2, groups_end):
        assert after == before


def outlives(_rank: int, world_size: int) -> None:
    group = dist.new_group(range(world_size))
    comm = fsdpx.comm.create(group, kind="shm")
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert_it_works(comm)
    comm.close()


def test_who_holds_a_communicator_may_use_it_after_its_group() -> None:
    run_ranks(2, outlives)


def close_everything(rank: int, _size: int) -> list[bool]:
    """At exit, on groups whose ranks made them in the same order."""
    mine = [dist.new_group([r]) for r in range(2)][rank]
    first = fsdpx.comm.create(mine, kind="shm")
    second = fsdpx.comm.create(mine, kind="c10d", beside=first)
    closed: list[Communicator] = []
    close = Communicator.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "close", lambda c, **kw: (closed.append(c), close(c, **kw))[1])
        fsdpx.comm._close_all()
    order = [c for c in closed if c in (first, second)]
    return [order == [second, first], first.closed, second.closed]


def test_at_exit_the_latest_communicator_is_closed_first() -> None:
    assert run_ranks(2, close_everything) == [[True, True, True]] * 2
