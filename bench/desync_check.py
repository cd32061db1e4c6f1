"""What it costs that ranks compare what they are about to do, as a part of a training step.

    torchrun --nproc-per-node 2 bench/desync_check.py

Before each collective the ranks compare operation, unit and place; those of GPUs do so on their
CPUs, beside the collective. A barrier of the CPUs is that comparison and nothing else, so its time
is the most that a check can cost: over shared memory the ranks have to meet anyway. Times are
medians; a step is forward, backward and SGD of a GPT with 26 million parameters. The last column
counts the checks as if none were hidden behind computation.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import torch
import torch.distributed as dist
from measuring import choose_device, finish, median, process_group, say
from model import GPT, GPTConfig, next_byte_loss

import fsdpx

MODEL = GPTConfig(context=128, num_layers=8, width=512, num_heads=8)
NUM_STEPS = 7
NUM_BARRIERS = 2000


def seconds_per_check(comm: fsdpx.comm.Communicator) -> float:
    """Of checks that follow each other on the communication thread of the CPUs."""
    comm = comm.control
    times = []
    for _ in range(5):
        comm.barrier().wait()
        begin = time.perf_counter()
        works = [comm.barrier() for _ in range(NUM_BARRIERS)]
        works[-1].wait()
        times.append((time.perf_counter() - begin) / NUM_BARRIERS)
    return median(times)


def step_of(kind: str, device: torch.device, config: GPTConfig) -> tuple[float, int]:
    """Seconds of a step, and how many collectives it has."""
    torch.manual_seed(0)
    model = GPT(config).to(device)
    for block in model.blocks:
        fsdpx.fully_shard(block, comm=kind)
    fsdpx.fully_shard(model, comm=kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, 256, (2, config.context), generator=generator).to(device)
    times = []
    for _ in range(NUM_STEPS):
        begin = time.perf_counter()
        next_byte_loss(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        finish(device)
        times.append(time.perf_counter() - begin)
    with fsdpx.record_timeline(model) as timeline:
        next_byte_loss(model(tokens), tokens).backward()
    return median(times), sum(record.lane == "comm" for record in timeline.records)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = choose_device()
    kinds = ("shm", "c10d") if device.type == "cpu" else ("nvlink", "nccl", "c10d")
    parser.add_argument("--comm", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--layers", type=int, default=MODEL.num_layers)
    parser.add_argument("--width", type=int, default=MODEL.width)
    args = parser.parse_args(arguments)
    config = dataclasses.replace(MODEL, num_layers=args.layers, width=args.width)
    torch.set_num_threads(1)
    with process_group(device):
        if not dist.is_initialized():
            parser.error("start it with torchrun: it measures ranks")
        say(f"{'kind':6} {'check':>10} {'checks/step':>12} {'step':>10} {'part of step':>13}")
        for kind in args.comm:
            check = seconds_per_check(fsdpx.comm.create(kind=kind, device=device))
            step, count = step_of(kind, device, config)
            part = count * check / step
            say(f"{kind:6} {check * 1e6:7.1f} us {count:12} {step * 1e3:7.1f} ms {part:13.2%}")


if __name__ == "__main__":
    main()
