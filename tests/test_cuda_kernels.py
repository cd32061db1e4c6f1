"""The CUDA passes against the CPU kernels, bit for bit. IN SIMULATION: no GPU is involved.

The shipped host code fills the tables and chooses the grids, the shipped kernels run from their PTX
in tests/cudasim, on memory that checks every access.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from cudasim.build import find_nvcc
from cudasim.shipped import NO_LIMIT, SimulatedPasses
from kernel_cases import FLOATING, SMALL, bits_of, every_value, misaligned, random_bits, upload
from torch import Tensor

from fsdpx import _C
from fsdpx.dtypes import FLOAT32, dtype_code

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not installed")

TILE = 8192  # elements of one block
PAIRS = list(itertools.product(FLOATING, FLOATING))
# Doubles to and from eighths go element by element.
MOVED_IN_WORDS = [pair for pair in PAIRS if {dtype.itemsize for dtype in pair} != {1, 8}]
MODES = ((1.0, False), (1 / 3, False), (1.0, True), (-0.7, True))


def download(cuda: SimulatedPasses, address: int, like: Tensor) -> Tensor:
    raw = cuda.memory.download(address, "u1", like.numel() * like.itemsize)
    return torch.from_numpy(raw).view(like.dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    differ = (bits_of(actual) != bits_of(expected)).nonzero().reshape(-1)
    assert not len(differ), f"{len(differ)} of {len(actual)} differ, first at {int(differ[0])}"


def check_cast(
    cuda: SimulatedPasses,
    src: Tensor,
    old: Tensor,
    mode: tuple[float, bool],
    shifts: tuple[int, int] = (0, 0),
) -> None:
    scale, accumulate = mode
    codes = dtype_code(src.dtype), dtype_code(old.dtype)
    expected = misaligned(old, 0)
    _C.cast(src.data_ptr(), codes[0], expected.data_ptr(), codes[1], src.numel(), *mode)
    source, target = upload(cuda, src, shifts[0]), upload(cuda, old, shifts[1])
    cuda.convert([(source, target, src.numel())], *codes, scale=scale, accumulate=accumulate)
    assert_same_bits(download(cuda, target, old), expected)


@pytest.mark.parametrize(("from_dtype", "to_dtype"), PAIRS)
def test_cast_of_random_bits(
    cuda: SimulatedPasses, from_dtype: torch.dtype, to_dtype: torch.dtype
) -> None:
    for mode, numel in itertools.product(MODES, (1, 7, 8, 2051)):
        src, old = random_bits(numel, from_dtype, seed=numel), random_bits(numel, to_dtype, seed=1)
        check_cast(cuda, src, old, mode)
    for numel in (TILE, 2 * TILE + 5):
        src, old = random_bits(numel, from_dtype, seed=numel), random_bits(numel, to_dtype, seed=1)
        check_cast(cuda, src, old, (0.3, True))


@pytest.mark.parametrize("shifts", [(1, 0), (0, 1), (3, 3)])
@pytest.mark.parametrize(("from_dtype", "to_dtype"), PAIRS)
def test_cast_of_misaligned_views(
    cuda: SimulatedPasses,
    from_dtype: torch.dtype,
    to_dtype: torch.dtype,
    shifts: tuple[int, int],
) -> None:
    src, old = random_bits(1001, from_dtype, seed=2), random_bits(1001, to_dtype, seed=3)
    for mode in ((1.0, False), (0.3, True)):
        check_cast(cuda, src, old, mode, shifts)


@pytest.mark.parametrize("dtype", SMALL)
def test_all_small_values(cuda: SimulatedPasses, dtype: torch.dtype) -> None:
    every = every_value(dtype)
    check_cast(cuda, every, torch.zeros(len(every)), (1.0, False))
    # Midpoints between neighbours, and what is next to them, back to the small type.
    values = every.double()[every.double().isfinite()].sort().values
    values = torch.cat([2 * values[:1], values, 2 * values[-1:]])
    middle = (values[1:] + values[:-1]) / 2
    for points in (middle, middle.nextafter(torch.full_like(middle, torch.inf))):
        check_cast(cuda, points, torch.zeros(len(points), dtype=dtype), (1.0, False))
        check_cast(cuda, points.float(), torch.zeros(len(points), dtype=dtype), (1.0, False))


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.uint8, torch.int64, torch.complex128],
)
def test_copies_keep_every_bit(cuda: SimulatedPasses, dtype: torch.dtype, shift: int) -> None:
    for numel in (1, 63, TILE + 17):
        src = random_bits(numel, dtype, seed=numel)
        source, target = upload(cuda, src), upload(cuda, torch.zeros_like(src), shift)
        cuda.convert([(source, target, numel)], dtype_code(dtype), dtype_code(dtype))
        got = download(cuda, target, src)
        assert torch.equal(got.view(torch.uint8), src.view(torch.uint8))


@pytest.mark.parametrize(("scale", "accumulate"), [(1.0, False), (1 / 3, True)])
@pytest.mark.parametrize(("from_dtype", "to_dtype"), PAIRS)
def test_reduce_adds_in_order(
    cuda: SimulatedPasses,
    from_dtype: torch.dtype,
    to_dtype: torch.dtype,
    scale: float,
    accumulate: bool,
) -> None:
    codes = dtype_code(from_dtype), dtype_code(to_dtype)
    for count, numel, shift in (
        (1, 100, 0),
        (2, 1003, 0),
        (3, 33, 1),
        (9, 2048, 0),
        (2, TILE + 9, 0),
    ):
        srcs = [random_bits(numel, from_dtype, seed=k) for k in range(count)]
        old = random_bits(numel, to_dtype, seed=77)
        expected = misaligned(old, 0)
        pointers = [src.data_ptr() for src in srcs]
        _C.reduce(pointers, codes[0], expected.data_ptr(), codes[1], numel, scale, accumulate)
        addresses = [upload(cuda, src, shift if k == 1 else 0) for k, src in enumerate(srcs)]
        target = upload(cuda, old)
        cuda.reduce(
            addresses, codes[0], target, codes[1], numel, scale=scale, accumulate=accumulate
        )
        assert_same_bits(download(cuda, target, old), expected)


def test_many_pieces_take_few_launches(cuda: SimulatedPasses) -> None:
    """A pack of 300 tensors with gaps, some of them long, some empty."""
    numels = [(i * 37) % 90 for i in range(300)]
    numels[5] = 3 * TILE + 1
    flat = torch.full((sum(numels) + 300,), -1.0)
    target = upload(cuda, flat)
    pieces: list[tuple[int | None, int, int]] = []
    position = 0
    for i, numel in enumerate(numels):
        src = random_bits(numel, torch.bfloat16, seed=i)
        pieces.append((upload(cuda, src) if numel else None, target + 4 * position, numel))
        flat[position : position + numel] = src.float() * 0.5
        position += numel
        pieces.append((None, target + 4 * position, 1))  # zeros in the gap
        flat[position] = 0
        position += 1
    cuda.convert(pieces, dtype_code(torch.bfloat16), FLOAT32, scale=0.5, stream=cuda.new_stream())
    got = download(cuda, target, flat)
    nan = got.isnan()
    assert torch.equal(nan, flat.isnan())
    assert_same_bits(got[~nan], flat[~nan])
    assert len(cuda.launches) == 6  # of 596 pieces that are not empty, 112 at a time


def test_accumulation_leaves_null_pieces_alone(cuda: SimulatedPasses) -> None:
    target = upload(cuda, torch.ones(4))
    cuda.convert([(None, target, 4)], FLOAT32, FLOAT32, accumulate=True)
    assert not cuda.launches
    assert download(cuda, target, torch.ones(4)).tolist() == [1, 1, 1, 1]


def assert_whole_words(cuda: SimulatedPasses, *, loaded: int, stored: int) -> None:
    """All of it moved 16 bytes at a time, and no request touched a sector in part."""
    assert cuda.memory.moved == {("ld", 16): loaded, ("st", 16): stored}
    assert all(access["bytes"] == 32 * access["sectors"] for access in cuda.memory.traffic())
    cuda.memory.forget()


@pytest.mark.parametrize(("from_dtype", "to_dtype"), MOVED_IN_WORDS)
def test_one_pass_in_whole_words(
    cuda: SimulatedPasses, from_dtype: torch.dtype, to_dtype: torch.dtype
) -> None:
    numel = TILE
    codes = dtype_code(from_dtype), dtype_code(to_dtype)
    src, dst = random_bits(numel, from_dtype, seed=0), torch.zeros(numel, dtype=to_dtype)
    source, target = upload(cuda, src), upload(cuda, dst)
    cuda.convert([(source, target, numel)], *codes, accumulate=True)
    assert_whole_words(cuda, loaded=src.nbytes + dst.nbytes, stored=dst.nbytes)
    cuda.gather([(source, numel, 0)], [target, upload(cuda, dst)], *codes)
    assert_whole_words(cuda, loaded=src.nbytes, stored=2 * dst.nbytes)
    if to_dtype.itemsize > 1:  # sums as eighths go element by element
        cuda.reduce([source, source, source], codes[0], target, codes[1], numel)
        assert_whole_words(cuda, loaded=3 * src.nbytes, stored=dst.nbytes)


def test_what_is_misaligned_alike_moves_in_words(cuda: SimulatedPasses) -> None:
    """A few elements go before, then both sides are aligned."""
    src, dst = random_bits(TILE, torch.float32, seed=0), torch.zeros(TILE, dtype=torch.bfloat16)
    source, target = upload(cuda, src, 5), upload(cuda, dst, 5)
    cuda.convert([(source, target, TILE)], FLOAT32, dtype_code(torch.bfloat16), scale=2.0)
    single = 3 + (TILE - 3) % 256
    assert cuda.memory.moved["ld", 4] == 4 * single
    assert cuda.memory.moved["ld", 16] == 4 * (TILE - single)
    assert cuda.memory.moved["st", 16] == 2 * (TILE - single)


def check_gather(
    cuda: SimulatedPasses,
    num_peers: int,
    numels: list[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    shift: int = 0,
    peer_shift: int = 0,
) -> None:
    """All peers hold the cast pieces where they belong, and nothing else changes."""
    from_dtype, to_dtype = dtypes
    srcs = [random_bits(numel, from_dtype, seed=i) for i, numel in enumerate(numels)]
    room = random_bits(sum(numels) + 64 * len(numels) + 1, to_dtype, seed=99)
    expected, pieces, position = room.clone(), [], 1
    for src in srcs:
        out = torch.empty(src.shape, dtype=to_dtype)
        codes = dtype_code(from_dtype), dtype_code(to_dtype)
        if len(src):
            _C.cast(src.data_ptr(), codes[0], out.data_ptr(), codes[1], len(src))
        expected[position : position + len(src)] = out
        pieces.append((upload(cuda, src, shift), len(src), position * to_dtype.itemsize))
        position += len(src) + 63
    peers = [upload(cuda, room, peer_shift if k == 1 else 0) for k in range(num_peers)]
    cuda.gather(pieces, peers, *codes)
    for peer in peers:
        assert_same_bits(download(cuda, peer, room), expected)


@pytest.mark.parametrize("num_peers", range(1, 9))
def test_gather_casts_once_and_stores_to_all(cuda: SimulatedPasses, num_peers: int) -> None:
    for dtypes in ((torch.float32, torch.bfloat16), (torch.float32, torch.float8_e4m3fn)):
        check_gather(cuda, num_peers, [1000, 0, 1, 300], dtypes)
        check_gather(cuda, num_peers, [777, 256], dtypes, shift=3, peer_shift=1)
    check_gather(cuda, num_peers, [500], (torch.uint8, torch.uint8), shift=1)


@pytest.mark.parametrize(("from_dtype", "to_dtype"), PAIRS)
def test_gather_of_all_dtypes(
    cuda: SimulatedPasses, from_dtype: torch.dtype, to_dtype: torch.dtype
) -> None:
    check_gather(cuda, 3, [600, 5], (from_dtype, to_dtype))


def test_gather_to_many_peers_takes_several_launches(cuda: SimulatedPasses) -> None:
    check_gather(cuda, 40, [300, 7], (torch.float32, torch.bfloat16))
    assert len(cuda.launches) == 2


@pytest.mark.parametrize("max_blocks", [1, 4, NO_LIMIT])
def test_few_blocks_go_through_all_tiles(cuda: SimulatedPasses, max_blocks: int) -> None:
    srcs = [random_bits(n, torch.float32, seed=n) for n in (4 * TILE + 77, 300)]
    pieces = [(upload(cuda, src), len(src), 4 * 5 * TILE * i) for i, src in enumerate(srcs)]
    peers = [cuda.memory.allocate(4 * 6 * TILE) for _ in range(2)]
    cuda.gather(pieces, peers, FLOAT32, FLOAT32, max_blocks=max_blocks)
    assert cuda.memory.num_blocks == min(max_blocks, 6)
    for peer in peers:
        for src, (_, _, offset) in zip(srcs, pieces, strict=True):
            assert_same_bits(download(cuda, peer + offset, src), src)
    cuda.memory.forget()
    sources = [pieces[0][0]] * 5  # more than are read ahead
    numel, target = len(srcs[0]), upload(cuda, srcs[0])
    expected = torch.empty_like(srcs[0])
    _C.reduce([srcs[0].data_ptr()] * 5, FLOAT32, expected.data_ptr(), FLOAT32, numel, 1.0, False)
    cuda.reduce(sources, FLOAT32, target, FLOAT32, numel, max_blocks=max_blocks)
    assert cuda.memory.num_blocks == min(max_blocks, 5)
    assert_same_bits(download(cuda, target, expected), expected)


def test_local_bytes_of_an_unshard(cuda: SimulatedPasses) -> None:
    """At most 2.75 per parameter for bfloat16 from float32 at 8 ranks.

    What all ranks store into the memory of one is as much as one stores into that of all.
    """
    shard = random_bits(TILE, torch.float32, seed=0)
    slots = [cuda.memory.allocate(2 * TILE) for _ in range(8)]
    codes = FLOAT32, dtype_code(torch.bfloat16)
    cuda.gather([(upload(cuda, shard), TILE, 0)], slots, *codes)
    assert sum(cuda.memory.moved.values()) / (8 * TILE) == 2.5


@pytest.mark.parametrize("to_dtype", [torch.float32, torch.bfloat16])
def test_long_casts(cuda: SimulatedPasses, to_dtype: torch.dtype) -> None:
    src = random_bits(100_003, torch.float32, seed=5)
    old = random_bits(100_003, to_dtype, seed=6)
    for shifts in ((0, 0), (4, 4), (1, 5), (0, 1)):
        check_cast(cuda, src, old, (1 / 3, True), shifts)


def test_refused(cuda: SimulatedPasses) -> None:
    address = upload(cuda, torch.zeros(64))
    with pytest.raises(ValueError, match=r"bits32 to float32 .* not supported"):
        cuda.convert([(address, address, 1)], 8, 0)
    with pytest.raises(ValueError, match=r"piece 1 .* is not aligned"):
        cuda.convert([(address, address + 64, 1), (address + 2, address + 64, 1)], 0, 3)
    with pytest.raises(ValueError, match="piece 0 has numel -1"):
        cuda.convert([(address, address, -1)], 0, 3)
    with pytest.raises(ValueError, match="a peer is null, or piece 0 has the offset -4"):
        cuda.gather([(address, 1, -4)], [address], 0, 0)
    with pytest.raises(ValueError, match=r"piece 0 .* is not aligned to its elements"):
        cuda.gather([(address, 1, 2)], [address], 0, 0)
    with pytest.raises(ValueError, match=r"129 sources; give 1 to 128"):
        cuda.reduce([address] * 129, 0, address, 0, 1)
    with pytest.raises(ValueError, match="source 1 is null or not aligned"):
        cuda.reduce([address, address + 2], 0, address + 64, 0, 1)
    assert not cuda.launches
