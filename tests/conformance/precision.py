"""Sums that lose precision or range, norms, and groups of ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdpx
from fsdpx import MixedPrecisionPolicy, fully_shard

from .parts import (
    Pair,
    assert_close,
    assert_grads,
    backward_of_all_ranks,
    batch_of,
    check_one_step,
    grads_of,
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


class ManyKinds(nn.Module):
    """Layers that are sharded in several ways, one frozen, one unused, one in bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.kept, self.unused = (nn.Linear(6, 6) for _ in range(3))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.low = nn.Linear(6, 6).bfloat16()
        self.tiny = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(torch.tanh(self.kept(self.first(x)))) * self.tiny
        return self.low(x.bfloat16()).float()


def shard_many_kinds(model: ManyKinds) -> None:
    for unit in (model.first, model.unused, model.frozen, model.low):
        fully_shard(unit)
    fully_shard(model.kept, zero_stage=2)
    fully_shard(model)


@case("clipping of sharded, kept, frozen, unused and bf16 parameters together")
def clipping_of_many_kinds(rank: int, world_size: int) -> None:
    for norm_type in (1.0, 2.0, float("inf")):
        for limit in (1e-3, 1e3):
            for clip in (nn.utils.clip_grad_norm_, fsdpx.clip_grad_norm_):
                pair = Pair(ManyKinds(), shard_many_kinds)
                pair.backward(rank, world_size)
                ours = clip is fsdpx.clip_grad_norm_
                clipped = pair.model if ours else pair.model.parameters()
                norm = whole(clip(clipped, limit, norm_type=norm_type)).float()
                parameters = pair.reference.parameters()
                wanted = nn.utils.clip_grad_norm_(parameters, limit, norm_type=norm_type).float()
                assert_close(norm / wanted, torch.tensor(1.0), "norm", limit=1e-2)
                pair.assert_grads(limit=1e-2)


@case("a custom divisor differs under replication", world_size=4)
def divisor_whatever_the_mesh(rank: int, world_size: int) -> None:
    found = []
    for shape in ((1, 4), (2, 2), (4, 1)):
        model = small_mlp()
        shard_linears(model, mesh=init_device_mesh("cpu", shape))
        divide_by(model, 300.0)
        mean_square(model, batch_of(rank)).backward()
        found.append([whole(parameter.grad).clone() for parameter in model.parameters()])
    for gradients in found[1:]:
        for actual, expected in zip(gradients, found[0], strict=True):
            assert_close(actual, expected, "gradient", limit=1e-7)


def divide_by(model: nn.Module, factor: float) -> None:
    for module in model.modules():
        if isinstance(module, fsdpx.FSDPModule):
            module.set_gradient_divide_factor(factor)


@case("ranks with unequal numbers of tokens: the mean over all tokens", world_size=4)
def mean_over_tokens(rank: int, world_size: int) -> None:
    model, reference = small_mlp(), small_mlp()
    shard_linears(model)
    divide_by(model, 1.0 + 2 + 3 + 4)
    model(batch_of(rank, rank + 1)).pow(2).sum().backward()
    losses = [reference(batch_of(each, each + 1)).pow(2).sum() for each in range(world_size)]
    (torch.stack(losses).sum() / 10).backward()
    assert_grads(model, grads_of(reference))


@case("an inner unit on another group of ranks than the root", world_size=4)
def units_on_several_meshes(rank: int, world_size: int) -> None:
    hybrid, flat = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))

    def shard(model: nn.Sequential) -> None:
        fully_shard(model[0], mesh=hybrid)
        fully_shard(model[2], mesh=flat)
        fully_shard(model, mesh=flat)

    pair = Pair(small_mlp(), shard)
    pair.optimize(torch.optim.SGD, lr=0.1)
    for step in range(2):
        pair.backward(rank, world_size, step=step)
        pair.assert_grads()
        pair.step()
    pair.assert_weights()


@case("gradients are summed, not averaged, or in too low a precision", world_size=3)
def reductions_lower_than_parameters(rank: int, world_size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for kind in ("shm", "c10d"):
            policy = MixedPrecisionPolicy(reduce_dtype=dtype)
            options = {"mp_policy": policy, "comm": kind, "limit": 1e-2}
            check_one_step(small_mlp(), rank, world_size, **options)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))


@case("an fp32 norm among bf16 layers computed in bf16")
def norm_in_float32(rank: int, world_size: int) -> None:
    model = Normed()
    reference = copy.deepcopy(model)
    seen = []
    model.norm.register_forward_pre_hook(
        lambda module, inputs: seen.extend([inputs[0].dtype, module.weight.dtype])
    )
    wide = MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=torch.bfloat16)
    fully_shard(model.norm, mp_policy=wide)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    mean_square(lambda x: model(x).float(), batch_of(rank)).backward()
    assert seen == [torch.float32, torch.float32]
    backward_of_all_ranks(reference, world_size)
    assert_grads(model, grads_of(reference), limit=2e-2)


@case("autocast around a bf16 model and around an fp32 one, over two forwards")
def autocast_on_top(rank: int, world_size: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().pow(2).mean() + model(x * 2).float().pow(2).mean()

    for dtype in (torch.bfloat16, None):
        policy = MixedPrecisionPolicy(dtype, torch.float32)
        options = {"reshard_after_forward": True, "mp_policy": policy}
        check_one_step(Normed(), rank, world_size, loss=loss, limit=5e-2, **options)


@case("NaN on one rank: the norm, and the error that is asked for, are every rank's")
def nan_on_one_rank(rank: int, world_size: int) -> None:
    model = shard_linears(small_mlp())
    x = batch_of(rank)
    if rank == 1:
        x[0, 0] = float("nan")
    mean_square(model, x).backward()
    assert total_norm(model, 2.0).isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    model.zero_grad()
    mean_square(model, batch_of(rank)).backward()
    assert total_norm(model, 2.0).isfinite()
