"""Random training loops: whatever is called in whatever order, the numbers are the reference's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside import LIMIT, Beside, batch, loss_of
from ranks import run_ranks
from torch import Tensor

NUM_CALLS = 30


class Loop:
    """A training loop of random calls; equal seeds give equal calls on all ranks.

    What the sharded model keeps from `.grad` until it is reduced, the reference keeps in `waiting`.
    """

    def __init__(self, both: Beside, seed: int) -> None:
        self.both = both
        self.random = random.Random(seed)
        self.waiting: dict[str, Tensor] = {}
        self.number = 0
        self.done: list[str] = []

    def next_batch(self) -> int:
        self.number += 1
        return self.number

    def some_layers(self) -> list[int]:
        return [i for i in range(3) if self.random.random() < 0.2]

    # ---- Calls

    def backward(self) -> None:
        both, number, skipped = self.both, self.next_batch(), self.some_layers()
        in_vain = [self.some_layers() for _ in range(both.world_size)]
        before = {name: p.grad for name, p in both.reference.named_parameters()}
        both.reference.zero_grad()
        both.backward(number, skipped, in_vain.__getitem__)
        for name, parameter in both.reference.named_parameters():
            parts = [g for g in (parameter.grad, self.waiting.pop(name, None)) if g is not None]
            total = sum(parts[1:], parts[0]) if parts else None
            parameter.grad = before[name]
            if total is None:
                continue
            if not self.is_reduced_now(name):
                self.waiting[name] = total
            else:
                parameter.grad = total if parameter.grad is None else parameter.grad + total

    def is_reduced_now(self, name: str) -> bool:
        """Whether `.grad` of a parameter shows its gradients after this backward."""
        from fsdpx.unit import unit_of

        path = name.split(".")
        module = self.both.model.layers[int(path[1])] if path[0] == "layers" else self.both.model
        unit = unit_of(module)
        assert unit is not None
        if unit.group.num_replicas == 1:
            return unit.zero.reduces_now
        return unit.zero.reduces_over_replicas_now

    def say(self) -> None:
        model, value = self.both.model, self.random.random() < 0.6
        setters = (model.set_requires_gradient_sync, model.set_is_last_backward)
        self.random.choice(setters)(value)

    def say_replicas(self) -> None:
        self.both.model.set_requires_all_reduce(self.random.random() < 0.5)

    def keep(self) -> None:
        layer = self.random.choice(self.both.model.layers)
        setters = (layer.set_reshard_after_forward, layer.set_reshard_after_backward)
        self.random.choice(setters)(self.random.random() < 0.5)

    def unshard(self) -> None:
        layer = self.random.choice(self.both.model.layers)
        layer.unshard(async_op=self.random.random() < 0.5)
        if self.random.random() < 0.5:
            layer.reshard()

    def evaluate(self) -> None:
        assert self.both.eval_error(self.next_batch()) <= LIMIT

    def step(self) -> None:
        if not self.both.has_waiting:
            self.both.step()

    def zero_grad(self) -> None:
        set_to_none = self.random.random() < 0.5
        self.both.zero_grad(set_to_none)
        for gradient in self.waiting.values():
            gradient.zero_()
        if set_to_none:
            self.waiting.clear()

    def zero_grad_of_the_model(self) -> None:
        self.both.model.zero_grad()
        self.both.reference.zero_grad()
        self.waiting.clear()

    def edit(self) -> None:
        with torch.no_grad():
            for model in (self.both.model, self.both.reference):
                for parameter in model.layers[1].parameters():
                    parameter.mul_(0.9)

    def edit_whole(self) -> None:
        import fsdpx

        with fsdpx.full_parameters(self.both.model), torch.no_grad():
            self.both.model.head.weight.mul_(0.9)
        with torch.no_grad():
            self.both.reference.head.weight.mul_(0.9)

    def freeze(self) -> None:
        index, value = self.random.randrange(3), self.random.random() < 0.6
        for model in (self.both.model, self.both.reference):
            model.layers[index].requires_grad_(value)

    def fail(self) -> None:
        """An exception in backward, and a new step."""
        hook = self.both.model.layers[1].register_forward_hook(raise_in_backward)
        loss = loss_of(self.both.model, batch(self.next_batch(), self.both.rank).requires_grad_())
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward()
        hook.remove()
        self.both.model.reset_iter_state()
        self.both.zero_grad()
        self.waiting.clear()

    # ---- All of it

    def run(self) -> None:
        calls: list[tuple[Callable[[], None], int]] = [
            (self.backward, 8),
            (self.say, 3),
            (self.say_replicas, 2),
            (self.keep, 2),
            (self.unshard, 1),
            (self.evaluate, 2),
            (self.step, 2),
            (self.zero_grad, 2),
            (self.zero_grad_of_the_model, 1),
            (self.edit, 1),
            (self.edit_whole, 1),
            (self.freeze, 1),
            (self.fail, 1),
        ]
        names, weights = zip(*calls, strict=True)
        for _ in range(NUM_CALLS):
            (call,) = self.random.choices(names, weights)
            self.done.append(call.__name__)
            call()
            error = self.both.grad_error()
            assert error <= LIMIT, f"gradients off by {error:.1e} after {self.done}"
        error = self.both.weight_error()
        assert error <= LIMIT, f"weights off by {error:.1e} after {self.done}"


def raise_in_backward(module: Any, args: Any, output: Tensor) -> None:
    def fail(grad: Tensor) -> None:
        raise ValueError("on purpose")

    output.register_hook(fail)


def run_loop(rank: int, world_size: int, seed: int, options: dict[str, Any]) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    choose = random.Random(seed)
    stages = [choose.randint(1, 3) for _ in range(4)]
    if world_size == 4:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    loop = Loop(Beside(rank, world_size, stages, prefetch=choose.randint(0, 2), **options), seed)
    loop.run()


@pytest.mark.parametrize("comm", ["shm", "c10d"])
@pytest.mark.parametrize("seed", [0, 1, 156])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_random_loop(world_size: int, seed: int, comm: str) -> None:
    run_ranks(world_size, run_loop, seed, {"comm": comm})
