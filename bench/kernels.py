"""The passes over flat buffers beside torch's operators, FSDP2's, and a plain copy of the device.

    python bench/kernels.py [--mib 512] [--rounds 20]

On a GPU times are those of CUDA events. Without one it says so, and runs the CPU's passes on less
data: that shows that the numbers are right, and nothing about a GPU. `GB/s` counts the bytes that
an ideal single pass reads and writes; `copy` is that as a share of what a plain copy moves.
`#wrong` counts elements that differ from what torch's operators give in float32, or for the norm
and AdamW, that are further off than rounding explains.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives  # defines torch.ops.fsdp
from torch import Tensor

from fsdpx import _C, ops, shard_ops
from fsdpx.dtypes import BFLOAT16, FLOAT32

MIB = 2**20
PEERS = 8  # of a gather, and sources of a reduction
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
F32, BF16 = torch.float32, torch.bfloat16


@dataclass
class Case:
    """An operation: who does it how, the bytes of an ideal pass, and how to count errors."""

    name: str
    nbytes: int
    paths: dict[str, Callable[[], object]]
    wrong: Callable[[], int]


def seconds(run: Callable[[], object], rounds: int) -> float:
    """The median time of a call."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        if GPU:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def tensors(numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Twelve tensors of a transformer block's proportions, `numel` elements in all."""
    sizes = [numel // 12 * share for share in (3, 1, 4, 3)]
    sizes += [numel // 96 // 8 * 8] * 7
    sizes.append(numel - sum(sizes))
    return [torch.randn(size, device=DEVICE).to(dtype) for size in sizes]


def differing(got: Tensor, expected: Tensor) -> int:
    return int((got != expected).sum())


def pack_case(numel: int) -> Case:
    grads, flat = tensors(numel, BF16), torch.empty(numel, dtype=BF16, device=DEVICE)
    padded = torch.empty(PEERS, numel // PEERS + 64, dtype=BF16, device=DEVICE)

    def chunk_cat() -> None:
        torch.ops.fsdp.chunk_cat(grads, dim=0, num_chunks=PEERS, out=padded[:, : width(grads)])

    return Case(
        "pack bf16",
        4 * numel,
        {
            "fsdpx": lambda: ops.pack(grads, flat),
            "torch.cat": lambda: torch.cat(grads, out=torch.empty_like(flat)),
            "FSDP2 chunk_cat": chunk_cat,
        },
        lambda: differing(flat, torch.cat(grads)),
    )


def width(parts: list[Tensor]) -> int:
    return sum(-(-len(part) // PEERS) for part in parts)


def unpack_case(numel: int) -> Case:
    flat, outs = torch.randn(numel, device=DEVICE), tensors(numel, F32)
    sizes = [len(out) for out in outs]
    copies = [torch.empty_like(out).view(1, -1) for out in outs]

    def split() -> None:
        torch.ops.fsdp.split_with_sizes_copy(flat.view(1, -1), sizes, dim=1, out=copies)

    return Case(
        "unpack fp32",
        8 * numel,
        {
            "fsdpx": lambda: ops.unpack(flat, outs),
            "_foreach_copy_": lambda: torch._foreach_copy_(copies, [*split_views(flat, sizes)]),
            "FSDP2 split_with_sizes_copy": split,
        },
        lambda: differing(torch.cat(outs), flat),
    )


def split_views(flat: Tensor, sizes: list[int]) -> list[Tensor]:
    return [part.view(1, -1) for part in flat.split(sizes)]


def gather_case(numel: int) -> Case:
    """A share for eight peers, whose slots are all on this device."""
    shard = torch.randn(numel, device=DEVICE)
    slots = [torch.zeros(numel, dtype=BF16, device=DEVICE) for _ in range(PEERS)]
    sent = torch.empty(PEERS * numel, dtype=BF16, device=DEVICE)

    def ours() -> None:
        if not GPU:
            for slot in slots:
                ops.cast(shard, slot)
            return
        addresses = [slot.data_ptr() for slot in slots]
        with ops.stream_of(DEVICE) as stream:
            piece = (shard.data_ptr(), numel, 0)
            _C.device_gather([piece], addresses, FLOAT32, BFLOAT16, stream)

    def copy_in() -> None:
        torch.ops.fsdp.all_gather_copy_in([shard.to(BF16)], sent, [numel], numel, 0)

    return Case(
        f"cast + gather to {PEERS}",
        (4 + 2 * PEERS) * numel,
        {
            "fsdpx": ours,
            "copy_ to each": lambda: [slot.copy_(shard) for slot in slots],
            "FSDP2 all_gather_copy_in (own part only)": copy_in,
        },
        lambda: sum(differing(slot, shard.to(BF16)) for slot in slots),
    )


def reduce_case(numel: int) -> Case:
    srcs = [torch.randn(numel, device=DEVICE).to(BF16) for _ in range(PEERS)]
    out = torch.zeros(numel, device=DEVICE)

    def in_order() -> Tensor:
        total = srcs[0].float()
        for src in srcs[1:]:
            total += src.float()
        return total * (1 / PEERS)

    return Case(
        f"reduce {PEERS} bf16 + scale",
        (2 * PEERS + 4) * numel,
        {
            "fsdpx": lambda: ops.reduce(srcs, out, scale=1 / PEERS),
            "torch, in order": in_order,
            "stack and sum": lambda: torch.stack(srcs).sum(0, dtype=F32) * (1 / PEERS),
        },
        lambda: differing(out, in_order()),
    )


def norm_case(numel: int) -> Case:
    src = torch.randn(numel, device=DEVICE)
    paths: dict[str, Callable[[], object]] = {
        "fsdpx (and check)": lambda: shard_ops.norm_and_check(src),
        "torch.linalg.vector_norm": lambda: torch.linalg.vector_norm(src),
        "vector_norm and isfinite": lambda: (torch.linalg.vector_norm(src), src.isfinite().all()),
    }
    if GPU and importlib.util.find_spec("cupy") is not None:
        import cupy

        array = cupy.from_dlpack(src)
        paths["cupy.linalg.norm"] = lambda: cupy.linalg.norm(array)

    def wrong() -> int:
        square, not_finite = shard_ops.norm_and_check(src).tolist()
        exact = float(src.double().square().sum())
        return int(abs(square / exact - 1) > 1e-5) + int(not_finite != 0)

    return Case("norm fp32", 4 * numel, paths, wrong)


def adamw_case(numel: int) -> Case:
    grad, start = torch.randn(numel, device=DEVICE), torch.randn(numel, device=DEVICE)
    param, copy = start.clone(), torch.zeros(numel, dtype=BF16, device=DEVICE)
    state = [torch.zeros(numel, device=DEVICE) for _ in range(2)]
    theirs = torch.nn.Parameter(start.clone())
    theirs.grad = grad
    fused = torch.optim.AdamW([theirs], lr=1e-3, fused=True)

    def torch_step() -> None:
        fused.step()
        copy.copy_(theirs.detach())

    def ours() -> None:
        shard_ops.adamw(param, grad, *state, step=1, lr=1e-3, copy=copy)

    def wrong() -> int:
        fresh, moments = start.clone(), [torch.zeros(numel, device=DEVICE) for _ in range(2)]
        shard_ops.adamw(fresh, grad, *moments, step=1, lr=1e-3, copy=copy)
        reference = torch.nn.Parameter(start.clone())
        reference.grad = grad
        torch.optim.AdamW([reference], lr=1e-3, foreach=False).step()
        off = ~torch.isclose(fresh, reference.detach(), rtol=1e-5, atol=1e-6)
        return int(off.sum()) + differing(copy, fresh.to(BF16))

    paths: dict[str, Callable[[], object]] = {"fsdpx (and bf16)": ours}
    paths["torch fused AdamW, then copy"] = torch_step
    return Case("AdamW fp32", 30 * numel, paths, wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=512 if GPU else 8, help="of fp32 elements")
    parser.add_argument("--rounds", type=int, default=20 if GPU else 3)
    options = parser.parse_args()
    if os.environ.get("RANK", "0") != "0":
        return  # one device is enough
    if not GPU:
        print("No GPU here: these are the CPU's passes; they say nothing about a GPU.")
    numel = int(options.mib * MIB / 4) // 768 * 768
    source, target = (torch.zeros(numel, device=DEVICE) for _ in range(2))
    copied = 8 * numel / seconds(lambda: target.copy_(source), options.rounds)
    print(f"plain copy of {options.mib} MiB: {copied / 1e9:.1f} GB/s")
    print(f"{'operation':22} {'path':42} {'ms':>9} {'GB/s':>8} {'copy':>6} {'#wrong':>7}")
    cases = (pack_case, unpack_case, gather_case, reduce_case, norm_case, adamw_case)
    total_wrong = 0
    for make in cases:
        case = make(numel)
        for path, run in case.paths.items():
            took = seconds(run, options.rounds)
            rate = case.nbytes / took
            count = case.wrong() if path.startswith("fsdpx") else 0
            total_wrong += count
            wrong = count if path.startswith("fsdpx") else "-"
            print(
                f"{case.name:22} {path:42} {took * 1e3:9.3f} {rate / 1e9:8.1f} "
                f"{rate / copied:5.0%} {wrong:>7}"
            )
    if total_wrong:
        raise SystemExit(f"{total_wrong} elements are wrong")


if __name__ == "__main__":
    main()
