"""torch.func's transforms around sharded models."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import grad, jacrev, jvp, vmap

from fsdpx import fully_shard

from .parts import Pair, assert_close, batch_of, small_mlp
from .registry import case


@case("the first forward of all runs inside a transform, of the input")
def transforms_of_the_input(rank: int, world_size: int) -> None:
    x = batch_of(rank)
    for stage in (3, 2, 1):
        for transform in (
            lambda model: grad(lambda x: model(x).sum())(x),
            lambda model: vmap(model)(x),
            lambda model: jacrev(model)(x),
            lambda model: torch.stack(jvp(model, (x,), (torch.ones_like(x),))),
        ):

            def shard(model: nn.Sequential, stage: int = stage) -> None:
                for layer in (model[0], model[2]):
                    fully_shard(layer, zero_stage=stage)
                fully_shard(model, zero_stage=stage)

            pair = Pair(small_mlp(), shard)
            for _ in range(2):
                assert_close(transform(pair.model), transform(pair.reference), "transformed")
            pair.backward(rank, world_size)
            pair.assert_grads()
