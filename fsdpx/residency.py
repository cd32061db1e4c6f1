"""Which units of a model are gathered, and where: gathers, frees, and the memory for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

from . import _C
from .comm import Communicator
from .memory import Memory, Place, arena_bytes
from .post_forward import communicators_of
from .unit import Storage, Unit

_PATIENCE = 10.0  # seconds


class Residency:
    """The gathered units and their memory. What is to be gathered when is the schedule's business.

    Attributes:
        levels: How many units enclose each one.
        memories: By communicator.
    """

    def __init__(self, units: Sequence[Unit], levels: dict[Unit, int]) -> None:
        self.levels = levels
        self.memories: dict[Communicator, Memory] = {}
        self._own: dict[Unit, Place] = {}  # memory of units that stay gathered
        self._resident: dict[Unit, None] = {}  # least recently used first
        # The latest gather of each communicator; those of offloaded units apart.
        self._latest: dict[tuple[Communicator, bool], tuple[Unit, _C.Event]] = {}
        for unit in units:
            for comm in communicators_of(unit):
                if unit.gathered_bytes and comm not in self.memories:
                    self.memories[comm] = Memory(comm)
        self._with_own: list[Unit] | None = None  # for whom the arenas need no room
        self.size_arenas(units)

    def size_arenas(self, order: Sequence[Unit]) -> None:
        """Gives every level an arena for any `prefetch + 1` consecutive units of `order`, those
        with memory of their own aside. Collective; does nothing while a unit is in an arena.
        """
        if any(memory.is_borrowed for memory in self.memories.values()):
            return
        self._with_own = self._find_with_own()
        scheduled = [u for u in order if u.gathered_bytes and not self.has_own_memory(u)]
        for comm, memory in self.memories.items():
            for level in sorted(set(self.levels.values())):
                users = [u for u in scheduled if comm in communicators_of(u)]
                mine = [u for u in users if self.levels[u] == level]
                window = 1 + max((unit.options.prefetch for unit in mine), default=0)
                memory.resize(level, arena_bytes([u.gathered_bytes for u in mine], window))

    def _find_with_own(self) -> list[Unit]:
        return [unit for unit in self.levels if self.has_own_memory(unit)]

    @property
    def fits(self) -> bool:
        """Whether the arenas were made for what the user wants to be kept now."""
        return self._with_own == self._find_with_own()

    def is_kept(self, unit: Unit) -> bool:
        """Whether a unit stays gathered from its forward to its backward, or longer."""
        return unit.zero.keeps_after_forward(is_root=self.levels[unit] == 0)

    def has_own_memory(self, unit: Unit) -> bool:
        """Whether a unit stays gathered while others are, and so can't share memory with them."""
        return self.is_kept(unit) or unit.zero.keeps_after_backward

    # ---- Gathering

    def keep_for_backward(self, unit: Unit) -> None:
        """Keeps what a smaller group of ranks will gather in backward, where there is one and the
        unit is about to be freed.
        """
        if unit.post_forward is not None and not self.has_own_memory(unit):
            unit.post_forward.keep()

    def gather(self, unit: Unit, *, in_backward: bool = False) -> None:
        """Issues the unit's gather unless it is gathered or on its way with the present weights.

        Args:
            unit: What to gather.
            in_backward: Whether a backward runs: then from what was kept for it, if anything was.
        """
        if unit.storage is not Storage.SHARDED:
            if unit.pins or not unit.is_stale:
                self._touch(unit)
                return
            if unit.held:
                unit.check_unedited()
            self.free(unit)
        if unit.gathered_bytes:
            few = unit.post_forward if in_backward else None
            borrows = not unit.kept_by_user and not self.has_own_memory(unit)
            if few and few.kept and borrows:
                few.start_gather(self._place(unit, few.comm))
            else:
                unit.start_gather(self._place(unit, unit.comm))
            assert unit.gathered is not None
            self._latest[unit.comm, unit.is_offloaded] = unit, unit.gathered.event
            self._touch(unit)

    def finish(self) -> None:
        """Waits for gathers that nothing here has read. Other ranks may: until a gather has ended,
        this rank's shards must not change.
        """
        for unit, event in self._latest.values():
            if not event.query():
                unit.wait(event)
                unit.wait_on_host(event)
        self._latest.clear()

    def let_go(self) -> None:
        """After a backward that failed: gives copies to CPU memory, where the host may now clear
        gradients, a while to end. One that waits for a lost rank never does.
        """
        offloaded = [unit for unit in self.levels if unit.is_offloaded and unit.gathered_bytes]
        for comm in {unit.comm for unit in offloaded}:
            with contextlib.suppress(RuntimeError):  # closed
                comm.drain(_PATIENCE)

    def _touch(self, unit: Unit) -> None:
        self._resident.pop(unit, None)
        self._resident[unit] = None

    def _place(self, unit: Unit, comm: Communicator) -> Place:
        memory = self.memories[comm]
        if unit.kept_by_user or self.has_own_memory(unit):
            if unit not in self._own:
                self._own[unit] = memory.take_overflow(unit.gathered_bytes)
            return self._own[unit]
        if unit in self._own:  # it has no memory of its own any longer
            self.memories[unit.comm].give(self._own.pop(unit))
        level = self.levels[unit]
        while (place := memory.take(level, unit.gathered_bytes)) is None:
            victim = self._victim(unit, comm)
            if victim is None:
                return memory.take_overflow(unit.gathered_bytes)
            self.free(victim)
        return place

    def _victim(self, unit: Unit, comm: Communicator) -> Unit | None:
        """The least recently used unit whose place in memory of `comm` `unit` could take."""
        for other in self._resident:
            assert other.gathered is not None
            same_arena = self.levels[other] == self.levels[unit] and other.gathered.comm is comm
            if (
                same_arena
                and not other.pins
                and not other.native.num_holds
                and other not in self._own
                and not other.kept_by_user
            ):
                return other
        return None

    # ---- Freeing

    def free(self, unit: Unit) -> None:
        """Frees a unit's full parameters; the next read gathers them again."""
        if unit.storage is Storage.SHARDED:
            return
        assert unit.gathered is not None
        memory = self.memories[unit.gathered.comm]
        place = unit.free()
        del self._resident[unit]
        own = self._own.get(unit)
        if own is None or own.region != place.region:
            memory.give(place)
        elif self.has_own_memory(unit):
            self._own[unit] = place
        else:  # unshard() by the user lent it
            del self._own[unit]
            memory.give(place)

    def drop(self, unit: Unit) -> None:
        """Frees a unit, and memory of its own: it will need more or less."""
        self.free(unit)
        self.forget_kept([unit])
        if unit in self._own:
            self.memories[unit.comm].give(self._own.pop(unit))

    def free_others(self, keep: Callable[[Unit], bool]) -> None:
        """Frees all but the units that `keep` names, that run, or that the user keeps."""
        for unit in list(self._resident):
            if not unit.pins and not unit.kept_by_user and not keep(unit):
                self.free(unit)

    def forget_kept(self, units: Iterable[Unit]) -> None:
        """Drops what was kept for backward."""
        for unit in units:
            if unit.post_forward is not None:
                unit.post_forward.forget()

    def free_stale(self, among: Iterable[Unit] | None = None) -> None:
        """Frees units that stayed gathered, and whose shard or full parameters have changed on any
        rank since.

        Ranks agree on it: loading a checkpoint, say, writes nothing on a rank whose share is empty.

        Args:
            among: The units to look at; None for all.
        """
        by_comm: dict[Communicator, list[Unit]] = {}
        # In registration order: ranks need not have used the units that they keep alike.
        for unit in self.levels if among is None else among:
            # Inside full_parameters() ranks may run different forwards.
            if unit in self._resident and not unit.held:
                by_comm.setdefault(unit.comm, []).append(unit)
        for comm, units in by_comm.items():
            mine = [unit.is_stale or unit.is_edited for unit in units]
            stale = units[0].on_any_rank(mine, comm)
            for unit, is_stale in zip(units, stale, strict=True):
                if is_stale and not unit.pins:
                    self.free(unit)

    def close(self) -> None:
        """Frees all units and gives all memory back."""
        for unit in list(self._resident):
            self.free(unit)
        self.forget_kept(self.levels)
        for memory in self.memories.values():
            memory.release()
