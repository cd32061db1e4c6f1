"""ZeRO stages: how often units are gathered and reduced, how many bytes travel, and the numbers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

NUM_MICRO_BATCHES = 3
WIDTH = 32
LAYERS = ("0", "1", "2")
REDUCE_EACH = "reduce_each"  # nothing is said: every backward is the last
SAY_LAST = "set_is_last_backward"
NO_SYNC = "no_sync"
ACCUMULATIONS = (REDUCE_EACH, SAY_LAST, NO_SYNC)


def make_reference() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in LAYERS], nn.Tanh())


def shard(reference: nn.Module, stages: Sequence[int], **options: Any) -> Any:
    """A copy of the model with the layers as units, and the root, of these stages."""
    from fsdpx import fully_shard

    model = copy.deepcopy(reference)
    layers = [module for module in model if isinstance(module, nn.Linear)]
    for layer, stage in zip(layers, stages, strict=False):
        fully_shard(layer, zero_stage=stage, **options)
    return fully_shard(model, zero_stage=stages[-1], **options)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def say_how(model: Any, accumulation: str, last: bool) -> None:
    """Announces what the next backward is to do."""
    if accumulation == SAY_LAST:
        model.set_is_last_backward(last)
    elif accumulation == NO_SYNC:
        model.set_requires_gradient_sync(last)


# ---- Collectives


def count_collectives(
    rank: int, world_size: int, stages: Sequence[int], accumulation: str, dtype: torch.dtype | None
) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Collectives of one step by unit and operation, and bytes on the wire by operation."""
    import fsdpx

    policy = fsdpx.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = shard(make_reference(), stages, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for number in range(NUM_MICRO_BATCHES):
            say_how(model, accumulation, last=number == NUM_MICRO_BATCHES - 1)
            model(batch(number, rank).requires_grad_()).square().sum().backward()
            with torch.no_grad():
                model(batch(number, rank))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with fsdpx.record_timeline(model) as timeline:
        step()
    records = [record for record in timeline.records if record.lane == "comm"]
    wire = Counter[str]()
    for record in records:
        wire[record.operation] += record.wire_bytes
    return Counter((record.unit, record.operation) for record in records), wire


def expected_counts(stage: int, accumulation: str) -> tuple[int, int]:
    """All-gathers and reduce-scatters of a unit in one step."""
    # Stage 3 gathers for each forward (the one without gradients too) and each backward.
    gathers = 1 if stage < 3 else 3 * NUM_MICRO_BATCHES
    once = accumulation == NO_SYNC or (accumulation == SAY_LAST and stage == 1)
    return gathers, 1 if once else NUM_MICRO_BATCHES


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("stages", [(1, 1, 1), (2, 2, 2), (3, 3, 3), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_and_bytes_of_a_step(
    world_size: int, stages: tuple[int, ...], accumulation: str
) -> None:
    dtype = torch.bfloat16
    block = 128 // dtype.itemsize * world_size  # equal shares, aligned to 128 bytes
    padded = -(-(WIDTH * WIDTH + WIDTH) // block) * block
    gathered = reduced = 0
    want = Counter[tuple[str, str]]()
    for unit, stage in zip(LAYERS, stages, strict=True):
        gathers, reductions = expected_counts(stage, accumulation)
        want[unit, "all_gather"], want[unit, "reduce_scatter"] = gathers, reductions
        gathered += gathers * padded * dtype.itemsize
        # Sums of several backwards travel in the reduce dtype, fp32.
        itemsize = dtype.itemsize if reductions > 1 else torch.float32.itemsize
        reduced += reductions * padded * itemsize
    for counts, wire in run_ranks(world_size, count_collectives, stages, accumulation, dtype):
        assert counts == want
        share = (world_size - 1) / world_size
        assert wire["all_gather"] == gathered * share
        assert wire["reduce_scatter"] == reduced * share
