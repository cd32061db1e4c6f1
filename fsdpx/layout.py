"""Where every parameter of a unit lies: pure arithmetic on names, shapes, dtypes and a world size.

A unit's parameters are laid end to end in *segments*, one per (original, compute, reduce) dtype and
trainability. A segment is cut into `world_size` equal shares; rank `r` owns the elements
``[r * shard_numel, (r + 1) * shard_numel)``. Nothing here stores anything per rank, so the world
size costs nothing, and nothing here touches a tensor.

Terms: *offset* counts elements from the start of a segment; *gathered* is the whole unit in its
compute dtypes, one segment after the other.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Protocol

# GEMMs, vector loads and peers' cache lines all want this.
ALIGNMENT_BYTES = 128

# Splitting a segment by granularity costs a few launches; below this saving it is not worth it.
_SPLIT_SAVING = 1 / 64

Granularity = str | int
"""``"element"``, ``"row"``, ``"parameter"`` or a block size in elements."""


class DType(Protocol):
    """What the layout needs of a dtype; every `torch.dtype` is one."""

    @property
    def itemsize(self) -> int: ...


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter as the layout sees it.

    Attributes:
        name: Fully qualified name; used in messages only.
        shape: Global shape; ``()`` for a 0-dim parameter.
        dtype: Dtype of the sharded parameter.
        compute_dtype: Dtype of the gathered parameter.
        reduce_dtype: Dtype in which its gradient travels.
        trainable: Whether it takes part in gradient reduction.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    compute_dtype: DType
    reduce_dtype: DType
    trainable: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Entry:
    """Parameter number `index` of a unit, at elements ``[offset, offset + numel)`` of a segment."""

    index: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Ranges(Sequence[tuple[int, int]]):
    """For every rank the elements ``(begin, end)`` of a parameter that it owns; made on demand.

    Two parameters are sharded alike exactly if their `Ranges` are equal.
    """

    offset: int
    numel: int
    shard_numel: int
    world_size: int

    def __len__(self) -> int:
        return self.world_size

    def __getitem__(self, rank: int) -> tuple[int, int]:  # type: ignore[override]  # ranks only
        if not -self.world_size <= rank < self.world_size:
            raise IndexError(f"rank {rank} of {self.world_size}")
        start = (rank % self.world_size) * self.shard_numel - self.offset
        return self._clamp(start), self._clamp(start + self.shard_numel)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return (self[rank] for rank in range(self.world_size))

    def _clamp(self, position: int) -> int:
        return min(max(position, 0), self.numel)

    @property
    def owners(self) -> range:
        """The ranks that hold at least one element."""
        if not self.numel:
            return range(0)
        last = (self.offset + self.numel - 1) // self.shard_numel
        return range(self.offset // self.shard_numel, last + 1)

    @property
    def max_numel(self) -> int:
        """The largest piece that any rank holds."""
        ranks = self.owners
        # All inner owners hold a whole share, so the ends and one inner rank tell.
        return max((self[r][1] - self[r][0] for r in (*ranks[:2], *ranks[-1:])), default=0)


@dataclass(frozen=True)
class Padding:
    """Elements of a segment or a unit that belong to no parameter, and their bytes when gathered.

    Attributes:
        gap_numel: Between parameters, for alignment and granularity.
        tail_numel: At the end of segments, for equal shares.
        gap_bytes: Gathered bytes of `gap_numel`.
        tail_bytes: Gathered bytes of `tail_numel`.
        used_bytes: Gathered bytes that do belong to parameters.
    """

    gap_numel: int
    tail_numel: int
    gap_bytes: int
    tail_bytes: int
    used_bytes: int

    @property
    def numel(self) -> int:
        return self.gap_numel + self.tail_numel

    @property
    def num_bytes(self) -> int:
        return self.gap_bytes + self.tail_bytes

    @property
    def fraction(self) -> float:
        """Padding as a part of all gathered bytes, in [0, 1]."""
        return self.num_bytes / max(1, self.num_bytes + self.used_bytes)


@dataclass(frozen=True)
class Segment:
    """Parameters of one dtype triple and trainability, in the order in which they lie.

    Attributes:
        dtype: Dtype of the flat shard.
        compute_dtype: Dtype of the gathered segment.
        reduce_dtype: Dtype in which gradients travel.
        trainable: Whether gradients are reduced.
        entries: By increasing offset.
        shard_numel: Elements of every rank's share.
        world_size: Number of shares.
        byte_offset: Of the segment in the gathered unit.
    """

    dtype: DType
    compute_dtype: DType
    reduce_dtype: DType
    trainable: bool
    entries: tuple[Entry, ...]
    shard_numel: int
    world_size: int
    byte_offset: int

    @property
    def numel(self) -> int:
        """Elements of the whole segment, padding included."""
        return self.shard_numel * self.world_size

    @property
    def gathered_bytes(self) -> int:
        return self.numel * self.compute_dtype.itemsize

    @property
    def reduce_bytes(self) -> int:
        """Bytes of the whole segment's gradients as they travel."""
        return self.numel * self.reduce_dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's share in the original dtype."""
        return self.shard_numel * self.dtype.itemsize

    @property
    def padding(self) -> Padding:
        used = sum(entry.numel for entry in self.entries)
        end = max((entry.offset + entry.numel for entry in self.entries if entry.numel), default=0)
        gaps, tail, size = end - used, self.numel - end, self.compute_dtype.itemsize
        return Padding(gaps, tail, gaps * size, tail * size, used * size)

    def rank_entries(self, rank: int) -> Iterator[tuple[Entry, int, int, int]]:
        """Yields ``(entry, begin, end, start)`` for every parameter of which `rank` owns elements.

        ``[begin, end)`` are elements of the parameter, `start` is where they lie in the flat shard.
        """
        base = rank * self.shard_numel
        for entry in self.entries:
            begin = max(base - entry.offset, 0)
            end = min(base + self.shard_numel - entry.offset, entry.numel)
            if begin < end:
                yield entry, begin, end, entry.offset + begin - base


