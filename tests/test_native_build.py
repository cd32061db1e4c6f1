"""The native module fits the torch that is installed, and a misfit says what to do."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from fsdpx._native import check_native_build


def pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    info = ModuleType("fsdpx._build_info")
    info.TORCH_VERSION = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fsdpx._build_info", info)


def test_this_build_fits() -> None:
    from fsdpx import _C

    check_native_build()
    assert _C.torch_version.split("+")[0] == torch.__version__.split("+")[0]


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "2.1.0+cpu")
    with pytest.raises(ImportError, match=r"built for torch 2\.1\.0\+cpu, but torch .*make build"):
        check_native_build()


def test_the_same_release_with_another_backend_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch.__version__.split("+")[0] + "+cu999")
    check_native_build()


def test_a_missing_build_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsdpx._build_info", None)
    with pytest.raises(ImportError, match=r"not built in .*make build"):
        check_native_build()
