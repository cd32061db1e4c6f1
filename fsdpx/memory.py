"""Slots: the memory that gathered units borrow.

[Note: Places are alike on all ranks] Peers write a unit's shards straight into this rank's memory,
so all ranks must put a unit at the same place. Every decision here depends only on the order of
takes and gives, which is the order of the program and so the same everywhere; each collective
carries its place in its check word, so a rank that differs is an error before data moves.

[Note: Freed places] On a GPU a unit is freed while the kernels that read it are still queued. So a
freed place carries a mark of that moment on each stream that read it, and a gather into any part of
it begins after the marks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from . import _C
from .comm import Communicator


class Place(NamedTuple):
    """Bytes ``[offset, offset + num_bytes)`` of a region; on this rank they are at `pointer`.

    Once all of `free_after` have passed, nobody reads what was there before.
    """

    region: int
    offset: int
    num_bytes: int
    pointer: int
    free_after: tuple[_C.Event, ...] = ()

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


class Region:
    """Memory of a communicator that peers may write; given back when released or forgotten."""

    def __init__(self, comm: Communicator, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.number = comm.allocate_region(num_bytes)
        self._data = comm.native.region_data(self.number)
        self._finalizer = weakref.finalize(self, _release, comm, self.number)
        self._finalizer.atexit = False  # the communicator closes itself

    def place(self, offset: int, num_bytes: int) -> Place:
        return Place(self.number, offset, num_bytes, self._data + offset)

    def release(self) -> None:
        """Gives the memory back once no collective can still write it."""
        self._finalizer()


def _release(comm: Communicator, number: int) -> None:
    if not comm.closed:
        comm.release(number)


class Ledger:
    """Which parts of ``[0, num_bytes)`` are taken."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._taken: dict[int, int] = {}  # offset -> size
        self._high = False

    def take(self, size: int) -> int | None:
        """The offset of a free part of `size` bytes, or None.

        Takes alternate between the two ends, so that of two units at a time, each as large as a
        window allows, neither can split the space of the other.
        """
        offset, position = None, 0
        for begin in (*sorted(self._taken), self.num_bytes):
            if begin - position >= size:
                offset = begin - size if self._high else position
                if not self._high:
                    break
            position = begin + self._taken.get(begin, 0)
        if offset is None:
            return None
        self._high = not self._high
        self._taken[offset] = size
        return offset

    def give(self, offset: int) -> None:
        del self._taken[offset]

    @property
    def is_empty(self) -> bool:
        return not self._taken


_STEP = 128  # units are multiples of it


