"""Memory that peers map: where it comes from, alike on all ranks; freed when no rank maps it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import cudasim
import pytest
import torch
import torch.distributed as dist
from cuda_training import Result, Training, run_orders
from ranks import run_ranks, stop_pool

import fsdpx.comm
from fsdpx import CommTimeout
from fsdpx.comm import Communicator

pytestmark = [pytest.mark.simulation, pytest.mark.timeout(600)]
LIMIT = 300.0
PIECE = 2 << 20  # what memory that peers map comes in
SWITCH = "FSDPX_DEVICE_MEMORY"
ORDERS = [("late", 1), ("random", 2)]


@contextlib.contextmanager
def switched(source: str) -> Iterator[None]:
    """With another source of memory, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, source)
        yield


def meet() -> None:
    """A barrier of the hosts."""
    dist.all_reduce(torch.zeros(1))


def taken() -> int:
    """Bytes of device memory that torch does not hold."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


# ---- Choice


def reason(rank: int, world_size: int, source: str, kind: str, windows: list[int]) -> str:
    """Why the communicator is what it is, or why there is none."""
    cudasim.configure(nccl_windows=windows[rank])
    with switched(source):
        try:
            comm = fsdpx.comm.create(kind=kind, device="cuda", timeout=20.0)
        except ValueError as error:
            return str(error)
    x = torch.full((4,), rank + 1.0).cuda()
    comm.all_reduce(x).wait()
    assert x.cpu().tolist() == [3.0] * 4
    comm.close()
    return f"{comm.kind}: {comm.reason}"


EVERYWHERE = [1, 1]
MAPS = "nvlink: all ranks map each other's GPU memory, by "
CHOICES = {
    ("", "auto"): f"{MAPS}NCCL windows",
    ("window", "nvlink"): f"{MAPS}NCCL windows (asked for)",
    ("ipc", "nvlink"): f"{MAPS}CUDA IPC (asked for)",
    ("ipc", "auto"): f"{MAPS}CUDA IPC (asked for)",
    ("plain", "auto"): "nccl: NCCL 2.30.7; not nvlink: FSDPX_DEVICE_MEMORY is plain",
    ("plain", "nccl"): "nccl: asked for",
    ("window", "nccl"): "nccl: asked for; it registers its memory",
    ("plain", "nvlink"): "fsdpx: comm kind 'nvlink' is impossible: FSDPX_DEVICE_MEMORY is plain",
    ("ipc", "nccl"): "fsdpx: FSDPX_DEVICE_MEMORY is ipc, but ranks that communicate by NCCL map no",
    ("pinned", "auto"): "fsdpx: FSDPX_DEVICE_MEMORY is 'pinned' on rank 0; use one of plain, ipc,",
}


@pytest.mark.parametrize(("source", "kind"), CHOICES)
def test_the_switch_decides(source: str, kind: str) -> None:
    for text in run_ranks(2, reason, source, kind, EVERYWHERE, timeout=LIMIT):
        assert text.startswith(CHOICES[source, kind]), text


def different(rank: int, world_size: int) -> None:
    problem = "'ipc' on rank 0 and 'window' on rank 1; set it alike"
    with switched(["ipc", "window"][rank]), pytest.raises(ValueError, match=problem):
        fsdpx.comm.create(kind="nvlink", device="cuda")


def test_ranks_that_ask_for_different_memory_are_told() -> None:
    run_ranks(2, different, timeout=LIMIT)


@pytest.mark.parametrize("windows", [[0, 0], [1, 0]], ids=["nowhere", "on rank 0 only"])
def test_without_windows_all_ranks_take_handles(windows: list[int]) -> None:
    problem = f"rank {windows.index(0)} cannot use NCCL windows: NCCL makes no window"
    for text in run_ranks(2, reason, "", "auto", windows, timeout=LIMIT):
        assert text.startswith(f"{MAPS}CUDA IPC ({problem}"), text
    for text in run_ranks(2, reason, "window", "nvlink", windows, timeout=LIMIT):
        assert text.startswith(f"fsdpx: comm kind 'nvlink' is impossible: {problem}"), text


def test_an_old_nccl_has_no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_pool(2)
    monkeypatch.setenv("CUDASIM_NCCL_VERSION", "22807")
    try:
        for text in run_ranks(2, reason, "", "auto", EVERYWHERE, timeout=LIMIT):
            assert text.startswith(f"{MAPS}CUDA IPC (rank 0 cannot use NCCL windows: NCCL 2.28.7")
    finally:
        stop_pool(2)


# ---- Training


def train(rank: int, world_size: int, source: str, training: Training) -> list[Result]:
    os.environ[SWITCH] = source
    return list(run_orders(rank, world_size, training, ORDERS))


def trained(source: str, comm: str) -> list[list[Result]]:
    stop_pool(2)  # communicators are kept
    try:
        return run_ranks(2, train, source, Training(comm=comm), timeout=LIMIT)
    finally:
        stop_pool(2)


@pytest.mark.parametrize("source", ["ipc", "window"])
def test_every_source_gives_the_bits_of_the_cpu(source: str) -> None:
    for cpu, *results in trained(source, "nvlink"):
        assert set(results) == {cpu}


def test_registered_memory_gives_the_bits_of_plain_memory() -> None:
    assert trained("window", "nccl") == trained("plain", "nccl")


# ---- Lifetimes


def connected(source: str, timeout: float = 20.0) -> Communicator:
    with switched(source):
        return fsdpx.comm.create(kind="nvlink", device="cuda", timeout=timeout)


def used_in_turn(rank: int, world_size: int, source: str, first: int) -> tuple[int, int, int]:
    """Pieces before, once one rank has let go of a tensor, and once all have."""
    comm = connected(source)
    out = comm.allocate(world_size * 8)
    comm.all_gather(torch.ones(8, device="cuda"), out).wait()
    torch.cuda.synchronize()
    comm.in_flight.prune()
    meet()
    pieces = [taken() // PIECE]
    for turn in (first, 1 - first):
        if rank == turn:
            del out
        meet()
        pieces.append(taken() // PIECE)
    other = comm.allocate(8)  # frees what others have unmapped
    pieces[-1] = taken() // PIECE - 1
    del other
    comm.close()
    return pieces[0], pieces[1], pieces[2]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("source", ["ipc", "window"])
def test_memory_is_freed_when_no_rank_maps_it(source: str, first: int) -> None:
    for before, between, after in run_ranks(2, used_in_turn, source, first, timeout=LIMIT):
        assert (before, between, after) == (2, 2, 1)  # one is the communicator's


def closed_in_turn(rank: int, world_size: int, source: str) -> list[int]:
    """Pieces before the communicator was there, while it is, and after."""
    pieces = [taken() // PIECE]
    comm = connected(source)
    comm.all_reduce(torch.ones(8, device="cuda")).wait()
    torch.cuda.synchronize()
    pieces.append(taken() // PIECE)
    if rank == 0:
        comm.close(seconds=0.0)  # nobody waits for the other rank
        pieces.append(taken() // PIECE)
    meet()
    if rank == 1:
        comm.close()
        pieces.append(taken() // PIECE)
    meet()
    return pieces


@pytest.mark.parametrize("source", ["ipc", "window"])
def test_who_leaves_first_keeps_what_others_map(source: str) -> None:
    stop_pool(2)
    first, second = run_ranks(2, closed_in_turn, source, timeout=LIMIT)
    assert first == [0, 1, 1]
    assert second == [0, 1, 0]


def gather_until_told(comm: Communicator, out: torch.Tensor) -> None:
    for _ in range(100):  # the first one is issued, a later one is told
        comm.all_gather(torch.zeros(8, device="cuda"), out).wait()
        torch.cuda.synchronize()


def left_alone(rank: int, world_size: int, source: str) -> str:
    """Rank 1 goes without a word; rank 0 closes all the same."""
    comm = connected(source, timeout=4.0)
    out = comm.allocate(world_size * 8)
    meet()
    if rank == 0:
        with pytest.raises(CommTimeout, match="rank 1"):
            gather_until_told(comm, out)
        comm.close()
    meet()
    return "closed"


@pytest.mark.parametrize("source", ["ipc", "window"])
def test_a_rank_closes_when_its_peers_are_stuck(source: str) -> None:
    try:
        assert run_ranks(2, left_alone, source, timeout=60) == ["closed", "closed"]
    finally:
        stop_pool(2)


def many_regions(rank: int, world_size: int) -> None:
    """More than NCCL's simulation has windows for at a time."""
    comm = connected("window")
    before = taken()
    for number in range(300):
        out = comm.allocate(world_size * 2)
        if number % 50 == 0:
            comm.all_gather(torch.full((2,), float(rank), device="cuda"), out).wait()
            assert out.tolist() == [0.0, 0.0, 1.0, 1.0]
    del out
    comm.allocate(2)
    assert taken() <= before + 2 * PIECE
    comm.close()


def test_windows_are_given_back() -> None:
    run_ranks(2, many_regions, timeout=LIMIT)


def large_sums(rank: int, world_size: int) -> list[int]:
    """Pieces with a new communicator, after a small all-reduce, and after a large one."""
    begin = taken()
    comm = connected("window")
    pieces = []
    for numel in (0, 300_000, 3_000_000):
        x = torch.full((numel,), rank + 1.0).cuda()
        if numel:
            comm.all_reduce(x).wait()
            assert x[[0, -1]].tolist() == [3.0, 3.0]
        pieces.append((taken() - begin) // PIECE)
    comm.close()
    return pieces


def test_only_large_all_reduces_need_more_memory() -> None:
    for pieces in run_ranks(2, large_sums, timeout=LIMIT):
        assert pieces == [1, 1, 5]