@dataclass(frozen=True)
class UnitLayout:
    """The layout of one unit; make it with `plan_unit`.

    Attributes:
        parameters: As given.
        world_size: Number of ranks that share the unit.
        segments: Trainable segments first, else by first appearance of their dtypes.
    """

    parameters: tuple[ParameterInfo, ...]
    world_size: int
    segments: tuple[Segment, ...]

    @cached_property
    def _places(self) -> dict[int, tuple[int, Entry]]:
        return {e.index: (number, e) for number, s in enumerate(self.segments) for e in s.entries}

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole unit in its compute dtypes; a multiple of 128."""
        end = max((s.byte_offset + s.gathered_bytes for s in self.segments), default=0)
        return _round_up(end, ALIGNMENT_BYTES)

    @property
    def trainable_bytes(self) -> int:
        """Bytes of the trainable prefix of the gathered unit."""
        return sum(segment.gathered_bytes for segment in self.segments if segment.trainable)

    @property
    def reduce_bytes(self) -> int:
        """Bytes of all trainable segments' gradients as they travel."""
        return sum(segment.reduce_bytes for segment in self.segments if segment.trainable)

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shares in the original dtypes."""
        return sum(segment.shard_bytes for segment in self.segments)

    @cached_property
    def padding(self) -> Padding:
        """What the layout adds to the parameters, over all segments and ranks."""
        parts = [astuple(segment.padding) for segment in self.segments]
        return Padding(*map(sum, zip((0,) * 5, *parts, strict=True)))

    def place(self, index: int) -> tuple[int, Entry]:
        """The number of the segment that holds parameter `index`, and its entry there."""
        return self._places[index]

    def gathered_offset(self, index: int) -> int:
        """Byte offset of parameter `index` in the gathered unit; a multiple of 128."""
        number, entry = self._places[index]
        segment = self.segments[number]
        return segment.byte_offset + entry.offset * segment.compute_dtype.itemsize

    def ranges(self, index: int) -> Ranges:
        """For every rank the elements of parameter `index` that it owns."""
        number, entry = self._places[index]
        return Ranges(entry.offset, entry.numel, self.segments[number].shard_numel, self.world_size)

    def local_slice(self, index: int, rank: int) -> tuple[int, int]:
        """Where `rank` keeps its piece of parameter `index`: (start in the flat shard, length)."""
        number, entry = self._places[index]
        begin, end = self.ranges(index)[rank]
        shard_numel = self.segments[number].shard_numel
        start = entry.offset + begin - rank * shard_numel
        return min(max(start, 0), shard_numel), end - begin


def plan_unit(
    parameters: Sequence[ParameterInfo],
    world_size: int,
    granularity: Granularity | Sequence[Granularity] = "element",
) -> UnitLayout:
    """Lays the parameters of a unit out for `world_size` ranks.

    Every parameter starts at a multiple of 128 bytes in its compute dtype; every rank's share is
    equally large and a multiple of 128 bytes in each dtype of its segment.

    Args:
        parameters: In registration order. Any shapes, zero elements and no dimensions included.
        world_size: Number of ranks, at least 1.
        granularity: What a share must not cut: ``"element"`` (nothing), ``"row"`` (rows along the
            first dimension), ``"parameter"``, or blocks of so many elements; one value for all
            parameters or one for each. Other values than ``"element"`` may reorder parameters and
            may split a segment in several, and can need much padding (see `UnitLayout.padding`).

    Raises:
        ValueError: If the world size or a granularity is not a valid one.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    atoms = _atoms(parameters, granularity)
    groups: dict[tuple[bool, DType, DType, DType], list[_Item]] = {}
    for index, info in enumerate(parameters):
        key = (not info.trainable, info.dtype, info.compute_dtype, info.reduce_dtype)
        groups.setdefault(key, []).append(_Item(index, info.numel, atoms[index]))
    segments: list[Segment] = []
    position = 0
    for key in sorted(groups, key=lambda key: key[0]):
        frozen, dtype, compute, reduce = key
        quanta = [_quantum(dtype), _quantum(compute), _quantum(reduce)]
        rule = _Rule(world_size, start=quanta[1], share=math.lcm(*quanta))
        for plan in _plan(groups[key], rule):
            place = (plan.entries, plan.shard_numel, world_size, position)
            segments.append(Segment(dtype, compute, reduce, not frozen, *place))
            position += segments[-1].gathered_bytes
    return UnitLayout(tuple(parameters), world_size, tuple(segments))


