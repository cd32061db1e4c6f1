"""A training step of fsdpx beside stock FSDP2 and the unsharded module, in the same processes.

    torchrun --nproc-per-node 2 bench/step.py [--only fp32 bf16 host memory]

Steps of the contestants take turns, so that a busy machine slows all of them; numbers are medians,
and `+-` is half the distance between the quartiles. Every row carries its number of wrong elements:
weights after the last step that differ from the other implementation's by more than 1e-6 of the
tensor's largest.

- fp32, bf16: a whole step (forward, backward, SGD) of a GPT with 26 million parameters. `plain` is
  the unsharded module, which communicates nothing: what is left when everything is hidden.
- host: what sharding adds to forward and backward of many tiny units of 12 parameters each, on
  a mesh of one rank, so that next to nothing is computed or sent; per unit and step, in processor
  time of the training thread (on a GPU backward runs on it, too) and in real time, without waiting
  for a GPU. The other ranks wait: it needs two processors.
- memory: the most that a step holds, against `fsdpx.describe`'s prediction. Activations and
  optimizer state are kept next to nothing. Backward pauses after each unit, as if it had much to
  compute, so that reductions keep up with it; `in a hurry` is without: the gradients of more than
  one unit wait for their reduction then.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import MIB, choose_device, finish, median, meet, process_group, say, spread
from model import GPT, GPTConfig, next_byte_loss
from torch import nn
from torch.distributed import fsdp as stock
from torch.distributed.device_mesh import DeviceMesh

import fsdpx

DEVICE = choose_device()
GPT_26M = GPTConfig(context=128, num_layers=8, width=512, num_heads=8)
TINY = GPTConfig(context=8, num_layers=32, width=16, num_heads=2)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
M_MMAP_THRESHOLD = -3  # malloc.h
PAUSE_SECONDS = 0.05


@dataclasses.dataclass
class Contestant:
    """A model and the step that trains it, with what steps took.

    Attributes:
        seconds: Real time of whole steps, of the slowest rank.
        host_seconds: Processor time of this rank's training thread in forward and backward.
        real_seconds: Real time of the same.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: list[float] = dataclasses.field(default_factory=list)
    host_seconds: list[float] = dataclasses.field(default_factory=list)
    real_seconds: list[float] = dataclasses.field(default_factory=list)

    def compute_gradients(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        next_byte_loss(self.model(tokens), targets).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def contestant(name: str, model: GPT, dtype: torch.dtype, mesh: DeviceMesh) -> Contestant:
    """Shards a copy of `model` with the implementation of that name."""
    model = copy.deepcopy(model).to(DEVICE)
    if name == "plain":
        model = model.to(dtype)
    else:
        library = fsdpx if name == "fsdpx" else stock
        policy = library.MixedPrecisionPolicy()
        if dtype != torch.float32:
            policy = library.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in model.blocks:
            library.fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        library.fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    return Contestant(name, model, optimizer)


def batch(config: GPTConfig, batch_size: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    shape = (batch_size, config.context + 1)
    tokens = torch.randint(config.vocabulary, shape, generator=generator).to(DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def race(
    contestants: Sequence[Contestant],
    batches: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    *,
    warmup: int,
    steps: int,
    alone: bool = False,
) -> None:
    """Runs all contestants in turns; a step lasts until the slowest rank has ended it.

    With `alone` only one rank is here, and no other is waited for.
    """
    gc.disable()  # a collection would hit one contestant's step and not the other's
    for step in range(warmup + steps):
        tokens, targets = batches(step)
        for number in range(len(contestants)):
            each = contestants[(step + number) % len(contestants)]  # nobody always goes first
            finish(DEVICE)
            if not alone:
                meet()
            start, host_start = time.perf_counter(), time.thread_time()
            each.compute_gradients(tokens, targets)
            computed, host = time.perf_counter() - start, time.thread_time() - host_start
            each.update()
            finish(DEVICE)
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            if not alone:
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if step >= warmup:
                each.seconds.append(slowest.item())
                each.host_seconds.append(host)
                each.real_seconds.append(computed)
    gc.enable()


@torch.no_grad()
def num_wrong(one: nn.Module, other: nn.Module) -> int:
    """Elements of the whole weights that differ by more than 1e-6 of the tensor's largest."""
    wrong = 0
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        a, b = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (p, q))
        close = (a - b).abs() <= 1e-6 * b.abs().max()  # false for NaN
        wrong += int((~close).sum())
    return wrong


def milliseconds(each: Contestant) -> str:
    return f"{1e3 * median(each.seconds):.1f} +- {1e3 * spread(each.seconds):.1f} ms"


def mesh_of_all() -> DeviceMesh:
    return DeviceMesh(DEVICE.type, list(range(dist.get_world_size())))


def bench_step(args: argparse.Namespace, dtype_name: str) -> None:
    dtype, mesh, config = DTYPES[dtype_name], mesh_of_all(), args.config
    torch.manual_seed(0)
    model = GPT(config)
    names = ("fsdpx", "FSDP2", "plain")
    ours, theirs, plain = contestants = [contestant(name, model, dtype, mesh) for name in names]
    race(
        contestants,
        lambda step: batch(config, args.batch_size, step),
        warmup=args.warmup,
        steps=args.steps,
    )
    wrong = num_wrong(ours.model, theirs.model)
    say(
        f"step {dtype_name} on {DEVICE.type}, {millions(model)}, {args.batch_size} x "
        f"{config.context} tokens a rank: fsdpx {milliseconds(ours)}, "
        f"FSDP2 {milliseconds(theirs)}, plain {milliseconds(plain)}; fsdpx / FSDP2 "
        f"{median(ours.seconds) / median(theirs.seconds):.2f}, plain / FSDP2 "
        f"{median(plain.seconds) / median(theirs.seconds):.2f}; wrong {wrong}"
    )


def millions(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters"


def own_mesh() -> DeviceMesh:
    """A mesh of this rank alone; collective."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return DeviceMesh.from_group(groups[dist.get_rank()], DEVICE.type)


def bench_host(args: argparse.Namespace) -> None:
    mesh, num_units = own_mesh(), args.units
    tiny = dataclasses.replace(TINY, num_layers=num_units)
    torch.manual_seed(0)
    model = GPT(tiny)
    names = ("fsdpx", "FSDP2", "plain")
    if dist.get_rank() != 0:
        return
    ours, theirs, plain = contestants = [
        contestant(name, model, torch.float32, mesh) for name in names
    ]
    with torch.autograd.set_multithreading_enabled(False):
        race(
            contestants,
            lambda step: batch(tiny, 1, step),
            warmup=args.warmup,
            steps=5 * args.steps,
            alone=True,
        )
    texts = []
    for each in (ours, theirs):
        host, real = (
            [1e6 * (a - b) / num_units for a, b in zip(one, other, strict=True)]
            for one, other in (
                (each.host_seconds, plain.host_seconds),
                (each.real_seconds, plain.real_seconds),
            )
        )
        texts.append(
            f"{each.name} adds {median(host):.0f} +- {spread(host):.0f} us of processor time "
            f"({median(real):.0f} +- {spread(real):.0f} us of real time)"
        )
    base = 1e6 * median(plain.host_seconds) / num_units
    say(
        f"host work per unit of 12 tiny parameters and step, one rank: {texts[0]}, {texts[1]} "
        f"to the plain module's {base:.0f} us; wrong {num_wrong(ours.model, plain.model)}"
    )


def proc_bytes(file: str, field: str) -> int:
    """A field of /proc/self/status or smaps_rollup in bytes."""
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/{file} has no {field}")


def held_bytes(*, peak: bool) -> int:
    """This rank's memory, now or at most since `forget_peak`.

    CPU: pages of programs and libraries do not count. A page that n ranks share counts as 1/n: by
    symmetry that makes a rank's own memory. GPU: what torch has given out, and all that it does not
    know of: memory of communicators, of the driver, and of other processes.
    """
    if DEVICE.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        given = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
        return given + total - free - torch.cuda.memory_reserved()
    shared = proc_bytes("status", "RssShmem") - proc_bytes("smaps_rollup", "Pss_Shmem")
    field = "VmHWM" if peak else "VmRSS"
    return proc_bytes("status", field) - proc_bytes("status", "RssFile") - shared


def forget_peak() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_step_bytes(each: Contestant, config: GPTConfig) -> int:
    """The most memory that this rank holds in a step."""
    tokens, targets = batch(dataclasses.replace(config, context=2), 1, 0)
    for last in (False, False, True):
        finish(DEVICE)
        meet()
        if last:
            forget_peak()
        each.compute_gradients(tokens, targets)
        each.update()
    finish(DEVICE)
    return held_bytes(peak=True)


def bench_memory(args: argparse.Namespace) -> None:
    # Freed tensors go back to the system at once: the peak is of what is held, not of malloc.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    mesh, config = mesh_of_all(), args.config
    peaks: dict[str, int] = {}
    hurried: dict[str, int] = {}
    weights: dict[str, nn.Module] = {}
    warm_up = contestant("plain", GPT(TINY), torch.float32, mesh)
    warm_up.compute_gradients(*batch(TINY, 1, 0))
    dist.all_reduce(torch.zeros(1, device=DEVICE))  # the default group's memory is nobody's
    for name in ("fsdpx", "FSDP2"):
        gc.collect()
        baseline = held_bytes(peak=False)
        torch.manual_seed(0)
        model = GPT(config)
        size = millions(model)
        each = contestant(name, model, torch.float32, mesh)
        del model
        gc.collect()
        hurried[name] = peak_step_bytes(each, config) - baseline
        for block in each.model.blocks:
            block.register_full_backward_hook(lambda *_: time.sleep(PAUSE_SECONDS))
        peaks[name] = peak_step_bytes(each, config) - baseline
        weights[name] = each.model
        if name == "fsdpx":
            predicted = fsdpx.describe(each.model).memory.total
    say(
        f"memory of a step on {DEVICE.type}, fp32, {size}: fsdpx "
        f"{peaks['fsdpx'] / MIB:.1f} MiB, predicted {predicted / MIB:.1f} "
        f"({100 * (peaks['fsdpx'] / predicted - 1):+.1f} %), in a hurry "
        f"{hurried['fsdpx'] / MIB:.1f}; FSDP2 {peaks['FSDP2'] / MIB:.1f}, in a hurry "
        f"{hurried['FSDP2'] / MIB:.1f}; wrong {num_wrong(weights['fsdpx'], weights['FSDP2'])}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Step time, host work and memory against FSDP2.")
    rows = ("fp32", "bf16", "host", "memory")
    parser.add_argument("--only", nargs="+", choices=rows, default=rows)
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank")
    parser.add_argument("--layers", type=int, default=GPT_26M.num_layers)
    parser.add_argument("--width", type=int, default=GPT_26M.width)
    parser.add_argument(
        "--units", type=int, default=TINY.num_layers, help="of the row of host work"
    )
    args = parser.parse_args(arguments)
    args.config = dataclasses.replace(GPT_26M, num_layers=args.layers, width=args.width)
    torch.set_num_threads(1)
    with process_group(DEVICE):
        if not dist.is_initialized():
            parser.error("start it with torchrun: it measures ranks")
        run_rows(args)


def run_rows(args: argparse.Namespace) -> None:
    if "memory" in args.only:  # first, while the process is still small
        bench_memory(args)
    if "host" in args.only:
        bench_host(args)
        meet()
    for name in DTYPES:
        if name in args.only:
            bench_step(args, name)


if __name__ == "__main__":
    main()
