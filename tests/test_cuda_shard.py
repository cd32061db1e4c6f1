"""Norm, AdamW and barrier kernels against their CPU twins, bit for bit. IN SIMULATION: no GPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cudasim.build import find_nvcc
from cudasim.device import SimError
from cudasim.shipped import AdamWOptions, SimulatedPasses
from kernel_cases import bits_of, misaligned, random_bits, upload
from torch import Tensor

from fsdpx import _C
from fsdpx.dtypes import BFLOAT16, FLOAT32, dtype_code

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not installed")

TILE, SUMS = 8192, 2048
WORKSPACE_BYTES = 2 * SUMS * 8
NORMED = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def download(cuda: SimulatedPasses, address: int, like: Tensor) -> Tensor:
    raw = cuda.memory.download(address, "u1", like.nbytes)
    return torch.from_numpy(raw).view(like.dtype)


# ---- Norm


def ordinary(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def norms(cuda: SimulatedPasses, src: Tensor, shift: int = 0) -> tuple[Tensor, Tensor]:
    """(square, flag) of the kernel, and of the CPU in the same dtype."""
    wide = torch.float64 if src.dtype == torch.float64 else torch.float32
    source = upload(cuda, src, shift)
    workspace, out = cuda.memory.allocate(WORKSPACE_BYTES), cuda.memory.allocate(16)
    cuda.norm_and_check(source, dtype_code(src.dtype), src.numel(), workspace, out)
    expected = _C.norm_and_check(src.data_ptr(), dtype_code(src.dtype), src.numel())
    return download(cuda, out, torch.empty(2, dtype=wide)), torch.tensor(expected, dtype=wide)


@pytest.mark.parametrize("dtype", NORMED)
def test_norm_equals_the_cpu(cuda: SimulatedPasses, dtype: torch.dtype) -> None:
    for numel, shift in ((0, 0), (1, 0), (255, 1), (2049, 0), (TILE, 0), (100_003, 0), (9000, 3)):
        src = ordinary(numel, dtype, seed=numel)
        got, expected = norms(cuda, src, shift)
        assert torch.equal(bits_of(got), bits_of(expected)), numel
        exact = float(src.double().square().sum())
        assert math.isclose(got[0].item(), exact, rel_tol=1e-5)
        assert got[1] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", NORMED)
def test_norm_finds_what_is_not_finite(
    cuda: SimulatedPasses, dtype: torch.dtype, bad: float
) -> None:
    for position in (0, 2047, 2048, 20_001):
        src = ordinary(20_002, dtype)
        src[position] = bad
        got, expected = norms(cuda, src)
        assert torch.equal(bits_of(got), bits_of(expected))
        assert got[1] == 1


def test_a_norm_that_overflows_is_not_the_fault_of_an_element(cuda: SimulatedPasses) -> None:
    got, expected = norms(cuda, torch.full((3,), 3e38))
    assert got.tolist() == expected.tolist() == [math.inf, 0.0]


def test_norm_takes_tiles_in_turn(cuda: SimulatedPasses) -> None:
    """More tiles than there are partial sums: the first ones get a second tile."""
    src = torch.ones(SUMS * TILE + TILE + 5, dtype=torch.float16)
    src[-1] = 0
    got = torch.tensor(_C.norm_and_check(src.data_ptr(), dtype_code(src.dtype), src.numel()))
    assert got.tolist() == [src.numel() - 1, 0]


def test_norm_reads_in_whole_words(cuda: SimulatedPasses) -> None:
    for dtype in NORMED:
        norms(cuda, ordinary(2 * TILE, dtype))
        reads = [
            a for a in cuda.memory.traffic() if a["op"] == "ld" and "norm_kernel" in a["kernel"]
        ]
        assert sum(access["bytes"] for access in reads) == 2 * TILE * dtype.itemsize
        assert all(access["width"] == 16 for access in reads)
        assert all(access["bytes"] == 32 * access["sectors"] for access in reads)
        cuda.memory.forget()


def test_norm_refuses(cuda: SimulatedPasses) -> None:
    with pytest.raises(ValueError, match="float8_e5m2 has no norm here"):
        cuda.norm_and_check(512, dtype_code(torch.float8_e5m2), 1, 512, 512)
    with pytest.raises(ValueError, match="workspace or result is a null pointer"):
        cuda.norm_and_check(512, FLOAT32, 1, None, 512)
    with pytest.raises(ValueError, match="bits8 has no norm here"):
        _C.norm_and_check(512, dtype_code(torch.uint8), 1)


# ---- AdamW


class Shard:
    """What AdamW works on, on CPU: twice the same, for the two versions."""

    def __init__(self, numel: int, grad: torch.dtype, copy: torch.dtype | None, seed: int) -> None:
        param, exp_avg = (
            ordinary(numel, torch.float32, seed),
            random_bits(numel, torch.float32, seed=1),
        )
        exp_avg[::2] = ordinary(len(exp_avg[::2]), torch.float32, seed + 1)
        square = ordinary(numel, torch.float32, seed + 2).square()
        self.buffers = [param, exp_avg, square, random_bits(numel, grad, seed=seed + 3)]
        self.buffers[3][::2] = ordinary(len(exp_avg[::2]), grad, seed + 4)
        self.copy = None if copy is None else torch.zeros(numel, dtype=copy)
        self.codes = dtype_code(grad), BFLOAT16 if copy is None else dtype_code(copy)
        self.numel = numel

    def step_on_cpu(self, options: AdamWOptions) -> list[Tensor]:
        buffers = [misaligned(buffer, 0) for buffer in self.buffers]
        copy = None if self.copy is None else self.copy.clone()
        shard = (
            *(buffer.data_ptr() for buffer in buffers),
            self.codes[0],
            0 if copy is None else copy.data_ptr(),
            self.codes[1],
            self.numel,
        )
        _C.adamw(
            shard,
            options.lr,
            (options.beta1, options.beta2),
            options.eps,
            options.weight_decay,
            options.step,
            options.grad_scale,
            options.maximize,
        )
        return [*buffers, *([] if copy is None else [copy])]

    def step_on_cuda(
        self, cuda: SimulatedPasses, options: AdamWOptions, shift: int = 0
    ) -> list[Tensor]:
        data = [*self.buffers, *([] if self.copy is None else [self.copy])]
        addresses: list[int | None] = [upload(cuda, buffer, shift) for buffer in data]
        addresses += [None] * (5 - len(addresses))
        cuda.adamw(addresses, *self.codes, self.numel, options)
        return [download(cuda, int(a or 0), b) for a, b in zip(addresses, data, strict=False)]


OPTIONS = AdamWOptions(1e-3, 0.9, 0.999, 1e-8, 0.01, 1, 1.0, False)
OTHER = AdamWOptions(0.02, 0.8, 0.95, 1e-6, 0.1, 1234, 0.37, True)


@pytest.mark.parametrize("copy", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16])
def test_adamw_equals_the_cpu(
    cuda: SimulatedPasses, grad: torch.dtype, copy: torch.dtype | None
) -> None:
    for numel, shift, options in (
        (1, 0, OPTIONS),
        (300, 1, OTHER),
        (TILE + 777, 0, OTHER),
        (1000, 8, OPTIONS),
    ):
        shard = Shard(numel, grad, copy, seed=numel)
        expected = shard.step_on_cpu(options)
        for got, want in zip(shard.step_on_cuda(cuda, options, shift), expected, strict=True):
            assert torch.equal(bits_of(got), bits_of(want)), (numel, shift)


@pytest.mark.parametrize("maximize", [False, True])
def test_adamw_is_torch_s(maximize: bool) -> None:
    param = torch.nn.Parameter(torch.randn(1000))
    kwargs = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([param], **kwargs, maximize=maximize)  # type: ignore[arg-type]
    own, copy = param.detach().clone(), torch.empty(1000, dtype=torch.bfloat16)
    state = torch.zeros(1000), torch.zeros(1000)
    for step in range(1, 6):
        param.grad = torch.randn(1000)
        half = 2 * param.grad
        shard = (own.data_ptr(), state[0].data_ptr(), state[1].data_ptr(), half.data_ptr())
        rest = (FLOAT32, copy.data_ptr(), BFLOAT16, 1000)
        _C.adamw((*shard, *rest), 0.01, (0.8, 0.95), 1e-6, 0.1, step, 0.5, maximize)
        optimizer.step()
        torch.testing.assert_close(own, param.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state[0], optimizer.state[param]["exp_avg"])
        torch.testing.assert_close(state[1], optimizer.state[param]["exp_avg_sq"])
        assert torch.equal(copy, own.to(torch.bfloat16))


def test_adamw_is_one_pass_in_whole_words(cuda: SimulatedPasses) -> None:
    Shard(TILE, torch.float32, torch.bfloat16, seed=0).step_on_cuda(cuda, OPTIONS)
    assert cuda.memory.moved == {("ld", 16): 16 * TILE, ("st", 16): 14 * TILE}
    assert all(access["bytes"] == 32 * access["sectors"] for access in cuda.memory.traffic())


def test_adamw_refuses(cuda: SimulatedPasses) -> None:
    with pytest.raises(ValueError, match="the gradient is float64"):
        cuda.adamw([512] * 5, dtype_code(torch.float64), BFLOAT16, 1, OPTIONS)
    with pytest.raises(ValueError, match="the copy is float32; it must be float16 or bfloat16"):
        cuda.adamw([512] * 5, FLOAT32, FLOAT32, 1, OPTIONS)
    with pytest.raises(ValueError, match="step is 0; the first update is step 1"):
        cuda.adamw([512] * 5, FLOAT32, BFLOAT16, 1, AdamWOptions(step=0))
    with pytest.raises(ValueError, match="exp_avg is a null pointer"):
        cuda.adamw([512, None, 512, 512, None], FLOAT32, BFLOAT16, 1, OPTIONS)


# ---- Barrier. Alone in one process: the other ranks' flags are written by hand.


class Flags:
    def __init__(self, cuda: SimulatedPasses, num_ranks: int, *, abort: int = 0) -> None:
        self.cuda = cuda
        self.ranks = [cuda.memory.upload(np.zeros(128, np.uint64)) for _ in range(num_ranks)]
        self.error = cuda.memory.upload(np.zeros(4, np.uint64))
        self.abort = cuda.memory.upload(np.array([abort], np.uint64))

    def of(self, rank: int) -> list[int]:
        values = self.cuda.memory.download(self.ranks[rank], np.uint64, len(self.ranks))
        return [int(value) for value in values]

    def come(self, rank: int, epoch: int, **options: bool) -> list[int]:
        """`rank` comes to `epoch`; what is in the error afterwards."""
        words = {"error": self.error, "abort": self.abort}
        self.cuda.barrier(self.ranks, rank, epoch, **words, **options)
        return [int(word) for word in self.cuda.memory.download(self.error, np.uint64, 4)]


def test_a_barrier_tells_all_ranks_and_waits_for_all(cuda: SimulatedPasses) -> None:
    flags = Flags(cuda, 3)
    assert flags.come(0, 7, waits=False) == [0, 0, 0, 0]
    assert flags.come(1, 8, waits=False) == [0, 0, 0, 0]  # ahead
    assert flags.come(2, 7) == [0, 0, 0, 0]
    assert [flags.of(rank) for rank in range(3)] == [[7, 8, 7]] * 3


def test_a_rank_that_does_not_come_is_named(cuda: SimulatedPasses) -> None:
    flags = Flags(cuda, 3)
    flags.come(0, 5, waits=False)
    flags.come(1, 4, waits=False)
    assert flags.come(2, 5) == [1, 1, 4, 5]  # limit passed: rank 1 is at 4 instead of 5


def test_an_abort_ends_the_wait(cuda: SimulatedPasses) -> None:
    flags = Flags(cuda, 2, abort=1)
    cuda.memory.forget()
    assert flags.come(0, 3) == [2, 1, 0, 3]
    polls = 1 + 64  # of the own flag, and of the other one before the host's memory is looked at
    assert cuda.memory.moved["ld", 8] == 8 * (polls + len(("abort", "error")))


def test_a_barrier_of_too_many_ranks_is_refused(cuda: SimulatedPasses) -> None:
    flags = Flags(cuda, 2)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        flags.come(2, 1)


def test_flags_are_found_in_the_simulation(cuda: SimulatedPasses) -> None:
    flags = Flags(cuda, 1)
    flags.ranks[0] += 4
    with pytest.raises(SimError, match="misaligned"):
        flags.come(0, 1)
