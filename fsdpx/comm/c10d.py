"""The communicator over any torch process group: pack, one collective of bytes, unpack."""

from __future__ import annotations

import ctypes
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from ..errors import CommTimeout
from .communicator import DeviceBytes


def connect(group: dist.ProcessGroup, *, timeout: float) -> _C.Communicator:
    """A communicator on a group of its own with the ranks of `group`. Collective.

    Its own, because the worker thread issues collectives in an order that the user's thread, which
    may issue others on `group`, does not know.
    """
    own = dist.new_group(
        ranks=dist.get_process_group_ranks(group),
        timeout=timedelta(seconds=min(timeout, 10 * 365 * 24 * 3600)),
        backend=_cpu_backend(group),
        use_local_synchronization=True,
    )
    assert isinstance(own, dist.ProcessGroup)
    calls = _Calls(own, timeout)
    return _C.exchange_communicator(
        "c10d", own.rank(), own.size(), calls.all_gather, calls.all_to_all
    )


def connect_on_device(
    group: dist.ProcessGroup,
    surroundings: tuple[_C.Stream, _C.Communicator, _C.Stream, float],
    stream: torch.cuda.Stream,
    timeout: float,
) -> _C.Communicator:
    """The same for tensors on a GPU: collectives are enqueued on `stream`. Collective.

    Args:
        group: Whose backend for CUDA tensors is used.
        surroundings: The native stream, control, its stream, and the time limit.
        stream: The stream of the collectives.
        timeout: In seconds.

    Raises:
        RuntimeError: The group has no backend for CUDA tensors.
    """
    own = dist.new_group(
        ranks=dist.get_process_group_ranks(group),
        timeout=timedelta(seconds=min(timeout, 10 * 365 * 24 * 3600)),
        use_local_synchronization=True,
    )
    assert isinstance(own, dist.ProcessGroup)
    calls = _DeviceCalls(own, stream)
    return _C.exchange_on_device(*surroundings, calls.all_gather, calls.all_to_all)


def high_priority_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of torch's pool, above the one that computes."""
    make: Any = torch.cuda.Stream  # has no types
    stream: torch.cuda.Stream = make(device, priority=-1)
    return stream


def _cpu_backend(group: dist.ProcessGroup) -> str | None:
    """None: the default group's backends serve CPU tensors. Otherwise gloo, which always does."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return "gloo"
    return None


class _Calls:
    """The two collectives of bytes, on addresses. Every dtype works on every backend as uint8."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self._group = group
        self._timeout = timeout

    def all_gather(self, send: int, recv: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        begin = time.monotonic()
        try:
            output = _bytes_at(recv, nbytes * self._group.size())
            self._group._allgather_base(output, _bytes_at(send, nbytes)).wait()
        except RuntimeError as error:
            raise self._explain(error, begin) from None

    def all_to_all(self, send: int, recv: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        begin = time.monotonic()
        total = nbytes * self._group.size()
        try:
            self._group.alltoall_base(_bytes_at(recv, total), _bytes_at(send, total), [], []).wait()
        except RuntimeError as error:
            raise self._explain(error, begin) from None

    def _explain(self, error: RuntimeError, begin: float) -> RuntimeError:
        """Backends have no type of their own for a passed time limit; the clock tells."""
        if time.monotonic() - begin >= 0.9 * self._timeout:
            return CommTimeout(f"no answer of some rank within {self._timeout} s ({error})")
        return RuntimeError(f"{error} (a rank may have left)")


class _DeviceCalls:
    """The two collectives of bytes on GPU addresses, behind what is on a stream."""

    def __init__(self, group: dist.ProcessGroup, stream: torch.cuda.Stream) -> None:
        self._group = group
        self._stream = stream

    def _tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return DeviceBytes(address, nbytes).tensor(self._stream.device)

    def all_gather(self, send: int, recv: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        with torch.cuda.stream(self._stream):
            output = self._tensor(recv, nbytes * self._group.size())
            self._group._allgather_base(output, self._tensor(send, nbytes)).wait()

    def all_to_all(self, send: int, recv: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        total = nbytes * self._group.size()
        with torch.cuda.stream(self._stream):
            tensors = (self._tensor(recv, total), self._tensor(send, total))
            self._group.alltoall_base(*tensors, [], []).wait()


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    buffer: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8)