# ---- planning ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Item:
    """A parameter to place; shares may cut it at multiples of `atom` from its start only."""

    index: int
    numel: int
    atom: int


@dataclass(frozen=True)
class _Rule:
    """Parameters start at multiples of `start`, shares are multiples of `share` (in elements)."""

    world_size: int
    start: int
    share: int


@dataclass(frozen=True)
class _Plan:
    shard_numel: int
    entries: tuple[Entry, ...]


def _quantum(dtype: DType) -> int:
    """The smallest number of elements that fills whole alignment blocks."""
    return ALIGNMENT_BYTES // math.gcd(ALIGNMENT_BYTES, dtype.itemsize)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _atoms(
    parameters: Sequence[ParameterInfo], granularity: Granularity | Sequence[Granularity]
) -> list[int]:
    if isinstance(granularity, str | int):
        values: Sequence[Granularity] = [granularity] * len(parameters)
    else:
        values = granularity
    if len(values) != len(parameters):
        raise ValueError(f"{len(values)} granularities for {len(parameters)} parameters")
    return [_atom(info, value) for info, value in zip(parameters, values, strict=True)]


def _atom(info: ParameterInfo, granularity: Granularity) -> int:
    if isinstance(granularity, int) and not isinstance(granularity, bool) and granularity >= 1:
        # A block at least as large as the parameter keeps it whole.
        return max(1, min(granularity, info.numel))
    match granularity:
        case "element":
            return 1
        case "row":
            return max(1, math.prod(info.shape[1:]))
        case "parameter":
            return max(1, info.numel)
    raise ValueError(
        f"parameter {info.name!r}: granularity must be 'element', 'row', 'parameter' or a block "
        f"size of at least 1 element, got {granularity!r}"
    )


def _plan(items: list[_Item], rule: _Rule) -> list[_Plan]:
    """The best plan found; more than one segment only where that saves enough padding."""
    together = _plan_together(items, rule)
    classes: dict[int, list[_Item]] = {}
    for item in items:
        whole = item.atom >= item.numel and item.atom > 1
        classes.setdefault(0 if whole else item.atom, []).append(item)
    if len(classes) == 1:
        return [together]
    apart = [_plan_together(group, rule) for group in classes.values()]
    saved = together.shard_numel - sum(plan.shard_numel for plan in apart)
    return apart if saved > _SPLIT_SAVING * together.shard_numel else [together]


