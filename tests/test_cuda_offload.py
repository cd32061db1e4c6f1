"""CPU offload on CUDA: the bits of a run without it, in every order of streams."""

from __future__ import annotations

import itertools

import cudasim
import pytest
from cuda_training import Training
from test_cuda_training import COMMS, ORDERS, check

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("world_size", "comm"), [(1, "auto"), *((2, c) for c in COMMS)])
def test_every_order(world_size: int, comm: str, low: bool) -> None:
    training = Training(comm=comm, low=low, offload="pinned")
    check(world_size, training, ORDERS, exact=comm in ("auto", "nvlink"))
