"""What torch's own tests of FSDP2 check and no other test here does, on two ranks."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from conformance.parts import (
    Pair,
    assert_close,
    assert_grads,
    backward_of_all_ranks,
    batch_of,
    grads_of,
    mean_square,
    shard_linears,
    small_mlp,
    whole,
)
from ranks import run_ranks
from torch import Tensor, nn

import fsdpx
from fsdpx import FSDPModule, MixedPrecisionPolicy, ShardedTensor, fully_shard
from fsdpx.unit import units

# ---- Training


def train_child_alone(rank: int, world_size: int) -> None:
    """A unit's own forward and backward, then the root's: gradients add up."""
    pair = Pair(small_mlp())
    for each, ranks in ((pair.model, [rank]), (pair.reference, range(world_size))):
        for number in ranks:
            (mean_square(each[0], batch_of(number)) / len(ranks)).backward()
    assert_grads(pair.model[0], grads_of(pair.reference[0]))
    pair.backward(rank, world_size)
    pair.assert_grads()
    assert not any(unit.is_gathered for unit in units(pair.model))


def test_a_unit_below_the_root_trains_alone() -> None:
    run_ranks(2, train_child_alone)


def iterate_in_every_phase(rank: int, world_size: int) -> None:
    """`parameters()` yields the same sharded objects before, in and after forward and backward."""
    model = shard_linears(small_mlp())
    first = list(model.named_parameters())
    seen = []

    def look(*args: object) -> None:
        seen.append(list(model.named_parameters()))

    model[0].register_forward_pre_hook(look)
    model[2].register_forward_hook(look)
    model[2].register_full_backward_hook(look)
    mean_square(model, batch_of(rank)).backward()
    look()
    assert len(seen) == 4
    for names in seen:
        for (name, parameter), (name_then, parameter_then) in zip(first, names, strict=True):
            assert name == name_then
            assert parameter is parameter_then
            assert isinstance(parameter, ShardedTensor)


def test_parameters_are_sharded_ones_in_every_phase() -> None:
    run_ranks(2, iterate_in_every_phase)


def keep_after_backward(rank: int, world_size: int) -> None:
    """Micro-batches that gather once between them."""
    pair = Pair(small_mlp(), reshard_after_forward=False)
    pair.model.set_reshard_after_backward(False)
    pair.backward(rank, world_size)
    with fsdpx.record_timeline(pair.model) as timeline:
        pair.backward(rank, world_size, step=1)
        pair.model.set_reshard_after_backward(True)
        pair.backward(rank, world_size, step=2)
    gathers = [record for record in timeline.records if record.operation == "all_gather"]
    assert not gathers
    pair.assert_grads()
    assert not any(unit.is_gathered for unit in units(pair.model))


def test_micro_batches_without_resharding_gather_once() -> None:
    run_ranks(2, keep_after_backward)


# ---- Outputs and inputs of any kind


@dataclasses.dataclass
class Data:
    hidden: Tensor
    name: str = "hidden"


class Named(NamedTuple):
    hidden: Tensor
    nothing: None = None


class Wraps(nn.Module):
    """Takes and returns its tensor in a container."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.kind = kind

    def forward(self, value: Any) -> Any:
        y = torch.tanh(self.linear(unwrap(value)))
        return {"hidden": y, "text": "x"} if self.kind is dict else wrap(self.kind, y)


def wrap(kind: Any, y: Tensor) -> Any:
    return [[y], None] if kind is list else (1, (y,)) if kind is tuple else kind(y)


def unwrap(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        if isinstance(value, Data | Named):
            value = value.hidden
        elif isinstance(value, dict):
            value = value["hidden"]
        else:
            value = value[-1] if isinstance(value, tuple) else value[0]
    return value


def pass_containers(rank: int, world_size: int, kind: Any) -> None:
    torch.manual_seed(0)
    pair = Pair(nn.Sequential(Wraps(kind), Wraps(kind), Wraps(kind)), shard_wraps)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return unwrap(model(x)).pow(2).mean()

    for step in range(2):
        pair.backward(rank, world_size, loss, step=step)
    pair.assert_grads()


def shard_wraps(model: nn.Sequential) -> None:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)


@pytest.mark.parametrize("kind", [list, tuple, dict, Data, Named])
def test_activations_in_containers(kind: Any) -> None:
    run_ranks(2, pass_containers, kind)


# ---- Frozen


