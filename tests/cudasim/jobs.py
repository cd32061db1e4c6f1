"""What a test needs around it when CUDA is simulated."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import cudasim

DEFAULTS: dict[str, object] = {
    "order": "eager",
    "seed": 1,
    "timeout_s": 60,
    "call_us": 0,
    "capturing": 0,
    "nvlink": 1,
    "nccl_windows": 1,
    "nccl_absent": 0,
    "nccl_hangs": 0,
    "mem_gbps": 4000,
    "host_gbps": 50,
    "link_gbps": 400,
    "launch_us": 2,
    "link_us": 10,
}


@contextlib.contextmanager
def job() -> Iterator[None]:
    """Default settings, clocks at 0, torch's own operators on the CPU, no work left behind."""
    if not cudasim.active:
        yield
        return
    from cudasim.cpu_operators import CpuOperators

    cudasim.reset()
    cudasim.configure(**DEFAULTS)
    try:
        with CpuOperators():
            yield
        cudasim.finish()  # a GPU would have run it without being asked, and other ranks may wait
    finally:
        cudasim.configure(order="eager")


def new_session() -> dict[str, str]:
    """Variables that processes share which see each other's device memory."""
    if not cudasim.active:
        return {}
    return {"CUDASIM_SESSION": tempfile.mkdtemp(prefix="cudasim-")}
