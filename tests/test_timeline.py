"""The timeline on hand-made records: numbers, Chrome trace, and the geometry of the picture."""

from __future__ import annotations

import builtins
import importlib.util
import itertools
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fsdpx.timeline import (
    Record,
    chrome_trace,
    exposed_spans,
    summarize,
    to_svg,
    write_chrome_trace,
    write_png,
    write_svg,
)
from fsdpx.timeline.picture import bytes_text, duration_text, label_names, nice_step
from fsdpx.timeline.records import max_overlap, merged, packed_rows, subtracted

MIB = 1 << 20
SVG = "{http://www.w3.org/2000/svg}"


def span(lane: str, unit: str, operation: str, begin_us: int, end_us: int, **more: int) -> Record:
    """A record in microseconds, issued when it began unless `issue_us` says otherwise."""
    issue = more.get("issue_us", begin_us)
    wire = more.get("wire_bytes", 0)
    return Record(lane, unit, operation, issue * 1000, begin_us * 1000, end_us * 1000, wire)


def sketch() -> list[Record]:
    """Three units on one rank, as the schedule wants them: the next gather runs under each unit."""
    records = []
    for number in (1, 2, 3):
        unit, begin = f"U{number}", 100 * number
        records.append(span("comm", unit, "all_gather", begin - 100, begin - 5, wire_bytes=MIB))
        records.append(span("compute", unit, "forward", begin, begin + 100))
        records.append(span("resident", unit, "full", begin, begin + 100))
    for unit, begin in (("U3", 560), ("U2", 660), ("U1", 760)):
        records.append(span("compute", unit, "backward", begin, begin + 100))
        records.append(span("resident", unit, "full", begin, begin + 100))
    for unit, operation, begin, end in (
        ("U3", "all_gather", 460, 555),
        ("U2", "all_gather", 560, 607),
        ("U3", "reduce_scatter", 610, 657),
        ("U1", "all_gather", 660, 707),
        ("U2", "reduce_scatter", 710, 757),
        ("U1", "reduce_scatter", 790, 885),
    ):
        wire = 2 * MIB if operation == "reduce_scatter" else MIB
        records.append(span("comm", unit, operation, begin, end, wire_bytes=wire))
    records.append(span("compute", "U1", "wait", 0, 100))
    records.append(span("compute", "U3", "wait", 460, 560))
    return records


def many(num_units: int) -> list[Record]:
    """A root that holds `num_units` blocks in forward, everything back to back."""
    end = 100 * num_units
    records = [span("compute", "", "forward", 0, end), span("resident", "", "full", 0, end)]
    for number in range(num_units):
        unit, begin = f"model.blocks.{number}", 100 * number
        records.append(span("compute", unit, "forward", begin, begin + 90))
        records.append(span("comm", unit, "all_gather", begin, begin + 60, issue_us=begin - 50))
        records.append(span("resident", unit, "full", begin, min(begin + 190, end)))
    return records


def parsed(records: list[Record], **options: Any) -> ElementTree.Element:
    return ElementTree.fromstring(to_svg(records, title="a < b & c", **options))


def boxes(root: ElementTree.Element, kind: str) -> list[tuple[str, float, float, float, float]]:
    """(first line of the hover text, x, y, width, height) of the boxes of a kind, by x."""
    found = []
    for rect in root.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if rect.get("class") == kind and title is not None:
            numbers = (float(rect.get(name, "nan")) for name in ("x", "y", "width", "height"))
            found.append(((title.text or "").splitlines()[0], *numbers))
    return sorted(found, key=lambda box: box[1])


def test_merged_and_subtracted() -> None:
    assert merged([(5, 9), (0, 3), (3, 4), (7, 7), (8, 12)]) == [(0, 4), (5, 12)]
    assert subtracted([(0, 10), (20, 30)], [(2, 4), (8, 22), (29, 40)]) == [
        (0, 2),
        (4, 8),
        (22, 29),
    ]
    assert subtracted([(0, 10)], [(0, 10)]) == []
    assert subtracted([(0, 10)], []) == [(0, 10)]


