"""Replicas of sharded models (HSDP): when gradients are summed over replicas, and what by."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import waits
from ranks import run_ranks
from test_zero import WIDTH, batch, make_reference, shard
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

LIMIT = 1e-6  # of a tensor's largest element: sums over four ranks in another order
NUM_MICRO_BATCHES = 3


def make(shape: tuple[int, int], stage: int = 3, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return shard(make_reference(), (stage,) * 3, mesh=mesh, **options)


def mean_gradients(world_size: int, numbers: list[int], divisor: float | None = None) -> Any:
    """Gradients of the sum over micro-batches and ranks, divided."""
    reference = make_reference()
    for number in numbers:
        for rank in range(world_size):
            loss = reference(batch(number, rank)).square().sum()
            (loss / (divisor or world_size)).backward()
    return [parameter.grad for parameter in reference.parameters()]


def error_of(model: Any, expected: list[Tensor]) -> float:
    """The largest difference of gradients, as a part of the tensor's largest element."""
    worst = 0.0
    for parameter, whole in zip(model.parameters(), expected, strict=True):
        difference = (parameter.grad.full_tensor() - whole).abs().max() / whole.abs().max()
        worst = max(worst, difference.item())
    return worst


def backward(model: Any, number: int, rank: int) -> None:
    model(batch(number, rank)).square().sum().backward()


def sum_over_replicas_at_the_last(
    rank: int, world_size: int, shape: tuple[int, int], stage: int, no_sync_first: bool
) -> tuple[list[float], Counter[str]]:
    """Errors of two steps' gradients, and the collectives of the second one."""
    import fsdpx

    model = make(shape, stage)
    errors = []
    operations = Counter[str]()
    for step in range(2):
        numbers = [step * NUM_MICRO_BATCHES + i for i in range(NUM_MICRO_BATCHES)]
        with fsdpx.record_timeline(model) as timeline:
            for number in numbers:
                last = number == numbers[-1]
                reduces = not no_sync_first or number != numbers[0]
                model.set_requires_gradient_sync(reduces)
                model.set_requires_all_reduce(last)
                backward(model, number, rank)
                shown = last or (shape[0] == 1 and reduces)  # without replicas the flag is void
                assert all(waits(p) != shown for p in model.parameters())
        operations = Counter(r.operation for r in timeline.records if r.lane == "comm")
        errors.append(error_of(model, mean_gradients(world_size, numbers)))
        model.zero_grad()
    return errors, operations


@pytest.mark.parametrize("no_sync_first", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_micro_batches_are_summed_over_replicas_at_the_last(
    shape: tuple[int, int], stage: int, no_sync_first: bool
) -> None:
    results = run_ranks(4, sum_over_replicas_at_the_last, shape, stage, no_sync_first)
    for errors, operations in results:
        assert max(errors) <= LIMIT
        assert operations["reduce_scatter"] == 3 * (NUM_MICRO_BATCHES - no_sync_first)
        assert operations["all_reduce"] == (3 if shape[0] > 1 else 0)


def mixed(rank: int, world_size: int) -> list[float]:
    """Gradients that `.grad` has, sums of a replica, and whole ones come together."""
    model = make((2, 2))
    errors = []
    backward(model, 0, rank)
    errors.append(error_of(model, mean_gradients(world_size, [0])))
    model.set_requires_all_reduce(False)
    backward(model, 1, rank)
    assert all(map(waits, model.parameters()))
    model.set_requires_gradient_sync(False)
    backward(model, 2, rank)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    backward(model, 3, rank)
    errors.append(error_of(model, mean_gradients(world_size, [0, 1, 2, 3])))
    return errors


def test_all_kinds_of_accumulation_come_together() -> None:
    assert max(max(errors) for errors in run_ranks(4, mixed)) <= LIMIT


def divide(rank: int, world_size: int, factor: float) -> float:
    model = make((2, 2))
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(factor)
    backward(model, 0, rank)
    return error_of(model, mean_gradients(world_size, [0], divisor=factor))


def test_divide_factor_replaces_the_number_of_all_ranks() -> None:
    assert max(run_ranks(4, divide, 3.0)) <= LIMIT


def hooked(rank: int, world_size: int) -> float:
    """Shards on pairs of ranks; the user's hook sums over the pairs."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mesh = dist.device_mesh.DeviceMesh.from_group(groups[rank // 2], "cpu")
    model = shard(make_reference(), (3, 3, 3), mesh=mesh)

    def average(gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=across[rank % 2])
        gradient.div_(2)

    for module in model.modules():
        if hasattr(module, "set_all_reduce_hook"):
            module.set_all_reduce_hook(average)
    for number in range(2):
        backward(model, number, rank)
    return error_of(model, mean_gradients(world_size, [0, 1]))


def test_all_reduce_hook_changes_each_reduction_once() -> None:
    assert max(run_ranks(4, hooked)) <= LIMIT


def test_streams_of_hooks_are_refused_by_name() -> None:
    from fsdpx import fully_shard

    model = fully_shard(torch.nn.Linear(WIDTH, WIDTH))
    with pytest.raises(NotImplementedError, match=r"set_all_reduce_hook\(stream=...\)"):
        model.set_all_reduce_hook(lambda gradient: None, stream=object())
