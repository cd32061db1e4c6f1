"""The engine on CUDA, in simulation: timelines on the virtual clock, what a step asks of the host,
and what happens when something goes wrong.
"""

from __future__ import annotations

import time
from typing import Any

import cudasim
import pytest
import torch
from cuda_training import Training, train
from ranks import RankError, run_ranks
from torch import Tensor, nn

import fsdpx
from fsdpx import CommTimeout, DesyncError

pytestmark = [pytest.mark.simulation, pytest.mark.timeout(300)]
LIMIT = 240.0

FORWARD_US, BACKWARD_US, COMM_US = 100, 200, 95
NUMEL = 21248  # of a unit: 42,496 bytes from the other rank, at 0.5 GB/s and 10 us of latency


class Busy(torch.autograd.Function):
    """Takes a time of the virtual clock, and reads the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        cudasim.busy(FORWARD_US, "forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        gradient = torch.zeros_like(weight)
        cudasim.busy(BACKWARD_US, "backward")
        return gradients[0], gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Busy.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


def timeline(rank: int, world_size: int, prefetch: int, order: str) -> list[tuple[str, ...]]:
    """(lane, unit, operation, begin, end) of a step, in whole microseconds."""
    cudasim.configure(order=order, mem_gbps=1e9, launch_us=0, link_us=10, link_gbps=0.5)
    model = nn.Sequential(Block(), Block(), Block()).cuda()
    for block in model:
        fsdpx.fully_shard(block, prefetch=prefetch, reshard_after_forward=True, comm="nccl")
    fsdpx.fully_shard(model, prefetch=prefetch, comm="nccl")
    x = torch.zeros(4, device="cuda", requires_grad=True)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    fsdpx.comm.create(kind="nccl", device="cuda").barrier().wait()
    with fsdpx.record_timeline(model) as recorded:
        step()
    records = [r for r in recorded.records if r.lane != "resident" and r.unit != "Sequential"]
    zero = min(record.begin_ns for record in records)
    rows = []
    for record in records:
        begin, end = (round((ns - zero) / 1000) for ns in (record.begin_ns, record.end_ns))
        if end > begin:
            rows.append((record.lane, record.unit, record.operation, begin, end))
    return sorted(rows, key=lambda row: row[3:])


# (lane, unit, operation, begin, end): only the first gather of the step and the last reduction are
# exposed.
PREFETCHED = {
    ("comm", "0", "all_gather", 0, 95),
    ("compute", "0", "forward", 95, 195),
    ("comm", "1", "all_gather", 95, 190),
    ("compute", "1", "forward", 195, 295),
    ("comm", "2", "all_gather", 195, 290),
    ("compute", "2", "forward", 295, 395),
    ("compute", "2", "backward", 395, 595),
    ("comm", "1", "all_gather", 395, 490),
    ("comm", "2", "reduce_scatter", 595, 690),
    ("compute", "1", "backward", 595, 795),
    ("comm", "0", "all_gather", 690, 785),
    ("comm", "1", "reduce_scatter", 795, 890),
    ("compute", "0", "backward", 795, 995),
    ("comm", "0", "reduce_scatter", 995, 1090),
}


@pytest.mark.parametrize("order", cudasim.ORDERS)
def test_timeline_with_prefetch(order: str) -> None:
    rows = run_ranks(2, timeline, 1, order, timeout=LIMIT)[0]
    assert set(rows) >= PREFETCHED
    waits = [(row[1], row[4] - row[3]) for row in rows if row[2] == "wait"]
    assert waits == [("0", COMM_US), ("0", COMM_US)]


def test_timeline_without_prefetch() -> None:
    rows = run_ranks(2, timeline, 0, "late", timeout=LIMIT)[0]
    gathers = [row for row in rows if row[2] == "all_gather"]
    computing = [row for row in rows if row[2] in ("forward", "backward")]
    for _, unit, _, begin, end in gathers:
        assert end - begin == COMM_US
        overlapping = [row for row in computing if row[3] < end and row[4] > begin]
        assert not overlapping, f"the gather of unit {unit} is hidden"


# ---- What a step asks of the host


def asked_of_the_host(rank: int, world_size: int, training: Training) -> list[dict[str, int]]:
    found: list[dict[str, int]] = []

    def after_step(step: int) -> None:
        found.append(cudasim.counters())
        cudasim.reset()

    cudasim.reset()
    train(rank, world_size, training, "cuda", after_step)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_steady_step_makes_no_allocation_and_never_waits(world_size: int) -> None:
    training = Training(comm="auto", num_steps=5)
    for counters in run_ranks(world_size, asked_of_the_host, training, timeout=LIMIT)[0][2:]:
        assert counters["allocations"] == counters["frees"] == counters["host_waits"] == 0


# ---- Faults


def small_model(comm: str = "nccl") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).cuda()
    for layer in model:
        fsdpx.fully_shard(layer, comm=comm)
    return fsdpx.fully_shard(model, comm=comm)


def step_of(model: Any) -> None:
    model(torch.ones(4, 16, device="cuda")).sum().backward()


def ranks_apart(rank: int, world_size: int) -> str:
    model = small_model()
    step_of(model)
    x = torch.ones(4, 16, device="cuda")
    path = model if rank == 0 else nn.Sequential(model, model[2])
    with pytest.raises(DesyncError) as caught:
        path(x).sum().backward()
    with pytest.raises(DesyncError):
        model(x)
    model.reset_iter_state()
    return str(caught.value)


def test_ranks_that_differ() -> None:
    for text in run_ranks(2, ranks_apart, timeout=LIMIT):
        assert "unit '2'" in text
        assert "unit '1'" in text


def absent_rank(rank: int, world_size: int, limit: float) -> str:
    comm = fsdpx.comm.create(kind="nccl", device="cuda", timeout=limit)
    comm.all_reduce(torch.ones(8, device="cuda")).wait()
    if rank == 1:
        time.sleep(4 * limit)
        comm.close()
        return ""
    comm.all_reduce(torch.ones(8, device="cuda")).wait()
    deadline = time.monotonic() + 4 * limit
    while time.monotonic() < deadline:  # the host is told at its next collective
        try:
            comm.all_reduce(torch.ones(8, device="cuda")).wait()
        except CommTimeout as error:
            comm.close()
            return str(error)
        time.sleep(limit / 10)
    raise AssertionError("no CommTimeout")


def test_a_rank_that_never_comes() -> None:
    text = run_ranks(2, absent_rank, 1.0, timeout=LIMIT)[0]
    assert "rank 1" in text
    assert "all_reduce" in text


def no_memory(rank: int, world_size: int) -> None:
    comm = fsdpx.comm.create(kind="nccl", device="cuda")
    torch.cuda.synchronize()
    if rank == 1:
        cudasim.fail_allocations_after(0)
    try:
        comm.allocate(1 << 20)
    finally:
        cudasim.reset()


def test_an_allocation_that_fails_on_one_rank_fails_on_all() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, no_memory, timeout=LIMIT)
    assert len(caught.value.failures) == 2
    for failure in caught.value.failures:
        assert "rank 1 could not allocate 4194304 bytes of GPU memory" in failure.text


def without_nccl(rank: int, world_size: int, kind: str) -> str:
    import fsdpx.comm.cuda

    before = fsdpx.comm.cuda._nccl_problem
    fsdpx.comm.cuda._nccl_problem = lambda: "NCCL can't be loaded" if rank == 1 else ""
    try:
        return fsdpx.comm.cuda.choose(torch.distributed.group.WORLD, kind).reason
    finally:
        fsdpx.comm.cuda._nccl_problem = before


def test_one_rank_without_nccl() -> None:
    assert run_ranks(2, without_nccl, "auto") == ["rank 1: NCCL can't be loaded"] * 2
    with pytest.raises(RankError, match="'nccl' is impossible: rank 1: NCCL can't be loaded"):
        run_ranks(2, without_nccl, "nccl")


# ---- The communicator on its own


@pytest.mark.parametrize("kind", ["nvlink", "nccl", "c10d"])
def test_collectives(kind: str) -> None:
    run_ranks(2, collectives, kind, timeout=LIMIT)


def collectives(rank: int, world_size: int, kind: str) -> None:
    cudasim.configure(order="late")
    comm = fsdpx.comm.create(kind=kind, device="cuda")
    assert comm.kind == kind
    shard = torch.arange(100, device="cuda", dtype=torch.float32) + 100 * rank
    full = comm.allocate(200, torch.bfloat16)
    assert not full.any()
    comm.all_gather(shard, full).wait()
    assert torch.equal(full.cpu(), torch.arange(200).bfloat16())
    total = torch.ones(7, device="cuda")
    comm.reduce_scatter([full.float()], total[:7].new_zeros(100), scale=0.5).wait()
    comm.all_reduce(total, scale=2.0).wait()
    assert total.cpu().tolist() == [4.0] * 7
    comm.barrier().wait()
