"""Parameters and modules that change after `fully_shard`: managed, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conformance.parts import shard_linears
from models import mlp
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import fsdpx
from fsdpx import ShardedTensor, fully_shard
from fsdpx.unit import unit_of


def batch(rank: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def assert_trains_alike(model: nn.Module, reference: nn.Module) -> None:
    model.zero_grad()
    for each in (model, reference):
        each(batch()).square().sum().backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad.full_tensor(), gradients[name]), name


# ---- refused at the next forward

REFUSED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "module": (lambda m: m.add_module("new", nn.Linear(6, 6)), "'new.weight' .* was added after"),
    "attribute": (lambda m: setattr(m, "new", nn.Linear(6, 6)), "'new.weight' .* was added after"),
    "appended": (lambda m: m.append(nn.Linear(6, 6)), "'3.weight' .* was added after"),
    "inserted": (lambda m: m.insert(0, nn.Linear(6, 6)), "'0.weight' .* was added after"),
    "nested": (lambda m: setattr(m[1], "new", nn.Linear(6, 6)), "'1.new.weight' .* was added"),
    "lazy": (lambda m: m.append(nn.LazyLinear(3)), "'3.weight' .* was added after"),
    "parameter": (lambda m: m.register_parameter("p", nn.Parameter(torch.ones(2))), "'p' .* added"),
    "in a unit": (lambda m: setattr(m[0], "p", nn.Parameter(torch.ones(2))), "'p' of unit '0'"),
    "larger": (
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(9, 6))),
        r"'weight' of unit '0', \(8, 6\).*was replaced after fully_shard by \(9, 6\)",
    ),
    "other dtype": (
        lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(8).bfloat16())),
        r"'bias' of unit '0'.*was replaced after fully_shard by \(8,\) torch.bfloat16",
    ),
    "tied to another unit": (
        lambda m: setattr(m[0], "bias", m[2].bias),
        "'bias' of unit '0' is '2.bias' of another unit since fully_shard",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("called_before", [False, True])
def test_refused_by_name_at_every_further_forward(what: str, called_before: bool) -> None:
    model = shard_linears(mlp())
    if called_before:
        model(batch())
    change, message = REFUSED[what]
    change(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            model(batch())


def _added_on_all_ranks(rank: int, world_size: int) -> str:
    model = shard_linears(mlp())
    model(batch(rank)).sum().backward()
    model[0].extra = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError) as caught:
        model(batch(rank))
    return str(caught.value)


def test_every_rank_refuses() -> None:
    messages = run_ranks(2, _added_on_all_ranks)
    assert len(set(messages)) == 1
    assert "'extra' of unit '0' was added" in messages[0]


REFUSED_AT_ONCE: dict[str, Callable[[nn.Module], object]] = {
    "norm of rows, by hook": nn.utils.weight_norm,
    "norm of rows": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("what", REFUSED_AT_ONCE)
def test_what_looks_at_whole_weights_after_wrapping_is_refused_at_once(what: str) -> None:
    model = shard_linears(mlp())
    with pytest.raises(RuntimeError, match=r"'weight' .* is sharded"):
        REFUSED_AT_ONCE[what](model[0])


def test_a_mask_put_on_after_wrapping_is_refused_at_the_next_forward() -> None:
    model = shard_linears(mlp())
    prune.identity(model[0], "weight")
    with pytest.raises(RuntimeError, match=r"'0\.weight' .* is sharded"):
        model(batch())


# ---- managed


def test_a_new_module_with_a_unit_of_its_own_is_managed() -> None:
    model = shard_linears(mlp())
    model(batch())
    torch.manual_seed(1)
    model.append(fully_shard(nn.Linear(6, 3)))
    reference = mlp()
    torch.manual_seed(1)
    reference.append(nn.Linear(6, 3))
    assert_trains_alike(model, reference)
    assert unit_of(model[3]).listener is unit_of(model).listener
    assert unit_of(model[3]).name == "3"


@pytest.mark.parametrize("called_before", [False, True])
def test_ties_within_a_unit_are_managed(called_before: bool) -> None:
    make = lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))  # noqa: E731
    torch.manual_seed(0)
    reference = make()
    torch.manual_seed(0)
    model = fully_shard(make())
    if called_before:
        model(batch()).sum().backward()
    for each in (model, reference):
        each[1].weight = each[0].weight
    assert_trains_alike(model, reference)
    assert len(list(model.parameters())) == 3


def test_removed_modules_are_not_missed() -> None:
    model, reference = shard_linears(mlp()), mlp()
    model(batch()).sum().backward()
    for each in (model, reference):
        each[0] = nn.Identity()
        each[2] = nn.Identity()
        each.append(fully_shard(nn.Linear(6, 2)) if each is model else nn.Linear(6, 2))
    reference[3].load_state_dict({k: v.full_tensor() for k, v in model[3].state_dict().items()})
    assert_trains_alike(model, reference)


def test_parametrizations_after_wrapping_are_managed() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    model, reference = shard_linears(mlp()), mlp()
    for each in (model, reference):
        parametrize.register_parametrization(each[2], "weight", Twice())
    assert_trains_alike(model, reference)


def test_values_assigned_as_a_new_parameter_go_into_the_sharded_one() -> None:
    model, reference = shard_linears(mlp()), mlp()
    weight = model[0].weight
    new = torch.arange(48.0).view(8, 6) / 48
    for each in (model, reference):
        each[0].weight = nn.Parameter(new.clone())
    assert model[0].weight is weight
    assert_trains_alike(model, reference)


def test_assigning_a_frozen_parameter_freezes() -> None:
    model = shard_linears(mlp())
    model[0].weight = nn.Parameter(torch.ones(8, 6), requires_grad=False)
    model(batch()).sum().backward()
    assert not model[0].weight.requires_grad
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None


@pytest.mark.parametrize("sharded", [False, True])
def test_load_state_dict_with_assign_keeps_the_parameters(sharded: bool) -> None:
    torch.manual_seed(5)
    other = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    model = shard_linears(mlp())
    before = list(model.parameters())
    values = shard_linears(other).state_dict() if sharded else other.state_dict()
    model.load_state_dict(values, assign=True)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(model(batch()), other(batch()))


@pytest.mark.parametrize("sharded", [False, True])
def test_load_state_dict_with_assign_fills_a_model_on_the_meta_device(sharded: bool) -> None:
    torch.manual_seed(5)
    other = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    with torch.device("meta"):
        model = mlp()
    shard_linears(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = list(model.parameters())
    values = shard_linears(other).state_dict() if sharded else other.state_dict()
    model.load_state_dict(values, assign=True)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert torch.equal(model(batch()), other(batch()))
    model(batch()).sum().backward()
    optimizer.step()
    assert not torch.equal(model(batch()), other(batch()))


def test_a_model_that_is_partly_filled_names_what_is_missing() -> None:
    with torch.device("meta"):
        model = mlp()
    fully_shard(model)
    values = mlp().state_dict()
    del values["2.bias"]
    model.load_state_dict(values, assign=True, strict=False)
    with pytest.raises(RuntimeError, match=r"'2.bias' of unit 'Sequential' is on the meta device"):
        model(batch())


def test_functional_call_replaces_parameters_for_one_call() -> None:
    model, reference = shard_linears(mlp()), mlp()
    values = {k: nn.Parameter(torch.ones_like(v)) for k, v in reference.named_parameters()}
    expected = torch.func.functional_call(reference, values, batch())
    assert torch.equal(torch.func.functional_call(model, values, batch()), expected)
    assert torch.equal(model(batch()), reference(batch()))


def test_models_that_are_not_sharded_may_change() -> None:
    plain = mlp()
    plain.append(nn.Linear(6, 2))
    assert plain(batch()).shape == (4, 2)


# ---- the object stays


def test_the_parameter_object_becomes_the_sharded_one() -> None:
    model = mlp()
    weight = model[0].weight
    weight.no_decay = True
    shard_linears(model)
    assert model[0].weight is weight
    assert type(weight) is ShardedTensor
    assert isinstance(weight, nn.Parameter)
    assert weight.no_decay


def test_attributes_and_class_are_those_of_the_full_parameter_in_forward() -> None:
    class Special(nn.Parameter):
        pass

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert type(self.weight) is Special
            assert self.weight.scale == 3
            return super().forward(x)

    model = Looks(6, 6)
    model.weight = Special(model.weight.detach())
    model.weight.scale = 3
    fully_shard(model)(batch()).sum().backward()
    assert model.weight.grad is not None


def test_a_gradient_from_before_wrapping_is_added_to() -> None:
    model, reference = mlp(), mlp()
    for each in (model, reference):
        each(batch(1)).square().sum().backward()
    shard_linears(model)
    for each in (model, reference):
        each(batch()).square().sum().backward()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(sharded.grad.full_tensor(), whole.grad)


def test_a_backward_of_a_forward_before_wrapping_is_refused_by_name() -> None:
    model = mlp()
    loss = model(batch()).sum()
    shard_linears(model)
    with pytest.raises(RuntimeError, match="parameter 'bias' as it was before fully_shard"):
        loss.backward()
    model(batch()).sum().backward()


@pytest.mark.parametrize("before", [True, False])
def test_hooks_on_gradients(before: bool) -> None:
    model, reference = mlp(), mlp()
    seen = []
    if not before:
        shard_linears(model)
    for each in (model, reference):
        each[0].weight.register_hook(lambda gradient: gradient * 2)
    handle = model[0].weight.register_hook(lambda gradient: seen.append(gradient.shape))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad)))
    if before:
        shard_linears(model)
    assert_trains_alike(model, reference)
    assert seen == [(8, 6), ShardedTensor]
    handle.remove()
    model(batch()).sum().backward()
    assert seen[2:] == [ShardedTensor]


def test_hooks_on_gradients_of_gradients_are_refused() -> None:
    model = shard_linears(mlp())
    model(batch()).sum().backward()
    with pytest.raises(RuntimeError, match=r"'0\.weight' is no parameter of a sharded module"):
        model[0].weight.grad.register_hook(print)


def test_weak_references_follow_the_object() -> None:
    lstm = nn.LSTM(3, 4)
    assert lstm._flat_weight_refs  # torch holds its parameters weakly
    weight = lstm.weight_ih_l0
    fully_shard(lstm)
    assert lstm.weight_ih_l0 is weight
    assert lstm._flat_weight_refs[0]() is weight
    output, _ = lstm(torch.ones(2, 1, 3))
    output.sum().backward()
    assert weight.grad is not None


def test_registering_is_noticed_by_units_and_not_looked_for() -> None:
    model = shard_linears(mlp())
    model(batch())
    assert not any(unit.changed for unit in fsdpx.unit.units(model))
    model[0].extra = nn.ReLU()
    assert [unit.changed for unit in fsdpx.unit.units(model)] == [False, True, False]
    model(batch())
    assert not any(unit.changed for unit in fsdpx.unit.units(model))
