"""What the benchmarks share: ranks and their devices, as the examples have them; clocks."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The examples are beside the benchmarks, not installed.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from launch import choose_device, process_group

__all__ = ["choose_device", "process_group"]

MIB = 2**20
# Their names since torch 2.14, where the older ones warn.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def import_cupy() -> Any:
    """cupy, or None where it is not installed or cannot use the GPU; says why on rank 0."""
    if importlib.util.find_spec("cupy") is None:
        say("without cupy's arrays: cupy is not installed")
        return None
    import cupy

    try:
        cupy.zeros(1)
    except Exception as error:  # of CUDA's driver, of its compiler, ...
        say(f"without cupy's arrays: {error}")
        return None
    return cupy


def say(text: str) -> None:
    """Prints on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def meet() -> None:
    """A barrier of the ranks' CPUs."""
    dist.all_reduce(torch.zeros(1))


def finish(device: torch.device) -> None:
    """Waits until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Times calls: by CUDA events on a GPU, by the host's clock on a CPU.

    Args:
        device: Where the calls work.
        repeat: How often a call is made between two looks at the clock, on a GPU.
        ahead_ms: How long a GPU is kept busy first, so that the host has issued all calls before
            the first one starts: a time is then the GPU's, not the host's. 0: not at all.
    """

    def __init__(self, device: torch.device, *, repeat: int = 1, ahead_ms: float = 0.0) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.repeat = repeat if self.on_gpu else 1
        self.ahead_cycles = int(ahead_ms * 1.5e6)  # at 1.5 GHz, about what GPUs run at

    def seconds(self, call: Callable[[], object]) -> float:
        """The time of one call."""
        if not self.on_gpu:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self.ahead_cycles:
            torch.cuda._sleep(self.ahead_cycles)
        begin.record()
        for _ in range(self.repeat):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / self.repeat

    def seconds_of_slowest(self, call: Callable[[], object]) -> float:
        """The same on all ranks, which start together; the longest of their times."""
        finish(self.device)
        meet()
        mine = torch.tensor([self.seconds(call)], dtype=torch.float64)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return mine.item()


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles."""
    lower, _, upper = statistics.quantiles(values, n=4)
    return (upper - lower) / 2


def ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of other / one."""
    return median([b / a for a, b in zip(ones, others, strict=True)])
