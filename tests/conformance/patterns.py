"""Ways to train, for the conformance matrix; each runs on a sharded model and on the reference."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .kinds import Stack
from .parts import batch_of, whole

Loss = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


@dataclass
class Side:
    """The sharded model on this rank, or the reference that loops over all ranks' batches.

    Attributes:
        model: What is called.
        stack: The same without wrappers.
        ranks: Whose batches this side runs.
        no_sync: Makes the context in which backwards do not synchronise.
        seen: What is compared in the end, by name.
    """

    model: nn.Module
    stack: Stack
    ranks: list[int]
    no_sync: Callable[[], Any] = contextlib.nullcontext
    seen: dict[str, Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        trained = [p for p in self.model.parameters() if p.is_floating_point()]
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)

    def backward(self, step: int, loss: Loss | None = None) -> None:
        """The mean over ranks of the gradients of one batch each."""
        for value in self.losses(step, loss):
            value.backward()

    def losses(self, step: int, loss: Loss | None = None) -> list[Tensor]:
        loss = loss or mean_square
        return [loss(self.model, batch_of(r + 10 * step)) / len(self.ranks) for r in self.ranks]

    def see(self, what: str) -> None:
        """Takes note of all gradients."""
        for name, parameter in self.model.named_parameters():
            plain = name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "")
            gradient = parameter.grad
            self.seen[f"{what}: gradient of {plain}"] = (
                None if gradient is None else whole(gradient).detach().clone()
            )

    def step(self, what: str = "step", *, set_to_none: bool = True) -> None:
        self.see(what)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.seen[f"{what}: norm"] = whole(norm).detach().clone()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def look(self, what: str) -> None:
        """Takes note of an output without gradients."""
        with torch.no_grad():
            self.seen[f"{what}: output"] = self.model(batch_of(0)).float().clone()


def mean_square(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).float().pow(2).mean()


def train(side: Side) -> None:
    for step in range(3):
        side.backward(step)
        side.step(f"step {step}", set_to_none=step % 2 == 0)
    side.look("end")


def adamw(side: Side) -> None:
    side.optimizer = torch.optim.AdamW(side.optimizer.param_groups[0]["params"], lr=0.01, eps=0.1)
    train(side)


def accumulate(side: Side) -> None:
    for step in range(2):
        for micro in range(3):
            side.backward(3 * step + micro)
        side.step(f"step {step}")


def accumulate_unsynchronised(side: Side) -> None:
    for step in range(2):
        with side.no_sync():
            side.backward(3 * step)
            side.backward(3 * step + 1)
        side.backward(3 * step + 2)
        side.step(f"step {step}")


def evaluate_before_step(side: Side) -> None:
    side.look("first")
    for step in range(2):
        side.backward(step)
        side.look(f"before step {step}")
        side.step(f"step {step}")
        side.look(f"after step {step}")


def inference_first(side: Side) -> None:
    with torch.inference_mode():
        side.model(batch_of(0))
    train(side)


def checkpoint_blocks(side: Side) -> None:
    side.stack.call = functools.partial(checkpoint, use_reentrant=False)
    train(side)


def checkpoint_reentrant(side: Side) -> None:
    side.stack.call = lambda block, x: checkpoint(block, x, use_reentrant=True)

    def loss(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return mean_square(model, x.requires_grad_())

    for step in range(2):
        side.backward(step, loss)
        side.step(f"step {step}")


def two_forwards(side: Side) -> None:
    for step in range(2):
        first, second = side.losses(2 * step), side.losses(2 * step + 1)
        for value in [*second, *first] if step else [*first, *second]:
            value.backward()
        side.step(f"step {step}")


def retain_graph(side: Side) -> None:
    for step in range(2):
        for value in side.losses(step):
            value.backward(retain_graph=True)
            value.backward()
        side.step(f"step {step}")


def gradient_penalty(side: Side) -> None:
    def loss(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = model(x).float()
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.pow(2).mean() + gradient.pow(2).mean()

    for step in range(2):
        side.backward(step, loss)
        side.step(f"step {step}")


def unfreeze(side: Side) -> None:
    first = [p for p in side.stack.blocks[0].parameters() if p.requires_grad]
    for step, frozen in enumerate([True, False, True]):
        for parameter in first:
            parameter.requires_grad_(not frozen)
        side.backward(step)
        side.step(f"step {step}")


def exception_in_backward(side: Side) -> None:
    side.backward(0)
    side.step("step 0")
    side.stack.fails = True
    with contextlib.suppress(RuntimeError):
        side.backward(1)
    side.stack.fails = False
    side.model.zero_grad()
    for step in (1, 2):
        side.backward(step)
        side.step(f"step {step}")


def save_and_load(side: Side) -> None:
    side.backward(0)
    saved = {name: value.clone() for name, value in side.model.state_dict().items()}
    side.step("step 0")
    side.model.load_state_dict(saved)
    side.look("loaded")
    side.backward(1)
    side.step("step 1")


def convert(side: Side) -> None:
    def wide(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return mean_square(model, x.double())

    for step, dtype in enumerate([None, torch.float64, torch.float32]):
        side.model.to(dtype)
        side.backward(step, wide if dtype is torch.float64 else None)
        side.step(f"step {step}", set_to_none=dtype is not None)


def compiled(side: Side) -> None:
    torch._dynamo.reset()
    side.model = torch.compile(side.model, backend="eager")  # type: ignore[assignment]
    train(side)


PATTERNS: dict[str, Callable[[Side], None]] = {
    "train": train,
    "AdamW": adamw,
    "accumulate": accumulate,
    "accumulate unsynchronised": accumulate_unsynchronised,
    "evaluate before the step": evaluate_before_step,
    "inference mode first": inference_first,
    "checkpoint": checkpoint_blocks,
    "checkpoint, reentrant": checkpoint_reentrant,
    "two forwards, two backwards": two_forwards,
    "retained graph": retain_graph,
    "gradient penalty": gradient_penalty,
    "freeze and unfreeze": unfreeze,
    "exception in backward": exception_in_backward,
    "save and load": save_and_load,
    "other dtypes between steps": convert,
    "compiled": compiled,
}
