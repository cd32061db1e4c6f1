"""Sharded tensors in one process: copies, modules, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded import (
    Model,
    pair,
    random_gradients,
    set_gradients,
    shard_tensors,
    trained,
    whole,
)
from torch import nn

from fsdpx.parameter import ShardedTensor, register

# ---- copies ----


def test_copies() -> None:
    p = trained()
    p.grad = ShardedTensor(torch.ones(14), p._spec)
    copied = copy.deepcopy(p)
    assert isinstance(copied, nn.Parameter)
    assert copied.requires_grad
    assert torch.equal(copied.grad.to_local(), torch.ones(14))
    assert copied.to_local().data_ptr() != p.to_local().data_ptr()
    assert copy.copy(p).to_local().data_ptr() == p.to_local().data_ptr()
    pickled = pickle.loads(pickle.dumps(p))
    assert isinstance(pickled, nn.Parameter)
    assert pickled._spec == p._spec
    assert torch.equal(pickled.to_local(), p.to_local())
    module, _ = pair(0, 1)
    assert all(isinstance(q, ShardedTensor) for q in copy.deepcopy(module).parameters())


@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_save_and_load(weights_only: bool) -> None:
    module, _ = pair(0, 1)
    optimizer = torch.optim.AdamW(module.parameters())
    set_gradients(module, random_gradients(Model(), 0))
    optimizer.step()
    buffer = io.BytesIO()
    torch.save({"model": module.state_dict(), "optim": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=weights_only)
    for name, value in module.state_dict().items():
        assert torch.equal(loaded["model"][name].to_local(), value.to_local())
    state = loaded["optim"]["state"][0]["exp_avg"]
    assert torch.equal(state.to_local(), optimizer.state[module.scale]["exp_avg"].to_local())
    buffer.seek(0)
    assert torch.load(buffer, map_location="meta")["model"]["a.weight"].to_local().is_meta


def test_saving_a_piece_does_not_save_its_flat_tensor() -> None:
    shard = shard_tensors([("a", torch.ones(10)), ("b", torch.ones(100_000))])
    buffer = io.BytesIO()
    torch.save(shard.parameters["a"], buffer)
    assert buffer.tell() < 20_000


def test_loading_outside_of_the_group_says_so() -> None:
    p = pickle.loads(pickle.dumps(trained())).detach()
    assert torch.equal((p * 2).to_local(), torch.arange(3.0, 17.0) * 2)
    for use in (p.full_tensor, p.sum, p.norm, lambda: torch.equal(p, p.clone())):
        with pytest.raises(RuntimeError, match=r"'layer.w' is shared by 3 ranks, but was loaded"):
            use()


# ---- module methods ----


def test_module_conversions_keep_the_objects() -> None:
    module, _ = pair(0, 1)
    before = dict(module.named_parameters())
    module.bfloat16()
    for name, p in module.named_parameters():
        assert p is before[name]
        assert isinstance(p, nn.Parameter)
        assert (p.dtype, p.to_local().dtype) == (torch.bfloat16, torch.bfloat16)
    module.to_empty(device="meta")
    assert module.a.weight.to_local().is_meta


def test_load_state_dict() -> None:
    module, reference = pair(0, 1)
    other = Model()
    module.load_state_dict(other.state_dict())
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(p), q)
    sharded, _ = pair(0, 1, seed=5)
    module.load_state_dict(sharded.state_dict())
    fresh, _ = pair(0, 1, seed=9)
    fresh.load_state_dict(module.state_dict(), assign=True)
    for p, q in zip(fresh.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(whole(p), whole(q))
        assert isinstance(p, ShardedTensor)
    assert all(type(value) is ShardedTensor for value in module.state_dict().values())
    assert all(
        q.shape == p.shape for p, q in zip(reference.parameters(), module.parameters(), strict=True)
    )


# ---- errors ----

REFUSED: dict[str, Callable[[ShardedTensor], Any]] = {
    "aten.mm": lambda p: p @ torch.ones(5, 2),
    "aten.t": lambda p: p.t(),
    "aten.transpose": lambda p: p.mT,
    "aten.select": lambda p: p[0],
    "aten.slice": lambda p: p[1:3],
    "aten.unbind": list,
    "aten.cat": lambda p: torch.cat([p, p]),
    "aten.stack": lambda p: torch.stack([p, p]),
    "aten.cumsum": lambda p: p.cumsum(0),
    "aten.sort": lambda p: p.sort(),
    "aten.topk": lambda p: p.topk(2),
    "aten.argmax": lambda p: p.argmax(),
    "aten.std": lambda p: p.std(),
    "aten._softmax": lambda p: p.softmax(-1),
    "aten.sum": lambda p: p.sum(0),
    "aten.linalg_vector_norm": lambda p: p.norm(dim=1),
    "aten.amax": lambda p: p.amax(0),
    "aten.bernoulli": torch.bernoulli,
    "aten.index": lambda p: p[p > 0],
    "aten.expand": lambda p: p.expand(2, 7, 5),
    "aten.view.dtype": lambda p: p.view(torch.int32),
    "aten._foreach_mm": lambda p: torch._foreach_mm([p], [p]),
    "aten.eye": lambda p: nn.init.eye_(p),
    "sharded differently": lambda p: p + trained(0, 35).detach(),
    "unsharded tensor": lambda p: torch.zeros(7, 5).add_(p),
    "into an unsharded": lambda p: torch.zeros(7, 5).copy_(p),
    r"shape \(3, 7, 5\)": lambda p: p + torch.ones(3, 7, 5),
    r"shape \(4,\)": lambda p: p * torch.ones(4),
    "item": lambda p: p.item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(),
    "bool": bool,
    "float": float,
    "int": int,
    "share_memory_": lambda p: p.share_memory_(),
    "DLPack": torch.from_dlpack,
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name_with_the_way_out(what: str) -> None:
    p = trained().detach()
    with pytest.raises(RuntimeError, match=what) as caught:
        REFUSED[what](p)
    assert "'layer.w'" in str(caught.value)
    assert "full_tensor()" in str(caught.value)


def test_registering_again_changes_nothing() -> None:
    from torch.optim.optimizer import _foreach_supported_types as types

    register()
    assert types.count(ShardedTensor) == 1
