"""The native module. Addresses are integers (`tensor.data_ptr()`), dtypes are codes."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

torch_version: str

_Span = tuple[int, int, int]  # address (0: zeros), numel, offset

# ---- Kernels

def cast(
    src: int,
    from_dtype: int,
    dst: int,
    to_dtype: int,
    numel: int,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None: ...
def pack(
    srcs: Sequence[_Span],
    from_dtype: int,
    flat: int,
    to_dtype: int,
    flat_numel: int,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None: ...
def unpack(
    flat: int,
    from_dtype: int,
    dsts: Sequence[_Span],
    to_dtype: int,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None: ...
def reduce(
    srcs: Sequence[int],
    from_dtype: int,
    dst: int,
    to_dtype: int,
    numel: int,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None: ...
def norm_and_check(src: int, dtype: int, numel: int) -> tuple[float, bool]: ...

_AdamWShard = tuple[int, int, int, int, int, int, int, int]

def adamw(
    shard: _AdamWShard,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    maximize: bool = False,
) -> None: ...

# The CUDA passes, on a stream of the current device; without CUDA in the build they raise.
NORM_WORKSPACE_BYTES: int

def device_convert(
    pieces: Sequence[tuple[int, int, int]],  # address (0: zeros), destination, numel
    from_dtype: int,
    to_dtype: int,
    scale: float,
    accumulate: bool,
    stream: int,
) -> None: ...
def device_gather(
    pieces: Sequence[tuple[int, int, int]],  # address, numel, bytes after each peer's address
    peers: Sequence[int],
    from_dtype: int,
    to_dtype: int,
    stream: int,
) -> None: ...
def device_reduce(
    srcs: Sequence[int],
    from_dtype: int,
    dst: int,
    to_dtype: int,
    numel: int,
    scale: float,
    accumulate: bool,
    stream: int,
) -> None: ...
def device_norm_and_check(
    src: int, dtype: int, numel: int, workspace: int, out: int, stream: int
) -> None: ...
def device_adamw(
    shard: _AdamWShard,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float,
    maximize: bool,
    stream: int,
) -> None: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...

# ---- Streams and communicators

@final
class Instant:
    def __init__(self, ns: int) -> None: ...

@final
class Event:
    def query(self) -> bool: ...
    def wait(self, seconds: float) -> None: ...
    def ended_within(self, seconds: float) -> bool: ...

class Stream:
    def enqueue(self, task: Callable[[], object]) -> Event: ...
    def mark(self) -> Event | None: ...
    def marks_of_users(self, event: Event) -> list[Event]: ...
    def follow(self, mark: Event | None) -> None: ...
    def reached(self) -> Instant: ...
    def computed(self) -> Instant: ...
    def close(self, seconds: float) -> None: ...

@final
class WorkerStream(Stream):
    def __init__(self, name: str) -> None: ...

@final
class Recorder:
    def __init__(self) -> None: ...
    @property
    def enabled(self) -> bool: ...
    def enable(self, on: bool) -> None: ...
    def record(
        self,
        lane: str,
        unit: str,
        operation: str,
        issue: Instant | int,
        begin: Instant | int,
        end: Instant | int,
        wire_bytes: int = 0,
    ) -> None: ...
    def take(self) -> list[tuple[str, str, str, int, int, int, int]]: ...

def now_ns() -> int: ...

@final
class GatherPlan:
    def __init__(
        self, unit: str, segments: Sequence[tuple[int, int, int, int, int]], contents: int = 0
    ) -> None: ...
    @property
    def unit(self) -> str: ...

@final
class ReduceSegment:
    def __init__(
        self,
        grads: Sequence[_Span],
        grad_dtype: int,
        wire_dtype: int,
        numel: int,
        shard: int,
        shard_dtype: int,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> None: ...

@final
class ReduceOp:
    def __init__(
        self,
        unit: str,
        segments: Sequence[ReduceSegment],
        used: Sequence[int] = ...,
    ) -> None: ...
    @property
    def used(self) -> list[int]: ...

@final
class RegionView:
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Communicator:
    @property
    def kind(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def allocate(self, nbytes: int) -> int: ...
    def region_data(self, region: int, /) -> int: ...
    def region_view(self, region: int, nbytes: int, /) -> RegionView: ...
    def release(self, region: int) -> None: ...
    def all_gather(
        self,
        stream: Stream,
        plan: GatherPlan,
        region: int,
        offset: int,
        recorder: Recorder | None = None,
        keep_alive: object = None,
    ) -> Event: ...
    def reduce_scatter(
        self,
        stream: Stream,
        op: ReduceOp,
        recorder: Recorder | None = None,
        keep_alive: object = None,
    ) -> Event: ...
    def all_reduce(
        self,
        stream: Stream,
        unit: str,
        data: int,
        dtype: int,
        numel: int,
        scale: float = 1.0,
        recorder: Recorder | None = None,
        keep_alive: object = None,
    ) -> Event: ...
    def set_moment(self, step: int, forward: int, phase: int) -> None: ...
    def leave_word(self, stream: Stream, text: str) -> None: ...
    def send_buffer_bytes(self, wire_bytes: int) -> int: ...
    def barrier(self, stream: Stream, name: str) -> Event: ...
    def poison(self, data: int, nbytes: int) -> None: ...
    def close(self) -> None: ...

@final
class ShmBootstrap:
    def __init__(self, way: str) -> None: ...
    @property
    def address(self) -> str: ...
    def connect(
        self,
        rank: int,
        addresses: Sequence[str],
        timeout: float,
        max_send_bytes: int = -1,
        connect_timeout: float = 60.0,
    ) -> Communicator: ...

def exchange_communicator(
    kind: str,
    rank: int,
    size: int,
    all_gather: Callable[[int, int, int], object],
    all_to_all: Callable[[int, int, int], object],
    tell: Callable[[int, str], object],
    ask: Callable[[int], str],
) -> Communicator: ...

# ---- On GPUs

has_cuda: bool  # whether the CUDA sources are in this build

def local_communicator(
    stream: Stream, control: Communicator, control_stream: Stream, timeout: float
) -> Communicator: ...
def exchange_on_device(
    stream: Stream,
    control: Communicator,
    control_stream: Stream,
    timeout: float,
    all_gather: Callable[[int, int], object],
    reduce_scatter: Callable[[int, int, int], object],
    all_reduce: Callable[[int, int, int], object],
) -> Communicator: ...
def nccl_communicator(
    stream: Stream,
    control: Communicator,
    control_stream: Stream,
    timeout: float,
    memory: str,
) -> Communicator: ...
def nvlink_communicator(
    stream: Stream,
    control: Communicator,
    control_stream: Stream,
    timeout: float,
    copies: bool,
    memory: str,
) -> Communicator: ...
def gpu_bus_id(device: int) -> str: ...
def may_have_nvlink(device: int, bus_id: str) -> bool: ...
def check_usable(communicator: Communicator) -> None: ...
def nccl_version() -> int: ...
def wait_for_peers(communicator: Communicator, seconds: float) -> bool: ...

# ---- Facing torch

def device_stream(device: torch.device, stream: int) -> Stream: ...

# Gradient, wire, accumulator and shard dtype, numel of a shard, (leaf, offset, numel) of each entry
_Segment = tuple[int, int, int, int, int, Sequence[tuple[int, int, int]]]

@final
class Unit:
    def __init__(
        self, name: str, gathered_bytes: int, device: torch.device, segments: Sequence[_Segment]
    ) -> None: ...
    @property
    def attached(self) -> bool: ...
    @property
    def num_holds(self) -> int: ...
    def set_owner(self, owner: object, /) -> None: ...
    @staticmethod
    def owner_of(tensor: torch.Tensor, /) -> Any: ...
    def set_names(self, name: str, parameters: Sequence[tuple[int, int, str]], /) -> None: ...
    def attach(self, data: int, newer: bool = False, gathered: Event | None = None) -> None: ...
    def detach(self) -> None: ...
    @property
    def edited(self) -> bool: ...
    def forget_edits(self) -> None: ...
    def segment(self, offset: int, numel: int, dtype: torch.dtype, /) -> torch.Tensor: ...
    def set_notify(self, on: bool, /) -> None: ...
    def add_leaf(self, leaf: torch.Tensor, /) -> None: ...
    def watch(self, leaf: int, /) -> None: ...
    def num_expected(self) -> int: ...
    def forget_backward(self) -> None: ...
    def drop_gradients(self) -> None: ...
    def took_graph(self) -> bool: ...
    def has_gradients(self) -> list[bool]: ...
    def accumulate(
        self, communicator: Communicator, buffers: Sequence[tuple[int, int]], first: bool, /
    ) -> None: ...
    def reduce(
        self,
        stream: Stream,
        communicator: Communicator,
        recorder: Recorder | None,
        scale: float,
        targets: Sequence[tuple[int, int, bool, int]],
        used: Sequence[bool],
        /,
    ) -> Reduction: ...
    def add_attribute(
        self, names: object, key: str, full: object, parameters: object, sharded: object, /
    ) -> None: ...
    def clear_attributes(self) -> None: ...
    def swap_in(self) -> None: ...
    def swap_out(self) -> None: ...

@final
class Reduction:
    @property
    def event(self) -> Event: ...
    @property
    def used(self) -> list[bool]: ...

def count_write(written: object, /) -> None: ...
def set_gradients(
    parameters: list[Any], gradients: list[Any], wanted: Sequence[bool], frozen_too: bool, /
) -> None: ...
def any_gradients(parameters: list[Any], /) -> bool: ...
def at_backward_end(finish: Callable[[bool], object], /) -> None: ...
def cast_inputs(inputs: Any, dtype: torch.dtype, fallback: Callable[[Any], Any], /) -> Any: ...
