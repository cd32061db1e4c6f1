"""Gradients of several micro-batches, in every ZeRO stage and whatever a training loop does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from beside import LIMIT, Beside, batch, loss_of
from ranks import run_ranks
from torch import Tensor

STAGES = ((1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3), (3, 1, 2, 1))
for_all_stages = pytest.mark.parametrize("stages", STAGES, ids=lambda s: "".join(map(str, s)))
for_some_ranks = pytest.mark.parametrize("world_size", [1, 2, 3])


# ---- Sums


def reduce_each(model: Any, index: int, count: int) -> None:
    """A hand-made loop: nothing says that more micro-batches follow."""


def no_sync_until_last(model: Any, index: int, count: int) -> None:
    model.set_requires_gradient_sync(index == count - 1)


def say_last(model: Any, index: int, count: int) -> None:
    model.set_is_last_backward(index == count - 1)


def no_sync_in_the_middle(model: Any, index: int, count: int) -> None:
    model.set_requires_gradient_sync(index != 1)


ACCUMULATIONS = (reduce_each, no_sync_until_last, say_last, no_sync_in_the_middle)


def sum_up(rank: int, world_size: int, stages: tuple[int, ...]) -> list[str]:
    """Two steps of three micro-batches, with all ways to add them up; returns what is wrong."""
    from fsdpx import CPUOffloadPolicy, OffloadPolicy

    problems = []
    policies = (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False))
    for say, to_none, policy in itertools.product(ACCUMULATIONS, (True, False), policies):
        both = Beside(rank, world_size, stages, offload_policy=policy)
        for step in range(2):
            for index in range(3):
                say(both.model, index, 3)
                both.backward(3 * step + index)
            error = both.grad_error()
            both.step()
            both.zero_grad(to_none)
            if max(error, both.weight_error()) > LIMIT:
                problems.append(f"{say.__name__}, {to_none}, {policy}: step {step}, {error:.1e}")
    return problems


@for_all_stages
@for_some_ranks
def test_micro_batches_add_up(world_size: int, stages: tuple[int, ...]) -> None:
    assert run_ranks(world_size, sum_up, stages) == [[]] * world_size


def use_some_layers(rank: int, world_size: int, stages: tuple[int, ...]) -> list[float]:
    """Layers that the last micro-batch of a step does not use."""
    errors = []
    both = Beside(rank, world_size, stages)
    for step in range(2):
        both.model.set_requires_gradient_sync(False)
        both.model.set_is_last_backward(False)
        both.backward(2 * step, (1,))
        both.model.set_requires_gradient_sync(True)
        both.model.set_is_last_backward(True)
        both.backward(2 * step + 1, (0, 2))
        errors.append(both.grad_error())
        both.step()
        both.zero_grad()
    return [*errors, both.weight_error()]


@for_all_stages
@for_some_ranks
def test_units_that_the_last_micro_batch_does_not_use(
    world_size: int, stages: tuple[int, ...]
) -> None:
    for errors in run_ranks(world_size, use_some_layers, stages):
        assert max(errors) <= LIMIT


def use_in_vain(rank: int, world_size: int, stages: tuple[int, ...]) -> list[float]:
    """Each rank has a layer whose output it does not use: another one in each micro-batch."""
    errors = []
    both = Beside(rank, world_size, stages)
    for step in range(2):
        for index in range(3):
            both.backward(3 * step + index, (), lambda rank, index=index: [(rank + index) % 3])
            errors += [both.grad_error(), both.eval_error(90)]
        both.step()
        both.zero_grad()
    return [*errors, both.weight_error()]


@for_all_stages
@for_some_ranks
def test_layers_that_other_ranks_use(world_size: int, stages: tuple[int, ...]) -> None:
    for errors in run_ranks(world_size, use_in_vain, stages):
        assert max(errors) <= LIMIT


def freeze_between(rank: int, world_size: int, stages: tuple[int, ...]) -> list[float]:
    """A layer trains in the first micro-batch only, another one in the second only."""
    errors = []
    both = Beside(rank, world_size, stages)
    models = (both.model, both.reference)
    for model in models:
        model.layers[1].requires_grad_(False)
    both.model.set_requires_gradient_sync(False)
    both.backward(0)
    for model in models:
        model.layers[1].requires_grad_(True)
    both.backward(1)
    both.model.set_requires_gradient_sync(True)
    both.backward(2)
    errors.append(both.grad_error())
    both.step()
    both.zero_grad()
    both.model.set_requires_gradient_sync(False)
    both.backward(3)
    both.model.set_requires_gradient_sync(True)
    for model in models:  # what it has so far counts
        model.layers[0].requires_grad_(False)
    both.backward(4)
    errors.append(both.grad_error())
    both.step()
    both.zero_grad()
    both.backward(5)
    errors.append(both.grad_error())
    both.step()
    return [*errors, both.weight_error()]


@for_all_stages
@for_some_ranks
def test_freezing_between_micro_batches(world_size: int, stages: tuple[int, ...]) -> None:
    for errors in run_ranks(world_size, freeze_between, stages):
        assert max(errors) <= LIMIT


# ---- What a loop does between backward and step


def two_backwards(both: Beside) -> Iterator[float]:
    """Of one forward."""
    output = both.model(batch(0, both.rank))
    output.square().sum().backward(retain_graph=True)
    output.sum().backward()
    for rank in range(both.world_size):
        output = both.reference(batch(0, rank)) / both.world_size
        output.square().sum().mul(both.world_size).backward(retain_graph=True)
        output.sum().backward()
    yield both.grad_error()


def forwards_then_backwards(both: Beside) -> Iterator[float]:
    losses = [loss_of(both.model, batch(i, both.rank)) for i in range(2)]
    for loss in losses:
        loss.backward()
    for i, rank in itertools.product(range(2), range(both.world_size)):
        (loss_of(both.reference, batch(i, rank)) / both.world_size).backward()
    yield both.grad_error()


def grads_of_the_users_own(both: Beside) -> Iterator[float]:
    """Gradients are dropped or replaced by hand between two backwards and the step."""
    both.backward(0)
    for model in (both.model, both.reference):
        model.layers[0].weight.grad = None
        model.head.bias.grad = model.head.bias.grad * 2
    both.model.layers[1].bias.grad = torch.ones_like(both.reference.layers[1].bias)
    both.reference.layers[1].bias.grad = torch.ones_like(both.reference.layers[1].bias)
    both.backward(1)
    yield both.grad_error()
    for model in (both.model, both.reference):
        model.layers[2].weight.grad = None
    both.step()
    yield both.weight_error()


def eval_between(both: Beside) -> Iterator[float]:
    """Forwards without gradients between any two calls."""
    yield both.eval_error(90)
    loss = loss_of(both.model, batch(0, both.rank))
    yield both.eval_error(91)
    loss.backward()
    for rank in range(both.world_size):
        (loss_of(both.reference, batch(0, rank)) / both.world_size).backward()
    yield both.grad_error()
    yield both.eval_error(92)
    both.backward(1)
    both.step()
    yield both.eval_error(93)
    both.zero_grad()
    with torch.inference_mode():
        both.model(batch(94, both.rank))
    both.backward(2)
    yield both.grad_error()


def edits(both: Beside) -> Iterator[float]:
    """Weights change by other ways than an optimizer, in every phase of the loop."""
    import fsdpx

    models = (both.model, both.reference)
    both.backward(0)
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.mul_(0.9)
    both.backward(1)
    yield both.grad_error()
    state = {name: value * 0.5 for name, value in both.reference.state_dict().items()}
    both.reference.load_state_dict(state)
    with fsdpx.full_parameters(both.model), torch.no_grad():
        for module in both.model.modules():
            for name in dict(module.named_parameters(recurse=False)):
                getattr(module, name).mul_(0.5)
    yield both.eval_error(2)
    both.backward(3)
    both.reference.load_state_dict({name: value * 0.5 for name, value in state.items()})
    halved = {name: value * 0.5 for name, value in both.model.state_dict().items()}
    both.model.load_state_dict(halved)
    yield both.eval_error(4)
    both.model.load_state_dict({n: v * 2 for n, v in halved.items()}, assign=True)
    both.reference.load_state_dict(state)
    yield both.eval_error(5)
    both.model.to_empty(device="cpu")
    both.model.load_state_dict(halved)
    both.reference.load_state_dict({name: value * 0.5 for name, value in state.items()})
    yield both.eval_error(6)


def edits_of_whole_parameters(both: Beside) -> Iterator[float]:
    """A forward that changes a gathered parameter is an error, and changes nothing."""

    def edit(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(2.0)

    both.backward(0)
    for fails in (False, True):
        hooks = [both.model.layers[0].register_forward_pre_hook(edit)]
        if fails:  # before the edit can be seen
            hooks.append(both.model.layers[0].register_forward_pre_hook(fail))
        with pytest.raises(ValueError if fails else RuntimeError, match=r"in (place|forward)"):
            both.model(batch(1, both.rank))
        for hook in hooks:
            hook.remove()
        both.backward(2)
        yield both.grad_error()


def optimizer_in_backward(both: Beside) -> Iterator[float]:
    """Every parameter steps as soon as its gradient is there."""
    for parameter in both.model.parameters():
        parameter.register_post_accumulate_grad_hook(step_one)
    for number in range(3):
        both.backward(number)
        for parameter in both.reference.parameters():
            step_one(parameter)
        yield both.weight_error()


def fail(module: Any, args: Any) -> None:
    raise ValueError("in forward")


def step_one(parameter: Any) -> None:
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.05)
    parameter.grad = None


def clip_and_scale(both: Beside) -> Iterator[float]:
    """A gradient scaler that meets an infinity on one rank, and clipping."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    pairs = ((both.model, both.optimizer), (both.reference, both.reference_optimizer))
    for number, poison in enumerate([None, 0, both.world_size - 1, None]):
        for (model, optimizer), scaler in zip(pairs, scalers, strict=True):
            ranks = [both.rank] if model is both.model else list(range(both.world_size))
            for rank in ranks:
                loss = loss_of(model, batch(number, rank)) / len(ranks)
                scaler.scale(loss * (math.inf if rank == poison else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        yield both.weight_error()
        yield abs(scalers[0].get_scale() - scalers[1].get_scale())


LOOPS = (
    two_backwards,
    forwards_then_backwards,
    grads_of_the_users_own,
    eval_between,
    edits,
    edits_of_whole_parameters,
    optimizer_in_backward,
    clip_and_scale,
)


def run_loops(rank: int, world_size: int, stages: tuple[int, ...]) -> dict[str, list[float]]:
    return {
        loop.__name__: errors
        for loop in LOOPS
        if max(errors := list(loop(Beside(rank, world_size, stages)))) > LIMIT
    }


@for_all_stages
@for_some_ranks
def test_loops(world_size: int, stages: tuple[int, ...]) -> None:
    assert run_ranks(world_size, run_loops, stages) == [{}] * world_size


# ---- Exceptions


class Raises(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("in backward")


def raise_in_backward(both: Beside, number: int) -> None:
    """A backward that has reduced the head and the last layer when it raises."""
    model = both.model
    hook = model.layers[1].register_forward_hook(lambda module, args, out: Raises.apply(out))
    with pytest.raises(ValueError, match="in backward"):
        loss_of(model, batch(number, both.rank)).backward()
    hook.remove()


def raise_in_forward(both: Beside, number: int) -> None:
    hook = both.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in forward"):
        both.model(batch(number, both.rank))
    hook.remove()


def wait_for_reduction(model: Any, on: bool) -> None:
    model.set_requires_gradient_sync(not on)
    model.set_is_last_backward(not on)


def clean_steps(both: Beside) -> float:
    """The largest error of three steps of two micro-batches."""
    errors = []
    for step in range(3):
        wait_for_reduction(both.model, True)
        both.backward(10 + step)
        wait_for_reduction(both.model, False)
        both.backward(20 + step)
        errors.append(both.grad_error())
        both.step()
        both.zero_grad()
    return max(*errors, both.weight_error())


def fail_first(rank: int, world_size: int, stages: tuple[int, ...], waits: bool) -> float:
    """The first micro-batch of a step fails, in backward and then in forward: nothing is left."""
    both = Beside(rank, world_size, stages)
    both.backward(0)
    both.step()
    both.zero_grad()
    for fail in (raise_in_backward, raise_in_forward):
        wait_for_reduction(both.model, waits)
        fail(both, 1)
        both.zero_grad(set_to_none=False)
        if (error := clean_steps(both)) > LIMIT:
            return error
    return 0.0


@pytest.mark.parametrize("waits", [False, True])
@for_all_stages
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_after_one_that_failed_at_once(
    world_size: int, stages: tuple[int, ...], waits: bool
) -> None:
    assert run_ranks(world_size, fail_first, stages, waits) == [0.0] * world_size


def fail_later(
    rank: int, world_size: int, stages: tuple[int, ...], in_forward: bool, by_zero_grad: bool
) -> float:
    """The second micro-batch fails while the first one's gradients wait for their reduction."""
    both = Beside(rank, world_size, stages)
    wait_for_reduction(both.model, True)
    both.backward(0)
    (raise_in_forward if in_forward else raise_in_backward)(both, 1)
    both.zero_grad()  # of the optimizer: it can't see what waits
    with pytest.raises(RuntimeError, match=r"earlier micro-batches.*reset_iter_state\(\)"):
        both.model(batch(0, rank))
    if by_zero_grad:
        both.model.zero_grad()
    else:
        both.model.reset_iter_state()
    return clean_steps(both)


@pytest.mark.parametrize("by_zero_grad", [False, True])
@pytest.mark.parametrize("in_forward", [False, True])
@for_all_stages
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_after_one_that_failed_later_need_a_word(
    world_size: int, stages: tuple[int, ...], in_forward: bool, by_zero_grad: bool
) -> None:
    errors = run_ranks(world_size, fail_later, stages, in_forward, by_zero_grad)
    assert max(errors) <= LIMIT


def begin_again(rank: int, world_size: int, stages: tuple[int, ...]) -> float:
    """A step is given up between two micro-batches, by the model's zero_grad()."""
    both = Beside(rank, world_size, stages)
    wait_for_reduction(both.model, True)
    both.backward(0)
    both.model.zero_grad()
    both.reference.zero_grad()
    return clean_steps(both)


@for_all_stages
@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_grad_of_the_model_gives_a_step_up(world_size: int, stages: tuple[int, ...]) -> None:
    assert max(run_ranks(world_size, begin_again, stages)) <= LIMIT
