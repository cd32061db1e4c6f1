"""Loops around models as users write them: several models, uneven batches, frozen parts, hooks."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdpx
from fsdpx import unit as unit_module

from .parts import (
    Pair,
    assert_close,
    assert_grads,
    assert_weights,
    backward_of_all_ranks,
    batch_of,
    grads_of,
    mean_square,
    shard_linears,
    small_mlp,
)
from .registry import case


@case("zero_grad between two backwards of one graph")
def retained_graph_with_zero_grad_between(rank: int, world_size: int) -> None:
    pair = Pair(small_mlp())
    y = pair.model(batch_of(rank))
    y.pow(2).mean().backward(retain_graph=True)
    pair.model.zero_grad()
    y.sum().backward()
    backward_of_all_ranks(pair.reference, world_size, lambda model, x: model(x).sum())
    pair.assert_grads()


@case("several forwards, then their backwards in either order, without synchronisation")
def two_forwards_without_synchronisation(rank: int, world_size: int) -> None:
    def all_three(model: nn.Module, x: Tensor) -> Tensor:
        losses = [mean_square(model, x * factor) for factor in (1, 2, 3)]
        return torch.stack(losses).sum()

    for order in (1, -1):
        pair = Pair(small_mlp())
        x = batch_of(rank)
        with fsdpx.no_sync(pair.model):
            losses = [mean_square(pair.model, x), mean_square(pair.model, x * 2)]
            for loss in losses[::order]:
                loss.backward()
        mean_square(pair.model, x * 3).backward()
        backward_of_all_ranks(pair.reference, world_size, all_three)
        pair.assert_grads()


@case("layers freeze and unfreeze in turns, under weight decay: frozen ones moved")
def freezing_in_turns_under_weight_decay(rank: int, world_size: int) -> None:
    for kept in (True, False):
        pair = Pair(small_mlp(), reshard_after_forward=not kept)
        pair.optimizers = [
            torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5) for each in pair.both
        ]
        for step in range(5):
            for each in pair.both:
                each[0].requires_grad_(step not in (1, 2))
                each[2].weight.requires_grad_(step != 3)
            pair.backward(rank, world_size, step=step)
            if step == 4:
                for each in pair.both:
                    each[2].bias.grad = None
            pair.step()
        pair.assert_weights()


@case("an optimizer gets the layers that are unfrozen later")
def unfrozen_layers_in_a_new_group(rank: int, world_size: int) -> None:
    model = small_mlp()
    model[0].requires_grad_(False)
    pair = Pair(model)
    pair.optimize(torch.optim.AdamW, lr=0.1)
    for step in range(3):
        pair.backward(rank, world_size, step=step)
        pair.step()
        if step == 0:
            for each, optimizer in zip(pair.both, pair.optimizers, strict=True):
                each[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(each[0].parameters())})
    pair.assert_weights()


@case("ranks generate different numbers of tokens: a hang, without whole parameters")
def generation_of_different_lengths(rank: int, world_size: int) -> None:
    pair = Pair(small_mlp())
    with torch.no_grad(), fsdpx.full_parameters(pair.model):
        for number in range(2 + 3 * rank):
            x = batch_of(number)
            assert_close(pair.model(x), pair.reference(x), "output")
    pair.backward(rank, world_size)
    pair.assert_grads()


@case("ranks evaluate different numbers of batches: a hang")
def evaluation_of_different_lengths(rank: int, world_size: int) -> None:
    model = shard_linears(small_mlp())

    def evaluate_and_train() -> None:
        with torch.no_grad():
            for number in range(3 + 2 * rank):
                model(batch_of(number))
        mean_square(model, batch_of(rank)).backward()

    with pytest.raises(fsdpx.DesyncError, match=f"rank {1 - rank} does all_gather of unit"):
        evaluate_and_train()
    model.reset_iter_state()
    mean_square(model, batch_of(rank)).backward()


@case("a rank's last batch is smaller, or has no rows")
def uneven_batches(rank: int, world_size: int) -> None:
    for sizes in ((4, 1), (4, 0)):
        pair = Pair(small_mlp())
        pair.model(batch_of(rank, sizes[rank])).pow(2).sum().backward()
        for each in range(world_size):
            (pair.reference(batch_of(each, sizes[each])).pow(2).sum() / world_size).backward()
        pair.assert_grads()


@case("stages of a pipeline are roots of their own, with detached tensors between them")
def several_roots(rank: int, world_size: int) -> None:
    second = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    for stage in (3, 2, 1):
        pairs = [Pair(each, zero_stage=stage) for each in (small_mlp(), second)]
        for step in range(2):
            x = batch_of(rank + step)
            loss = mean_square(pairs[1].model, pairs[0].model(x))
            hidden = pairs[0].model(x)
            middle = hidden.detach().requires_grad_()
            mean_square(pairs[1].model, middle).backward()
            hidden.backward(middle.grad)
            loss.backward()
            for each in range(world_size):
                y = pairs[0].reference(batch_of(each + step))
                (2 * mean_square(pairs[1].reference, y) / world_size).backward()
            for pair in pairs:
                pair.assert_grads()
        second = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def adversarial_step(
    models: list[nn.Module], optimizers: list[torch.optim.Optimizer], batches: list[Tensor]
) -> None:
    """A step of the critic, then one of the generator while the critic is frozen."""
    generator, critic = models
    for x in batches:
        fake = generator(x).detach()
        ((critic(x).mean() - critic(fake).mean()) / len(batches)).backward()
    optimizers[1].step()
    optimizers[1].zero_grad()
    critic.requires_grad_(False)
    for x in batches:
        (critic(generator(x)).mean() / len(batches)).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    critic.requires_grad_(True)


@case("a generator and a critic that train through each other")
def adversarial_pair(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    pairs = [
        Pair(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))) for outputs in (6, 1)
    ]
    for pair in pairs:
        pair.optimize(torch.optim.Adam, lr=0.05, eps=1e-2)
    for step in range(3):
        for side in range(2):
            ranks = range(world_size) if side else [rank]
            adversarial_step(
                [pair.both[side] for pair in pairs],
                [pair.optimizers[side] for pair in pairs],
                [batch_of(each + step) for each in ranks],
            )
    for pair in pairs:
        pair.assert_weights()


class Trainee(nn.Module):
    """Trains by a method that calls its layers itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))

    def training_step(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x))).pow(2).mean()


