"""A SIMULATION of CUDA for tests on machines without a GPU: see README.md in this directory.

This module controls the runtime of a process that `run.py` started:

    cudasim.configure(order="late", seed=3)
    cudasim.busy(100, "forward")          # 100 virtual microseconds on the current stream
    cudasim.trace()                       # [{"rank", "stream", "name", "start_us", "end_us", ...}]

It imports nothing of torch.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from typing import Any

ORDERS = ("eager", "late", "random")
COUNTERS = ("allocations", "frees", "host_waits", "launches", "copies", "collectives", "blocks")

runtime = ctypes.CDLL(None)  # run.py has the simulated libraries loaded first
active = hasattr(runtime, "cudasim_set")
if active:
    for _name in ("trace", "traffic", "waits"):
        getattr(runtime, f"cudasim_{_name}").restype = ctypes.c_char_p
    runtime.cudasim_get.restype = runtime.cudasim_host_us.restype = ctypes.c_double
    for _name in ("counter", "peak_bytes", "contexts"):
        getattr(runtime, f"cudasim_{_name}").restype = ctypes.c_uint64


def configure(**settings: object) -> None:
    """Sets order, seed, timeout_s, mem_gbps, link_gbps, launch_us, ... (the table in sim.h)."""
    for name, value in settings.items():
        if runtime.cudasim_set(name.encode(), str(value).encode()):
            raise ValueError(f"the simulation has no setting {name}")


def setting(name: str) -> float:
    return float(runtime.cudasim_get(name.encode()))


def _stream(stream: Any) -> ctypes.c_void_p:
    if stream is None and "torch" in sys.modules:
        stream = sys.modules["torch"].cuda.current_stream()
    return ctypes.c_void_p(getattr(stream, "cuda_stream", stream))


def busy(us: float, name: str = "busy", stream: Any = None) -> None:
    """An operation of `us` virtual microseconds on a stream (default: torch's current one)."""
    runtime.cudasim_busy(_stream(stream), ctypes.c_double(us), name.encode())


def charge(nbytes: int, name: str, stream: Any = None) -> None:
    """Charges a stream's clock for memory traffic of work that was done by other means."""
    runtime.cudasim_charge(_stream(stream), ctypes.c_double(nbytes), name.encode())


def write(address: int, source: int, nbytes: int) -> None:
    """An operation of the current stream that writes what is now at `source`, on the host.

    It takes no time: `charge` says what the work costs that made it.
    """
    target, data = ctypes.c_void_p(address), ctypes.c_void_p(source)
    runtime.cudasim_write(_stream(None), target, data, ctypes.c_size_t(nbytes))


def drain(stream: Any = None) -> None:
    """Runs what is queued on a stream; the host's virtual clock does not wait for it."""
    runtime.cudasim_drain(_stream(stream))


def finish() -> None:
    """Runs all that is queued."""
    runtime.cudasim_drain_all()


def pending() -> int:
    """Operations that have not run yet."""
    return int(runtime.cudasim_pending())


def host_us() -> float:
    return float(runtime.cudasim_host_us())


def wrote(address: int, nbytes: int) -> None:
    """Device memory was written by other means."""
    runtime.cudasim_mark(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 2)


def poison(address: int, nbytes: int) -> None:
    """Makes device memory NaN and not written: whoever reads it now makes a mistake that shows."""
    ctypes.memset(address, 0xFF, nbytes)
    runtime.cudasim_mark(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 1)


def fail_allocations_after(count: int) -> None:
    """The device has memory for `count` more allocations (until the next reset)."""
    runtime.cudasim_fail_allocations_after(ctypes.c_int64(count))


def counters() -> dict[str, int]:
    """What the host has done since the last reset: see COUNTERS."""
    return {name: int(runtime.cudasim_counter(i)) for i, name in enumerate(COUNTERS)}


def peak_bytes() -> int:
    """The most device memory that was allocated at a time since the last reset."""
    return int(runtime.cudasim_peak_bytes())


def used_devices() -> list[int]:
    """Those that were the current one of some thread of this process when it made a call that gives
    a device a context, since the last reset.
    """
    mask = int(runtime.cudasim_contexts())
    return [device for device in range(64) if mask >> device & 1]


def traffic() -> list[dict[str, Any]]:
    """Accesses of kernels to global memory since the last reset, by kernel, opcode and width."""
    found: list[dict[str, Any]] = json.loads(runtime.cudasim_traffic().decode())
    return found


def trace() -> list[dict[str, Any]]:
    """Runs what is queued; the spans of virtual time since the last reset."""
    spans: list[dict[str, Any]] = json.loads(runtime.cudasim_trace().decode())
    return spans


def waits() -> list[dict[str, Any]]:
    """Waits of streams for events since the last reset, and which operations they order."""
    found: list[dict[str, Any]] = json.loads(runtime.cudasim_waits().decode())
    return found


def drop_waits(period: int, indices: Sequence[int]) -> None:
    """Leaves out of each `period` waits for events those with these indices, until a reset."""
    array = (ctypes.c_size_t * len(indices))(*indices)
    runtime.cudasim_drop_waits(ctypes.c_size_t(period), array, ctypes.c_size_t(len(indices)))


def reset() -> None:
    """Runs what is queued, forgets a fault, and starts clocks, trace and counters at 0."""
    runtime.cudasim_reset()
