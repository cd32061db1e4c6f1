"""Fixtures and rules that all tests share."""

from __future__ import annotations

import os

import pytest

# Tests run next to each other and in several ranks: one thread each, also in child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def missing_gpu() -> str | None:
    """Why tests on a GPU cannot run here, or None when they can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "no CUDA device is visible"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked `gpu`, with the reason, where there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing_gpu() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device type under test: every test that takes it runs on CPU, and on CUDA if there is."""
    return str(request.param)
