"""fsdpx.ops against the pure-torch reference, bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    FLOATING,
    ISAS,
    OPAQUE,
    SMALL,
    assert_bitwise,
    bits_of,
    every_value,
    misaligned,
    random_bits,
)
from torch import Tensor

from fsdpx import _C, ops, reference

SIZES = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 1023, 1025, 2049, 100_003)
PAIRS = list(itertools.product(FLOATING, FLOATING))
MODES = ((1.0, False), (1 / 3, False), (1.0, True), (-0.7, True))


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs with each instruction set that the machine has."""
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa("auto")


def check_cast(src: Tensor, out: Tensor, scale: float, accumulate: bool) -> None:
    expected = reference.cast(src, out.clone(), scale=scale, accumulate=accumulate)
    ops.cast(src, out, scale=scale, accumulate=accumulate)
    assert_bitwise(out, expected)


@pytest.mark.parametrize(("scale", "accumulate"), MODES)
@pytest.mark.parametrize("to_dtype", FLOATING)
@pytest.mark.parametrize("from_dtype", FLOATING)
def test_cast_of_random_bits(
    from_dtype: torch.dtype, to_dtype: torch.dtype, scale: float, accumulate: bool
) -> None:
    for numel in SIZES:
        src, out = random_bits(numel, from_dtype, seed=numel), random_bits(numel, to_dtype, seed=1)
        check_cast(src, out, scale, accumulate)


@pytest.mark.parametrize(("src_shift", "out_shift"), [(1, 0), (0, 1), (3, 5), (13, 14)])
@pytest.mark.parametrize(("from_dtype", "to_dtype"), PAIRS)
def test_cast_of_misaligned_views(
    from_dtype: torch.dtype, to_dtype: torch.dtype, src_shift: int, out_shift: int
) -> None:
    for numel in (1, 37, 4099):
        src = misaligned(random_bits(numel, from_dtype, seed=numel), src_shift)
        for scale, accumulate in MODES:
            out = misaligned(random_bits(numel, to_dtype, seed=2), out_shift)
            guard = out.as_strided((numel + 2,), (1,), out.storage_offset() - 1)
            before, after = guard[:1].clone(), guard[-1:].clone()
            check_cast(src, out, scale, accumulate)
            assert_bitwise(guard[:1], before)
            assert_bitwise(guard[-1:], after)


@pytest.mark.parametrize("from_dtype", SMALL)
def test_all_small_values_widen_exactly(from_dtype: torch.dtype) -> None:
    src = every_value(from_dtype)
    for wide in (torch.float32, torch.float64):
        out = torch.empty(src.shape, dtype=wide)
        ops.cast(src, out)
        assert_bitwise(out, src.to(wide))
        back = torch.empty_like(src)
        ops.cast(out, back)
        assert_bitwise(back, src)


def neighbours_of_roundings(dtype: torch.dtype) -> Tensor:
    """float64: all finite values of a small dtype, the midpoints, and what lies next to them."""
    values = every_value(dtype).double()
    values = values[values.isfinite()].sort().values.unique()
    largest = values[-1]
    beyond = largest + (largest - values[-2])  # where the next value would be
    values = torch.cat([values, torch.stack([beyond, -beyond])]).sort().values
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    up = torch.nextafter(points, torch.full_like(points, torch.inf))
    down = torch.nextafter(points, torch.full_like(points, -torch.inf))
    return torch.cat([points, up, down, points.float().double()])


