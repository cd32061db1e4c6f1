"""Whole parameters, initialisation and clipping of FullyShardedDataParallel."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdpx
from fsdpx import FullyShardedDataParallel as FSDP
from fsdpx import MixedPrecision, ShardedTensor, ShardingStrategy
from fsdpx.unit import units

LINEAR = ModuleWrapPolicy({nn.Linear})
HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def wrapped(**options: Any) -> Any:
    return FSDP(mlp(), auto_wrap_policy=LINEAR, **options)


def batch(rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 + rank))


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.full_tensor().clone() for n, p in model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# ---- summon_full_params


def check_summon(rank: int, world_size: int, mixed: bool) -> None:
    model, reference = wrapped(mixed_precision=HALF if mixed else None), mlp()
    plain = dict(reference.named_parameters())
    with FSDP.summon_full_params(model):
        found = dict(model.named_parameters())
        assert all(type(p) is nn.Parameter for p in found.values())
        assert_same(found, plain)
        assert list(model.state_dict()) == list(plain)
        assert model.module[0].weight is found["0.weight"]
        with torch.no_grad():
            found["0.weight"][1] = 2.0  # in place
            found["2.bias"].data.add_(1.0)  # behind autograd's back
            found["2.weight"].data = torch.full((5, 8), 3.0)  # other memory
    with torch.no_grad():
        plain["0.weight"][1] = 2.0
        plain["2.bias"].add_(1.0)
        plain["2.weight"].fill_(3.0)
    assert_same(whole(model), plain)
    assert all(isinstance(p, ShardedTensor) for p in model.parameters())

    for discard in ({"writeback": False}, {"writeback": False, "rank0_only": True}):
        with FSDP.summon_full_params(model, **discard), torch.no_grad():
            is_whole = [type(p) is nn.Parameter for p in model.parameters()]
            assert set(is_whole) == {rank == 0 or "rank0_only" not in discard}
            if all(is_whole):
                model.module[0].weight.zero_()
        assert_same(whole(model), plain)

    with FSDP.summon_full_params(model, recurse=False):  # the root has no parameters of its own
        assert all(isinstance(p, ShardedTensor) for p in model.parameters())
    with FSDP.summon_full_params(model.module[0], recurse=False), torch.no_grad():
        assert [type(p) is nn.Parameter for p in model.parameters()] == [True, True, False, False]
        model.module[0].bias.zero_()
    plain["0.bias"].data.zero_()
    assert_same(whole(model), plain)
    output = model(batch(rank))
    assert (output - reference(batch(rank))).abs().max() < (0.5 if mixed else 1e-6)
    output.sum().backward()


@pytest.mark.parametrize("mixed", [False, True])
def test_summon(mixed: bool) -> None:
    run_ranks(2, check_summon, mixed)


def check_gradients(rank: int, world_size: int, mixed: bool) -> None:
    model = wrapped(mixed_precision=HALF if mixed else None)
    model(batch(rank)).float().sum().backward()
    expected = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    with FSDP.summon_full_params(model, with_grads=True), torch.no_grad():
        assert_same({n: p.grad for n, p in model.named_parameters()}, expected)
        model.module[0].weight.grad.zero_()
        model.module[2].bias.grad = None
        with pytest.raises(RuntimeError, match=r"unit '0'.*with_grads=True"):
            model.module[0](batch(rank))
    expected["0.weight"].zero_()
    del expected["2.bias"]
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert grads.pop("2.bias") is None
    assert_same({n: g.full_tensor() for n, g in grads.items()}, expected)
    model.zero_grad()
    model(batch(rank)).float().sum().backward()
    again = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    assert torch.equal(again["2.weight"], expected["2.weight"])


@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_too(mixed: bool) -> None:
    run_ranks(2, check_gradients, mixed)


def check_forwards_inside(rank: int, world_size: int) -> None:
    model, reference = wrapped(), mlp()
    with FSDP.summon_full_params(model), torch.no_grad():
        model.module[0].weight.mul_(2.0)
        reference[0].weight.mul_(2.0)
        for _ in range(1 + 2 * rank):  # as many as each rank likes
            assert torch.equal(model(batch(rank)), reference(batch(rank)))
    low, other = wrapped(mixed_precision=HALF), wrapped(mixed_precision=HALF)
    with FSDP.summon_full_params(low), torch.no_grad():
        low.module[0].weight.mul_(2.0)
        inside = low(batch(rank))
    with FSDP.summon_full_params(other), torch.no_grad():
        other.module[0].weight.mul_(2.0)
    assert torch.equal(other(batch(rank)), inside)
    with FSDP.summon_full_params(low, writeback=False), torch.no_grad():
        low(batch(rank))
        low.module[0].weight.add_(1.0)
        with pytest.raises(RuntimeError, match="writeback=False throws away"):
            low(batch(rank))


def test_forwards_inside_see_edits() -> None:
    run_ranks(2, check_forwards_inside)


def test_summon_options() -> None:
    model = wrapped()
    with pytest.raises(ValueError, match="rank0_only=True needs writeback=False"):
        FSDP.summon_full_params(model, rank0_only=True).__enter__()
    with FSDP.summon_full_params(nn.Linear(2, 2)):
        pass
    holder = nn.ModuleList([model, wrapped()])
    with FSDP.summon_full_params(holder, offload_to_cpu=True):
        assert all(type(p) is nn.Parameter for p in holder.parameters())
        with FSDP.summon_full_params(holder):  # one inside another
            pass
        assert all(type(p) is nn.Parameter for p in holder.parameters())
    assert not any(unit.is_gathered for unit in units(holder))


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        assert type(module.weight) is nn.Parameter
        nn.init.constant_(module.weight, 0.5)
        module.bias.data.normal_()


def check_apply(rank: int, world_size: int, mixed: bool) -> None:
    model, reference = wrapped(mixed_precision=HALF if mixed else None), mlp()
    for each in (model, reference):
        torch.manual_seed(7)
        assert each.apply(initialise) is each
    assert_same(whole(model), dict(reference.named_parameters()))
    model(batch(rank)).sum().backward()


@pytest.mark.parametrize("mixed", [False, True])
def test_apply(mixed: bool) -> None:
    run_ranks(2, check_apply, mixed)


# ---- Initialisation


class Counted(nn.Module):
    """Resets parameters and buffers, and counts it; the scratch buffer is not saved."""

    def __init__(self, child: nn.Module | None = None) -> None:
        super().__init__()
        self.child = child
        self.weight = nn.Parameter(torch.empty(3, 4))
        self.register_buffer("scratch", torch.empty(4), persistent=False)
        self.register_buffer("flags", torch.empty(2, dtype=torch.bool))
        self.resets = 0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.resets += 1
        nn.init.normal_(self.weight)
        self.scratch.copy_(torch.rand(4))
        self.flags.fill_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.child is None else self.child(x)
        return (x @ self.weight.T @ self.weight) * self.scratch


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = Counted(Counted(Counted()))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.outer(x))


def states(model: nn.Module) -> dict[str, Tensor]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: t.full_tensor() if isinstance(t, ShardedTensor) else t for n, t in found.items()}


def check_meta(rank: int, world_size: int, sharding: str, by_function: bool) -> None:
    """Each module is reset once; afterwards all ranks have the first one's values."""
    options: dict[str, Any] = {"sync_module_states": True}
    if sharding == "hybrid":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("r", "s"))
        options |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    if by_function:

        def initialise(module: nn.Module) -> None:
            module.to_empty(device="cpu", recurse=False)
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

        options["param_init_fn"] = initialise
    with torch.device("meta"):
        net = Nested()
    counted = [m for m in net.modules() if isinstance(m, Counted)]
    resets = [m.resets for m in counted]
    torch.manual_seed(1 + rank)
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Counted}), **options)
    assert [m.resets for m in counted] == [n + 1 for n in resets]
    found = states(model)
    assert not any(t.is_meta for t in found.values())
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, found)
    for theirs in everyone:
        assert_same(theirs, everyone[0])
    torch.manual_seed(1)  # what the first rank drew, in order of wrapping
    plain = [torch.empty(3, 4).normal_() for _ in range(2 if by_function else 1)]
    assert torch.equal(everyone[0]["outer.child.child.weight"], plain[0])
    assert fsdpx.unequal_states(model) == []
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("world_size", "sharding", "by_function"),
    [(2, "flat", False), (2, "flat", True), (2, "hybrid", False), (4, "hybrid", False)],
)
def test_meta_device(world_size: int, sharding: str, by_function: bool) -> None:
    run_ranks(world_size, check_meta, sharding, by_function)