def _plan_together(items: list[_Item], rule: _Rule) -> _Plan:
    """The plan with the smallest share among a few orders of the parameters."""
    if all(item.atom == 1 for item in items):
        return _smallest(items, rule, rule.share)
    plans = []
    for order in (items, sorted(items, key=lambda item: (item.atom, item.index))):
        plans += [_smallest(order, rule, multiple) for multiple in _multiples(items, rule)]
    if all(item.atom >= item.numel for item in items):
        plans.append(_whole(items, rule))
    return min(plans, key=lambda plan: plan.shard_numel)


def _multiples(items: list[_Item], rule: _Rule) -> list[int]:
    """Divisors that shares may need so that a parameter can span more than two of them."""
    ideal = -(-sum(item.numel for item in items) // rule.world_size)
    spanning = {item.atom for item in items if item.numel > ideal and item.atom < item.numel}
    single = [math.lcm(rule.share, atom) for atom in sorted(spanning)[-8:]]
    return list(dict.fromkeys([rule.share, *single, math.lcm(rule.share, *spanning)]))


def _smallest(items: list[_Item], rule: _Rule, multiple: int) -> _Plan:
    """The smallest share, a multiple of `multiple`, found for parameters in the given order.

    Whether a share is large enough is not quite monotone in its size, so the search is a bisection
    that keeps a share known to work; one share for everything always does.
    """
    end = 0
    for item in items:
        if item.numel:
            end = _round_up(end, rule.start) + item.numel
    low = -(-end // (rule.world_size * multiple))
    high = -(-end // multiple)
    best: _Plan | None = None
    # Most plans need next to no more than the minimum: gallop up from there before bisecting.
    step, probe = 1, low
    while best is None:
        best = _place_all(items, rule, probe * multiple)
        if best is None:
            low, probe = probe + 1, min(high, probe + step)
            step *= 2
    high = probe
    while low < high:
        middle = (low + high) // 2
        plan = _place_all(items, rule, middle * multiple)
        if plan is None:
            low = middle + 1
        else:
            best, high = plan, middle
    return best


def _place_all(items: list[_Item], rule: _Rule, shard_numel: int) -> _Plan | None:
    """Places the parameters in order, each as early as possible; None if they don't fit."""
    end, entries = 0, []
    for item in items:
        offset: int | None = _round_up(end, rule.start)
        if item.numel and item.atom > 1:
            offset = _earliest(_round_up(end, rule.start), item, rule, shard_numel)
        if offset is None:
            return None
        entries.append(Entry(item.index, offset, item.numel))
        end = offset + item.numel if item.numel else end
    # A zero-element parameter may lie at the very end, but not beyond it.
    limit = rule.world_size * shard_numel
    if end > limit:
        return None
    fixed = [e if e.numel else replace(e, offset=min(e.offset, limit)) for e in entries]
    return _Plan(shard_numel, tuple(fixed))


def _earliest(offset: int, item: _Item, rule: _Rule, shard_numel: int) -> int | None:
    """The first place at or after `offset` where no share cuts an atom of the parameter."""
    if not shard_numel:
        return None
    boundary = (offset // shard_numel + 1) * shard_numel
    if offset + item.numel <= boundary:
        return offset
    # The boundary is aligned: what lies before it must be whole atoms and whole alignment blocks.
    step = math.lcm(item.atom, rule.start)
    for limit, room in ((boundary, boundary - offset), (boundary + shard_numel, shard_numel)):
        before = room // step * step
        spans_one_boundary = item.numel - before <= shard_numel
        if spans_one_boundary or shard_numel % item.atom == 0:
            return limit - before
    return None


def _whole(items: list[_Item], rule: _Rule) -> _Plan:
    """Parameters that stay whole, the largest first, each to the rank with the most room."""
    loads = [(0, rank) for rank in range(min(rule.world_size, len(items)))]
    local: list[tuple[int, int, _Item]] = []
    for item in sorted(items, key=lambda item: (-item.numel, item.index)):
        load, rank = heapq.heappop(loads)
        local.append((rank, load, item))
        heapq.heappush(loads, (load + _round_up(item.numel, rule.start), rank))
    shard_numel = _round_up(max(load for load, _ in loads), rule.share)
    placed = [(rank * shard_numel + load, item) for rank, load, item in local]
    placed.sort(key=lambda pair: (pair[0], pair[1].numel, pair[1].index))
    return _Plan(shard_numel, tuple(Entry(i.index, offset, i.numel) for offset, i in placed))
