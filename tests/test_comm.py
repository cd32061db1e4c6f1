"""Collectives against torch on the same inputs: one to four ranks, both kinds."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any

import pytest
import torch
from ranks import run_ranks

import fsdpx.comm
from fsdpx import _C, reference
from fsdpx.comm import Communicator
from fsdpx.comm.choose import Kind
from fsdpx.comm.shm import connect

KINDS = ("shm", "c10d")
WORLD_SIZES = (1, 2, 3, 4)
SIZES = (0, 1, 3, 129, 1000, 70_001)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COPIES = (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.int16)


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What this rank contributes; every rank can compute it."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return reference.cast(tensor, torch.empty(tensor.shape, dtype=dtype))


def sum_in_rank_order(
    parts: list[torch.Tensor], wire: torch.dtype, scale: float, old: torch.Tensor
) -> torch.Tensor:
    """Rounded to the wire on every rank, then added in rank order, scaled and added to `old`."""
    sent = [cast(part, wire) for part in parts]
    return reference.reduce(sent, old.clone(), scale=scale, accumulate=True)


def misaligned(tensor: torch.Tensor, shift: int) -> torch.Tensor:
    """The same values, `shift` elements into other memory."""
    memory = torch.empty(tensor.numel() + shift, dtype=tensor.dtype)
    view = memory[shift:]
    view.copy_(tensor)
    return view


def gather_everything(rank: int, world_size: int, kind: str) -> int:
    comm = fsdpx.comm.create(kind=kind)
    pairs = [(a, b) for a in FLOATS for b in FLOATS] + [(c, c) for c in COPIES]
    count = 0
    for number, (dtype, to) in enumerate(pairs):
        arena = comm.allocate(world_size * max(SIZES) + 3, to)
        for size in SIZES:
            shift = number % 4
            out = arena[shift : shift + world_size * size]
            comm.all_gather(misaligned(values(rank, size, dtype), 3 - shift), out).wait()
            expected = torch.cat([cast(values(r, size, dtype), to) for r in range(world_size)])
            assert torch.equal(out, expected), (dtype, to, size)
            count += 1
    comm.close()
    return count


def reduce_everything(rank: int, world_size: int, kind: str) -> int:
    comm = fsdpx.comm.create(kind=kind)
    count = 0
    for number, (wire, out) in enumerate((a, b) for a in FLOATS for b in FLOATS):
        for size in SIZES:
            dtype = FLOATS[(number + size) % 4]
            cuts = [0, size * world_size // 3, size * world_size // 2, size * world_size]
            flats = [values(r, size * world_size, dtype, seed=1) for r in range(world_size)]
            if number % 3 == 0:  # the end is missing: zeros
                cuts.pop()
                for flat in flats:
                    flat[cuts[-1] :] = 0
            pieces = [misaligned(flats[rank][a:b], number % 3) for a, b in itertools.pairwise(cuts)]
            accumulate, scale = number % 2 == 0, 1 / (1 + number % 3)
            shard = values(rank, size, out, seed=2)
            old = shard.clone() if accumulate else torch.zeros(size, dtype=out)
            work = comm.reduce_scatter(
                pieces, shard, scale=scale, accumulate=accumulate, wire_dtype=wire
            )
            work.wait()
            mine = slice(rank * size, (rank + 1) * size)
            expected = sum_in_rank_order([f[mine] for f in flats], wire, scale, old)
            assert torch.equal(shard, expected), (dtype, wire, out, size)
            count += 1
    comm.close()
    return count


def reduce_all(rank: int, world_size: int, kind: str) -> None:
    comm = fsdpx.comm.create(kind=kind)
    for dtype in FLOATS:
        for size in SIZES:
            tensor = values(rank, size, dtype)
            comm.all_reduce(tensor, scale=0.5).wait()
            parts = [values(r, size, dtype) for r in range(world_size)]
            zeros = torch.zeros(size, dtype=dtype)
            expected = sum_in_rank_order(parts, dtype, 0.5, zeros)
            assert torch.equal(tensor, expected), (dtype, size)
    comm.barrier().wait()
    comm.close()


def several_megabytes(rank: int, world_size: int, kind: str) -> None:
    comm = fsdpx.comm.create(kind=kind)
    numel = 1_000_003
    out = comm.allocate(world_size * numel, torch.bfloat16)
    comm.all_gather(torch.full((numel,), rank + 0.5), out).wait()
    for r in range(world_size):
        assert bool((out[r * numel : (r + 1) * numel] == r + 0.5).all())
    shard = torch.empty(numel)
    for step in range(5):  # more than there are send buffers
        comm.reduce_scatter([torch.full((numel * world_size,), float(rank + step))], shard).wait()
        assert bool((shard == sum(r + step for r in range(world_size))).all())
    comm.close()


def results(rank: int, world_size: int, kind: str) -> bytes:
    """Bits that rounding and the order of sums decide."""
    comm = fsdpx.comm.create(kind=kind)
    shard = torch.zeros(5000)
    flat = values(rank, 5000 * world_size, torch.float32, seed=5)
    comm.reduce_scatter([flat], shard, scale=1 / 3, wire_dtype=torch.bfloat16).wait()
    comm.all_reduce(shard, scale=0.7).wait()
    out = comm.allocate(5000 * world_size, torch.float16)
    comm.all_gather(shard, out).wait()
    comm.close()
    return out.view(torch.int16).numpy().tobytes() + shard.view(torch.int32).numpy().tobytes()


def segments_and_flags(rank: int, world_size: int, kind: str) -> None:
    """Several dtypes in one collective, and the union of the used flags."""
    comm = fsdpx.comm.create(kind=kind)
    first, second = values(rank, 64, torch.float32), values(rank, 96, torch.float64)
    region = comm.native.allocate(4096 * world_size)
    rows = [
        (first.data_ptr(), 0, 64, 0, 3),
        (second.data_ptr(), 1, 96, 128 * world_size, 1),
    ]
    plan = _C.GatherPlan("unit", rows)
    comm.native.all_gather(comm.stream, plan, region, 128).wait(60)
    memory = torch.frombuffer(
        comm.native.region_view(region, 4096 * world_size), dtype=torch.uint8
    )[128:]
    for r in range(world_size):
        low = memory[128 * r : 128 * (r + 1)].view(torch.bfloat16)
        assert torch.equal(low, cast(values(r, 64, torch.float32), torch.bfloat16))
        begin = 128 * world_size + 768 * r
        wide = memory[begin : begin + 768].view(torch.float64)
        assert torch.equal(wide, values(r, 96, torch.float64))
    grads = [values(rank, 64 * world_size, torch.float32), torch.ones(32 * world_size)]
    shards = [torch.zeros(64), torch.full((32,), 5.0)]
    segments = [
        _C.ReduceSegment(
            [(grads[0].data_ptr(), grads[0].numel(), 0)], 0, 0, 64, shards[0].data_ptr(), 0
        ),
        _C.ReduceSegment([(0, 32 * world_size, 0)], 0, 0, 32, shards[1].data_ptr(), 0, 1.0, True),
    ]
    used = [0] * (world_size + 1)
    used[rank] = 1
    op = _C.ReduceOp("unit", segments, used)
    comm.native.reduce_scatter(comm.stream, op).wait(60)
    parts = [
        values(r, 64 * world_size, torch.float32)[64 * rank : 64 * rank + 64]
        for r in range(world_size)
    ]
    assert torch.equal(shards[0], sum_in_rank_order(parts, torch.float32, 1.0, torch.zeros(64)))
    assert bool((shards[1] == 5.0).all())
    assert list(op.used) == [1] * world_size + [0]
    comm.close()


def in_parts(rank: int, world_size: int) -> None:
    """Through buffers that hold a fraction of it: two segments with gaps, then a sum in place."""
    import torch.distributed as dist

    group = dist.new_group()  # of its own: other tests have made the default one's communicator
    comm = fsdpx.comm.create(group, kind="shm", max_bytes=5000)
    numels = (1500, 777)
    full = [values(rank, numel * world_size, torch.float32) for numel in numels]
    for flat in full:
        flat[11:1017] = 0.0  # no span covers these
    shards = [values(rank, numel, torch.float32, seed=1) for numel in numels]
    segments = []
    for numel, flat, shard in zip(numels, full, shards, strict=True):
        address, rest = flat.data_ptr(), flat.numel() - 1017
        spans = [(address, 11, 0), (address + 4 * 1017, rest, 1017)]
        segments.append(_C.ReduceSegment(spans, 0, 0, numel, shard.data_ptr(), 0, 0.5, True))
    op = _C.ReduceOp("unit", segments, [int(r == rank) for r in range(world_size)])
    comm.native.reduce_scatter(comm.stream, op).wait(60)
    for numel, shard in zip(numels, shards, strict=True):
        parts = []
        for r in range(world_size):
            theirs = values(r, numel * world_size, torch.float32)
            theirs[11:1017] = 0.0
            parts.append(theirs[numel * rank : numel * (rank + 1)])
        old = values(rank, numel, torch.float32, seed=1)
        assert torch.equal(shard, sum_in_rank_order(parts, torch.float32, 0.5, old))
    assert list(op.used) == [1] * world_size
    tensor = values(rank, 4001, torch.bfloat16)
    comm.all_reduce(tensor).wait()
    parts = [values(r, 4001, torch.bfloat16) for r in range(world_size)]
    zeros = torch.zeros(4001, dtype=torch.bfloat16)
    assert torch.equal(tensor, sum_in_rank_order(parts, torch.bfloat16, 1.0, zeros))
    assert comm.native.send_buffer_bytes(1 << 20) == 2 * 5000
    comm.close()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_large_reductions_go_in_parts(world_size: int) -> None:
    run_ranks(world_size, in_parts)


def names_give_the_same(rank: int, world_size: int) -> list[str]:
    """Where sockets do not reach: memory by name, which is gone once all have it."""
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    native = connect(group, Kind("shm", "", "names"), timeout=30, max_bytes=None)
    comm = Communicator(native, "names", 30)
    out = comm.allocate(world_size * 10, torch.float32)
    comm.all_gather(torch.full((10,), float(rank)), out).wait()
    assert out.tolist() == [float(r) for r in range(world_size) for _ in range(10)]
    left = [name for name in os.listdir("/dev/shm") if name.startswith("fsdpx-")]
    comm.barrier().wait()
    comm.close()
    return left


def record(rank: int, world_size: int, kind: str) -> list[tuple[Any, ...]]:
    comm = fsdpx.comm.create(kind=kind)
    out = comm.allocate(world_size * 100, torch.bfloat16)
    comm.all_gather(torch.zeros(100), out).wait()
    comm.recorder.enable(True)
    comm.all_gather(torch.zeros(100), out).wait()
    comm.reduce_scatter([torch.zeros(100 * world_size)], torch.zeros(100)).wait()
    events = comm.recorder.take()
    comm.close()
    return [tuple(event) for event in events]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_gather_of_all_dtypes_and_sizes(world_size: int, kind: str) -> None:
    counts = run_ranks(world_size, gather_everything, kind, timeout=120)
    assert counts == [len(SIZES) * (16 + len(COPIES))] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_reduce_scatter_of_all_dtypes_and_sizes(world_size: int, kind: str) -> None:
    counts = run_ranks(world_size, reduce_everything, kind, timeout=120)
    assert counts == [len(SIZES) * 16] * world_size


@pytest.mark.parametrize("fn", [reduce_all, several_megabytes, segments_and_flags])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_sizes_and_segments(fn: Any, world_size: int, kind: str) -> None:
    run_ranks(world_size, fn, kind, timeout=120)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_both_kinds_give_the_same_bits(world_size: int) -> None:
    ours, theirs = (run_ranks(world_size, results, kind) for kind in KINDS)
    assert ours == theirs


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_memory_by_name(world_size: int) -> None:
    assert run_ranks(world_size, names_give_the_same) == [[]] * world_size


@pytest.mark.parametrize("kind", KINDS)
def test_the_recorder_counts_wire_bytes(kind: str) -> None:
    for events in run_ranks(3, record, kind):
        gather, reduce = events
        assert gather[:3] == ("comm", "all_gather", "all_gather")
        assert reduce[2] == "reduce_scatter"
        assert gather[6] == 2 * 100 * 2  # (D - 1) / D of 300 bf16 elements
        assert reduce[6] == 2 * 100 * 4
        for event in events:
            issue, begin, end = event[3:6]
            assert issue <= begin <= end


def test_ranks_may_be_threads() -> None:
    bootstraps = [_C.ShmBootstrap("sockets") for _ in range(3)]
    addresses = [bootstrap.address for bootstrap in bootstraps]
    sums = [0.0] * 3

    def work(rank: int) -> None:
        comm = Communicator(bootstraps[rank].connect(rank, addresses, 30.0), "threads", 30.0)
        out = comm.allocate(3, torch.float32)
        comm.all_gather(torch.tensor([rank + 1.0]), out).wait()
        sums[rank] = out.sum().item()
        comm.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == [6.0, 6.0, 6.0]
