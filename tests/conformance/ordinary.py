"""Plain training: world sizes, precision, optimizers, tied weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsdpx import MixedPrecisionPolicy, fully_shard

from .parts import Pair, check_one_step, mean_square, small_mlp
from .registry import case


@case("one step on two ranks")
def basic(rank: int, world_size: int) -> None:
    check_one_step(small_mlp(), rank, world_size)


@case("sizes that three ranks do not divide", world_size=3)
def basic3(rank: int, world_size: int) -> None:
    check_one_step(small_mlp(), rank, world_size)


@case("only the root is a unit", world_size=4)
def basic4_root_only(rank: int, world_size: int) -> None:
    check_one_step(small_mlp(), rank, world_size, shard=fully_shard)


@case("a single rank takes the same path", world_size=1)
def world1(rank: int, world_size: int) -> None:
    check_one_step(small_mlp(), rank, world_size)


@case("bf16 compute, fp32 reduction")
def bf16(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check_one_step(small_mlp(), rank, world_size, limit=2e-2, mp_policy=policy)


@case("units stay gathered between forward and backward")
def keep_gathered(rank: int, world_size: int) -> None:
    check_one_step(small_mlp(), rank, world_size, reshard_after_forward=False)


@case("units are shared by two ranks between forward and backward", world_size=4)
def reshard_to_two(rank: int, world_size: int) -> None:
    check_one_step(small_mlp(), rank, world_size, reshard_after_forward=2)


@case("many steps of AdamW with clipping")
def adamw_20_steps(rank: int, world_size: int) -> None:
    pair = Pair(small_mlp())
    pair.optimize(torch.optim.AdamW, lr=1e-2)
    for step in range(20):
        pair.backward(rank, world_size, step=step)
        for each in pair.both:
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        pair.step()
    pair.assert_weights()


class Tied(nn.Module):
    """An embedding whose weight is the head's as well, and a layer between them."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(num_tokens, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, num_tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)))


def shard_middle(model: Tied) -> None:
    fully_shard(model.middle)
    fully_shard(model)


def shard_the_tied_together(model: Tied) -> None:
    fully_shard([model.embedding, model.head])
    shard_middle(model)


def shard_the_tied_apart(model: Tied) -> None:
    fully_shard(model.embedding)
    fully_shard(model.head)
    fully_shard(model)


def check_tied(num_tokens: int, shard: Callable[[Tied], None] = shard_middle) -> None:
    """Every row of the tied weight moves as in the reference."""
    pair = Pair(Tied(num_tokens), shard)
    pair.optimize(torch.optim.SGD, lr=1.0)
    for each in pair.both:
        mean_square(each, torch.arange(num_tokens)).backward()
    pair.step()
    pair.assert_weights()


@case("tied weight and uneven shards: the last rank's rows never changed")
def tied_in_root(rank: int, world_size: int) -> None:
    check_tied(7)


@case("the same with ranks that own nothing of a weight", world_size=4)
def tied_empty_shard(rank: int, world_size: int) -> None:
    check_tied(5)


@case("the same on three ranks, and with the tied layers in a unit of their own", world_size=3)
def tied_in_one_group(rank: int, world_size: int) -> None:
    for shard in (shard_middle, shard_the_tied_together):
        check_tied(5, shard)


@case(
    "a weight tied across units: a size mismatch deep inside",
    refusal=r"(?i)shared|tied|same parameter|already",
)
def tied_across_units(rank: int, world_size: int) -> None:
    check_tied(7, shard_the_tied_apart)
