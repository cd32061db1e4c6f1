"""Starts this Python again with the simulated CUDA libraries in place of the real ones.

python tests/cudasim/run.py -m pytest -m gpu tests     # or a script, like python itself
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from cudasim.build import build, missing

NUM_DEVICES = 4  # that each process sees


def environment() -> dict[str, str]:
    """What a simulated process needs, whoever starts it."""
    out = build()
    env = dict(os.environ)
    # First in the process, they are found by their names when torch asks for the real ones.
    env["LD_PRELOAD"] = f"{out / 'libcudart.so.13'}:{out / 'libnccl.so.2'}"
    env["LD_LIBRARY_PATH"] = os.pathsep.join(
        [str(out), *filter(None, [env.get("LD_LIBRARY_PATH")])]
    )
    env["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parent.parent), *filter(None, [env.get("PYTHONPATH")])]
    )
    env["CUDASIM_DEVICES"] = str(NUM_DEVICES)
    env.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0")
    env.setdefault("OMP_NUM_THREADS", "1")
    return env


if __name__ == "__main__":
    reason = missing()
    if reason is not None:
        print(f"cudasim: SKIPPED, {reason}")
        sys.exit(0)
    print("cudasim: a simulation, no GPU is involved", flush=True)
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
