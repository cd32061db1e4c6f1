"""The passes on GPUs beside kernels that cupy compiles: another compiler, and nothing of ours.

Also cupy's arrays as arguments. The simulation cannot run cupy, which needs NVIDIA's driver.
"""

from __future__ import annotations

from typing import Any

import cudasim
import numpy as np
import pytest
import torch
from kernel_cases import assert_bitwise, random_bits
from torch import Tensor

from fsdpx import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cudasim.active, reason="cupy needs a real driver"),
]
SIZES = (1, 255, 4096, 100_003)

# fp32 as bits in and out: rounding to bf16 is written out, to nearest even.
SOURCE = """
__device__ unsigned short rounded(float value) {
  const unsigned bits = __float_as_uint(value);
  if (value != value) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
__device__ float widened(unsigned short value) { return __uint_as_float((unsigned)value << 16); }

extern "C" __global__ void cast_add(const float* src, unsigned short* out, float scale,
                                    long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) out[i] = rounded(scale * src[i] + widened(out[i]));
}
extern "C" __global__ void sum(const unsigned short* srcs, float* out, float scale, int count,
                               long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= n) return;
  float total = widened(srcs[i]);
  for (int k = 1; k < count; ++k) total += widened(srcs[k * n + i]);
  out[i] = scale * total;
}
"""


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="cupy is not installed")


@pytest.fixture(scope="module")
def kernels(cupy: Any) -> Any:
    return cupy.RawModule(code=SOURCE, options=("--fmad=false",))


def launch(cupy: Any, kernels: Any, name: str, n: int, *args: Any) -> None:
    """One thread for each element, on torch's current stream."""
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        kernels.get_function(name)((-(-n // 256),), (256,), (*args, np.int64(n)))


def finite(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits without NaNs, whose payloads sums may choose from."""
    return random_bits(numel, dtype, seed=seed).nan_to_num(nan=1.5).cuda()


@pytest.mark.parametrize("n", SIZES)
def test_cast(cupy: Any, kernels: Any, n: int) -> None:
    src, out = finite(n, torch.float32, 1), finite(n, torch.bfloat16, 2)
    expected = out.clone()
    launch(
        cupy,
        kernels,
        "cast_add",
        n,
        cupy.from_dlpack(src),
        cupy.from_dlpack(expected.view(torch.int16)),
        np.float32(0.75),
    )
    ops.cast(cupy.from_dlpack(src), out, scale=0.75, accumulate=True)
    assert_bitwise(out.cpu(), expected.cpu())


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("n", SIZES)
def test_reduce(cupy: Any, kernels: Any, n: int, count: int) -> None:
    srcs = torch.stack([finite(n, torch.bfloat16, seed) for seed in range(count)])
    out, expected = (torch.zeros(n, device="cuda") for _ in range(2))
    launch(
        cupy,
        kernels,
        "sum",
        n,
        cupy.from_dlpack(srcs.view(torch.int16)),
        cupy.from_dlpack(expected),
        np.float32(1 / 3),
        np.int32(count),
    )
    ops.reduce(list(srcs), cupy.from_dlpack(out), scale=1 / 3)
    assert_bitwise(out.cpu(), expected.cpu())


def test_arrays_need_not_be_contiguous(cupy: Any) -> None:
    src, out = cupy.arange(12, dtype=cupy.float32).reshape(3, 4).T, cupy.zeros((4, 6))[:, ::2]
    ops.cast(src, out, scale=2.0)
    torch.cuda.synchronize()
    assert (out == 2 * src).all()


def test_arrays_of_another_stream_are_waited_for(cupy: Any) -> None:
    stream, out = cupy.cuda.Stream(non_blocking=True), torch.empty(1 << 22, device="cuda")
    with stream:
        src = cupy.zeros(1 << 22, dtype=cupy.float32)
        for _ in range(100):
            src += 1
        ops.cast(src, out)
    assert bool((out == 100).all())


def test_bits_that_cupy_has_no_dtype_for(cupy: Any) -> None:
    """A bfloat16 tensor goes to cupy as integers, which can be copied and not converted."""
    values = finite(100, torch.bfloat16, 3)
    array, out = cupy.from_dlpack(values.view(torch.int16)), torch.zeros_like(values)
    ops.cast(array, out.view(torch.int16))
    assert_bitwise(out.cpu(), values.cpu())
    with pytest.raises(ValueError, match="can only be copied as they are"):
        ops.cast(array, torch.zeros(100, device="cuda"))


def test_arrays_of_the_cpu_are_refused(cupy: Any) -> None:
    with pytest.raises(ValueError, match="must be on one device"):
        ops.cast(cupy.zeros(4), np.zeros(4))
