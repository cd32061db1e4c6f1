"""A communicator and its worker: what `fsdpx.comm.create` returns."""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _C
from ..dtypes import dtype_code, has_arithmetic

CLOSE_SECONDS = 10.0
PEER_SECONDS = 1.0

_CPU = torch.device("cpu")


class Work:
    """A collective that was issued."""

    def __init__(self, event: _C.Event, limit: float) -> None:
        self._event = event
        self._limit = limit

    def query(self) -> bool:
        """Whether it has ended, well or not."""
        return self._event.query()

    def wait(self, timeout: float | None = None) -> None:
        """Returns when what the caller does next may use the results, and raises what went wrong.

        On CPU it blocks until the collective has ended, without the GIL; on a GPU the current
        stream will wait.

        Args:
            timeout: In seconds. By default only the limits of the collective itself apply.

        Raises:
            DesyncError: Ranks did different things.
            CommTimeout: Other ranks did not come in time, or `timeout` has passed.
        """
        self._event.wait(self._limit if timeout is None else timeout)


class InFlight:
    """Keeps what running collectives use: their tensors, and actions for when all have ended."""

    def __init__(self) -> None:
        # With each event, what is used until then, and what is to be done after it.
        self._running: deque[tuple[_C.Event, Any, list[Callable[[], None]]]] = deque()

    def add(self, event: _C.Event, used: Any = None) -> None:
        """Keeps `used` alive until `event`, the latest one, has ended."""
        self.prune()
        self._running.append((event, used, []))

    def when_idle(self, action: Callable[[], None]) -> None:
        """Runs `action` when nothing that runs now can still use what it destroys."""
        self.prune()
        if self._running:
            self._running[-1][2].append(action)
        else:
            action()

    def prune(self) -> None:
        """Lets go of what collectives that have ended used."""
        while self._running and self._running[0][0].query():
            _, _, actions = self._running.popleft()
            for action in actions:
                action()


