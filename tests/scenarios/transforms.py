"""torch.func and torch.compile over sharded modules."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import (
    KeepsHidden,
    Mlp,
    Stack,
    backward_through_kept,
    gradient_of,
    inputs,
    stack_of,
    train_step,
    whole,
)
from .registry import add_scenario, scenario

# Traces and differentiates like the default backend, without compiling native code.
BACKEND = "aot_eager"


@scenario(Stack)
def func_grad_then_training(model: nn.Module) -> list[Tensor]:
    gradient = torch.func.grad(lambda x: model(x).square().sum())(inputs())
    train_step(model)
    return [gradient]


@scenario(Stack, forward_only=True)
def func_vmap(model: nn.Module) -> list[Tensor]:
    return [torch.func.vmap(model)(inputs()).detach()]


@scenario(Stack, forward_only=True)
def func_jacrev(model: nn.Module) -> list[Tensor]:
    return [torch.func.jacrev(lambda x: model(x).sum(0))(inputs()).detach()]


@scenario(Stack, forward_only=True)  # its backward concerns none of the model's own parameters
def functional_call(model: nn.Module) -> list[Tensor]:
    own = {
        name: whole(parameter.detach()).clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    torch.func.functional_call(model, own, (inputs(),)).square().sum().backward()
    return [gradient_of(parameter) for parameter in own.values()]


class CompiledBody(Mlp):
    """Compiles a function of its weights in its first forward."""

    def forward(self, x: Tensor) -> Tensor:
        if "compiled" not in self.__dict__:
            self.__dict__["compiled"] = torch.compile(self.from_weights, backend=BACKEND)
        first, second = self.first, self.second
        return self.compiled(x, first.weight, first.bias, second.weight, second.bias)

    @staticmethod
    def from_weights(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, a, b)), c, d)


class CompiledClosure(Mlp):
    """Compiles a function that reads the weights from the module."""

    def forward(self, x: Tensor) -> Tensor:
        if "compiled" not in self.__dict__:
            self.__dict__["compiled"] = torch.compile(self.body, backend=BACKEND)
        return self.compiled(x)


class CompiledKept(KeepsHidden):
    """Compiles what computes the tensor that it keeps."""

    def hidden(self, x: Tensor) -> Tensor:
        if "compiled" not in self.__dict__:
            self.__dict__["compiled"] = torch.compile(super().hidden, backend=BACKEND)
        return self.compiled(x)


@scenario(stack_of(CompiledClosure, num_units=2), compiles=True)
def compiled_closure(model: nn.Module) -> None:
    for _ in range(3):
        train_step(model)


add_scenario(
    "compiled_function_of_weights",
    stack_of(CompiledBody, num_units=2),
    train_step,
    compiles=True,
)
add_scenario(
    "compiled_hidden_tensor_kept",
    stack_of(CompiledKept, num_units=2),
    backward_through_kept,
    compiles=True,
)
