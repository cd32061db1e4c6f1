"""Shards in CPU memory (offload) on their way to the GPU, and gradients on their way back.

[Note: Staging] Collectives of an offloaded unit work on copies in GPU memory, which the copy
engines make on the communication stream, right before or after the collective. (Kernels that read
CPU memory themselves would hold the GPU's processors for as long as the bus takes.) The copies'
memory belongs to that stream: torch gives it to the stream's next copies as soon as the tensor is
dropped, in the stream's order. So one unit's share is there at a time, however far the host is
ahead.

The host knows no order with a stream. Where it may touch shards or gradients again it waits:
`Unit.wait_on_host`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from . import _C
from .comm import Communicator
from .torch_private import outside_of_transforms


def room_for(comm: Communicator, flat: torch.Tensor) -> torch.Tensor:
    """GPU memory for a flat tensor in CPU memory; for work on the communication stream only."""
    with outside_of_transforms(), torch.cuda.stream(comm.torch_stream):
        return torch.empty_like(flat, device=comm.device)


def copies(comm: Communicator, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same with the tensors' values, as they are when the communication stream comes to it."""
    with outside_of_transforms(), torch.cuda.stream(comm.torch_stream):
        made = [torch.empty_like(flat, device=comm.device) for flat in flats]
        for copy, flat in zip(made, flats, strict=True):
            copy.copy_(flat, non_blocking=True)
        return made


def bring_back(comm: Communicator, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> _C.Event:
    """Copies the second of each pair to the first, in CPU memory; returns the end of it."""
    with outside_of_transforms(), torch.cuda.stream(comm.torch_stream):
        for flat, copy in pairs:
            flat.copy_(copy, non_blocking=True)
    return comm.stream.enqueue(lambda: None)
