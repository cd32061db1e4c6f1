"""The communicator over any torch process group: pack, one collective of bytes, unpack."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from ..dtypes import torch_dtype
from ..errors import CommTimeout
from .choose import LONGEST_SECONDS
from .communicator import DeviceBytes


def connect(
    group: dist.ProcessGroup, *, timeout: float
) -> tuple[_C.Communicator, Callable[[], None]]:
    """A communicator on a group of its own with the ranks of `group`, and how to leave that at the
    end. Collective.

    Its own, because the worker thread issues collectives in an order that the user's thread, which
    may issue others on `group`, does not know.
    """
    own = dist.new_group(
        ranks=dist.get_process_group_ranks(group),
        timeout=timedelta(seconds=min(timeout, LONGEST_SECONDS)),
        backend=_cpu_backend(group),
        use_local_synchronization=True,
    )
    assert isinstance(own, dist.ProcessGroup)
    calls, word = _Calls(own, timeout), _Whereabouts(own)
    native = _C.exchange_communicator(
        "c10d",
        own.rank(),
        own.size(),
        calls.all_gather,
        calls.all_to_all,
        word.tell,
        word.ask,
    )
    return native, calls.leave


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
        timeout=timedelta(seconds=min(timeout, LONGEST_SECONDS)),
        use_local_synchronization=True,
    )
    assert isinstance(own, dist.ProcessGroup)
    calls = _DeviceCalls(own, stream)
    return _C.exchange_on_device(
        *surroundings, calls.all_gather, calls.reduce_scatter, calls.all_reduce
    )


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
        self._own: dist.ProcessGroup | None = group
        self._size = group.size()
        self._timeout = timeout
        self._running = False
        self._pid = os.getpid()

    def all_gather(self, send: int, recv: int, nbytes: int) -> None:
        if nbytes > 0:
            output, own = _bytes_at(recv, nbytes * self._size), _bytes_at(send, nbytes)
            self._run(lambda group: group._allgather_base(output, own))

    def all_to_all(self, send: int, recv: int, nbytes: int) -> None:
        if nbytes > 0:
            total = nbytes * self._size
            output, own = _bytes_at(recv, total), _bytes_at(send, total)
            self._run(lambda group: group.alltoall_base(output, own, [], []))

    def _run(self, issue: Callable[[dist.ProcessGroup], dist.Work]) -> None:
        group = self._own
        if group is None:
            raise RuntimeError("the communicator is closed")
        begin = time.monotonic()
        self._running = True
        try:
            issue(group).wait()
        except RuntimeError as error:
            raise self._explain(error, begin) from None
        finally:
            self._running = False

    def leave(self) -> None:
        """Ends the group with its threads: these let go of tensors late, which is fatal when the
        interpreter is gone. A collective that still waits for others would hold this up, and a
        forked child has no such threads: then it stays.
        """
        group, self._own = self._own, None
        if group is not None and not self._running and os.getpid() == self._pid:
            with contextlib.suppress(ValueError):  # the user has ended all groups
                dist.destroy_process_group(group)

    def _explain(self, error: RuntimeError, begin: float) -> RuntimeError:
        """Backends have no type of their own for a passed time limit; the clock tells."""
        said = str(error).split(". ")[0]  # gloo goes on with general advice
        if time.monotonic() - begin >= 0.9 * self._timeout:
            return CommTimeout(
                f"no answer of some rank within {self._timeout:g} s; if it is only slow, raise the "
                f"time limit of the process group ({said})"
            )
        return RuntimeError(f"a rank has left or gave up ({said})")


class _Whereabouts:
    """Where ranks are when collectives have failed, told through the group's store."""

    PATIENCE = 1.0  # seconds for the others to fail as well

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._store = group.get_group_store()

    def tell(self, sequence: int, text: str) -> None:
        self._store.set(self._key(self._rank), f"{sequence} {text}")

    def ask(self, sequence: int) -> str:
        """What the others tell of collective `sequence` or of the time right before it."""
        heard: dict[int, str] = {}
        deadline = time.monotonic() + self.PATIENCE
        while True:
            for rank in {*range(self._size)} - {self._rank, *heard}:
                text = self._told_by(rank, sequence)
                if text is not None:
                    heard[rank] = text
            if len(heard) == self._size - 1 or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        silent = "is not in a collective (it computes, raised or has ended)"
        others = [r for r in range(self._size) if r != self._rank]
        return "Ranks: " + "; ".join(f"{r} {heard.get(r, silent)}" for r in others) + "."

    def _told_by(self, rank: int, sequence: int) -> str | None:
        if not self._store.check([self._key(rank)]):
            return None
        when, _, text = self._store.get(self._key(rank)).decode().partition(" ")
        return text if int(when) >= sequence - 1 else None

    @staticmethod
    def _key(rank: int) -> str:
        return f"fsdpx/whereabouts/{rank}"


class _DeviceCalls:
    """The collectives on GPU addresses, in place, behind what is on a stream."""

    def __init__(self, group: dist.ProcessGroup, stream: torch.cuda.Stream) -> None:
        self._group = group
        self._stream = stream

    def _tensor(self, address: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        flat = DeviceBytes(address, numel * dtype.itemsize).tensor(self._stream.device)
        return flat.view(dtype)

    def all_gather(self, address: int, nbytes: int) -> None:
        with torch.cuda.stream(self._stream):
            flat = self._tensor(address, torch.uint8, nbytes * self._group.size())
            own = flat.narrow(0, nbytes * self._group.rank(), nbytes)
            self._group._allgather_base(flat, own).wait()

    def reduce_scatter(self, address: int, code: int, numel: int) -> None:
        with torch.cuda.stream(self._stream):
            flat = self._tensor(address, torch_dtype(code), numel * self._group.size())
            own = flat.narrow(0, numel * self._group.rank(), numel)
            self._group._reduce_scatter_base(own, flat, dist.ReduceScatterOptions()).wait()

    def all_reduce(self, address: int, code: int, numel: int) -> None:
        with torch.cuda.stream(self._stream):
            self._group.allreduce([self._tensor(address, torch_dtype(code), numel)]).wait()


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    buffer: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8)
