"""Modules and steps that many scenarios share."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 8
BATCH = 4
VOCABULARY = 11


class UnitModule(nn.Module):
    """A module that the driver wraps with `fully_shard` by itself."""

    is_unit = True


def as_unit(module: nn.Module) -> nn.Module:
    """Marks a module of any class as a unit of its own."""
    module.is_unit = True
    return module


class Mlp(UnitModule):
    """Two linear layers with a tanh between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Stack(nn.Module):
    """Units called one after the other, and a linear head that belongs to the root unit."""

    def __init__(self, make_unit: Callable[[], nn.Module] = Mlp, *, num_units: int = 3) -> None:
        super().__init__()
        self.units = nn.ModuleList([make_unit() for _ in range(num_units)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return self.head(x)


def stack_of(make_unit: Callable[[], nn.Module], *, num_units: int = 3) -> Callable[[], Stack]:
    """A function that makes a `Stack` of such units."""
    return lambda: Stack(make_unit, num_units=num_units)


class KeepsHidden(UnitModule):
    """Passes its input on and keeps what it computed: backward enters the unit from its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.hidden(x)
        return x * 1.0


def inputs(*, requires_grad: bool = False) -> Tensor:
    """The next batch, (BATCH, WIDTH), of this rank."""
    return torch.randn(BATCH, WIDTH, requires_grad=requires_grad)


def token_inputs() -> Tensor:
    """The next batch of 5 token numbers of this rank."""
    return torch.randint(0, VOCABULARY, (5,))


def train_step(model: nn.Module) -> None:
    """One forward and backward of a sum of squares."""
    model(inputs()).square().sum().backward()


def train_step_input_grad(model: nn.Module) -> list[Tensor]:
    """The same, with an input that needs a gradient, which is returned."""
    x = inputs(requires_grad=True)
    model(x).square().sum().backward()
    return [gradient_of(x)]


def token_step(model: nn.Module) -> None:
    """One forward and backward of a model that takes token numbers."""
    model(token_inputs()).square().sum().backward()


def backward_through_kept(model: nn.Module) -> None:
    """A forward whose output is dropped, then a backward from what the units kept."""
    model(inputs(requires_grad=True))
    torch.stack([unit.kept.square().sum() for unit in model.units]).sum().backward()


def gradient_of(tensor: Tensor) -> Tensor:
    """`tensor.grad`, which must be there."""
    assert tensor.grad is not None
    return tensor.grad


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded (collective if it is)."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