def test_max_overlap_counts_touching_spans_once() -> None:
    assert max_overlap([(0, 10), (10, 20), (20, 30)]) == 1
    assert max_overlap([(0, 11), (10, 20), (10, 30)]) == 3
    assert max_overlap([(5, 5)]) == 0


def test_exposed_is_waiting_or_communicating_alone() -> None:
    # The two waits (in which the first gathers run), and the tail of the last reduce-scatter.
    assert exposed_spans(sketch()) == [(0, 100_000), (460_000, 560_000), (860_000, 885_000)]


def test_a_wait_inside_a_forward_is_exposed_and_not_compute() -> None:
    records = [span("compute", "a", "forward", 0, 100), span("compute", "a", "wait", 20, 50)]
    total = summarize(records)
    assert (total.compute_ns, total.exposed_ns, total.total_ns) == (70_000, 30_000, 100_000)


def test_summary_of_the_sketch() -> None:
    total = summarize(sketch(), num_steps=1)
    assert total.total_ns == 885_000
    assert total.compute_ns == 600_000
    assert total.communication_ns == 4 * 95_000 + 4 * 47_000 + 95_000
    assert (total.num_all_gathers, total.num_reduce_scatters) == (6, 3)
    assert (total.all_gather_bytes, total.reduce_scatter_bytes) == (6 * MIB, 6 * MIB)
    assert total.max_resident == 1
    assert total.exposed_fraction == pytest.approx(225 / 885)


def test_summary_per_step() -> None:
    total = summarize(sketch(), num_steps=3)
    assert total.step_seconds == pytest.approx(885e-6 / 3)
    assert total.exposed_seconds == pytest.approx(225e-6 / 3)
    with pytest.raises(ValueError, match="num_steps must be at least 1"):
        summarize(sketch(), num_steps=0)


def test_summary_of_nothing() -> None:
    total = summarize([])
    assert (total.total_ns, total.exposed_fraction, total.max_resident) == (0, 0.0, 0)


def test_packed_rows_never_overlap_and_are_as_few_as_can_be() -> None:
    residents = [record for record in many(12) if record.lane == "resident"]
    rows = packed_rows(residents)
    assert len(rows) == max_overlap([(r.begin_ns, r.end_ns) for r in residents]) == 3
    assert sorted(record for row in rows for record in row) == sorted(residents)
    for row in rows:
        assert all(a.end_ns <= b.begin_ns for a, b in itertools.pairwise(row))


def test_chrome_trace_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    records = [*sketch(), span("comm", "U9", "all_gather", 900, 950, issue_us=890, wire_bytes=7)]
    write_chrome_trace(path, records, rank=3)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(records)
    assert {event["pid"] for event in events} == {3}
    (queued,) = [event for event in spans if event["args"]["unit"] == "U9"]
    assert (queued["name"], queued["ts"], queued["dur"]) == ("all_gather U9", 900.0, 50.0)
    assert (queued["args"]["queued_us"], queued["args"]["wire_bytes"]) == (10.0, 7)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == ["compute", "comm", "resident"]
    assert {e["cat"] for e in spans if names[e["tid"]] == "comm"} == {"comm"}


def test_chrome_threads_hold_only_spans_that_nest() -> None:
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for event in chrome_trace(many(12))["traceEvents"]:
        if event["ph"] == "X":
            times = (event["ts"], event["ts"] + event["dur"])
            by_thread.setdefault(event["tid"], []).append(times)
    for spans in by_thread.values():
        for a in spans:
            for b in spans:
                assert not a[0] < b[0] < a[1] < b[1]


