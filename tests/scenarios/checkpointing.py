"""Activation checkpointing and hooks on saved tensors, inside, outside and around units."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .parts import (
    KeepsHidden,
    Mlp,
    Stack,
    backward_through_kept,
    inputs,
    stack_of,
    train_step,
    train_step_input_grad,
)
from .paths import CalledThrice
from .registry import add_scenario, scenario


class CheckpointsUnits(Stack):
    """Calls each unit under a checkpoint."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = checkpoint(unit, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointsUnitsReentrant(CheckpointsUnits):
    reentrant = True


class CheckpointsItself(Mlp):
    """A unit whose forward checkpoints its own body: the recomputation runs inside the unit."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant) * 1.0


class CheckpointsItselfReentrant(CheckpointsItself):
    reentrant = True


class CheckpointsAll(Stack):
    """Runs the whole stack, of which the root's head is a part, under one checkpoint."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointsAllReentrant(CheckpointsAll):
    reentrant = True


class CheckpointsSharedUnit(CalledThrice):
    """Calls one unit twice, with another between, each call under its own checkpoint."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for unit in (self.thrice, self.twice, self.thrice):
            x = checkpoint(unit, x, use_reentrant=self.reentrant)
        return x


class CheckpointsSharedUnitReentrant(CheckpointsSharedUnit):
    reentrant = True


for name, make_model in {
    "checkpoint_outside_units": CheckpointsUnits,
    "checkpoint_outside_units_reentrant": CheckpointsUnitsReentrant,
    "checkpoint_inside_units": stack_of(CheckpointsItself),
    "checkpoint_inside_units_reentrant": stack_of(CheckpointsItselfReentrant),
    "checkpoint_around_everything": CheckpointsAll,
    "checkpoint_around_everything_reentrant": CheckpointsAllReentrant,
    "checkpoint_of_a_unit_used_twice": CheckpointsSharedUnit,
    "checkpoint_of_a_unit_used_twice_reentrant": CheckpointsSharedUnitReentrant,
}.items():
    add_scenario(name, make_model, train_step_input_grad)


class KeepsCheckpointed(KeepsHidden):
    """Keeps a tensor that came out of a checkpoint inside the unit."""

    reentrant = False

    def hidden(self, x: Tensor) -> Tensor:
        body = lambda t: self.second(torch.tanh(self.first(t)))  # noqa: E731
        return torch.tanh(checkpoint(body, x, use_reentrant=self.reentrant))


class KeepsCheckpointedReentrant(KeepsCheckpointed):
    reentrant = True


add_scenario("checkpointed_tensor_kept", stack_of(KeepsCheckpointed), backward_through_kept)
add_scenario(
    "checkpointed_tensor_kept_reentrant",
    stack_of(KeepsCheckpointedReentrant),
    backward_through_kept,
)


def save_matmuls(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """The policy of a selective checkpoint that keeps the outputs of linear layers."""
    if operator == torch.ops.aten.addmm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective_checkpoint(body: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Checkpoints a body, all but its matrix products."""
    contexts = functools.partial(create_selective_checkpoint_contexts, save_matmuls)
    return checkpoint(body, x, use_reentrant=False, context_fn=contexts)


class SelectiveOutside(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = selective_checkpoint(unit, x)
        return self.head(x)


class SelectiveInside(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return selective_checkpoint(self.body, x) * 1.0


add_scenario("selective_checkpoint_outside_units", SelectiveOutside, train_step_input_grad)
add_scenario("selective_checkpoint_inside_units", stack_of(SelectiveInside), train_step_input_grad)


@scenario(Stack)
def save_on_cpu_outside(model: nn.Module) -> None:
    with save_on_cpu():
        loss = model(inputs()).square().sum()
    loss.backward()


class SavesOnCpu(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            return self.body(x)


add_scenario("save_on_cpu_inside", stack_of(SavesOnCpu), train_step)


def keep(tensor: Tensor) -> Tensor:
    """A user's pack hook that keeps the tensor itself: it shares the unit's memory, not a copy."""
    return tensor.detach()


def give_back(tensor: Tensor) -> Tensor:
    return tensor


class PacksSavedTensors(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(keep, give_back):
            return self.body(x)


class PacksSavedTensorsAndKeeps(KeepsHidden):
    def hidden(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(keep, give_back):
            return super().hidden(x)


add_scenario("saved_tensor_hooks_inside", stack_of(PacksSavedTensors), train_step)
add_scenario(
    "saved_tensor_hooks_inside_hidden_kept",
    stack_of(PacksSavedTensorsAndKeeps),
    backward_through_kept,
)


@scenario(Stack)
def saved_tensor_hooks_outside(model: nn.Module) -> list[Tensor]:
    packed = []

    def count(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor.detach()

    with saved_tensors_hooks(count, give_back):
        loss = model(inputs()).square().sum()
    loss.backward()
    # The user's hook must see as many tensors as it would without sharding.
    return [torch.tensor(packed)]
