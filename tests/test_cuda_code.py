"""The machine code of the CUDA build: no spills, 128-bit accesses. Looks only; runs nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fsdpx import _C

ARCHITECTURES = {"sm_80", "sm_90", "sm_100", "sm_120"}


def find_tools() -> str | None:
    """The directory of cuobjdump and nvdisasm: on PATH, or in triton, which brings them."""
    if found := shutil.which("cuobjdump"):
        return str(Path(found).parent)
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    directory = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    return str(directory) if (directory / "cuobjdump").exists() else None


TOOLS = find_tools()
pytestmark = [
    pytest.mark.skipif(not _C.has_cuda, reason="this build has no CUDA"),
    pytest.mark.skipif(TOOLS is None, reason="cuobjdump is not installed"),
]


def look(*options: str) -> str:
    environment = {**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}"}
    command = ["cuobjdump", *options, _C.__file__]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout


def test_no_kernel_spills() -> None:
    usage = look("--dump-resource-usage")
    assert set(re.findall(r"arch = (sm_\d+)", usage)) == ARCHITECTURES
    stacks = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert len(stacks) > 4 * 80
    spilled = [name for name, _, stack, local in stacks if stack != "0" or local != "0"]
    assert not spilled


@pytest.mark.parametrize(
    "kernel",
    [
        "convert_kernelIfNS_8BFloat16E",
        "convert_kernelINS_8BFloat16EfE",
        "convert_kernelIjjE",
        "reduce_kernelINS_8BFloat16EfE",
        "reduce_kernelIffE",
        "adamw_kernelIfNS_8BFloat16E",
        "norm_kernelIfE",
    ],
)
def test_accesses_have_128_bits(kernel: str) -> None:
    names = re.findall(r"Function (\S+):", look("--dump-resource-usage", "-arch", "sm_90"))
    name = next(name for name in names if kernel in name)
    code = look("-sass", "-arch", "sm_90", "-fun", name)
    assert "LDG.E.128" in code
    if "norm" not in kernel:
        assert "STG.E.128" in code
