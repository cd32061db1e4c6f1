"""Small real models for tests: how to make each, which modules are units, a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 19
SEQUENCE = 6
WIDTH = 12
BATCH = 3


class Block(nn.Module):
    """A pre-norm transformer block with causal attention of two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A GPT; `widths` are those of its blocks' inner layers' input, all equal to the model's."""

    def __init__(self, *, num_blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, whose running statistics are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ConvBlock(3, 5), ConvBlock(5, 7)])
        self.head = nn.Linear(7, 4)

    def forward(self, images: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((2, 3)))


class LstmModel(nn.Module):
    """An embedding, a two-layer LSTM and a head: each a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 7)
        self.lstm = nn.LSTM(7, 9, num_layers=2, batch_first=True)
        self.head = nn.Linear(9, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0])


class Adapted(nn.Module):
    """A frozen linear layer with trainable low-rank factors beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class TiedFrozen(nn.Module):
    """Tied embedding and head in the root, adapted layers as units, one unit wholly frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList([Adapted(8), nn.Linear(8, 8), Adapted(8)])
        self.layers[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.scale)


Batch = tuple[Tensor, Tensor]


def token_batch(generator: torch.Generator) -> Batch:
    """Token numbers and the next ones, each (BATCH, SEQUENCE)."""
    text = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def image_batch(generator: torch.Generator) -> Batch:
    """Images (BATCH, 3, 5, 5) and their classes (BATCH,)."""
    images = torch.randn(BATCH, 3, 5, 5, generator=generator)
    return images, torch.randint(0, 4, (BATCH,), generator=generator)


@dataclass(frozen=True)
class ModelCase:
    """A model for tests.

    Attributes:
        make: returns the model, initialised from torch's global generator.
        units: the modules to wrap before the model itself, innermost first.
        batch: draws inputs and targets.
    """

    make: Callable[[], nn.Module]
    units: Callable[[nn.Module], Sequence[nn.Module]]
    batch: Callable[[torch.Generator], Batch]


MODELS = {
    "gpt": ModelCase(Gpt, lambda m: list(m.blocks), token_batch),
    "conv": ModelCase(ConvNet, lambda m: list(m.blocks), image_batch),
    "lstm": ModelCase(LstmModel, lambda m: [m.tokens, m.lstm, m.head], token_batch),
    "tied_frozen": ModelCase(TiedFrozen, lambda m: list(m.layers), token_batch),
}


def make_model(name: str, seed: int = 0) -> nn.Module:
    """The model of that name, with the same initial values for the same seed."""
    torch.manual_seed(seed)
    return MODELS[name].make()


def make_batch(name: str, *, step: int, rank: int) -> Batch:
    """The batch of one rank in one step."""
    return MODELS[name].batch(torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the model's outputs."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float().flatten(0, -2), targets.flatten())


def mlp() -> nn.Sequential:
    """Linear(6, 8), ReLU, Linear(8, 6), always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
