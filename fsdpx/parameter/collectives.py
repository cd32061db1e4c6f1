"""The collectives that sharded parameters run by themselves, outside of a unit's schedule.

Whole reads (`full_tensor`) and whole-tensor reductions (norms, sums) go through the process group,
on the caller's thread; nothing else in this package communicates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from fsdpx.parameter.spec import Spec
from fsdpx.torch_private import device_types

Group = dist.ProcessGroup | None


def group_of(spec: Spec) -> Group:
    """The group to reduce over; None where one rank holds everything."""
    if spec.group is None and len(spec.ranges) > 1:
        raise RuntimeError(
            f"parameter {spec.name!r} is shared by {len(spec.ranges)} ranks, but was loaded "
            "outside of their process group, so its whole value can't be computed here; copy it "
            "into a model's own parameter first (param.copy_(...), load_state_dict)"
        )
    return spec.group


def within_reach(value: torch.Tensor, group: Group) -> torch.Tensor:
    """`value`, or a copy where `group` can communicate it: a group that has NCCL alone takes shards
    in CPU memory by way of the current GPU.
    """
    if group is None:
        return value
    known = device_types(group)
    return value if value.device.type in known or "cuda" not in known else value.cuda()


def all_reduce(value: torch.Tensor, operation: str, group: Group) -> torch.Tensor:
    """Reduces over `group`, in place where possible.

    Args:
        value: Plain tensor, overwritten.
        operation: ``"sum"``, ``"max"`` or ``"min"``.
        group: None for no communication.
    """
    if group is None:
        return value
    if type(value) is not torch.Tensor:
        # torch.compile is tracing: only a functional collective gets its wait into the graph.
        import torch.distributed._functional_collectives as functional

        reduced = functional.all_reduce(value, operation, group)
        return functional.wait_tensor(reduced)  # type: ignore[no-any-return,no-untyped-call]
    operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    sent = within_reach(value, group)
    dist.all_reduce(sent, op=operations[operation], group=group)
    return value if sent is value else value.copy_(sent)


def all_reduce_max(values: torch.Tensor, group: Group) -> torch.Tensor:
    """The largest of each value over `group`, NaN if any rank has NaN.

    Backends disagree on what the maximum of a number and NaN is, so NaNs travel as flags.

    Args:
        values: 1-D, floating or integer.
        group: None for no communication.
    """
    if group is None:
        return values
    if not values.is_floating_point():
        return all_reduce(values.clone(), "max", group)
    nan = values.isnan()
    sent = torch.cat([values.masked_fill(nan, -torch.inf), nan.to(values.dtype)])
    largest, is_nan = all_reduce(sent, "max", group).chunk(2)
    return largest.masked_fill(is_nan > 0, torch.nan)


def gather_whole(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The whole parameter from every rank's piece; a collective over the spec's group.

    Args:
        local: This rank's piece, 1-D. Any dtype: bytes travel.
        spec: Of the parameter.

    Returns:
        A new contiguous tensor of the global shape.
    """
    if group_of(spec) is None and not local.is_meta:
        # A copy here too: what the caller gets must not depend on the number of ranks.
        return local.clone().view(spec.shape)
    if local.is_meta:
        return local.new_empty(spec.shape)
    sent = within_reach(local, spec.group)
    whole = sent.new_empty(spec.numel)
    owners = [rank for rank in _owners(spec) if spec.ranges[rank][1] > spec.ranges[rank][0]]
    if 2 * len(owners) >= len(spec.ranges):
        _all_gather(sent, whole, spec, owners)
    else:
        # Few ranks hold it: a padded all-gather would cost memory for all the others.
        _broadcast(sent, whole, spec, owners)
    return whole.view(spec.shape).to(local.device)


def _owners(spec: Spec) -> range:
    owners = getattr(spec.ranges, "owners", None)
    return owners if owners is not None else range(len(spec.ranges))


def _all_gather(local: torch.Tensor, whole: torch.Tensor, spec: Spec, owners: list[int]) -> None:
    longest = max(spec.ranges[rank][1] - spec.ranges[rank][0] for rank in owners)
    padded = local
    if local.numel() < longest:
        padded = local.new_zeros(longest)
        padded[: local.numel()] = local
    out = local.new_empty(len(spec.ranges) * longest)
    # The name changed between torch versions; the old one warns in the new version.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    # Bytes, because not every backend knows every dtype.
    gather(out.view(torch.uint8), padded.contiguous().view(torch.uint8), group=spec.group)
    for rank in owners:
        begin, end = spec.ranges[rank]
        whole[begin:end] = out[rank * longest : rank * longest + end - begin]


def _broadcast(local: torch.Tensor, whole: torch.Tensor, spec: Spec, owners: list[int]) -> None:
    whole[spec.begin : spec.end] = local
    works = []
    for rank in owners:
        begin, end = spec.ranges[rank]
        part = whole[begin:end].view(torch.uint8)
        works.append(dist.broadcast(part, group=spec.group, group_src=rank, async_op=True))
    for work in works:
        if work is not None:
            work.wait()


def broadcast_number(
    number: Any, spec: Spec, device: torch.device, dtype: torch.dtype
) -> bool | int | float:
    """What the owner of a parameter has, on every rank of its group.

    Args:
        number: On the owner; anything elsewhere.
        spec: Of the parameter.
        device: Where to send it from.
        dtype: Of the tensor that it was read from.
    """
    group = group_of(spec)
    if group is None:
        return number  # type: ignore[no-any-return]
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    kind = torch.tensor([0.0 if number is None else float(isinstance(number, bool))])
    sent = within_reach(torch.zeros(1, dtype=wide, device=device), group)
    if spec.rank == spec.owner:
        sent.fill_(number)
    both = torch.cat([sent, kind.to(sent)])
    dist.broadcast(both, group=group, group_src=spec.owner)
    value, is_bool = both.tolist()
    return bool(value) if is_bool else value


def broadcast_object(value: Any, group: Group) -> Any:
    """What the first process of all passed, on every rank of `group` (the default one if None)."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def broadcast_whole(value: torch.Tensor, group: Group) -> None:
    """Overwrites `value` by what the first process of all has."""
    if value.numel():
        dist.broadcast(value.view(-1).view(torch.uint8), src=0, group=group)


def broadcast_from_first(
    values: Iterable[torch.Tensor], group: Group, device: torch.device
) -> None:
    """Overwrites each tensor by what the first rank of `group` has; shapes must be alike.

    Args:
        values: Plain tensors of any dtypes and strides, on any devices.
        group: None for no communication.
        device: On which the group can communicate.
    """
    if group is None:
        return
    works: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for value in values:
        if value.numel():
            dense = value.to(device).contiguous()
            part = dense.view(-1).view(torch.uint8)
            work = dist.broadcast(part, group=group, group_src=0, async_op=True)
            works.append((work, value, dense))
    for work, value, dense in works:
        work.wait()
        if dense is not value:
            value.copy_(dense)


def gather_objects(value: Any, group: Group) -> list[Any]:
    """What every rank of `group` passed, in rank order."""
    if group is None:
        return [value]
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
