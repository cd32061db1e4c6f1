"""The same training without sharding, in one process that loops over the ranks' batches.

Gradients of a rank are added up over its micro-batches, then the ranks' sums are added in rank
order and divided by their number: the order in which the sharded run adds, so that in fp32 on up to
two ranks every bit is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from model import next_byte_loss
from torch import nn
from torch.func import functional_call

Batch = tuple[torch.Tensor, torch.Tensor]


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, learning_rate: float, clip: float
) -> None:
    """Clips the gradients and takes an optimizer step: the same code, sharded or not."""
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()


class Reference:
    """A whole copy of a model, trained beside the sharded one.

    Args:
        model: Before it is sharded; it is copied.
        make_optimizer: Called with the copy's parameters.
        compute_dtype: Dtype to cast the parameters to in forward.
        clip: Largest gradient norm; 0 for no limit.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        compute_dtype: torch.dtype,
        clip: float,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = make_optimizer(list(self.model.parameters()))
        self.compute_dtype = compute_dtype
        self.clip = clip

    def loss(self, batch: Batch) -> torch.Tensor:
        cast = {name: p.to(self.compute_dtype) for name, p in self.model.named_parameters()}
        return next_byte_loss(functional_call(self.model, cast, (batch[0],)), batch[1])

    def compute_gradients(self, batches: Sequence[Sequence[Batch]]) -> float:
        """Puts the mean gradient of `batches[rank][micro]` into `.grad`; returns the mean loss."""
        parameters = list(self.model.parameters())
        sums: list[torch.Tensor] | None = None
        losses = []
        for of_rank in batches:
            self.optimizer.zero_grad()
            for micro in of_rank:
                loss = self.loss(micro)
                (loss / len(of_rank)).backward()
                losses.append(loss.item())
            gradients = [p.grad for p in parameters if p.grad is not None]
            sums = gradients if sums is None else torch._foreach_add(sums, gradients)
        assert sums is not None
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total / len(batches)
        return sum(losses) / len(losses)

    @torch.no_grad()
    def whole_batch_loss(self, batches: Sequence[Sequence[Batch]]) -> float:
        """The loss of all batches as one big one, which adds up in another order."""
        flat = [micro for of_rank in batches for micro in of_rank]
        inputs = torch.cat([inputs for inputs, _ in flat])
        return self.loss((inputs, torch.cat([targets for _, targets in flat]))).item()

    def step(self, learning_rate: float) -> None:
        update(self.model, self.optimizer, learning_rate=learning_rate, clip=self.clip)