def freeze_in_groups(rank: int, world_size: int, frozen: list[int], reshard: bool) -> None:
    """Some whole units frozen, whichever comes first; one is used twice."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(layers[0], layers[1], layers[2], layers[1])
    for number in frozen:
        layers[number].requires_grad_(False)
    pair = Pair(model, reshard_after_forward=reshard)
    for step in range(2):
        pair.zero_grad()
        pair.backward(rank, world_size, step=step)
        pair.assert_grads()
    for parameter in pair.model.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
    assert not any(unit.is_gathered for unit in units(pair.model))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("frozen", [[0], [1], [2], [0, 1]])
def test_frozen_units(frozen: list[int], reshard: bool) -> None:
    run_ranks(2, freeze_in_groups, frozen, reshard)


# ---- Precision


class TwoInputs(nn.Module):
    """A block whose forward takes a tensor from outside the chain as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("offset", torch.ones(6))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.dtypes = [x.dtype, y.dtype, self.offset.dtype]
        return self.second(y + self.offset) + x


def mix_policies(rank: int, world_size: int) -> None:
    """Each unit casts for itself: an fp16 layer in an fp32 block in a bf16 root."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), TwoInputs())
    reference = copy.deepcopy(model)
    half = MixedPrecisionPolicy(torch.float16, torch.float32, output_dtype=torch.float32)
    fully_shard(model[1].second, mp_policy=half)
    fully_shard(model[1], mp_policy=MixedPrecisionPolicy(torch.float32))
    policy = MixedPrecisionPolicy(
        torch.bfloat16, output_dtype=torch.float64, cast_forward_inputs=False
    )
    fully_shard(model, mp_policy=policy)
    output = model(batch_of(rank).bfloat16())
    assert output.dtype == torch.float64
    assert model[1].dtypes == [torch.float32, torch.float32, torch.float32]
    output.pow(2).mean().backward()
    backward_of_all_ranks(reference, world_size)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert_grads(model, grads_of(reference), limit=5e-2)


def test_units_of_several_precisions() -> None:
    run_ranks(2, mix_policies)


# ---- Ignored parameters


def ignore_some(rank: int, world_size: int) -> None:
    """An ignored parameter in a nested module stays plain, local, and in the state dict."""
    model = small_mlp()
    ignored = {model[0].bias}
    expected = copy.deepcopy(model)
    mean_square(expected, batch_of(rank)).backward()
    for layer in (model[0], model[2]):
        fully_shard(layer, ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    assert type(model[0].bias) is nn.Parameter
    assert list(model.state_dict()) == list(expected.state_dict())
    mean_square(model, batch_of(rank)).backward()
    assert_close(model[0].bias.grad, expected[0].bias.grad, "this rank's own gradient")
    backward_of_all_ranks(expected, world_size)
    assert isinstance(model[0].weight.grad, ShardedTensor)


def test_ignored_parameters_stay_local() -> None:
    run_ranks(2, ignore_some)


# ---- State and classes


class Sub(nn.Sequential):
    """A class of the user's own."""

    def __init__(self, *layers: nn.Module, text: str = "") -> None:
        super().__init__(*layers)
        self.text = text


def test_class_of_a_sharded_module() -> None:
    first, second = Sub(nn.Linear(2, 2)), Sub(nn.Linear(2, 2))
    for each in (first, second):
        fully_shard(each)
    assert type(first) is type(second)
    assert type(first).__name__ == "FSDPSub"
    assert isinstance(first, FSDPModule)
    assert isinstance(first, Sub)
    assert type(first).__mro__[1:3] == (FSDPModule, Sub)
    made = type(first)(nn.Linear(3, 3), text="new")  # as `module.__class__(...)` does
    assert type(made) is Sub
    assert made.text == "new"


def test_modules_without_parameters() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
    assert isinstance(model[0], FSDPModule)
    model(torch.ones(1, 2)).sum().backward()
    assert model[1].weight.grad is not None


def state_is_sharded(rank: int, world_size: int) -> tuple[int, int]:
    model = shard_linears(small_mlp())
    optimizer = torch.optim.Adam(model.parameters())
    mean_square(model, batch_of(rank)).backward()
    optimizer.step()
    owned = sum(parameter.to_local().numel() for parameter in model.parameters())
    states = optimizer.state.values()
    state = sum(s[k].to_local().numel() for s in states for k in ("exp_avg", "exp_avg_sq"))
    assert all(whole(s["exp_avg"]).shape == p.shape for p, s in optimizer.state.items())
    return owned, state


def test_optimizer_state_is_sharded() -> None:
    owned = run_ranks(2, state_is_sharded)
    assert all(state == 2 * parameters for parameters, state in owned)
    assert sum(parameters for parameters, _ in owned) == sum(
        parameter.numel() for parameter in small_mlp().parameters()
    )
