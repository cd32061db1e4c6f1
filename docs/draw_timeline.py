"""Draws docs/timeline.svg: the schedule of three units, communication shorter than computation.

python docs/draw_timeline.py
"""

from __future__ import annotations

from pathlib import Path

from fsdpx.timeline import Record, to_svg

PICTURE = Path(__file__).with_name("timeline.svg")
TITLE = "One training step on one rank, 3 units, prefetch 1"
MIB = 2**20


COMPUTE = (  # unit, operation, begin, end
    ("U1", "wait", 0, 80),
    ("U1", "forward", 80, 180),
    ("U2", "forward", 180, 280),
    ("U3", "forward", 280, 380),
    ("U3", "wait", 440, 520),
    ("U3", "backward", 520, 670),
    ("U2", "backward", 670, 820),
    ("U1", "backward", 820, 970),
    ("U1", "wait", 970, 1040),
)
COMM = (  # unit, operation, issued, begin, end
    ("U1", "all_gather", 0, 0, 78),
    ("U2", "all_gather", 80, 80, 158),
    ("U3", "all_gather", 180, 180, 258),
    ("U3", "all_gather", 440, 440, 518),
    ("U2", "all_gather", 520, 520, 598),
    ("U3", "reduce_scatter", 670, 670, 738),
    ("U1", "all_gather", 670, 740, 818),
    ("U2", "reduce_scatter", 820, 820, 888),
    ("U1", "reduce_scatter", 970, 970, 1038),
)
RESIDENT = (  # unit, begin, end: from the issue of its gather to the end of its computation
    ("U1", 0, 180),
    ("U2", 80, 280),
    ("U3", 180, 380),
    ("U3", 440, 670),
    ("U2", 520, 820),
    ("U1", 670, 970),
)


def records() -> list[Record]:
    """The tables above, which are in microseconds, as records."""
    rows = [("compute", unit, what, begin, begin, end, 0) for unit, what, begin, end in COMPUTE]
    rows += [("comm", unit, what, *times, 4 * MIB) for unit, what, *times in COMM]
    rows += [("resident", unit, "full", begin, begin, end, 0) for unit, begin, end in RESIDENT]
    return [
        Record(lane, unit, what, 1000 * issued, 1000 * begin, 1000 * end, wire)
        for lane, unit, what, issued, begin, end, wire in rows
    ]


if __name__ == "__main__":
    PICTURE.write_text(to_svg(records(), title=TITLE), encoding="utf-8")
