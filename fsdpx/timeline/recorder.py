"""Recording a timeline from a running model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fsdpx.timeline.chrome import write_chrome_trace
from fsdpx.timeline.drawing import write_png, write_svg
from fsdpx.timeline.records import Record, TimelineSummary, summarize

if TYPE_CHECKING:
    from torch import nn


class Timeline:
    """What :func:`record_timeline` recorded on this rank; empty until its block ends.

    Attributes:
        records: In order of their begin.
        rank: This rank in the communicator of the model's outermost unit.
    """

    def __init__(self, *, rank: int) -> None:
        self.rank = rank
        self.records: list[Record] = []

    def summary(self, *, num_steps: int = 1) -> TimelineSummary:
        """The numbers of the timeline, which covers ``num_steps`` steps."""
        return summarize(self.records, num_steps=num_steps)

    def write_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a Chrome trace to ``path``."""
        write_chrome_trace(path, self.records, rank=self.rank)

    def write_svg(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Draws the timeline as SVG into ``path``."""
        write_svg(path, self.records, title=title or self._title())

    def write_png(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Draws the timeline as PNG into ``path``; needs matplotlib."""
        write_png(path, self.records, title=title or self._title())

    def _title(self) -> str:
        num_units = len({record.unit for record in self.records})
        return f"fsdpx timeline, rank {self.rank}, {num_units} units"


@contextlib.contextmanager
def record_timeline(model: nn.Module) -> Iterator[Timeline]:
    """Records what ``model``'s units do on this rank while the block runs.

    Each rank records for itself; a block that only some ranks enter is fine. Recording costs a few
    hundred nanoseconds an event.

    Args:
        model: A module that was passed to ``fully_shard``.

    Yields:
        The timeline, whose records are there after the block.

    Raises:
        ValueError: If no unit of ``model`` was made by ``fully_shard``.
    """
    from fsdpx.unit import communicators  # the engine; the rest of the timeline works without it

    comms = communicators(model)
    if not comms:
        raise ValueError("record_timeline: no part of the model was passed to fully_shard")
    recorders = list({id(comm.recorder): comm.recorder for comm in comms}.values())
    timeline = Timeline(rank=comms[0].rank)
    for recorder in recorders:
        recorder.take()  # what an earlier block may have left
        recorder.enable(True)
    try:
        yield timeline
    finally:
        for recorder in recorders:
            recorder.enable(False)
            timeline.records.extend(Record(*event) for event in recorder.take())
        timeline.records.sort(key=lambda record: (record.begin_ns, -record.end_ns))
