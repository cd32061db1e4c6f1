"""Shards in CPU memory (offload) on their way to the GPU, and gradients on their way back.

[Note: Staging] Collectives of an offloaded unit work on copies in GPU memory, which the copy
engines make on the communication stream, right before or after the collective. (Kernels that read
CPU memory themselves would hold the GPU's processors for as long as the bus takes.) The copies'
memory belongs to that stream: torch gives it to the stream's next copies as soon as the tensor is
dropped, in the stream's order. So one unit's share is there at a time, however far the host is
ahead.

The host knows no order with a stream. Where it may touch shards or gradients again it waits, by
`wait_on_host`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from . import _C
from .comm import Communicator
from .errors import CommTimeout
from .torch_private import outside_of_transforms

_GLANCE = 0.1  # seconds, after which a waiting host looks whether the ranks went apart


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


def wait_on_host(comm: Communicator, event: _C.Event, unit: str) -> None:
    """Blocks until what `event` ends has run on the GPU; raises what broke the communicator.

    Args:
        comm: On whose stream it runs.
        event: Of a collective, or of copies.
        unit: Whose; for the message.
    """
    begin = time.monotonic()
    while not event.ended_within(_GLANCE):
        _C.check_usable(comm.native)
        if time.monotonic() - begin > comm.timeout:
            raise CommTimeout(
                f"fsdpx: unit '{unit}': a collective did not end within {comm.timeout:g} s: a rank "
                "may be stuck; if it is only slow, raise the process group's time limit"
            )
    _C.check_usable(comm.native)
