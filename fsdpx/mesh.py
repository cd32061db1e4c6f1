"""Which ranks share a unit, and which hold copies of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .comm.choose import timeout_of

# Of each group the smaller groups that this rank is in, by their size.
_smaller: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ShardGroup:
    """The ranks of a unit.

    Attributes:
        process_group: Of the ranks that share it. None for a single process without
            torch.distributed.
        rank: This rank in that group.
        size: Number of ranks that share it, D.
        kind: Communicator asked for; see `fsdpx.comm.create`.
        replicate_group: Of the ranks that hold the same share (HSDP); None without replicas.
        num_replicas: Number of those.
    """

    process_group: Any
    rank: int
    size: int
    kind: str
    replicate_group: Any = None
    num_replicas: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all ranks that share or hold copies."""
        replica = self.replicate_group
        return self.rank == 0 and (replica is None or dist.get_rank(replica) == 0)


def resolve_mesh(
    mesh: DeviceMesh | None,
    kind: str,
    parameters: Iterable[torch.Tensor] = (),
    *,
    offloads: bool = False,
) -> tuple[ShardGroup, torch.device]:
    """The group and the device of a mesh.

    Args:
        mesh: None: the default process group, or a single process. 1-D: its ranks share. 2-D:
            dimension 0 replicates, dimension 1 shares (HSDP).
        kind: Communicator to use.
        parameters: Without a mesh, the device is the current GPU if one of them is on a GPU, else
            CPU.
        offloads: Whether shards live in CPU memory: then the current GPU counts wherever the
            parameters are.

    Raises:
        ValueError: If the mesh is on another device than CPU or CUDA or has more than two
            dimensions.
    """
    if mesh is None:
        on_gpu = offloads and torch.cuda.is_available()
        on_gpu = on_gpu or any(parameter.is_cuda for parameter in parameters)
        device = _current_device("cuda" if on_gpu else "cpu")
        if not dist.is_initialized():
            return ShardGroup(None, 0, 1, kind), device
        return shard_group(dist.group.WORLD, kind), device
    if mesh.device_type not in ("cpu", "cuda"):
        raise ValueError(
            f"fully_shard: a mesh on {mesh.device_type} is not supported: only CPU and CUDA are"
        )
    device = _current_device(mesh.device_type)
    if mesh.ndim == 1:
        return shard_group(mesh.get_group(), kind), device
    if mesh.ndim == 2:
        return shard_group(mesh.get_group(1), kind, mesh.get_group(0)), device
    raise ValueError(
        f"fully_shard: the mesh has {mesh.ndim} dimensions; give one with 1 (share) or 2 "
        "(replicate, share)"
    )


def _current_device(kind: str) -> torch.device:
    """CPU, or the current GPU: the rank's own, as `torch.cuda.set_device` chose it."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def shard_group(group: Any, kind: str, replicate: Any = None) -> ShardGroup:
    """The ranks of `group` share; those of `replicate` (None: none do) hold copies."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    num_replicas = 1 if replicate is None else dist.get_world_size(replicate)
    if num_replicas == 1:
        replicate = None
    return ShardGroup(group, rank, size, kind, replicate, num_replicas)


def smaller_group(group: ShardGroup, size: int) -> ShardGroup:
    """The group of `size` neighbours that this rank is in among those that share; made at the first
    use, collectively among the neighbours.

    Args:
        group: The ranks that share.
        size: Divides their number.
    """
    known = _smaller.setdefault(group.process_group, {})
    if size not in known:
        first = group.rank // size * size
        ranks = dist.get_process_group_ranks(group.process_group)[first : first + size]
        limit = timedelta(seconds=timeout_of(group.process_group))
        known[size] = dist.new_group(ranks, timeout=limit, use_local_synchronization=True)
    return ShardGroup(known[size], group.rank % size, size, group.kind)