def check_sync(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        net = mlp(seed=rank)
        net.append(nn.BatchNorm1d(5))
        net[3].running_mean.fill_(rank)
        return net

    names = ["0.weight", "0.bias", "2.weight", "2.bias", "3.running_mean"]
    assert fsdpx.unequal_states(make()) == names
    without = FSDP(make())
    assert fsdpx.unequal_states(without) == ["3.running_mean"]  # pieces can't be compared
    model = FSDP(make(), sync_module_states=True, auto_wrap_policy=LINEAR)
    assert_same(whole(model[0]), dict(mlp(seed=0)[0].named_parameters()))
    assert model[3].running_mean.eq(0).all()
    with pytest.raises(ValueError, match=r"'0.weight' is sharded already"):
        fsdpx.sync_module_states(model)

    other = make()
    fsdpx.sync_module_states(other)
    assert fsdpx.unequal_states(other) == []
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    apart = fsdpx.fully_shard(make(), mesh=mesh)
    assert fsdpx.unequal_states(apart, mesh) == names


def test_different_initial_values_are_found_and_mended() -> None:
    run_ranks(2, check_sync)


def test_meta_device_errors() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    class Forgets(Bare):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.empty(2), persistent=False)

        def reset_parameters(self) -> None:
            self.weight.data.fill_(1.0)

    with torch.device("meta"):
        bare, forgets, linear = nn.Sequential(Bare()), nn.Sequential(Forgets()), nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"module '0' \(Bare\).*no reset_parameters"):
        FSDP(bare)
    with pytest.raises(ValueError, match=r"left '0\.mask' without values"):
        FSDP(forgets)
    with pytest.raises(ValueError, match="'weight' is still on the meta device"):
        FSDP(linear, param_init_fn=lambda m: None)
    with pytest.raises(ValueError, match="device_id=cuda:0 is not this rank's device"):
        FSDP(nn.Linear(2, 2), device_id=0)
    FSDP(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with torch.device("meta"):
        placed = nn.Linear(2, 2)
    assert FSDP(placed, device_id="cpu").module.weight.to_local().device.type == "cpu"


def test_ties_outlive_the_meta_device() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7)
            self.head.weight = self.tokens.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.tokens(x))

    with torch.device("meta"):
        net = Tied()
    model = FSDP(net)
    assert model.head.weight is model.tokens.weight
    assert [n for n, _ in model.named_parameters()] == ["tokens.weight", "head.bias"]
    model(torch.tensor([1])).sum().backward()


