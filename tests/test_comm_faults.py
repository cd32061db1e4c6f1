"""Communicators when ranks differ, are late, leave, die, fork or can't share memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import RankError, run_ranks

import fsdpx.comm
from fsdpx import _C, CommTimeout, DesyncError
from fsdpx.comm import choose
from fsdpx.comm.choose import Host, decide, this_host

KINDS = ("shm", "c10d")


def error_text(call: Any, kind: type[Exception] = RuntimeError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")


# ---- Ranks that differ or do not come


def differ(rank: int, world_size: int, kind: str) -> str:
    comm = fsdpx.comm.create(kind=kind)
    out = comm.allocate(world_size * 8, torch.float32)
    comm.all_gather(torch.zeros(8), out).wait()
    if rank == 1:
        work = comm.reduce_scatter([torch.zeros(8 * world_size)], torch.zeros(8))
    else:
        work = comm.all_gather(torch.zeros(8), out)
    text = error_text(work.wait, DesyncError)
    assert error_text(comm.barrier().wait, DesyncError) == text  # of no use from here on
    comm.close()
    return text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_differ_all_learn_what_both_did(kind: str, world_size: int) -> None:
    for text in run_ranks(world_size, differ, kind):
        assert "all_gather of unit 'all_gather'" in text
        assert "of unit 'reduce_scatter'" in text
        assert "rank 1 does" in text


def come_late(rank: int, world_size: int, kind: str) -> tuple[str, float]:
    comm = fsdpx.comm.create(kind=kind, timeout=1.0)
    comm.barrier().wait()
    if rank == 1:
        time.sleep(3.0)
    begin = time.monotonic()
    text = error_text(comm.barrier().wait)
    seconds = time.monotonic() - begin
    comm.close(seconds=0.1)
    return text, seconds


def test_a_passed_time_limit_says_who_is_where() -> None:
    (text, seconds), (late, _) = run_ranks(2, come_late, "shm")
    assert 0.9 < seconds < 2.5
    assert "rank 0 waited 1 s for rank 1" in text
    assert "barrier of unit 'barrier'" in text
    assert "1 has finished" in text
    assert late == text  # the rank that was late hears why the others gave up


def test_a_passed_time_limit_of_a_process_group() -> None:
    (text, seconds), _ = run_ranks(2, come_late, "c10d")
    assert 0.9 < seconds < 2.9
    assert "barrier of unit 'barrier'" in text


def time_out(rank: int, world_size: int) -> bool:
    comm = fsdpx.comm.create(kind="shm", timeout=0.3)
    comm.barrier().wait()
    if rank == 1:
        time.sleep(1.0)
    begin = time.monotonic()
    error_text(comm.barrier().wait, CommTimeout)
    error_text(lambda: comm.allocate(10), CommTimeout)  # and everything after fails at once
    comm.close()
    return time.monotonic() - begin < 0.9


def test_after_a_timeout_everything_fails_at_once() -> None:
    assert run_ranks(2, time_out) == [True, True]


def leave(rank: int, world_size: int, kind: str) -> str:
    comm = fsdpx.comm.create(kind=kind, timeout=30)
    comm.barrier().wait()
    if rank == 1:
        comm.close()
        comm.close()
        with pytest.raises(RuntimeError, match="is closed"):
            comm.barrier()
        return ""
    text = error_text(comm.barrier().wait)
    comm.close()
    return text


def test_a_rank_that_leaves_is_noticed_at_once() -> None:
    begin = time.monotonic()
    text, _ = run_ranks(2, leave, "shm")
    assert time.monotonic() - begin < 20
    assert "rank 1 has left" in text


def die(rank: int, world_size: int) -> str:
    comm = fsdpx.comm.create(kind="shm", timeout=50)
    comm.allocate(1 << 20)
    comm.barrier().wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    text = error_text(comm.barrier().wait)
    raise ValueError(text)


def test_a_killed_rank_is_noticed_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(RankError, match="the process of rank 1 has ended"):
        run_ranks(2, die)
    assert {name for name in os.listdir("/dev/shm") if name.startswith("fsdpx")} <= before


# ---- What is left behind


def mappings() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def open_things() -> tuple[int, int, list[str]]:
    gc.collect()
    shared = [line for line in mappings() if "fsdpx" in line and "_C." not in line]
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), shared


def come_and_go(rank: int, world_size: int) -> list[Any]:
    seen = []
    for _ in range(3):
        comm = fsdpx.comm.create(kind="shm")
        out = comm.allocate(world_size * 1000, torch.float32)
        comm.all_gather(torch.zeros(1000), out).wait()
        comm.reduce_scatter([torch.zeros(1000 * world_size)], torch.zeros(1000)).wait()
        comm.close()
        del comm, out
        seen.append(open_things())
    return seen


def test_nothing_is_left_after_close() -> None:
    for seen in run_ranks(2, come_and_go):
        assert seen[1] == seen[2]
        assert [entry[2] for entry in seen] == [[], [], []]


def free_regions(rank: int, world_size: int) -> tuple[int, int]:
    def mapped() -> int:
        return sum("memfd:fsdpx" in line for line in mappings())

    comm = fsdpx.comm.create(kind="shm")
    before = mapped()
    out = comm.allocate(100_000, torch.float32)
    view = out[10:20]
    del out
    assert mapped() > before  # the view still needs it
    del view
    gc.collect()
    after = mapped()
    comm.close()
    return before, after


def test_memory_goes_with_its_last_view() -> None:
    for before, after in run_ranks(2, free_regions):
        assert before == after


EXIT = """
import torch, torch.distributed as dist, fsdpx.comm, os, sys
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
comm = fsdpx.comm.create(kind={kind!r})
out = comm.allocate(1000, torch.float32)
work = [comm.all_gather(torch.ones(1000), out) for _ in range(100)]
child = os.fork() if {fork} else -1
if child == 0:
    try:
        comm.barrier()
    except RuntimeError as error:
        print(error, flush=True)
    sys.exit(3)
