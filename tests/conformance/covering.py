"""A small part of a product of axes in which every two values of different axes meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Sequence

Value = tuple[int, Hashable]  # the axis and what is chosen there


def covering_rows(axes: Sequence[Sequence[Hashable]], seed: int = 0) -> list[tuple[Hashable, ...]]:
    """Rows of the product, chosen greedily; always the same ones for the same seed."""
    draw = random.Random(seed)
    values = [[(number, value) for value in axis] for number, axis in enumerate(axes)]
    # A dict keeps the order: sets of strings have another one in each process.
    missing = {
        frozenset(pair): pair
        for one, other in itertools.combinations(values, 2)
        for pair in itertools.product(one, other)
    }
    rows = []
    while missing:
        chosen: dict[int, Value] = {pair[0]: pair for pair in next(iter(missing.values()))}
        rest = [number for number in range(len(axes)) if number not in chosen]
        for number in draw.sample(rest, len(rest)):
            candidates = draw.sample(values[number], len(values[number]))
            chosen[number] = max(
                candidates,
                key=lambda value: sum(frozenset((value, c)) in missing for c in chosen.values()),
            )
        for pair in itertools.combinations(chosen.values(), 2):
            missing.pop(frozenset(pair), None)
        rows.append(tuple(chosen[number][1] for number in range(len(axes))))
    return rows
