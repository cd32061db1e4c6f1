"""What goes wrong on CUDA: NCCL is missing or old, a step raises, memory runs out."""

from __future__ import annotations

import gc
import os
import subprocess
from pathlib import Path
from typing import Any

import cudasim
import pytest
import torch
from cuda_training import Training, batches, poisoned, shard
from ranks import run_ranks, stop_pool
from torch import Tensor, nn

import fsdpx

pytestmark = [pytest.mark.simulation, pytest.mark.timeout(600)]
LIMIT = 300.0

# ---- NCCL is loaded once in a process, so each library is tried in new ones


def connect(rank: int, world_size: int, library: str, kind: str) -> str:
    os.environ["FSDPX_NCCL_LIBRARY"] = library
    try:
        comm = fsdpx.comm.create(kind=kind, device="cuda")
    except ValueError as error:
        return str(error)
    x = torch.full((4,), rank + 1.0).cuda()
    comm.all_reduce(x).wait()
    assert x.cpu().tolist() == [3.0] * 4
    return f"{comm.kind}: {comm.reason}"


@pytest.fixture(params=["missing", "old"])
def library(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """A library that is not NCCL as it should be, and what is wrong with it."""
    if request.param == "missing":
        return str(tmp_path / "nowhere.so"), "NCCL can't be loaded"
    (tmp_path / "old.c").write_text("int ncclGetVersion(int* v) { *v = 21003; return 0; }")
    command = ["gcc", "-shared", "-fPIC", "old.c", "-o", "old.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    return str(tmp_path / "old.so"), r"NCCL 2.10 is too old"


def test_without_nccl_there_is_another_way_and_an_error(library: tuple[str, str]) -> None:
    path, problem = library
    stop_pool(2)
    try:
        for text in run_ranks(2, connect, path, "nccl", timeout=LIMIT):
            assert "comm kind 'nccl' is impossible: rank 0" in text
            assert problem in text
        for text in run_ranks(2, connect, path, "auto", timeout=LIMIT):
            assert text.startswith("nvlink:")  # which needs no NCCL
            assert f"by CUDA IPC (rank 0 cannot use NCCL windows: {problem}" in text
    finally:
        stop_pool(2)


# ---- Exceptions


class Failing(nn.Module):
    """Raises in backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and x.requires_grad:
            x.register_hook(self.fail)
        return x

    def fail(self, grad: Tensor) -> None:
        raise ValueError("told to fail")


def train_after_failures(rank: int, world_size: int, order: str) -> tuple[Any, Any]:
    """Losses with and without steps between them in which all ranks raise in backward."""
    training = Training(comm="nccl", num_steps=3)
    cudasim.configure(order=order, seed=3)
    losses = []
    with poisoned():
        for fails in (False, True):
            model = shard(training, "cuda", world_size)
            failing = Failing()
            model.blocks[1].up.register_forward_hook(lambda m, args, out, f=failing: f(out))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            kept = []
            for ((x, y),) in list(batches(training, rank, "cuda")):
                failing.fails = fails
                if fails:
                    with pytest.raises(ValueError, match="told to fail"):
                        model(x).square().mean().backward()
                    model.zero_grad()
                    failing.fails = False
                loss = (model(x) - y).square().mean()
                loss.backward()
                kept.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
            losses.append([loss.item() for loss in kept])
    return losses[0], losses[1]


@pytest.mark.parametrize("order", cudasim.ORDERS)
def test_a_step_that_raises_leaves_nothing_behind(order: str) -> None:
    for without, with_failures in run_ranks(2, train_after_failures, order, timeout=LIMIT):
        assert with_failures == without


# ---- Memory


def bytes_of_regions(rank: int, world_size: int, training: Training) -> tuple[int, int]:
    """Device memory that the engine itself allocates, and what `describe` says."""

    def own() -> int:
        gc.collect()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    before = own()
    model = shard(training, "cuda", world_size)
    for ((x, y),) in batches(training, rank, "cuda"):
        (model(x).float() - y).square().mean().backward()
    memory = fsdpx.describe(model).memory
    return own() - before, memory.arenas + memory.kept + memory.send_buffers


@pytest.mark.parametrize("options", [{}, {"low": True}, {"zero_stage": 2}])
def test_the_engine_takes_the_memory_that_it_describes(options: dict[str, Any]) -> None:
    stop_pool(2)
    training = Training(comm="nccl", **options)
    for taken, described in run_ranks(2, bytes_of_regions, training, timeout=LIMIT):
        assert described <= taken <= described + 64 * 1024


def test_memory_that_peers_map_comes_in_whole_pieces_of_the_driver() -> None:
    stop_pool(2)
    piece = 2 << 20
    own = piece  # flags, and what a small all-reduce sends
    regions = 4  # the arena, the root that stays gathered, two send buffers
    training = Training(comm="nvlink")
    for taken, _ in run_ranks(2, bytes_of_regions, training, timeout=LIMIT):
        assert taken // piece * piece == own + regions * piece


def run_out(rank: int, world_size: int) -> str:
    """Rank 1 has no memory left when the first step asks for it."""
    model = shard(Training(comm="nccl"), "cuda", world_size)
    x = torch.zeros(4, 20).cuda()
    if rank == 1:
        cudasim.fail_allocations_after(0)
    with pytest.raises(RuntimeError) as caught:
        model(x)
    cudasim.reset()
    return str(caught.value)


def test_an_allocation_that_fails_is_an_error_everywhere() -> None:
    stop_pool(2)
    try:
        for text in run_ranks(2, run_out, timeout=LIMIT):
            assert "rank 1 could not allocate" in text
    finally:
        stop_pool(2)
