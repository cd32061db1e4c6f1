"""A part of the conformance matrix, and that docs/conformance.md is of all of it."""

from __future__ import annotations

import itertools

import pytest
from conformance.covering import covering_rows
from conformance.doors import DOORS, STOCK
from conformance.matrix import AXES, DOCUMENT, all_cells, run_cells
from conformance.report import Cell, exceptions

OURS = [door for door in DOORS if door != STOCK]
# Every two of door, kind, way, dtype and number of ranks meet in one of these cells.
SAMPLE = list(itertools.starmap(Cell, covering_rows([OURS, *AXES[1:]])))


@pytest.mark.parametrize("world_size", AXES[-1])
def test_cells_are_equal(world_size: int) -> None:
    outcomes = run_cells([cell for cell in SAMPLE if cell.world_size == world_size])
    assert not exceptions(outcomes)


def test_every_two_values_meet() -> None:
    for one, other in itertools.combinations(range(len(AXES)), 2):
        met = {(cell[one], cell[other]) for cell in SAMPLE}
        axes = [OURS, *AXES[1:]]
        assert met == set(itertools.product(axes[one], axes[other]))


def test_the_document_is_of_all_cells_and_ours_are_equal() -> None:
    text = DOCUMENT.read_text()
    cells = all_cells()
    assert f"the whole product, {len(cells)} cells" in text
    per_place = len(AXES[1]) * len(AXES[2])
    for door in OURS:
        assert f"| {door} |" + f" all {per_place} |" * len(AXES[3]) * len(AXES[4]) in text
    for name in (*AXES[1], *AXES[2]):
        assert f"| {name} | all" in text
