"""Custom autograd functions and operators, which reach their weights by their own ways."""

from typing import Any

import torch
from torch import Tensor, nn

from .parts import WIDTH, UnitModule, backward_through_kept, stack_of, train_step
from .registry import add_scenario


class SavesWeight(torch.autograd.Function):
    """x @ weight, whose weight is saved the proper way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class HoldsWeight(torch.autograd.Function):
    """x @ weight, whose weight is an attribute of the context: no saved-tensor hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.weight.t(), ctx.x.t() @ grad


class ReadsRawMemory(torch.autograd.Function):
    """x @ weight, whose backward reads the weight's memory through NumPy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        copy = torch.from_numpy(weight.detach().numpy().copy())
        return grad @ copy.t(), x.t() @ grad


class CustomLayers(UnitModule):
    """Two products with bare parameters through a custom function."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        hidden = self.function.apply(x, self.first).tanh()
        return self.function.apply(hidden, self.second)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class CustomLayersKept(CustomLayers):
    """The same, keeping its result and passing its input on."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.body(x)
        return x * 1.0


for function, name in (
    (SavesWeight, "custom_function_saves_weight"),
    (HoldsWeight, "custom_function_holds_weight"),
    (ReadsRawMemory, "custom_function_reads_raw_memory"),
):
    add_scenario(name, stack_of(lambda f=function: CustomLayers(f)), train_step)

for function, name in (
    (HoldsWeight, "custom_function_holds_weight_result_kept"),
    (ReadsRawMemory, "custom_function_reads_raw_memory_result_kept"),
):
    add_scenario(name, stack_of(lambda f=function: CustomLayersKept(f)), backward_through_kept)


@torch.library.custom_op("fsdpx_scenarios::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@torch.library.custom_op("fsdpx_scenarios::linear_input_grad", mutates_args=())
def linear_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    return grad @ weight.t()


def save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return linear_input_grad(grad, weight), x.t() @ grad


linear.register_autograd(linear_backward, setup_context=save_inputs)


class LibraryOperator(UnitModule):
    """A product through an operator that a library has registered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight).tanh()


add_scenario("operator_of_a_library", stack_of(LibraryOperator), train_step)
