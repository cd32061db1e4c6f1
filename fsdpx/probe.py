"""Checks once that the installed torch behaves as the engine needs: private parts of it are used.

Tested torch releases are named in `TESTED`. The probe runs the mechanism itself (attach, forward,
detach, backward that gathers on read), so another release that still behaves alike would pass it;
it is refused all the same unless FSDPX_UNTESTED_TORCH=1 is set.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import nn

from . import _C
from .dtypes import dtype_code as code

TESTED = ("2.13", "2.14")
_VARIABLE = "FSDPX_UNTESTED_TORCH"


class _Owner:
    """Attaches fresh memory when backward reads the unit."""

    def __init__(self, native: _C.Unit, master: torch.Tensor) -> None:
        self.native, self.master = native, master
        self.memory = torch.empty(0)
        self.num_accesses = self.num_completions = 0

    def attach(self) -> None:
        self.memory = self.master.clone()
        self.native.attach(self.memory.data_ptr())

    def on_access(self) -> None:
        self.num_accesses += 1
        self.attach()

    def on_first_gradient(self) -> None:
        pass

    def on_gradients(self) -> None:
        self.num_completions += 1


@functools.cache
def check_torch() -> None:
    """Raises RuntimeError if torch is not a tested release, or does not behave as one."""
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in TESTED and os.environ.get(_VARIABLE) != "1":
        raise RuntimeError(
            f"fsdpx: torch {torch.__version__} is not tested; use torch {' or '.join(TESTED)}, "
            f"or set {_VARIABLE}=1 "
            "to go on at your own risk"
        )
    problem = _probe()
    if problem:
        raise RuntimeError(
            f"fsdpx: torch {torch.__version__} does not behave as the engine needs ({problem}); "
            "use torch "
            f"{' or '.join(TESTED)}"
        )


def _probe() -> str:
    """Runs a matrix product whose weight is freed between forward and backward; returns what is
    wrong. The user's modes and defaults do not matter.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        fp32 = code(torch.float32)
        native = _C.Unit(
            "probe", 16, torch.device("cpu"), [(fp32, fp32, fp32, fp32, 4, [(0, 0, 4)])]
        )
        weight = nn.Parameter(native.segment(0, 4, torch.float32).view(2, 2))
        native.add_leaf(weight)
        native.watch(0)
        owner = _Owner(native, torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float32))
        native.set_owner(owner)
        owner.attach()
        x = torch.eye(2, dtype=torch.float32, requires_grad=True)
        y = x @ weight
        native.detach()
        owner.memory.fill_(float("nan"))
        torch.autograd.backward(y.sum())
        if owner.num_accesses != 1 or owner.num_completions != 1:
            return f"{owner.num_accesses} reads, {owner.num_completions} completions; not 1 and 1"
        if x.grad is None or x.grad.tolist() != [[3.0, 7.0], [3.0, 7.0]]:
            return "a weight that is attached again in backward gives a wrong gradient"
        native.detach()
        try:
            weight.sum()
        except RuntimeError as error:
            return "" if "not gathered" in str(error) else f"unexpected message: {error}"
        return "reading a detached parameter is not an error"
