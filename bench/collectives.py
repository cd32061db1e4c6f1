"""The fused collectives beside stock FSDP2 and the bare collectives, in the same processes.

    torchrun --nproc-per-node 2 bench/collectives.py [--mib 64] [--rounds 15]

One unit: the 12 parameters of a transformer block, whose gathered bfloat16 form has --mib MiB.

- all-gather: float32 shards -> bfloat16 parameters on every rank. FSDP2: cast and copy in
  (`_foreach_copy_`), all-gather, copy out (`split_with_sizes_copy`).
- reduce-scatter: bfloat16 gradients -> float32 shard, scaled by 1 / D. FSDP2: `chunk_cat`,
  reduce-scatter, cast, scale.
- bare: nothing but the collective, of bfloat16 to bfloat16, through torch, and through cupy where
  it is installed. On GPUs that is NCCL.

Paths take turns, each started by a barrier; a time is that of the slowest rank, on GPUs by CUDA
events. Ratios are medians over rounds of (the other's time / this path's): above 1 is faster. `bus`
counts the bytes that cross between ranks, as nccl-tests does. `of a copy` is the share of the
bandwidth of a plain copy on all ranks at once that moves as many bytes as an ideal fused pass reads
and writes on one rank. `#wrong` counts elements, on all ranks, that are further off than rounding.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_collectives  # defines torch.ops.fsdp
from measuring import (
    MIB,
    Clock,
    all_gather,
    choose_device,
    median,
    process_group,
    ratio,
    reduce_scatter,
    say,
    spread,
)
from torch import Tensor

import fsdpx.comm

BF16 = torch.bfloat16
OPERATIONS = ("all-gather", "reduce-scatter")


def block_shapes(numel: int) -> list[tuple[int, ...]]:
    """A transformer block of about `numel` elements, its width a multiple of 128."""
    width = max(128, round((numel / 12) ** 0.5 / 128) * 128)
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    vectors = [(3 * width,), (width,), (4 * width,), *[(width,)] * 5]
    return [*matrices, *vectors]


class Unit:
    """What all paths start from: shards and gradients of whole numbers, whose sums are exact."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self.shapes = block_shapes(num_bytes // 2)
        self.numels = [torch.Size(shape).numel() for shape in self.shapes]
        self.numel = sum(self.numels)
        if self.numel % self.size:
            raise SystemExit(f"{self.size} ranks can't share {self.numel} elements evenly")
        self.piece = self.numel // self.size
        self.mine = slice(self.rank * self.piece, (self.rank + 1) * self.piece)
        self.full = self._numbers(self.numel, 251)
        self.shard = self.full[self.mine].float()
        self.grads = [
            (self._numbers(n, 13) + self.rank % 4).view(shape)
            for n, shape in zip(self.numels, self.shapes, strict=True)
        ]
        self.flat_grads = torch.cat([grad.flatten() for grad in self.grads])

    def _numbers(self, numel: int, modulus: int) -> Tensor:
        numbers = torch.arange(numel, dtype=torch.int32) % modulus
        return numbers.to(BF16).to(self.device)

    def wrong_shard(self, got: Tensor, mine: Tensor, scale: float) -> int:
        """Elements of a reduced shard that differ from the ranks' gradients like `mine`, summed."""
        others = sum(rank % 4 for rank in range(self.size))
        total = (mine.float() - self.rank % 4) * self.size + others
        return int((~torch.isclose(got.float(), total * scale, rtol=1e-6, atol=0.0)).sum())


class Path(Protocol):
    """One way to do both collectives."""

    name: str

    def all_gather(self) -> object: ...
    def reduce_scatter(self) -> object: ...
    def num_wrong(self) -> tuple[int, int]: ...


