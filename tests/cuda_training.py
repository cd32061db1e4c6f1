"""Training runs of the engine on CUDA, real or simulated, to be compared with the same run on CPU.

As a program it tries random orders until it is stopped or one fails:

    python tests/cudasim/run.py tests/cuda_training.py --orders 5000 --ranks 2 --comm nccl
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cudasim
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 20
NUM_BLOCKS = 3


@dataclass(frozen=True, kw_only=True)
class Training:
    """One way to train.

    Attributes:
        comm: Communicator on CUDA.
        low: Compute and reduce in bf16.
        prefetch: Units to gather ahead.
        num_micro_batches: Backwards for each step.
        sync_each: Whether each of them reduces gradients.
        drops: Gradients of all but the last micro-batch are dropped while they wait.
        taken: `torch.autograd.grad` gives the gradients.
        frozen: The second block's weights do not train.
        checkpoint: Blocks recompute their forward.
        zero_stage: As `fully_shard` takes it.
        replicas: HSDP: copies of each share.
        few: Ranks that share each block from forward to backward; 0: all.
        offload: Shards live in CPU memory: "pinned" or "pageable".
        converted: The last step is in fp64.
        num_steps: Optimizer steps.
    """

    comm: str = "auto"
    low: bool = False
    prefetch: int = 1
    num_micro_batches: int = 1
    sync_each: bool = True
    drops: bool = False
    taken: bool = False
    frozen: bool = False
    checkpoint: bool = False
    zero_stage: int = 3
    replicas: int = 1
    few: int = 0
    offload: str = ""
    converted: bool = False
    num_steps: int = 2


@dataclass(frozen=True)
class Result:
    """What must not depend on the order: losses, and the bits of the weights at the end."""

    losses: tuple[float, ...]
    weights: str


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Units of uneven sizes: shares are padded, and segments begin where they like."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        out: Tensor = self.head(x)
        return out


def shard(training: Training, device: str, world_size: int) -> Any:
    """The model with a unit for each block and one for the rest."""
    from fsdpx import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = Model(training.checkpoint)
    if training.frozen:
        model.blocks[1].requires_grad_(False)
    low = torch.bfloat16 if training.low else None
    options: dict[str, Any] = {
        "mesh": mesh(training, device, world_size),
        "mp_policy": MixedPrecisionPolicy(low, low),
        "prefetch": training.prefetch,
        "zero_stage": training.zero_stage,
        "comm": training.comm if device == "cuda" else "auto",
    }
    if training.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=training.offload == "pinned")
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=training.few or None, **options)
    model = fully_shard(model, **options)
    return model if training.offload else model.to(device)


_meshes: dict[tuple[str, int, int], Any] = {}


def mesh(training: Training, device: str, world_size: int) -> Any:
    """Made once: each has its communicators."""
    key = device, world_size, training.replicas
    if key not in _meshes:
        if training.replicas == 1:
            _meshes[key] = dist.init_device_mesh(device, (world_size,))
        else:
            shape = (training.replicas, world_size // training.replicas)
            _meshes[key] = dist.init_device_mesh(device, shape, mesh_dim_names=("copy", "share"))
    return _meshes[key]


def batches(training: Training, rank: int, device: str) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Those of each step."""
    generator = torch.Generator().manual_seed(1000 + rank)
    for _ in range(training.num_steps):
        yield [
            (
                torch.randn(4, WIDTH, generator=generator).to(device),
                torch.randn(4, 3, generator=generator).to(device),
            )
            for _ in range(training.num_micro_batches)
        ]


def train(
    rank: int,
    world_size: int,
    training: Training,
    device: str,
    after_step: Callable[[int], None] = lambda step: None,
) -> Result:
    """Trains; `after_step(i)` is called at the end of each step."""
    model = shard(training, device, world_size)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
    kept: list[Tensor] = []
    steps = list(batches(training, rank, device))  # before: to copy them makes the host wait
    for step, micro_batches in enumerate(steps):
        if training.converted and step == training.num_steps - 1:
            model.double()
        for i, (x, y) in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            model.set_requires_gradient_sync(last or training.sync_each)
            loss = F.mse_loss(model(x.to(parameters[0].dtype)).float(), y)
            if training.taken:
                for parameter, gradient in zip(
                    parameters, torch.autograd.grad(loss, parameters), strict=True
                ):
                    parameter.grad = gradient
            else:
                loss.backward()
            if training.drops and not last:
                optimizer.zero_grad()
            kept.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        after_step(step)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().full_tensor().cpu().numpy().tobytes())
    return Result(tuple(loss.item() for loss in kept), digest.hexdigest()[:16])


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Freed parameters become NaN."""
    import fsdpx.unit

    before, fsdpx.unit.POISON = fsdpx.unit.POISON, True
    try:
        yield
    finally:
        fsdpx.unit.POISON = before


def run_orders(
    rank: int, world_size: int, training: Training, orders: Sequence[tuple[str, int]]
) -> list[Result]:
    """The run on CPU, then on CUDA in each of the orders (once, as it comes, on a real GPU)."""
    results = [train(rank, world_size, training, "cpu")]
    with poisoned():
        if not cudasim.active:
            return [*results, train(rank, world_size, training, "cuda")]
        for order, seed in orders:
            cudasim.configure(order=order, seed=seed)
            results.append(train(rank, world_size, training, "cuda"))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--comm", default="auto")
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    training = Training(comm=arguments.comm, low=arguments.bf16)
    expected, done, chunk = None, 0, 50
    while done < arguments.orders:
        orders = [("random", seed) for seed in range(done, min(done + chunk, arguments.orders))]
        results = run_ranks(arguments.ranks, run_orders, training, orders, timeout=600)
        expected = expected or results[0][1]
        for (_, seed), result in zip(orders, results[0][1:], strict=True):
            if result != expected:
                sys.exit(f"the random order of seed {seed} gives {result}, others {expected}")
        done += len(orders)
        print(f"{done} random orders gave the same bits", flush=True)


if __name__ == "__main__":
    main()
