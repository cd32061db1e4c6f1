"""The native module fits the torch that is installed, and a misfit says what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
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


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("CXX", "no-such-compiler", "needs a C.*no-such-compiler was not found; install g"),
        ("FSDPX_CUDA", "maybe", "FSDPX_CUDA=maybe is not understood; use 0"),
    ],
)
def test_a_build_that_cannot_start_says_so_in_one_line(
    variable: str, value: str, message: str
) -> None:
    build = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode != 0
    assert re.match(f"fsdpx: .*{message}", build.stderr.splitlines()[-1])
    assert "Traceback" not in build.stderr


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA")
def test_an_nvcc_of_another_cuda_than_torch_s_is_refused(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    build = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "CUDACXX": str(nvcc), "FSDPX_CUDA": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode != 0
    assert re.search(
        r"fsdpx: .*/nvcc is of CUDA 11, but torch .* CUDA \d+\.\d+; set CUDA_HOME", build.stderr
    )