if child > 0:
    _, status = os.waitpid(child, 0)
    print("child", os.waitstatus_to_exitcode(status), flush=True)
work[-1].wait(10)
more = [comm.all_gather(torch.ones(1000), out) for _ in range(100)]
print("done", flush=True)
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fork", [False, True])
def test_a_program_that_closes_nothing_exits_cleanly(kind: str, fork: bool) -> None:
    run = subprocess.run(
        [sys.executable, "-c", EXIT.format(kind=kind, fork=fork)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stderr
    assert "done" in run.stdout
    if fork:
        assert "A forked child can't run collectives" in run.stdout
        assert "child 3" in run.stdout


# ---- Choosing

HERE = Host(boot="a", uid=1, network="net", memory="shm", pid=1)


@pytest.mark.parametrize(
    ("change", "name", "way", "reason"),
    [
        ({}, "shm", "sockets", "all ranks are on one host"),
        ({"network": "other"}, "shm", "names", "one host"),
        ({"boot": "b"}, "c10d", "", "rank 2 is on another host than rank 0"),
        ({"boot": ""}, "c10d", "", "rank 2 can't tell which host"),
        ({"uid": 2}, "c10d", "", "rank 2 runs as user 2, rank 0 as 1"),
        ({"network": "n", "memory": "m"}, "c10d", "", "rank 2 shares neither sockets nor /dev/shm"),
    ],
)
def test_decisions(change: dict[str, Any], name: str, way: str, reason: str) -> None:
    kind = decide([HERE, HERE, replace(HERE, **change)])
    assert (kind.name, kind.way) == (name, way)
    assert reason in kind.reason


def elsewhere(rank: int, world_size: int) -> tuple[str, str, str]:
    moved = replace(this_host(), boot="elsewhere") if rank == 1 else this_host()
    with mock.patch.object(choose, "this_host", return_value=moved):
        refused = error_text(lambda: fsdpx.comm.create(kind="shm"), ValueError)
        comm = fsdpx.comm.create(kind="auto")
    result = (refused, comm.kind, comm.reason)
    comm.barrier().wait()
    comm.close()
    return result


def broken(rank: int, world_size: int) -> tuple[str, str, str]:
    def refuse(way: str) -> None:
        raise RuntimeError("no memory for today")

    with mock.patch.object(_C, "ShmBootstrap", refuse if rank == 1 else _C.ShmBootstrap):
        refused = error_text(lambda: fsdpx.comm.create(kind="shm"), ValueError)
        comm = fsdpx.comm.create(kind="auto")
    result = (refused, comm.kind, comm.reason)
    comm.barrier().wait()
    comm.close()
    return result


def test_shm_is_refused_on_every_rank_and_auto_goes_on() -> None:
    for refused, kind, reason in run_ranks(2, elsewhere):
        assert "'shm' is impossible: rank 1 is on another host than rank 0" in refused
        assert (kind, reason) == ("c10d", "rank 1 is on another host than rank 0")
    for refused, kind, reason in run_ranks(2, broken):
        assert "rank 1 can't share memory: no memory for today" in refused
        assert (kind, reason) == ("c10d", "rank 1 can't share memory: no memory for today")


def cached(rank: int, world_size: int) -> None:
    first = fsdpx.comm.create()
    assert first.kind == "shm"
    assert fsdpx.comm.create() is first
    assert fsdpx.comm.create(kind="shm") is first
    other = fsdpx.comm.create(kind="c10d")
    assert other is not first
    first.close()
    again = fsdpx.comm.create()
    assert again is not first
    again.barrier().wait()
    again.close()
    other.close()


def test_one_communicator_per_group_and_kind() -> None:
    run_ranks(2, cached)


def wrong_arguments(rank: int, world_size: int) -> None:
    comm = fsdpx.comm.create(kind="shm")
    out = comm.allocate(20, torch.float32)
    with pytest.raises(ValueError, match="not in memory that peers can write"):
        comm.all_gather(torch.zeros(10), torch.zeros(20))
    with pytest.raises(ValueError, match="need 22"):
        comm.all_gather(torch.zeros(11), out)
    with pytest.raises(ValueError, match="contiguous CPU tensor"):
        comm.all_gather(torch.zeros(20)[::2], out)
    with pytest.raises(ValueError, match="can't be cast"):
        comm.all_gather(torch.zeros(10, dtype=torch.int32), out)
    with pytest.raises(ValueError, match=r"tensors\[1\] is torch.float64"):
        comm.reduce_scatter([torch.zeros(2), torch.zeros(2, dtype=torch.float64)], torch.zeros(2))
    with pytest.raises(ValueError, match="have 5 elements"):
        comm.reduce_scatter([torch.zeros(5)], torch.zeros(2))
    with pytest.raises(ValueError, match="can't be added"):
        comm.all_reduce(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="must not be negative"):
        comm.allocate(-1)
    with pytest.raises(ValueError, match="'mpi' is unknown"):
        fsdpx.comm.create(kind="mpi")
    comm.all_gather(torch.zeros(10), out).wait()  # none of this has broken anything
    comm.close()


def test_mistakes_are_named_and_break_nothing() -> None:
    run_ranks(2, wrong_arguments)
