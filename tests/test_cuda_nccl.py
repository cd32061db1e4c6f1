"""NCCL's communicators: made within a time limit, and ended while they hang."""

from __future__ import annotations

import cudasim
import pytest
import torch
from ranks import run_ranks, stop_pool

import fsdpx.comm
from fsdpx import CommTimeout

pytestmark = [pytest.mark.simulation, pytest.mark.timeout(300)]
LIMIT = 120.0
SECONDS = 4  # enough for a rank that is only slow
INIT, SPLIT = 1, 2  # to what a rank does not come


def connect_without(rank: int, world_size: int, kind: str, absent: int) -> str:
    """Rank 1 does not come to NCCL."""
    if rank == 1:
        cudasim.configure(nccl_absent=absent)
    try:
        comm = fsdpx.comm.create(kind=kind, device="cuda", timeout=2 * SECONDS)
    except RuntimeError as error:
        return str(error)
    comm.close()
    return f"{comm.kind}: {comm.reason}"


@pytest.mark.parametrize(
    ("absent", "call"), [(INIT, "ncclCommInitRankConfig"), (SPLIT, "ncclCommSplit")]
)
def test_a_rank_that_does_not_come_is_an_error_within_the_limit(absent: int, call: str) -> None:
    for text in run_ranks(2, connect_without, "nccl", absent, timeout=LIMIT):
        assert f"cannot use NCCL: {call} of 2 ranks did not end within {SECONDS} s" in text


def test_peers_map_each_other_without_nccl() -> None:
    for text in run_ranks(2, connect_without, "auto", INIT, timeout=LIMIT):
        assert text.startswith(
            "nvlink: all ranks map each other's GPU memory, by CUDA IPC (rank 0 "
        )
        assert f"ncclCommInitRankConfig of 2 ranks did not end within {SECONDS} s" in text


def hang(rank: int, world_size: int) -> str:
    """A call that NCCL does not return from until it is aborted."""
    comm = fsdpx.comm.create(kind="nccl", device="cuda", timeout=SECONDS)
    x = torch.ones(8, device="cuda")
    comm.all_reduce(x).wait()
    torch.cuda.synchronize()  # it has ended, and what hangs is the next one
    cudasim.configure(nccl_hangs=1)
    with pytest.raises(CommTimeout) as caught:
        comm.all_reduce(x).wait()
    cudasim.configure(nccl_hangs=0)
    comm.close()
    return str(caught.value)


def test_a_call_that_hangs_is_aborted() -> None:
    try:
        for text in run_ranks(2, hang, timeout=60):
            assert "all_reduce of unit 'all_reduce' (32 bytes" in text
            assert f"did not return within {SECONDS} s on the CPU" in text
    finally:
        stop_pool(2)
