"""The simulated CUDA runtime and NCCL under torch itself: streams, events, allocator, collectives.

It must run right programs right in every order, and show a missing dependency in some order.
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import cudasim
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from cudasim.build import find_nvcc
from cudasim.device import Device, Kernels
from ranks import run_ranks, stop_pool
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

pytestmark = pytest.mark.simulation
orders = pytest.mark.parametrize("order", cudasim.ORDERS)
SEEDS = range(5)


def to_device(host: Tensor) -> Tensor:
    return torch.empty(host.shape, dtype=host.dtype, device="cuda").copy_(host, non_blocking=True)


# ---- Order


@orders
def test_copies_streams_and_events(order: str) -> None:
    cudasim.configure(order=order)
    x = torch.randn(1000)
    y, side, event = to_device(x), torch.cuda.Stream(), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        z = torch.empty_like(y).copy_(y)
        event.record()
    torch.cuda.current_stream().wait_event(event)
    assert torch.equal(z.cpu(), x)
    torch.cuda.synchronize()
    assert cudasim.pending() == 0
    assert event.query()


def test_late_runs_nothing_before_it_must() -> None:
    cudasim.configure(order="late")
    x = torch.randn(1000).pin_memory()
    y, event = to_device(x), torch.cuda.Event()
    event.record()
    assert cudasim.pending() == 2
    assert not event.query()
    event.synchronize()
    assert cudasim.pending() == 0
    assert y.is_cuda


def copies_through(order: str, seed: int, *, wait: bool) -> bool:
    """Is a copy on a side stream seen by the current one, which may not wait for it?"""
    cudasim.configure(order=order, seed=seed)
    host, side, event = torch.randn(5000).pin_memory(), torch.cuda.Stream(), torch.cuda.Event()
    stage = torch.zeros(5000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        stage.copy_(host, non_blocking=True)
        event.record()
    if wait:
        torch.cuda.current_stream().wait_event(event)
    result = torch.equal(torch.empty_like(stage).copy_(stage).cpu(), host)
    torch.cuda.synchronize()
    return result


def reads_then_frees(order: str, seed: int, *, record: bool) -> bool:
    """Is a block right that a side stream reads while its memory is given to the next tensor?"""
    cudasim.configure(order=order, seed=seed)
    torch.cuda.empty_cache()
    host, zeros = torch.randn(5000).pin_memory(), torch.zeros(5000).pin_memory()
    x, out, side = to_device(host), torch.empty(5000, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out.copy_(x, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    if record:
        x.record_stream(side)
    del x
    other = to_device(zeros)  # may get the block of x
    torch.cuda.current_stream().wait_event(done)
    result = torch.equal(out.cpu(), host)
    del other
    return result


@orders
def test_right_programs_are_right_in_every_order(order: str) -> None:
    assert all(copies_through(order, seed, wait=True) for seed in SEEDS)
    assert all(reads_then_frees(order, seed, record=True) for seed in SEEDS)


@pytest.mark.parametrize(
    "program",
    [
        lambda order, seed: copies_through(order, seed, wait=False),
        lambda order, seed: reads_then_frees(order, seed, record=False),
    ],
    ids=["wait_event", "record_stream"],
)
def test_a_missing_dependency_shows_in_late_order(program: Callable[[str, int], bool]) -> None:
    assert not any(program("late", seed) for seed in SEEDS)


def test_a_training_step_of_torch_equals_the_cpu() -> None:
    def train(device: str) -> float:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8))
        net, x, y = net.to(device), torch.randn(32, 64).to(device), torch.randn(32, 8).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for _ in range(3):
            loss = F.mse_loss(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    assert train("cuda") == train("cpu")


# ---- Clock, counters, memory


def spans() -> list[tuple[str, float, float]]:
    return sorted((s["name"], s["start_us"], s["end_us"]) for s in cudasim.trace())


@orders
def test_the_clock_does_not_depend_on_the_order(order: str) -> None:
    cudasim.configure(order=order)
    a, b, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    cudasim.busy(50, "a1", a)
    event.record(a)
    cudasim.busy(70, "a2", a)
    cudasim.busy(10, "b1", b)
    b.wait_event(event)
    cudasim.busy(10, "b2", b)  # from 50, not from 120: the event came before a2
    event.record(a)  # a later record does not move the earlier wait
    a.synchronize()
    assert cudasim.host_us() == 120
    cudasim.busy(5, "b3", b)  # the host was at 120 when it called this
    expected = [("a1", 0, 50), ("a2", 50, 120), ("b1", 0, 10), ("b2", 50, 60), ("b3", 120, 125)]
    assert spans() == expected


def test_counters_and_failing_allocations() -> None:
    torch.cuda.empty_cache()
    cudasim.reset()
    x = torch.zeros(1 << 20, device="cuda")
    before = cudasim.counters()
    assert before["allocations"] == 1
    assert cudasim.peak_bytes() >= 4 << 20
    torch.cuda.synchronize()
    assert cudasim.counters()["host_waits"] == before["host_waits"] + 1
    cudasim.fail_allocations_after(0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(64 << 20, device="cuda")
    cudasim.reset()
    assert x.sum().item() == 0


# ---- Several ranks


def check_collectives(rank: int, world_size: int, order: str) -> None:
    cudasim.configure(order=order)
    inputs = [torch.arange(8.0) + 100 * r for r in range(world_size)]
    x = inputs[rank].cuda()
    full, part = torch.empty(8 * world_size).cuda(), torch.empty(8 // world_size).cuda()
    total, half = x.clone(), x.bfloat16()
    dist.all_gather_into_tensor(full, x)
    dist.reduce_scatter_tensor(part, x)
    dist.all_reduce(total, dist.ReduceOp.AVG)
    dist.all_reduce(half)
    assert torch.equal(full.cpu(), torch.cat(inputs))
    assert torch.equal(part.cpu(), sum(inputs).chunk(world_size)[rank])  # type: ignore[union-attr]
    assert torch.equal(total.cpu(), sum(inputs) / world_size)
    assert torch.equal(half.cpu(), sum(i.bfloat16().float() for i in inputs).bfloat16())  # type: ignore[union-attr]


@orders
def test_the_process_group_of_torch(order: str) -> None:
    run_ranks(2, check_collectives, order)


def error_of_all_reduce(numel: int, group: dist.ProcessGroup | None) -> str:
    try:
        dist.all_reduce(torch.zeros(numel, device="cuda"), group=group)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return "no error"


def differ(rank: int, world_size: int) -> str:
    return error_of_all_reduce(8 * (rank + 1), dist.new_group())


def stay_away(rank: int, world_size: int) -> str:
    group = dist.new_group()
    assert error_of_all_reduce(8, group) == "no error"
    cudasim.configure(timeout_s=1)
    if rank == 0:
        return error_of_all_reduce(8, group)
    time.sleep(2)  # does not come, but has not left either
    return ""


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (differ, r"rank 0 calls AllReduce\(count=8.*rank 1 calls AllReduce\(count=16"),
        (stay_away, r"timeout; .*AllReduce\(count=8.* which ranks 1 of 2 have not reached"),
    ],
)
def test_collectives_that_cannot_end_are_errors(
    program: Callable[[int, int], str], message: str
) -> None:
    stop_pool(2)
    try:
        assert re.search(message, run_ranks(2, program)[0])
    finally:
        stop_pool(2)  # the watchdog of a group that failed goes with its process


MEET = """
extern "C" __global__ void meet(volatile int* theirs, volatile int* mine, int round) {
  __threadfence_system();
  *theirs = round;
  while (*mine < round) {}
  __threadfence_system();
}
extern "C" __global__ void add(const float* mine, const float* theirs, float* sum) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  sum[i] = mine[i] + theirs[i];
}
"""


class Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("raw", ctypes.c_char * 64),)


def exchange_pointer(rank: int, address: int) -> int:
    """The address here of what the other of two ranks gives."""
    handle, peer = ctypes.create_string_buffer(64), ctypes.c_void_p()
    assert cudasim.runtime.cudaIpcGetMemHandle(handle, ctypes.c_void_p(address)) == 0
    handles: list[bytes] = [b"", b""]
    dist.all_gather_object(handles, handle.raw)
    theirs = Handle.from_buffer_copy(handles[1 - rank])
    assert cudasim.runtime.cudaIpcOpenMemHandle(ctypes.byref(peer), theirs, 1) == 0
    assert peer.value is not None
    return peer.value


def check_peers(rank: int, world_size: int, ptx: str, order: str) -> None:
    device = Device(cudasim.runtime)
    kernels = Kernels(device, ptx)
    flag = device.upload(np.zeros(1, np.int32))
    data, total = device.upload(np.full(64, 1.0 + rank, np.float32)), device.allocate(256)
    peer_flag, peer_data = exchange_pointer(rank, flag), exchange_pointer(rank, data)
    cudasim.configure(order=order)
    for step in range(3):
        new = np.full(64, 10.0 * step + rank, np.float32)
        device.library.cudaMemcpy(data, new.ctypes.data, 256, 4)
        kernels.launch("meet", 1, 1, struct.pack("<qqi", peer_flag, flag, 2 * step + 1))
        kernels.launch("add", 2, 32, struct.pack("<qqq", data, peer_data, total))
        kernels.launch("meet", 1, 1, struct.pack("<qqi", peer_flag, flag, 2 * step + 2))
        assert (device.download(total, np.float32, 64) == 20 * step + 1).all()


@orders
def test_kernels_that_wait_for_another_rank(order: str, tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text(MEET)
    command = [str(find_nvcc()), "-arch=compute_90", "-ptx", "k.cu", "-o", "k.ptx"]
    subprocess.run(command, cwd=tmp_path, check=True)
    run_ranks(2, check_peers, (tmp_path / "k.ptx").read_text(), order)


def free_shared(rank: int, world_size: int, unmapped: bool) -> str:
    """What is wrong when each of two ranks frees memory that the other one has mapped."""
    device = Device(cudasim.runtime)
    data = device.allocate(256)
    peer = exchange_pointer(rank, data)
    if unmapped:
        assert device.library.cudaIpcCloseMemHandle(ctypes.c_void_p(peer)) == 0
    dist.all_reduce(torch.zeros(1))
    device.library.cudaFree(data)
    text: str = device.library.cudasim_fault().decode()
    cudasim.reset()
    return text


@pytest.mark.parametrize("unmapped", [False, True])
def test_memory_that_is_mapped_must_not_be_freed(unmapped: bool) -> None:
    expected = "" if unmapped else "cudasim: memory is freed that is still mapped"
    try:
        assert run_ranks(2, free_shared, unmapped) == [expected] * 2
    finally:
        stop_pool(2)


def train_fsdp2(rank: int, world_size: int, order: str, low: bool) -> list[float]:
    cudasim.configure(order=order, seed=2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 8)).cuda()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    mesh = dist.init_device_mesh("cuda", (world_size,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            torch_fully_shard(layer, mesh=mesh, mp_policy=policy)
    torch_fully_shard(net, mesh=mesh, mp_policy=policy)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.05), []
    for _ in range(2):
        x, y = torch.randn(8, 32).cuda(), torch.randn(8, 8).cuda()
        loss = F.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
def test_fsdp2_of_torch_in_all_orders(low: bool) -> None:
    results = [run_ranks(2, train_fsdp2, order, low) for order in cudasim.ORDERS]
    assert results[0] == results[1] == results[2]
    assert results[0][0][1] < 3
