"""A part of the conformance matrix, and that docs/conformance.md says that ours is equal."""

from __future__ import annotations

import itertools
import re

import pytest
from conformance.covering import covering_rows
from conformance.doors import DOORS, STOCK
from conformance.matrix import AXES, DOCUMENT, num_cells, part_of, run_cells
from conformance.report import exceptions

OURS = [door for door in DOORS if door != STOCK]
# Every two of door, kind, way, dtype and number of ranks meet in one of these cells.
SAMPLE = part_of([OURS, *AXES[1:]], strength=2)


@pytest.mark.parametrize("world_size", AXES[-1])
def test_cells_are_equal(world_size: int) -> None:
    outcomes = run_cells([cell for cell in SAMPLE if cell.world_size == world_size])
    assert not exceptions(outcomes)


@pytest.mark.parametrize("strength", [2, 3])
def test_values_meet(strength: int) -> None:
    axes = [list(range(number)) for number in (3, 7, 2, 4)]
    rows = covering_rows(axes, strength)
    assert len(rows) < 3 * 7 * 2 * 4
    for chosen in itertools.combinations(range(len(axes)), strength):
        met = {tuple(row[number] for number in chosen) for row in rows}
        assert met == set(itertools.product(*(axes[number] for number in chosen)))


def test_the_document_is_of_these_cells_and_ours_are_equal() -> None:
    text = DOCUMENT.read_text()
    assert f"Of the product's {num_cells()} cells " in text
    num_places = len(AXES[3]) * len(AXES[4])
    for door in OURS:
        row = re.search(rf"^\| {door} \|(.*)\|$", text, re.MULTILINE)
        assert row is not None
        assert [cell.split()[0] for cell in row[1].split("|")] == ["all"] * num_places
    for name in (*AXES[1], *AXES[2]):
        assert f"\n| {name} | all" in text
