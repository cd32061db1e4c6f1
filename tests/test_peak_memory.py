"""The memory of a step, measured from outside the runtime, is what `describe` says."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

WIDTH = 1024
NUM_LAYERS = 6
MIB = 2**20
# The interpreter's own objects, small buffers and page tables come on top of what is counted.
SLACK_BYTES = 2 * MIB
M_MMAP_THRESHOLD = -3  # of mallopt


class Layer(nn.Module):
    """8 MiB of parameters in fp32; one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.when_last: Callable[[], None] | None = None  # what to call in the last micro-batch
        self.at_last_gradient: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.at_last_gradient is not None:
            # The hook runs when all of the unit's large gradients are there, before any is sent.
            call, self.at_last_gradient = self.at_last_gradient, None
            self.first.weight.register_hook(lambda _: call())
        return self.second(torch.tanh(self.first(x)))


class Model(nn.Module):
    """Layers as units; nothing else has parameters."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True)
class Measured:
    """Bytes of this process: what the step took, and what the formula says."""

    taken: int
    described: int
    send_buffers: int  # a part of what is described


def proportional_bytes() -> int:
    """Memory of this process without files; what it shares with others counts in equal parts."""
    fields = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    sizes = {words[0]: int(words[1]) for words in fields if words[-1] == "kB"}
    return (sizes["Pss_Anon:"] + sizes["Pss_Shmem:"]) * 1024


@dataclass(frozen=True, kw_only=True)
class Way:
    """How to train.

    Attributes:
        stages: ZeRO stages of the layers, in turn.
        prefetch: Units gathered ahead.
        dtypes: For computation and for reductions, if not fp32.
    """

    stages: tuple[int, ...] = (3,)
    prefetch: int = 1
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)


def make(num_layers: int, way: Way) -> Any:
    """A sharded model on a process group of its own: its communicator has no buffers yet."""
    from fsdpx import MixedPrecisionPolicy, fully_shard

    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    policy = MixedPrecisionPolicy(*way.dtypes)
    options = {"mesh": mesh, "prefetch": way.prefetch, "mp_policy": policy}
    torch.manual_seed(0)
    model = Model(num_layers)
    for number, layer in enumerate(model.layers):
        fully_shard(layer, zero_stage=way.stages[number % len(way.stages)], **options)
    return fully_shard(model, **options)


def step(model: Any, way: Way) -> None:
    """Two micro-batches if that makes a difference, else one."""
    for is_last in [False, True] if 1 in way.stages else [True]:
        model.set_is_last_backward(is_last)
        if is_last:
            for layer in model.layers:
                layer.at_last_gradient = layer.when_last
        model(torch.randn(1, WIDTH, requires_grad=True)).float().square().sum().backward()


def measure(rank: int, world_size: int, way: Way) -> Measured:
    """Trains for a few steps and samples this process's memory in the backward of the last."""
    import fsdpx
    from fsdpx.unit import communicators

    # Blocks of a MiB and more go back to the system when they are freed.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    warm_up = make(1, way)  # what the first step of all allocates for good
    step(warm_up, way)
    gc.collect()
    dist.barrier()  # the peers have let go of what earlier tests shared, too
    before = proportional_bytes()
    model = make(NUM_LAYERS, way)
    for _ in range(3):
        step(model, way)
    samples: list[int] = []
    (comm,) = communicators(model)

    def sample() -> None:
        # Full gradients stay until their reduction has run; the formula counts those of one unit.
        comm.stream.enqueue(lambda: None).wait(30.0)
        samples.append(proportional_bytes())

    for layer in model.layers:
        layer.when_last = sample
    step(model, way)
    assert len(samples) == NUM_LAYERS
    memory = fsdpx.describe(model).memory
    return Measured(max(samples) - before, memory.total, memory.send_buffers)


def check(world_size: int, way: Way) -> None:
    measured = run_ranks(world_size, measure, way, timeout=120)
    taken = sum(m.taken for m in measured)
    described = sum(m.described for m in measured)
    text = f"{taken / MIB:.1f} MiB taken, {described / MIB:.1f} MiB described"
    # A single rank sends nothing: its gradients can be read where they are, and buffers that
    # nobody writes take no memory.
    untouched = sum(m.send_buffers for m in measured) if world_size == 1 else 0
    slack = 0.02 * described + SLACK_BYTES * world_size
    assert described - untouched - slack <= taken <= described + slack, text


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_takes_what_the_formula_says(world_size: int, prefetch: int, dtype: str) -> None:
    param_dtype = torch.bfloat16 if dtype == "bf16" else None
    check(world_size, Way(prefetch=prefetch, dtypes=(param_dtype, None)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stages", [(1,), (2,), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_stages_take_what_the_formula_says(
    world_size: int, stages: tuple[int, ...], dtype: str
) -> None:
    dtypes = (torch.bfloat16, torch.float32) if dtype == "bf16" else (None, None)
    check(world_size, Way(stages=stages, dtypes=dtypes))
