"""CPU offload on CUDA: where shards and gradients are, and the bits of a run without offload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cudasim
import pytest
import torch
import torch.distributed as dist
from cuda_training import Training
from ranks import run_ranks
from test_cuda_training import check
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdpx
from fsdpx import CPUOffloadPolicy, DesyncError, fully_shard
from fsdpx import FullyShardedDataParallel as FSDP

pytestmark = pytest.mark.timeout(300)
simulated = pytest.mark.simulation
LIMIT = 240.0
WIDTH = 24


# ---- Training runs, compared with the run on CPU


def run(world_size: int = 2, offload: str = "pinned", **options: Any) -> tuple[int, Training]:
    return world_size, Training(offload=offload, **options)


RUNS = {
    "one rank": run(1, low=True),
    "nvlink": run(comm="nvlink"),
    "nvlink-copy": run(comm="nvlink-copy", low=True),
    "nccl": run(comm="nccl", low=True),
    "c10d": run(comm="c10d"),
    "pageable": run(offload="pageable", num_micro_batches=2),
    "prefetch 0": run(prefetch=0),
    "prefetch 2": run(prefetch=2),
    "accumulation": run(num_micro_batches=3, sync_each=False),
    "several backwards": run(num_micro_batches=3),
    "stage 1": run(zero_stage=1, num_micro_batches=2),
    "stage 2": run(zero_stage=2, num_micro_batches=2),
    "frozen": run(frozen=True),
    "converted": run(converted=True),
    "checkpointing": run(checkpoint=True, low=True),
    "smaller groups": run(4, few=2, low=True),
    "replicas": run(4, replicas=2, num_micro_batches=2),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_numbers_do_not_depend_on_offload(name: str) -> None:
    world_size, training = RUNS[name]
    orders = [("late", 1), ("random", 1)]
    check(world_size, training, orders, exact=training.comm not in ("nccl", "c10d"))


# ---- Two models, one of them offloaded


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    return model.to(dtype)


def sharded(offload: bool, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A unit for each layer; the offloaded model is never on the GPU as a whole."""
    model = net(dtype) if offload else net(dtype).cuda()
    options = {"mesh": dist.init_device_mesh("cuda", (dist.get_world_size(),)), **options}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def batch(rank: int, number: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(3, WIDTH, generator=generator).to(dtype).cuda()


def whole(model: Any) -> list[Tensor]:
    return [parameter.full_tensor().cpu() for parameter in model.parameters()]


def whole_gradients(model: Any) -> list[Tensor]:
    return [parameter.grad.full_tensor().cpu() for parameter in model.parameters()]


def assert_same(some: list[Tensor], others: list[Tensor]) -> None:
    assert len(some) == len(others) > 0
    assert [
        i for i, pair in enumerate(zip(some, others, strict=True)) if not torch.equal(*pair)
    ] == []


def both(act: Callable[[Any], list[Tensor]], **options: Any) -> None:
    """The same happens to both models, in every order, with the same result."""
    plain = act(sharded(offload=False, **options))
    for order in cudasim.ORDERS:
        cudasim.configure(order=order, seed=3)
        assert_same(act(sharded(offload=True, **options)), plain)


def accumulated(rank: int, dtype: torch.dtype) -> Callable[[Any], list[Tensor]]:
    """Gradients of three backwards, of which the second adds up without synchronisation."""

    def act(model: Any) -> list[Tensor]:
        for number in range(3):
            model.set_requires_gradient_sync(number != 1)
            model(batch(rank, number, dtype)).square().sum().backward()
        return whole_gradients(model)

    return act


def check_places(rank: int, world_size: int) -> None:
    model = sharded(offload=True)
    model(batch(rank)).sum().backward()
    for parameter in model.parameters():
        assert parameter.device.type == parameter.grad.device.type == "cpu"
        assert parameter.to_local().is_pinned()
        assert parameter.grad.to_local().is_pinned()
        assert parameter.full_tensor().device.type == "cpu"
    described = fsdpx.describe(model)
    text = str(described)
    assert "in CPU memory" in text
    assert "host shards" in text
    shards = sum(unit.shard_bytes for unit in described.units)
    memory = described.memory
    assert memory.host_shards == memory.host_gradients == shards
    assert memory.shards == memory.gradients == 0
    assert memory.staging == max(unit.shard_bytes for unit in described.units)
    assert fsdpx.describe(sharded(offload=False)).memory.total == (
        memory.total - memory.staging + 2 * shards
    )


def check_gradients(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):  # sums in bf16 round where they are added
        both(accumulated(rank, dtype), dtype=dtype)


def check_optimizers(rank: int, world_size: int) -> None:
    """With clipping by the norm over all ranks."""

    def train(model: Any, clip: Callable[..., Tensor], **options: Any) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
        norms = []
        for number in range(3):
            model(batch(rank, number)).square().sum().backward()
            norms.append(clip(model.parameters(), 0.5).cpu())
            optimizer.step()
            optimizer.zero_grad(set_to_none=number > 0)
        return [*norms, *whole(model)]

    both(lambda model: train(model, torch.nn.utils.clip_grad_norm_, foreach=False))
    model = sharded(offload=True)
    train(model, fsdpx.clip_grad_norm_, fused=True)
    flat = torch.optim.SGD(fsdpx.flat_parameters(model), lr=0.1)
    model(batch(rank)).square().sum().backward()
    flat.step()


def check_hooks(rank: int, world_size: int) -> None:
    """Optimizers that step in backward, as soon as a gradient is there."""

    def train(model: Any) -> list[Tensor]:
        @torch.no_grad()
        def step(parameter: Any) -> None:
            parameter.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for number in range(2):
            model(batch(rank, number)).square().sum().backward()
        return whole(model)

    both(train)


def check_replicas(rank: int, world_size: int) -> None:
    """Sums over replicas that wait, with a hook for what comes of them."""
    mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("copy", "share"))

    def act(model: Any) -> list[Tensor]:
        model[0].set_all_reduce_hook(lambda gradient: gradient.mul_(0.5))
        for number in range(4):
            model.set_requires_all_reduce(number != 1)
            model(batch(rank, number)).square().sum().backward()
        return whole_gradients(model)

    both(act, mesh=mesh)


