"""Collectives of ranks on GPUs: the bits of the CPU's communicators, in every order of streams."""

from __future__ import annotations

import cudasim
import pytest
import torch
import torch.distributed as dist
from kernel_cases import bits_of
from ranks import run_ranks
from torch import Tensor

import fsdpx.comm
from fsdpx import CommTimeout
from fsdpx.comm import Communicator

pytestmark = pytest.mark.gpu
PEER_KINDS = ("nvlink", "nvlink-copy")
ORDERS = cudasim.ORDERS if cudasim.active else ("eager",)  # a real device has its own


def values(rank: int, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return torch.randn(numel, generator=generator).to(dtype)


def on_device(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda").copy_(tensor)


def assert_alike(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(bits_of(got.cpu()), bits_of(expected))


def gather_both(
    cpu: Communicator, gpu: Communicator, numel: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    shard = values(cpu.rank, numel, dtypes[0], seed=numel)
    expected, out = (comm.allocate(comm.size * numel, dtypes[1]) for comm in (cpu, gpu))
    cpu.all_gather(shard, expected).wait()
    gpu.all_gather(on_device(shard), out).wait()
    assert_alike(out, expected)


def reduce_both(
    cpu: Communicator,
    gpu: Communicator,
    numel: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    accumulate: bool,
) -> None:
    """Gradients of two tensors, the second cut by ranks' boundaries."""
    total = cpu.size * numel
    grads = [values(cpu.rank, n, dtypes[0], seed=n) for n in (total // 3, total - total // 3)]
    expected = values(cpu.rank, numel, dtypes[1], seed=7)
    shard = on_device(expected)
    cpu.reduce_scatter(grads, expected, scale=1 / 3, accumulate=accumulate).wait()
    gpu.reduce_scatter(
        [on_device(grad) for grad in grads], shard, scale=1 / 3, accumulate=accumulate
    ).wait()
    assert_alike(shard, expected)


def all_collectives(_rank: int, _size: int, kind: str, order: str, seed: int) -> None:
    if cudasim.active:
        cudasim.configure(order=order, seed=seed)
    cpu = fsdpx.comm.create(kind="shm")
    gpu = fsdpx.comm.create(kind=kind, device="cuda")
    assert gpu.kind == kind
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    for numel in (64, 1003):
        for dtypes in ((f32, bf16), (f32, f32), (f32, torch.float8_e4m3fn)):
            gather_both(cpu, gpu, numel, dtypes)
        for dtypes in ((bf16, f32), (f32, f32), (f16, bf16)):
            reduce_both(cpu, gpu, numel, dtypes, accumulate=numel == 64)
    for numel in (5, (1 << 20) + 77):  # the second in two parts
        total = values(cpu.rank, numel, f32, seed=3)
        on_gpu = on_device(total)
        cpu.all_reduce(total, scale=0.5).wait()
        gpu.all_reduce(on_gpu, scale=0.5).wait()
        assert_alike(on_gpu, total)
    gpu.close()
    cpu.close()


@pytest.mark.parametrize("kind", PEER_KINDS)
@pytest.mark.parametrize(("world_size", "order"), [*((2, o) for o in ORDERS), (4, ORDERS[-1])])
def test_peers_give_the_bits_of_the_cpu(world_size: int, kind: str, order: str) -> None:
    run_ranks(world_size, all_collectives, kind, order, 1, timeout=120)


def pipelined(_rank: int, _size: int, order: str, seeds: range) -> None:
    """Many collectives issued before any is waited for, into places that are used again."""
    for seed in seeds:
        if cudasim.active:
            cudasim.configure(order=order, seed=seed)
        gpu = fsdpx.comm.create(kind="nvlink", device="cuda")
        out = gpu.allocate(gpu.size * 500, torch.float32)
        for step in range(4):
            shards = [torch.full((500,), float(10 * step + r)) for r in range(gpu.size)]
            gpu.all_gather(on_device(shards[gpu.rank]), out).wait()
            grads = on_device(torch.cat(shards)), on_device(torch.cat(shards) + 1)
            sums = [torch.zeros(500, device="cuda") for _ in grads]
            works = [gpu.reduce_scatter([g], s) for g, s in zip(grads, sums, strict=True)]
            copied = torch.empty_like(out).copy_(out)
            for work in works:
                work.wait()
            assert torch.equal(copied.cpu(), torch.cat(shards))
            assert torch.equal(sums[0].cpu(), gpu.size * shards[gpu.rank])
            assert torch.equal(sums[1].cpu(), gpu.size * (shards[gpu.rank] + 1))
        gpu.close()


@pytest.mark.parametrize("order", ORDERS)
def test_places_and_buffers_are_used_again(order: str) -> None:
    run_ranks(2, pipelined, order, range(5), timeout=120)


def chosen(_rank: int, _size: int) -> None:
    gpu = fsdpx.comm.create(device="cuda")
    assert gpu.kind == "nvlink", gpu.reason
    assert gpu.reason.startswith("all ranks map each other's GPU memory, by ")
    gpu.close()


def test_ranks_that_map_each_other_choose_it() -> None:
    run_ranks(2, chosen, timeout=60)


def without_nvlink(_rank: int, _size: int) -> tuple[str, str]:
    cudasim.configure(nvlink=0)
    chosen = fsdpx.comm.create(device="cuda")
    asked_for = fsdpx.comm.create(kind="nvlink", device="cuda")
    found = f"{chosen.kind}: {chosen.reason}", asked_for.kind
    chosen.close()
    asked_for.close()
    return found


@pytest.mark.simulation
def test_over_pcie_they_choose_nccl_unless_told_otherwise() -> None:
    for chosen, asked_for in run_ranks(2, without_nvlink, timeout=60):
        assert chosen.startswith("nccl: NCCL")
        assert "not nvlink: no NVLink between ranks 0 and 1" in chosen
        assert asked_for == "nvlink"


def gather_until_told(gpu: Communicator, out: Tensor) -> None:
    for _ in range(100):  # the first one is issued, a later one is told
        gpu.all_gather(torch.zeros(8, device="cuda"), out).wait()
        torch.cuda.synchronize()


def one_stays_away(_rank: int, _size: int) -> None:
    gpu = fsdpx.comm.create(kind="nvlink", device="cuda", timeout=2.0)
    out = gpu.allocate(gpu.size * 8, torch.float32)
    if gpu.rank == 0:
        with pytest.raises(CommTimeout, match="rank 1"):
            gather_until_told(gpu, out)
    dist.all_reduce(torch.zeros(1))
    gpu.close()  # or the next one who asks gets it


def test_a_rank_that_stays_away_is_named() -> None:
    run_ranks(2, one_stays_away, timeout=60)
