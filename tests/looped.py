"""The reference of parity tests: one process that loops over the ranks' batches in rank order."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from models import Batch, loss_of
from torch import Tensor, nn

Grads = dict[str, Tensor | None]


class LoopedReference:
    """An unsharded model that trains on the batches of several ranks, with buffers for each.

    Args:
        model: Taken as it is; its parameters are the fp32 weights.
        world_size: Number of ranks to loop over.
        compute_dtype: Dtype in which forward and backward run; gradients are added in fp32.
    """

    def __init__(
        self, model: nn.Module, world_size: int, *, compute_dtype: torch.dtype | None = None
    ) -> None:
        self.model = model
        self.world_size = world_size
        self.compute_dtype = compute_dtype
        self.buffers = [
            {name: buffer.clone() for name, buffer in model.named_buffers()}
            for _ in range(world_size)
        ]
        self.losses: list[list[float]] = []

    def accumulate(self, micro_batches: Sequence[Sequence[Batch]], *, sync_each: bool) -> None:
        """Adds the mean gradients over ranks to the parameters' `.grad`.

        Args:
            micro_batches: For every micro-batch the batches of all ranks.
            sync_each: Whether to take the mean for each micro-batch or once, of each rank's sums.
        """
        if sync_each:
            for batches in micro_batches:
                self._add([self._rank_grads(rank, [batch]) for rank, batch in enumerate(batches)])
        else:
            by_rank = zip(*micro_batches, strict=True)
            self._add([self._rank_grads(rank, list(own)) for rank, own in enumerate(by_rank)])

    def _rank_grads(self, rank: int, batches: Sequence[Batch]) -> Grads:
        """The sums of one rank's gradients over its batches."""
        replica = self.model
        if self.compute_dtype is not None:
            replica = copy.deepcopy(self.model).to(self.compute_dtype)
        for name, buffer in replica.named_buffers():
            buffer.copy_(self.buffers[rank][name])
        total: Grads = {}
        losses = []
        for batch in batches:
            loss = loss_of(replica, self._cast(batch))
            losses.append(loss.item())
            trained = {n: p for n, p in replica.named_parameters() if p.requires_grad}
            grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            for name, grad in zip(trained, grads, strict=True):
                if grad is not None:
                    before = total.get(name)
                    total[name] = grad.float() if before is None else before + grad.float()
        self.losses.append(losses)
        for name, buffer in replica.named_buffers():
            self.buffers[rank][name].copy_(buffer)
        return total

    def _cast(self, batch: Batch) -> Batch:
        inputs, targets = batch
        if self.compute_dtype is not None and inputs.is_floating_point():
            inputs = inputs.to(self.compute_dtype)
        return inputs, targets

    def _add(self, by_rank: Sequence[Grads]) -> None:
        """Adds the ranks' gradients in rank order, then their mean to `.grad`."""
        for name, parameter in self.model.named_parameters():
            parts = [grads[name] for grads in by_rank if grads.get(name) is not None]
            if not parts:
                continue
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            mean = total * (1.0 / self.world_size)
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest element; not finite for NaN."""
    assert actual.shape == expected.shape
    if not expected.numel():
        return 0.0
    error = (actual - expected).abs().max().item()
    return error / max(1e-30, expected.abs().max().item()) if error else 0.0
