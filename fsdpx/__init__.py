"""Sharded data parallelism for PyTorch: flat units, fused native collectives, parameters as views.

`fully_shard` shards a module in place; everything else here is optional. docs/architecture.md says
how it works.
"""

# isort: off
from ._native import check_native_build

check_native_build()  # before anything loads the native module
# isort: on

from typing import TYPE_CHECKING, Any

from . import (
    attributes,
    backward_inputs,
    changes,
    comm,
    gradients,
    hooks,
    memory,
    module,
    ops,
    order,
    progress,
    residency,
    schedule,
    unit,
)
from .clip import clip_grad_norm_
from .describe import Description, describe
from .errors import CommTimeout, DesyncError
from .flat_parameters import FlatParameter, flat_parameters
from .full_parameters import full_parameters
from .fully_shard import fully_shard
from .module import (
    FSDPModule,
    UnshardHandle,
    no_sync,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from .parameter import ShardedTensor
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .sync import sync_module_states, unequal_states
from .timeline import record_timeline
from .torch_private import leave_to_eager
from .verify import verify

if TYPE_CHECKING:
    from .fsdp1 import (
        BackwardPrefetch,
        CPUOffload,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        MixedPrecision,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictType,
    )


def __getattr__(name: str) -> Any:
    if name in __all__:  # torch.distributed.fsdp takes half a second to import
        from . import fsdp1

        return getattr(fsdp1, name)
    raise AttributeError(f"module 'fsdpx' has no attribute '{name}'")


leave_to_eager(
    attributes,
    backward_inputs,
    changes,
    gradients,
    hooks,
    memory,
    module,
    order,
    progress,
    residency,
    schedule,
    unit,
)
leave_to_eager(comm, comm.c10d, comm.choose, comm.communicator, comm.shm)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CommTimeout",
    "Description",
    "DesyncError",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardedTensor",
    "ShardingStrategy",
    "StateDictType",
    "UnshardHandle",
    "clip_grad_norm_",
    "comm",
    "describe",
    "flat_parameters",
    "full_parameters",
    "fully_shard",
    "no_sync",
    "ops",
    "record_timeline",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "sync_module_states",
    "unequal_states",
    "verify",
]
