"""Training sharded gives the numbers of one process that loops over the ranks' batches."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from looped import LoopedReference, relative_error
from models import MODELS, Batch, loss_of, make_batch, make_model
from ranks import run_ranks
from torch import Tensor, nn

FIRST_GRADS_LIMIT = 1e-6  # of a tensor's largest element, for more than two ranks
LATER_LIMIT = 1e-5  # once weights that differ in their last bit have been used
# Some gradients are zero but for rounding (a key's bias in attention): without an epsilon well
# above that, AdamW would blow their noise up to steps of full size.
ADAMW_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to train a model sharded.

    Attributes:
        model: A name in `models.MODELS`.
        options: For `fully_shard`.
        policy: Arguments of the MixedPrecisionPolicy, if any.
        num_steps: Optimizer steps.
        num_micro_batches: Backwards for each step.
        sync_each: Whether each of them reduces gradients.
        make_optimizer: Takes parameters.
        max_norm: Clip gradients to this norm.
        exact: Whether two ranks must give the very bits of the reference.
        limit: Largest relative error where bits may differ; None for the limits above.
    """

    model: str
    options: tuple[tuple[str, Any], ...] = ()
    policy: tuple[tuple[str, torch.dtype], ...] = ()
    num_steps: int = 2
    num_micro_batches: int = 1
    sync_each: bool = True
    make_optimizer: Callable[..., torch.optim.Optimizer] | None = None
    max_norm: float | None = None
    exact: bool = True
    limit: float | None = None


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=ADAMW_EPS)


def adamw_foreach(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=ADAMW_EPS, foreach=True)


def adamw_fused(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=ADAMW_EPS, fused=True)


def shard(model: nn.Module, run: Run) -> Any:
    """Wraps the model's units and then the model."""
    from fsdpx import MixedPrecisionPolicy, fully_shard

    options = dict(run.options, mp_policy=MixedPrecisionPolicy(**dict(run.policy)))
    for unit in MODELS[run.model].units(model):
        fully_shard(unit, **options)
    return fully_shard(model, **options)


