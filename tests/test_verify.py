"""`fsdpx.verify` finds what differs, by name, and nothing where nothing does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import MODELS, loss_of, make_batch
from ranks import run_ranks
from torch import nn

import fsdpx
from fsdpx import MixedPrecisionPolicy, fully_shard


def make_small() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 5)
    )


def small_batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def shard_children(model: nn.Module) -> nn.Module:
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child)
    return fully_shard(model)


def shard_wrongly(model: nn.Module) -> None:
    """Gradients of the last layer come out halved."""
    shard_children(model)
    model[4].set_gradient_divide_factor(2 * torch.distributed.get_world_size())


def shard_in_bf16(model: nn.Module) -> None:
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def test_one_process() -> None:
    report = fsdpx.verify(make_small, small_batch, shard=shard_children)
    assert report.worst == 0.0
    assert report.num_ranks == 1
    report.check(0.0)


def verify_small(rank: int, world_size: int, shard: object) -> dict[str, tuple[float, float]]:
    report = fsdpx.verify(make_small, small_batch, shard=shard)  # type: ignore[arg-type]
    assert f"on {world_size} ranks" in str(report)
    assert report.loss <= report.worst
    return {row.name: (row.gradient, row.weight) for row in report.parameters.values()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_equal_on_several_ranks(world_size: int) -> None:
    for report in run_ranks(world_size, verify_small, shard_children):
        assert list(report) == [name for name, _ in make_small().named_parameters()]
        assert max(map(max, report.values())) < 1e-5


def test_a_wrong_gradient_is_found_and_named() -> None:
    for report in run_ranks(2, verify_small, shard_wrongly):
        for name, (gradient, weight) in report.items():
            wrong = name.startswith("4.")
            assert (gradient > 0.4) == wrong
            assert not wrong or weight > 1e-3


def check_named(rank: int, world_size: int) -> str:
    report = fsdpx.verify(make_small, small_batch, shard=shard_wrongly)
    with pytest.raises(AssertionError) as raised:
        report.check()
    return str(raised.value)


def test_check_names_parameters_on_every_rank() -> None:
    for message in run_ranks(2, check_named):
        assert "4.weight (5, 8): gradient off by" in message
        assert "gradient norm: off by" in message
        assert "\n0.bias" in message or "0.weight" in message  # clipping spreads the fault


def verify_model(rank: int, world_size: int, name: str) -> float:
    def shard(model: nn.Module) -> None:
        for unit in MODELS[name].units(model):
            fully_shard(unit)
        fully_shard(model)

    report = fsdpx.verify(
        MODELS[name].make,
        lambda rank, step: make_batch(name, step=step, rank=rank),
        shard=shard,
        loss_fn=loss_of,
    )
    return report.worst


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    assert max(run_ranks(2, verify_model, name)) < 1e-6


def test_low_precision_is_seen() -> None:
    worst = max(max(each) for each in run_ranks(2, verify_small, shard_in_bf16_no_norm)[0].values())
    assert worst > 1e-4


def shard_in_bf16_no_norm(model: nn.Module) -> None:
    fully_shard(model[1])
    shard_in_bf16(model[0])
    shard_in_bf16(model[4])
    fully_shard(model)


def test_other_parameters_are_refused() -> None:
    def shard(model: nn.Module) -> nn.Module:
        model.register_parameter("extra", nn.Parameter(torch.zeros(1)))
        return fully_shard(model)

    with pytest.raises(ValueError, match="extra"):
        fsdpx.verify(make_small, small_batch, shard=shard)


@pytest.mark.parametrize(("shard", "code"), [("shard_children", 0), ("shard_in_bf16_no_norm", 1)])
def test_command(shard: str, code: int) -> None:
    here = Path(__file__).parent
    functions = [f"test_verify:{name}" for name in ("make_small", "small_batch")]
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "fsdpx.verify", *functions]
    paths = os.pathsep.join([str(here.parent), str(here)])
    done = subprocess.run(
        [*command, "--shard", f"test_verify:{shard}"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert ("DIFFERENT" in done.stdout) == bool(code)
    assert "0.weight" in done.stdout
