"""Properties of the unit layout, by arithmetic alone."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpx.layout import (
    ALIGNMENT_BYTES,
    Granularity,
    ParameterInfo,
    Ranges,
    UnitLayout,
    plan_unit,
)

F32, BF16, F64, I64, BOOL = torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool
TRIPLES = [(F32, F32, F32), (F32, BF16, BF16), (F32, BF16, F32), (BF16, BF16, F32)]
TRIPLES += [(F64, F64, F64), (I64, I64, I64), (BOOL, BOOL, BOOL), (torch.complex128,) * 3]

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple) | st.sampled_from(
    [(), (1,), (0,), (64,), (1 << 21, 1 << 21), (3, 0, 5), (4097, 31), (128, 128)]
)
infos = st.builds(
    lambda shape, triple, trainable: ParameterInfo("w", shape, *triple, trainable),
    shapes,
    st.sampled_from(TRIPLES),
    st.booleans(),
)
world_sizes = st.integers(1, 9) | st.sampled_from([64, 1000, 4096, 100_000])
granularities = st.sampled_from(["element", "row", "parameter", 2, 7, 128])


def atom(info: ParameterInfo, granularity: Granularity) -> int:
    if granularity == "row":
        return max(1, math.prod(info.shape[1:]))
    if granularity == "parameter":
        return max(1, info.numel)
    return 1 if granularity == "element" else int(granularity)


def check(layout: UnitLayout) -> None:
    """Everything that must hold of any layout, without a loop over all ranks."""
    seen = []
    position = 0
    for segment in layout.segments:
        assert segment.byte_offset == position
        assert position % ALIGNMENT_BYTES == 0
        position += segment.gathered_bytes
        for dtype in (segment.dtype, segment.compute_dtype, segment.reduce_dtype):
            assert segment.shard_numel * dtype.itemsize % ALIGNMENT_BYTES == 0
        end = 0
        for entry in segment.entries:
            info = layout.parameters[entry.index]
            seen.append(entry.index)
            assert entry.numel == info.numel
            assert entry.offset * segment.compute_dtype.itemsize % ALIGNMENT_BYTES == 0
            assert entry.offset >= end
            end = entry.offset + entry.numel
            assert (info.dtype, info.compute_dtype, info.reduce_dtype, info.trainable) == (
                segment.dtype,
                segment.compute_dtype,
                segment.reduce_dtype,
                segment.trainable,
            )
        assert end <= segment.numel == segment.shard_numel * layout.world_size
    assert sorted(seen) == list(range(len(layout.parameters)))
    assert position == layout.gathered_bytes
    flags = [segment.trainable for segment in layout.segments]
    assert flags == sorted(flags, reverse=True)


def sample_ranks(ranges: Ranges) -> list[int]:
    """The owners' ends, a few in the middle, and non-owners on both sides."""
    owners, size = ranges.owners, len(ranges)
    some = {0, size - 1, *owners[:3], *owners[-3:], *owners[:: max(1, len(owners) // 50)]}
    some |= {r + d for r in (*owners[:1], *owners[-1:]) for d in (-1, 1)} if owners else set()
    return sorted(r for r in some if 0 <= r < size)


def owners_cover(ranges: Ranges, numel: int) -> bool:
    """Whether the owners' ranges are adjacent and cover everything once."""
    owners = ranges.owners
    if len(owners) > 200:
        inner = {ranges[r][1] - ranges[r][0] for r in owners[1:200]}
        length = sum(b - a for a, b in (ranges[owners[0]], ranges[owners[-1]]))
        return inner == {ranges.shard_numel} and numel == length + (
            (len(owners) - 2) * ranges.shard_numel
        )
    position = 0
    for rank in owners:
        begin, end = ranges[rank]
        if begin != position or end <= begin:
            return False
        position = end
    return position == numel


@given(st.lists(infos, max_size=8), world_sizes, st.data())
@settings(max_examples=300, deadline=None)
def test_any_layout(parameters: list[ParameterInfo], world_size: int, data: st.DataObject) -> None:
    count = len(parameters)
    each = data.draw(granularities | st.lists(granularities, min_size=count, max_size=count))
    layout = plan_unit(parameters, world_size, each)
    check(layout)
    for index, info in enumerate(parameters):
        ranges = layout.ranges(index)
        assert owners_cover(ranges, info.numel)
        number, entry = layout.place(index)
        segment = layout.segments[number]
        block = atom(info, each[index] if isinstance(each, list) else each)
        assert ranges.max_numel >= max(ranges[r][1] - ranges[r][0] for r in sample_ranks(ranges))
        for rank in sample_ranks(ranges):
            begin, end = ranges[rank]
            start, length = layout.local_slice(index, rank)
            assert length == end - begin >= 0
            assert 0 <= start <= start + length <= segment.shard_numel
            assert (length > 0) == (rank in ranges.owners)
            if length:
                assert rank * segment.shard_numel + start == entry.offset + begin
                assert begin % block == 0 or begin == info.numel
                assert end % block == 0 or end == info.numel
                assert (entry, begin, end, start) in list(segment.rank_entries(rank))


@given(st.lists(infos, max_size=8), world_sizes)
@settings(max_examples=200, deadline=None)
def test_padding_by_element_is_small_and_counted(
    parameters: list[ParameterInfo], world_size: int
) -> None:
    layout = plan_unit(parameters, world_size)
    total = 0
    for segment in layout.segments:
        sizes = [dtype.itemsize for dtype in (segment.dtype, segment.compute_dtype)]
        smallest = min(*sizes, segment.reduce_dtype.itemsize)
        padding = segment.padding
        start = ALIGNMENT_BYTES // segment.compute_dtype.itemsize
        assert padding.gap_numel <= len(segment.entries) * (start - 1)
        assert padding.tail_numel < max(1, world_size * ALIGNMENT_BYTES // smallest)
        used = sum(entry.numel for entry in segment.entries)
        assert padding.numel + used == segment.numel
        total += padding.num_bytes
    assert layout.padding.num_bytes == total
    assert layout.padding.num_bytes + layout.padding.used_bytes == layout.gathered_bytes
    assert 0 <= layout.padding.fraction <= 1


@given(st.lists(infos, max_size=8), st.integers(1, 9), st.randoms())
@settings(max_examples=100, deadline=None)
def test_other_groups_do_not_move_a_segment(
    parameters: list[ParameterInfo], world_size: int, rng: random.Random
) -> None:
    """Interleaving parameters of different groups differently leaves each group's segment alone."""

    def key(info: ParameterInfo) -> tuple[object, ...]:
        return info.trainable, info.dtype, info.compute_dtype, info.reduce_dtype

    groups: dict[object, list[ParameterInfo]] = {}
    for info in parameters:
        groups.setdefault(key(info), []).append(info)
    queues = [list(group) for group in groups.values()]
    shuffled = []
    while queues:
        queue = rng.choice(queues)
        shuffled.append(queue.pop(0))
        queues = [queue for queue in queues if queue]

    def picture(infos: list[ParameterInfo]) -> set[object]:
        layout = plan_unit(infos, world_size)
        return {
            (
                key(infos[segment.entries[0].index]),
                segment.shard_numel,
                tuple((infos[e.index].shape, e.offset) for e in segment.entries),
            )
            for segment in layout.segments
        }

    assert picture(parameters) == picture(shuffled)


@given(st.lists(infos, max_size=8), world_sizes, granularities)
@settings(max_examples=50, deadline=None)
def test_equal_inputs_give_equal_layouts(
    parameters: list[ParameterInfo], world_size: int, granularity: Granularity
) -> None:
    assert plan_unit(parameters, world_size, granularity) == plan_unit(
        list(parameters), world_size, granularity
    )


def block(hidden: int) -> list[ParameterInfo]:
    """The parameters of a transformer block."""
    shape = [(hidden,), (3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,)]
    shape += [(hidden,), (4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,)]
    return [ParameterInfo(f"p{i}", s, F32, BF16, F32) for i, s in enumerate(shape)]


@pytest.mark.parametrize("hidden", [64, 768, 4096, 1000])
@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
def test_padding_of_rows_stays_small(hidden: int, world_size: int) -> None:
    """Rows of a block have lengths hidden and 4 * hidden: no worse than padding each parameter."""
    layout = plan_unit(block(hidden), world_size, "row")
    check(layout)
    per_parameter = sum(
        -(-p.shape[0] // world_size) * world_size * math.prod(p.shape[1:]) - p.numel
        for p in layout.parameters
    )
    quantum = world_size * ALIGNMENT_BYTES * len(layout.parameters)
    assert layout.padding.numel <= max(2 * per_parameter, 8 * hidden * world_size) + quantum


def test_whole_parameters_are_balanced() -> None:
    sizes = [100, 90, 80, 70, 60, 50, 40, 30]
    infos = [ParameterInfo(f"p{i}", (n, 32), F32, F32, F32) for i, n in enumerate(sizes)]
    layout = plan_unit(infos, 4, "parameter")
    check(layout)
    assert layout.segments[0].shard_numel == 130 * 32
    assert layout.padding.numel == 0
    assert all(len(layout.ranges(i).owners) == 1 for i in range(len(sizes)))


def test_awkward_rows_beside_elements_get_their_own_segment() -> None:
    """An odd row length must not force its multiples on everything else."""
    infos = [
        ParameterInfo("a", (5000, 4099), F32, F32, F32),
        ParameterInfo("b", (5000, 4093), F32, F32, F32),
        ParameterInfo("c", (4096, 4096), F32, F32, F32),
    ]
    layout = plan_unit(infos, 8, "row")
    check(layout)
    assert layout.padding.fraction < 0.05
    assert math.lcm(4099, 4093, 4096) > 1000 * layout.segments[0].numel


def test_empty_unit_and_empty_parameters() -> None:
    layout = plan_unit([], 3)
    assert layout.segments == ()
    assert layout.gathered_bytes == 0
    layout = plan_unit([ParameterInfo("e", (0, 4), F32, BF16, F32)] * 2, 3)
    assert layout.gathered_bytes == 0
    assert layout.local_slice(1, 2) == (0, 0)
    assert list(layout.ranges(0)) == [(0, 0)] * 3
    assert layout.ranges(0).owners == range(0)
    assert layout.ranges(0).max_numel == 0


def test_all_ranks_own_every_element_once() -> None:
    infos = [
        ParameterInfo(f"p{i}", s, F32, F32, F32)
        for i, s in enumerate([(7, 5), (), (0, 3), (33,), (2, 3, 5, 7)])
    ]
    for world_size, granularity in itertools.product(range(1, 12), ["element", "row", 4]):
        layout = plan_unit(infos, world_size, granularity)
        for index, info in enumerate(infos):
            owned = [e for begin, end in layout.ranges(index) for e in range(begin, end)]
            assert owned == list(range(info.numel))


def test_huge_numbers_are_exact() -> None:
    """More than 2**40 elements, one odd: no float and no 32-bit integer is involved."""
    numel = (1 << 45) + 1
    layout = plan_unit([ParameterInfo("w", (numel,), F32, BF16, F32)], 99_999)
    segment = layout.segments[0]
    assert segment.shard_numel == -(-numel // (99_999 * 64)) * 64
    last = layout.ranges(0).owners[-1]
    assert layout.ranges(0)[last][1] == numel
    assert layout.gathered_bytes == 2 * segment.numel
    assert layout.reduce_bytes == 4 * segment.numel


@pytest.mark.parametrize("granularity", ["element", "row", "parameter"])
def test_world_size_costs_nothing(granularity: str) -> None:
    begin = time.process_time()
    layout = plan_unit(block(4096) * 20, 100_000, granularity)
    sum(layout.ranges(index)[99_999][0] for index in range(200))
    assert time.process_time() - begin < 2


def test_ranges_behave_as_a_sequence() -> None:
    ranges = plan_unit([ParameterInfo("w", (40,), F32, F32, F32)], 2).ranges(0)
    assert list(ranges) == [(0, 32), (32, 40)] == [ranges[-2], ranges[-1]]
    assert ranges.max_numel == 32
    assert ranges.owners == range(2)
    assert hash(ranges) == hash(Ranges(0, 40, 32, 2))
    with pytest.raises(IndexError):
        ranges[2]


@pytest.mark.parametrize("wrong", ["rows", 0, -3, True, 1.5])
def test_wrong_granularity_is_named(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"'layer\.w': granularity must be"):
        plan_unit([ParameterInfo("layer.w", (4,), F32, F32, F32)], 2, [wrong])  # type: ignore[list-item]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="world_size"):
        plan_unit([], 0)
    with pytest.raises(ValueError, match="2 granularities for 0"):
        plan_unit([], 1, ["row", "row"])
