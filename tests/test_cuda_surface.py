"""What users call, on CUDA: each program gives the values of the same program on CPU.

A program gets the device and returns numbers, texts and tensors. In the simulation the bits are
those of the CPU, in a late and in a random order of streams; on a real GPU they agree within
rounding.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cudasim
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as whole_states
import torch.nn.functional as F
from cuda_training import WIDTH, Block, Model
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_map_only

import fsdpx
from fsdpx import MixedPrecisionPolicy, fully_shard

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
ORDERS = [("late", 1), ("random", 5)] if cudasim.active else [("eager", 1)]
LIMIT = 240.0

Program = Callable[..., Any]


def whole(tree: Any) -> Any:
    """Tensors as whole tensors on the CPU."""

    def on_cpu(tensor: Any) -> Tensor:
        tensor = tensor.detach()
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return full.cpu().clone()

    return tree_map_only(Tensor, on_cpu, tree)


def assert_alike(found: Any, expected: Any) -> None:
    exact = {"rtol": 0.0, "atol": 0.0} if cudasim.active else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, expected, equal_nan=True, **exact)


def on_both(rank: int, world_size: int, program: Program, args: tuple[Any, ...]) -> None:
    expected = whole(program("cpu", *args))
    for order, seed in ORDERS:
        if cudasim.active:
            cudasim.configure(order=order, seed=seed)
        assert_alike(whole(program("cuda", *args)), expected)


def check(world_size: int, program: Program, *args: Any) -> None:
    run_ranks(world_size, on_both, program, args, timeout=LIMIT)


# ---- What the programs are made of


def plain(device: str) -> Any:
    torch.manual_seed(0)
    return Model(recompute=False).to(device)


def batch(device: str, step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs, targets = (torch.randn(4, n, generator=generator) for n in (WIDTH, 3))
    return inputs.to(device), targets.to(device)


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1])


def sharded(device: str, **options: Any) -> Any:
    model = plain(device)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(model: Any, device: str, step: int = 0) -> Tensor:
    loss = loss_of(model, batch(device, step, dist.get_rank()))
    loss.backward()
    return loss.detach()


def train(model: Any, optimizer: torch.optim.Optimizer, device: str, steps: int = 2) -> list[Any]:
    losses = []
    for step in range(steps):
        losses.append(backward(model, device, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


# ---- Stages, meshes and groups


def stages(device: str, stage: int, comm: str) -> Any:
    """Two micro-batches, only the last of them reduced, and clipping."""
    model = sharded(device, zero_stage=stage, comm=comm if device == "cuda" else "auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(2):
        with fsdpx.no_sync(model):
            backward(model, device, 2 * step)
        backward(model, device, 2 * step + 1)
        norms.append(fsdpx.clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return norms, values(model)


@pytest.mark.parametrize("comm", ["nvlink", "nvlink-copy", "nccl", "c10d"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages(stage: int, comm: str) -> None:
    """Sums of two ranks are the same in any order."""
    check(2, stages, stage, comm)


def meshes(device: str, how: str) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    if how == "slice":
        mesh = dist.init_device_mesh(device, (2, size // 2), mesh_dim_names=("dp", "other"))["dp"]
    elif how == "alone":
        mesh = dist.DeviceMesh.from_group([dist.new_group([r]) for r in range(size)][rank], device)
    elif how == "replicas":
        mesh = dist.init_device_mesh(device, (2, size // 2))
    else:  # neither the default group nor in its order
        mesh = dist.DeviceMesh(device, list(reversed(range(size))))
    model = sharded(device, mesh=mesh)
    losses = train(model, sgd(model), device)
    return losses, values(model), [p.to_local().shape for p in model.parameters()]


@pytest.mark.parametrize("how", ["slice", "alone", "replicas", "reversed"])
def test_meshes(how: str) -> None:
    check(4, meshes, how)


# ---- State


def states(device: str, path: str) -> Any:
    model = sharded(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, device)
    saved = {"model": model.state_dict()}
    dcp.save(saved, checkpoint_id=f"{path}/{device}")
    options = whole_states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = whole_states.get_state_dict(model, optimizer, options=options)
    before = whole(values(model))

    again = sharded(device)
    other = torch.optim.AdamW(again.parameters(), lr=1e-2)
    empty = {"model": again.state_dict()}
    dcp.load(empty, checkpoint_id=f"{path}/{device}")
    again.load_state_dict(empty["model"])
    loaded = whole(values(again))
    model_state, optim_state = full  # on rank 0; empty elsewhere
    spread = whole_states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    whole_states.set_model_state_dict(again, model_state, options=spread)
    whole_states.set_optimizer_state_dict(again, other, optim_state, options=spread)
    return before, loaded, train(model, optimizer, device), train(again, other, device)


def test_states(tmp_path: Path) -> None:
    check(2, states, str(tmp_path))


def averages(device: str) -> Any:
    model = sharded(device)
    optimizer = sgd(model)
    decay = get_ema_multi_avg_fn(0.75)
    average = AveragedModel(model, device=device, multi_avg_fn=decay)
    copied = copy.deepcopy(model)
    for _ in range(2):
        train(model, optimizer, device, steps=1)
        average.update_parameters(model)
        with torch.no_grad():
            for old, new in zip(copied.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.25)
    inputs, _ = batch(device, 9, dist.get_rank())
    with torch.no_grad():
        outputs = model(inputs), average(inputs), copied(inputs)
    return outputs, values(model), values(copied), train(copied, sgd(copied), device)


def edits(device: str) -> Any:
    model = sharded(device)
    backward(model, device)
    with fsdpx.full_parameters(model, with_grads=True):
        shown = whole({n: (p.detach(), p.grad) for n, p in model.named_parameters()})
        with torch.no_grad():
            model.head.weight.mul_(2.0)
            model.blocks[0].up.bias.grad.zero_()
    grads = {n: p.grad for n, p in model.named_parameters()}
    torch.manual_seed(3)
    nn.init.normal_(model.blocks[1].up.weight)
    with torch.no_grad():
        model.blocks[2].down.weight.copy_(torch.full((WIDTH, 2 * WIDTH + 1), 0.5))
    return shown, grads, values(model)


def initial_values(device: str) -> Any:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(5, 7).to(device)
    differing = fsdpx.unequal_states(model)
    fsdpx.sync_module_states(model)
    meta = fully_shard(nn.Linear(6, 3, device="meta"), mesh=dist.init_device_mesh(device, (2,)))
    meta.to_empty(device=device)
    with torch.no_grad():
        meta.weight.fill_(2.0)
        meta.bias.fill_(1.0)
    return len(differing), values(fully_shard(model)), meta(torch.ones(2, 6).to(device))


# ---- Ways to train


def methods(device: str) -> Any:
    model = sharded(device)
    model.set_reshard_after_forward(False)
    model.blocks[0].set_reshard_after_backward(False)
    model.set_gradient_divide_factor(3.0)
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    model.set_is_last_backward(True)
    losses = train(model, sgd(model), device, steps=3)
    handle = second.unshard(async_op=True)
    handle.wait()
    full = whole(second.up.weight)
    second.reshard()
    model.set_requires_gradient_sync(False)
    backward(model, device)
    model.zero_grad()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    return losses, full, values(model), train(model, sgd(model), device)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out

    def generate(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = torch.tanh(self.linear(x))
        return x


def other_methods_than_forward(device: str) -> Any:
    torch.manual_seed(0)
    model: Any = fully_shard(Generator().to(device))
    fsdpx.register_fsdp_forward_method(model, "generate")
    model.generate(torch.ones(2, 6).to(device), 3).sum().backward()
    return {n: p.grad for n, p in model.named_parameters()}


def mixed_precision(device: str) -> Any:
    model = sharded(device, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return train(model, sgd(model), device), values(model)


def scaled_losses(device: str) -> Any:
    """The second step's gradients are not finite on one rank, so no rank takes it."""
    model = sharded(device)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=1)
    scales = []
    for step in range(3):
        loss = loss_of(model, batch(device, step, dist.get_rank()))
        bad = step == 1 and dist.get_rank() == 1
        scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, values(model)