class Communicator:
    """Collectives of one group of ranks, run by one stream in the order of their issue: on CPU a
    worker thread, on a GPU a CUDA stream.

    Attributes:
        kind: "shm" or "c10d"; on a GPU "nccl", "c10d" or "local" (one rank).
        device: Of the tensors.
        reason: Why it is of this kind, in words.
        rank: This rank's number in the group.
        size: Number of ranks.
        native: The native communicator.
        stream: The native stream that runs the collectives.
        control: The communicator of the same ranks' CPUs; on CPU this one.
        recorder: The native trace recorder; off until `recorder.enable(True)`.
        in_flight: Keeps what running collectives use.
    """

    def __init__(
        self,
        native: _C.Communicator,
        reason: str,
        timeout: float,
        *,
        stream: _C.Stream | None = None,
        beside: Communicator | None = None,
        device: torch.device = _CPU,
        control: Communicator | None = None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self.native = native
        self.kind: str = native.kind
        self.reason = reason
        self.rank: int = native.rank
        self.size: int = native.size
        self.timeout = timeout
        self._owns_stream = beside is None
        self.stream: _C.Stream = (
            beside.stream if beside else stream or _C.WorkerStream("fsdpx-comm")
        )
        self.device = device
        self.control = control or self
        self.torch_stream: torch.cuda.Stream | None = None  # the same stream as torch knows it
        self.recorder = _C.Recorder()
        self.in_flight = InFlight()
        self.closed = False
        self._regions: list[tuple[int, int, int]] = []  # (address, bytes, number), ascending
        self._empty: int | None = None  # the region of tensors without elements
        owned = self.stream if self._owns_stream else None
        self.leave = leave  # when the interpreter exits, after closing
        self._finalizer = weakref.finalize(self, _end, native, owned)
        self._finalizer.atexit = False  # fsdpx.comm closes what is open then

    def __repr__(self) -> str:
        return f"Communicator(kind={self.kind!r}, rank={self.rank}, size={self.size})"

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory that peers can write: what `all_gather` wants as `out`.

        Collective: all ranks allocate the same, in the same order. Waits for what was
        issued before.

        Args:
            numel: Number of elements.
            dtype: Their type.

        Returns:
            A zeroed tensor of shape (numel,). The memory goes with its last view.
        """
        if numel < 0:
            raise ValueError(f"fsdpx: numel is {numel}; it must not be negative")
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=self.device)
        nbytes = numel * dtype.itemsize
        number = self.allocate_region(nbytes)
        view: Any = self.native.region_view(number, nbytes)
        region = (self.native.region_data(number), nbytes, number)
        if self.device.type == "cuda":
            view = DeviceBytes(region[0], nbytes, view)
            self.stream.enqueue(lambda: None).wait(self._patience)  # it is zeroed there
        bisect.insort(self._regions, region)
        weakref.finalize(view, self._forget_region, region).atexit = False
        if self.device.type == "cuda":
            flat: torch.Tensor = view.tensor(self.device)
            return flat.view(dtype)
        return torch.frombuffer(view, dtype=dtype)

    def allocate_region(self, nbytes: int) -> int:
        """The number of a new region of `native`. Collective."""
        try:
            return self.native.allocate(nbytes)
        except RuntimeError:  # on all ranks
            if self.device.type == "cpu":
                raise
            torch.cuda.empty_cache()  # what torch keeps for itself may be enough
            return self.native.allocate(nbytes)

    def _forget_region(self, region: tuple[int, int, int]) -> None:
        self._regions.remove(region)
        self.release(region[2])

    def release(self, number: int) -> None:
        """Gives a region of `native` back once nothing that was issued can still use it."""
        if (mark := self.stream.mark()) is not None:
            self.in_flight.add(mark)
        self.in_flight.when_idle(lambda: self.native.release(number))

    def all_gather(self, shard: torch.Tensor, out: torch.Tensor) -> Work:
        """Every rank's shard, end to end in rank order, in every rank's `out`.

        Args:
            shard: This rank's part, contiguous, shape (n,) or any of n elements.
            out: size * n elements in memory from `allocate`, at the same place on all ranks. Its
                dtype may differ from the shard's: the values are cast on the way.

        Returns:
            The issued work. `out` may be read after `wait()`; neither tensor may be written before.
        """
        _check_flat("shard", shard, self.device)
        _check_flat("out", out, self.device)
        if out.numel() != self.size * shard.numel():
            raise ValueError(
                f"fsdpx: out has {out.numel()} elements; {self.size} ranks with shards of "
                f"{shard.numel()} need {self.size * shard.numel()}"
            )
        _check_cast("shard", shard.dtype, "out", out.dtype)
        region, offset = self._place_of(out)
        self.stream.follow(self.stream.mark())
        row = (
            shard.data_ptr(),
            dtype_code(shard.dtype),
            shard.numel(),
            0,
            dtype_code(out.dtype),
        )
        event = self.native.all_gather(
            self.stream,
            _C.GatherPlan("all_gather", [row]),
            region,
            offset,
            recorder=self.recorder,
            keep_alive=(shard, out),
        )
        return Work(event, self._patience)

    def _place_of(self, out: torch.Tensor) -> tuple[int, int]:
        if out.numel() == 0:
            return self._empty_region(), 0
        address = out.data_ptr()
        index = bisect.bisect_right(self._regions, address, key=lambda r: r[0]) - 1
        if index >= 0:
            base, nbytes, number = self._regions[index]
            if address + out.nbytes <= base + nbytes:
                return number, address - base
        raise ValueError(
            "fsdpx: out is not in memory that peers can write: make it with allocate()"
        )

    def _empty_region(self) -> int:
        if self._empty is None:
            self._empty = self.native.allocate(0)
        return self._empty

    def reduce_scatter(
        self,
        tensors: Sequence[torch.Tensor],
        shard: torch.Tensor,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        wire_dtype: torch.dtype | None = None,
    ) -> Work:
        """This rank's part of the sum over ranks of `tensors`, laid end to end.

        Sums are taken in rank order, in float32 (float64 if a float64 takes part), so all runs and
        all kinds of communicator give the same bits.

        Args:
            tensors: Contiguous tensors of one dtype with at most size * n elements in all; what
                is missing counts as zeros.
            shard: Receives elements [rank * n, (rank + 1) * n) of the sum; shape (n,) or any of n
                elements, contiguous. Its dtype may differ.
            scale: Factor of the sum.
            accumulate: Add to what is in `shard` instead of replacing it.
            wire_dtype: In which the values travel; by default the tensors' own.

        Returns:
            The issued work. No tensor may be touched before its `wait()`.
        """
        _check_flat("shard", shard, self.device)
        dtype = tensors[0].dtype if tensors else shard.dtype
        spans, offset = [], 0
        for number, tensor in enumerate(tensors):
            _check_flat(f"tensors[{number}]", tensor, self.device)
            if tensor.dtype != dtype:
                raise ValueError(f"fsdpx: tensors[{number}] is {tensor.dtype}, the first {dtype}")
            spans.append((tensor.data_ptr(), tensor.numel(), offset))
            offset += tensor.numel()
        if offset > self.size * shard.numel():
            raise ValueError(
                f"fsdpx: the tensors have {offset} elements; {self.size} shards of "
                f"{shard.numel()} hold only {self.size * shard.numel()}"
            )
        wire = dtype if wire_dtype is None else wire_dtype
        _check_cast("the tensors", dtype, "wire_dtype", wire)
        _check_cast("wire_dtype", wire, "shard", shard.dtype)
        segment = _C.ReduceSegment(
            spans,
            dtype_code(dtype),
            dtype_code(wire),
            shard.numel(),
            shard.data_ptr(),
            dtype_code(shard.dtype),
            scale,
            accumulate,
        )
        op = _C.ReduceOp("reduce_scatter", [segment])
        event = self.native.reduce_scatter(
            self.stream, op, recorder=self.recorder, keep_alive=(list(tensors), shard)
        )
        return Work(event, self._patience)

    def all_reduce(self, tensor: torch.Tensor, *, scale: float = 1.0) -> Work:
        """The sum over ranks, in rank order, times `scale`, in place on every rank.

        Args:
            tensor: A contiguous floating-point tensor, alike on all ranks.
            scale: Factor of the sum.

        Returns:
            The issued work.
        """
        _check_flat("tensor", tensor, self.device)
        if not has_arithmetic(tensor.dtype):
            raise ValueError(f"fsdpx: {tensor.dtype} can't be added; only floating types can")
        self.stream.follow(self.stream.mark())
        event = self.native.all_reduce(
            self.stream,
            "all_reduce",
            tensor.data_ptr(),
            dtype_code(tensor.dtype),
            tensor.numel(),
            scale,
            recorder=self.recorder,
            keep_alive=tensor,
        )
        return Work(event, self._patience)

    def barrier(self) -> Work:
        """Ends when every rank has issued it."""
        return Work(self.native.barrier(self.stream, "barrier"), self._patience)

    def drain(self, seconds: float) -> bool:
        """Lets the calling thread wait for what was issued; False after `seconds`."""
        return self.stream.enqueue(lambda: None).ended_within(seconds)

    def leave_word(self, text: str) -> None:
        """Lets ranks that wait for this one in vain say why: `text` goes into their errors."""
        if not self.closed:
            self.control.native.leave_word(self.control.stream, text)

    def close(self, *, seconds: float = CLOSE_SECONDS) -> None:
        """Finishes what was issued, for at most `seconds`, and leaves the group.

        Peers that still wait for this rank get an error that says so. Idempotent. Memory from
        `allocate` stays valid on this rank as long as it is used.
        """
        if self.closed:
            return
        with contextlib.suppress(RuntimeError):  # the stream's owner may be closed already
            self.leave_word("left")
            if not self._owns_stream:
                self.drain(seconds)
        self.closed = True
        self._finalizer.detach()
        if self._owns_stream:
            self.stream.close(seconds)
        self.native.close()  # a collective that still waits for others ends with an error now
        if self.device.type == "cuda":  # whose memory goes when peers do not map it any more
            _C.wait_for_peers(self.native, min(seconds, PEER_SECONDS))
        if self._owns_stream:
            self.stream.close(1.0)
        if self.control is not self:
            self.control.close(seconds=seconds)
        from . import _forget

        _forget(self)

    @property
    def _patience(self) -> float:
        # The native waits have limits; several may follow each other, in several collectives.
        return float("inf")


def _end(native: _C.Communicator, stream: _C.Stream | None) -> None:
    """What is left of `close` for a communicator that nobody uses any more; waits for nothing."""
    native.close()
    if stream is not None:
        with contextlib.suppress(RuntimeError):  # it may be this thread that ends
            stream.close(0.0)


class DeviceBytes:
    """Memory of a GPU as `torch.as_tensor` takes it.

    Args:
        address: Of its first byte.
        nbytes: How many.
        owner: Kept as long as a tensor over the memory.
    """

    def __init__(self, address: int, nbytes: int, owner: Any = None) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    def tensor(self, device: torch.device) -> torch.Tensor:
        """A uint8 tensor over the memory."""
        return torch.as_tensor(self, device=device)


def _check_flat(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device.type != device.type or not tensor.is_contiguous():
        where = "CPU" if device.type == "cpu" else str(device)
        raise ValueError(
            f"fsdpx: {name} must be a contiguous {where} tensor, got {tensor.device.type} with "
            f"strides {tensor.stride()}"
        )


def _check_cast(what: str, dtype: torch.dtype, target: str, to: torch.dtype) -> None:
    if dtype != to and not (has_arithmetic(dtype) and has_arithmetic(to)):
        raise ValueError(f"fsdpx: {what} of {dtype} can't be cast to {target} of {to}")