@case("a training step that calls the layers, not the model")
def training_step_beside_forward(rank: int, world_size: int) -> None:
    pair = Pair(Trainee())
    pair.optimize(torch.optim.SGD, lr=0.1)
    for step in range(4):
        loss = (lambda model, x: model.training_step(x)) if step % 2 else mean_square
        pair.backward(rank, world_size, loss, step=step)
        pair.assert_grads()
        pair.step()
    pair.assert_weights()


class PartlyWithoutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.a(x)
        return self.b(self.a(x) + target) + self.b(target).detach()


@case("a unit that runs with and without gradients in one forward")
def parts_without_gradients(rank: int, world_size: int) -> None:
    pair = Pair(PartlyWithoutGradients())
    for step in range(3):
        pair.zero_grad()
        pair.backward(rank, world_size, step=step)
        pair.assert_grads()


@case("optimizers that step inside of backward, one for each parameter")
def optimizers_in_hooks(rank: int, world_size: int) -> None:
    pair = Pair(small_mlp())

    def make(parameter: Tensor) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

    def step_and_drop(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for parameter in pair.model.parameters():
        optimizer = make(parameter)
        parameter.register_post_accumulate_grad_hook(
            lambda _, optimizer=optimizer: step_and_drop(optimizer)
        )
    optimizers = [make(parameter) for parameter in pair.reference.parameters()]
    for step in range(3):
        pair.backward(rank, world_size, step=step)
        for each in optimizers:
            step_and_drop(each)
        pair.assert_weights()


@case("a second model on the same ranks goes while the first one trains on")
def one_of_two_models_goes(rank: int, world_size: int) -> None:
    others: list[nn.Module] = [shard_linears(small_mlp())]
    pair = Pair(small_mlp())
    for step in range(4):
        for other in others:
            mean_square(other, batch_of(rank)).backward()
        pair.zero_grad()
        pair.backward(rank, world_size, step=step)
        pair.assert_grads()
        if step == 1:
            del other
            others.clear()
            gc.collect()


class Uneven(nn.Module):
    """Units of unequal size, with pauses of random length between them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.draw = random.Random(seed)
        widths = (3, 40, 5, 60, 1, 20)
        self.layers = nn.ModuleList()
        for width in widths:
            self.layers += [nn.Linear(6, width), nn.Linear(width, 6)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            time.sleep(self.draw.random() * 1e-3)
            x = torch.tanh(layer(x))
        return x


@case("a gathered buffer is freed or used again while it is still read")
def freed_memory_is_poisoned(rank: int, world_size: int) -> None:
    unit_module.POISON = True
    try:
        for kind in ("shm", "c10d"):
            pair = Pair(Uneven(rank), comm=kind)
            for step in range(6):
                pair.zero_grad()
                pair.backward(rank, world_size, step=step)
                pair.assert_grads(limit=0.0)
    finally:
        unit_module.POISON = False


@case("the user edits gradients, and assigns others")
def edited_gradients(rank: int, world_size: int) -> None:
    pair = Pair(small_mlp())
    pair.optimize(torch.optim.SGD, lr=0.1)
    for step in range(3):
        pair.backward(rank, world_size, step=step)
        for each in pair.both:
            torch.manual_seed(step)
            for parameter in each.parameters():
                gradient: Any = parameter.grad
                gradient.mul_(0.5)
                parameter.grad = gradient * 2 - parameter.detach() * 0.1
                parameter.grad.add_(torch.randn_like(gradient), alpha=0.1)
        pair.step()
        for each in pair.both:
            for parameter in each.parameters():
                parameter.grad = torch.zeros_like(parameter)
    pair.assert_weights()


@case("a forward that an adapter library has replaced, before or after wrapping")
def replaced_forward(rank: int, world_size: int) -> None:
    for before in (True, False):
        model, reference = small_mlp(), small_mlp()
        for each in (model, reference):
            plain = each.forward
            if each is model and not before:
                shard_linears(model)
            each.forward = lambda x, plain=plain: plain(x) * 2
        if before:
            shard_linears(model)
        mean_square(model, batch_of(rank)).backward()
        backward_of_all_ranks(reference, world_size)
        assert_grads(model, grads_of(reference))
        assert_weights(model, reference)
