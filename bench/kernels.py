"""The passes over flat buffers beside torch's operators, FSDP2's, and a plain copy of the device.

    python bench/kernels.py [--mib 512] [--rounds 20]

On a GPU times are those of CUDA events. Without one it says so, and runs the CPU's passes on less
data: that shows that the numbers are right, and nothing about a GPU. `GB/s` counts the bytes that
an ideal single pass reads and writes; `of a copy` is that as a share of what a plain copy moves.
`#wrong` counts elements that differ from what torch's operators give in float32, or where the order
of a sum is not fixed, that are further off than rounding explains.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives  # defines torch.ops.fsdp
import torch.nn.functional as F
from measuring import MIB, Clock, choose_device, import_cupy, median
from torch import Tensor

from fsdpx import _C, ops, shard_ops
from fsdpx.dtypes import BFLOAT16, FLOAT32

PEERS = 8  # of a gather, and sources of a reduction
DEVICE = choose_device()
GPU = DEVICE.type == "cuda"
cupy = import_cupy() if GPU else None
F32, BF16 = torch.float32, torch.bfloat16


@dataclass
class Case:
    """An operation: the bytes of an ideal pass, and who does it how.

    Attributes:
        paths: By name, what is timed, and what then counts its wrong elements.
    """

    name: str
    nbytes: int
    paths: dict[str, tuple[Callable[[], object], Callable[[], int]]] = field(default_factory=dict)


def tensors(numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Twelve tensors of a transformer block's proportions, `numel` elements in all."""
    sizes = [numel // 12 * share for share in (3, 1, 4, 3)]
    sizes += [numel // 96 // 8 * 8] * 7
    sizes.append(numel - sum(sizes))
    return [torch.randn(size, device=DEVICE).to(dtype) for size in sizes]


def differing(got: Tensor, expected: Tensor) -> int:
    return int((got != expected).sum())


def further_off(got: Tensor, expected: Tensor) -> int:
    """Elements that rounding does not explain."""
    return int((~torch.isclose(got, expected, rtol=1e-5, atol=1e-6)).sum())


def pack_case(numel: int) -> Case:
    grads = tensors(numel, BF16)
    ours, theirs = (torch.empty(numel, dtype=BF16, device=DEVICE) for _ in range(2))
    padded = [F.pad(grad, (0, -len(grad) % PEERS)).view(PEERS, -1) for grad in grads]
    chunks = torch.cat(padded, dim=1)
    chunked = torch.empty_like(chunks)
    case = Case("pack bf16", 4 * numel)
    case.paths["fsdpx"] = (
        lambda: ops.pack(grads, ours),
        lambda: differing(ours, torch.cat(grads)),
    )
    case.paths["torch.cat"] = (
        lambda: torch.cat(grads, out=theirs),
        lambda: differing(theirs, torch.cat(grads)),
    )
    case.paths["FSDP2 chunk_cat"] = (
        lambda: torch.ops.fsdp.chunk_cat(grads, dim=0, num_chunks=PEERS, out=chunked),
        lambda: differing(chunked, chunks),
    )
    return case


def unpack_case(numel: int) -> Case:
    flat, case = torch.randn(numel, device=DEVICE), Case("unpack fp32", 8 * numel)

    def add(name: str, run: Callable[[list[Tensor]], object]) -> None:
        outs = tensors(numel, F32)
        case.paths[name] = lambda: run(outs), lambda: differing(torch.cat(outs), flat)

    sizes = [len(out) for out in tensors(numel, F32)]
    parts = flat.split(sizes)
    add("fsdpx", lambda outs: ops.unpack(flat, outs))
    add("_foreach_copy_", lambda outs: torch._foreach_copy_(outs, parts))
    add(
        "FSDP2 split_with_sizes_copy",
        lambda outs: torch.ops.fsdp.split_with_sizes_copy(
            flat.view(1, -1), sizes, dim=1, out=[out.view(1, -1) for out in outs]
        ),
    )
    if cupy is not None:
        arrays = [cupy.from_dlpack(part) for part in parts]

        def copy_each(outs: list[Tensor]) -> None:
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                for array, out in zip(arrays, outs, strict=True):
                    cupy.copyto(cupy.from_dlpack(out), array)

        add("cupy.copyto of each", copy_each)
    return case


def gather_case(numel: int) -> Case:
    """A share for eight peers, whose slots are all on this device."""
    shard = torch.randn(numel, device=DEVICE)
    cast = shard.to(BF16)
    slots, others = (
        [torch.zeros(numel, dtype=BF16, device=DEVICE) for _ in range(PEERS)] for _ in range(2)
    )
    sent = torch.zeros(PEERS * numel, dtype=BF16, device=DEVICE)

    def ours() -> None:
        if not GPU:
            for slot in slots:
                ops.cast(shard, slot)
            return
        addresses = [slot.data_ptr() for slot in slots]
        with ops.stream_of(DEVICE) as stream:
            piece = (shard.data_ptr(), numel, 0)
            _C.device_gather([piece], addresses, FLOAT32, BFLOAT16, stream)

    case = Case(f"cast + gather to {PEERS}", (4 + 2 * PEERS) * numel)
    case.paths["fsdpx"] = ours, lambda: sum(differing(slot, cast) for slot in slots)
    case.paths["copy_ to each"] = (
        lambda: [slot.copy_(shard) for slot in others],
        lambda: sum(differing(slot, cast) for slot in others),
    )
    case.paths["FSDP2 all_gather_copy_in (own part only)"] = (
        lambda: torch.ops.fsdp.all_gather_copy_in([shard.to(BF16)], sent, [numel], numel, 0),
        lambda: differing(sent[:numel], cast),
    )
    return case


def reduce_case(numel: int) -> Case:
    srcs = [torch.randn(numel, device=DEVICE).to(BF16) for _ in range(PEERS)]
    outs = [torch.zeros(numel, device=DEVICE) for _ in range(3)]

    def in_order(out: Tensor) -> Tensor:
        out.copy_(srcs[0])
        for src in srcs[1:]:
            out.add_(src)
        return out.mul_(1 / PEERS)

    expected = in_order(torch.empty_like(outs[0]))
    case = Case(f"reduce {PEERS} bf16 + scale", (2 * PEERS + 4) * numel)
    case.paths["fsdpx"] = (
        lambda: ops.reduce(srcs, outs[0], scale=1 / PEERS),
        lambda: differing(outs[0], expected),
    )
    case.paths["torch, in order"] = (
        lambda: in_order(outs[1]),
        lambda: differing(outs[1], expected),
    )
    case.paths["stack and sum"] = (
        lambda: torch.sum(torch.stack(srcs), 0, dtype=F32, out=outs[2]).mul_(1 / PEERS),
        lambda: further_off(outs[2], expected),
    )
    return case


def norm_case(numel: int) -> Case:
    src, case = torch.randn(numel, device=DEVICE), Case("norm fp32", 4 * numel)
    exact = src.double().square().sum().sqrt()

    def add(name: str, run: Callable[[], Tensor], flag: Callable[[], int] = lambda: 0) -> None:
        case.paths[name] = run, lambda: further_off(run().double() / exact, exact / exact) + flag()

    add(
        "fsdpx (and check)",
        lambda: shard_ops.norm_and_check(src)[0].sqrt(),
        lambda: int(shard_ops.norm_and_check(src)[1] != 0),
    )
    add("torch.linalg.vector_norm", lambda: torch.linalg.vector_norm(src))
    add(
        "vector_norm and isfinite",
        lambda: torch.where(src.isfinite().all(), torch.linalg.vector_norm(src), torch.nan),
    )
    if cupy is not None:

        def by_cupy() -> Tensor:
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                return torch.from_dlpack(cupy.linalg.norm(cupy.from_dlpack(src)))

        add("cupy.linalg.norm", by_cupy)
    return case


def adamw_case(numel: int) -> Case:
    """Wrong is counted after one step from the start, whatever was timed."""
    start, grad = torch.randn(numel, device=DEVICE), torch.randn(numel, device=DEVICE)

    class Fused:
        def __init__(self, **options: bool) -> None:
            self.copy = torch.zeros(numel, dtype=BF16, device=DEVICE)
            self.param = torch.nn.Parameter(start.clone())
            self.param.grad = grad
            self.optimizer = torch.optim.AdamW([self.param], lr=1e-3, **options)

        def step(self) -> None:
            self.optimizer.step()
            self.copy.copy_(self.param.detach())

    class Ours:
        def __init__(self) -> None:
            self.copy = torch.zeros(numel, dtype=BF16, device=DEVICE)
            self.param, self.number = start.clone(), 0
            self.moments = [torch.zeros_like(start) for _ in range(2)]

        def step(self) -> None:
            self.number += 1
            shard_ops.adamw(
                self.param, grad, *self.moments, step=self.number, lr=1e-3, copy=self.copy
            )

    def wrong(make: Callable[[], Fused | Ours]) -> int:
        one, reference = make(), Fused(foreach=False)
        one.step()
        reference.step()
        off = further_off(one.param.detach(), reference.param.detach())
        return off + differing(one.copy, one.param.detach().to(BF16))

    case = Case("AdamW fp32", 30 * numel)
    case.paths["fsdpx (and bf16)"] = Ours().step, lambda: wrong(Ours)
    case.paths["torch fused AdamW, then copy"] = (
        Fused(fused=True).step,
        lambda: wrong(lambda: Fused(fused=True)),
    )
    return case


CASES = (pack_case, unpack_case, gather_case, reduce_case, norm_case, adamw_case)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=512 if GPU else 8, help="of fp32 elements")
    parser.add_argument("--rounds", type=int, default=20 if GPU else 3)
    options = parser.parse_args(arguments)
    if os.environ.get("RANK", "0") != "0":
        return  # one device is enough
    if not GPU:
        print("No GPU here: these are the CPU's passes; they say nothing about a GPU.")
    clock = Clock(DEVICE)

    def seconds(run: Callable[[], object]) -> float:
        times = [clock.seconds(run) for _ in range(options.rounds + 3)]
        return median(times[3:])

    numel = int(options.mib * MIB / 4) // 768 * 768
    source, target = (torch.zeros(numel, device=DEVICE) for _ in range(2))
    copied = 8 * numel / seconds(lambda: target.copy_(source))
    print(f"plain copy of {options.mib:g} MiB: {copied / 1e9:.1f} GB/s")
    print(f"{'operation':22} {'path':42} {'ms':>9} {'GB/s':>8} {'of a copy':>10} {'#wrong':>7}")
    total_wrong = 0
    for make in CASES:
        case = make(numel)
        for path, (run, wrong) in case.paths.items():
            took, count = seconds(run), wrong()
            rate = case.nbytes / took
            total_wrong += count
            print(
                f"{case.name:22} {path:42} {took * 1e3:9.3f} {rate / 1e9:8.1f} "
                f"{rate / copied:10.0%} {count:7}"
            )
    if total_wrong:
        raise SystemExit(f"{total_wrong} elements are wrong")


if __name__ == "__main__":
    main()
