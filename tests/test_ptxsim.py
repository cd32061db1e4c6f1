"""The PTX simulator: it must find what a kernel does wrong, and refuse what it cannot run."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cudasim.build import find_nvcc
from cudasim.device import Device, Kernels, SimError

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not installed")

SOURCE = """
struct Table { float* a; float* b; int n; int pad; };
#define KERNEL(name) \\
  extern "C" __global__ void __launch_bounds__(64) name(const __grid_constant__ Table t)
#define INDEX const int i = blockIdx.x * 64 + threadIdx.x
KERNEL(saxpy) { INDEX; if (i < t.n) t.b[i] = __fadd_rn(__fmul_rn(t.a[i], 2.0f), t.b[i]); }
KERNEL(past_the_end) { INDEX; if (i <= t.n) t.b[i] = t.a[0]; }
KERNEL(misaligned) { INDEX; if (i < t.n / 4) reinterpret_cast<float4*>(t.b)[i] = float4{}; }
KERNEL(same_place) { INDEX; if (i < t.n) t.b[i / 2] = t.a[i]; }
KERNEL(without_block) { if (threadIdx.x < t.n) t.b[threadIdx.x] = t.a[threadIdx.x]; }
KERNEL(reads_neighbour) {
  INDEX;
  if (i < t.n) t.b[i] = 1.0f;
  if (i + 64 < t.n) t.a[i] = t.b[i + 64];
}
KERNEL(no_barrier) {
  __shared__ float s[64];
  s[threadIdx.x] = t.a[threadIdx.x];
  __syncthreads();
  const float other = s[63 - threadIdx.x];
  s[threadIdx.x] = other + 1.0f;
  __syncthreads();
  t.b[blockIdx.x * 64 + threadIdx.x] = s[threadIdx.x];
}
KERNEL(toward_zero) { INDEX; if (i < t.n) t.b[i] = __fadd_rz(t.a[i], t.b[i]); }
"""


@pytest.fixture(scope="session")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("ptxsim")
    (directory / "k.cu").write_text(SOURCE)
    command = [str(find_nvcc()), "-arch=compute_90", "-ptx", "k.cu", "-o", "k.ptx"]
    subprocess.run(command, cwd=directory, check=True)
    return (directory / "k.ptx").read_text()


@pytest.fixture(scope="session")
def device() -> Device:
    return Device()


@pytest.fixture(scope="session")
def kernels(device: Device, ptx: str) -> Kernels:
    return Kernels(device, ptx)


def run(kernels: Kernels, name: str, *, n: int = 200, shift: int = 0, written: bool = True) -> None:
    device, values = kernels.device, np.arange(200, dtype=np.float32)
    device.clear()
    a = device.upload(values) if written else device.allocate(800)
    b = device.upload(values, shift=shift)
    kernels.launch(name, 4, 64, struct.pack("<qqii", a, b, n, 0))
    assert device.download(b, np.float32, 200)[:n].tolist() == (3 * values)[:n].tolist()


def test_a_right_kernel_gives_the_right_numbers(kernels: Kernels) -> None:
    run(kernels, "saxpy", n=131)
    assert kernels.device.moved == {("ld", 4): 2 * 131 * 4, ("st", 4): 131 * 4}


WRONG = {
    "past_the_end": ("out of bounds", {}),
    "misaligned": ("misaligned access", {"shift": 4}),
    "saxpy": ("never written", {"written": False}),
    "same_place": ("two threads store to one address", {}),
    "without_block": ("race", {"n": 64}),
    "reads_neighbour": ("race", {}),
    "no_barrier": ("race in shared memory", {}),
    "toward_zero": ("does not know `add.rz.f32", {}),
}


@pytest.mark.parametrize("kernel", WRONG)
def test_finds(kernels: Kernels, kernel: str) -> None:
    message, how = WRONG[kernel]
    with pytest.raises(SimError, match=message):
        run(kernels, kernel, **how)


def test_checks_the_launch(kernels: Kernels) -> None:
    with pytest.raises(SimError, match="saxpy takes 24 bytes, not 3"):
        kernels.launch("saxpy", 1, 64, b"abc")
    with pytest.raises(SimError, match="at most 64 threads"):
        kernels.launch("saxpy", 1, 65, bytes(24))