def flat_optimizer(device: str) -> Any:
    model = sharded(device)
    flat = fsdpx.flat_parameters(model)
    losses = train(model, torch.optim.AdamW(flat, lr=1e-2, foreach=True), device)
    return len(flat), losses, values(model)


def whole_matrices(device: str) -> Any:
    model = sharded(device, granularity="parameter")
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    return train(model, torch.optim.Muon(matrices, lr=1e-2), device), values(model)


@pytest.mark.parametrize(
    "program",
    [
        averages,
        edits,
        initial_values,
        methods,
        other_methods_than_forward,
        mixed_precision,
        scaled_losses,
        flat_optimizer,
        whole_matrices,
    ],
)
def test_programs(program: Program) -> None:
    check(2, program)


# ---- What tells about a model


def reports(device: str, path: str) -> Any:
    def batch_of(rank: int, step: int) -> Any:
        return batch(device, step, rank)

    report = fsdpx.verify(lambda: plain(device), batch_of, loss_fn=loss_of)
    report.check()
    model = sharded(device)
    for step in range(2):
        backward(model, device, step)
    with fsdpx.record_timeline(model) as timeline:
        backward(model, device, 2)
    timeline.write_svg(f"{path}/{device}-{dist.get_rank()}.svg")
    issued = Counter(f"{r.operation} {r.unit}" for r in timeline.records if r.lane == "comm")
    units = [line for line in str(fsdpx.describe(model)).splitlines() if "blocks." in line]
    return dict(issued), len(units)


