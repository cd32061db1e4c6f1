"""CPU offload on CUDA over the life of a model: initialisation, edits, copies, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from test_cuda_offload import (
    LIMIT,
    WIDTH,
    assert_same,
    batch,
    both,
    net,
    sharded,
    whole,
    whole_gradients,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

import fsdpx
from fsdpx import CPUOffloadPolicy, fully_shard

pytestmark = [pytest.mark.simulation, pytest.mark.timeout(300)]


def check_whole_parameters(rank: int, world_size: int) -> None:
    for offload in (True, False):
        model = sharded(offload)
        model(batch(rank)).square().sum().backward()
        values, gradients = whole(model), whole_gradients(model)
        free = torch.cuda.memory_allocated()
        with fsdpx.full_parameters(model, offload_to_cpu=True, with_grads=True):
            layers = [layer[0] for layer in model]
            shown = [p for layer in layers for p in (layer.weight, layer.bias)]
            assert all(p.device.type == "cpu" and type(p) is nn.Parameter for p in shown)
            assert_same(shown, values)
            assert_same([p.grad for p in shown], gradients)
            assert torch.cuda.memory_allocated() == free
            assert not any(unit.is_gathered for unit in fsdpx.unit.units(model))
            with torch.no_grad():
                shown[0].mul_(2.0)
                shown[1].grad.zero_()
            with fsdpx.full_parameters(model):  # left to the one around it
                assert layers[0].weight is shown[0]
        assert torch.equal(whole(model)[0], 2.0 * values[0])
        assert not whole_gradients(model)[1].any()
        with fsdpx.full_parameters(model, with_grads=True), torch.no_grad():
            assert model[0][0].weight.is_cuda
            model[0][0].weight.mul_(0.5)
            model[0][0].bias.grad.fill_(1.0)
        assert_same(whole(model), values)
        assert bool((whole_gradients(model)[1] == 1.0).all())
        with fsdpx.full_parameters(model, offload_to_cpu=True), torch.no_grad():
            model[0][0].weight.zero_()
            out = model(batch(rank))
            model[0][0].weight.copy_(values[0])
        assert not torch.equal(out, model(batch(rank)))


def check_checkpoints(rank: int, world_size: int, path: Path) -> None:
    model = sharded(offload=True)
    values = whole(model)
    state = model.state_dict()
    assert all(value.device.type == "cpu" for value in state.values())
    dcp.save(state, checkpoint_id=path)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = model.state_dict()
    dcp.load(loaded, checkpoint_id=path)
    model.load_state_dict(loaded)
    assert_same(whole(model), values)
    if rank == 0:
        assert_same(list(full.values()), values)
    plain = sharded(offload=False)
    x = batch(rank)
    assert torch.equal(model(x), plain(x))


def check_copies(rank: int, world_size: int) -> None:
    """An average that follows the model, as a copy and by hand."""

    def act(model: Any) -> list[Tensor]:
        average = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outputs = []
        for number in range(2):
            x = batch(rank, number)
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.3)
                outputs.append(average(x).cpu())
        return [*outputs, *whole(average)]

    both(act)
    assert next(copy.deepcopy(sharded(offload=True)).parameters()).to_local().is_pinned()


def check_trained_before(rank: int, world_size: int) -> None:
    """A model that trained on the GPU before: its gradients and optimizer state move, too."""

    def train(offload: bool) -> list[Tensor]:
        model: Any = net().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(batch(0)).square().sum().backward()
        optimizer.step()
        policy = CPUOffloadPolicy() if offload else None
        mesh = dist.init_device_mesh("cuda", (world_size,))
        fully_shard(model, mesh=mesh, offload_policy=policy)
        gradients = whole_gradients(model)
        optimizer.step()
        model(batch(rank)).square().sum().backward()
        optimizer.step()
        return [*gradients, *whole(model), *whole_gradients(model)]

    assert_same(train(offload=True), train(offload=False))


def check_meta(rank: int, world_size: int) -> None:
    mesh = dist.init_device_mesh("cuda", (world_size,))
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model[0].reset_parameters()
    torch.manual_seed(0)
    expected = nn.Linear(WIDTH, WIDTH).cuda()
    x = batch(rank)
    assert torch.equal(model(x), expected(x))
    assert model[0].weight.to_local().is_pinned()
    model.cuda()
    with pytest.raises(RuntimeError, match=r"moved to cuda:\d after fully_shard; .*CPU offload"):
        model(x)


def check_without_a_mesh(rank: int, world_size: int) -> None:
    model: Any = fully_shard(net(), offload_policy=CPUOffloadPolicy())
    assert model(batch(rank)).is_cuda


def check_nccl_alone(rank: int, world_size: int) -> None:
    """The group can't communicate CPU tensors: norms and whole values go by way of the GPU."""
    group = dist.new_group(backend="nccl")
    mesh = DeviceMesh.from_group(group, "cuda")

    def act(model: Any) -> list[Tensor]:
        model(batch(rank)).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return [norm.cpu(), *whole(model), *whole_gradients(model)]

    both(act, mesh=mesh)
    one = sharded(offload=True, mesh=mesh, granularity="parameter")
    weight = next(one.parameters()).detach()
    value = (weight @ weight.T).sum().item()
    first = net()[0][0].weight.detach()
    assert value == pytest.approx((first @ first.T).sum().item(), rel=1e-5)


LIVES = [
    check_whole_parameters,
    check_copies,
    check_trained_before,
    check_meta,
    check_without_a_mesh,
    check_nccl_alone,
]


@pytest.mark.parametrize("act", LIVES)
def test_life(act: Callable[[int, int], None]) -> None:
    run_ranks(2, act, timeout=LIMIT)


def test_checkpoints(tmp_path: Path) -> None:
    run_ranks(2, check_checkpoints, tmp_path, timeout=LIMIT)
