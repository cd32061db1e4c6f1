"""Ranks that do different things: the right numbers, or the same named error everywhere."""

import copy
import datetime
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, stop_pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdpx
from fsdpx import DesyncError, fully_shard

KINDS = ("shm", "c10d")


class Chain(nn.Module):
    """Five layers and a head of its own; a skipped one runs, but its output is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
        self.head = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor, skipped: set[int]) -> Tensor:
        for index, layer in enumerate(self.layers):
            y = layer(x)
            if index not in skipped:
                x = torch.tanh(y)
        return x @ self.head


class Branches(nn.Module):
    """Two layers, of which one runs."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, out_features)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.first(x) if branch == 0 else self.second(x)


def shard(model: nn.Module, kind: str, prefetch: int = 1) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, comm=kind, prefetch=prefetch)
    return fully_shard(model, comm=kind, prefetch=prefetch)


def inputs(rank: int) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(rank))


def train_skipping(
    rank: int,
    world_size: int,
    kind: str,
    steps: list[list[set[int]]],
    frozen: Iterable[int] = (),
    prefetch: int = 1,
) -> list[float]:
    """The largest gradient error of each step, with skips by rank."""
    torch.manual_seed(0)
    reference = Chain()
    for index in frozen:
        reference.layers[index].requires_grad_(False)
    model = shard(copy.deepcopy(reference), kind, prefetch)
    errors = []
    for skipped in steps:
        model(inputs(rank), skipped[rank]).sum().backward()
        for each in range(world_size):
            (reference(inputs(each), skipped[each]).sum() / world_size).backward()
        worst = 0.0
        for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
            assert (sharded.grad is None) == (whole.grad is None)
            if whole.grad is not None:
                worst = max(worst, (sharded.grad.full_tensor() - whole.grad).abs().max().item())
        errors.append(worst)
        model.zero_grad()
        reference.zero_grad()
    return errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skipped", [[set(), {2}], [{1}, {3}], [{0, 4}, set()], [{2}, {2}]])
def test_unit_unused_on_some_ranks_counts_as_zeros(kind: str, skipped: list[set[int]]) -> None:
    assert run_ranks(2, train_skipping, kind, 4 * [skipped]) == [[0.0] * 4] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("frozen", [{3}, {1, 2, 3}, {0, 1, 4}])
def test_frozen_unit_unused_on_some_ranks(kind: str, frozen: set[int], prefetch: int) -> None:
    steps = [[set(), frozen], [frozen, set()], [frozen, frozen], [{1, 2}, {3}], [{4}, {0, 2}]]
    assert run_ranks(2, train_skipping, kind, steps, frozen, prefetch) == [[0.0] * 5] * 2


def run_branches(rank: int, world_size: int, kind: str, out_features: int) -> str:
    torch.manual_seed(0)
    model = shard(Branches(out_features), kind)
    try:
        model(inputs(rank), rank).sum().backward()
    except DesyncError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_features", [6, 9])
def test_different_branches_are_an_error_that_names_both(kind: str, out_features: int) -> None:
    try:
        messages = run_ranks(2, run_branches, kind, out_features)
    finally:
        stop_pool(2)  # a communicator whose ranks differ stays broken
    for message in messages:
        assert "rank 0 does all_gather of unit 'first'" in message
        assert "rank 1 does all_gather of unit 'second'" in message


def edit_and_forward(rank: int, world_size: int, kind: str, kept: bool) -> float:
    """Writes to the shards, on rank 1 in more steps than on rank 0, between two forwards."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1, bias=False))
    model = shard(copy.deepcopy(reference), kind)
    model.set_reshard_after_forward(not kept)
    x = inputs(0)
    with torch.no_grad():
        model(x)
        for parameter in model.parameters():
            local = parameter.to_local()
            for piece in local.split(1 + 2 * (1 - rank)) if local.numel() else ():
                piece.mul_(2.0)
        for whole in reference.parameters():
            whole.mul_(2.0)
        return (model(x) - reference(x)).abs().max().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [False, True])
def test_writes_need_not_be_alike_on_all_ranks(kind: str, kept: bool) -> None:
    assert run_ranks(2, edit_and_forward, kind, kept) == [0.0, 0.0]


def wider(rank: int) -> nn.Module:
    return nn.Linear(6, 6 + rank)  # as many bytes: segments are padded


def renamed(rank: int) -> nn.Module:
    module = nn.Linear(6, 6)
    module.register_parameter(f"scale{rank}", nn.Parameter(torch.ones(6)))
    return module


def frozen_on_one(rank: int) -> nn.Module:
    return nn.Linear(6, 6).requires_grad_(rank == 0)


def forward_with_error(model: nn.Module, rank: int) -> str:
    try:
        model(inputs(rank)).sum().backward()
    except DesyncError as error:
        return str(error)
    return "no error"


def run_other_models(rank: int, world_size: int, kind: str) -> list[str]:
    """What the first forward of models that ranks make differently says."""
    messages = []
    for make in (wider, renamed, frozen_on_one):
        messages.append(forward_with_error(fully_shard(make(rank), comm=kind), rank))
        fsdpx.comm.create(kind=kind).close()  # the next model connects anew
    return messages


def run_frozen_later(rank: int, world_size: int, kind: str) -> list[str]:
    """What the forward after freezing a parameter on one rank says."""
    model = fully_shard(nn.Linear(6, 6), comm=kind)
    assert forward_with_error(model, rank) == "no error"
    model.weight.requires_grad_(rank == 0)
    message = forward_with_error(model, rank)
    fsdpx.comm.create(kind=kind).close()
    return [message]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", [run_other_models, run_frozen_later])
def test_other_parameters_are_an_error_at_the_next_gather(
    kind: str, run: Callable[[int, int, str], list[str]]
) -> None:
    for messages in run_ranks(2, run, kind):
        for message in messages:
            assert "rank 1 does all_gather of unit" in message
            assert "or parameters (names, shapes, requires_grad)" in message


def norm_of_gradient(model: nn.Module) -> object:
    return model.weight.grad.norm()


def whole_weight(model: nn.Module) -> object:
    return model.weight.full_tensor()


def first_forward(model: nn.Module) -> object:
    return model(inputs(0))


def do_alone(rank: int, world_size: int, do: Callable[[nn.Module], object]) -> str:
    """What rank 0 gets when it alone does what needs all ranks."""
    limit = datetime.timedelta(seconds=1)
    mesh = DeviceMesh.from_group(dist.new_group([0, 1], timeout=limit), "cpu")
    model = fully_shard(nn.Linear(6, 6), mesh=mesh)
    if do is not first_forward:
        model(inputs(rank)).sum().backward()
    if rank > 0:
        return ""
    with pytest.raises(DesyncError) as raised:
        do(model)
    return str(raised.value)


@pytest.mark.parametrize(
    ("do", "what"),
    [
        (norm_of_gradient, "fsdpx: the sum of sharded values needs all ranks"),
        (whole_weight, "fsdpx: the whole value of parameter 'weight' needs all ranks"),
        (first_forward, "fsdpx: rank 0 is to "),
    ],
)
def test_a_rank_that_is_alone_is_told(do: Callable[[nn.Module], object], what: str) -> None:
    assert run_ranks(2, do_alone, do)[0].startswith(what)
