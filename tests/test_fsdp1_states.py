"""State dicts of FullyShardedDataParallel: the plain model's keys and values, both ways."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdpx
from fsdpx import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardedTensor,
    ShardingStrategy,
    StateDictType,
)
from fsdpx import FullyShardedDataParallel as FSDP

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


class Net(nn.Module):
    """A tied pair, a scalar, an unused parameter, buffers of both kinds, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(tokens)) * self.scale)


def make_plain(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def make(seed: int = 0, front: str = "fsdp1") -> Any:
    net = make_plain(seed)
    if front == "fsdp1":
        return FSDP(net, auto_wrap_policy=WRAP)
    fsdpx.fully_shard(net.body)
    return fsdpx.fully_shard(net)


WRAP = ModuleWrapPolicy({nn.Sequential})
TOKENS = torch.tensor([1, 4, 6, 0])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups; the scalar's and the embedding's own, and without the last layer's bias."""
    named = dict(model.named_parameters())
    named.pop("body.2.bias")
    first = [named.pop("scale"), named.pop("tokens.weight")]
    groups = [{"params": first, "lr": 0.01}, {"params": list(named.values())}]
    return torch.optim.Adam(groups, lr=0.02, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Freezes a parameter after two steps."""
    for step in range(steps):
        if step == 2:
            dict(model.named_parameters())["body.0.weight"].requires_grad_(False)
        model(TOKENS).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_equal(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):  # torch's functions make lists of tuples
        assert len(found) == len(expected)
        for index, each in enumerate(expected):
            assert_equal(found[index], each, f"{where}[{index}]")
    elif isinstance(expected, Tensor):
        whole = found.full_tensor() if isinstance(found, ShardedTensor) else found
        assert whole.shape == expected.shape, where
        assert whole.dtype == expected.dtype, where
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6, msg=where)
    else:
        assert found == expected, where


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A plain optimizer's state dict with names in place of numbers."""
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.state_dict()
    groups = [{**g, "params": [order[i] for i in g["params"]]} for g in state["param_groups"]]
    return {"state": {order[i]: s for i, s in state["state"].items()}, "param_groups": groups}


# ---- The model


def check_model(rank: int, world_size: int) -> None:
    plain, model = make_plain(), make()
    expected = plain.state_dict()
    full = model.state_dict()
    assert list(full) == list(expected)
    assert_equal(full, dict(expected))
    assert full._metadata.keys() == expected._metadata.keys()
    assert full["head.weight"] is full["tokens.weight"]

    kept = copy.deepcopy(full)
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.zero_()
    assert_equal(full, kept)  # shares no memory

    model.load_state_dict(full)
    assert_equal(model.state_dict(), dict(expected))
    plain.load_state_dict(full)
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
        alone = model.state_dict()
    assert list(alone) == (list(expected) if rank == 0 else [])
    with FSDP.state_dict_type(model, SHARDED):
        sharded = model.state_dict()
        assert list(sharded) == list(expected)
        parameters = {key for key, value in sharded.items() if isinstance(value, ShardedTensor)}
        assert parameters == {name for name, _ in plain.named_parameters(remove_duplicate=False)}
        model.load_state_dict(sharded)
    assert FSDP.get_state_dict_type(model).state_dict_type is FULL
    held = nn.ModuleDict({"net": model})
    assert list(held.state_dict()) == [f"net.{key}" for key in expected]
    held.load_state_dict(held.state_dict())


def check_model_under_checkpointing(rank: int, world_size: int) -> None:
    model = make()
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Sequential))
    model(TOKENS).sum().backward()
    assert list(model.state_dict()) == list(make_plain().state_dict())
    model.load_state_dict(make_plain(1).state_dict())
    assert_equal(model.state_dict(), dict(make_plain(1).state_dict()))


def check_strict(rank: int, world_size: int) -> None:
    model = make()
    state = model.state_dict()
    state["extra"] = torch.ones(1)
    state["body.9.extra"] = torch.ones(1)
    del state["body.0.weight"], state["scale"]
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    text = str(caught.value)
    assert "_fsdp_wrapped_module" not in text
    assert 'Missing key(s) in state_dict: "scale", "body.0.weight"' in text
    assert 'Unexpected key(s) in state_dict: "extra", "body.9.extra"' in text
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == ["scale", "body.0.weight"]
    assert found.unexpected_keys == ["extra", "body.9.extra"]
    state["body.0.bias"] = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"size mismatch for body\.0\.bias: .*\[4\].*\[5\]"):
        model.load_state_dict(state, strict=False)


def check_buffers_of_mixed_precision(rank: int, world_size: int) -> None:
    """They are saved as they were before wrapping."""
    mixed = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = FSDP(make_plain(), mixed_precision=mixed, auto_wrap_policy=WRAP)
    assert model.module.scratch.dtype == torch.bfloat16
    full = model.state_dict()
    assert {key: value.dtype for key, value in full.items()} == {
        key: value.dtype for key, value in make_plain().state_dict().items()
    }


