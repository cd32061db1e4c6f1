"""The planner of slots: pure arithmetic, no communicator."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpx.memory import Ledger, arena_bytes

SIZES = st.lists(st.integers(1, 1000).map(lambda n: 128 * n), min_size=1, max_size=12)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_equal_units_take_as_many_slots_as_the_window(window: int) -> None:
    assert arena_bytes([640] * 7, window) == 640 * window


def test_arena_is_not_larger_than_all_units() -> None:
    assert arena_bytes([128, 256], window=5) == 384
    assert arena_bytes([], window=2) == 0


def test_empty_units_take_no_place() -> None:
    assert arena_bytes([0, 128, 0, 256, 0], window=2) == 384


@given(SIZES)
def test_two_units_at_a_time_pack_without_loss(sizes: list[int]) -> None:
    largest = max(sum(sizes[i : i + 2]) for i in range(len(sizes)))
    assert arena_bytes(sizes, window=2) == largest


@given(SIZES, st.integers(1, 4))
def test_every_window_finds_places_in_both_directions(sizes: list[int], window: int) -> None:
    num_bytes = arena_bytes(sizes, window)
    assert num_bytes <= 2 * max(sizes) * window
    ledger = Ledger(num_bytes)
    for order in (sizes, sizes[::-1]):
        held: list[tuple[int, int]] = []
        for size in order:
            if len(held) == window:
                ledger.give(held.pop(0)[0])
            offset = ledger.take(size)
            assert offset is not None
            assert 0 <= offset <= num_bytes - size
            assert all(offset + size <= o or o + s <= offset for o, s in held)
            held.append((offset, size))
        for offset, _ in held:
            ledger.give(offset)


@given(st.lists(st.one_of(st.integers(1, 40), st.none()), max_size=60))
def test_ledger_never_overlaps_and_gives_everything_back(steps: list[int | None]) -> None:
    ledger = Ledger(100)
    held: dict[int, int] = {}
    for size in steps:
        if size is None:
            if held:
                ledger.give(offset := next(iter(held)))
                del held[offset]
            continue
        offset = ledger.take(size)
        if offset is None:
            continue
        assert 0 <= offset <= 100 - size
        assert all(offset + size <= o or o + s <= offset for o, s in held.items())
        held[offset] = size
    for offset in held:
        ledger.give(offset)
    assert ledger.take(100) == 0
