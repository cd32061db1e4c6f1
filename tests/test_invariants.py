"""What holds in every step, read from the recorded timeline and the measured bytes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import run_ranks
from recorded import (
    EQUAL,
    UNEVEN,
    Recorded,
    Setup,
    checkpointed,
    first_frozen,
    half_frozen,
    record_step,
    second_frozen,
    slow,
    with_embedding,
)

ALIGNMENT = 128  # bytes to which parameters and shares are aligned
DTYPES = {"fp32": None, "bf16": torch.bfloat16}


@functools.cache
def recorded(world_size: int, setup: Setup) -> list[Recorded]:
    """A recorded step of every rank; one run serves all tests of the setup."""
    return run_ranks(world_size, record_step, setup)


def setup_of(prefetch: int, widths: tuple[int, ...], dtype: str) -> Setup:
    return Setup(prefetch=prefetch, widths=widths, param_dtype=DTYPES[dtype])


def for_all_setups(test: Any) -> Any:
    """Runs a test for each number of ranks, depth of prefetch, sizes and dtype."""
    for name, values in {
        "dtype": list(DTYPES),
        "widths": [pytest.param(EQUAL, id="equal"), pytest.param(UNEVEN, id="uneven")],
        "prefetch": [0, 1, 2],
        "world_size": [1, 2, 3, 4],
    }.items():
        test = pytest.mark.parametrize(name, values)(test)
    return test


def starts_before(earlier: int, later: int, what: str) -> None:
    assert earlier < later, f"{what}: {(earlier - later) / 1e3:.1f} us too late"


# ---- 1. Number and size of collectives


@for_all_setups
def test_two_gathers_and_one_reduction_for_each_unit(
    world_size: int, prefetch: int, widths: tuple[int, ...], dtype: str
) -> None:
    for run in recorded(world_size, setup_of(prefetch, widths, dtype)):
        for unit in run.layers:
            assert len(run.of(unit, "all_gather")) == 2, unit
            assert len(run.of(unit, "reduce_scatter")) == 1, unit
        # The root keeps its parameters from forward to backward.
        assert len(run.of(run.root, "all_gather")) == 1
        assert len(run.of(run.root, "reduce_scatter")) == 1


@for_all_setups
def test_bytes_on_the_wire(
    world_size: int, prefetch: int, widths: tuple[int, ...], dtype: str
) -> None:
    itemsize = 2 if dtype == "bf16" else 4
    for run in recorded(world_size, setup_of(prefetch, widths, dtype)):
        for unit in [run.root, *run.layers]:
            used = run.num_elements[unit] * itemsize
            # Gaps between parameters, and what makes shares equal and aligned in fp32 and bf16.
            padding = ALIGNMENT * run.num_parameters[unit] + 2 * ALIGNMENT * world_size
            assert used <= run.gathered_bytes[unit] <= used + padding
            wire = run.gathered_bytes[unit] // world_size * (world_size - 1)
            for operation in ("all_gather", "reduce_scatter"):
                assert {r.wire_bytes for r in run.of(unit, operation)} == {wire}, unit


# What backward does with a unit's weights decides how often they are gathered: (all-gathers,
# reduce-scatters) of the four layers.
EXCEPTIONS = {
    # Backward never reads an embedding's weight.
    "embedding": (Setup(make=with_embedding, widths=EQUAL), [(1, 1), (2, 1), (2, 1), (2, 1)]),
    # Backward ends before it comes to the first layer.
    "first_frozen": (Setup(make=first_frozen), [(1, 0), (2, 1), (2, 1), (2, 1)]),
    "second_frozen": (Setup(make=second_frozen), [(2, 1), (2, 0), (2, 1), (2, 1)]),
    "half_frozen": (Setup(make=half_frozen), [(2, 1)] * 4),
    # The recomputation and the backward that follows it share one gather.
    "checkpointed": (Setup(make=checkpointed), [(2, 1)] * 4),
    # Forward, the inner backward, and the outer one, which goes back through the inner one, first
    # layer first, and then through forward: most layers are read again before they are freed.
    "double_backward": (Setup(twice=True), [(4, 1), (3, 1), (3, 1), (3, 1)]),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exceptions_have_their_own_counts(name: str, world_size: int) -> None:
    setup, expected = EXCEPTIONS[name]
    for run in recorded(world_size, setup):
        counts = [
            (len(run.of(unit, "all_gather")), len(run.of(unit, "reduce_scatter")))
            for unit in run.layers
        ]
        assert counts == expected
        assert run.still_gathered == []


def test_reduction_leaves_frozen_parameters_out() -> None:
    for run in recorded(2, EXCEPTIONS["half_frozen"][0]):
        unit = run.layers[1]
        (reduction,) = run.of(unit, "reduce_scatter")
        trainable = run.trainable[unit] * 4
        assert trainable < run.num_elements[unit] * 4
        assert trainable <= 2 * reduction.wire_bytes <= trainable + 2 * ALIGNMENT + 4 * ALIGNMENT


def test_root_that_is_told_to_reshard_is_gathered_twice() -> None:
    for run in recorded(2, Setup(reshard_root=True)):
        assert len(run.of(run.root, "all_gather")) == 2
        assert len(run.of(run.root, "reduce_scatter")) == 1


# ---- 2. Order of issue


@for_all_setups
def test_gathers_are_issued_ahead_in_forward(
    world_size: int, prefetch: int, widths: tuple[int, ...], dtype: str
) -> None:
    for run in recorded(world_size, setup_of(prefetch, widths, dtype)):
        order = [run.root, *run.layers]
        gathers = {unit: run.issues(unit, "all_gather")[0] for unit in order}
        forwards = {unit: run.of(unit, "forward")[0] for unit in order}
        for number, unit in enumerate(order):
            starts_before(gathers[unit], forwards[unit].begin_ns, f"gather of {unit}")
            for ahead in order[number + 1 : number + 1 + prefetch]:
                what = f"gather of {ahead} before forward of {unit}"
                starts_before(gathers[ahead], forwards[unit].begin_ns, what)
            for later in order[number + 1 + prefetch :]:
                what = f"forward of {unit} before gather of {later}"
                starts_before(forwards[unit].begin_ns, gathers[later], what)


@for_all_setups
def test_gathers_are_issued_ahead_in_backward(
    world_size: int, prefetch: int, widths: tuple[int, ...], dtype: str
) -> None:
    for run in recorded(world_size, setup_of(prefetch, widths, dtype)):
        order = [run.root, *reversed(run.layers)]
        gathers = {unit: run.issues(unit, "all_gather")[-1] for unit in order}
        backwards = {unit: run.of(unit, "backward")[0] for unit in order}
        reductions = {unit: run.issues(unit, "reduce_scatter")[0] for unit in order}
        for number, unit in enumerate(order):
            starts_before(gathers[unit], backwards[unit].begin_ns, f"gather of {unit}")
            for ahead in order[number + 1 : number + 1 + prefetch]:
                what = f"gather of {ahead} before backward of {unit}"
                starts_before(gathers[ahead], backwards[unit].begin_ns, what)
                what = f"gather of {ahead} before reduction of {unit}"
                starts_before(gathers[ahead], reductions[unit], what)
            for later in order[number + 1 + prefetch :]:
                what = f"backward of {unit} before gather of {later}"
                starts_before(backwards[unit].begin_ns, gathers[later], what)


@for_all_setups
def test_reductions_are_issued_as_soon_as_gradients_are_complete(
    world_size: int, prefetch: int, widths: tuple[int, ...], dtype: str
) -> None:
    for run in recorded(world_size, setup_of(prefetch, widths, dtype)):
        order = list(reversed(run.layers))
        issues = [run.issues(unit, "reduce_scatter")[0] for unit in order]
        assert issues == sorted(issues)
        for unit, following in itertools.pairwise(order):
            issue = run.issues(unit, "reduce_scatter")[0]
            begin = run.of(following, "backward")[0].begin_ns
            starts_before(issue, begin, f"reduction of {unit} before backward of {following}")


# ---- 3. Residency


def most_at_once(spans: Sequence[Any]) -> int:
    """The largest number of spans that share a moment."""
    edges = [(r.issue_ns, 1) for r in spans] + [(r.end_ns, -1) for r in spans]
    return max(itertools.accumulate(step for _, step in sorted(edges)))


@for_all_setups
def test_no_more_units_are_resident_than_the_window_holds(
    world_size: int, prefetch: int, widths: tuple[int, ...], dtype: str
) -> None:
    for run in recorded(world_size, setup_of(prefetch, widths, dtype)):
        resident = [r for r in run.records if r.operation == "full" and r.unit in run.layers]
        assert most_at_once(resident) <= prefetch + 1
        assert run.still_gathered == []


@for_all_setups
def test_units_are_resident_while_they_are_used_and_no_longer(
    world_size: int, prefetch: int, widths: tuple[int, ...], dtype: str
) -> None:
    for run in recorded(world_size, setup_of(prefetch, widths, dtype)):
        for direction, order in (
            ("forward", run.layers),
            ("backward", list(reversed(run.layers))),
        ):
            which = 0 if direction == "forward" else -1
            for unit, following in itertools.pairwise([*order, None]):
                full = run.of(unit, "full")[which]
                (use,) = run.of(unit, direction)
                assert full.begin_ns <= use.begin_ns, unit
                assert use.begin_ns < full.end_ns, unit
                if following is not None:
                    begin = run.of(following, direction)[0].begin_ns
                    starts_before(full.end_ns, begin, f"{unit} freed before {following} begins")
        for unit in [run.root, *run.layers]:
            assert len(run.of(unit, "full")) == len(run.of(unit, "all_gather")), unit


# ---- 4. Memory


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_arena_of_equal_units_holds_the_window(world_size: int, prefetch: int) -> None:
    for run in recorded(world_size, setup_of(prefetch, EQUAL, "fp32")):
        (size,) = {run.gathered_bytes[unit] for unit in run.layers}
        assert run.arena_bytes == (prefetch + 1) * size


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_arena_of_uneven_units_holds_the_largest_window(prefetch: int, dtype: str) -> None:
    for run in recorded(2, setup_of(prefetch, UNEVEN, dtype)):
        sizes = [run.gathered_bytes[unit] for unit in run.layers]
        windows = [sum(sizes[i : i + prefetch + 1]) for i in range(len(sizes))]
        # One or two units always fit; places for a window of three may need gaps between them.
        gaps = 0.2 if prefetch == 2 else 0.0
        assert max(windows) <= run.arena_bytes <= (1 + gaps) * max(windows)
        assert prefetch == 0 or run.arena_bytes < 0.9 * (prefetch + 1) * max(sizes)


# ---- 5. Exposed communication


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_prefetch_every_gather_is_exposed(world_size: int, dtype: str) -> None:
    for run in recorded(world_size, setup_of(0, UNEVEN, dtype)):
        uses = [r for r in run.records if r.operation in ("forward", "backward")]
        uses = [r for r in uses if r.unit in run.layers]
        for unit in [run.root, *run.layers]:
            for gather in run.of(unit, "all_gather"):
                waits = run.of(unit, "wait")
                assert any(gather.issue_ns <= w.begin_ns <= w.end_ns for w in waits), unit
                for use in uses:
                    outside = use.end_ns <= gather.issue_ns or use.begin_ns >= gather.end_ns
                    assert outside, f"gather of {unit} ran beside {use.operation} of {use.unit}"


def waits_by_direction(run: Recorded) -> tuple[dict[str, int], dict[str, int]]:
    """Nanoseconds for which each layer was waited for in forward, and then in backward."""
    turn = run.of(run.root, "forward")[0].end_ns
    before, after = dict.fromkeys(run.layers, 0), dict.fromkeys(run.layers, 0)
    for record in run.records:
        if record.operation == "wait" and record.unit in before:
            direction = before if record.begin_ns < turn else after
            direction[record.unit] += record.end_ns - record.begin_ns
    return before, after


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_with_prefetch_only_the_ends_are_exposed(world_size: int, prefetch: int) -> None:
    """Communication shorter than compute hides, but for first gathers and the last reduction."""
    setup = Setup(make=slow, widths=EQUAL, prefetch=prefetch, gather_seconds=0.006)
    seen: dict[tuple[str, str], int] = {}
    # A busy machine may delay a thread, but not at the same unit in each of many steps.
    for _ in range(10):
        run = run_ranks(world_size, record_step, setup)[0]
        forward, backward = waits_by_direction(run)
        # The first layer's reduction is the last one, and the last layer's backward comes first.
        hidden = {("forward", unit): forward[unit] for unit in run.layers[1:]}
        hidden |= {("backward", unit): backward[unit] for unit in run.layers[1:-1]}
        ends = {
            ("forward", run.layers[0]): forward[run.layers[0]],
            ("backward", run.layers[-1]): backward[run.layers[-1]],
        }
        expected = set(ends if prefetch else hidden | ends)
        for key, wait in (hidden | ends).items():
            best = max if key in expected else min
            seen[key] = best(wait, seen.get(key, wait))
        exposed = {key for key, wait in seen.items() if wait > 4e6}
        if exposed == expected:
            return
    raise AssertionError(f"waited for {exposed}")
