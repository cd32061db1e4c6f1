"""The memory of a step, measured from outside the runtime, is what `describe` says."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

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

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@dataclass(frozen=True)
class Measured:
    """Bytes of this process: what the step took, and what the formula says."""

    taken: int
    described: int


def proportional_bytes() -> int:
    """Memory of this process; what it shares with others counts in equal parts."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss in smaps_rollup")


class Sampler(torch.autograd.Function):
    """The identity; calls back in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sample: Any) -> Tensor:
        ctx.sample = sample
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.sample()
        return grad, None


class Model(nn.Module):
    """Layers as units; nothing else has parameters."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(num_layers)])
        self.samples: list[int] | None = None

    def sample(self) -> None:
        if self.samples is not None:
            self.samples.append(proportional_bytes())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            # Backward comes here when all of this layer's gradients are there, sent or not.
            x = layer(Sampler.apply(x, self.sample))
        return x


def make(num_layers: int, options: dict[str, Any]) -> Any:
    from fsdpx import MixedPrecisionPolicy, fully_shard

    options = dict(options)
    policy = MixedPrecisionPolicy(param_dtype=options.pop("param_dtype", None))
    model = Model(num_layers)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def step(model: Any) -> None:
    model(torch.randn(1, WIDTH, requires_grad=True)).float().square().sum().backward()


def measure(rank: int, world_size: int, options: dict[str, Any]) -> Measured:
    """Trains for three steps and samples this process's memory all through the last."""
    import fsdpx

    # Blocks of a MiB and more go back to the system when they are freed.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    step(make(1, options))  # what the first step of all allocates for good
    gc.collect()
    before = proportional_bytes()
    torch.manual_seed(0)
    model = make(NUM_LAYERS, options)
    step(model)
    step(model)
    model.samples = []
    step(model)
    described = fsdpx.describe(model).memory.total
    return Measured(taken=max(model.samples) - before, described=described)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_takes_what_the_formula_says(world_size: int, prefetch: int, dtype: str) -> None:
    options: dict[str, Any] = {"prefetch": prefetch}
    if dtype == "bf16":
        options["param_dtype"] = torch.bfloat16
    measured = run_ranks(world_size, measure, options, timeout=120)
    taken = sum(m.taken for m in measured)
    described = sum(m.described for m in measured)
    text = f"{taken / MIB:.1f} MiB taken, {described / MIB:.1f} MiB described"
    assert abs(taken - described) <= 0.02 * described + SLACK_BYTES * world_size, text
