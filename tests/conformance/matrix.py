"""The conformance matrix: front doors x kinds of parameters x ways to train x dtypes x ranks.

    python tests/conformance/matrix.py            # runs all cells, prints what is not equal
    python tests/conformance/matrix.py --write    # and writes docs/conformance.md
    python tests/conformance/matrix.py --meet 3   # only so many that every three values meet in one

Each cell trains a sharded model and the unsharded reference alike, in fp32 or with bf16 compute,
and compares gradients, norms and outputs. PyTorch's own FSDP2 is measured in the same way.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from torch import Tensor

import fsdpx
from conformance import report
from conformance.covering import covering_rows
from conformance.doors import COMPUTE_DTYPES, DOORS, STOCK, reference_of
from conformance.kinds import KINDS, LOW_PRECISION_KINDS
from conformance.patterns import PATTERNS
from conformance.report import Cell

# Of the largest difference; all numbers are of order one or less.
LIMITS = {"fp32": 2e-6, "bf16": 2e-3}
LOW_PRECISION_LIMIT = 4e-2
WORLD_SIZES = (1, 2, 3, 4)
DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"


AXES: tuple[Sequence[Any], ...] = (
    list(DOORS),
    list(KINDS),
    list(PATTERNS),
    list(COMPUTE_DTYPES),
    WORLD_SIZES,
)


def part_of(axes: Sequence[Sequence[Any]], strength: int) -> list[Cell]:
    """Cells in which every `strength` values of different axes meet; with all axes the product."""
    rows = covering_rows(axes, strength) if strength < len(axes) else itertools.product(*axes)
    return [Cell(*row) for row in rows]  # type: ignore[misc]


def num_cells() -> int:
    return math.prod(map(len, AXES))


# ---- One cell, on a rank


def run_cell(cell: Cell) -> str:
    """Returns "equal", "wrong by ..." or "error: ..."; alike on all ranks."""
    try:
        outcome = _difference(cell)
    except Exception as error:
        outcome = f"error: {type(error).__name__}: {str(error).splitlines()[0]}"
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    if any(each != "equal" for each in outcomes) and cell.door != STOCK:
        fsdpx.comm.create().close()  # the next cell connects anew
    return max(outcomes, key=lambda text: ("equal", "error", "wrong").index(text.split()[0][:5]))


def _difference(cell: Cell) -> str:
    torch.manual_seed(0)
    side = DOORS[cell.door](KINDS[cell.kind](), cell.dtype)
    PATTERNS[cell.pattern](side)
    ours, expected = side.seen, _expected(cell.kind, cell.pattern, cell.dtype, cell.world_size)
    names = ours.keys() | expected.keys()
    worst = max(_error(ours.get(name), expected.get(name)) for name in names)
    limit = LOW_PRECISION_LIMIT if cell.kind in LOW_PRECISION_KINDS else LIMITS[cell.dtype]
    return "equal" if worst <= limit else f"wrong by {worst:.0e}"


@functools.lru_cache(maxsize=1)  # cells that differ by their door alone follow one another
def _expected(kind: str, pattern: str, dtype: str, world_size: int) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    side = reference_of(KINDS[kind](), dtype, world_size)
    PATTERNS[pattern](side)
    return side.seen


def _error(ours: Tensor | None, expected: Tensor | None) -> float:
    """The largest difference; None is as good as zeros."""
    pair = [t.double() for t in (ours, expected) if t is not None and t.numel()]
    if len(pair) < 2:
        return max((float(t.abs().max()) for t in pair), default=0.0)
    if pair[0].shape != pair[1].shape:
        return float("inf")
    error = float((pair[0] - pair[1]).abs().max())
    return error if error == error else float("inf")


def run_chunk(rank: int, world_size: int, cells: Sequence[Cell]) -> list[str]:
    warnings.simplefilter("ignore")
    return [run_cell(cell) for cell in cells]


# ---- All cells


def run_cells(cells: Sequence[Cell]) -> dict[Cell, str]:
    """Runs cells on pooled processes; one that hangs or kills its processes is found and named."""
    outcomes: dict[Cell, str] = {}
    in_order = sorted(cells, key=lambda c: (c.world_size, c.kind, c.pattern, c.dtype, c.door))
    for (size, kind), group in itertools.groupby(in_order, lambda c: (c.world_size, c.kind)):
        chunk, began = list(group), time.monotonic()
        try:
            found = run_ranks(size, run_chunk, chunk, timeout=60 + 2 * len(chunk))[0]
            outcomes.update(zip(chunk, found, strict=True))
        except RankError:
            for cell in chunk:
                try:
                    outcomes[cell] = run_ranks(size, run_chunk, [cell], timeout=40)[0][0]
                except RankError as error:
                    outcomes[cell] = f"hang or crash: {error.failures[0].text.splitlines()[-1]}"
        done = {cell: outcomes[cell] for cell in chunk}
        took = time.monotonic() - began
        print(f"{size} ranks, {kind}: {report.count(done)} ({took:.0f} s)", flush=True)
    return {cell: outcomes[cell] for cell in cells}


def limits_in_words() -> str:
    wide = f"{', '.join(LOW_PRECISION_KINDS)}: {LOW_PRECISION_LIMIT:.0e}"
    return ", ".join(f"{limit:.0e} in {dtype}" for dtype, limit in LIMITS.items()) + f" ({wide})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name}")
    for name, values in zip(("doors", "kinds", "patterns", "dtypes", "ranks"), AXES, strict=True):
        kind = type(values[0])
        parser.add_argument(f"--{name}", nargs="*", type=kind, default=values, choices=values)
    parser.add_argument(
        "--meet", type=int, default=len(AXES), help="how many values must meet in some cell"
    )
    given = parser.parse_args()
    chosen = (given.doors, given.kinds, given.patterns, given.dtypes, given.ranks)
    outcomes = run_cells(part_of(chosen, given.meet))
    print("\n".join(report.exceptions(outcomes)))
    for door in given.doors:
        of_door = {cell: what for cell, what in outcomes.items() if cell.door == door}
        print(f"{door}: {report.count(of_door)}")
    if given.write:
        part = f"Of the product's {num_cells()} cells {len(outcomes)}"
        if given.meet < len(AXES):
            part += f" (every {given.meet} choices meet in one)"
        DOCUMENT.write_text(report.document(outcomes, part, limits_in_words()))
    return int(any(o != "equal" and cell.door != STOCK for cell, o in outcomes.items()))


if __name__ == "__main__":
    from conformance import matrix  # by its name: worker processes import it

    sys.exit(matrix.main())
