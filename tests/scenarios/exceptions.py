"""Steps that fail, after which clean steps must be right."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .parts import WIDTH, Mlp, Stack, UnitModule, inputs, train_step
from .registry import scenario


class FailsInBackward(torch.autograd.Function):
    """The identity; its backward raises if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ValueError("backward was told to fail")
        return grad, None


class Fragile(Mlp):
    """Fails in the middle of its forward or its backward when told to."""

    fails_in_forward = False
    fails_in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.fails_in_forward:
            raise ValueError("forward was told to fail")
        return self.second(FailsInBackward.apply(torch.tanh(hidden), self.fails_in_backward))


def make_fragile_stack() -> Stack:
    """Three units, of which the middle one can fail."""
    model = Stack()
    model.units[1] = Fragile()
    return model


@scenario(make_fragile_stack)
def exception_in_forward(model: nn.Module) -> None:
    model.units[1].fails_in_forward = True
    with pytest.raises(ValueError, match="forward was told to fail"):
        model(inputs())
    model.units[1].fails_in_forward = False
    model.zero_grad()
    train_step(model)


@scenario(make_fragile_stack)
def exception_in_backward(model: nn.Module) -> None:
    model.units[1].fails_in_backward = True
    loss = model(inputs()).square().sum()
    with pytest.raises(ValueError, match="backward was told to fail"):
        loss.backward()
    model.units[1].fails_in_backward = False
    for _ in range(2):
        model.zero_grad()
        train_step(model)


class StaleActivation(UnitModule):
    """Changes a result that exp has saved, which autograd must refuse with or without sharding."""

    stale = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.linear(x)).exp()
        product = y * 1
        if self.stale:
            y.add_(1)
        return torch.tanh(product + y)


@scenario(lambda: Stack(StaleActivation))
def stale_activation_is_refused(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train_step(model)
    for unit in model.units:
        unit.stale = False
    model.zero_grad()
    train_step(model)
