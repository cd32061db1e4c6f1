"""Gradients that wait for their reduction: `.grad` shows them, and drops them as in any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside import LIMIT, Beside, waits
from ranks import run_ranks
from torch import Tensor, nn

import fsdpx
from fsdpx import fully_shard


def wait_by_no_sync(both: Beside, waiting: bool) -> None:
    both.model.set_requires_gradient_sync(not waiting)


def wait_by_stage(both: Beside, waiting: bool) -> None:
    both.model.set_is_last_backward(not waiting)


def wait_in_replica(both: Beside, waiting: bool) -> None:
    both.model.set_requires_all_reduce(not waiting)


WAYS: dict[str, tuple[Callable[[Beside, bool], None], int, int]] = {  # with ranks and stage
    "no_sync": (wait_by_no_sync, 2, 3),
    "ZeRO-1": (wait_by_stage, 2, 1),
    "a replica's sum": (wait_in_replica, 4, 3),
}


def drop_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def zero_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def zero_together(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch._foreach_zero_([p.grad for p in model.parameters() if p.grad is not None])


def drop_some(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.layers[0].weight.grad = None
    model.layers[1].weight.grad.zero_()
    model.head.bias.grad = torch.ones_like(model.head.bias)


def drop_of_flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["params"] = (
            fsdpx.flat_parameters(model) if hasattr(model, "unshard") else [*model.parameters()]
        )
    optimizer.zero_grad()


DROPS = [drop_all, zero_all, zero_together, drop_some, drop_of_flat]


def drop_between(
    rank: int, world_size: int, way: str, drop: Callable[..., None], reduced_first: bool
) -> None:
    """Gradients of some micro-batches wait and are dropped; others follow."""
    wait, _, stage = WAYS[way]
    options: dict[str, Any] = {}
    if world_size == 4:
        from torch.distributed.device_mesh import init_device_mesh

        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    both = Beside(rank, world_size, 4 * [stage], **options)
    if reduced_first:
        both.backward(0)
    wait(both, True)
    both.backward(1)
    both.backward(2, in_vain=lambda rank: [rank])
    assert all(map(waits, both.model.parameters()))
    drop(both.model, both.optimizer)
    drop(both.reference, both.reference_optimizer)
    both.backward(3)
    assert both.has_waiting
    wait(both, False)
    both.backward(4)
    assert not both.has_waiting
    assert both.grad_error() <= LIMIT


@pytest.mark.parametrize("reduced_first", [False, True])
@pytest.mark.parametrize("drop", DROPS, ids=lambda drop: drop.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_dropped_does_not_come_back(
    way: str, drop: Callable[..., None], reduced_first: bool
) -> None:
    run_ranks(WAYS[way][1], drop_between, way, drop, reduced_first)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def waiting_model() -> Small:
    model = Small()
    for module in (model.first, model.second, model):
        fully_shard(module)
    with fsdpx.no_sync(model):
        model(torch.ones(2, 6)).sum().backward()
    return model


def step_of(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], object]:
    return lambda model: kind(model.parameters(), lr=0.1, **options).step()


READS: dict[str, Callable[[nn.Module], object]] = {
    "a step": step_of(torch.optim.SGD, foreach=False),
    "a foreach step": step_of(torch.optim.SGD, foreach=True),
    "a fused step": step_of(torch.optim.AdamW, fused=True),
    "a step of flat parameters": lambda model: torch.optim.SGD(
        fsdpx.flat_parameters(model), lr=0.1
    ).step(),
    "clipping": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "our clipping": lambda model: fsdpx.clip_grad_norm_(model, 1.0),
    "scaling": lambda model: model.first.weight.grad.mul_(0.5),
    "a local piece": lambda model: model.first.weight.grad.to_local(),
    "whole gradients": lambda model: fsdpx.full_parameters(model, with_grads=True).__enter__(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_waits_cannot_be_read(read: Callable[[nn.Module], object]) -> None:
    model = waiting_model()
    before = [p.full_tensor() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"fsdpx: the gradient of parameter '.*(first|second)\."):
        read(model)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.full_tensor(), value)
    model(torch.ones(2, 6)).sum().backward()
    read(model)


def test_a_gradient_that_waits_says_so() -> None:
    gradient = waiting_model().first.weight.grad
    assert repr(gradient) == "WaitingGradient('first.weight', shape=(6, 6))"
    assert gradient.shape == (6, 6)


def test_dropped_gradients_are_not_reduced() -> None:
    model = waiting_model()
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    with fsdpx.record_timeline(model) as timeline:
        model.second(torch.ones(2, 6)).sum().backward()
    assert "first" not in {record.unit for record in timeline.records}
    assert model.first.weight.grad is None


@pytest.mark.parametrize("convert", [lambda m: m.to("cpu"), lambda m: m.float().double().float()])
def test_what_waits_survives_conversions(convert: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = waiting_model()
    convert(model)
    assert all(map(waits, model.parameters()))
    model(torch.ones(2, 6)).sum().backward()
    torch.manual_seed(0)
    reference = Small()
    (2 * reference(torch.ones(2, 6)).sum()).backward()
    for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad.full_tensor(), whole.grad)
