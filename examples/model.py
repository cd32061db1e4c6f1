"""A GPT over bytes, in plain torch modules: nothing here knows about sharding."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; the vocabulary is the 256 bytes."""

    context: int = 128
    num_layers: int = 4
    width: int = 128
    num_heads: int = 4
    vocabulary: int = 256

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(
                f"width ({self.width}) must be a multiple of num_heads ({self.num_heads})"
            )


class Block(nn.Module):
    """Pre-norm attention and MLP: 12 parameters."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, time, width)
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp_out(F.gelu(self.mlp_up(self.mlp_norm(x)), approximate="tanh"))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, head, time, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))


class GPT(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.byte_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):  # what is added to the residual stream, over its depth
            std = 0.02 / math.sqrt(2 * self.config.num_layers)
            nn.init.normal_(module.attention_out.weight, std=std)
            nn.init.normal_(module.mlp_out.weight, std=std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (batch, time) -> (batch, time, byte)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte, computed in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