def test_reports(tmp_path: Path) -> None:
    check(2, reports, str(tmp_path))


# ---- FSDP1's front door


def wrapped(device: str, strategy: str, mesh: Any) -> Any:
    return fsdpx.FullyShardedDataParallel(
        plain(device),
        device_mesh=mesh,
        device_id=torch.cuda.current_device() if device == "cuda" else None,
        sharding_strategy=fsdpx.ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )


def front_door(device: str, strategy: str) -> Any:
    size = dist.get_world_size()
    shape = (2, size // 2) if "HYBRID" in strategy else (size,)
    model = wrapped(device, strategy, dist.init_device_mesh(device, shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(2):
        with model.no_sync():
            backward(model, device, 2 * step)
        backward(model, device, 2 * step + 1)
        norms.append(model.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
    with fsdpx.FullyShardedDataParallel.summon_full_params(model):
        with torch.no_grad():
            model.head.bias.add_(1.0)
        shown = {name: p.detach().clone() for name, p in model.named_parameters()}
    full = fsdpx.FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
    optim = fsdpx.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=False)
    kind = fsdpx.StateDictType.FULL_STATE_DICT
    front = fsdpx.FullyShardedDataParallel
    with front.state_dict_type(model, kind, full, optim):
        saved = model.state_dict(), front.optim_state_dict(model, optimizer)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(front.optim_state_dict_to_load(model, optimizer, saved[1]))
    return norms, shown, saved[0], saved[1]["state"], train(model, optimizer, device)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_front_door(strategy: str) -> None:
    check(2, front_door, strategy)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hybrid_front_door(strategy: str) -> None:
    check(4, front_door, strategy)


def front_door_options(device: str) -> Any:
    """Modules that are still on the CPU or the meta device, ranks that differ, mixed precision."""
    torch.manual_seed(dist.get_rank())
    options = {
        "device_mesh": dist.init_device_mesh(device, (2,)),
        "device_id": torch.device(
            device, torch.cuda.current_device() if device == "cuda" else None
        ),
        "auto_wrap_policy": ModuleWrapPolicy({Block}),
        "sync_module_states": True,
    }
    half = fsdpx.MixedPrecision(torch.bfloat16, torch.float32, cast_root_forward_inputs=True)
    model = fsdpx.FullyShardedDataParallel(Model(recompute=True), mixed_precision=half, **options)
    losses = train(model, sgd(model), device)
    with torch.device("meta"):
        later = Model(recompute=False)
    torch.manual_seed(1)

    def init(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=False)
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 0.25)

    later = fsdpx.FullyShardedDataParallel(later, param_init_fn=init, **options)
    return losses, values(model), values(later), train(later, sgd(later), device)


def test_front_door_options() -> None:
    check(2, front_door_options)
