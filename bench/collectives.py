"""The fused collectives beside what stock FSDP2 does for the same unit, in the same processes.

    torchrun --nproc-per-node 2 bench/collectives.py [--mib 64] [--rounds 15]

One unit: the 12 parameters of a transformer block, whose gathered bfloat16 form has --mib MiB.

- all-gather: float32 shards -> bfloat16 parameters on every rank. FSDP2: cast and copy in
  (`_foreach_copy_`), all-gather, copy out (`split_with_sizes_copy`).
- reduce-scatter: bfloat16 gradients -> float32 shard, scaled by 1 / D. FSDP2: `chunk_cat`,
  reduce-scatter, cast, scale.

The paths take turns, each started by a barrier; a time is that of the slowest rank. `ratio` is the
median over rounds of (FSDP2 / ours), `+-` half the distance between its quartiles. Bandwidth counts
the bytes that an ideal fused pass reads and writes on one rank (shard and gathered unit; gradients
and shard), as a share of a plain copy of as many bytes on all ranks at once. `#wrong` counts
elements that differ from sums that are exact in both dtypes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_collectives  # defines torch.ops.fsdp

import fsdpx.comm

MIB = 2**20


def block_shapes(numel: int) -> list[tuple[int, ...]]:
    """A transformer block of about `numel` elements, its width a multiple of 128."""
    width = max(128, round((numel / 12) ** 0.5 / 128) * 128)
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    vectors = [(3 * width,), (width,), (4 * width,), *[(width,)] * 5]
    return [*matrices, *vectors]


class Unit:
    """What both paths start from: shards and gradients with small whole numbers."""

    def __init__(self, num_bytes: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.shapes = block_shapes(num_bytes // 2)
        self.numels = [torch.Size(shape).numel() for shape in self.shapes]
        self.numel = sum(self.numels)
        self.piece = self.numel // size
        index = torch.arange(self.numel, dtype=torch.int32)
        self.full = (index % 251).to(torch.bfloat16)
        self.shard = self.full[rank * self.piece : (rank + 1) * self.piece].float()
        self.grads = [
            ((torch.arange(n, dtype=torch.int32) % 61) + rank).to(torch.bfloat16).view(shape)
            for n, shape in zip(self.numels, self.shapes, strict=True)
        ]

    def reduced(self, cat: torch.Tensor) -> torch.Tensor:
        """The mean over ranks of gradients laid out like `cat`, which is this rank's."""
        return cat.float() - self.rank + (self.size - 1) / 2


class Ours:
    """One pass each way."""

    name = "fsdpx"

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.comm = fsdpx.comm.create()
        self.gathered = self.comm.allocate(unit.numel, torch.bfloat16)
        self.shard_grad = torch.empty(unit.piece)

    def all_gather(self) -> None:
        self.comm.all_gather(self.unit.shard, self.gathered).wait()

    def reduce_scatter(self) -> None:
        unit = self.unit
        self.comm.reduce_scatter(unit.grads, self.shard_grad, scale=1 / unit.size).wait()

    def num_wrong(self) -> tuple[int, int]:
        unit = self.unit
        mine = slice(unit.rank * unit.piece, (unit.rank + 1) * unit.piece)
        flat = torch.cat([grad.flatten() for grad in unit.grads])
        wrong_grads = int((self.shard_grad != unit.reduced(flat[mine])).sum())
        return int((self.gathered != unit.full).sum()), wrong_grads


