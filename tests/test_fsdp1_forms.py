"""FullyShardedDataParallel around models of many forms: dtypes, meshes, wrappers of other kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Block, loss_of, make_batch, make_model
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdpx
from fsdpx import FullyShardedDataParallel as FSDP
from fsdpx import ShardingStrategy
from fsdpx.unit import unit_of


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def batch(rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 + rank))


class Codes(nn.Module):
    """float32, bfloat16 and frozen integers of odd lengths, a scalar and no elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 7)
        self.low = nn.Linear(7, 5, dtype=torch.bfloat16)
        self.codes = nn.Parameter(torch.arange(13, dtype=torch.int8), requires_grad=False)
        self.scales = nn.Parameter(torch.arange(3, dtype=torch.uint8), requires_grad=False)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Linear(5, 0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.low(self.first(x).bfloat16()).float() * self.temperature
        return x.sum() + self.nothing(x).sum() + self.codes.sum() * self.scales.sum()


def train_codes(rank: int, world_size: int) -> None:
    model, reference = FSDP(Codes()), Codes()
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, reference)]
    for _ in range(3):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            each(batch(0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    whole = model.state_dict()
    for name, expected in reference.state_dict().items():
        torch.testing.assert_close(whole[name], expected, rtol=1e-6, atol=1e-6)
        assert whole[name].shape == expected.shape
    assert torch.equal(whole["codes"], Codes().codes)


def test_mixed_dtypes_scalars_and_no_elements() -> None:
    run_ranks(3, train_codes)


def gradients_by_shape(rank: int, world_size: int) -> list[float]:
    """Gradients of 4 ranks as replicas x shares, and with an inner unit on another group."""
    reference = mlp()
    losses = [reference(batch(r)).square().mean() for r in range(world_size)]
    (sum(losses) / world_size).backward()
    found = []
    meshes = [
        init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for shape in ((4, 1), (2, 2), (1, 4))
    ]
    hybrid = ShardingStrategy.HYBRID_SHARD
    for outer, inner in [(m, m) for m in meshes] + [(meshes[1], meshes[2])]:
        net = mlp()
        net[0] = FSDP(net[0], sharding_strategy=hybrid, device_mesh=inner)
        model = FSDP(net, sharding_strategy=hybrid, device_mesh=outer)
        model(batch(rank)).square().mean().backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        found.append(max((p.grad.full_tensor() - q.grad).abs().max().item() for p, q in pairs))
    return found


def test_gradients_are_the_mean_whatever_the_mesh() -> None:
    for found in run_ranks(4, gradients_by_shape):
        assert max(found) < 1e-7


def streams(rank: int, world_size: int) -> None:
    """A group shares one unit and holds copies of another: two communicators, each on one stream,
    so that the order of collectives never depends on time.
    """
    net = mlp()
    net[0] = FSDP(net[0], sharding_strategy=ShardingStrategy.NO_SHARD)
    model = FSDP(net)
    for _ in range(20):
        model(batch(rank)).sum().backward()
    inner, outer = unit_of(net[0]), unit_of(model)
    assert inner.group.replicate_group is outer.group.process_group
    assert inner.replicate_comm is not outer.comm
    assert inner.replicate_comm.stream is inner.comm.stream is not outer.comm.stream


def test_replicas_and_shares_of_one_group() -> None:
    run_ranks(2, streams)


def test_activation_checkpointing_gathers_twice() -> None:
    model = FSDP(make_model("gpt"), auto_wrap_policy=ModuleWrapPolicy({Block}))
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    assert isinstance(model.blocks[1], FSDP)
    assert isinstance(model.blocks[1].module, Block)  # the checkpointing wrapper is inside
    step = lambda: loss_of(model, make_batch("gpt", step=0, rank=0)).backward()  # noqa: E731
    step()
    with fsdpx.record_timeline(model) as timeline:
        step()
    gathers = [r.unit for r in timeline.records if r.operation == "all_gather"]
    assert gathers.count("blocks.1") == 2
    reference = make_model("gpt")
    loss_of(reference, make_batch("gpt", step=0, rank=0)).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert all(torch.equal(p.grad.full_tensor(), 2 * q.grad) for p, q in pairs)


@pytest.mark.parametrize("inside", [False, True])
def test_compiled(inside: bool) -> None:
    reference, net = mlp(), mlp()
    if inside:
        model: Any = FSDP(torch.compile(net, backend="eager"))
    else:
        wrapped = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        model = torch.compile(wrapped, backend="eager")
    model(batch(0)).sum().backward()
    reference(batch(0)).sum().backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert all(torch.equal(p.grad.full_tensor(), q.grad) for p, q in pairs)


def test_another_method_than_forward() -> None:
    class Encoder(nn.Linear):
        def encode(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight)

    model = FSDP(Encoder(6, 6))
    with pytest.raises(RuntimeError, match="'weight'"):
        model.encode(batch(0))
    fsdpx.register_fsdp_forward_method(model, "encode")
    model.encode(batch(0)).sum().backward()
    assert model.module.weight.grad is not None
