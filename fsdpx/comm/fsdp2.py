"""Our communicators under torch's own `fully_shard`.

    from fsdpx.comm.fsdp2 import AllGather, ReduceScatter

    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_custom_all_gather(AllGather())
            module.set_custom_reduce_scatter(ReduceScatter())

Sums are then taken in rank order, in float32. Interfaces: torch.distributed.fsdp's `AllGather` and
`ReduceScatter`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_api as api

from fsdpx.torch_private import storage_use_count

from . import create
from .communicator import Communicator, Work

_SCALES: dict[Any, Any] = {
    dist.ReduceOp.SUM: lambda size: 1.0,
    dist.ReduceOp.AVG: lambda size: 1.0 / size,
}


class AllGather(api.AllGather):
    """Gathers of one module (or of many, one after the other).

    Args:
        group: Of the mesh dimension that shares the module; the default group if None.
        kind: Of the communicator; see `fsdpx.comm.create`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, kind: str = "auto") -> None:
        self._comm: Communicator = create(group, kind=kind)
        self._buffers: list[torch.Tensor] = []

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory that peers can write; the same again once nobody holds a tensor in it.

        All ranks hold the same tensors at the same time, since they run the same program.
        """
        shape = [int(each) for each in size]
        num_bytes = math.prod(shape) * dtype.itemsize
        free = [b for b in self._buffers if b.numel() == num_bytes and storage_use_count(b) == 1]
        if free:
            buffer = free[0]
        else:
            buffer = self._comm.allocate(num_bytes, torch.uint8)
            self._buffers.append(buffer)
        return buffer.view(dtype).view(shape)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gathers `input_tensor`, which may be this rank's part of `output_tensor`."""
        # Peers write to the output while this rank's part is read.
        shard = input_tensor.detach().clone()
        work = self._comm.all_gather(shard, output_tensor.detach())
        return _ended(work, async_op)


class ReduceScatter(api.ReduceScatter):
    """Reductions of one module (or of many, one after the other).

    Args:
        group: Of the mesh dimension that shares the module; the default group if None.
        kind: Of the communicator; see `fsdpx.comm.create`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, kind: str = "auto") -> None:
        self._comm: Communicator = create(group, kind=kind)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty([int(each) for each in size], dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduces into `output_tensor`.

        Raises:
            ValueError: If `op` is neither a sum nor an average.
        """
        if op not in _SCALES:
            raise ValueError(
                f"fsdpx.comm.fsdp2.ReduceScatter: {op} is not supported: call "
                "set_force_sum_reduction_for_comms(True) on the module"
            )
        scale = _SCALES[op](self._comm.size)
        work = self._comm.reduce_scatter([input_tensor], output_tensor, scale=scale)
        return _ended(work, async_op)


def _ended(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None