class Stock:
    """FSDP2's steps with its own operators: every parameter split in dimension 0."""

    name = "FSDP2"

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        size, rank = unit.size, unit.rank
        fulls = unit.full.split(unit.numels)
        self.splits = [n // size for n in unit.numels]
        self.shards = [
            full[rank * s : (rank + 1) * s].float()
            for full, s in zip(fulls, self.splits, strict=True)
        ]
        # What copies out go to: parameters that were allocated once, as FSDP2's are.
        self.params = [torch.empty(n, dtype=torch.bfloat16) for n in unit.numels]
        self.shard_grad = torch.empty(0)

    def all_gather(self) -> None:
        unit, size = self.unit, self.unit.size
        cast = torch.empty(unit.piece, dtype=torch.bfloat16)
        inputs = list(cast.split(self.splits))
        torch._foreach_copy_(inputs, self.shards)
        output = torch.empty(unit.numel, dtype=torch.bfloat16)
        send, output = torch.ops.fsdp.all_gather_copy_in(
            inputs, output, self.splits, unit.piece, unit.rank
        )
        dist.all_gather_into_tensor(output, send)
        outs = [param.view(size, -1) for param in self.params]
        torch.ops.fsdp.split_with_sizes_copy(output.view(size, -1), self.splits, dim=1, out=outs)

    def reduce_scatter(self) -> None:
        unit, size = self.unit, self.unit.size
        send = torch.empty(unit.numel, dtype=torch.bfloat16)
        torch.ops.fsdp.chunk_cat(unit.grads, dim=0, num_chunks=size, out=send.view(size, -1))
        output = torch.empty(unit.piece, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(output, send)
        self.shard_grad = output.float().div_(size)

    def num_wrong(self) -> tuple[int, int]:
        unit = self.unit
        wrong = sum(
            int((param != full).sum())
            for param, full in zip(self.params, unit.full.split(unit.numels), strict=True)
        )
        mine = torch.cat([g.flatten().chunk(unit.size)[unit.rank] for g in unit.grads])
        return wrong, int((self.shard_grad != unit.reduced(mine)).sum())


def seconds(call: Callable[[], object]) -> float:
    """The time of one call on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    mine = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine.item()


def half_quartiles(values: list[float]) -> float:
    first, _, third = statistics.quantiles(values, n=4)
    return (third - first) / 2


def measure(unit: Unit, rounds: int) -> dict[str, list[float]]:
    """Seconds of each path and of plain copies, by name, one entry per round."""
    ours, stock = Ours(unit), Stock(unit)
    # A copy reads and writes: half of the bytes that the pass moves, from one side to the other.
    sources = {
        "copy all-gather": torch.zeros((4 * unit.piece + 2 * unit.numel) // 2, dtype=torch.uint8),
        "copy reduce-scatter": torch.zeros(
            (2 * unit.numel + 4 * unit.piece) // 2, dtype=torch.uint8
        ),
    }
    targets = {name: torch.zeros_like(source) for name, source in sources.items()}
    calls: dict[str, Callable[[], object]] = {}
    for path in (ours, stock):
        calls[f"{path.name} all-gather"] = path.all_gather
        calls[f"{path.name} reduce-scatter"] = path.reduce_scatter
    for name, target in targets.items():
        calls[name] = lambda target=target, name=name: target.copy_(sources[name])
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            taken = seconds(call)
            if number >= 2:  # the first rounds touch memory for the first time
                times[name].append(taken)
    for path in (ours, stock):
        wrong = torch.tensor(path.num_wrong())
        dist.all_reduce(wrong)
        for name, count in zip(("all-gather", "reduce-scatter"), wrong.tolist(), strict=True):
            times[f"wrong {path.name} {name}"] = [float(count)]
    ours.comm.close()
    return times


def report(times: dict[str, list[float]], num_bytes: int) -> None:
    print(f"{'':16} {'fsdpx ms':>9} {'FSDP2 ms':>9} {'ratio':>14} {'of a copy':>10} {'#wrong':>12}")
    for name in ("all-gather", "reduce-scatter"):
        ours, stock = times[f"fsdpx {name}"], times[f"FSDP2 {name}"]
        ratios = [b / a for a, b in zip(ours, stock, strict=True)]
        shares = [c / a for a, c in zip(ours, times[f"copy {name}"], strict=True)]
        wrong = "/".join(str(int(times[f"wrong {path} {name}"][0])) for path in ("fsdpx", "FSDP2"))
        print(
            f"{name:16} {1e3 * statistics.median(ours):9.1f} {1e3 * statistics.median(stock):9.1f} "
            f"{statistics.median(ratios):6.1f} +- {half_quartiles(ratios):4.1f} "
            f"{100 * statistics.median(shares):8.0f} % {wrong:>12}"
        )
    copy = statistics.median(times["copy all-gather"])
    print(f"plain copy on all ranks at once: {num_bytes / copy / 1e9:.1f} GB/s per rank")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=float, default=64.0, help="gathered unit in bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    unit = Unit(int(args.mib * MIB), rank, size)
    times = measure(unit, args.rounds)
    if rank == 0:
        print(
            f"{size} ranks, torch {torch.__version__}, a unit of {unit.numel / 1e6:.1f} million "
            f"parameters, {unit.numel * 2 / MIB:.0f} MiB gathered in bfloat16"
        )
        report(times, unit.numel * 2 + unit.piece * 4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
