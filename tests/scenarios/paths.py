"""Ways in which backward enters and leaves units: kept tensors, views, double backward, reuse."""

import dataclasses

import torch
from torch import Tensor, nn

from .parts import (
    WIDTH,
    KeepsHidden,
    Mlp,
    Stack,
    UnitModule,
    backward_through_kept,
    inputs,
    stack_of,
    train_step,
    train_step_input_grad,
)
from .registry import add_scenario, scenario

add_scenario("plain_step", Stack, train_step)
add_scenario("input_needs_gradient", Stack, train_step_input_grad)
add_scenario("hidden_tensor_kept", stack_of(KeepsHidden), backward_through_kept)


class ViewOutput(UnitModule):
    """Returns a view, so that the caller's in-place operation replaces the output's graph node."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).unsqueeze(0).squeeze(0)


class EditsOutputs(Stack):
    """Adds to each unit's output in place; its head stays unused."""

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
            x += 1
            x = x * x
        return x


add_scenario("output_view_edited_in_place", lambda: EditsOutputs(ViewOutput), train_step)


@scenario(Stack)
def gradient_penalty(model: nn.Module) -> None:
    x = inputs(requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (gradient.square().sum() + model(x).square().mean()).backward()


@scenario(Stack)
def double_backward(model: nn.Module) -> list[Tensor]:
    x = inputs(requires_grad=True)
    loss = model(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad is not None
    return [x.grad]


@scenario(Stack)
def graph_retained_for_a_second_backward(model: nn.Module) -> None:
    y = model(inputs())
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()


@scenario(Stack)
def two_forwards_then_two_backwards(model: nn.Module) -> None:
    first, second = (model(inputs()).square().sum() for _ in range(2))
    first.backward()
    second.backward()


@scenario(Stack)
def two_forwards_then_two_backwards_reversed(model: nn.Module) -> None:
    first, second = (model(inputs()).square().sum() for _ in range(2))
    second.backward()
    first.backward()


@scenario(Stack)
def two_forwards_one_backward(model: nn.Module) -> None:
    (model(inputs()).square().sum() + model(inputs()).square().sum()).backward()


class CalledThrice(nn.Module):
    """One unit called three times, another one twice, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.thrice = Mlp()
        self.twice = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.thrice(self.twice(self.thrice(self.twice(self.thrice(x)))))


add_scenario("unit_called_three_times", CalledThrice, train_step)


class TwoOutputs(UnitModule):
    """Returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.dropped = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x).tanh(), self.dropped(x).tanh()


class TakesFirstOutput(Stack):
    """Goes on with the first of each unit's outputs."""

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)[0]
        return x


add_scenario("one_output_dropped", lambda: TakesFirstOutput(TwoOutputs), train_step)


@dataclasses.dataclass
class Output:
    """An output that is neither a tensor nor a container that torch knows."""

    hidden: Tensor


class DataclassOutput(Mlp):
    """Returns its tensor in a dataclass."""

    def forward(self, x: Tensor) -> Output:
        return Output(self.body(x))


class TakesDataclass(Stack):
    """Goes on with the tensor in each unit's dataclass."""

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x).hidden
        return x


add_scenario("dataclass_output", lambda: TakesDataclass(DataclassOutput), train_step)


class UnusedParameter(Mlp):
    """Has a layer that forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


add_scenario("unused_parameter", stack_of(UnusedParameter), train_step)


def make_frozen_stack(which: str) -> Stack:
    """A stack in which the first layer, the second layer or the whole of each unit is frozen."""
    model = Stack()
    for unit in model.units:
        (unit if which == "unit" else getattr(unit, which)).requires_grad_(False)
    return model


add_scenario("first_layer_frozen", lambda: make_frozen_stack("first"), train_step_input_grad)
add_scenario("second_layer_frozen", lambda: make_frozen_stack("second"), train_step_input_grad)
add_scenario("whole_units_frozen", lambda: make_frozen_stack("unit"), train_step_input_grad)


@scenario(Stack)
def gradients_accumulated_over_three_steps(model: nn.Module) -> None:
    for _ in range(3):
        train_step(model)


class GradientInsideForward(Stack):
    """Differentiates its own output by its input, as models of forces do."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        energy = super().forward(x).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + force.square().sum()


@scenario(GradientInsideForward)
def gradient_taken_inside_forward(model: nn.Module) -> None:
    model(inputs()).backward()


@scenario(Stack)
def backward_for_the_input_only(model: nn.Module) -> list[Tensor]:
    x = inputs(requires_grad=True)
    model(x).square().sum().backward(inputs=[x])
    assert x.grad is not None
    return [x.grad]


@scenario(Stack)
def no_grad_forward_first(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        output = model(inputs())
    train_step(model)
    return [output]


@scenario(Stack)
def inference_mode_first(model: nn.Module) -> list[Tensor]:
    with torch.inference_mode():
        output = model(inputs())
    train_step(model)
    return [output.clone()]


class Identity(UnitModule):
    """Has a layer, and returns its very input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x


add_scenario("units_return_their_input", stack_of(Identity), train_step_input_grad)


@scenario(Stack)
def autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs()).float().square().sum()
    loss.backward()


@scenario(Stack)
def anomaly_mode(model: nn.Module) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        train_step(model)
