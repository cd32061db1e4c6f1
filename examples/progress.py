"""A progress bar on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

import dataclasses
import resource
import shutil
import sys
import time

import torch

BAR_WIDTH = 24


def peak_memory_mib(device: torch.device) -> float:
    """Most memory that this process has held so far; on a GPU, most that torch has given out."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB here


@dataclasses.dataclass(frozen=True)
class Status:
    """What is shown about a step."""

    step: int  # steps done
    loss: float
    tokens_per_second: float
    exposed: float  # part of the step in which communication was exposed, 0 to 1
    memory_mib: float  # at most so far

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f}  {self.tokens_per_second:8,.0f} tokens/s  "
            f"exposed {100 * self.exposed:4.1f} %  peak {self.memory_mib:.0f} MiB"
        )


class Progress:
    """Shows the steps of a run; does nothing where `active` is false.

    On a terminal every step moves the bar; elsewhere every `every`-th writes a line.
    """

    def __init__(self, num_steps: int, *, every: int, active: bool) -> None:
        self.num_steps, self.active = num_steps, active
        self.is_terminal = active and sys.stdout.isatty()
        self.every = 1 if self.is_terminal else every
        self.start = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether there is something to show after `step` steps."""
        return step % self.every == 0 or step in (1, self.num_steps)

    def show(self, status: Status) -> None:
        if not self.active:
            return
        counter = f"{status.step:{len(str(self.num_steps))}}/{self.num_steps}"
        if not self.is_terminal:
            print(f"step {counter}  {status}", flush=True)
            return
        elapsed = time.monotonic() - self.start
        left = elapsed / status.step * (self.num_steps - status.step)
        filled = BAR_WIDTH * status.step // self.num_steps
        line = f"{'█' * filled}{'░' * (BAR_WIDTH - filled)} {counter}  {status}  {left:.0f} s left"
        width = shutil.get_terminal_size().columns - 1
        end = "\n" if status.step == self.num_steps else ""
        print(f"\r\x1b[K{line[:width]}", end=end, flush=True)