class Comparison:
    """Trains the sharded model and its reference side by side and notes what differs."""

    def __init__(self, rank: int, world_size: int, run: Run) -> None:
        self.rank, self.world_size, self.run = rank, world_size, run
        compute_dtype = dict(run.policy).get("param_dtype")
        self.reference = LoopedReference(
            make_model(run.model), world_size, compute_dtype=compute_dtype
        )
        self.model = shard(make_model(run.model), run)
        make_optimizer = run.make_optimizer or sgd
        self.optimizer = make_optimizer(self.model.parameters())
        self.reference_optimizer = make_optimizer(self.reference.model.parameters())
        self.problems: list[str] = []

    def train(self) -> None:
        for step in range(self.run.num_steps):
            self.backward(step)
            self.compare_grads(step)
            if self.run.max_norm is not None:
                self.clip(step, self.run.max_norm)
            for optimizer in (self.optimizer, self.reference_optimizer):
                optimizer.step()
                optimizer.zero_grad()
        self.compare_states()

    def backward(self, step: int) -> None:
        count = self.run.num_micro_batches
        numbers = [step * count + i for i in range(count)]
        batches = [
            [make_batch(self.run.model, step=n, rank=r) for r in range(self.world_size)]
            for n in numbers
        ]
        self.reference.accumulate(batches, sync_each=self.run.sync_each)
        losses = self.backward_sharded([each[self.rank] for each in batches])
        # The reference has looped over the ranks once for each reduction.
        done = self.reference.losses[-len(numbers) * self.world_size :]
        if self.run.sync_each:
            expected = [done[i * self.world_size + self.rank][0] for i in range(count)]
        else:
            expected = self.reference.losses[self.rank - self.world_size]
        for mine, its in zip(losses, expected, strict=True):
            self.compare(f"loss of step {step}", torch.tensor(mine), torch.tensor(its), step)

    def backward_sharded(self, batches: Sequence[Batch]) -> list[float]:
        losses = []
        from fsdpx import no_sync

        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            wait = contextlib.nullcontext() if self.run.sync_each or last else no_sync(self.model)
            with wait:
                loss = loss_of(self.model, batch)
                loss.backward()
            losses.append(loss.item())
        return losses

    def compare_grads(self, step: int) -> None:
        expected = dict(self.reference.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            grad, wanted = parameter.grad, expected[name].grad
            if grad is None or wanted is None:
                if grad is not wanted:
                    self.problems.append(f"{name}: a gradient is missing or superfluous")
            else:
                self.compare(f"gradient of {name}, step {step}", grad.full_tensor(), wanted, step)

    def clip(self, step: int, max_norm: float) -> None:
        clip = nn.utils.clip_grad_norm_
        norm = clip(self.model.parameters(), max_norm)
        expected = clip(self.reference.model.parameters(), max_norm)
        # Partial sums over ranks round differently than one sum over everything.
        self.check(f"norm of step {step}", relative_error(norm, expected), LATER_LIMIT)

    def compare_states(self) -> None:
        expected = dict(self.reference.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            wanted = expected[name].detach()
            self.compare(f"weight {name}", parameter.detach().full_tensor(), wanted, None)
        for name, buffer in self.model.named_buffers():
            wanted = self.reference.buffers[self.rank][name]
            self.compare(f"buffer {name}", buffer.float(), wanted.float(), None)

    def compare(self, what: str, actual: Tensor, expected: Tensor, step: int | None) -> None:
        limit = self.run.limit
        if limit is None:
            limit = FIRST_GRADS_LIMIT if step == 0 else LATER_LIMIT
        if self.run.exact and self.world_size <= 2:
            limit = 0.0
        self.check(what, relative_error(actual, expected), limit)

    def check(self, what: str, error: float, limit: float) -> None:
        if not error <= limit:
            self.problems.append(f"{what}: off by {error:.1e} of its largest element")

    def digest(self) -> str:
        """A hash of the bits of all weights."""
        state = hashlib.sha256()
        for parameter in self.model.parameters():
            state.update(parameter.detach().full_tensor().numpy().tobytes())
        return state.hexdigest()


def compare_runs(rank: int, world_size: int, runs: Sequence[Run]) -> list[str]:
    """Trains in each of these ways; returns what differs from the reference or between them."""
    from fsdpx.unit import units

    problems, digests = [], set()
    for run in runs:
        comparison = Comparison(rank, world_size, run)
        comparison.train()
        digests.add(comparison.digest())
        found = units(comparison.model)
        freed = [unit for unit in found if not unit.zero.keeps_after_backward]
        gathered = [f"unit {unit.name} is gathered" for unit in freed if unit.is_gathered]
        problems += [f"{dict(run.options)}: {text}" for text in comparison.problems + gathered]
    if len(digests) != 1:
        problems.append(f"{len(digests)} different results in {len(runs)} runs")
    return problems


def check(world_size: int, *runs: Run) -> None:
    problems = run_ranks(world_size, compare_runs, runs, timeout=120)
    assert problems == [[]] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_depths_of_prefetch_and_communicators_give_the_same_numbers(
    model: str, world_size: int
) -> None:
    ways = itertools.product(("shm", "c10d"), (0, 1, 2))
    options = [(("comm", comm), ("prefetch", prefetch)) for comm, prefetch in ways]
    check(world_size, *[Run(model=model, options=each) for each in options])


@pytest.mark.parametrize("model", ["gpt", "tied_frozen"])
def test_when_to_reshard_does_not_matter(model: str) -> None:
    options = [(("reshard_after_forward", value),) for value in (None, True, False)]
    check(2, *[Run(model=model, options=each) for each in options])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("sync_each", [True, False], ids=["sync_each", "no_sync"])
@pytest.mark.parametrize("model", ["gpt", "tied_frozen"])
def test_zero_stages(model: str, sync_each: bool, world_size: int) -> None:
    stages = [
        Run(
            model=model,
            options=(("zero_stage", stage),),
            num_steps=3,
            num_micro_batches=2,
            sync_each=sync_each,
        )
        for stage in (1, 2, 3)
    ]
    check(world_size, *stages)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("sync_each", [True, False], ids=["sync_each", "no_sync"])
@pytest.mark.parametrize("model", MODELS)
def test_gradient_accumulation(model: str, sync_each: bool, world_size: int) -> None:
    check(world_size, Run(model=model, num_micro_batches=3, sync_each=sync_each))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [adamw, adamw_foreach, adamw_fused])
@pytest.mark.parametrize("model", ["gpt", "lstm", "tied_frozen"])
def test_adamw_with_clipping(
    model: str, optimizer: Callable[..., torch.optim.Optimizer], world_size: int
) -> None:
    run = Run(
        model=model,
        num_steps=5,
        make_optimizer=optimizer,
        max_norm=0.2,
        exact=False,
        limit=LATER_LIMIT,
    )
    check(world_size, run)


BF16_POLICIES = {
    "compute": (("param_dtype", torch.bfloat16),),
    "compute_bf16_reduce_fp32": (
        ("param_dtype", torch.bfloat16),
        ("reduce_dtype", torch.float32),
    ),
    "compute_fp16_reduce_fp32": (
        ("param_dtype", torch.float16),
        ("reduce_dtype", torch.float32),
    ),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", BF16_POLICIES)
@pytest.mark.parametrize("model", ["gpt", "lstm"])
def test_low_precision_compute(model: str, policy: str, world_size: int) -> None:
    # The reference computes in the same dtype and adds in fp32, as the engine's sums do. Once a
    # weight's last bit differs, its cast may fall to the other neighbour.
    check(
        world_size,
        Run(model=model, policy=BF16_POLICIES[policy], num_steps=1, limit=1e-6),
        Run(
            model=model,
            policy=BF16_POLICIES[policy],
            options=(("comm", "c10d"),),
            num_steps=1,
            limit=1e-6,
        ),
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_low_precision_accumulation_without_sync(world_size: int) -> None:
    run = Run(
        model="gpt",
        policy=BF16_POLICIES["compute_bf16_reduce_fp32"],
        num_micro_batches=3,
        sync_each=False,
        num_steps=1,
        limit=1e-6,
    )
    check(world_size, run)


@pytest.mark.parametrize("world_size", [2, 4])
def test_low_precision_reduction_of_fp32_gradients(world_size: int) -> None:
    # Each gradient is rounded to bf16 once, on its way: eight bits.
    policy = (("reduce_dtype", torch.bfloat16),)
    check(world_size, Run(model="gpt", policy=policy, num_steps=1, exact=False, limit=2**-7))
