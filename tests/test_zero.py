"""ZeRO stages: how often units are gathered and reduced, how many bytes travel, and the numbers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


# ---- What is kept


def gathers(model: Any, run: Callable[[], object]) -> Counter[str]:
    """How often each unit is gathered while `run` runs."""
    import fsdpx

    with fsdpx.record_timeline(model) as timeline:
        run()
    return Counter(r.unit for r in timeline.records if r.operation == "all_gather")


def change_mind(rank: int, world_size: int) -> list[Counter[str]]:
    """Gathers of two micro-batches after the user has said otherwise, and those of a step after
    the user has freed or gathered a unit.
    """
    from fsdpx import fully_shard

    model = shard(make_reference(), (2, 2, 3))
    x = batch(0, rank).requires_grad_()

    def step() -> None:
        for _ in range(2):
            model(x).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)

    step()
    model[0].set_reshard_after_forward(True)
    model[1].set_reshard_after_backward(True)
    model[2].set_reshard_after_backward(False)
    found = [gathers(model, step)]
    model[0].set_reshard_after_forward(False)
    model[1].set_reshard_after_backward(False)
    step()
    model[0].unshard()
    model[0].reshard()
    model[1].unshard()
    found.append(gathers(model, step))
    plain = fully_shard(nn.Linear(WIDTH, WIDTH), reshard_after_forward=world_size)
    plain(x)
    found.append(gathers(plain, lambda: plain(x).sum().backward()))
    return found


def test_what_the_user_says_later_wins() -> None:
    changed, freed, plain = run_ranks(2, change_mind)[0]
    # Gathered for the first forward and each backward; for each forward; and for both, without
    # the gather of the second forward.
    assert changed == {"0": 3, "1": 2, "2": 3}
    assert freed == {"0": 1, "2": 3}  # unit 1 had the present weights
    assert plain == {"Linear": 2}


class Block(nn.Module):
    """A unit that encloses a checkpoint, around a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.outer(torch.tanh(self.inner(y))), x, use_reentrant=False)


def nest(rank: int, world_size: int, stages: tuple[int, int, int]) -> tuple[float, Counter[str]]:
    """Checkpointed units in units in a root; the blocks run, without a reduction, before the root
    is known. Returns the gradients' error and the gathers of a later step.
    """
    from fsdpx import fully_shard

    torch.manual_seed(0)
    reference = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))
    model: Any = copy.deepcopy(reference)
    for block in model[:2]:
        fully_shard(block.inner, zero_stage=stages[2])
        fully_shard(block, zero_stage=stages[1])
    block = model[1]
    block.set_requires_gradient_sync(False)
    block(batch(0, rank)).square().sum().backward()
    block.set_requires_gradient_sync(True)
    fully_shard(model, zero_stage=stages[0])

    def step() -> None:
        model(batch(1, rank).requires_grad_()).square().sum().backward()

    step()
    for each in range(world_size):
        (reference[1](batch(0, each)).square().sum() / world_size).backward()
        (reference(batch(1, each)).square().sum() / world_size).backward()
    error = 0.0
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        difference = (sharded.grad.full_tensor() - whole.grad).abs().max() / whole.grad.abs().max()
        error = max(error, difference.item())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return error, gathers(model, step)


@pytest.mark.parametrize("stages", [(3, 3, 3), (2, 2, 2), (1, 1, 1), (3, 2, 3), (2, 3, 1)], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_nested_and_checkpointed_units(world_size: int, stages: tuple[int, int, int]) -> None:
    for error, counts in run_ranks(world_size, nest, stages):
        assert error <= 1e-6
        assert counts[""] <= 1  # kept to its backward in every stage
        for name in ("0", "1", "0.inner", "1.inner"):
            stage = stages[2 if "inner" in name else 1]
            assert counts[name] == (1 if stage < 3 else 2), name
