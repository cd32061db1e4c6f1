"""A sharded model beside a reference in one process that sees the batches of all ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LIMIT = 1e-12  # of the largest element, in fp64: sums over ranks in another order
WIDTH = 12


class Net(nn.Module):
    """Layers of which each call may skip some, or not use their outputs; the head belongs to the
    root's unit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(
        self, x: Tensor, skipped: Sequence[int] = (), in_vain: Sequence[int] = ()
    ) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number not in skipped:
                y = torch.tanh(layer(x))
                x = x if number in in_vain else y
        return self.head(x)


def batch(number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(model: Any, x: Tensor, *args: Any) -> Tensor:
    return model(x, *args).square().sum()


class Beside:
    """Runs the same steps on a sharded model and on a reference.

    Args:
        rank: Of this process.
        world_size: Number of ranks; losses are averaged over them.
        stages: ZeRO stages of the layers and of the root.
        lr: Of plain SGD.
        prepare: Changes both models before they are sharded.
        options: For `fully_shard`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        stages: Sequence[int],
        *,
        lr: float = 0.05,
        prepare: Callable[[Net], object] = lambda model: None,
        **options: Any,
    ) -> None:
        from fsdpx import fully_shard

        torch.manual_seed(0)
        self.rank, self.world_size = rank, world_size
        self.reference = Net().double()
        prepare(self.reference)
        self.model: Any = copy.deepcopy(self.reference)
        for layer, stage in zip(self.model.layers, stages, strict=False):
            fully_shard(layer, zero_stage=stage, **options)
        fully_shard(self.model, zero_stage=stages[-1], **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.reference_optimizer = torch.optim.SGD(self.reference.parameters(), lr=lr)

    def backward(
        self,
        number: int,
        skipped: Sequence[int] = (),
        in_vain: Callable[[int], Sequence[int]] = lambda rank: (),
    ) -> None:
        """Forward and backward of micro-batch `number`.

        Args:
            skipped: Layers that no rank calls.
            in_vain: Layers that a rank calls without using the output.
        """
        # With gradients of inputs, backward reads every layer whose output is used.
        x = batch(number, self.rank).requires_grad_()
        loss_of(self.model, x, skipped, in_vain(self.rank)).backward()
        for rank in range(self.world_size):
            loss = loss_of(self.reference, batch(number, rank), skipped, in_vain(rank))
            (loss / self.world_size).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.reference_optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """By way of the optimizers."""
        self.optimizer.zero_grad(set_to_none)
        self.reference_optimizer.zero_grad(set_to_none)

    def eval_error(self, number: int) -> float:
        """The difference of the outputs of a forward without gradients."""
        with torch.no_grad():
            x = batch(number, self.rank)
            return relative(self.model(x), self.reference(x))

    @property
    def has_waiting(self) -> bool:
        """Whether gradients of the sharded model wait for their reduction."""
        return any(map(waits, self.model.parameters()))

    def grad_error(self) -> float:
        """The largest relative error of a gradient that does not wait for its reduction; infinite
        where only one side has one.
        """
        worst = 0.0
        for sharded, whole in self._pairs():
            if waits(sharded):
                continue
            if (sharded.grad is None) != (whole.grad is None):
                return math.inf
            if whole.grad is not None:
                worst = max(worst, relative(sharded.grad.full_tensor(), whole.grad))
        return worst

    def weight_error(self) -> float:
        return max(relative(s.full_tensor(), w.detach()) for s, w in self._pairs())

    def _pairs(self) -> list[tuple[Any, nn.Parameter]]:
        parameters = self.model.parameters(), self.reference.parameters()
        return list(zip(*parameters, strict=True))


def waits(parameter: Tensor) -> bool:
    """Whether the parameter's gradient waits for its reduction."""
    from fsdpx.parameter import WaitingGradient

    return isinstance(parameter.grad, WaitingGradient)


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest element; infinite for NaN."""
    difference = (actual - expected).abs().max().item()
    if math.isnan(difference):
        return math.inf
    return difference / max(1e-30, expected.abs().max().item())