def arena_bytes(sizes: Sequence[int], window: int) -> int:
    """Bytes that hold any `window` consecutive units of `sizes`, visited forwards, then backwards.

    Args:
        sizes: Gathered bytes of the units of one nesting level, in the order of use.
        window: Units held at once, at least 1.

    Returns:
        The largest sum over windows, or a little more where places could not be packed that
        tightly.
    """
    sizes = [size for size in sizes if size]
    num_bytes = max((sum(sizes[i : i + window]) for i in range(len(sizes))), default=0)
    while (missing := _overflow(sizes, window, num_bytes)) > 0:
        num_bytes += max(_STEP, missing // 8 // _STEP * _STEP)
    return num_bytes


def _overflow(sizes: Sequence[int], window: int, num_bytes: int) -> int:
    """The size of the first unit that finds no place in an arena of `num_bytes`, or 0."""
    ledger = Ledger(num_bytes)
    for order in (sizes, sizes[::-1]) * 2:
        held: deque[int] = deque()
        for size in order:
            if len(held) == window:
                ledger.give(held.popleft())
            offset = ledger.take(size)
            if offset is None:
                return size
            held.append(offset)
        for offset in held:
            ledger.give(offset)
    return 0


class Arena:
    """One region from which the scheduled units of a nesting level borrow."""

    def __init__(self, comm: Communicator, num_bytes: int) -> None:
        self.region = Region(comm, num_bytes)
        self._ledger = Ledger(num_bytes)
        self._freed: list[Place] = []  # whose marks nobody has followed yet

    @property
    def num_bytes(self) -> int:
        return self.region.num_bytes

    def take(self, num_bytes: int) -> Place | None:
        offset = self._ledger.take(num_bytes)
        if offset is None:
            return None
        place = self.region.place(offset, num_bytes)
        if not self._freed:
            return place
        before = [f for f in self._freed if f.offset < place.end and f.end > offset]
        self._forget_covered(place)
        return place._replace(free_after=tuple(mark for f in before for mark in f.free_after))

    def give(self, place: Place) -> None:
        self._ledger.give(place.offset)
        if place.free_after:
            self._forget_covered(place)
            self._freed.append(place)

    def _forget_covered(self, place: Place) -> None:
        """What comes to `place` has followed the marks there, or will."""
        self._freed = [f for f in self._freed if f.offset < place.offset or f.end > place.end]

    @property
    def is_borrowed(self) -> bool:
        return not self._ledger.is_empty


class Overflow:
    """Whole regions for units that find no place in their arena: nested uses of one level,
    `unshard()`.
    """

    KEPT_FREE = 2

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._free: dict[Region, tuple[_C.Event, ...]] = {}  # oldest first, and free after what
        self._taken: dict[int, Region] = {}

    def take(self, num_bytes: int) -> Place:
        fitting = [region for region in self._free if region.num_bytes >= num_bytes]
        region = min(fitting, key=lambda r: r.num_bytes, default=None)
        if region is None:
            region = Region(self._comm, num_bytes)
        free_after = self._free.pop(region, ())
        place = region.place(0, num_bytes)._replace(free_after=free_after)
        self._taken[place.region] = region
        return place

    def give(self, place: Place) -> None:
        self._free[self._taken.pop(place.region)] = place.free_after
        while len(self._free) > self.KEPT_FREE:
            oldest = next(iter(self._free))
            del self._free[oldest]
            oldest.release()

    def regions(self) -> Iterable[Region]:
        return [*self._free, *self._taken.values()]


class Memory:
    """All slots of one model on one communicator."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._arenas: dict[int, Arena] = {}
        self._overflow = Overflow(comm)
        self._owners: dict[int, Arena | Overflow] = {}  # region -> who lent it

    @property
    def num_bytes(self) -> int:
        """Bytes of all arenas and overflow regions on this rank."""
        arenas = sum(arena.num_bytes for arena in self._arenas.values())
        return arenas + sum(region.num_bytes for region in self._overflow.regions())

    @property
    def is_borrowed(self) -> bool:
        """Whether any unit is in an arena."""
        return any(arena.is_borrowed for arena in self._arenas.values())

    @property
    def arena_num_bytes(self) -> dict[int, int]:
        """Bytes of each nesting level's arena."""
        return {level: arena.num_bytes for level, arena in self._arenas.items()}

    def resize(self, level: int, num_bytes: int) -> None:
        """Makes the arena of a level `num_bytes` large. Collective; nothing may be borrowed from
        it.
        """
        old = self._arenas.get(level)
        if not num_bytes or (old and old.num_bytes == num_bytes):
            return
        if old:
            old.region.release()
        arena = self._arenas[level] = Arena(self._comm, num_bytes)
        self._owners[arena.region.number] = arena

    def take(self, level: int, num_bytes: int) -> Place | None:
        """A place in the arena of `level`, or None when it has no room now."""
        arena = self._arenas.get(level)
        return arena.take(num_bytes) if arena else None

    def take_overflow(self, num_bytes: int) -> Place:
        """A place outside the arenas; collective where no free region fits."""
        place = self._overflow.take(num_bytes)
        self._owners[place.region] = self._overflow
        return place

    def give(self, place: Place) -> None:
        self._owners[place.region].give(place)

    def release(self) -> None:
        """Gives all memory back; no unit may be gathered in it."""
        for arena in self._arenas.values():
            arena.region.release()
        for region in self._overflow.regions():
            region.release()
