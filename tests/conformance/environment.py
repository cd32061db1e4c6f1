"""Settings of torch that reach every tensor: default dtypes and devices, determinism, seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .parts import Pair, assert_close, batch_of, mean_square, shard_linears, small_mlp, whole
from .registry import case


@contextmanager
def setting(change: Callable[[], None], restore: Callable[[], None]) -> Iterator[None]:
    change()
    try:
        yield
    finally:
        restore()


def check_training(rank: int, world_size: int, **options: object) -> None:
    """Clipped steps of AdamW on weights that were made in fp32."""
    with torch.device("cpu"):
        pair = Pair(small_mlp().float(), **options)
        batches = [batch_of(each).float() for each in range(world_size)]
        pair.optimize(torch.optim.AdamW, lr=0.1)
    for _ in range(2):
        mean_square(pair.model, batches[rank]).backward()
        for x in batches:
            (mean_square(pair.reference, x) / world_size).backward()
        norms = [
            whole(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)) for each in pair.both
        ]
        assert_close(norms[0], norms[1], "norm")
        pair.step()
    pair.assert_weights()
    pair.model.load_state_dict(pair.model.state_dict())


@case("another default dtype")
def default_dtypes(rank: int, world_size: int) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        with setting(
            lambda dtype=dtype: torch.set_default_dtype(dtype),
            lambda: torch.set_default_dtype(torch.float32),
        ):
            check_training(rank, world_size)


@case("the meta device as the default one")
def default_device(rank: int, world_size: int) -> None:
    with setting(lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)):
        check_training(rank, world_size)


@case("deterministic algorithms, which fill new memory with NaN")
def deterministic_algorithms(rank: int, world_size: int) -> None:
    assert torch.utils.deterministic.fill_uninitialized_memory
    with setting(
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ):
        for options in ({}, {"zero_stage": 2}, {"zero_stage": 1}, {"comm": "c10d"}):
            check_training(rank, world_size, **options)


@case(
    "wrapping and training draw random numbers, so that dropout masks differ from a plain model's"
)
def generators_are_left_alone(rank: int, world_size: int) -> None:
    model = small_mlp()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    shard_linears(model)
    mean_square(model, batch_of(rank)).backward()
    torch.optim.AdamW(model.parameters()).step()
    assert torch.equal(torch.get_rng_state(), before)
