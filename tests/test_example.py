"""The example as its users run it, under torchrun: losses, the reference, and what it writes."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from ranks import run_ranks

ROOT = Path(__file__).parents[1]
SMALL = {"layers": 3, "width": 32, "heads": 2, "context": 32, "batch-size": 2, "log-every": 4}


def write_text(folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    return text


def train(num_ranks: int, out: Path, *options: str) -> str:
    """Runs the example on a text of its own and returns what it prints."""
    text = write_text(out)
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {num_ranks}".split()
    command = [sys.executable, *(launcher if num_ranks > 1 else [])]
    command += [str(ROOT / "examples" / "train_lm.py"), "--device=cpu", *options]
    command += [f"--{name}={value}" for name, value in SMALL.items()]
    done = subprocess.run(
        [*command, "--data", str(text), "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (1, []),
        (2, ["--prefetch", "2", "--grad-accumulation", "2"]),
        (2, ["--stage", "2", "--comm", "c10d"]),
    ],
)
def test_gradients_are_the_reference_s_bit_for_bit(
    tmp_path: Path, num_ranks: int, options: list[str]
) -> None:
    printed = train(
        num_ranks, tmp_path, "--steps", "3", "--check-reference", "3", "--clip", "0", *options
    )
    rows = re.findall(
        r"step (\d+): gradients differ by (\S+) .*; loss by (\S+), from .* by (\S+)", printed
    )
    assert [row[0] for row in rows] == ["1", "2", "3"]
    for _, gradients, loss, whole in rows:
        assert float(gradients) == 0
        assert float(loss) <= 1e-5
        assert float(whole) <= 1e-5


def test_the_loss_falls_and_the_last_step_is_drawn(tmp_path: Path) -> None:
    printed = train(2, tmp_path, "--steps", "24", "--lr", "1e-2")
    losses = [float(loss) for loss in re.findall(r"^step .* loss (\S+)", printed, re.MULTILINE)]
    assert len(losses) == 7  # the first step, then every fourth
    assert losses[0] > 5
    assert losses[-1] < 3.5
    ElementTree.parse(tmp_path / "timeline.svg")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counts = collections.Counter(e["name"] for e in events if e.get("cat") == "comm")
    blocks = [f"blocks.{number}" for number in range(3)]
    assert counts == {
        # The root is kept from forward to backward; the blocks are freed and gathered again.
        "all_gather GPT": 1,
        "reduce_scatter GPT": 1,
        **{f"all_gather {block}": 2 for block in blocks},
        **{f"reduce_scatter {block}": 1 for block in blocks},
    }


def train_in_this_process(rank: int, world_size: int, arguments: list[str]) -> str:
    printed = io.StringIO()
    sys.path.insert(0, str(ROOT / "examples"))
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(ROOT / "examples" / "train_lm.py"))["main"](arguments)
    return printed.getvalue()


@pytest.mark.gpu
def test_on_gpus(tmp_path: Path) -> None:
    arguments = ["--data", str(write_text(tmp_path)), "--out", str(tmp_path), "--steps=4"]
    arguments += ["--check-reference=2", *(f"--{name}={value}" for name, value in SMALL.items())]
    printed = run_ranks(2, train_in_this_process, arguments, timeout=200)[0]
    assert "2 rank(s), cuda" in printed
    for gradients in re.findall(r"gradients differ by (\S+) ", printed):
        assert float(gradients) < 1e-5
    assert (tmp_path / "timeline.svg").exists()
