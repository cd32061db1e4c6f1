"""FullyShardedDataParallel: wrapping, training parity for every strategy, options, errors."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from models import Block, ConvBlock, loss_of, make_batch, make_model
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

import fsdpx
from fsdpx import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardedTensor,
    ShardingStrategy,
)
from fsdpx import FullyShardedDataParallel as FSDP
from fsdpx.unit import unit_of, units


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def batch(rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 + rank))


def reference_step(reference: nn.Module, world_size: int, step: int, name: str) -> None:
    """Gradients of the mean loss over all ranks' batches."""
    losses = [
        loss_of(reference, make_batch(name, step=step, rank=rank)) for rank in range(world_size)
    ]
    (sum(losses) / world_size).backward()


def largest_difference(model: nn.Module, reference: nn.Module) -> float:
    expected = dict(reference.named_parameters())
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    whole = {n: p.full_tensor() if isinstance(p, ShardedTensor) else p for n, p in found.items()}
    return max((whole[name] - p).abs().max().item() for name, p in expected.items())


# ---- Training is the plain model's

POLICIES: dict[str, Any] = {
    "none": None,
    "classes": ModuleWrapPolicy({Block, ConvBlock, nn.LSTM}),
    "custom": CustomPolicy(
        lambda m: {"backward_prefetch": None} if isinstance(m, Block) else isinstance(m, nn.Linear)
    ),
    "always": always_wrap_policy,
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=500),
    "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "lambda": functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)
    ),
}


