"""A part of a product of axes in which every few values of different axes meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Sequence

Value = tuple[int, Hashable]  # the axis and what is chosen there


def covering_rows(
    axes: Sequence[Sequence[Hashable]], strength: int, seed: int = 0
) -> list[tuple[Hashable, ...]]:
    """Rows of the product, chosen greedily; always the same ones for the same seed.

    Args:
        axes: The values of each axis.
        strength: How many values of different axes must meet in some row.
        seed: Of the choice between values that are equally good.
    """
    draw = random.Random(seed)
    values = [[(number, value) for value in axis] for number, axis in enumerate(axes)]
    # A dict keeps the order: sets of strings have another one in each process.
    missing = {
        frozenset(met): met
        for chosen_axes in itertools.combinations(values, strength)
        for met in itertools.product(*chosen_axes)
    }
    rows = []
    while missing:
        chosen: dict[int, Value] = {value[0]: value for value in next(iter(missing.values()))}
        rest = [number for number in range(len(axes)) if number not in chosen]
        for number in draw.sample(rest, len(rest)):
            others = [*itertools.combinations(chosen.values(), strength - 1)]
            chosen[number] = max(
                draw.sample(values[number], len(values[number])),
                key=lambda value, others=others: sum(
                    frozenset((value, *met)) in missing for met in others
                ),
            )
        for met in itertools.combinations(chosen.values(), strength):
            missing.pop(frozenset(met), None)
        rows.append(tuple(chosen[number][1] for number in range(len(axes))))
    return rows
