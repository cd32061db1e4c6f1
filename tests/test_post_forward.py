"""`reshard_after_forward=k`: gathers within groups of k ranks, their bytes, memory and numbers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_zero import LAYERS, WIDTH, batch, make_reference
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """Computes its layers again in backward."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def shard(few: bool | int, **options: Any) -> Any:
    """The layers of the model as units that are resharded to `few` ranks; the root stays."""
    from fsdpx import fully_shard

    model = copy.deepcopy(make_reference())
    for layer in list(model)[: len(LAYERS)]:
        fully_shard(layer, reshard_after_forward=few, **options)
    return fully_shard(model, **options)


def policy(dtype: torch.dtype | None) -> Any:
    from fsdpx import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=dtype)


def padded(world_size: int, itemsize: int) -> int:
    """Elements of a layer with its padding: shares are multiples of 128 bytes."""
    block = 128 // itemsize * world_size
    return -(-(WIDTH * WIDTH + WIDTH) // block) * block


def gather_records(model: Any, run: Callable[[], object]) -> list[tuple[str, int]]:
    """Unit and bytes on the wire of each gather while `run` runs."""
    import fsdpx

    with fsdpx.record_timeline(model) as timeline:
        run()
    return [(r.unit, r.wire_bytes) for r in timeline.records if r.operation == "all_gather"]


# ---- Bytes and memory


def bytes_of_gathers(
    rank: int, world_size: int, few: int, comm: str
) -> tuple[list[tuple[str, int]], ...]:
    model = shard(few, comm=comm)
    x = batch(0, rank).requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
    loss: list[Tensor] = []
    forward = gather_records(model, lambda: loss.append(model(x).sum()))
    return forward, gather_records(model, loss[0].backward)


@pytest.mark.parametrize("comm", ["shm", "c10d"])
def test_backward_gathers_within_the_smaller_group(comm: str) -> None:
    world_size, few = 4, 2
    num_bytes = padded(world_size, 4) * 4
    for forward, backward in run_ranks(world_size, bytes_of_gathers, few, comm):
        share = num_bytes // world_size
        assert sorted(forward) == [(name, (world_size - 1) * share) for name in LAYERS]
        share = num_bytes // few
        assert sorted(backward) == [(name, (few - 1) * share) for name in LAYERS]


def memory_after_forward(rank: int, world_size: int, few: int) -> Any:
    import fsdpx

    model = shard(few, mp_policy=policy(torch.bfloat16))
    units = [layer._fsdpx_unit for layer in list(model)[: len(LAYERS)]]
    kept = lambda: [unit.post_forward.kept for unit in units]  # noqa: E731
    loss = model(batch(0, rank)).sum()
    sizes = [sum(piece.nbytes for piece in each.pieces) for each in kept()]
    freed = [unit.is_gathered for unit in units]
    loss.backward()
    after = kept()
    with torch.no_grad():
        model(batch(0, rank))
    return sizes, freed, after + kept(), fsdpx.describe(model)


def test_each_rank_keeps_its_part_from_forward_to_backward() -> None:
    num_bytes = padded(4, 2) * 2
    for sizes, gathered, later, described in run_ranks(4, memory_after_forward, 2):
        assert sizes == [num_bytes // 2] * len(LAYERS)
        assert not any(gathered)
        assert later == [None] * 2 * len(LAYERS)  # after backward, and without gradients
        assert described.memory.resharded == sum(sizes)
        assert [unit.post_forward_ranks for unit in described.units[1:]] == [2] * len(LAYERS)
        assert "shared by 2 from forward to backward" in str(described)


# ---- Numbers


def train(
    rank: int, few: bool | int, way: str, options: dict[str, Any]
) -> tuple[list[Tensor], list[float]]:
    """Weights and losses of three steps of two micro-batches."""
    options = dict(options)
    if (shape := options.pop("shape", None)) is not None:
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = shard(few, mp_policy=policy(options.pop("dtype", None)), **options)
    if way == "copied":
        model = copy.deepcopy(model)
    run = Recomputed(*list(model)[: len(LAYERS)]) if way == "recomputed" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        if way == "together":  # two forwards, then their backwards
            pair = [run(batch(2 * step + i, rank)).square().mean() for i in range(2)]
        for i in range(2):
            loss = pair[i] if way == "together" else run(batch(2 * step + i, rank)).square().mean()
            with torch.no_grad():
                losses.append(run(batch(9, rank)).sum().item())
            loss.backward(retain_graph=way == "retained")
            if way == "retained":
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if way == "converted" and step == 0:
            model.double().float()
        if way == "reset" and step == 1:
            run(batch(0, rank))
            model.reset_iter_state()
    return [parameter.to_local().detach().clone() for parameter in model.parameters()], losses


def same_as_all(rank: int, world_size: int, few: int, way: str, options: dict[str, Any]) -> bool:
    weights, losses = train(rank, few, way, options)
    expected, expected_losses = train(rank, True, way, options)
    assert losses == expected_losses
    assert len(weights) == 2 * len(LAYERS)
    return all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


WAYS = ("plain", "recomputed", "together", "retained", "copied", "converted", "reset")


@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_those_of_resharding_to_all(way: str) -> None:
    assert all(run_ranks(4, same_as_all, 2, way, {}))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16},
        {"comm": "c10d"},
        {"prefetch": 0},
        {"prefetch": 2, "granularity": "parameter"},
    ],
    ids=str,
)
def test_numbers_with_other_options(options: dict[str, Any]) -> None:
    assert all(run_ranks(4, same_as_all, 2, "plain", options))


def test_smaller_groups_lie_within_a_replica() -> None:
    assert all(run_ranks(8, same_as_all, 2, "plain", {"shape": (2, 4)}, timeout=120))


# ---- What the user says later, and what is refused


def change_mind(rank: int, world_size: int) -> tuple[list[Counter[int]], list[str]]:
    model = shard(2)
    x = batch(0, rank).requires_grad_()

    def step() -> None:
        model(x).sum().backward()

    step()
    found = []
    for set_it in (
        lambda: None,
        lambda: model[1].set_reshard_after_backward(False),
        lambda: model[0].set_reshard_after_forward(True),
        lambda: model[2].set_reshard_after_forward(False),
    ):
        set_it()
        step()
        found.append(Counter(n for _, n in gather_records(model, step)))
    errors = []
    try:
        model.set_reshard_after_forward(2)
    except ValueError as error:
        errors.append(str(error))
    loss = model(x).sum()
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    try:
        loss.backward()
    except RuntimeError as error:
        errors.append(str(error))
    return found, errors


def test_what_the_user_says_later_wins() -> None:
    num_bytes = padded(4, 4) * 4
    among_all, among_few = 3 * num_bytes // 4, num_bytes // 2
    found, errors = run_ranks(4, change_mind)[0]
    assert found[0] == {among_all: 3, among_few: 3}
    assert "give True or False" in errors[0]
    assert found[1][among_few] == 2  # what stays after backward is gathered among all
    assert found[2][among_few] == 1
    assert found[3][among_few] == 0
    assert "parameters of unit '0' were changed" in errors[1]


def refuse(rank: int, world_size: int) -> list[str]:
    from fsdpx import fully_shard

    messages = []
    for options in ({"reshard_after_forward": 3}, {"reshard_after_forward": 2, "zero_stage": 2}):
        try:
            fully_shard(nn.Linear(4, 4), **options)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_sizes_that_are_no_divisors_are_refused() -> None:
    for no_divisor, stage in run_ranks(4, refuse):
        assert "a divisor of the number of ranks that share the parameters (4)" in no_divisor
        assert "contradicts zero_stage=2" in stage
