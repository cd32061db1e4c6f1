"""Deep copies of sharded models, and what torch.nn.Module does to sharded parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from conformance.parts import shard_linears
from models import mlp
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdpx import FSDPModule, ShardedTensor, fully_shard
from fsdpx.fsdp1 import FullyShardedDataParallel
from fsdpx.unit import unit_of, units


def wrap(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def tied(model: nn.Module) -> nn.Module:
    """One unit of a list of modules that share a weight, and one around it."""
    model[2].weight = model[0].weight
    fully_shard([model[0], model[2]])
    return fully_shard(model)


SHARDED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fully_shard": shard_linears,
    "FSDP1": wrap,
    "list": lambda m: fully_shard(nn.Sequential(fully_shard(m[0]), m[1], m[2])),
}


def batch(seed: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, seed: int, lr: float) -> None:
    model.zero_grad()
    model(batch(seed)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr).step()


def values(model: nn.Module) -> list[Tensor]:
    whole = [p.full_tensor() if isinstance(p, ShardedTensor) else p for p in model.parameters()]
    return [tensor.detach().clone() for tensor in whole]


def _copies(rank: int, size: int, how: str, called_before: bool) -> None:
    model, reference = SHARDED[how](mlp()), mlp()
    if called_before:
        step(model, rank, 0.0)
    other = copy.deepcopy(model)
    assert type(other) is type(model)
    assert list(other.state_dict()) == list(model.state_dict())
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}
    assert not set(units(model)) & set(units(other))
    assert all(p.grad is None for p in other.parameters())
    step(other, rank, 0.1)  # trains on its own
    for mine, whole in zip(values(model), reference.parameters(), strict=True):
        assert torch.equal(mine, whole)
    step(model, rank, 0.1)
    for mine, copied in zip(values(model), values(other), strict=True):
        assert torch.equal(mine, copied)
    again = copy.deepcopy(other)
    del model, other
    again(batch()).sum().backward()


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("how", SHARDED)
def test_copies_are_sharded_models_of_their_own(how: str, called_before: bool) -> None:
    run_ranks(2, _copies, how, called_before)


def test_copies_keep_ties_lists_of_modules_and_settings() -> None:
    plain = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    plain[2].weight = plain[0].weight
    model = tied(copy.deepcopy(plain))
    model[0].set_gradient_divide_factor(3.0)
    model[0].set_reshard_after_backward(False)
    model[0].weight.requires_grad_(False)
    other = copy.deepcopy(model)
    unit = unit_of(other[0])
    assert unit is unit_of(other[2])
    assert unit.modules == (other[0], other[2])
    assert other[0].weight is other[2].weight
    assert unit.gradient_divisor == 3.0
    plain[0].weight.requires_grad_(False)
    for each in (other, plain):
        each(batch()).sum().backward()
    assert other[0].weight.grad is None
    assert torch.allclose(other[0].bias.grad.full_tensor(), plain[0].bias.grad / 3)


def test_copies_of_recurrent_modules() -> None:
    model = fully_shard(nn.LSTM(6, 5))
    output, _ = model(batch())
    other = copy.deepcopy(model)
    del model
    assert torch.equal(other(batch())[0], output)
    other(batch())[0].sum().backward()
    assert all(p.grad is not None for p in other.parameters())


def test_a_part_is_copied_as_a_model() -> None:
    model = shard_linears(mlp())
    model(batch())
    part = copy.deepcopy(model[0])
    assert isinstance(part, FSDPModule)
    assert torch.equal(part(batch()), nn.functional.linear(batch(), *values(model[0])))


def test_copies_in_forward_are_refused() -> None:
    class Copies(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            copy.deepcopy(self)
            return super().forward(x)

    with pytest.raises(RuntimeError, match=r"'FSDPCopies|'Copies' can't be copied while"):
        fully_shard(Copies(6, 6))(batch())


def test_copies_of_unsharded_attributes_are_sharded() -> None:
    model = shard_linears(mlp())
    model[0].unshard()
    other = copy.deepcopy(model)
    assert type(other[0].weight) is ShardedTensor
    assert torch.equal(other(batch()), model(batch()))


def _average(rank: int, size: int) -> float:
    model, reference = shard_linears(mlp()), mlp()
    averages = [
        AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in (model, reference)
    ]
    for seed in range(3):
        step(model, seed, 0.1)  # the same batch on all ranks
        step(reference, seed, 0.1)
        for average, each in zip(averages, (model, reference), strict=True):
            average.update_parameters(each)
    with torch.no_grad():
        return (averages[0](batch()) - averages[1](batch())).abs().max().item()


def test_averaged_model() -> None:
    assert max(run_ranks(2, _average)) < 1e-6


# ---- to(), half(), apply()


@pytest.mark.parametrize("how", ["fully_shard", "FSDP1"])
def test_conversions_that_change_nothing_keep_what_hangs_on_parameters(how: str) -> None:
    model = SHARDED[how](mlp())
    weight, seen = next(model.parameters()), []
    weight.no_decay = True
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    model.to("cpu").float()
    assert next(model.parameters()) is weight
    assert weight.no_decay
    weight.register_hook(lambda gradient: gradient * 0)
    model(batch()).sum().backward()
    assert seen == [(8, 6)]
    assert weight.grad.norm() == 0


def test_values_that_to_empty_and_init_give_are_those_of_the_next_forward() -> None:
    model, reference = mlp(), mlp()
    fully_shard(model, reshard_after_forward=False).set_reshard_after_backward(False)
    model(batch()).sum().backward()  # stays gathered
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    model.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
    torch.manual_seed(7)
    reference.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
    assert torch.equal(model(batch()), reference(batch()))


INITIALISERS: dict[str, Callable[[Tensor], object]] = {
    "kaiming": nn.init.kaiming_uniform_,
    "xavier": nn.init.xavier_normal_,
    "trunc": lambda p: nn.init.trunc_normal_(p, std=0.02),
    "orthogonal": nn.init.orthogonal_,
    "constant": lambda p: nn.init.constant_(p, 3.0),
    "normal": lambda p: p.data.normal_(),
    "data": lambda p: p.data.copy_(torch.arange(48.0).view(8, 6)),
    "data assigned": lambda p: setattr(p, "data", torch.arange(48.0).view(8, 6)),
    "copy": lambda p: p.detach().copy_(torch.ones(8, 6)),
    "zero": lambda p: p.data.zero_(),
}


def _initialise(rank: int, size: int) -> list[str]:
    wrong = []
    for name, initialise in INITIALISERS.items():
        model, reference = shard_linears(mlp()), mlp()
        for each in (model, reference):
            torch.manual_seed(3)
            with torch.no_grad():
                initialise(each[0].weight)
        if not torch.equal(model[0].weight.full_tensor(), reference[0].weight):
            wrong.append(name)
    return wrong


def test_initialisers_give_the_values_of_the_whole_parameter() -> None:
    """The same seed on all ranks, and yet no two shards repeat each other."""
    assert run_ranks(3, _initialise) == [[], [], []]