def test_picture_is_laid_out_like_the_sketch() -> None:
    root = parsed(sketch())
    forward, backward = boxes(root, "compute forward"), boxes(root, "compute backward")
    gathers, reductions = boxes(root, "comm all_gather"), boxes(root, "comm reduce_scatter")
    residents = boxes(root, "resident full")
    assert [name for name, *_ in forward] == ["forward U1", "forward U2", "forward U3"]
    assert [name for name, *_ in backward] == ["backward U3", "backward U2", "backward U1"]
    assert [name[-2:] for name, *_ in gathers] == ["U1", "U2", "U3", "U3", "U2", "U1"]
    assert [name[-2:] for name, *_ in reductions] == ["U3", "U2", "U1"]
    assert max(x + width for _, x, _, width, _ in forward) <= min(box[1] for box in backward)
    tops = [{y for _, _, y, _, _ in lane} for lane in (forward + backward, gathers, residents)]
    assert [len(top) for top in tops] == [1, 1, 1]  # one row each: nothing overlaps
    compute_y, comm_y, resident_y = (top.pop() for top in tops)
    assert compute_y < comm_y < resident_y
    # A unit is there in full exactly under its compute, and U2 is gathered under forward U1.
    for computed, resident in zip(forward + backward, residents, strict=True):
        assert computed[1] == resident[1]
        assert computed[3] == resident[3]
    assert forward[0][1] == gathers[1][1]
    assert gathers[1][1] + gathers[1][3] < forward[1][1]


def test_picture_is_to_scale() -> None:
    root = parsed(sketch())
    forward, gathers = boxes(root, "compute forward"), boxes(root, "comm all_gather")
    per_us = forward[0][3] / 100
    assert gathers[0][3] == pytest.approx(95 * per_us, abs=0.02)
    assert gathers[4][1] - gathers[0][1] == pytest.approx(560 * per_us, abs=0.02)
    width = float(root.get("width", "nan"))
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", "0")) + float(rect.get("width", "nan")) <= width


def test_colours_and_dashes() -> None:
    looks = {
        rect.get("class"): (rect.get("fill"), rect.get("stroke-dasharray") is not None)
        for rect in parsed(sketch()).iter(f"{SVG}rect")
    }
    assert looks["compute forward"] == looks["compute backward"] == ("#b2f2bb", False)
    assert looks["comm all_gather"] == ("#a5d8ff", False)
    assert looks["comm reduce_scatter"] == ("#ffc9c9", False)
    assert looks["resident full"] == ("#dee2e6", False)
    assert looks["compute wait"][1]


def test_hover_text_and_escaping() -> None:
    record = span("comm", "a<b>&c", "all_gather", 120, 170, issue_us=100, wire_bytes=3 * MIB // 2)
    root = parsed([record])
    (title,) = [
        rect.findtext(f"{SVG}title")
        for rect in root.iter(f"{SVG}rect")
        if rect.get("class") == "comm all_gather"
    ]
    assert title == "all-gather a<b>&c\ntook 50 µs\nqueued for 20 µs\n1.5 MiB on the wire"
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "a < b & c" in texts  # the picture's title


def test_nested_boxes_are_inset_and_their_parent_is_dashed() -> None:
    root = parsed(many(4))
    forward = {name: box for name, *box in boxes(root, "compute forward")}
    parent, child = forward["forward root"], forward["forward model.blocks.2"]
    assert parent[1] < child[1]
    assert child[1] + child[3] < parent[1] + parent[3]
    dashed = [
        rect.findtext(f"{SVG}title")
        for rect in root.iter(f"{SVG}rect")
        if rect.get("class") == "compute forward" and rect.get("stroke-dasharray")
    ]
    assert [title.splitlines()[0] for title in dashed if title] == ["forward root"]


def test_partial_overlap_does_not_nest() -> None:
    records = [span("compute", "a", "backward", 0, 100), span("compute", "b", "backward", 98, 200)]
    (_, _, top_a, _, height_a), (_, _, top_b, _, height_b) = boxes(
        parsed(records), "compute backward"
    )
    assert (top_a, height_a) == (top_b, height_b)


@pytest.mark.parametrize("num_units", [1, 6, 24, 60])
@pytest.mark.parametrize("width", [None, 700.0])
def test_labels_fit_their_boxes(num_units: int, width: float | None) -> None:
    root = parsed(many(num_units), width=width)
    forward = boxes(root, "compute forward")
    labels = [text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("fwd ")]
    for label in labels:
        x = float(label.get("x", "nan"))
        size = float(label.get("font-size", "nan"))
        need = size * (1.0 if label.get("transform") else 0.6 * len(label.text or ""))
        around = [box for box in forward if box[1] <= x <= box[1] + box[3]]
        assert min(box[3] for box in around) >= need
    if width is None and num_units <= 24:
        assert len(labels) >= num_units
    if width is not None and num_units == 60:
        assert not labels  # no room: dropped, never drawn over each other


def test_resident_rows_do_not_overlap() -> None:
    placed = boxes(parsed(many(10)), "resident full")
    for name, x, y, width, height in placed:
        for other, x2, y2, width2, height2 in placed:
            if name != other:
                apart_x = x + width <= x2 + 0.02 or x2 + width2 <= x + 0.02
                assert apart_x or y + height <= y2 or y2 + height2 <= y


def test_a_unit_that_stays_does_not_stretch_the_axis() -> None:
    kept = span("resident", "kept", "full", -10_000, 10_000)
    placed = {name: box for name, *box in boxes(parsed([*sketch(), kept]), "resident full")}
    alone = {name: box for name, *box in boxes(parsed(sketch()), "compute forward")}
    assert placed["full U1"][0] != placed["full kept"][0]
    forward = {name: box for name, *box in boxes(parsed([*sketch(), kept]), "compute forward")}
    assert forward == alone
    assert placed["full kept"][2] == pytest.approx(885 * forward["forward U1"][2] / 100, abs=0.1)


def test_exposed_bars_lie_over_what_is_exposed() -> None:
    root = parsed(sketch())
    bars, waits = boxes(root, "exposed"), boxes(root, "compute wait")
    assert len(bars) == 3
    assert [(bar[1], bar[3]) for bar in bars[:2]] == [(wait[1], wait[3]) for wait in waits]
    last = boxes(root, "comm reduce_scatter")[-1]
    assert bars[2][1] + bars[2][3] == pytest.approx(last[1] + last[3], abs=0.02)


def test_axis_has_units_and_few_ticks() -> None:
    texts = [text.text or "" for text in parsed(sketch()).iter(f"{SVG}text")]
    assert "0 µs" in texts
    assert "time" in texts
    ticks = [text for text in texts if text.isdigit()]
    assert ticks == ["100", "200", "300", "400", "500", "600", "700", "800"]


def test_no_records_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="records is empty"):
        to_svg([], title="t")


