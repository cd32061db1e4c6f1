"""Trains a byte-level GPT with fsdpx, on any number of ranks.

    torchrun --nproc-per-node 2 examples/train_lm.py            # on Python's own sources
    torchrun --nproc-per-node 2 examples/train_lm.py --data book.txt --dtype bf16 --prefetch 2
    python examples/train_lm.py --steps 20                       # one rank needs no launcher

At the end, rank 0 draws the schedule of the last step into OUT/timeline.svg.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from data import batch, load_corpus
from launch import choose_device, process_group
from model import GPT, GPTConfig, next_byte_loss
from progress import Progress, Status, peak_memory_mib
from reference import Batch, Reference, update
from torch import nn

import fsdpx
from fsdpx import MixedPrecisionPolicy, fully_shard

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with fsdpx.")
    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=int, default=80)
    run.add_argument("--batch-size", type=int, default=4, help="sequences per rank and backward")
    run.add_argument("--grad-accumulation", type=int, default=1, help="backwards per step")
    run.add_argument("--lr", type=float, default=2e-3)
    run.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0: no limit")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--data", type=Path, help="file or folder (default: Python's own sources)")
    run.add_argument("--out", type=Path, default=Path("out"), help="folder for the timeline")
    run.add_argument("--log-every", type=int, default=10, help="steps between progress lines")
    run.add_argument(
        "--check-reference",
        type=int,
        default=0,
        metavar="N",
        help="also run the first N steps unsharded and print the differences",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--context", type=int, default=128, help="bytes per sequence")
    model.add_argument("--layers", type=int, default=6)
    model.add_argument("--width", type=int, default=192)
    model.add_argument("--heads", type=int, default=6)
    shard = parser.add_argument_group("sharding")
    shard.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the computation")
    shard.add_argument(
        "--stage",
        type=int,
        choices=(1, 2, 3),
        default=3,
        help="ZeRO stage; 3: free parameters after forward, 1 and 2: keep them until they change",
    )
    shard.add_argument("--prefetch", type=int, default=1, help="units gathered ahead")
    shard.add_argument("--comm", default="auto", help="auto, c10d, shm; on GPUs nvlink, nccl")
    return parser.parse_args(arguments)


def shard(model: GPT, args: argparse.Namespace) -> None:
    """Makes each block a unit, and what is left (embeddings, final norm, head) the root's."""
    policy = MixedPrecisionPolicy()
    if args.dtype != "fp32":
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[args.dtype], reduce_dtype=torch.float32)
    options = functools.partial(
        fully_shard,
        mp_policy=policy,
        zero_stage=args.stage,
        prefetch=args.prefetch,
        comm=args.comm,
    )
    for block in model.blocks:
        options(block)
    options(model)  # the root is kept until backward even in stage 3, as backward starts with it


class Trainer:
    """One rank's training loop, a step at a time."""

    def __init__(
        self, args: argparse.Namespace, device: torch.device, rank: int, world_size: int
    ) -> None:
        self.args, self.device, self.rank, self.world_size = args, device, rank, world_size
        self.corpus = load_corpus(args.data)
        torch.manual_seed(args.seed)  # all ranks start from the same weights
        config = GPTConfig(args.context, args.layers, args.width, args.heads)
        self.model = GPT(config).to(device)
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.reference = None
        if args.check_reference and rank == 0:
            self.reference = Reference(
                self.model, self.make_optimizer, compute_dtype=DTYPES[args.dtype], clip=args.clip
            )
        shard(self.model, args)
        self.optimizer = self.make_optimizer(list(self.model.parameters()))

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def batches(self, step: int, rank: int) -> list[Batch]:
        """The micro-batches of a rank in a step; any rank can ask for any rank's."""
        args = self.args
        first = step * args.grad_accumulation
        drawn = (
            batch(
                self.corpus,
                seed=args.seed,
                index=index,
                rank=rank,
                batch_size=args.batch_size,
                context=args.context,
            )
            for index in range(first, first + args.grad_accumulation)
        )
        return [(x.to(self.device), y.to(self.device)) for x, y in drawn]

    def compute_gradients(self, step: int) -> float:
        """Forward and backward of a step; returns the loss, averaged over all ranks."""
        batches = self.batches(step, self.rank)
        total = torch.zeros((), device=self.device)
        for number, (inputs, targets) in enumerate(batches):
            self.model.set_requires_gradient_sync(number == len(batches) - 1)
            loss = next_byte_loss(self.model(inputs), targets)
            (loss / len(batches)).backward()
            total += loss.detach() / len(batches)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.item() / self.world_size

    def learning_rate(self, step: int) -> float:
        """Rises over the first tenth of the run, then falls along a cosine to a tenth."""
        warmup = max(1, self.args.steps // 10)
        if step < warmup:
            return self.args.lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.args.steps - warmup)
        return self.args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))

    def update(self, step: int) -> None:
        rate = self.learning_rate(step)
        update(self.model, self.optimizer, learning_rate=rate, clip=self.args.clip)

    def compare_with_reference(self, step: int, loss: float) -> None:
        """Prints how far gradients and loss are from the unsharded run's. Collective."""
        gradients = [p.grad.full_tensor() for p in self.model.parameters()]
        if self.reference is None:
            return
        everyone = [self.batches(step, rank) for rank in range(self.world_size)]
        whole = self.reference.whole_batch_loss(everyone)
        expected = self.reference.compute_gradients(everyone)
        largest, where = 0.0, "all equal"
        for gradient, (name, p) in zip(
            gradients, self.reference.model.named_parameters(), strict=True
        ):
            difference = (gradient - p.grad).abs().max().item()
            if difference > largest or difference != difference:
                largest, where = difference, f"in {name}, whose largest is {p.grad.abs().max():.2e}"
        print(
            f"reference, step {step + 1}: gradients differ by {largest:.2e} at most ({where}); "
            f"loss by {abs(loss - expected):.2e}, from one big batch's by {abs(loss - whole):.2e}",
            flush=True,
        )
        self.reference.step(self.learning_rate(step))


