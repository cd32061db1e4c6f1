"""Lays a timeline out as shapes, which :mod:`fsdpx.timeline.drawing` writes as SVG or PNG.

Three lanes: the compute stream, the comm stream, and the units whose parameters are there in full.
Forward comes out on the left and backward on the right because time runs that way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from fsdpx.timeline.records import Record, exposed_spans, packed_rows, subtracted, summarize

Anchor = Literal["start", "middle", "end"]

INK = "#1e1e1e"
MARGIN_LEFT, MARGIN_RIGHT = 160.0, 60.0
LANE_TOP, COMPUTE_HEIGHT, COMM_HEIGHT = 80.0, 50.0, 50.0
MIN_WIDTH, MAX_WIDTH, WIDTH_PER_SPAN = 1268.0, 3200.0, 34.0
FONT_SIZES = (14.0, 12.0, 10.0, 8.5)
CHAR_WIDTH = 0.6  # of the font size; sans-serif letters are about this wide
NS_PER_UNIT = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}


class Style(NamedTuple):
    """How the spans of an operation look and what they are called in a label."""

    word: str
    fill: str
    stroke: str
    dashed: bool = False


STYLES = {
    "forward": Style("fwd", "#b2f2bb", "#2f9e44"),
    "backward": Style("bwd", "#b2f2bb", "#2f9e44"),
    "wait": Style("wait", "#fff4e6", "#e8590c", dashed=True),
    "all_gather": Style("AG", "#a5d8ff", "#1971c2"),
    "reduce_scatter": Style("RS", "#ffc9c9", "#e03131"),
    "full": Style("full", "#dee2e6", "#868e96"),
}
EXPOSED = "#e8590c"


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle; ``hover`` is shown while the pointer rests on it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str
    dashed: bool = False
    hover: str = ""
    radius: float = 6.0
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Text:
    """A line of text with its baseline at ``y``; an upright one is turned, centred on its point."""

    x: float
    y: float
    text: str
    size: float
    color: str = INK
    anchor: Anchor = "start"
    upright: bool = False


@dataclasses.dataclass(frozen=True)
class Line:
    """A straight line, with an arrow head at its end if wanted."""

    x1: float
    y1: float
    x2: float
    y2: float
    color: str = INK
    width: float = 1.0
    dashed: bool = False
    arrow: bool = False


Shape = Box | Text | Line


@dataclasses.dataclass(frozen=True)
class Picture:
    """Shapes in drawing order on a white ground, in pixels from the top left corner."""

    width: float
    height: float
    shapes: tuple[Shape, ...]


@dataclasses.dataclass(frozen=True)
class Scale:
    """Where a time lies on the time axis, and what units are called in labels."""

    begin_ns: int
    end_ns: int
    left: float
    right: float
    names: Mapping[str, Sequence[str]]

    def x(self, time_ns: float) -> float:
        """Pixels from the left edge of the picture; times outside the axis go to its ends."""
        time_ns = min(max(time_ns, self.begin_ns), self.end_ns)
        span = max(self.end_ns - self.begin_ns, 1)
        return self.left + (time_ns - self.begin_ns) / span * (self.right - self.left)


def duration_text(duration_ns: float) -> str:
    """``1234567`` as ``"1.23 ms"``: three digits and the unit that suits them."""
    name = _time_unit(duration_ns)
    return f"{duration_ns / NS_PER_UNIT[name]:.3g} {name}"


def bytes_text(num_bytes: int) -> str:
    """``1572864`` as ``"1.5 MiB"``."""
    size, names = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(names) > 1:
        size /= 1024
        names.pop(0)
    return f"{size:.3g} {names[0]}"


def _time_unit(duration_ns: float) -> str:
    for name in ("s", "ms", "µs"):
        if duration_ns >= NS_PER_UNIT[name]:
            return name
    return "ns"


def draw(records: Sequence[Record], *, title: str, width: float | None = None) -> Picture:
    """Lays ``records`` out.

    Args:
        records: What to draw; usually one step of one rank.
        title: The line at the top.
        width: Pixels; by default as wide as the number of spans asks for, within limits.

    Raises:
        ValueError: If there are no records.
    """
    if not records:
        raise ValueError("records is empty: record a step with record_timeline before drawing it")
    compute = [record for record in records if record.lane == "compute"]
    comm = [record for record in records if record.lane == "comm"]
    if width is None:
        num_spans = max(len(compute), len(comm))
        needed = MARGIN_LEFT + MARGIN_RIGHT + WIDTH_PER_SPAN * num_spans
        width = min(max(MIN_WIDTH, needed), MAX_WIDTH)
    shown = compute + comm or records  # a unit may stay in full long before and after
    begin = min(record.begin_ns for record in shown)
    end = max(record.end_ns for record in shown)
    names = label_names(record.unit for record in records)
    scale = Scale(begin, end, MARGIN_LEFT, width - MARGIN_RIGHT - 50, names)  # 50: arrow and word
    shapes: list[Shape] = [Text(20, 33, title, 24)]
    shapes += _lane_name(LANE_TOP + COMPUTE_HEIGHT / 2, "compute", "stream")
    shapes += _phase_names(compute, scale)
    shapes += _compute_lane(compute, scale)
    comm_top = LANE_TOP + COMPUTE_HEIGHT + 30
    comm_rows, comm_height = _rows(comm, COMM_HEIGHT)
    shapes += _lane_name(comm_top + comm_height * len(comm_rows) / 2, "comm", "stream")
    shapes += _exposed_marks(records, scale, comm_top - 9)
    shapes += _row_lane(comm_rows, scale, comm_top, comm_height)
    shapes += _queue_marks(comm, scale, comm_top + comm_height * len(comm_rows))
    resident_top = comm_top + comm_height * len(comm_rows) + 45
    resident = [record for record in records if record.lane == "resident"]
    rows, height = _rows(resident, 40)
    shapes += _lane_name(resident_top + height * len(rows) / 2, "resident", "params")
    shapes += _row_lane(rows, scale, resident_top, height)
    axis_y = resident_top + height * len(rows) + 30
    shapes += _axis(scale, axis_y)
    shapes += _legend(axis_y + 50)
    shapes += _numbers(records, axis_y + 82)
    return Picture(width, axis_y + 135, tuple(shapes))


def _lane_name(middle: float, first: str, second: str) -> list[Shape]:
    x = MARGIN_LEFT - 10
    return [
        Text(x, middle + 5 - 9, first, 15, anchor="end"),
        Text(x, middle + 5 + 9, second, 15, anchor="end"),
    ]


def _phase_names(compute: Sequence[Record], scale: Scale) -> Iterator[Shape]:
    """Writes "forward" or "backward, in reverse" where each of them begins, if there is room."""
    phase, free_from = "", 0.0
    words = {"forward": "forward", "backward": "backward, in reverse"}
    for record in sorted(compute, key=lambda record: (record.begin_ns, -record.end_ns)):
        if record.operation not in words or record.operation == phase:
            continue
        phase = record.operation
        x = scale.x(record.begin_ns)
        if x >= free_from:
            yield Text(x, LANE_TOP - 13, words[phase], 14)
            free_from = x + text_width(words[phase], 14) + 10


def _compute_lane(compute: Sequence[Record], scale: Scale) -> Iterator[Shape]:
    """Boxes that may nest: a wait in a forward, a child unit's forward in its parent's.

    A box that holds others is dashed and they are drawn inside it; its label goes where it shows.
    """
    visible = [
        record  # each read of a unit that is there already leaves a wait of next to nothing
        for record in compute
        if record.operation != "wait" or scale.x(record.end_ns) - scale.x(record.begin_ns) >= 1
    ]
    ordered = sorted(visible, key=lambda record: (record.begin_ns, -record.end_ns))
    open_ones: list[Record] = []
    for index, record in enumerate(ordered):
        # What ends before this one does not hold it, even where they overlap a little.
        open_ones = [outer for outer in open_ones if outer.end_ns >= record.end_ns]
        depth = len(open_ones)
        open_ones.append(record)
        inner = _inner_spans(ordered, index)
        inset = min(5.0 * depth, COMPUTE_HEIGHT / 2 - 8)
        holds_units = any(operation != "wait" for operation, _, _ in inner)
        yield from _span_shapes(
            record,
            scale,
            top=LANE_TOP + inset,
            height=COMPUTE_HEIGHT - 2 * inset,
            covered=[(begin, end) for _, begin, end in inner],
            dashed=holds_units,
        )


def _inner_spans(ordered: Sequence[Record], index: int) -> list[tuple[str, int, int]]:
    outer, inner = ordered[index], []
    for record in ordered[index + 1 :]:
        if record.begin_ns >= outer.end_ns:
            break
        inner.append((record.operation, record.begin_ns, record.end_ns))
    return inner


def _rows(records: Sequence[Record], height: float) -> tuple[list[list[Record]], float]:
    """The rows of a lane, and the height of each: lower, down to a limit, the more there are."""
    rows = packed_rows(records) or [[]]
    return rows, max(height / math.sqrt(len(rows)), 15.0) if len(rows) > 1 else height


def _row_lane(
    rows: Sequence[Sequence[Record]], scale: Scale, top: float, height: float
) -> Iterator[Shape]:
    gap = 0.0 if len(rows) == 1 else 2.0
    for number, row in enumerate(rows):
        for record in row:
            yield from _span_shapes(record, scale, top=top + number * height, height=height - gap)


def _span_shapes(
    record: Record,
    scale: Scale,
    *,
    top: float,
    height: float,
    covered: Sequence[tuple[int, int]] = (),
    dashed: bool = False,
) -> Iterator[Shape]:
    """The box of a span, and its label in the widest part that ``covered`` leaves free."""
    style = STYLES.get(record.operation, Style(record.operation, "#eebefa", "#9c36b5"))
    left, right = scale.x(record.begin_ns), scale.x(record.end_ns)
    yield Box(
        x=left,
        y=top,
        width=max(right - left, 0.5),
        height=height,
        fill=style.fill,
        stroke=style.stroke,
        dashed=dashed or style.dashed,
        hover=hover_text(record),
        radius=min(6.0, height / 4, max(right - left, 0.5) / 4),
        kind=f"{record.lane} {record.operation}",
    )
    free = subtracted([(record.begin_ns, record.end_ns)], covered)
    if free:
        widest = max(free, key=lambda span: span.end - span.begin)
        left, right = scale.x(widest.begin), scale.x(widest.end)
        label = _label(record, style, scale.names[record.unit], right - left, height)
        if label is not None:
            text, size, upright = label
            baseline = top + height / 2 + (0 if upright else size * 0.35)
            yield Text((left + right) / 2, baseline, text, size, style.stroke, "middle", upright)


def hover_text(record: Record) -> str:
    """Everything about a span, one fact a line."""
    lines = [
        f"{record.operation.replace('_', '-')} {record.unit or 'root'}",
        f"took {duration_text(record.end_ns - record.begin_ns)}",
    ]
    if record.begin_ns > record.issue_ns:
        lines.append(f"queued for {duration_text(record.begin_ns - record.issue_ns)}")
    if record.lane == "comm":
        lines.append(f"{bytes_text(record.wire_bytes)} on the wire")
    return "\n".join(lines)


def text_width(text: str, size: float) -> float:
    """About how many pixels ``text`` takes."""
    return len(text) * size * CHAR_WIDTH


def label_names(units: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What each unit may be called in a label, longest first.

    Names lose the dotted prefix that all dotted ones share (``"model.layers.3"`` is ``"3"`` among
    layers), and may lose everything but their last part where that is still too long.
    """
    paths = [unit.split(".") for unit in set(units) if unit]
    num_shared = 0
    for parts in zip(*(path[:-1] for path in paths if len(path) > 1), strict=False):
        if len(set(parts)) > 1:
            break
        num_shared += 1
    names: dict[str, tuple[str, ...]] = {"": ("root",)}
    for path in paths:
        long, short = ".".join(path[num_shared:]) or path[-1], path[-1]
        names[".".join(path)] = (long, short) if long != short else (short,)
    return names


