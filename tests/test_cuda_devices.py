"""Threads and devices of a process: which GPU its calls are for, forks, graphs that are captured.

In simulation, where an event or a launch for another device than the current one is refused, as by
CUDA itself.
"""

from __future__ import annotations

import os
import time
from typing import Any

import cudasim
import pytest
import torch
from ranks import run_ranks, stop_pool
from torch import nn

import fsdpx
import fsdpx.comm
from fsdpx.unit import units

pytestmark = [pytest.mark.simulation, pytest.mark.timeout(300)]
LIMIT = 120.0


def devices(rank: int) -> tuple[torch.device, torch.device]:
    """The rank's current device, and another one."""
    own = torch.cuda.current_device()
    return torch.device("cuda", own), torch.device("cuda", own + 2)


def make_model(device: torch.device, comm: str) -> Any:
    torch.manual_seed(0)
    with torch.cuda.device(device):  # a model stays where it was sharded
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(device)
        for layer in model:
            fsdpx.fully_shard(layer, comm=comm)
        return fsdpx.fully_shard(model, comm=comm)


def gradients(device: torch.device, comm: str) -> list[float]:
    """Of a step of two micro-batches, recorded."""
    model = make_model(device, comm)
    assert units(model)[0].device == device
    with fsdpx.record_timeline(model) as recorded:
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            x = torch.ones(4, 8).to(device)
            model(x).square().sum().backward()
    assert recorded.records
    return [p.grad.full_tensor().cpu().sum().item() for p in model.parameters()]


def train_apart(rank: int, world_size: int, comm: str) -> None:
    own, other = devices(rank)
    assert gradients(other, comm) == gradients(own, comm)
    assert torch.cuda.current_device() == own.index


@pytest.mark.parametrize("comm", ["nvlink", "nccl"])
def test_the_model_may_be_on_another_device_than_the_current_one(comm: str) -> None:
    run_ranks(2, train_apart, comm, timeout=LIMIT)


def watched_devices(rank: int, world_size: int, kind: str) -> None:
    """A communicator and its threads make calls for its device only."""
    _, other = devices(rank)
    with torch.cuda.device(other):
        cudasim.reset()
        comm = fsdpx.comm.create(kind=kind, device=other, timeout=1.0)
        for _ in range(4):
            comm.all_reduce(torch.ones(8).to(other)).wait()
            time.sleep(0.1)  # the watchdog looks every 0.1 s
        comm.close()
        assert cudasim.used_devices() == [other.index]


@pytest.mark.parametrize("kind", ["nvlink", "nccl"])
def test_no_thread_touches_another_device(kind: str) -> None:
    stop_pool(2)  # watchdogs of earlier communicators look after devices of their own
    try:
        run_ranks(2, watched_devices, kind, timeout=LIMIT)
    finally:
        stop_pool(2)  # the first stream of these processes is not that of their own device


def exit_of_a_fork(rank: int, world_size: int) -> int:
    """How a child ends that does at its exit what every process does."""
    comm = fsdpx.comm.create(kind="nccl", device="cuda")
    comm.all_reduce(torch.ones(8, device="cuda")).wait()
    child = os.fork()
    if child == 0:
        fsdpx.comm._close_all()
        os._exit(7)
    deadline = time.monotonic() + 10
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
    comm.all_reduce(torch.ones(8, device="cuda")).wait()  # the parent is as before
    comm.close()
    return os.waitstatus_to_exitcode(status) if ended else -1


def test_a_forked_child_can_exit() -> None:
    assert run_ranks(2, exit_of_a_fork, timeout=LIMIT) == [7, 7]


def captured(rank: int, world_size: int) -> str:
    model = make_model(devices(rank)[0], "nccl")
    x = torch.ones(4, 8, device="cuda")
    expected = model(x).sum().item()
    cudasim.configure(capturing=1)
    with pytest.raises(RuntimeError) as caught:
        model(x)
    cudasim.configure(capturing=0)
    assert model(x).sum().item() == expected
    return str(caught.value)


def test_a_step_is_not_captured_in_a_graph() -> None:
    for text in run_ranks(2, captured, timeout=LIMIT):
        assert text.startswith("fsdpx: collectives can't be captured in a CUDA graph")
