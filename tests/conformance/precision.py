"""Sums that lose precision or range, norms, and groups of ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdpx import MixedPrecisionPolicy, fully_shard

from .parts import (
    assert_close,
    assert_grads,
    batch_of,
    mean_square,
    reference_grads,
    shard_linears,
    small_mlp,
    whole,
)
from .registry import case


@case("512 micro-batches accumulated in bf16 stick at 256")
def accumulate_512_in_fp32(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(8, 8, bias=False), mp_policy=policy)
    ones = torch.ones(1, 8)
    for number in range(512):
        model.set_requires_gradient_sync(number == 511)
        model(ones).sum().backward()
    assert_close(whole(model.weight.grad), torch.full((8, 8), 512.0), "sum", limit=2.0)


@case("an fp16 sum over ranks overflows before it is divided", world_size=4)
def fp16_reduce_no_overflow(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    model = fully_shard(nn.Linear(4, 4, bias=False), mp_policy=policy)
    model(torch.full((1, 4), 30000.0)).sum().backward()
    assert_close(whole(model.weight.grad), torch.full((4, 4), 30000.0), "mean", limit=60.0)


@case("an infinity that only one rank's shard has: only that rank skips its step")
def gradscaler_inf_on_one_rank(rank: int, world_size: int) -> None:
    model = shard_linears(small_mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = whole(model[0].weight.detach()).clone()
    scaler.scale(model(batch_of(rank)).sum()).backward()
    if rank == 0:
        model[0].weight.grad.to_local().view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert torch.equal(whole(model[0].weight.detach()), before)


def total_norm(model: nn.Module, norm_type: float) -> torch.Tensor:
    """The norm as `clip_grad_norm_` returns it, gradients left alone."""
    return whole(nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=norm_type))


@case("replicated and sharded in two dimensions: norm and gradients", world_size=4)
def hsdp_2x2_norm(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = small_mlp()
    expected = reference_grads(model, world_size)
    shard_linears(model, mesh=mesh)
    mean_square(model, batch_of(rank)).backward()
    parts = torch.stack([torch.linalg.vector_norm(g) for g in expected.values()])
    assert_close(total_norm(model, 2.0), torch.linalg.vector_norm(parts), "norm")
    assert_grads(model, expected)


@case("clipping uses the norm of one rank's shard")
def norms_1_2_inf(rank: int, world_size: int) -> None:
    for norm_type in (1.0, 2.0, float("inf")):
        model = small_mlp()
        expected = reference_grads(model, world_size)
        shard_linears(model)
        mean_square(model, batch_of(rank)).backward()
        norms = [torch.linalg.vector_norm(g, norm_type) for g in expected.values()]
        wanted = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        assert_close(total_norm(model, norm_type), wanted, f"{norm_type}-norm")


@case("a group that is not the default one", world_size=3)
def subgroup_mesh(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 2])
    dist.new_group([1])
    if rank != 1:
        model = small_mlp()
        expected = reference_grads(model, 2)
        shard_linears(model, mesh=DeviceMesh.from_group(group, "cpu"))
        mean_square(model, batch_of(rank // 2)).backward()
        assert_grads(model, expected)
    dist.barrier()
