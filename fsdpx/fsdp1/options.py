"""What FSDP1's arguments mean for a unit; what has no meaning here is refused by name."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)

from fsdpx.mesh import ShardGroup, resolve_mesh, shard_group
from fsdpx.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdpx.unit import UnitOptions

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
# NO_SHARD is stage 2 of one rank that shares with nobody.
ZERO_STAGES = {
    ShardingStrategy.FULL_SHARD: 3,
    ShardingStrategy.SHARD_GRAD_OP: 2,
    ShardingStrategy.NO_SHARD: 2,
    ShardingStrategy.HYBRID_SHARD: 3,
    ShardingStrategy._HYBRID_SHARD_ZERO2: 2,
}


def check_type(name: str, value: Any, kind: type) -> None:
    """Raises a TypeError that names the argument, unless `value` is None or of `kind`."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(
            f"FullyShardedDataParallel: {name} must be a torch.distributed.fsdp.{kind.__name__} "
            f"or None, got {value!r}"
        )


def unit_options(
    strategy: ShardingStrategy, mixed: MixedPrecision | None, offload: CPUOffload | None
) -> UnitOptions:
    """The options of one wrapper's unit."""
    check_type("sharding_strategy", strategy, ShardingStrategy)
    check_type("mixed_precision", mixed, MixedPrecision)
    check_type("cpu_offload", offload, CPUOffload)
    mixed = mixed or MixedPrecision()
    if mixed.keep_low_precision_grads:
        raise NotImplementedError(
            "FullyShardedDataParallel: MixedPrecision(keep_low_precision_grads=True) is not "
            "supported: gradients have their parameter's dtype; convert the model before wrapping "
            "for low-precision gradients"
        )
    policy = MixedPrecisionPolicy(
        param_dtype=mixed.param_dtype, reduce_dtype=mixed.reduce_dtype, cast_forward_inputs=False
    )
    # reshard_after_forward None: in stage 3 the outermost wrapper stays gathered, as in FSDP1.
    offloads = CPUOffloadPolicy() if offload is not None and offload.offload_params else None
    return UnitOptions(policy, None, 1, "element", ZERO_STAGES[strategy], offloads)


def prefetches_in_backward(value: BackwardPrefetch | None) -> bool:
    """Whether backward gathers ahead: BACKWARD_POST promises the memory of not doing it."""
    check_type("backward_prefetch", value, BackwardPrefetch)
    return value is BackwardPrefetch.BACKWARD_PRE


def check_forward(module: nn.Module) -> None:
    """Raises if nothing could gather the module's parameters."""
    if not has_forward(module):
        raise ValueError(
            f"FullyShardedDataParallel: {type(module).__name__} has no forward: wrap its "
            "elements, or the module that holds it"
        )


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called."""
    forward = module.forward  # torch.compile gives instances one of their own
    return getattr(forward, "__func__", forward) is not nn.Module.forward


# ---- Ranks


def resolve_device(
    device_id: int | torch.device | str | None,
    mesh: DeviceMesh | None,
    module: nn.Module,
    *,
    offloads: bool = False,
) -> torch.device:
    """Where a wrapper's ranks compute: on the mesh's device, else on `device_id`, else where the
    module is.
    """
    _, device = resolve_mesh(mesh, "auto", module.parameters(), offloads=offloads)
    if device_id is None:
        return device
    given = torch.device("cuda", device_id) if isinstance(device_id, int) else device_id
    given = torch.device(given)
    if mesh is not None and given.type != device.type:
        raise ValueError(
            f"FullyShardedDataParallel: device_id={given} is not on the device_mesh's device "
            f"({device.type})"
        )
    if given.type not in ("cpu", "cuda") or (given.type == "cuda" and not _is_current(given)):
        raise ValueError(
            f"FullyShardedDataParallel: device_id={given} is not this rank's device: call "
            "torch.cuda.set_device first, or leave device_id out on CPU ranks"
        )
    if mesh is not None:
        return device
    return given if given.type == "cpu" else torch.device("cuda", torch.cuda.current_device())


def _is_current(device: torch.device) -> bool:
    if not torch.cuda.is_available():
        return False
    return device.index in (None, torch.cuda.current_device())


def resolve_ranks(
    strategy: ShardingStrategy, process_group: Any, mesh: DeviceMesh | None
) -> ShardGroup:
    """Which ranks share and which hold copies.

    Args:
        strategy: Hybrid ones need two groups: a pair (share, replicate), a 2-D mesh (replicate,
            share), or the ranks of one host (LOCAL_WORLD_SIZE) share.
        process_group: As given to the wrapper.
        mesh: As given to the wrapper; not both.
    """
    if process_group is not None and mesh is not None:
        raise ValueError("FullyShardedDataParallel: give process_group or device_mesh, not both")
    if strategy in HYBRID:
        return _hybrid(process_group, mesh)
    if isinstance(process_group, tuple):
        raise ValueError(
            f"FullyShardedDataParallel: two process groups need a hybrid strategy, not {strategy}"
        )
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f"FullyShardedDataParallel: {strategy} needs a 1-D device_mesh, got {mesh.ndim} "
            "dimensions; 2-D ones (replicate, share) are for HYBRID_SHARD"
        )
    if process_group is None:
        ranks, _ = resolve_mesh(mesh, "auto")
    else:
        ranks = shard_group(process_group, "auto")
    if strategy is ShardingStrategy.NO_SHARD and ranks.size > 1:
        return shard_group(_alone(), "auto", ranks.process_group)
    return ranks


def _hybrid(process_group: Any, mesh: DeviceMesh | None) -> ShardGroup:
    if mesh is None and process_group is None:
        mesh = _mesh_of_hosts()
    if mesh is not None:
        if mesh.ndim != 2:
            raise ValueError(
                "FullyShardedDataParallel: a hybrid strategy needs a 2-D device_mesh (replicate, "
                f"share), got {mesh.ndim} dimension(s)"
            )
        return resolve_mesh(mesh, "auto")[0]
    if not isinstance(process_group, tuple) or len(process_group) != 2:
        raise ValueError(
            "FullyShardedDataParallel: a hybrid strategy needs process_group=(share, replicate), "
            f"got {process_group!r}"
        )
    return shard_group(process_group[0], "auto", process_group[1])


# Made once for each group, which the entry keeps alive.
_made: dict[tuple[int, str], tuple[Any, Any]] = {}


def _alone() -> Any:
    """A group of this rank only."""
    world = dist.group.WORLD
    key = (id(world), "alone")
    if key not in _made:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        _made[key] = (world, group)
    return _made[key][1]


def _mesh_of_hosts() -> DeviceMesh:
    """Ranks of one host share, hosts hold copies; only its groups are of use."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not dist.is_initialized() or not local or dist.get_world_size() % local:
        raise ValueError(
            "FullyShardedDataParallel: a hybrid strategy needs process_group=(share, replicate), "
            "a 2-D device_mesh, or LOCAL_WORLD_SIZE (a divisor of the number of ranks) in the "
            "environment"
        )
    world = dist.group.WORLD
    key = (id(world), "hosts")
    if key not in _made:
        shape = (dist.get_world_size() // local, local)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        _made[key] = (world, mesh)
    made: DeviceMesh = _made[key][1]
    return made
