"""Sharded parameters as the inputs of torch's backward functions, and in hooks of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conformance.parts import (
    Pair,
    assert_close,
    backward_of_all_ranks,
    batch_of,
    mean_square,
    small_mlp,
    whole,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.distributed.device_mesh import init_device_mesh

import fsdpx

BF16 = fsdpx.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RUNS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"zero_stage": 1}),
    (2, {"mp_policy": BF16, "comm": "c10d"}),
    (4, {}),
]


def limit_of(options: dict[str, Any]) -> float:
    return 4e-3 if "mp_policy" in options else 1e-6


def replicas(world_size: int) -> dict[str, Any]:
    """A mesh with replicas where there are enough ranks."""
    if world_size < 4:
        return {}
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


def fill_some(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Backwards by some parameters each, on one graph; then one by all, that adds to it."""
    pair = Pair(small_mlp(), **options, **replicas(world_size))
    first, second = (dict(each.named_parameters()) for each in pair.both)
    loss = mean_square(pair.model, batch_of(rank)).float()
    for names in (["0.weight", "2.bias"], ["0.bias", "2.weight"]):
        loss.backward(inputs=[first[name] for name in names], retain_graph=True)
        for rank_of in range(world_size):
            value = mean_square(pair.reference, batch_of(rank_of)) / world_size
            value.backward(inputs=[second[name] for name in names])
        assert {n for n, p in first.items() if p.grad is None} == {
            n for n, p in second.items() if p.grad is None
        }
        pair.assert_grads(limit_of(options))
    mean_square(pair.model, batch_of(rank)).float().backward(inputs=first)
    backward_of_all_ranks(pair.reference, world_size)
    pair.assert_grads(limit_of(options))


@pytest.mark.parametrize(("world_size", "options"), RUNS)
def test_backward_fills_the_inputs_gradients(world_size: int, options: dict[str, Any]) -> None:
    run_ranks(world_size, fill_some, options)


def gradients_apart(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """`torch.autograd.grad` between backwards that it must not change."""
    pair = Pair(small_mlp(), **options, **replicas(world_size))
    limit = limit_of(options)
    for step in range(2):
        pair.backward(rank, world_size, step=step)
        before = {name: p.grad for name, p in pair.reference.named_parameters()}
        loss = mean_square(pair.model, batch_of(rank + 7)).float()
        with fsdpx.no_sync(pair.model):
            found = torch.autograd.grad(loss, dict(pair.model.named_parameters()))
        losses = [mean_square(pair.reference, batch_of(r + 7)) for r in range(world_size)]
        total = torch.stack(losses).sum() / world_size
        wanted = torch.autograd.grad(total, dict(pair.reference.named_parameters()))
        for name, parameter in pair.model.named_parameters():
            assert type(found[name]) is fsdpx.ShardedTensor
            assert_close(whole(found[name]), wanted[name], name, limit)
            assert_close(whole(parameter.grad), before[name], f"{name} as before", limit)


@pytest.mark.parametrize(("world_size", "options"), RUNS)
def test_grad_gives_the_mean_over_ranks(world_size: int, options: dict[str, Any]) -> None:
    run_ranks(world_size, gradients_apart, options)


class Uses(nn.Module):
    """One unit of three layers, of which a call uses the first ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(3)])

    def forward(self, x: Tensor, count: int) -> Tensor:
        for layer in self.layers[:count]:
            x = layer(x)
        return x.square().mean()


def use_some(rank: int, world_size: int) -> None:
    """Rank 0 uses one layer, rank 1 two; nobody uses the third."""
    pair = Pair(Uses(), fsdpx.fully_shard)

    def grads(loss: Tensor, model: nn.Module, **options: Any) -> Sequence[Tensor | None]:
        return torch.autograd.grad(loss, list(model.parameters()), **options)

    losses = [pair.reference(batch_of(each), 1 + each) for each in range(world_size)]
    wanted = grads(torch.stack(losses).mean(), pair.reference, allow_unused=True)
    for options in ({"allow_unused": True}, {"materialize_grads": True}, {}):
        loss = pair.model(batch_of(rank), 1 + rank)
        if not options:
            with pytest.raises(RuntimeError, match=r"'layers\.2\.weight' was not used .* any rank"):
                grads(loss, pair.model)
            continue
        *found, unused = grads(loss, pair.model, **options)
        for mine, theirs in zip(found, wanted, strict=False):
            assert_close(whole(mine), theirs, "gradient")
        assert (unused is None) == ("allow_unused" in options)
        assert unused is None or whole(unused).abs().max() == 0


def test_grad_by_parameters_that_some_ranks_do_not_use() -> None:
    run_ranks(2, use_some)


def penalise(rank: int, world_size: int) -> None:
    """A loss with the norm of each rank's gradient by the parameters."""

    def loss(model: nn.Module, x: Tensor, by: Callable[[Tensor], Any] = lambda p: p) -> Tensor:
        value = mean_square(model, x)
        inputs = [by(parameter) for parameter in model.parameters()]
        found = torch.autograd.grad(value, inputs, create_graph=True)
        return value + sum(each.square().sum() for each in found)

    pair = Pair(small_mlp())
    with pytest.raises(RuntimeError, match=r"'0\.weight' with create_graph=True.*gradient_edge"):
        loss(pair.model, batch_of(rank))
    loss(pair.model, batch_of(rank), get_gradient_edge).backward()
    backward_of_all_ranks(pair.reference, world_size, loss)
    pair.assert_grads()


def test_graphs_of_gradients_are_made_by_edges() -> None:
    run_ranks(2, penalise)


def count_together(rank: int, world_size: int) -> None:
    pair = Pair(small_mlp())
    for model in pair.both:
        seen: dict[str, list[Any]] = {"all": [], "any": []}
        for mode, calls in seen.items():
            register_multi_grad_hook(list(model.parameters()), calls.append, mode=mode)
        for _ in range(2):
            mean_square(model, batch_of(rank)).backward()
        model[0](batch_of(rank)).sum().backward()
        assert [[g is None for g in grads] for grads in seen["all"]] == [
            *2 * [4 * [False]],
            [False, False, True, True],
        ]
        assert len(seen["any"]) == 3


def test_hooks_of_several_parameters() -> None:
    run_ranks(2, count_together)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_lost_their_graph_are_no_part_of_a_loss() -> None:
    pair = Pair(small_mlp())
    pair.optimize(torch.optim.SGD, lr=0.1, momentum=0.9)
    for create_graph in (True, False, True):
        for model in pair.both:
            mean_square(model, batch_of(0)).backward(create_graph=create_graph)
        pair.assert_grads()
        gradient = pair.model[0].weight.grad
        if create_graph:
            with pytest.raises(RuntimeError, match=r"'0\.weight'.* gradient by create_graph=True"):
                gradient.square().sum()
        assert gradient.requires_grad == create_graph
        assert_close(gradient.detach().norm(), pair.reference[0].weight.grad.norm(), "norm")
        for model in pair.both:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        pair.step()
        pair.assert_weights()


def test_what_has_no_gradient_of_its_own_is_refused() -> None:
    model = fsdpx.fully_shard(small_mlp())
    output = model(batch_of(0))
    with pytest.raises(RuntimeError, match=r"'0\.weight to 2\.bias'.* stands for several"):
        output.sum().backward(inputs=fsdpx.flat_parameters(model), retain_graph=True)
    one_by_one = torch.eye(output.numel()).view(-1, *output.shape)
    with pytest.raises(RuntimeError, match=r"'0\.weight' with is_grads_batched=True"):
        torch.autograd.grad(output, model[0].weight, one_by_one, is_grads_batched=True)
