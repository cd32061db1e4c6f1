"""Clipping by the norm of all gradients, sharded or not."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from .mesh import ShardGroup
from .parameter import ShardedTensor, collectives
from .unit import units


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales gradients so that the norm of all of them together is at most `max_norm`; collective.

    `torch.nn.utils.clip_grad_norm_` does the same for sharded parameters of one dtype; this one
    also takes parameters of several dtypes, and such that are not sharded (ignored ones): these
    count once, by the mean over ranks of their norms' powers (for inf: the largest), so the result
    is the same on all ranks even where their gradients differ.

    Args:
        parameters: The whole model, or parameters. Give the model where it has replicas (HSDP) and
            ignored parameters: only the model knows all ranks.
        max_norm: Limit.
        norm_type: Any number, or inf.
        error_if_nonfinite: Whether to raise if the norm is inf or NaN; on all ranks.

    Returns:
        The norm before scaling, a scalar in float32 (float64 if a gradient is), on all ranks alike.

    Source of the formula: torch.nn.utils.clip_grad_norm_.
    """
    ranks = None
    if isinstance(parameters, nn.Module):
        ranks = next((unit.group for unit in units(parameters)), None)
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    tensors = list(dict.fromkeys(parameters))
    sharded = [p for p in tensors if isinstance(p, ShardedTensor)]
    plain = [p for p in tensors if not isinstance(p, ShardedTensor)]
    groups = _groups(ranks, sharded)
    norm_type = float(norm_type)
    norms = [_norm(_gradients(sharded), norm_type)]
    if plain:  # not: if they have gradients, which may differ from rank to rank
        norm = _norm(_gradients(plain), norm_type)
        norms.append(_over_ranks(norm, norm_type, groups, tensors[0].device))
    total = _combine([norm for norm in norms if norm is not None], norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the {norm_type}-norm of the gradients is {total.item()}, so they "
            "can't be clipped"
        )
    _scale(_gradients(sharded), total, max_norm)
    _scale(_gradients(plain), total, max_norm)
    return total


def _groups(ranks: ShardGroup | None, sharded: list[ShardedTensor]) -> list[collectives.Group]:
    """The groups over which parameters that are not sharded are averaged, one after the other."""
    if ranks is not None:
        return [ranks.process_group, ranks.replicate_group]
    return [next((p._spec.group for p in sharded), None)]


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _norm(gradients: list[torch.Tensor], order: float) -> torch.Tensor | None:
    """The norm of all gradients as one vector; None of none."""
    if not gradients:
        return None
    wide = any(gradient.dtype == torch.float64 for gradient in gradients)
    dtype = torch.float64 if wide else torch.float32
    device = gradients[0].device
    norms = [n.to(device) for n in torch._foreach_norm(gradients, order, dtype=dtype)]
    return _combine(norms, order)


def _combine(norms: list[torch.Tensor], order: float) -> torch.Tensor:
    if not norms:
        return torch.tensor(0.0, device="cpu")
    dtype = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    stacked = torch.stack([norm.to(norms[0].device, dtype) for norm in norms])
    total: torch.Tensor = torch.linalg.vector_norm(stacked, order)
    return total


def _over_ranks(
    norm: torch.Tensor | None, order: float, groups: list[collectives.Group], device: torch.device
) -> torch.Tensor:
    """One norm for all ranks of what each of them holds."""
    value = torch.zeros((), dtype=torch.float64, device=device)
    if norm is not None:
        value.copy_(norm)
    for group in groups:
        if group is None:
            continue
        if math.isinf(order):
            sign = math.copysign(1, order)
            value = collectives.all_reduce_max(value.reshape(1) * sign, group)[0] * sign
        else:
            power = collectives.all_reduce(value**order, "sum", group)
            value = (power / torch.distributed.get_world_size(group)) ** (1 / order)
    return value if norm is not None and norm.dtype == torch.float64 else value.float()


def _scale(gradients: list[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    if gradients:
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for device in {gradient.device for gradient in gradients}:
            here = [gradient for gradient in gradients if gradient.device == device]
            torch._foreach_mul_(here, factor.to(device))
