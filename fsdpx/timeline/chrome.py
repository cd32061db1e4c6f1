"""The timeline as a Chrome trace."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from fsdpx.timeline.records import LANES, Record, packed_rows


def chrome_trace(records: Sequence[Record], *, rank: int = 0) -> dict[str, Any]:
    """The records in Chrome's trace event format (times in microseconds).

    The process is the rank and a lane is a thread; a lane whose spans overlap without nesting gets
    several. Since all processes of a host share the clock, the ``traceEvents`` of several ranks can
    be put into one list.
    """
    events: list[dict[str, Any]] = [_metadata(rank, 0, "process_name", name=f"rank {rank}")]
    thread = 0
    for lane in LANES:
        of_lane = [record for record in records if record.lane == lane]
        # Compute spans nest (a wait in a forward, a child's forward in its parent's), and a thread
        # can show that.
        rows = [of_lane] if lane == "compute" else packed_rows(of_lane)
        for number, row in enumerate(rows):
            name = lane if number == 0 else f"{lane} {number + 1}"
            events.append(_metadata(rank, thread, "thread_name", name=name))
            events.append(_metadata(rank, thread, "thread_sort_index", sort_index=thread))
            events.extend(_complete_event(record, rank, thread) for record in row)
            thread += 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(rank: int, thread: int, what: str, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": args}


def _complete_event(record: Record, rank: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "name": f"{record.operation} {record.unit or 'root'}",
        "cat": record.lane,
        "ts": record.begin_ns / 1e3,
        "dur": (record.end_ns - record.begin_ns) / 1e3,
        "args": {
            "unit": record.unit,
            "operation": record.operation,
            "wire_bytes": record.wire_bytes,
            "queued_us": (record.begin_ns - record.issue_ns) / 1e3,
        },
    }


def write_chrome_trace(
    path: str | os.PathLike[str], records: Sequence[Record], *, rank: int = 0
) -> None:
    """Writes :func:`chrome_trace` to ``path``, for https://ui.perfetto.dev or chrome://tracing."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(chrome_trace(records, rank=rank), file)
