"""Models of the conformance matrix: one kind of parameter each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .failures import Fails

WIDTH = 6


class Stack(nn.Module):
    """Blocks one after the other; each of `unit_numbers` is made a unit.

    Attributes:
        call: How a block is called; a checkpoint, say.
        fails: Whether backward raises between the first block and the next.
    """

    def __init__(self, *blocks: nn.Module, units: Sequence[int] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.unit_numbers = range(len(blocks)) if units is None else units
        self.call: Callable[[nn.Module, Tensor], Tensor] = _call
        self.fails = False

    def units(self) -> list[nn.Module]:
        blocks = [self.blocks[number] for number in self.unit_numbers]
        return [block for block in blocks if any(True for _ in block.parameters())]

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.call(block, x)
            if number == 0:
                x = Fails.apply(x, self.fails)
        return x


def _call(block: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = block(x)
    return result


def _layer(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())


class WithParameter(nn.Module):
    """A linear layer and one more parameter."""

    def __init__(self, value: Tensor, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Parameter(value, requires_grad=value.is_floating_point())
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear(x), self.extra)


class LowRank(nn.Module):
    """A frozen linear layer with trainable factors beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class WideBatchNorm(nn.BatchNorm2d):
    """Computes in its statistics' dtype: torch's CPU kernel takes no bf16 weights with fp32
    statistics.
    """

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        x, *weights = (t.to(self.running_mean.dtype) for t in (x, self.weight, self.bias))
        return F.batch_norm(x, *statistics, *weights, self.training)


class Convolution(nn.Module):
    """A convolution with channels-last weights and a batch norm, over the input as a 1 x 2 image
    of three channels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = WideBatchNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        image = self.conv(x.unflatten(-1, (3, 1, 2)))
        return self.norm(image).flatten(1).to(x.dtype)


class Recurrent(nn.Module):
    """An LSTM over the batch as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Thrice(nn.Module):
    """One layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = _layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.shared(self.shared(x)))


class InBf16(nn.Module):
    """A layer whose weights are bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x.to(self.linear.weight.dtype)).to(x.dtype)) * self.scale


class Unused(nn.Module):
    """A layer that runs and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = _layer(), _layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def _transposed() -> nn.Module:
    layer = _layer()
    layer[0].weight = nn.Parameter(layer[0].weight.detach().t().contiguous().t())
    return layer


def _tied() -> Stack:
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    return Stack(first, _layer(), last, units=[1])


def _scale(y: Tensor, scale: Any) -> Tensor:
    return y * scale


def _add_empty(y: Tensor, empty: Tensor) -> Tensor:
    return y + (y @ empty.t()).sum()


def _use_codes(y: Tensor, codes: Tensor) -> Tensor:
    return y * codes.to(y.dtype).sum() / 21


KINDS: dict[str, Callable[[], Stack]] = {
    "linear": lambda: Stack(_layer(), _layer(), nn.Linear(WIDTH, 5)),
    "fewer elements than ranks": lambda: Stack(_layer(WIDTH, 1), _layer(1, 3), nn.Linear(3, 1)),
    "0-dim": lambda: Stack(WithParameter(torch.tensor(1.5), _scale), _layer()),
    "no elements": lambda: Stack(WithParameter(torch.empty(0, WIDTH), _add_empty), _layer()),
    "not contiguous": lambda: Stack(_transposed(), _layer()),
    "tied in a unit": _tied,
    "frozen beside trainable": lambda: Stack(LowRank(), LowRank()),
    "integer": lambda: Stack(
        WithParameter(torch.arange(7, dtype=torch.uint8), _use_codes), _layer()
    ),
    "bf16 beside fp32": lambda: Stack(InBf16(), InBf16()),
    "convolution, batch norm": lambda: Stack(Convolution(), _layer()),
    "LSTM": lambda: Stack(Recurrent(), _layer()),
    "called three times": lambda: Stack(Thrice(), _layer()),
    "unused": lambda: Stack(Unused(), _layer()),
}
