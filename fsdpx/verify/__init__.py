"""A sharded model beside an unsharded reference: where do gradients and weights differ?

    report = fsdpx.verify(make_model, make_batch)   # in one process, or on all ranks of a group
    print(report)
    report.check(1e-5)

or `python -m fsdpx.verify my_module:make_model my_module:make_batch`, also under torchrun.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..fully_shard import fully_shard

__all__ = ["ParameterReport", "Report", "verify"]

Loss = Callable[[nn.Module, Any], Tensor]
Optimize = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class ParameterReport:
    """The largest differences of one parameter over all steps.

    Relative to the largest element of the reference's tensor or, where that is larger, to a
    hundredth of the largest of all parameters: sums that cancel (the gradient of a bias before a
    batch norm) are rounding errors through and through.
    """

    name: str
    shape: tuple[int, ...]
    gradient: float = 0.0
    weight: float = 0.0


@dataclass
class Report:
    """What `verify` found; alike on all ranks.

    Attributes:
        parameters: By name as in the unsharded model.
        norm: The largest relative difference of the gradients' norm, as clipping returns it.
        loss: The largest relative difference of this rank's loss.
        num_ranks: Of the group.
    """

    parameters: dict[str, ParameterReport]
    norm: float = 0.0
    loss: float = 0.0
    num_ranks: int = 1
    num_steps: int = field(default=0)

    @property
    def worst(self) -> float:
        """The largest difference of all."""
        each = [max(p.gradient, p.weight) for p in self.parameters.values()]
        return max([*each, self.norm, self.loss], key=_rank_of)

    def check(self, limit: float = 1e-5) -> None:
        """Raises if anything differs by more than `limit`, naming the parameters.

        Raises:
            AssertionError: With one line for each of them.
        """
        lines = [
            f"{p.name} {p.shape}: gradient off by {p.gradient:.1e}, weight by {p.weight:.1e}"
            for p in self.parameters.values()
            if not (p.gradient <= limit and p.weight <= limit)
        ]
        for what, value in (("gradient norm", self.norm), ("loss", self.loss)):
            if not value <= limit:
                lines.append(f"{what}: off by {value:.1e}")
        if lines:
            raise AssertionError(
                f"fsdpx.verify: the sharded model differs from the unsharded one by more than "
                f"{limit:.1e}:\n" + "\n".join(lines)
            )

    def __str__(self) -> str:
        width = max([len(name) for name in self.parameters] + [9])
        lines = [f"{'parameter':{width}}  {'shape':>16}  {'gradient':>9}  {'weight':>9}"]
        for p in self.parameters.values():
            shape = "x".join(map(str, p.shape)) or "()"
            lines.append(f"{p.name:{width}}  {shape:>16}  {p.gradient:9.1e}  {p.weight:9.1e}")
        lines.append(f"gradient norm off by {self.norm:.1e}, loss by {self.loss:.1e}")
        lines.append(f"{self.num_steps} steps on {self.num_ranks} ranks; relative differences")
        return "\n".join(lines)


def verify(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[int, int], Any],
    *,
    shard: Callable[[nn.Module], Any] = fully_shard,
    loss_fn: Loss | None = None,
    optimizer: Optimize | None = None,
    max_norm: float = 1.0,
    num_steps: int = 2,
    seed: int = 0,
) -> Report:
    """Trains a sharded model and an unsharded copy of it side by side, and compares.

    The reference runs on every rank: it takes the mean of the gradients of all ranks' batches, one
    after the other, each with buffers and random numbers of its own. So a whole copy of the model,
    its gradients and its optimizer's state must fit.

    Args:
        model_fn: Makes the model, unsharded; called after `torch.manual_seed(seed)`.
        batch_fn: Makes the batch of (rank, step), the same on whichever rank it is called.
        shard: Shards the model in place, or returns a sharded one.
        loss_fn: (model, batch) to a scalar. By default the mean square of the model's output, or
            the output itself if it is a scalar.
        optimizer: Makes an optimizer of a list of parameters; by default SGD with momentum.
        max_norm: Gradients are clipped to this norm.
        num_steps: Steps to train.
        seed: Of the model's initial values and of each (rank, step)'s random numbers.

    Returns:
        The differences, by parameter name.

    Raises:
        ValueError: A parameter of the one model is not in the other.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    size = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(seed)
    reference = model_fn()
    model = copy.deepcopy(reference)
    sharded = shard(model)
    trial = _Trial(model if sharded is None else sharded, loss_fn or _mean_square, seed)
    looped = _Trial(reference, trial.loss_fn, seed)
    report = Report(
        {name: ParameterReport(name, tuple(p.shape)) for name, p in looped.parameters.items()},
        num_ranks=size,
        num_steps=num_steps,
    )
    trial.match(looped)
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    optimizers = [make(each.trained()) for each in (trial, looped)]
    buffers: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for step in range(num_steps):
        loss = trial.backward(batch_fn(rank, step), rank, step)
        losses = []
        for each in range(size):
            looped.swap_buffers(buffers[each])
            losses.append(looped.backward(batch_fn(each, step), each, step, scale=1 / size))
            buffers[each] = looped.copy_buffers()
        report.loss = max(report.loss, _difference(loss, losses[rank]), key=_rank_of)
        _compare(report, trial, looped, "gradient")
        norms = [
            _whole(nn.utils.clip_grad_norm_(each.trained(), max_norm)) for each in (trial, looped)
        ]
        report.norm = max(report.norm, _difference(*norms), key=_rank_of)
        for each_optimizer in optimizers:
            each_optimizer.step()
            each_optimizer.zero_grad()
        _compare(report, trial, looped, "weight")
    return report


