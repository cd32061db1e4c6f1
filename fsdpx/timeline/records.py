"""Records of a timeline and the numbers in them: pure functions of a list of records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Lane = Literal["compute", "comm", "resident"]
LANES: tuple[Lane, ...] = ("compute", "comm", "resident")


class Record(NamedTuple):
    """One span of the timeline, in the field order of the native recorder's events.

    Attributes:
        lane: ``"compute"``, ``"comm"`` or ``"resident"``.
        unit: The unit's name; the root of a model may be ``""``.
        operation: ``"forward"``, ``"backward"`` or ``"wait"`` on the compute lane,
            ``"all_gather"`` or ``"reduce_scatter"`` on the comm lane, ``"full"`` on the resident
            lane.
        issue_ns: When it was asked for, in nanoseconds of a steady clock that all processes of a
            host share.
        begin_ns: When it began.
        end_ns: When it ended.
        wire_bytes: Bytes that this rank sent (all-gather) or received (reduce-scatter); 0 on the
            other lanes.
    """

    lane: str
    unit: str
    operation: str
    issue_ns: int
    begin_ns: int
    end_ns: int
    wire_bytes: int = 0


class Span(NamedTuple):
    """A half-open piece of time in nanoseconds."""

    begin: int
    end: int


def merged(spans: Iterable[tuple[int, int]]) -> list[Span]:
    """The union of ``spans`` as disjoint spans in order; empty ones disappear."""
    union: list[Span] = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if union and begin <= union[-1].end:
            union[-1] = Span(union[-1].begin, max(union[-1].end, end))
        else:
            union.append(Span(begin, end))
    return union


def subtracted(spans: Iterable[tuple[int, int]], holes: Iterable[tuple[int, int]]) -> list[Span]:
    """What of ``spans`` lies in none of ``holes``, as disjoint spans in order."""
    rest: list[Span] = []
    cuts = merged(holes)
    for begin, end in merged(spans):
        for cut in cuts:
            if cut.end <= begin or cut.begin >= end:
                continue
            if cut.begin > begin:
                rest.append(Span(begin, cut.begin))
            begin = max(begin, cut.end)
        if begin < end:
            rest.append(Span(begin, end))
    return rest


def length_ns(spans: Iterable[Span]) -> int:
    """Nanoseconds in disjoint spans."""
    return sum(end - begin for begin, end in spans)


def _spans(records: Iterable[Record], lane: Lane, *operations: str) -> list[Span]:
    return [
        Span(record.begin_ns, record.end_ns)
        for record in records
        if record.lane == lane and (not operations or record.operation in operations)
    ]


def exposed_spans(records: Sequence[Record]) -> list[Span]:
    """When communication was exposed.

    That is while the compute lane waits, and while a collective runs and nothing computes.
    """
    waits = _spans(records, "compute", "wait")
    busy = subtracted(_spans(records, "compute", "forward", "backward"), waits)
    return merged(waits + subtracted(_spans(records, "comm"), busy))


@dataclasses.dataclass(frozen=True)
class TimelineSummary:
    """Totals of some recorded steps; the properties are means per step.

    Attributes:
        num_steps: Steps that the records cover.
        total_ns: From the first begin to the last end on the compute and comm lanes.
        compute_ns: Time in forward or backward, waits taken out.
        communication_ns: Time in which at least one collective ran.
        exposed_ns: See :func:`exposed_spans`.
        num_all_gathers: All-gathers that ran.
        num_reduce_scatters: Reduce-scatters that ran.
        all_gather_bytes: Bytes that this rank sent in them.
        reduce_scatter_bytes: Bytes that this rank received in them.
        max_resident: Most units that were there in full at one moment.
    """

    num_steps: int
    total_ns: int
    compute_ns: int
    communication_ns: int
    exposed_ns: int
    num_all_gathers: int
    num_reduce_scatters: int
    all_gather_bytes: int
    reduce_scatter_bytes: int
    max_resident: int

    @property
    def step_seconds(self) -> float:
        """Seconds per step."""
        return self.total_ns / self.num_steps / 1e9

    @property
    def exposed_seconds(self) -> float:
        """Seconds of exposed communication per step."""
        return self.exposed_ns / self.num_steps / 1e9

    @property
    def exposed_fraction(self) -> float:
        """The part of the time, 0 to 1, in which communication was exposed."""
        return self.exposed_ns / self.total_ns if self.total_ns else 0.0


def max_overlap(spans: Iterable[tuple[int, int]]) -> int:
    """Most of ``spans`` that share a moment; where one ends and another begins, they don't."""
    edges = [edge for begin, end in spans if end > begin for edge in ((begin, 1), (end, -1))]
    most = now = 0
    for _, step in sorted(edges):  # at one moment, ends (-1) sort before begins (+1)
        now += step
        most = max(most, now)
    return most


def summarize(records: Sequence[Record], *, num_steps: int = 1) -> TimelineSummary:
    """Adds up ``records``, which cover ``num_steps`` steps.

    Raises:
        ValueError: If ``num_steps`` is not positive.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, not {num_steps}")
    compute = _spans(records, "compute", "forward", "backward")
    waits = _spans(records, "compute", "wait")
    comm = _spans(records, "comm")
    both = compute + waits + comm
    gathers = [record for record in records if record.operation == "all_gather"]
    reductions = [record for record in records if record.operation == "reduce_scatter"]
    return TimelineSummary(
        num_steps=num_steps,
        total_ns=max(end for _, end in both) - min(begin for begin, _ in both) if both else 0,
        compute_ns=length_ns(subtracted(compute, waits)),
        communication_ns=length_ns(merged(comm)),
        exposed_ns=length_ns(exposed_spans(records)),
        num_all_gathers=len(gathers),
        num_reduce_scatters=len(reductions),
        all_gather_bytes=sum(record.wire_bytes for record in gathers),
        reduce_scatter_bytes=sum(record.wire_bytes for record in reductions),
        max_resident=max_overlap(_spans(records, "resident")),
    )


def packed_rows(records: Sequence[Record]) -> list[list[Record]]:
    """Distributes records over as few rows as possible so that no two in a row overlap."""
    rows: list[list[Record]] = []
    for record in sorted(records, key=lambda record: (record.begin_ns, -record.end_ns)):
        for row in rows:
            if row[-1].end_ns <= record.begin_ns:
                row.append(record)
                break
        else:
            rows.append([record])
    return rows
