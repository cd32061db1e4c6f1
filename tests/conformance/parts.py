"""Models, losses and comparisons that the cases share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdpx import fully_shard

LIMIT = 1e-5  # absolute, on numbers of order one

Loss = Callable[[nn.Module, Tensor], Tensor]
Grads = dict[str, Tensor | None]


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded (collective if it is)."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def small_mlp() -> nn.Sequential:
    """Linear(6, 8), ReLU, Linear(8, 5), always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def batch_of(rank: int, num_rows: int = 4) -> Tensor:
    """The inputs of a rank, (num_rows, 6)."""
    return torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(100 + rank))


def mean_square(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def shard_linears(model: nn.Module, **options: Any) -> Any:
    """Makes every linear layer a unit, and then the model."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model:
            fully_shard(module, **options)
    return fully_shard(model, **options)


def backward_of_all_ranks(
    model: nn.Module, world_size: int, loss: Loss = mean_square, *, step: int = 0
) -> None:
    """Backward of the mean loss over all ranks' batches, on an unsharded model."""
    losses = [loss(model, batch_of(rank + step)) for rank in range(world_size)]
    (torch.stack(losses).sum() / world_size).backward()


def grads_of(model: nn.Module) -> Grads:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def reference_grads(model: nn.Module, world_size: int, loss: Loss = mean_square) -> Grads:
    """Gradients of the mean loss over all ranks' batches, taken on a copy of the model."""
    replica = copy.deepcopy(model)
    backward_of_all_ranks(replica, world_size, loss)
    return grads_of(replica)


def assert_close(actual: Tensor, expected: Tensor, what: str, limit: float = LIMIT) -> None:
    """Equal shapes, and no element off by more than the limit."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
    if expected.numel():
        error = (actual - expected).abs().max().item()
        assert error <= limit, f"{what}: off by {error:.2e}"


def assert_grads(model: nn.Module, expected: Grads, limit: float = LIMIT) -> None:
    """The model's gradients are those; a gradient of zeros is as good as none."""
    for name, parameter in model.named_parameters():
        grad = None if parameter.grad is None else whole(parameter.grad)
        wanted = expected[name]
        if grad is None or wanted is None:
            present = [g for g in (grad, wanted) if g is not None]
            assert all(g.abs().max() == 0 for g in present), f"{name}: a gradient is missing"
        else:
            assert_close(grad, wanted, f"gradient of {name}", limit)


def assert_weights(model: nn.Module, reference: nn.Module, limit: float = LIMIT) -> None:
    """The model's weights are those of the reference."""
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(whole(parameter.detach()), expected[name].detach(), name, limit)


class Pair:
    """A sharded model and an unsharded copy of it that are trained alike."""

    def __init__(
        self, model: nn.Module, shard: Callable[..., Any] = shard_linears, **options: Any
    ) -> None:
        self.reference = copy.deepcopy(model)
        self.model = model
        shard(model, **options)
        self.both = (self.model, self.reference)
        self.optimizers: list[torch.optim.Optimizer] = []

    def optimize(self, make: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        """Gives each of the two an optimizer of its trainable parameters."""
        for each in self.both:
            trained = [parameter for parameter in each.parameters() if parameter.requires_grad]
            self.optimizers.append(make(trained, **options))

    def backward(
        self, rank: int, world_size: int, loss: Loss = mean_square, *, step: int = 0
    ) -> None:
        """One backward of each, on this rank's batch and on all ranks' batches."""
        loss(self.model, batch_of(rank + step)).backward()
        backward_of_all_ranks(self.reference, world_size, loss, step=step)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def zero_grad(self) -> None:
        for each in self.both:
            each.zero_grad()

    def assert_grads(self, limit: float = LIMIT) -> None:
        assert_grads(self.model, grads_of(self.reference), limit)

    def assert_weights(self, limit: float = LIMIT) -> None:
        assert_weights(self.model, self.reference, limit)


def check_one_step(
    model: nn.Module,
    rank: int,
    world_size: int,
    *,
    loss: Loss = mean_square,
    shard: Callable[..., Any] = shard_linears,
    limit: float = LIMIT,
    **options: Any,
) -> None:
    """Gradients of one sharded step are the mean over the ranks."""
    expected = reference_grads(model, world_size, loss)
    shard(model, **options)
    loss(model, batch_of(rank)).backward()
    assert_grads(model, expected, limit)
