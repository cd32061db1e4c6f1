"""Fixtures and rules that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import cudasim
import pytest
from cudasim.jobs import job
from cudasim.shipped import SimulatedPasses, build

# Tests run next to each other and in several ranks: one thread each, also in child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def missing_gpu() -> str | None:
    """Why tests on a GPU cannot run here, or None when they can."""
    import torch

    from fsdpx import _C

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return None if _C.has_cuda else "fsdpx is built without CUDA: its build found no nvcc"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked `gpu` without a GPU and `simulation` outside of it, with the reason."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing_gpu() if on_gpu else None
    for item in on_gpu if reason is not None else []:
        item.add_marker(pytest.mark.skip(reason=str(reason)))
    outside = pytest.mark.skip(reason="needs the simulation: make test-cuda-sim")
    for item in items:
        if item.get_closest_marker("simulation") and not cudasim.active:
            item.add_marker(outside)


@pytest.fixture(autouse=True)
def _simulated_job() -> Iterator[None]:
    """Around every test in a process in which CUDA is simulated."""
    with job():
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device type under test: every test that takes it runs on CPU, and on CUDA if there is."""
    return str(request.param)


@pytest.fixture(scope="session")
def simulated_passes() -> SimulatedPasses:
    """The project's CUDA passes on a simulated device, built once."""
    return SimulatedPasses(build())


@pytest.fixture
def cuda(simulated_passes: SimulatedPasses) -> SimulatedPasses:
    """The same with nothing in the device's memory."""
    simulated_passes.clear()
    return simulated_passes