class Ours:
    """One pass each way."""

    def __init__(self, unit: Unit, kind: str) -> None:
        self.unit = unit
        self.comm = fsdpx.comm.create(kind=kind, device=unit.device)
        self.name = f"fsdpx {self.comm.kind}"
        self.gathered = self.comm.allocate(unit.numel, BF16)
        self.shard_grad = torch.empty(unit.piece, device=unit.device)

    def all_gather(self) -> None:
        self.comm.all_gather(self.unit.shard, self.gathered).wait()

    def reduce_scatter(self) -> None:
        unit = self.unit
        self.comm.reduce_scatter(unit.grads, self.shard_grad, scale=1 / unit.size).wait()

    def num_wrong(self) -> tuple[int, int]:
        unit = self.unit
        wrong = unit.wrong_shard(self.shard_grad, unit.flat_grads[unit.mine], 1 / unit.size)
        return int((self.gathered != unit.full).sum()), wrong


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
        self.params = [self._empty(n) for n in unit.numels]
        self.shard_grad = torch.empty(0)

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=BF16, device=self.unit.device)

    def all_gather(self) -> None:
        unit, size = self.unit, self.unit.size
        inputs = list(self._empty(unit.piece).split(self.splits))
        torch._foreach_copy_(inputs, self.shards)
        send, output = torch.ops.fsdp.all_gather_copy_in(
            inputs, self._empty(unit.numel), self.splits, unit.piece, unit.rank
        )
        all_gather(output, send)
        outs = [param.view(size, -1) for param in self.params]
        torch.ops.fsdp.split_with_sizes_copy(output.view(size, -1), self.splits, dim=1, out=outs)

    def reduce_scatter(self) -> None:
        unit, size = self.unit, self.unit.size
        send, output = self._empty(unit.numel), self._empty(unit.piece)
        torch.ops.fsdp.chunk_cat(unit.grads, dim=0, num_chunks=size, out=send.view(size, -1))
        reduce_scatter(output, send)
        self.shard_grad = output.float().div_(size)

    def num_wrong(self) -> tuple[int, int]:
        unit = self.unit
        wrong = sum(
            int((param != full).sum())
            for param, full in zip(self.params, unit.full.split(unit.numels), strict=True)
        )
        mine = torch.cat([g.flatten().chunk(unit.size)[unit.rank] for g in unit.grads])
        return wrong, unit.wrong_shard(self.shard_grad, mine, 1 / unit.size)


class Bare:
    """The collectives of the process group alone: no casts, no copies, no factor."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.name = "NCCL by torch" if unit.device.type == "cuda" else "gloo by torch"
        self.shard = unit.full[unit.mine].clone()
        self.gathered = torch.empty_like(unit.full)
        self.shard_grad = torch.empty_like(self.shard)

    def all_gather(self) -> None:
        all_gather(self.gathered, self.shard)

    def reduce_scatter(self) -> None:
        reduce_scatter(self.shard_grad, self.unit.flat_grads)

    def num_wrong(self) -> tuple[int, int]:
        unit = self.unit
        wrong = unit.wrong_shard(self.shard_grad, unit.flat_grads[unit.mine], 1.0)
        return int((self.gathered != unit.full).sum()), wrong


class BareByCupy(Bare):
    """The same NCCL calls by cupy, on a communicator of its own, on torch's current stream."""

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit)
        from cupy.cuda import nccl

        self.name = "NCCL by cupy"
        self.nccl = nccl
        ids = [nccl.get_unique_id() if unit.rank == 0 else None]
        dist.broadcast_object_list(ids, device=torch.device("cpu"))
        self.comm = nccl.NcclCommunicator(unit.size, ids[0], unit.rank)

    def all_gather(self) -> None:
        source, to = self.shard.data_ptr(), self.gathered.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        self.comm.allGather(source, to, self.unit.piece, self.nccl.NCCL_BFLOAT16, stream)

    def reduce_scatter(self) -> None:
        source, to = self.unit.flat_grads.data_ptr(), self.shard_grad.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        self.comm.reduceScatter(
            source, to, self.unit.piece, self.nccl.NCCL_BFLOAT16, self.nccl.NCCL_SUM, stream
        )


def paths_of(unit: Unit) -> Iterator[Path]:
    """What can be compared here; says what is left out, and why."""
    on_gpu = unit.device.type == "cuda"
    for kind in ("nvlink", "nvlink-copy", "nccl", "c10d") if on_gpu else ("auto", "c10d"):
        try:
            yield Ours(unit, kind)
        except ValueError as error:  # on every rank
            say(f"without {kind}: {error}")
    yield Stock(unit)
    yield Bare(unit)
    if not on_gpu:
        return
    if importlib.util.find_spec("cupy") is None:
        say("without NCCL by cupy: cupy is not installed")
        return
    from cupy.cuda import nccl

    if hasattr(nccl, "NCCL_BFLOAT16"):
        yield BareByCupy(unit)
    else:
        say("without NCCL by cupy: this cupy does not know bfloat16")


