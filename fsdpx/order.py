"""The order in which a pass over a model uses its units, and which of them backward reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .unit import Unit


class Order:
    """The units that a pass (all forwards of a step, or one backward) is expected to come to."""

    def __init__(self) -> None:
        self.known: list[Unit] = []
        self._cursor = 0

    def follow(self, known: Sequence[Unit]) -> None:
        """Starts a pass that is expected to visit `known`."""
        self.known, self._cursor = list(known), 0

    def visit(self, unit: Unit) -> None:
        """The pass has come to `unit`."""
        for start in (self._cursor, 0):
            if (position := self._find(unit, start)) is not None:
                self._cursor = position + 1
                return

    def next(self, count: int) -> list[Unit]:
        """The `count` units expected next."""
        return self.known[self._cursor : self._cursor + count]

    def expects(self, unit: Unit) -> bool:
        """Whether the pass has yet to come to `unit`."""
        return self._find(unit, self._cursor) is not None

    def before(self, unit: Unit) -> list[Unit]:
        """The units that are expected before the next visit to `unit`; none if it is not
        expected.
        """
        return self.known[self._cursor : self._find(unit, self._cursor) or self._cursor]

    def _find(self, unit: Unit, start: int) -> int | None:
        try:
            return self.known.index(unit, start)
        except ValueError:
            return None


@dataclass
class Reads:
    """The units that backwards have read, while the same units are frozen.

    Attributes:
        mine: On this rank.
        by_any: On some rank, as all ranks have heard.
        by_nobody: On none so far, as all ranks have heard.
    """

    mine: set[Unit] = field(default_factory=set)
    by_any: set[Unit] = field(default_factory=set)
    by_nobody: set[Unit] = field(default_factory=set)

    def note(self, unit: Unit, *, read: bool, certain: bool) -> None:
        """All ranks have heard whether a backward read `unit`; if none did, it may be uncertain."""
        if read:
            self.by_any.add(unit)
            self.by_nobody.discard(unit)
        elif certain and unit not in self.by_any:
            self.by_nobody.add(unit)
