"""The recorded timeline of a step: numbers, a Chrome trace and a picture.

A record is one span of time on one of three lanes: ``compute`` (forward, backward, and the waits
of the thread that computes), ``comm`` (the collectives of the communication stream) and
``resident`` (how long a unit's parameters are there in full)::

    with fsdpx.record_timeline(model) as timeline:
        train_step()
    print(timeline.summary().exposed_seconds)
    timeline.write_svg("timeline.svg")

Everything but :func:`record_timeline` is a pure function of a list of records.
"""

from fsdpx.timeline.chrome import chrome_trace, write_chrome_trace
from fsdpx.timeline.drawing import to_svg, write_png, write_svg
from fsdpx.timeline.recorder import Timeline, record_timeline
from fsdpx.timeline.records import Record, TimelineSummary, exposed_spans, summarize

__all__ = [
    "Record",
    "Timeline",
    "TimelineSummary",
    "chrome_trace",
    "exposed_spans",
    "record_timeline",
    "summarize",
    "to_svg",
    "write_chrome_trace",
    "write_png",
    "write_svg",
]
