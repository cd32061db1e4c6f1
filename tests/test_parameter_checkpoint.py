"""Distributed checkpoints and whole state dicts of sharded parameters, by torch's functions."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torch_state_dict
from ranks import run_ranks
from sharded import pair, random_gradients, set_gradients, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from fsdpx.parameter import ShardedTensor, state_dicts


class Net(nn.Module):
    """Parameters of zero to four dimensions, and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.line = nn.Linear(13, 17)
        self.deep = nn.Parameter(torch.randn(3, 4, 5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))


def trained_pair(rank: int, world_size: int, seed: int = 0, steps: int = 2) -> Any:
    module, reference = pair(rank, world_size, Net, seed)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (module, reference)]
    for step in range(steps):
        gradients = random_gradients(reference, 50 + seed + step)
        set_gradients(module, gradients)
        set_gradients(reference, gradients)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return module, reference, *optimizers


def assert_equal(got: Any, expected: Any) -> None:
    """Values of a model or optimizer state dict, sharded or not, are the same."""
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_equal(got[key], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(whole(got[key]), whole(value)), key


def assert_same(module: nn.Module, optimizer: Any, reference: nn.Module, expected: Any) -> None:
    assert_equal(module.state_dict(), reference.state_dict())
    assert_equal(optimizer.state_dict()["state"], expected.state_dict()["state"])


# ---- saving and loading sharded ----


def state_of(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    model, optim = get_state_dict(module, optimizer)
    return {"model": model, "optim": optim}


def save(rank: int, world_size: int, path: str, asynchronous: bool = False) -> None:
    module, _, optimizer, _ = trained_pair(rank, world_size)
    state = state_of(module, optimizer)
    if not asynchronous:
        dcp.save(state, checkpoint_id=path)
        return
    future = dcp.async_save(state, checkpoint_id=path)
    future.result()


def load(rank: int, world_size: int, path: str) -> None:
    module, _, optimizer, _ = trained_pair(rank, world_size, seed=7, steps=1)
    pieces = [p.to_local() for p in module.parameters()]
    state = state_of(module, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    _, reference, _, expected = trained_pair(rank, world_size)
    assert_same(module, optimizer, reference, expected)
    for p, piece in zip(module.parameters(), pieces, strict=True):
        assert p.to_local().data_ptr() == piece.data_ptr()  # loaded in place


def on_ranks(world_size: int, function: Any, *args: Any) -> None:
    if world_size == 1:
        function(0, 1, *args)
    else:
        run_ranks(world_size, function, *args, timeout=120)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_fits_every_world_size(tmp_path: Path, asynchronous: bool) -> None:
    run_ranks(2, save, str(tmp_path / "two"), asynchronous, timeout=120)
    for world_size in (1, 2, 3):
        on_ranks(world_size, load, str(tmp_path / "two"))
    if not asynchronous:
        save(0, 1, str(tmp_path / "one"))
        on_ranks(2, load, str(tmp_path / "one"))


def test_a_checkpoint_is_an_ordinary_one(tmp_path: Path) -> None:
    """A plain module loads it, and torch's converter makes an ordinary file of it."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    run_ranks(2, save, str(tmp_path / "d"), timeout=120)
    _, reference, _, _ = trained_pair(0, 1)
    plain = Net()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "d"))
    assert_equal(plain.state_dict(), reference.state_dict())
    dcp_to_torch_save(str(tmp_path / "d"), str(tmp_path / "whole.pt"))
    assert_equal(torch.load(tmp_path / "whole.pt")["model"], reference.state_dict())


def test_unknown_piece_is_an_error() -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    module, _ = pair(0, 1)
    with pytest.raises(ValueError, match=r"'a\.weight': no piece at offset"):
        module.a.weight.__get_tensor_shard__(MetadataIndex("a.weight", torch.Size([3, 3])))


# ---- whole state dicts ----


def check_get_full(rank: int, world_size: int) -> None:
    module, reference, optimizer, expected = trained_pair(rank, world_size)
    plain_model = get_model_state_dict(reference)
    plain_optim = get_optimizer_state_dict(reference, expected)
    options = StateDictOptions(full_state_dict=True)
    model = get_model_state_dict(module, options=options)
    optim = get_optimizer_state_dict(module, optimizer, options=options)
    assert all(type(value) is torch.Tensor for value in model.values())
    assert_equal(model, plain_model)
    assert_equal(optim["state"], plain_optim["state"])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = get_model_state_dict(module, options=options)
    optim = get_optimizer_state_dict(module, optimizer, options=options)
    assert bool(model) == bool(optim) == (rank == 0)
    if rank == 0:
        assert_equal(model, plain_model)
        assert_equal(optim["state"], plain_optim["state"])
    sharded = get_model_state_dict(module, options=StateDictOptions(cpu_offload=True))
    assert all(isinstance(value, ShardedTensor) for value in sharded.values())


def check_set_full(rank: int, world_size: int, broadcast: bool) -> None:
    module, _, optimizer, _ = trained_pair(rank, world_size, seed=7, steps=1)
    _, reference, _, expected = trained_pair(rank, world_size)
    model = copy.deepcopy(get_model_state_dict(reference))
    optim = copy.deepcopy(get_optimizer_state_dict(reference, expected))
    if broadcast and rank:
        model, optim = {}, {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(module, model, options=options)
    set_optimizer_state_dict(module, optimizer, optim, options=options)
    assert_same(module, optimizer, reference, expected)
    moments = [s["exp_avg"] for s in optimizer.state.values()]
    assert all(isinstance(moment, ShardedTensor) for moment in moments)
    gradients = random_gradients(reference, 9)
    set_gradients(module, gradients)
    set_gradients(reference, gradients)
    optimizer.step()
    expected.step()
    assert_same(module, optimizer, reference, expected)


def check_set_full_on_meta(rank: int, world_size: int, broadcast: bool) -> None:
    module, reference, _, _ = trained_pair(rank, world_size)
    module.to_empty(device="meta")
    model = get_model_state_dict(reference) if rank == 0 or not broadcast else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(module, model, options=options)
    assert_equal(module.state_dict(), reference.state_dict())
    assert all(isinstance(p, nn.Parameter) for p in module.parameters())


def check_strict(rank: int, world_size: int) -> None:
    module, reference, _, _ = trained_pair(rank, world_size)
    model = get_model_state_dict(reference) if rank == 0 else {}
    model.pop("line.weight", None)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(RuntimeError, match=r"line\.weight"):
        set_model_state_dict(module, model, options=options)


@pytest.mark.parametrize(
    ("check", "args"),
    [
        (check_get_full, ()),
        (check_set_full, (False,)),
        (check_set_full, (True,)),
        (check_set_full_on_meta, (False,)),
        (check_set_full_on_meta, (True,)),
        (check_strict, ()),
    ],
)
def test_whole_state_dicts(check: Any, args: tuple[Any, ...]) -> None:
    run_ranks(2, check, *args, timeout=120)


def test_torch_still_has_the_helpers() -> None:
    for name in state_dicts.WRAPPED:
        assert hasattr(getattr(torch_state_dict, name), "_fsdpx_original"), name
    before = torch_state_dict._gather_state_dict
    state_dicts.install()
    assert torch_state_dict._gather_state_dict is before


@pytest.mark.parametrize("first", ["fsdpx.parameter", state_dicts.MODULE])
def test_import_order_does_not_matter(first: str) -> None:
    second = state_dicts.MODULE if first != state_dicts.MODULE else "fsdpx.parameter"
    code = (
        f"import sys, {first}\n"
        f"assert {first != state_dicts.MODULE} or '{state_dicts.MODULE}' in sys.modules\n"
        f"import {second}\n"
        f"assert hasattr(sys.modules['{state_dicts.MODULE}']._gather_state_dict, '_fsdpx_original')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_nothing_is_initialised_by_a_single_process() -> None:
    assert not dist.is_initialized()