@dataclasses.dataclass
class Result:
    """What the summary tells."""

    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    timeline: fsdpx.timeline.Timeline | None = None


def train(trainer: Trainer) -> Result:
    args, result = trainer.args, Result()
    tokens = args.batch_size * args.context * args.grad_accumulation * trainer.world_size
    progress = Progress(args.steps, every=args.log_every, active=trainer.rank == 0)
    for step in range(args.steps):
        start = time.perf_counter()
        due = progress.due(step + 1)
        record = fsdpx.record_timeline(trainer.model) if due else contextlib.nullcontext()
        with record as timeline:
            loss = trainer.compute_gradients(step)
        compare_from = time.perf_counter()
        if step < args.check_reference:
            trainer.compare_with_reference(step, loss)
        compared = time.perf_counter() - compare_from
        trainer.update(step)
        result.losses.append(loss)
        result.seconds.append(time.perf_counter() - start - compared)
        if timeline is not None:
            result.timeline = timeline
            exposed = timeline.summary().exposed_fraction
            recent = result.seconds[-args.log_every :]
            rate = tokens * len(recent) / sum(recent)
            memory = peak_memory_mib(trainer.device)
            progress.show(Status(step + 1, loss, rate, exposed, memory))
    return result


def summarise(trainer: Trainer, result: Result) -> None:
    """Rank 0's closing words."""
    args = trainer.args
    steady = sorted(result.seconds)[len(result.seconds) // 2]
    tokens = args.batch_size * args.context * args.grad_accumulation * trainer.world_size
    last = result.losses[-10:]
    print(
        f"\nloss {result.losses[0]:.4f} -> {sum(last) / len(last):.4f} nats per byte (mean of the "
        f"last {len(last)} steps) in {args.steps} steps of {1e3 * steady:.0f} ms (median), "
        f"{tokens / steady:,.0f} tokens/s, peak {peak_memory_mib(trainer.device):.0f} MiB"
    )
    timeline = result.timeline
    if timeline is not None and timeline.records:
        total = timeline.summary()
        print(
            f"last step: {1e3 * total.step_seconds:.1f} ms of forward and backward, of which "
            f"{1e3 * total.exposed_seconds:.1f} ms exposed communication"
        )
        args.out.mkdir(parents=True, exist_ok=True)
        title = (
            f"Step {args.steps} on rank 0 of {trainer.world_size}: {args.layers} blocks of width "
            f"{args.width}, {args.dtype}, stage {args.stage}, prefetch {args.prefetch}"
        )
        timeline.write_svg(args.out / "timeline.svg", title=title)
        timeline.write_chrome_trace(args.out / "trace.json")
        print(f"wrote {args.out / 'timeline.svg'} and {args.out / 'trace.json'}")


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    device = choose_device(args.device)
    with process_group(device) as (rank, world_size):
        trainer = Trainer(args, device, rank, world_size)
        description = fsdpx.describe(trainer.model)
        if rank == 0:
            print(
                f"{trainer.num_parameters:,} parameters in {args.dtype} on {world_size} rank(s), "
                f"{device.type}, {len(trainer.corpus):,} bytes of text\n{description}",
                flush=True,
            )
        result = train(trainer)
        if rank == 0:
            summarise(trainer, result)


if __name__ == "__main__":
    main()