def exact_rounding(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds float64 by the definition: the nearer neighbour, ties to the even one."""
    saturates = dtype is torch.float8_e4m3fn  # has no infinity
    last = bits_of(torch.tensor([448.0 if saturates else torch.inf]).to(dtype))
    positive = every_value(dtype)[: int(last) + 1]
    grid = positive.double()
    if not saturates:
        grid[-1] = 2 * grid[-2] - grid[-3]  # rounding treats infinity as the next finite value
    magnitude = values.abs().clamp(max=float(grid[-1]))
    upper = torch.searchsorted(grid, magnitude).clamp(max=len(grid) - 1)
    lower = torch.where(grid[upper] == magnitude, upper, upper - 1).clamp(min=0)
    to_lower, to_upper = magnitude - grid[lower], grid[upper] - magnitude
    tie = torch.where(lower % 2 == 0, lower, upper)
    index = torch.where(to_lower < to_upper, lower, torch.where(to_lower > to_upper, upper, tie))
    rounded = positive.double()[index]
    return torch.where(values.signbit(), -rounded, rounded).to(dtype)


@pytest.mark.parametrize("dtype", SMALL)
def test_all_boundaries_round_once_to_even(dtype: torch.dtype) -> None:
    values = neighbours_of_roundings(dtype)
    for src in (values, values.float()):
        out = torch.empty(src.shape, dtype=dtype)
        ops.cast(src, out)
        assert_bitwise(out, exact_rounding(src.double(), dtype))


def test_float8_overflows_as_in_torch() -> None:
    src = torch.tensor([448, 464, 465, 57344, 61439, 61440, 1e9, torch.inf, torch.nan])
    for sign, dtype in itertools.product((1, -1), (torch.float8_e4m3fn, torch.float8_e5m2)):
        out = torch.empty(src.shape, dtype=dtype)
        ops.cast(sign * src, out)
        assert_bitwise(out, (sign * src).to(dtype))
    assert out.float()[-3:-1].tolist() == [-torch.inf, -torch.inf]
    ops.cast(src, saturated := torch.empty(src.shape, dtype=torch.float8_e4m3fn))
    assert saturated.float()[:-1].eq(448).all()


def test_doubles_are_not_rounded_twice() -> None:
    # Just above a midpoint of bfloat16; the nearest float32 is the midpoint itself.
    value = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    out = torch.empty(1, dtype=torch.bfloat16)
    ops.cast(value, out)
    assert out.item() == 1 + 2**-7
    assert value.float().to(torch.bfloat16).item() == 1.0


@pytest.mark.parametrize("to_dtype", FLOATING)
@pytest.mark.parametrize("from_dtype", FLOATING)
def test_nan_results_are_the_quiet_nan(from_dtype: torch.dtype, to_dtype: torch.dtype) -> None:
    quiet = {torch.float32: 0x7FC00000, torch.float64: 0x7FF8 << 48}
    quiet |= {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}
    quiet |= {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F}
    src = random_bits(5000, from_dtype, seed=0)
    src = src[src.isnan()]
    infinite = torch.tensor([torch.inf, -torch.inf])
    if torch.float8_e4m3fn not in (from_dtype, to_dtype):
        src = torch.cat([src, infinite.to(from_dtype)])
    out = torch.zeros(src.shape, dtype=to_dtype)
    if torch.float8_e4m3fn not in (from_dtype, to_dtype):
        out[-2:] = (-infinite).to(to_dtype)
    ops.cast(src, out, accumulate=True)
    assert bits_of(out).eq(quiet[to_dtype]).all()


@pytest.mark.parametrize("dtype", [*FLOATING, *OPAQUE])
def test_copies_keep_every_bit(dtype: torch.dtype) -> None:
    for numel in (1, 5, 100_003):
        src = random_bits(numel, dtype, seed=numel)
        out = torch.empty_like(src)
        ops.cast(src, out)
        assert torch.equal(src.view(torch.uint8), out.view(torch.uint8))
        flat = torch.empty(numel + 3, dtype=dtype)
        ops.pack([src], flat, offsets=[2])
        assert torch.equal(flat[2:-1].view(torch.uint8), src.view(torch.uint8))
        assert not flat[:2].view(torch.uint8).any()
        assert not flat[-1:].view(torch.uint8).any()
        out.view(torch.uint8).zero_()
        ops.unpack(flat, [out], offsets=[2])
        assert torch.equal(src.view(torch.uint8), out.view(torch.uint8))


@pytest.mark.parametrize(("scale", "accumulate"), MODES)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize(("from_dtype", "to_dtype"), PAIRS)
def test_reduce_adds_in_order(
    from_dtype: torch.dtype, to_dtype: torch.dtype, count: int, scale: float, accumulate: bool
) -> None:
    for numel in (0, 1, 17, 1024, 3001):
        srcs = [random_bits(numel, from_dtype, seed=10 + k) for k in range(count)]
        srcs[-1] = misaligned(srcs[-1], 1)
        out = random_bits(numel, to_dtype, seed=3)
        expected = reference.reduce(srcs, out.clone(), scale=scale, accumulate=accumulate)
        ops.reduce(srcs, out, scale=scale, accumulate=accumulate)
        assert_bitwise(out, expected)


LAYOUTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 70)), max_size=12)
SCALES = st.sampled_from([1.0, 0.5, 1 / 3, -2.0, 0.0])


@given(
    layout=LAYOUTS,
    tail=st.integers(0, 5),
    dtypes=st.lists(st.sampled_from(FLOATING), min_size=12, max_size=12),
    flat_dtype=st.sampled_from(FLOATING),
    scale=SCALES,
    accumulate=st.booleans(),
    shift=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_pack_and_unpack_of_any_layout(
    layout: list[tuple[int, int]],
    tail: int,
    dtypes: list[torch.dtype],
    flat_dtype: torch.dtype,
    scale: float,
    accumulate: bool,
    shift: int,
    seed: int,
) -> None:
    offsets, end = [], 0
    for gap, numel in layout:
        offsets.append(end + gap)
        end += gap + numel
    tensors = [
        misaligned(random_bits(numel, dtype, seed=seed + i), shift)
        for i, ((_, numel), dtype) in enumerate(zip(layout, dtypes, strict=False))
    ]
    flat = misaligned(random_bits(end + tail, flat_dtype, seed=seed), shift)
    expected = reference.pack(
        tensors, flat.clone(), offsets=offsets, scale=scale, accumulate=accumulate
    )
    ops.pack(tensors, flat, offsets=offsets, scale=scale, accumulate=accumulate)
    assert_bitwise(flat, expected)

    wanted = [tensor.clone() for tensor in tensors]
    reference.unpack(flat, wanted, offsets=offsets, scale=scale, accumulate=accumulate)
    ops.unpack(flat, tensors, offsets=offsets, scale=scale, accumulate=accumulate)
    for tensor, want in zip(tensors, wanted, strict=True):
        assert_bitwise(tensor, want)


@given(
    numels=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    dtype=st.sampled_from([*FLOATING, *OPAQUE]),
)
@settings(max_examples=40, deadline=None)
def test_unpack_undoes_pack(numels: list[int], dtype: torch.dtype) -> None:
    tensors = [random_bits(numel, dtype, seed=i) for i, numel in enumerate(numels)]
    flat = torch.empty(sum(numels), dtype=dtype)
    outs = [torch.empty_like(tensor) for tensor in tensors]
    ops.pack(tensors, flat)
    ops.unpack(flat, outs)
    for tensor, out in zip(tensors, outs, strict=True):
        assert torch.equal(tensor.view(torch.uint8), out.view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATING)
def test_large_results_bypass_the_caches_alike(dtype: torch.dtype) -> None:
    """Destinations of 32 MiB and more take another path: its head, blocks and tail."""
    numel = (32 << 20) // dtype.itemsize + 1234
    src = torch.linspace(-3, 5, numel).to(torch.bfloat16)
    out = misaligned(torch.empty(numel, dtype=dtype), 1)
    ops.cast(src, out, scale=0.3)
    assert_bitwise(out, reference.cast(src, out.clone(), scale=0.3))
    srcs = [src, src.flip(0)]
    ops.reduce(srcs, out, scale=0.3)
    assert_bitwise(out, reference.reduce(srcs, out.clone(), scale=0.3))
    copy = misaligned(torch.empty(numel, dtype=dtype), 3)
    ops.cast(out, copy)
    assert torch.equal(bits_of(out), bits_of(copy))


def test_subnormals_survive_flush_to_zero() -> None:
    src = torch.full((100,), 1e-40, dtype=torch.float32)
    out = torch.empty_like(src)
    torch.set_flush_denormal(True)
    try:
        ops.cast(src, out, scale=0.5)
        flushed = (src * 0.5).sum().item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert flushed, "the setting has no effect here: this test shows nothing"
    assert_bitwise(out, src * 0.5)


def test_any_shape_and_strides() -> None:
    matrix = torch.randn(6, 4).t()
    scalar, empty = torch.tensor(2.5), torch.empty(3, 0, 2)
    flat = torch.full((30,), 9.0)
    ops.pack([matrix, scalar, empty], flat)
    assert torch.equal(flat, torch.cat([matrix.reshape(-1), torch.tensor([2.5]), torch.zeros(5)]))

    target = torch.zeros(6, 4).t()
    scalar.zero_()
    ops.unpack(flat, [target, scalar, empty])
    assert torch.equal(target, matrix)
    assert scalar.item() == 2.5

    strided = torch.zeros(50)[::2]
    strided[:] = 1.0
    ops.pack([matrix], strided, offsets=[1], accumulate=True)
    assert torch.equal(strided[1:25], matrix.reshape(-1) + 1.0)
    assert torch.equal(strided[[0]], torch.ones(1))
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    out = torch.empty(3, dtype=torch.complex64)
    ops.cast(conjugate, out)
    assert torch.equal(out, conjugate)


def test_arrays_of_other_libraries() -> None:
    src = np.arange(6, dtype=np.float32).reshape(2, 3)
    out = np.zeros(6, dtype=np.float64)
    ops.pack([src], out, scale=2.0)
    assert out.tolist() == [0, 2, 4, 6, 8, 10]
    ops.reduce([src, src], out)
    assert out.tolist() == [0, 2, 4, 6, 8, 10]


def test_autograd_sees_that_outputs_changed() -> None:
    weight = torch.randn(4, requires_grad=True)
    buffer = torch.ones(4)
    loss = (weight * buffer).sum()
    ops.pack([weight], buffer)  # takes a leaf that requires grad, and is not recorded
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
