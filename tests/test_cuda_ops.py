"""fsdpx.ops and fsdpx.shard_ops on CUDA tensors: the CPU's bits, on the current stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import cudasim
import pytest
import torch
from kernel_cases import bits_of
from torch import Tensor

from fsdpx import ops, shard_ops

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (5, 1000, 1, 4099)


def values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator).to(dtype)


def both(run: Callable[..., None], inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Runs on CPU and on CUDA and compares all outputs, bit for bit."""
    there = [[t.cuda() for t in tensors] for tensors in (inputs, outputs)]
    run(inputs, outputs)
    run(*there)
    for mine, other in zip(outputs, there[1], strict=True):
        assert torch.equal(bits_of(mine), bits_of(other.cpu()))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("source", "flat"), [(BF16, FP32), (FP32, BF16), (FP32, FP32)])
def test_pack_and_unpack(source: torch.dtype, flat: torch.dtype, accumulate: bool) -> None:
    tensors = [values(numel, source, seed) for seed, numel in enumerate(SIZES)]
    options: dict[str, Any] = {"scale": 0.5, "accumulate": accumulate}
    out = values(sum(SIZES), flat, 9)
    both(lambda i, o: ops.pack(i, o[0], **options), tensors, [out])
    outs = [values(numel, source, 20 + numel) for numel in SIZES]
    both(lambda i, o: ops.unpack(i[0], o, **options), [out], outs)


@pytest.mark.parametrize("to", [FP32, FP16, torch.float8_e4m3fn])
def test_cast(to: torch.dtype) -> None:
    both(
        lambda i, o: ops.cast(i[0], o[0], scale=3.0),
        [values(3001, BF16, 1)],
        [torch.empty(3001, dtype=to)],
    )


@pytest.mark.parametrize("num_sources", [1, 3])
def test_reduce(num_sources: int) -> None:
    sources = [values(2050, BF16, seed) for seed in range(num_sources)]
    both(lambda i, o: ops.reduce(i, o[0], scale=0.25), sources, [torch.empty(2050)])


class Exported:
    """An array of another library: all that is known of it is DLPack.

    Its values are made on a stream of its own, as other libraries do.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.asked: Any = "nothing"
        self._tensor, self._stream = tensor, contextlib.nullcontext()
        if tensor.is_cuda:
            self._stream = torch.cuda.stream(torch.cuda.Stream())
            host = tensor.cpu().pin_memory()
            with self._stream:
                self._tensor = torch.zeros_like(tensor)
                self._tensor.copy_(host, non_blocking=True)

    def __dlpack__(self, **options: Any) -> Any:
        self.asked = options.get("stream")
        with self._stream:
            return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def tensor(self) -> Tensor:
        return self._tensor


def in_a_late_order() -> None:
    if cudasim.active:
        cudasim.configure(order="late")


@pytest.mark.parametrize("make", [lambda t: t, lambda t: t.view(7, 111).t()])
def test_arrays_of_other_libraries(make: Callable[[Tensor], Tensor]) -> None:
    """They need not be contiguous."""
    in_a_late_order()
    source, out = make(values(777, FP32, 3)), make(torch.empty(777, dtype=BF16))

    def run(inputs: list[Tensor], outputs: list[Tensor]) -> None:
        array = Exported(outputs[0])
        ops.cast(Exported(inputs[0]), array)
        outputs[0].copy_(array.tensor())

    both(run, [source], [out])
    assert torch.equal(out, source.to(BF16))


def test_arrays_are_made_ready_for_the_current_stream() -> None:
    in_a_late_order()
    source, side = values(777, FP32, 3), torch.cuda.Stream()
    array, out = Exported(source.cuda()), torch.empty(777, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ops.cast(array, out)
        assert array.asked == side.cuda_stream
        assert torch.equal(out.cpu(), source)
    ops.cast(array, out)
    assert array.asked == 1  # what the legacy default stream is called there


def test_arrays_on_the_wrong_device() -> None:
    array, out = Exported(torch.zeros(4).cuda()), torch.zeros(4)
    with pytest.raises(ValueError, match=r"src is on cuda:0 and out on cpu"):
        ops.cast(array, out)


def test_devices_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="cpu"):
        ops.cast(torch.zeros(4).cuda(), torch.zeros(4))


def test_norm_and_check() -> None:
    src = values(70_001, FP32, 5)
    here, there = shard_ops.norm_and_check(src), shard_ops.norm_and_check(src.cuda())
    assert torch.equal(here, there.cpu())


def test_adamw() -> None:
    def run(inputs: list[Tensor], outputs: list[Tensor]) -> None:
        param, exp_avg, exp_avg_sq, copy = outputs
        shard_ops.adamw(param, inputs[0], exp_avg, exp_avg_sq, step=2, lr=0.1, copy=copy)

    state = [values(1001, FP32, 1), values(1001, FP32, 2), values(1001, FP32, 3).square()]
    both(run, [values(1001, FP32, 4)], [*state, torch.empty(1001, dtype=BF16)])