def _label(
    record: Record, style: Style, names: Sequence[str], width: float, height: float
) -> tuple[str, float, bool] | None:
    """The longest label that fits, its size, and whether it stands upright; or None."""
    if record.lane == "resident":
        texts = [f"{name} full" for name in names] + [names[-1]]
    elif record.operation == "wait":
        texts = [style.word]
    else:
        texts = [f"{style.word} {name}" for name in names]
    sizes = [size for size in FONT_SIZES if size <= height * 0.65]
    for text in texts:
        for size in sizes:
            if text_width(text, size) <= width - 4:
                return text, size, False
    for size in sizes:
        if size * 1.1 <= width and text_width(texts[-1], size) <= height - 4:
            return texts[-1], size, True
    return None


def _exposed_marks(records: Sequence[Record], scale: Scale, y: float) -> Iterator[Shape]:
    """An orange bar above the comm lane wherever communication was exposed."""
    for begin, end in exposed_spans(records):
        left, width = scale.x(begin), scale.x(end) - scale.x(begin)
        hover = f"exposed communication\ntook {duration_text(end - begin)}"
        if width >= 1:
            yield Box(left, y, width, 4, EXPOSED, EXPOSED, hover=hover, radius=0, kind="exposed")


def _queue_marks(comm: Sequence[Record], scale: Scale, bottom: float) -> Iterator[Shape]:
    """Under the comm lane, a dashed line from where a collective was issued to where it began."""
    for number, record in enumerate(sorted(comm, key=lambda record: record.issue_ns)):
        issued, began = scale.x(record.issue_ns), scale.x(record.begin_ns)
        if began - issued < 4:
            continue
        y = bottom + 6 + 6 * (number % 3)  # neighbours often queue at the same time
        color = STYLES.get(record.operation, STYLES["full"]).stroke
        yield Line(issued, y, began, y, color, 1, dashed=True)
        yield Line(issued, y - 2.5, issued, y + 2.5, color, 1)
        yield Line(began, y, began, bottom, color, 1, dashed=True)


