"""The conformance matrix: kinds of parameters x ways to train x front doors x dtypes x ranks.

    python tests/conformance/matrix.py            # runs all cells, prints what is not equal
    python tests/conformance/matrix.py --write    # and writes docs/conformance.md

Each cell trains a sharded model and the unsharded reference alike, in fp32 or with bf16 compute,
and compares gradients, norms and outputs. PyTorch's own FSDP2 is measured in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdpx
from conformance.kinds import KINDS, Stack
from conformance.patterns import PATTERNS, Side

LIMIT = {"fp32": 2e-6, "bf16": 4e-2}  # relative to the largest element of each kind of number
STOCK = "FSDP2"
WORLD_SIZES = (1, 2, 3, 4)
MAIN_KINDS = ("linear", "frozen beside trainable")
MAIN_PATTERNS = ("train",)
DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"

# ---- Front doors: each shards a stack and says how to leave synchronisation out


def _fully_shard(stack: Stack, dtype: str, **options: Any) -> Side:
    if dtype == "bf16":
        options["mp_policy"] = fsdpx.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in stack.units():
        fsdpx.fully_shard(unit, **options)
    fsdpx.fully_shard(stack, **options)
    return Side(stack, stack, [dist.get_rank()], functools.partial(fsdpx.no_sync, stack))


@functools.cache  # a process keeps the threads of every group that it makes
def _mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def _hybrid(stack: Stack, dtype: str) -> Side:
    return _fully_shard(stack, dtype, mesh=_mesh(2, dist.get_world_size() // 2))


def _fsdp1(stack: Stack, dtype: str) -> Side:
    from fsdpx.fsdp1 import CustomPolicy, FullyShardedDataParallel, MixedPrecision

    units = stack.units()
    precision = None
    if dtype == "bf16":
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FullyShardedDataParallel(
        stack,
        auto_wrap_policy=CustomPolicy(lambda module: module in units),
        mixed_precision=precision,
        use_orig_params=True,
    )
    return Side(model, stack, [dist.get_rank()], model.no_sync)


def _stock(stack: Stack, dtype: str) -> Side:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": _mesh(dist.get_world_size())}
    if dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in stack.units():
        fully_shard(unit, **options)
    fully_shard(stack, **options)

    @contextlib.contextmanager
    def no_sync() -> Iterable[None]:
        stack.set_requires_gradient_sync(False)
        yield
        stack.set_requires_gradient_sync(True)

    return Side(stack, stack, [dist.get_rank()], no_sync)


DOORS: dict[str, Callable[[Stack, str], Side]] = {
    "ZeRO-3": _fully_shard,
    "ZeRO-2": functools.partial(_fully_shard, zero_stage=2),
    "ZeRO-1": functools.partial(_fully_shard, zero_stage=1),
    "HSDP": _hybrid,
    "FSDP1": _fsdp1,
    STOCK: _stock,
}


class Cell(NamedTuple):
    door: str
    kind: str
    pattern: str
    dtype: str
    world_size: int


def all_cells() -> list[Cell]:
    """ZeRO-3 and FSDP2 on two ranks in fp32: every kind with every pattern. Elsewhere every kind
    with some patterns and every pattern with some kinds.
    """
    product = itertools.product(DOORS, KINDS, PATTERNS, LIMIT, WORLD_SIZES)
    return [cell for cell in itertools.starmap(Cell, product) if _belongs(cell)]


def _belongs(cell: Cell) -> bool:
    everywhere = cell.door in ("ZeRO-3", STOCK)
    if cell.world_size not in (WORLD_SIZES if everywhere else (2, 4)):
        return False
    if cell.dtype == "bf16" and (cell.world_size != 2 or cell.pattern == "compiled"):
        return False
    if everywhere and cell.pattern != "compiled" and (cell.dtype, cell.world_size) == ("fp32", 2):
        return True
    return cell.kind in MAIN_KINDS or cell.pattern in MAIN_PATTERNS


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
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stack = KINDS[cell.kind]()
    reference = copy.deepcopy(stack)
    sides = [
        DOORS[cell.door](stack, cell.dtype),
        Side(reference, reference, [*range(size)]),
    ]
    for side in sides:
        torch.manual_seed(rank)
        PATTERNS[cell.pattern](side)
    worst = 0.0
    ours, expected = (side.seen for side in sides)
    for what in ours.keys() | expected.keys():
        worst = max(worst, _error(ours.get(what), expected.get(what)))
    limit = LIMIT["bf16" if "bf16" in cell.kind else cell.dtype]
    return "equal" if worst <= limit else f"wrong by {worst:.0e}"


def _error(ours: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """The largest difference; all numbers are of order one or less. None is as good as zeros."""
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
    by_chunk = sorted(cells, key=lambda c: (c.world_size, c.door, c.kind))
    for (size, door, kind), group in itertools.groupby(
        by_chunk, lambda c: (c.world_size, c.door, c.kind)
    ):
        chunk = list(group)
        try:
            found = run_ranks(size, run_chunk, chunk, timeout=60 + 2 * len(chunk))[0]
            outcomes.update(zip(chunk, found, strict=True))
        except RankError:
            for cell in chunk:
                try:
                    outcomes[cell] = run_ranks(size, run_chunk, [cell], timeout=40)[0][0]
                except RankError as error:
                    outcomes[cell] = f"hang or crash: {error.failures[0].text.splitlines()[-1]}"
        equal = sum(outcomes[cell] == "equal" for cell in chunk)
        print(f"{door}, {kind}, {size} ranks: {equal} of {len(chunk)} equal", flush=True)
    return outcomes


def count(outcomes: dict[Cell, str], **fixed: str) -> str:
    """ "all 56", or what became of how many."""
    chosen = [
        outcome.split(":")[0].split(" by")[0]
        for cell, outcome in outcomes.items()
        if all(getattr(cell, name) == value for name, value in fixed.items())
    ]
    counts = Counter(chosen)
    if set(counts) == {"equal"}:
        return f"all {len(chosen)}"
    return ", ".join(f"{number} {what}" for what, number in counts.most_common())


def table(outcomes: dict[Cell, str], field: str, values: Iterable[str]) -> list[str]:
    doors = list(dict.fromkeys(cell.door for cell in outcomes))
    lines = [f"| {field} | " + " | ".join(doors) + " |", "|---" * (len(doors) + 1) + "|"]
    for value in values:
        row = [count(outcomes, door=door, **{field: value}) for door in doors]
        lines.append(f"| {value} | " + " | ".join(row) + " |")
    return lines


def exceptions(outcomes: dict[Cell, str]) -> list[str]:
    """One line for each door, kind and pattern that is not equal everywhere."""
    lines = []
    unequal = {cell: text for cell, text in outcomes.items() if text != "equal"}
    for key, group in itertools.groupby(sorted(unequal), lambda cell: cell[:3]):
        cells = list(group)
        where = ", ".join(f"{cell.dtype} x{cell.world_size}" for cell in cells)
        lines.append(f"- {' / '.join(key)} ({where}): {unequal[cells[0]]}")
    return lines


def document(outcomes: dict[Cell, str]) -> str:
    total = Counter(cell.door for cell in outcomes)
    equal = Counter(cell.door for cell, outcome in outcomes.items() if outcome == "equal")
    sums = [f"| {door} | {equal[door]} of {total[door]} |" for door in total]
    text = [
        "# Conformance",
        "",
        "Generated by `make conformance` (tests/conformance/matrix.py); do not edit.",
        "",
        "Small models of each kind of parameter are trained in each way on "
        f"{WORLD_SIZES[0]} to {WORLD_SIZES[-1]} CPU ranks (gloo), in fp32 and, on 2, with bf16 "
        "compute. All gradients, norms and outputs are compared with one process that takes the "
        "mean over the ranks' batches. *Equal*: no number is off by more than "
        f"{LIMIT['fp32']:.0e} (bf16: {LIMIT['bf16']:.0e}). ZeRO-1, 2, 3 and HSDP (2 replicas) are "
        "`fsdpx.fully_shard`, FSDP1 is `fsdpx.FullyShardedDataParallel`. "
        f"{STOCK} is `torch.distributed.fsdp.fully_shard` of torch {torch.__version__}, measured "
        "the same way.",
        "",
        f"ZeRO-3 and {STOCK} on 2 ranks in fp32: every kind in every way. Else: every kind with "
        f"{', '.join(MAIN_PATTERNS)}; every way with {', '.join(MAIN_KINDS)}.",
        "",
        "| | equal cells |",
        "|---|---|",
        *sums,
        "",
        "## By way to train",
        "",
        *table(outcomes, "pattern", PATTERNS),
        "",
        "## By kind of parameter",
        "",
        *table(outcomes, "kind", KINDS),
        "",
        "## Cells that are not equal",
        "",
        "Door / kind / pattern (dtype x ranks): what happened in the first of them.",
        "",
        *exceptions(outcomes),
    ]
    return "\n".join(text) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name}")
    parser.add_argument("--doors", nargs="*", default=list(DOORS), choices=list(DOORS))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--patterns", nargs="*", default=list(PATTERNS), choices=list(PATTERNS))
    parser.add_argument("--ranks", nargs="*", type=int, default=list(WORLD_SIZES))
    given = parser.parse_args()
    cells = [
        cell
        for cell in all_cells()
        if cell.door in given.doors
        and cell.kind in given.kinds
        and cell.pattern in given.patterns
        and cell.world_size in given.ranks
    ]
    outcomes = run_cells(cells)
    outcomes = {cell: outcomes[cell] for cell in cells}
    print("\n".join(exceptions(outcomes)))
    for door in given.doors:
        print(f"{door}: {count(outcomes, door=door)}")
    if given.write:
        DOCUMENT.write_text(document(outcomes))
    return int(any(o != "equal" and cell.door != STOCK for cell, o in outcomes.items()))


if __name__ == "__main__":
    from conformance import matrix  # by its name: worker processes import it

    sys.exit(matrix.main())
