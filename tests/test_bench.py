"""The benchmarks, at sizes that take no time: they run, and no row has wrong elements."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

BENCH = Path(__file__).parents[1] / "bench"
# The simulation has no kernel that only takes time.
SMALL_COLLECTIVES = ["--mib", "0.5", "--rounds", "2", "--repeat", "2", "--ahead", "0"]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _device_there_is(device: str) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("benchmarks take the GPU where there is one")


def printed(program: str, arguments: list[str]) -> str:
    """What a program of bench/ prints, run in this process."""
    text = io.StringIO()
    sys.path.insert(0, str(BENCH))
    try:
        main = runpy.run_path(str(BENCH / f"{program}.py"))["main"]
        with contextlib.redirect_stdout(text):
            main(arguments)
    finally:
        sys.path.remove(str(BENCH))
    return text.getvalue()


def printed_by_rank(rank: int, world_size: int, program: str, arguments: list[str]) -> str:
    return printed(program, arguments)


def check_rows(text: str, expected: list[str]) -> None:
    """Each row has a name that is expected, and ends in its number of wrong elements."""
    rows = [line for line in text.splitlines() if re.search(r" [\d.]+ .* \d+$", line)]
    for name in expected:
        assert any(name in row for row in rows), f"no row of {name} in\n{text}"
    assert rows
    assert all(row.split()[-1] == "0" for row in rows), text


def test_kernels() -> None:
    text = printed("kernels", ["--mib", "0.05", "--rounds", "2"])
    operations = ["pack", "unpack", "gather", "reduce", "norm", "AdamW"]
    check_rows(text, [*operations, "fsdpx", "FSDP2", "torch"])


def test_collectives(device: str) -> None:
    first, second = run_ranks(2, printed_by_rank, "collectives", SMALL_COLLECTIVES, timeout=240)
    kinds = {"cpu": ["shm", "c10d"], "cuda": ["nvlink", "nvlink-copy", "nccl", "c10d"]}[device]
    bare = {"cpu": "gloo", "cuda": "NCCL"}[device]
    check_rows(first, [*(f"fsdpx {kind}" for kind in kinds), "FSDP2", f"{bare} by torch"])
    assert second == ""


def test_steps(device: str) -> None:
    small = ["--layers", "1", "--width", "8", "--units", "2", "--batch-size", "1", "--steps", "2"]
    text, _ = run_ranks(2, printed_by_rank, "step", [*small, "--warmup", "1"], timeout=240)
    rows = re.findall(r"^(step fp32|step bf16|host|memory)\b.* wrong (\d+)$", text, re.MULTILINE)
    assert dict(rows) == {"step fp32": "0", "step bf16": "0", "host": "0", "memory": "0"}, text


def test_desync_check(device: str) -> None:
    kinds = {"cpu": ["shm", "c10d"], "cuda": ["nccl"]}[device]
    arguments = ["--comm", *kinds, "--layers", "1", "--width", "8"]
    text, _ = run_ranks(2, printed_by_rank, "desync_check", arguments, timeout=240)
    assert [line.split()[0] for line in text.splitlines()] == ["kind", *kinds], text
    for line in text.splitlines()[1:]:
        assert float(line.split()[-1].rstrip("%")) > 0