def train(rank: int, world_size: int, name: str, policy: str, options: dict[str, Any]) -> float:
    reference = make_model(name)
    model = FSDP(copy.deepcopy(reference), auto_wrap_policy=POLICIES[policy], **options)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, reference)]
    for step in range(3):
        for last in [False, True][1 - step % 2 :]:  # one backward, or two of which one is local
            with torch.enable_grad() if last else model.no_sync():
                loss_of(model, make_batch(name, step=step, rank=rank)).backward()
            reference_step(reference, world_size, step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return largest_difference(model, reference)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_trains_as_the_plain_model(policy: str) -> None:
    # Gpt.forward reads the weight of one of its children, so that child can't be wrapped.
    name = "conv" if policy == "always" else "gpt"
    assert max(run_ranks(2, train, name, policy, {})) < 1e-6


@pytest.mark.parametrize("name", ["lstm", "tied_frozen"])
def test_models(name: str) -> None:
    assert max(run_ranks(2, train, name, "classes", {"use_orig_params": True})) < 1e-6


PLAIN_STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


@pytest.mark.parametrize("strategy", PLAIN_STRATEGIES)
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
def test_strategies(strategy: str, prefetch: BackwardPrefetch | None) -> None:
    options = {"sharding_strategy": ShardingStrategy[strategy], "backward_prefetch": prefetch}
    assert max(run_ranks(2, train, "gpt", "classes", options)) < 1e-6


def train_hybrid(rank: int, world_size: int, strategy: str, how: str) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    where: dict[str, Any] = {"device_mesh": mesh}
    if how == "groups":
        where = {"process_group": (mesh.get_group("shard"), mesh.get_group("replicate"))}
    options = {"sharding_strategy": ShardingStrategy[strategy], **where}
    difference = train(rank, world_size, "gpt", "classes", options)
    model = FSDP(mlp(), **options)
    unit = unit_of(model)
    assert (unit.group.size, unit.group.num_replicas) == (2, 2)
    return difference


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("how", ["mesh", "groups"])
def test_hybrid_strategies(strategy: str, how: str) -> None:
    assert max(run_ranks(4, train_hybrid, strategy, how)) < 1e-6


def hosts(rank: int, world_size: int) -> tuple[int, int]:
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "1"
    try:
        model = FSDP(mlp(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    group = unit_of(model).group
    return group.size, group.num_replicas


def test_hybrid_without_groups_shares_within_a_host() -> None:
    assert run_ranks(2, hosts) == [(1, 2)] * 2


def what_is_held(rank: int, world_size: int) -> dict[str, Any]:
    held = {}
    for name in PLAIN_STRATEGIES:
        model = FSDP(mlp(), sharding_strategy=ShardingStrategy[name])
        local = sum(p.to_local().numel() for p in model.parameters())
        outer = FSDP(nn.Sequential(model), sharding_strategy=ShardingStrategy[name])
        outer(batch(rank))
        held[name] = (local, unit_of(model).is_gathered)
    return held


def test_what_strategies_hold() -> None:
    """A rank's elements, and whether an inner unit stays gathered after forward."""
    total = 6 * 8 + 8 + 8 * 5 + 5
    first, second = run_ranks(2, what_is_held)
    assert first["FULL_SHARD"][0] + second["FULL_SHARD"][0] == total
    assert first["NO_SHARD"][0] == second["NO_SHARD"][0] == total
    gathered = {name: is_gathered for name, (_, is_gathered) in first.items()}
    assert gathered == {"FULL_SHARD": False, "SHARD_GRAD_OP": True, "NO_SHARD": True}


# ---- The wrapper


def test_names_are_the_plain_models() -> None:
    plain = make_model("conv")
    model = FSDP(make_model("conv"), auto_wrap_policy=always_wrap_policy)
    holder, plain_holder = nn.ModuleDict({"net": model}), nn.ModuleDict({"net": plain})
    for a, b in ((model, plain), (holder, plain_holder)):
        assert [n for n, _ in a.named_parameters()] == [n for n, _ in b.named_parameters()]
        assert [n for n, _ in a.named_buffers()] == [n for n, _ in b.named_buffers()]
        assert {n for n, _ in a.named_modules()} == {n for n, _ in b.named_modules()}


def test_it_is_a_shell() -> None:
    inner = mlp()
    inner.greeting = "hello"
    model = FSDP(inner)
    assert isinstance(model, FSDP)
    assert type(model.module) is nn.Sequential
    assert model.module is inner
    assert model.greeting == "hello"
    assert model[0] is inner[0]
    assert not model.eval().module[0].training
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    model.module[0].bias.requires_grad_(False)
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]


def test_fsdp_modules() -> None:
    model = FSDP(make_model("gpt"), auto_wrap_policy=ModuleWrapPolicy({Block}))
    assert FSDP.fsdp_modules(model) == [model, *model.blocks]
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert FSDP.fsdp_modules(model.blocks, root_only=True) == list(model.blocks)
    assert model.check_is_root()
    assert not model.blocks[0].check_is_root()


def test_hooks_of_the_wrapper_and_of_the_module_run() -> None:
    model = FSDP(mlp())
    seen = []
    model.register_forward_pre_hook(lambda m, args: seen.append(type(m)))
    model.module.register_forward_hook(lambda m, args, out: seen.append(type(m[0].weight)))
    model(batch(0))
    assert seen == [FSDP, nn.Parameter]


def test_a_module_held_twice_is_wrapped_once() -> None:
    shared = nn.Linear(6, 6)
    net = nn.Sequential(shared, nn.ReLU(), shared)
    reference = copy.deepcopy(net)
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert model.module[0] is model.module[2]
    model(batch(0)).sum().backward()
    reference(batch(0)).sum().backward()
    assert torch.equal(model.module[0].weight.grad.full_tensor(), reference[0].weight.grad)


def test_containers_are_left_to_who_holds_them() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(6))])
            self.layers = nn.ModuleList([nn.Linear(6, 6)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x * self.scales[0])

    model = FSDP(Net(), auto_wrap_policy=always_wrap_policy)
    assert FSDP.fsdp_modules(model) == [model, model.layers[0]]
    model(batch(0)).sum().backward()
    with pytest.raises(ValueError, match="ModuleList has no forward"):
        FSDP(nn.ModuleList([nn.Linear(2, 2)]))


def test_wrap_in_a_constructor() -> None:
    with enable_wrap(wrapper_cls=FSDP, backward_prefetch=None):
        model = FSDP(nn.Sequential(wrap(nn.Linear(6, 6)), nn.ReLU()))
    assert isinstance(model.module[0], FSDP)
    assert unit_of(model.module[0]).backward_prefetch == ()
    assert isinstance(wrap(nn.Linear(2, 2)), nn.Linear)


def test_it_may_hold_and_be_held_by_the_other_front_door() -> None:
    net, reference = mlp(), mlp()
    fsdpx.fully_shard(net[0])
    net[2] = FSDP(net[2])
    model = fsdpx.fully_shard(net)
    model(batch(0)).sum().backward()
    reference(batch(0)).sum().backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    assert all(torch.equal(a, b.grad) for a, b in zip(grads, reference.parameters(), strict=True))
    assert len(units(model)) == 3


# ---- Mixed precision


class Probe(nn.Module):
    """Notes the dtypes that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        after = self.norm(self.linear(x))
        self.seen = [x.dtype, self.linear.weight.dtype, self.scale.dtype, after.dtype]
        return after * self.scale


def test_mixed_precision() -> None:
    half = torch.bfloat16
    mixed = MixedPrecision(param_dtype=half, buffer_dtype=half, reduce_dtype=torch.float32)
    model = FSDP(Probe(), mixed_precision=mixed, auto_wrap_policy=ModuleWrapPolicy(set()))
    norm = model.module.norm
    assert isinstance(norm, FSDP)  # of a class that mixed precision ignores
    seen = []
    norm.module.register_forward_pre_hook(lambda m, a: seen.append((a[0].dtype, m.weight.dtype)))
    output = model(batch(0))
    assert model.module.seen == [half, half, half, half]
    assert seen == [(torch.float32, torch.float32)]
    assert norm.module.running_mean.dtype == torch.float32
    assert model.module.steps.dtype == torch.long
    assert output.dtype == half
    output.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("root", "inner"), [(True, False), (False, True), (False, False)])
def test_which_inputs_are_cast(root: bool, inner: bool) -> None:
    mixed = MixedPrecision(
        param_dtype=torch.bfloat16, cast_root_forward_inputs=root, cast_forward_inputs=inner
    )
    seen = []

    class Look(nn.Module):
        def __init__(self, inner: nn.Module | None = None) -> None:
            super().__init__()
            self.inner = inner
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return x if self.inner is None else self.inner(torch.ones(2))

    model = FSDP(Look(FSDP(Look(), mixed_precision=mixed)), mixed_precision=mixed)
    model(torch.ones(2))
    narrow = {True: torch.bfloat16, False: torch.float32}
    assert seen == [narrow[root], narrow[inner]]


def train_mixed(rank: int, world_size: int) -> float:
    reference = make_model("gpt")
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = ModuleWrapPolicy({Block})
    model = FSDP(copy.deepcopy(reference), mixed_precision=mixed, auto_wrap_policy=policy)
    loss_of(model, make_batch("gpt", step=0, rank=rank)).backward()
    half = copy.deepcopy(reference).bfloat16()
    worst = 0.0
    sums: dict[str, Tensor] = {}
    for r in range(world_size):
        half.zero_grad()
        loss_of(half, make_batch("gpt", step=0, rank=r)).backward()
        for name, p in half.named_parameters():
            sums[name] = sums.get(name, 0.0) + p.grad.float()
    for name, p in model.named_parameters():
        worst = max(worst, (p.grad.full_tensor() - sums[name] / world_size).abs().max().item())
    return worst


def test_mixed_precision_is_low_precision_summed_in_float32() -> None:
    assert run_ranks(2, train_mixed) == [0.0, 0.0]


# ---- Ignored


def ignore(rank: int, world_size: int, how: str) -> list[Any]:
    net = mlp()
    last = net[2]
    arguments = {
        "modules": {"ignored_modules": [last]},
        "states": {"ignored_states": list(last.parameters())},
        "state_modules": {"ignored_states": [last]},
    }[how]
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **arguments)
    model(batch(rank)).sum().backward()
    plain = mlp()
    plain(batch(rank)).sum().backward()
    wrapped = [isinstance(p, ShardedTensor) for p in model.parameters()]
    return [wrapped, torch.equal(last.weight.grad, plain[2].weight.grad)]


@pytest.mark.parametrize("how", ["modules", "states", "state_modules"])
def test_ignored_gradients_stay_local(how: str) -> None:
    assert run_ranks(2, ignore, how) == [[[True, True, False, False], True]] * 2


def test_one_ignored_parameter_in_a_wrapped_child() -> None:
    net = mlp()
    bias = net[0].bias
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), ignored_states=[bias])
    assert model.module[0].bias is bias
    assert [type(p) is nn.Parameter for p in model.parameters()] == [False, True, False, False]
    assert all(n is not bias for unit in units(model) for n in unit.parameters)


# ---- Refused by name


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"mixed_precision": MixedPrecision(keep_low_precision_grads=True)},
            NotImplementedError,
            "keep_low_precision_grads",
        ),
        ({"mixed_precision": torch.bfloat16}, TypeError, "mixed_precision must be"),
        ({"sharding_strategy": "FULL_SHARD"}, TypeError, "sharding_strategy must be"),
        ({"cpu_offload": True}, TypeError, "cpu_offload must be"),
        ({"backward_prefetch": 1}, TypeError, "backward_prefetch must be"),
        ({"ignored_modules": 3}, TypeError, "ignored_modules must be an iterable"),
        ({"ignored_modules": [torch.ones(1)]}, TypeError, "ignored_modules must hold modules"),
        (
            {"ignored_modules": [], "ignored_states": []},
            ValueError,
            "ignored_modules or ignored_states",
        ),
        ({"process_group": (None, None)}, ValueError, "two process groups need a hybrid"),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, ValueError, "LOCAL_WORLD_SIZE"),
    ],
)
def test_refusals(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FSDP(mlp(), **arguments)


def test_accepted() -> None:
    FSDP(
        mlp(),
        cpu_offload=CPUOffload(offload_params=True),
        forward_prefetch=True,
        limit_all_gathers=False,
        use_orig_params=False,
    )(batch(0))


def test_tied_weights_in_two_units_are_named() -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6)))
    net[1][0].weight = net[0].weight
    with pytest.raises(ValueError, match=r"'1\.0\.weight' and '0\.weight', which are one"):
        FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert not any(isinstance(m, FSDP) for m in net.modules())  # nothing was wrapped
    FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.ReLU}))(batch(0)).sum().backward()


def test_wrapped_modules_are_not_wrapped_again_by_a_policy() -> None:
    net = nn.Sequential(FSDP(nn.Linear(6, 6)))
    with pytest.raises(ValueError, match="'0' is"):
        FSDP(net, auto_wrap_policy=always_wrap_policy)
    with pytest.raises(ValueError, match="sharded already"):
        FSDP(net, ignored_modules=[net[0]])


def test_import_is_lazy() -> None:
    code = "import sys, fsdpx; assert 'torch.distributed.fsdp' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = fsdpx.missing