class Copy:
    """A plain copy with an ideal pass's traffic: it reads half of the bytes, and writes half."""

    def __init__(self, unit: Unit) -> None:
        nbytes = 2 * unit.numel + 4 * unit.piece
        self.source = torch.zeros(nbytes // 2, dtype=torch.uint8, device=unit.device)
        self.target = torch.zeros_like(self.source)

    def __call__(self) -> None:
        self.target.copy_(self.source)


Times = dict[tuple[str, str], list[float]]  # by operation and path, one entry per round


def measure(paths: list[Path], copy: Copy, clock: Clock, rounds: int) -> Times:
    """Seconds of each path and of the copy."""
    calls: dict[tuple[str, str], Callable[[], object]] = {("", "copy"): copy}
    for path in paths:
        calls["all-gather", path.name] = path.all_gather
        calls["reduce-scatter", path.name] = path.reduce_scatter
    times: Times = {key: [] for key in calls}
    for number in range(rounds + 2):
        for key, call in calls.items():
            taken = clock.seconds_of_slowest(call)
            if number >= 2:  # the first rounds touch memory for the first time
                times[key].append(taken)
    return times


def report(unit: Unit, times: Times, wrong: dict[tuple[str, str], int]) -> None:
    crossing = 2 * unit.numel * (unit.size - 1) / unit.size
    bare = "NCCL" if unit.device.type == "cuda" else "gloo"
    heads = f"{'ms':>9} {'bus GB/s':>9} {'of a copy':>10} {f'x {bare}':>8} {'x FSDP2':>15}"
    say(f"{'operation':15} {'path':20} {heads} {'#wrong':>7}")
    for (operation, path), taken in times.items():
        if not operation:
            continue
        others = {name: times[operation, name] for name in (f"{bare} by torch", "FSDP2")}
        stock = [b / a for a, b in zip(taken, others["FSDP2"], strict=True)]
        say(
            f"{operation:15} {path:20} {1e3 * median(taken):9.3f} "
            f"{crossing / median(taken) / 1e9:9.2f} {ratio(taken, times['', 'copy']):10.0%} "
            f"{ratio(taken, others[f'{bare} by torch']):8.2f} {median(stock):6.2f} +- "
            f"{spread(stock):5.2f} {wrong[operation, path]:7}"
        )
    moved = 2 * unit.numel + 4 * unit.piece
    say(f"plain copy on all ranks at once: {moved / median(times['', 'copy']) / 1e9:.1f} GB/s")


def count_wrong(paths: list[Path]) -> dict[tuple[str, str], int]:
    wrong = torch.tensor([path.num_wrong() for path in paths])
    dist.all_reduce(wrong)
    keys = [(operation, path.name) for path in paths for operation in OPERATIONS]
    return dict(zip(keys, wrong.flatten().tolist(), strict=True))


def bench(mib: float, device: torch.device, clock: Clock, rounds: int) -> int:
    """One size; how many elements are wrong."""
    unit = Unit(int(mib * MIB), device)
    say(
        f"\n{unit.size} ranks on {device.type}, torch {torch.__version__}, a unit of "
        f"{unit.numel / 1e6:.1f} million parameters, {unit.numel * 2 / MIB:.0f} MiB gathered"
    )
    paths = list({path.name: path for path in paths_of(unit)}.values())
    times = measure(paths, Copy(unit), clock, rounds)
    wrong = count_wrong(paths)
    report(unit, times, wrong)
    for path in paths:
        if isinstance(path, Ours):
            path.comm.close()
    return sum(wrong.values())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--mib",
        type=float,
        nargs="+",
        help="gathered unit in bfloat16 (default: 64; on GPUs 1, 8 and 64 for each rank)",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeat", type=int, default=10, help="calls in a round, on GPUs")
    parser.add_argument(
        "--ahead", type=float, default=2.0, help="see Clock.ahead_ms in measuring.py"
    )
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = choose_device()
    with process_group(device):
        if not dist.is_initialized():
            parser.error("start it with torchrun: it measures ranks")
        sizes: Any = args.mib or [64.0]
        if device.type == "cuda" and not args.mib:
            sizes = [dist.get_world_size() * mib for mib in (1.0, 8.0, 64.0)]
        clock = Clock(device, repeat=args.repeat, ahead_ms=args.ahead)
        wrong = sum(bench(mib, device, clock, args.rounds) for mib in sizes)
    if wrong:
        raise SystemExit(f"{wrong} elements are wrong")


if __name__ == "__main__":
    main()
