"""A part of the conformance matrix, and that docs/conformance.md says what the tests say."""

from __future__ import annotations

import itertools
import re

import pytest
from conformance.kinds import KINDS
from conformance.matrix import (
    DOCUMENT,
    DOORS,
    MAIN_PATTERNS,
    STOCK,
    Cell,
    all_cells,
    exceptions,
    run_cells,
)
from conformance.patterns import PATTERNS

OURS = [door for door in DOORS if door != STOCK]
LISTED = re.compile(
    r"- (?P<door>[^/]+) / (?P<kind>[^/]+) / (?P<pattern>[^/(]+) \((?P<where>[^)]+)\)"
)


def documented() -> set[Cell]:
    """The cells that the document lists as not equal."""
    found = set()
    for line in DOCUMENT.read_text().splitlines():
        if match := LISTED.match(line):
            for where in match["where"].split(", "):
                dtype, _, ranks = where.partition(" x")
                cell = Cell(match["door"], match["kind"], match["pattern"], dtype, int(ranks))
                found.add(cell)
    return found


def sample() -> list[Cell]:
    """Every kind, every pattern and every door, on two ranks, and some cells on three."""
    chosen = [Cell("ZeRO-3", kind, "train", "fp32", 2) for kind in KINDS]
    chosen += [Cell("ZeRO-3", "linear", pattern, "fp32", 2) for pattern in PATTERNS]
    for door, (number, kind) in itertools.product(OURS[1:], enumerate(KINDS)):
        pattern = MAIN_PATTERNS[(number + OURS.index(door)) % len(MAIN_PATTERNS)]
        chosen.append(Cell(door, kind, pattern, "fp32", 2))
    chosen += [Cell("ZeRO-3", kind, MAIN_PATTERNS[0], "fp32", 3) for kind in KINDS]
    return list(dict.fromkeys(chosen))


def chunk_of(cell: Cell) -> str:
    return f"{cell.door}-{cell.world_size}"


@pytest.mark.parametrize("chunk", dict.fromkeys(map(chunk_of, sample())))
def test_cells_are_as_documented(chunk: str) -> None:
    cells = [cell for cell in sample() if chunk_of(cell) == chunk]
    outcomes = run_cells(cells)
    assert outcomes.keys() == set(cells)
    unequal = {cell for cell, outcome in outcomes.items() if outcome != "equal"}
    assert unequal == documented() & set(cells), exceptions(outcomes)


def test_the_document_is_of_all_cells() -> None:
    cells = all_cells()
    text = DOCUMENT.read_text()
    assert documented() <= set(cells)
    for door in DOORS:
        number = sum(cell.door == door for cell in cells)
        unequal = sum(cell.door == door for cell in documented())
        assert f"| {door} | {number - unequal} of {number} |" in text
    for name in (*KINDS, *PATTERNS):
        assert f"| {name} |" in text