def check_fsdp1(rank: int, world_size: int) -> None:
    def act(model: Any) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        norms = []
        for number in range(2):
            model(batch(rank, number)).float().square().sum().backward()
            norms.append(model.clip_grad_norm_(0.5).cpu())
            optimizer.step()
            optimizer.zero_grad()
        with FSDP.summon_full_params(model, offload_to_cpu=True):
            assert all(p.device.type == "cpu" for p in model.parameters())
            inside = [p.detach().clone() for p in model.parameters()]
        with FSDP.summon_full_params(model):
            assert all(p.is_cuda for p in model.parameters())
            assert_same([p.detach().cpu() for p in model.parameters()], inside)
        state = FSDP.optim_state_dict(model, optimizer)["state"].values()
        momenta = [each["momentum_buffer"].cpu() for each in state]
        return [*norms, *inside, *momenta, *(v.cpu() for v in model.state_dict().values())]

    options: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options.update(sharding_strategy=strategy, mixed_precision=low)
        plain = FSDP(net().cuda(), **options)
        offloaded = FSDP(net(), cpu_offload=CPUOffload(offload_params=True), **options)
        assert all(p.device.type == "cpu" for p in offloaded.parameters())
        assert_same(act(offloaded), act(plain))


@simulated
@pytest.mark.parametrize(
    "act", [check_places, check_gradients, check_optimizers, check_hooks, check_fsdp1]
)
def test_steps(act: Callable[[int, int], None]) -> None:
    run_ranks(2, act, timeout=LIMIT)


@simulated
def test_replicas() -> None:
    run_ranks(4, check_replicas, timeout=LIMIT)


# ---- What the host may touch, and when


class Reader(nn.Module):
    """Returns its weight, read by a kernel that the stream comes to in its own time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(100.0))

    def forward(self) -> Tensor:
        out = torch.empty(100, device="cuda")
        fsdpx.ops.pack([self.weight.detach()], out)
        return out


def check_edits(rank: int, world_size: int) -> None:
    """A forward has read the shards when it returns, though the GPU is far behind."""
    reader: Any = fully_shard(Reader(), offload_policy=CPUOffloadPolicy())
    cudasim.configure(order="late")
    out = reader()
    with torch.no_grad():
        reader.weight.zero_()
    assert out.tolist() == list(range(100))
    assert not reader().any()


def check_unshard(rank: int, world_size: int) -> None:
    for order in ("late", "random"):
        cudasim.configure(order=order, seed=1)
        model = sharded(offload=True)
        before = whole(model[0])
        model[0].unshard()
        with torch.no_grad():
            for parameter in model[0].parameters():
                parameter.zero_()
        assert torch.equal(model[0][0].weight.cpu(), before[0])
        model[0].reshard()


def check_failures(rank: int, world_size: int) -> None:
    """Gradients of a backward that raised do not come late into those of the next step."""

    def fail(gradient: Tensor) -> None:
        raise ValueError("told to fail")

    def fail_in_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    def act(model: Any) -> list[Tensor]:
        model(batch(rank)).square().sum().backward()
        hook = model[1].register_forward_hook(fail_in_backward)
        with pytest.raises(ValueError, match="told to fail"):
            model(batch(rank, 1)).square().sum().backward()
        hook.remove()
        model.zero_grad(set_to_none=False)
        model(batch(rank, 2)).square().sum().backward()
        gradients = whole_gradients(model)
        model.reset_iter_state()
        model.zero_grad()
        model(batch(rank, 3)).square().sum().backward()
        return [*gradients, *whole_gradients(model)]

    both(act)


def check_ranks_apart(rank: int, world_size: int, comm: str) -> None:
    """A host that waits for a GPU whose ranks went apart is told, and the way on works."""
    model = sharded(offload=True, comm=comm)
    x = batch(rank)
    expected = model(x)
    expected.square().sum().backward()
    path = model if rank == 0 else nn.Sequential(model, model[2])
    with pytest.raises(DesyncError, match="unit '2'"):
        path(x).square().sum().backward()
    model.reset_iter_state()
    model.zero_grad()
    assert torch.equal(model(x), expected)


def check_memory(rank: int, world_size: int) -> None:
    """However far the host is ahead, one unit's share is on the GPU at a time."""
    cudasim.configure(order="late")
    model = sharded(offload=True)
    x = batch(rank)
    with torch.no_grad():
        model(x)
    torch.cuda.synchronize()
    share = max(unit.shard_bytes for unit in fsdpx.describe(model).units)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        model(x)
    outputs = 2 * 2 * 512  # of the layer that runs
    assert torch.cuda.max_memory_allocated() - before <= share + 512 + outputs


@simulated
@pytest.mark.parametrize("act", [check_edits, check_unshard, check_failures, check_memory])
def test_the_host_and_the_stream(act: Callable[[int, int], None]) -> None:
    run_ranks(2, act, timeout=LIMIT)


@simulated
@pytest.mark.parametrize("comm", ["nvlink", "nccl"])
def test_ranks_apart(comm: str) -> None:
    run_ranks(2, check_ranks_apart, comm, timeout=LIMIT)