def check_hybrid(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    hybrid = ShardingStrategy.HYBRID_SHARD
    model = FSDP(make_plain(), sharding_strategy=hybrid, device_mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, FULL, *configs):
        assert bool(model.state_dict()) == (rank == 0)
        saved = FSDP.optim_state_dict(model, optimizer)
        assert bool(saved) == (rank == 0)
        other = FSDP(make_plain(1), sharding_strategy=hybrid, device_mesh=mesh)
        loaded = torch.optim.Adam(other.parameters())
        with FSDP.state_dict_type(other, FULL, *configs):
            FSDP.optim_state_dict_to_load(other, loaded, saved, load_directly=True)
    assert_equal(by_name(other, loaded), by_name(model, optimizer))


# ---- The optimizer


def check_optimizer(rank: int, world_size: int) -> None:
    plain, model = make_plain(), make()
    expected, optimizer = adam(plain), adam(model)
    train(plain, expected)
    train(model, optimizer)
    found = FSDP.optim_state_dict(model, optimizer)
    wanted = by_name(plain, expected)
    assert_equal(found, wanted)
    assert "unused" not in found["state"]
    assert found["state"]["body.0.weight"]["step"] == 2
    steps = [state["step"].data_ptr() for state in found["state"].values()]
    assert len(set(steps)) == len(steps)

    for rank0_only in (False, True):
        other, fresh = make(1), None
        fresh = adam(other)
        config = FullOptimStateDictConfig(rank0_only=rank0_only)
        FSDP.set_state_dict_type(other, FULL, optim_state_dict_config=config)
        given = wanted if not rank0_only or rank == 0 else {}
        loaded = FSDP.optim_state_dict_to_load(other, fresh, copy.deepcopy(given))
        fresh.load_state_dict(loaded)
        assert_equal(by_name(other, fresh), wanted)
    with FSDP.state_dict_type(model, SHARDED):
        sharded = FSDP.optim_state_dict(model, optimizer)
        moments = sharded["state"]["tokens.weight"]
        assert isinstance(moments["exp_avg"], ShardedTensor)
        FSDP.optim_state_dict_to_load(model, optimizer, sharded, load_directly=True)
    assert_equal(by_name(model, optimizer), wanted)


def check_optimizer_goes_on(rank: int, world_size: int) -> None:
    """Trained, saved by a plain model, loaded, trained on: as the plain model."""
    plain, model = make_plain(), make()
    expected, optimizer = adam(plain), adam(model)
    train(plain, expected, steps=2)
    model.load_state_dict(plain.state_dict())
    state = by_name(plain, expected)
    FSDP.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    for each, how in ((plain, expected), (model, optimizer)):
        train(each, how, steps=2)
    assert_equal(model.state_dict(), dict(plain.state_dict()))
    assert_equal(FSDP.optim_state_dict(model, optimizer), by_name(plain, expected))


def check_adagrad(rank: int, world_size: int) -> None:
    """Its state is there before the first step."""
    plain, model = make_plain(), make()
    expected = torch.optim.Adagrad(plain.parameters(), initial_accumulator_value=0.5)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    assert_equal(FSDP.optim_state_dict(model, optimizer), by_name(plain, expected))
    train(plain, expected)
    train(model, optimizer)
    assert_equal(FSDP.optim_state_dict(model, optimizer), by_name(plain, expected))


def check_optimizer_errors(rank: int, world_size: int) -> None:
    model = make()
    optimizer = adam(model)
    train(model, optimizer)
    saved = FSDP.optim_state_dict(model, optimizer)
    saved["state"]["nobody"] = {}
    with pytest.raises(ValueError, match="no parameter nobody"):
        FSDP.optim_state_dict_to_load(model, optimizer, saved)
    del saved["state"]["nobody"]
    saved["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match=r"differ in tokens\.weight"):
        FSDP.optim_state_dict_to_load(model, optimizer, saved)
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    with pytest.raises(ValueError, match=r"shape \(2,\), is none of the model's"):
        FSDP.optim_state_dict(model, foreign)
    with pytest.raises(NotImplementedError, match="is_named_optimizer"):
        FSDP.optim_state_dict_to_load(model, optimizer, saved, is_named_optimizer=True)


# ---- torch.distributed.checkpoint


def check_checkpoint_functions(rank: int, world_size: int, front: str) -> None:
    plain, model = make_plain(), make(0, front)
    for each in (plain, model):  # torch's functions want state of all that requires a gradient
        each.unused.requires_grad_(False)
    expected, optimizer = adam(plain), adam(model)
    train(plain, expected)
    train(model, optimizer)
    sharded, states = get_state_dict(model, optimizer)
    assert isinstance(sharded["body.0.weight"], ShardedTensor)
    assert isinstance(states["state"]["body.2.weight"]["exp_avg"], ShardedTensor)
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(model, options=options)
    assert_equal(full, dict(plain.state_dict()))
    assert_equal(
        get_optimizer_state_dict(model, optimizer, options=options),
        get_optimizer_state_dict(plain, expected),
    )
    model.load_state_dict(make_plain(1).state_dict())
    assert_equal(full, dict(plain.state_dict()))  # shares no memory
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full if rank == 0 else {}, options=broadcast)
    assert_equal(get_model_state_dict(model, options=options), dict(plain.state_dict()))
    set_optimizer_state_dict(
        model, optimizer, get_optimizer_state_dict(plain, expected), options=options
    )
    assert_equal(
        get_optimizer_state_dict(model, optimizer, options=options),
        get_optimizer_state_dict(plain, expected),
    )


@pytest.mark.parametrize(
    ("check", "args"),
    [
        (check_model, ()),
        (check_model_under_checkpointing, ()),
        (check_strict, ()),
        (check_buffers_of_mixed_precision, ()),
        (check_hybrid, ()),
        (check_optimizer, ()),
        (check_optimizer_goes_on, ()),
        (check_adagrad, ()),
        (check_optimizer_errors, ()),
        (check_checkpoint_functions, ("fsdp1",)),
        (check_checkpoint_functions, ("fully_shard",)),
    ],
)
def test_on_two_ranks(check: Any, args: tuple[Any, ...]) -> None:
    run_ranks(2, check, *args)


def trainable(seed: int, front: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(seed, front)
    model.unused.requires_grad_(False)
    return model, torch.optim.Adam(model.parameters())


def save(rank: int, world_size: int, path: str, front: str) -> list[float]:
    model, optimizer = trainable(0, front)
    train(model, optimizer, steps=2)
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=path)
    return go_on(model, optimizer)


def load(rank: int, world_size: int, path: str, front: str) -> list[float]:
    model, optimizer = trainable(1, front)
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optim"],
    )
    again = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(again, checkpoint_id=f"{path}-{world_size}")
    return go_on(model, optimizer)


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(TOKENS).square().sum()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole_file(path: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, f"{path}.pt")
    return torch.load(f"{path}.pt", weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("front", ["fsdp1", "fully_shard"])
def test_a_checkpoint_fits_other_world_sizes(tmp_path: Path, front: str) -> None:
    path = str(tmp_path / "four")
    unbroken = run_ranks(4, save, path, front)[0]
    for world_size in (1, 2, 3):
        for losses in run_ranks(world_size, load, path, front):
            assert losses == pytest.approx(unbroken, rel=1e-6)
        assert_equal(whole_file(f"{path}-{world_size}"), whole_file(path))


def save_alone(rank: int, world_size: int, what: str) -> str:
    model = make()
    optimizer = adam(model)
    train(model, optimizer)
    alone = {
        "model": model.state_dict,
        "optimizer": lambda: FSDP.optim_state_dict(model, optimizer),
    }
    act = alone[what] if rank == 0 else lambda: model(TOKENS)
    with pytest.raises(fsdpx.DesyncError) as caught:
        act()
    model.reset_iter_state()
    train(model, optimizer, steps=1)
    return str(caught.value)


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_a_rank_that_saves_alone_does_not_wait(what: str) -> None:
    for text in run_ranks(2, save_alone, what, timeout=30.0):
        assert "unit 'Net'" in text


def test_settings() -> None:
    model = make()
    config = ShardedStateDictConfig(offload_to_cpu=True)
    before = FSDP.set_state_dict_type(model, SHARDED, config)
    assert before.state_dict_type is FULL
    settings = FSDP.get_state_dict_type(nn.ModuleList([model]))
    assert (settings.state_dict_type, settings.state_dict_config) == (SHARDED, config)
    with pytest.raises(NotImplementedError, match="LOCAL_STATE_DICT is not supported"):
        FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(RuntimeError, match="needs a FullStateDictConfig"):
        FSDP.set_state_dict_type(model, FULL, config)
    with pytest.raises(ZeroDivisionError), FSDP.state_dict_type(model, FULL):
        _ = 1 / 0
    assert FSDP.get_state_dict_type(model).state_dict_type is SHARDED
    FSDP.set_state_dict_type(model.module.body, FULL)
    with pytest.raises(RuntimeError, match="different state dict settings"):
        FSDP.get_state_dict_type(model)


def test_variables_are_the_models() -> None:
    model = make()
    kept = model.state_dict(keep_vars=True)
    assert kept["scale"] is model.module.scale


def test_deprecated_methods_are_refused_by_name() -> None:
    theirs = {name for name in vars(TorchFSDP) if not name.startswith("_")}
    assert theirs - set(dir(FSDP)) == set()
    for name in ("full_optim_state_dict", "rekey_optim_state_dict"):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported: use optim_state"):
            getattr(FSDP, name)(make(), None)