def nice_step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... that cuts ``span`` into at most ``most`` parts."""
    power = 10.0 ** math.floor(math.log10(span / most)) if span > 0 else 1.0
    for factor in (1, 2, 5, 10):
        if factor * power * most >= span:
            return factor * power
    return 10 * power


def _axis(scale: Scale, y: float) -> Iterator[Shape]:
    end_x = scale.right + 40
    yield Line(scale.left, y, end_x, y, INK, 2, arrow=True)
    span = scale.end_ns - scale.begin_ns
    unit = _time_unit(span)
    yield Text(end_x + 6, y + 4, "time", 13)
    step = nice_step(span, max(4, int((scale.right - scale.left) / 90)))
    for number in range(int(span / step) + 1 if span else 1):
        x = scale.x(scale.begin_ns + number * step)
        yield Line(x, y - 4, x, y + 4, INK, 1)
        text = f"{number * step / NS_PER_UNIT[unit]:.6g}"
        yield Text(x, y + 18, text if number else f"0 {unit}", 11, "#495057", "middle")


def _legend(y: float) -> Iterator[Shape]:
    entries = [
        ("forward", "compute"),
        ("wait", "waits"),
        ("all_gather", "AG: all-gather weights"),
        ("reduce_scatter", "RS: reduce-scatter gradients"),
        ("full", "gathered in full"),
    ]
    x = MARGIN_LEFT
    for operation, text in entries:
        style = STYLES[operation]
        yield Box(x, y - 10, 18, 12, style.fill, style.stroke, style.dashed, radius=3)
        yield Text(x + 24, y, text, 12, style.stroke)
        x += 24 + text_width(text, 12) + 16
    yield Box(x, y - 6, 18, 4, EXPOSED, EXPOSED, radius=0)
    yield Text(x + 24, y, "exposed", 12, EXPOSED)
    x += 24 + text_width("exposed", 12) + 16
    yield Line(x, y - 4, x + 18, y - 4, INK, 1, dashed=True)
    yield Line(x, y - 6.5, x, y - 1.5, INK, 1)
    yield Text(x + 24, y, "issued, queued, began", 12)


def _numbers(records: Sequence[Record], y: float) -> Iterator[Shape]:
    total = summarize(records)
    lines = [
        f"{duration_text(total.total_ns)} in all: compute {duration_text(total.compute_ns)}, "
        f"communication {duration_text(total.communication_ns)}, of which exposed "
        f"{duration_text(total.exposed_ns)} ({100 * total.exposed_fraction:.0f} % of the time)",
        f"{total.num_all_gathers} all-gathers sent {bytes_text(total.all_gather_bytes)}, "
        f"{total.num_reduce_scatters} reduce-scatters received "
        f"{bytes_text(total.reduce_scatter_bytes)}; at most {total.max_resident} "
        f"unit{'s' if total.max_resident != 1 else ''} gathered in full at once",
    ]
    for number, line in enumerate(lines):
        yield Text(MARGIN_LEFT, y + 25 * number, line, 14)