def test_write_svg(tmp_path: Path) -> None:
    write_svg(tmp_path / "t.svg", sketch(), title="T")
    assert (tmp_path / "t.svg").read_text(encoding="utf-8") == to_svg(sketch(), title="T")


def test_the_picture_in_docs_is_what_its_program_draws() -> None:
    program = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "draw_timeline.py"))
    drawn = to_svg(program["records"](), title=program["TITLE"])
    assert program["PICTURE"].read_text(encoding="utf-8") == drawn


def test_write_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.png"
    if importlib.util.find_spec("matplotlib") is not None:
        write_png(path, many(3))
        assert path.read_bytes().startswith(b"\x89PNG")
        path.unlink()
    monkeypatch.setattr(importlib, "import_module", _without_matplotlib(importlib.import_module))
    with pytest.raises(ImportError, match=r"pip install 'fsdpx\[plot\]'"):
        write_png(path, many(3))
    assert not path.exists()


def _without_matplotlib(import_module: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise builtins.ImportError(f"No module named '{name}'")
        return import_module(name, *args)

    return refuse


def test_words() -> None:
    assert duration_text(1_234_567) == "1.23 ms"
    assert duration_text(999) == "999 ns"
    assert duration_text(2.5e9) == "2.5 s"
    assert bytes_text(1536) == "1.5 KiB"
    assert bytes_text(12) == "12 B"
    assert nice_step(885, 10) == 100
    assert nice_step(21, 10) == 5


def test_label_names_drop_the_shared_prefix() -> None:
    assert label_names(["m.blocks.0", "m.blocks.1", ""]) == {
        "m.blocks.0": ("0",),
        "m.blocks.1": ("1",),
        "": ("root",),
    }
    assert label_names(["m.blocks.0", "m.head"])["m.blocks.0"] == ("blocks.0", "0")
    assert label_names(["blocks.0", "blocks.1", "GPT"]) == {
        "blocks.0": ("0",),
        "blocks.1": ("1",),
        "GPT": ("GPT",),
        "": ("root",),
    }
