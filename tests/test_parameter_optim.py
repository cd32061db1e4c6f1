"""Optimizers, averages and state dicts on sharded parameters give the unsharded results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import Model, pair, random_gradients, set_gradients, whole
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from fsdpx.parameter import ShardedTensor

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"lr": torch.tensor(0.01)}),
    ("AdamW", {"lr": 0.01, "maximize": True}),
    ("Adagrad", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.1}),
    ("Adadelta", {"lr": 0.1}),
    ("Adamax", {"lr": 0.01}),
    ("ASGD", {"lr": 0.01}),
    ("Rprop", {"lr": 0.01}),
]
PLAIN_STATE = ["step", "eta", "mu", "mu_product"]
FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "single": {"foreach": False},
    "fused": {"fused": True},
}


def train(optimizers: Any, models: Any, steps: int = 6, first: int = 0) -> None:
    """Steps both models with the same gradients, one of which is missing once."""
    module, reference = models
    for step in range(first, first + steps):
        gradients = random_gradients(reference, 100 + step)
        if step == 3:
            gradients["b.bias"] = None
        set_gradients(module, gradients)
        set_gradients(reference, {k: g if g is None else g.clone() for k, g in gradients.items()})
        for optimizer in optimizers:
            optimizer.step()


def assert_same(module: torch.nn.Module, reference: torch.nn.Module, exact: bool = True) -> None:
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        if exact:
            assert torch.equal(whole(p), q)
        else:
            torch.testing.assert_close(whole(p), q.detach(), rtol=1e-6, atol=1e-6)


def check_optimizers(rank: int, world_size: int, mode: str) -> None:
    for name, options in CASES:
        tensor_rate = isinstance(options["lr"], torch.Tensor)
        if (mode == "fused" and name not in FUSED) or (mode == "foreach" and tensor_rate):
            continue
        models = pair(rank, world_size)
        kwargs = {**options, **MODES[mode]}
        optimizers = [getattr(torch.optim, name)(m.parameters(), **kwargs) for m in models]
        locals_ = [p.to_local() for p in models[0].parameters()]
        train(optimizers, models)
        # The fused kernel on CPU rounds its vector body and its tail differently.
        assert_same(*models, exact=mode != "fused")
        for p, local in zip(models[0].parameters(), locals_, strict=True):
            assert p.to_local().data_ptr() == local.data_ptr()
        for state in optimizers[0].state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and key not in PLAIN_STATE:
                    assert isinstance(value, ShardedTensor), (name, key)


def check_groups(rank: int, world_size: int) -> None:
    """A decay and a no-decay group, a learning rate schedule, and a frozen parameter."""
    models = pair(rank, world_size)
    optimizers = []
    for model in models:
        model.c.weight.requires_grad_(False)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2 and p.requires_grad]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
        optimizers.append(torch.optim.AdamW(groups, lr=0.01, foreach=True))
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    for step in range(4):
        train(optimizers, models, 1, step)
        for schedule in schedules:
            schedule.step()
    assert_same(*models)


def check_refused(rank: int, world_size: int) -> None:
    """Optimizers that need whole matrices say which parameter, and what to do."""
    for name, match in (
        ("Adafactor", "reduces some of its dimensions only"),
        ("Muon", "does not work element by element"),
        ("LBFGS", "aten.cat"),
    ):
        module, reference = pair(rank, world_size)
        set_gradients(module, random_gradients(reference, 0))
        matrices = [p for p in module.parameters() if p.ndim == 2 and p.numel()]
        optimizer = getattr(torch.optim, name)(matrices, lr=0.01)
        closure = [lambda: torch.tensor(1.0)] if name == "LBFGS" else []
        with pytest.raises(RuntimeError, match=match) as caught:
            optimizer.step(*closure)
        assert "'a.weight'" in str(caught.value)


def check_averages(rank: int, world_size: int) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        {"avg_fn": get_ema_avg_fn(0.9)},
    ]
    for variant in variants:
        models = pair(rank, world_size)
        averages = [AveragedModel(model, **variant) for model in models]
        for _ in range(3):
            with torch.no_grad():
                for model in models:
                    for p in model.parameters():
                        p.mul_(1.1)
            for average, model in zip(averages, models, strict=True):
                average.update_parameters(model)
        assert_same(*averages)


def check_ema_by_hand(rank: int, world_size: int) -> None:
    module, reference = pair(rank, world_size)
    means = [[p.detach().clone() for p in m.parameters()] for m in (module, reference)]
    with torch.no_grad():
        for model, mean in zip((module, reference), means, strict=True):
            torch._foreach_lerp_(mean, [p * 2 for p in model.parameters()], 0.1)
            for m, p in zip(mean, model.parameters(), strict=True):
                m.mul_(0.9).add_(p, alpha=0.1)
    for m, q in zip(*means, strict=True):
        assert torch.equal(whole(m), q)


def check_state_dicts(rank: int, world_size: int) -> None:
    """Sharded into sharded; a copied module and optimizer go on alike."""
    models = pair(rank, world_size)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in models]
    train(optimizers, models, 2)
    other, _ = pair(rank, world_size, seed=9)
    resumed = torch.optim.AdamW(other.parameters(), 0.5)
    other.load_state_dict(models[0].state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    train([resumed, optimizers[1]], (other, models[1]), 2, 2)
    assert_same(other, models[1])
    torch.manual_seed(1)
    fresh = Model()
    other.load_state_dict(fresh.state_dict())  # whole into sharded
    assert_same(other, fresh)


def check_full_optimizer_state_is_sharded(rank: int, world_size: int) -> None:
    """Whole optimizer state would cost every rank the memory of all: the next step shards it."""
    models = pair(rank, world_size)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in models]
    train(optimizers, models, 1)
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    train(optimizers, models, 2, 1)
    assert_same(*models)
    assert type(optimizers[0].state[models[0].scale]["exp_avg"]) is ShardedTensor


def check_registered(rank: int, world_size: int) -> None:
    """Where torch would choose foreach or fused for plain tensors, it does for ours."""
    from unittest import mock

    module, reference = pair(rank, world_size)
    name = "_get_foreach_kernels_supported_devices"
    with mock.patch(f"torch.optim.optimizer.{name}", return_value=["cpu"]):
        choose = torch.optim.SGD([module.scale]).step.__globals__["_default_to_fused_or_foreach"]
        ours, plain = (choose(list(m.parameters()), False) for m in (module, reference))
    assert ours == plain == (False, True)


@pytest.mark.parametrize("mode", MODES)
def test_optimizers(mode: str) -> None:
    run_ranks(2, check_optimizers, mode)


@pytest.mark.parametrize(
    "check",
    [
        check_groups,
        check_refused,
        check_averages,
        check_ema_by_hand,
        check_state_dicts,
        check_full_optimizer_state_is_sharded,
        check_registered,
    ],
)
def test_on_two_ranks(check: Any) -> None:
    run_ranks(2, check)


def compile_step(rank: int, world_size: int, backend: str) -> None:
    models = pair(rank, world_size)
    optimizers = [
        torch.optim.AdamW(m.parameters(), torch.tensor(0.01), capturable=False) for m in models
    ]
    compiled = torch.compile(optimizers[0].step, backend=backend)
    for step in range(3):
        gradients = random_gradients(models[1], step)
        set_gradients(models[0], gradients)
        set_gradients(models[1], gradients)
        before = [p.to_local()._version for p in models[0].parameters()]
        compiled()
        optimizers[1].step()
        after = [p.to_local()._version for p in models[0].parameters()]
        assert all(a < b for a, b in zip(before, after, strict=True))
    assert_same(*models, exact=False)
    assert all(isinstance(s["exp_avg"], ShardedTensor) for s in optimizers[0].state.values())


def compile_clip(rank: int, world_size: int) -> None:
    """The collective is part of the graph, and waited for."""
    module, reference = pair(rank, world_size)
    gradients = random_gradients(reference, 1)
    set_gradients(module, gradients)
    set_gradients(reference, gradients)
    clip = torch.nn.utils.clip_grad_norm_
    compiled = torch.compile(lambda: clip(module.parameters(), 0.5), backend="aot_eager")
    torch.testing.assert_close(compiled(), clip(reference.parameters(), 0.5))


def compile_several(rank: int, world_size: int) -> None:
    """Steps of models that are cut differently share compiled code, or at least do not clash."""
    import fsdpx

    for granularity in ("element", "row", 7):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(13, 33), nn.GELU(), nn.Linear(33, 7))
        reference = copy.deepcopy(module)
        fsdpx.fully_shard(module[0], granularity=granularity)
        fsdpx.fully_shard(module, granularity=granularity)
        optimizers = [torch.optim.AdamW(m.parameters(), foreach=True) for m in (module, reference)]
        step = torch.compile(optimizers[0].step, backend="eager")
        for number in range(2):
            inputs = torch.randn(4, 13)
            for model in (module, reference):
                model(inputs).square().mean().backward()
            optimizers[0].step() if number == 0 else step()
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        assert_same(module, reference, exact=False)


def test_compiled_steps_of_several_models() -> None:
    run_ranks(2, compile_several, timeout=120)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_step(backend: str) -> None:
    run_ranks(2, compile_step, backend, timeout=280)


def test_compiled_clip() -> None:
    run_ranks(2, compile_clip, timeout=120)