# ---- Clipping


class Mixed(nn.Module):
    """Sharded, replicated, frozen, without gradient, bfloat16, tiny; one ignored."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.low = nn.Linear(5, 5, dtype=torch.bfloat16)
        self.ignored = nn.Linear(5, 5)
        self.one = nn.Parameter(torch.ones(1))  # most ranks have nothing of it

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.b(self.a(x))) * self.one
        return self.ignored(x) + self.low(x.bfloat16()).float()


def clip_wrapped(world_size: int, hybrid: bool) -> Any:
    net = Mixed()
    where: dict[str, Any] = {}
    if hybrid:
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("r", "s"))
        where = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    net.a = FSDP(net.a, **where)
    copies = {} if hybrid else {"sharding_strategy": ShardingStrategy.NO_SHARD}
    net.b = FSDP(net.b, **copies, **where)
    return FSDP(net, ignored_modules=[net.ignored], **where)


def check_clip(rank: int, world_size: int, hybrid: bool) -> None:
    reference, model = Mixed(), clip_wrapped(world_size, hybrid)
    losses = [reference(batch(r)).square().mean() for r in range(world_size)]
    (sum(losses) / world_size).backward()
    model(batch(rank)).square().mean().backward()
    for parameter in model.module.ignored.parameters():  # as a user does
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    before = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert "unused.weight" not in before
    plain = [p for p in reference.parameters() if p.grad is not None]
    saved = {n: copy.deepcopy(g) for n, g in before.items()}
    for norm_type in (1.0, 2.0, math.inf, 3.0):
        gradients = torch.cat([p.grad.double().flatten() for p in plain])
        expected = torch.linalg.vector_norm(gradients, norm_type)
        for max_norm in (float(expected) / 2, 1e6):
            for name, gradient in before.items():
                gradient.copy_(saved[name])
            found = model.clip_grad_norm_(max_norm, norm_type)
            everyone: list[Any] = [None] * world_size
            dist.all_gather_object(everyone, found.item())
            assert set(everyone) == {found.item()}
            assert found.dtype == torch.float32
            # The gradients of the bfloat16 layer have its precision.
            torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=0.0)
            factor = min(1.0, max_norm / (found.item() + 1e-6))
            for name, gradient in before.items():
                start = saved[name].full_tensor() if name in sharded_names(model) else saved[name]
                now = gradient.full_tensor() if name in sharded_names(model) else gradient
                torch.testing.assert_close(now, (start * factor).to(now.dtype))


def sharded_names(model: nn.Module) -> set[str]:
    return {n for n, p in model.named_parameters() if isinstance(p, ShardedTensor)}


@pytest.mark.parametrize(("world_size", "hybrid"), [(3, False), (4, True)])
def test_clip(world_size: int, hybrid: bool) -> None:
    run_ranks(world_size, check_clip, hybrid)


def check_clip_local_gradients(rank: int, world_size: int) -> list[float]:
    """Ignored gradients that differ give one norm for all ranks nevertheless."""
    net = mlp()
    model = FSDP(net, ignored_modules=[net[2]])
    model(batch(rank)).square().mean().backward()
    first = model.clip_grad_norm_(1e6).item()
    by_list = fsdpx.clip_grad_norm_(model.parameters(), 1e6).item()
    total = sum(p.grad.full_tensor().double().square().sum() for p in net[0].parameters())
    local = sum(p.grad.double().square().sum() for p in net[2].parameters())
    dist.all_reduce(local)
    if rank:  # a rank without them takes part
        net[2].zero_grad()
    fsdpx.clip_grad_norm_(model, 1e6, math.inf)
    return [first, by_list, math.sqrt(total + local / world_size)]


def test_clip_with_gradients_that_stayed_local() -> None:
    results = run_ranks(2, check_clip_local_gradients)
    for first, by_list, expected in results:
        assert first == by_list == results[0][0]
        assert first == pytest.approx(expected, rel=1e-6)


def test_clip_errors() -> None:
    model = wrapped()
    model(batch(0)).sum().backward()
    with pytest.raises(RuntimeError, match="'0', an inner wrapper"):
        model.module[0].clip_grad_norm_(1.0)
    with torch.no_grad():
        model.module[0].bias.grad.fill_(math.inf)
    with pytest.raises(RuntimeError, match=r"2\.0-norm of the gradients is inf"):
        fsdpx.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert fsdpx.clip_grad_norm_(model.module[0].weight, 1.0) > 0
    model.zero_grad()
    assert model.clip_grad_norm_(1.0) == 0.0
    with pytest.raises(NotImplementedError, match="register_comm_hook is not supported"):
        model.register_comm_hook(None, print)


def test_copies() -> None:
    model = FSDP(mlp(), auto_wrap_policy=LINEAR)
    model(batch(0)).sum().backward()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert_same(whole(model), dict(mlp().named_parameters()))
    twin(batch(0)).sum().backward()
    assert list(twin.state_dict()) == list(model.state_dict())
    twin.load_state_dict(model.state_dict())
    assert_same(whole(twin), whole(model))
    with pytest.raises(RuntimeError, match=r"wrapper of Sequential cannot be pickled"):
        model.__reduce_ex__(4)


def test_conversion_of_the_wrapper() -> None:
    model = FSDP(mlp())
    model.module[0].weight.note = "kept"
    assert model.to_empty(device="cpu").module[0].weight.note == "kept"
    model(batch(0))
    assert model.double()(batch(0).double()).dtype == torch.float64
