"""fsdpx.shard_ops on CPU, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdpx import shard_ops

NORMED = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", NORMED)
def test_norm_and_check(dtype: torch.dtype) -> None:
    src = torch.randn(70_001, dtype=torch.float64).to(dtype)
    got = shard_ops.norm_and_check(src)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert math.isclose(float(got[0]), float(src.double().square().sum()), rel_tol=1e-5)
    assert got[1] == 0
    src[-1] = math.inf
    assert shard_ops.norm_and_check(src).tolist() == [math.inf, 1]


def test_adamw_follows_torch() -> None:
    param = torch.nn.Parameter(torch.randn(1000))
    optimizer = torch.optim.AdamW([param], lr=0.01)
    own, state = param.detach().clone(), [torch.zeros(1000), torch.zeros(1000)]
    copy = torch.empty(1000, dtype=torch.float16)
    for step in range(1, 4):
        param.grad = torch.randn(1000)
        version = own._version
        shard_ops.adamw(own, param.grad, *state, step=step, lr=0.01, copy=copy)
        optimizer.step()
        assert own._version > version
        torch.testing.assert_close(own, param.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(copy, own.to(torch.float16))


def adamw(**changed: Any) -> None:
    tensors = {name: torch.zeros(4) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    shard_ops.adamw(**{**tensors, "step": 1, "lr": 0.1, **changed})


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "norm of ints": (
        "src is torch.int32",
        lambda: shard_ops.norm_and_check(torch.zeros(2, dtype=torch.int32)),
    ),
    "norm of strides": (
        "src is not contiguous",
        lambda: shard_ops.norm_and_check(torch.zeros(4)[::2]),
    ),
    "norm on meta": (
        "src is on meta",
        lambda: shard_ops.norm_and_check(torch.zeros(4, device="meta")),
    ),
    "half parameters": (
        "param is torch.float16; it must be torch.float32",
        lambda: adamw(param=torch.zeros(4, dtype=torch.float16)),
    ),
    "sizes": ("grad has 3 elements", lambda: adamw(grad=torch.zeros(3))),
    "copy": ("copy is torch.float32", lambda: adamw(copy=torch.zeros(4))),
    "step": ("step is 0; the first update is step 1", lambda: adamw(step=0)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    message, call = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()