class _Trial:
    """One of the two models."""

    def __init__(self, model: nn.Module, loss_fn: Loss, seed: int) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.seed = seed
        self.parameters = {_plain(name): p for name, p in model.named_parameters()}
        self._first_buffers = self.copy_buffers()

    def match(self, other: _Trial) -> None:
        if missing := self.parameters.keys() ^ other.parameters.keys():
            raise ValueError(
                f"fsdpx.verify: only one of the two models has parameters {sorted(missing)}: "
                "model_fn must make the model that shard shards"
            )

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters.values() if p.requires_grad]

    def backward(self, batch: Any, rank: int, step: int, scale: float = 1.0) -> Tensor:
        """Adds `scale` times the gradients of one batch; returns the loss."""
        torch.manual_seed(hash((self.seed, rank, step)) & 0x7FFFFFFF)
        loss = self.loss_fn(self.model, batch)
        torch.autograd.backward(loss * scale)
        return loss.detach().float()

    def copy_buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def swap_buffers(self, values: dict[str, Tensor]) -> None:
        """Puts the buffers of another rank in place; those of the beginning if it has none."""
        values = values or self._first_buffers
        for name, buffer in self.model.named_buffers():
            buffer.copy_(values[name])


def _compare(report: Report, trial: _Trial, looped: _Trial, what: str) -> None:
    with torch.no_grad():
        expected = {n: p.grad if what == "gradient" else p for n, p in looped.parameters.items()}
        floor = max((_largest(tensor) for tensor in expected.values()), default=0.0) / 100
        for name, row in report.parameters.items():
            ours: Any = trial.parameters[name]
            ours = _whole(ours.grad if what == "gradient" else ours)
            difference = _difference(ours, expected[name], floor)
            setattr(row, what, max(getattr(row, what), difference, key=_rank_of))


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _largest(tensor: Tensor | None) -> float:
    return float(tensor.detach().abs().max()) if tensor is not None and tensor.numel() else 0.0


def _difference(actual: Tensor | None, expected: Tensor | None, floor: float = 0.0) -> float:
    """Relative to the largest element of `expected`, or to `floor`; no gradient is as good as
    zeros.
    """
    scale = max(_largest(expected), floor) or 1.0
    if actual is None or expected is None:
        return max(_largest(actual), _largest(expected)) / scale
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    return _largest(actual - expected) / scale


def _rank_of(value: float) -> float:
    """Orders differences; one that is no number is the largest."""
    return value if value == value else float("inf")


def _mean_square(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        output = model(**batch)
    elif isinstance(batch, tuple):
        output = model(*batch)
    else:
        output = model(batch)
    leaves = pytree.tree_leaves(output)
    tensors = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
    if not tensors:
        raise ValueError("fsdpx.verify: the model's output has no floating tensor: give loss_fn")
    return tensors[0] if not tensors[0].dim() else tensors[0].float().pow(2).mean()


def _plain(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)
