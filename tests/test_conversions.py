"""`to(dtype)`, `half()` and their kin on sharded models: training goes on as on a plain module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from beside import relative
from models import MODELS, ModelCase, loss_of, make_batch, make_model, mlp
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdpx
from fsdpx import DesyncError, MixedPrecisionPolicy, ShardedTensor, fully_shard
from fsdpx.unit import unit_of

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def shard(name: str, model: nn.Module, **options: Any) -> Any:
    for module in MODELS[name].units(model):
        fully_shard(module, **options)
    return fully_shard(model, **options)


def wrap(name: str, model: nn.Module, **options: Any) -> Any:
    kinds = {type(module) for module in MODELS[name].units(model)}
    return fsdpx.FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy(kinds))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor.detach()


class Pair:
    """A sharded model and a plain one that sees the batches of all ranks, with an optimizer each
    that was made first.
    """

    def __init__(self, rank: int, world_size: int, name: str, make: Any, **options: Any) -> None:
        self.rank, self.world_size, self.name = rank, world_size, name
        self.reference = make_model(name)
        self.model = make(name, copy.deepcopy(self.reference), **options)
        self.models = (self.model, self.reference)
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in self.models]
        self.limit = LIMITS[torch.float64]  # of the least precise dtype so far
        self.error = 0.0  # the largest, as a part of the limit

    def backward(self, number: int) -> None:
        loss_of(self.model, self._batch(number, self.rank)).backward()
        for rank in range(self.world_size):
            (loss_of(self.reference, self._batch(number, rank)) / self.world_size).backward()

    def _batch(self, number: int, rank: int) -> Any:
        inputs, targets = make_batch(self.name, step=number, rank=rank)
        if inputs.is_floating_point():
            inputs = inputs.to(next(self.reference.parameters()).dtype)
        return inputs, targets

    def step(self, set_to_none: bool = True) -> None:
        self.compare()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none)

    def compare(self) -> None:
        pairs = zip(self.model.parameters(), self.reference.parameters(), strict=True)
        for mine, plain in pairs:
            assert mine.dtype == mine.to_local().dtype == plain.dtype
            assert (mine.grad is None) == (plain.grad is None)
            found = [(whole(mine), plain.detach())]
            if plain.grad is not None:
                assert mine.grad.dtype == plain.dtype
                found.append((whole(mine.grad), plain.grad))
            self.limit = max(self.limit, LIMITS.get(plain.dtype, 0.0))
            self.error = max(self.error, *(relative(a, b) / self.limit for a, b in found))

    def convert(self, dtype: torch.dtype, path: str = "") -> None:
        self.model.get_submodule(path).to(dtype)
        self.reference.get_submodule(path).to(dtype)


def convert_at_once(
    rank: int, world_size: int, name: str, make: Any, dtype: torch.dtype, options: dict[str, Any]
) -> float:
    """Before the first forward."""
    pair = Pair(rank, world_size, name, make, **options)
    pair.convert(dtype)
    for number in range(2):
        pair.backward(number)
        pair.step()
    return pair.error


def convert_there_and_back(
    rank: int, world_size: int, name: str, make: Any, dtype: torch.dtype, options: dict[str, Any]
) -> float:
    """Between steps, with state in the optimizer, and gradients that are added to."""
    pair = Pair(rank, world_size, name, make, **options)
    for number in range(4):
        if number in (1, 3):
            pair.convert(dtype if number == 1 else torch.float32)
        pair.backward(2 * number)
        pair.backward(2 * number + 1)
        pair.step(set_to_none=number == 1)
    return pair.error


MOMENTS = [convert_at_once, convert_there_and_back]
FORMS: dict[str, tuple[str, Any, torch.dtype, dict[str, Any]]] = {
    "stage 3": ("gpt", shard, torch.float64, {}),
    "stage 2": ("gpt", shard, torch.float64, {"zero_stage": 2}),
    "stage 1": ("gpt", shard, torch.float64, {"zero_stage": 1}),
    "c10d": ("gpt", shard, torch.float64, {"comm": "c10d"}),
    "whole parameters": ("gpt", shard, torch.float64, {"granularity": "parameter"}),
    "FSDP1": ("gpt", wrap, torch.float64, {}),
    "narrower": ("gpt", shard, torch.bfloat16, {}),
    "buffers": ("conv", shard, torch.float64, {}),
    "frozen and tied": ("tied_frozen", shard, torch.float64, {}),
    "lists of parameters": ("lstm", shard, torch.float64, {}),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("form", FORMS)
def test_training_goes_on_in_the_other_dtype(form: str, moment: Callable[..., float]) -> None:
    name, make, dtype, options = FORMS[form]
    assert max(run_ranks(2, moment, name, make, dtype, options)) <= 1


def with_replicas(rank: int, world_size: int) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return convert_there_and_back(
        rank, world_size, "tied_frozen", shard, torch.float64, {"mesh": mesh}
    )


def test_replicas_are_converted_too() -> None:
    assert max(run_ranks(4, with_replicas)) <= 1


class Mixed(nn.Module):
    """One unit with parameters of several dtypes, one of them of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 5).bfloat16()
        self.third = nn.Linear(5, 7)
        self.shift = nn.Parameter(torch.arange(7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x * self.shift


def _mixed_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, generator=generator), torch.randint(0, 7, (4,), generator=generator)


def convert_parts(rank: int, world_size: int, paths: Sequence[str]) -> float:
    MODELS["mixed"] = ModelCase(Mixed, lambda m: [], _mixed_batch)
    pair = Pair(rank, world_size, "mixed", shard)
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["momentum"] = 0.0
    for number in range(2):
        pair.backward(number)
        pair.step()
    for path in paths:
        pair.convert(torch.float64, path)
        for number in range(2):
            pair.backward(number)
            pair.step()
    return pair.error


@pytest.mark.parametrize("paths", [["third", "first"], ["second", ""]], ids=str)
def test_a_part_of_a_unit_may_be_converted(paths: Sequence[str]) -> None:
    assert max(run_ranks(2, convert_parts, paths)) <= 1


def policy_of_both(rank: int, world_size: int) -> list[bool]:
    """Whether a model that was sharded and then converted does as one that was converted first."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = shard("gpt", make_model("gpt"), mp_policy=policy).double(), make_model("gpt").double()
    shard("gpt", models[1], mp_policy=policy)
    for number in range(3):
        for model in models:
            output = model(make_batch("gpt", step=number, rank=rank)[0])
            assert output.dtype == torch.bfloat16
            output.float().square().sum().backward()
            torch.optim.SGD(model.parameters(), 1e-3).step()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return [a.dtype == b.dtype == torch.float64 and torch.equal(a, b) for a, b in pairs]


def test_the_policy_applies_to_the_new_dtype() -> None:
    assert all(map(all, run_ranks(2, policy_of_both)))


# ---- What stays


def linears(**options: Any) -> Any:
    model = mlp()
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


X = torch.linspace(-1, 1, 24).view(4, 6)


@pytest.mark.parametrize("inner", [False, True], ids=["by the unit", "by a module within"])
def test_objects_and_what_hangs_on_them_stay(inner: bool) -> None:
    model = fully_shard(mlp())
    weight: Any = model[0].weight
    before, seen = id(weight), []
    weight.no_decay = True
    weight.register_hook(lambda gradient: seen.append(gradient.dtype))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    (model[0] if inner else model).double()
    model[2].double()
    model(X.double()).sum().backward()
    assert id(model[0].weight) == before
    assert weight.no_decay
    assert weight._leaf is unit_of(model).parameters[0].leaf
    assert seen == [torch.float64, torch.float64]


@pytest.mark.parametrize("kept", ["stage 2", "unshard"])
def test_nothing_that_was_gathered_before_is_read(kept: str) -> None:
    model = linears(zero_stage=2) if kept == "stage 2" else linears()
    reference = mlp()
    model(X)
    if kept == "unshard":
        model[0].unshard()
    for each in (model, reference):
        each.double()
        with torch.no_grad():
            each[0].weight.mul_(1 + 2**-40)
    assert torch.equal(model(X.double()), reference(X.double()))


def test_copies_of_a_converted_model() -> None:
    model = linears().double()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(X.double()), model(X.double()))
    assert twin[0].weight.to_local().dtype == torch.float64


def test_memory_follows() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.ones(2, 64))
    before = fsdpx.describe(model)
    model.half()
    after = fsdpx.describe(model)
    for part in ("shards", "arenas", "unit_gradients", "send_buffers"):
        assert 2 * getattr(after.memory, part) == getattr(before.memory, part) > 0
    model(torch.ones(2, 64).half())
    assert fsdpx.describe(model) == after


def test_conversions_that_change_nothing_are_allowed_anywhere() -> None:
    class Careful(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.to(x.dtype).to(x.device) and x)

    model = fully_shard(nn.Sequential(fully_shard(Careful(6, 6))))
    output = model(X)
    model.to("cpu").float()
    output.sum().backward()
    assert model[0].weight.grad is not None


def test_whole_parameters_may_be_converted_while_they_are_edited() -> None:
    model = linears()
    with fsdpx.full_parameters(model):
        model.double()
        with torch.no_grad():
            model[0].weight.fill_(0.25)
    assert torch.equal(model[0].weight.full_tensor(), torch.full((8, 6), 0.25).double())
    assert model(X.double()).dtype == torch.float64


def test_gradients_that_to_empty_moved_are_added_to() -> None:
    model = linears()
    model(X).sum().backward()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
            parameter.grad.fill_(1.0)
    model(X).sum().backward()
    model_alone = linears()
    model_alone(X).sum().backward()
    for moved, alone in zip(model.parameters(), model_alone.parameters(), strict=True):
        assert torch.equal(moved.grad, alone.grad + 1)


# ---- What is refused


def test_a_conversion_between_forward_and_backward_is_refused() -> None:
    model, reference = linears(), mlp()
    output = model(X)
    model.double()
    with pytest.raises(RuntimeError, match=r"'weight' of unit '0' was converted .*float64 on cpu"):
        output.sum().backward()
    model(X.double()).sum().backward()
    reference.double()(X.double()).sum().backward()
    for mine, plain in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize("needs_weights", [True, False])
def test_a_backward_of_a_forward_from_before_is_refused(needs_weights: bool) -> None:
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(6, 6))))
    output = model(X.clone().requires_grad_(needs_weights))
    model.double()
    model(X.double())
    with pytest.raises(RuntimeError, match=r"unit '0' no longer exists|before it was converted"):
        output.sum().backward()


def test_a_conversion_inside_a_forward_is_refused() -> None:
    class Hasty(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.double() and x)

    model = fully_shard(nn.Sequential(fully_shard(Hasty(6, 6))))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"'weight' of unit '0' was converted"):
        model(X)


def test_gradients_that_wait_for_their_reduction_keep_their_dtype() -> None:
    model = linears()
    with fsdpx.no_sync(model):
        model(X).sum().backward()
    model.double()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"unit '0' was converted .* zero_grad\(\)"):
            model(X.double())
    model.zero_grad()
    assert model(X.double()).dtype == torch.float64


def test_flat_parameters_from_before_are_refused() -> None:
    model = linears()
    optimizer = torch.optim.SGD(fsdpx.flat_parameters(model), 0.1)
    model(X).sum().backward()
    model.double()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'0.weight to 0.bias' is of the model before"):
            optimizer.step()
        model(X.double()).sum().backward()
    before = model[0].weight.full_tensor()
    torch.optim.SGD(fsdpx.flat_parameters(model), 0.1).step()
    assert not torch.equal(model[0].weight.full_tensor(), before)


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda m: m.to("meta"), r"'weight' of unit '0' is on the meta device"),
        (lambda m: m.to(torch.complex64), r"'weight' of unit '0' was converted to torch\.complex"),
        (
            lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.double())),
            r"'weight' of unit '0', .*float32 on cpu, was replaced .* torch\.float64",
        ),
    ],
    ids=["meta", "complex", "assigned"],
)
@pytest.mark.filterwarnings("ignore:Complex modules")
def test_what_shards_cannot_follow_is_refused(convert: Callable[[Any], Any], message: str) -> None:
    model = linears()
    convert(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            model(X)


def test_data_of_another_dtype_is_refused() -> None:
    weight = linears()[0].weight
    with pytest.raises(RuntimeError, match=r"'weight' is sharded: \.data takes"):
        weight.data = weight.data.double()
    assert weight.dtype == torch.float32


def convert_apart(rank: int, world_size: int, comm: str, stage: int, dtypes: Any) -> str:
    model = linears(comm=comm, zero_stage=stage)
    model(X).sum().backward()
    model.to(dtypes[rank])
    with pytest.raises(DesyncError) as caught:
        model(X.to(dtypes[rank])).sum().backward()
    model.reset_iter_state()
    model.double()
    model(X.double()).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.float64), (torch.float16, torch.bfloat16)],
    ids=["one rank", "differently"],
)
@pytest.mark.parametrize(("comm", "stage"), [("shm", 3), ("c10d", 3), ("shm", 2)])
def test_ranks_that_convert_differently_are_told(comm: str, stage: int, dtypes: Any) -> None:
    for message in run_ranks(2, convert_apart, comm, stage, dtypes):
        assert f"of unit '0, converted to {dtypes[1]}'" in message
        assert "rank 0 does" in message
        assert "rank 1 does" in message
