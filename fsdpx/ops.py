"""Passes over flat buffers: pack, unpack, cast and reduce.

Every function reads and writes memory once. Values are widened to float32 (float64 when either side
is float64), multiplied by `scale`, added to the widened old value when `accumulate`, and rounded
once to nearest even; a NaN result is the quiet NaN of its type. float8_e4m3fn saturates: values
beyond 448, infinity too, become 448 (as in `Tensor.to`); other dtypes overflow to infinity. Copies
between equal dtypes with `scale` 1 keep every bit. Dtypes other than float32, float64, float16,
bfloat16, float8_e4m3fn and float8_e5m2 can only be copied so.

Arguments are tensors or anything with `__dlpack__` (numpy and cupy arrays), all on one device. They
may have any shape and strides: what is not contiguous goes through a contiguous copy. Nothing here
is differentiable. On CPU the passes are native and run without the GIL. On CUDA they are enqueued
on torch's current stream and nothing waits: DLPack makes arrays of other libraries ready for that
stream, and a library that reads results or frees memory on another stream has to wait for it. On
other devices, and in builds without CUDA, torch's operators do the same.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fsdpx import _C, reference
from fsdpx.dtypes import dtype_code, has_arithmetic


@runtime_checkable
class SupportsDLPack(Protocol):
    """An array of another library that shares its memory by the DLPack protocol."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


TensorLike: TypeAlias = Tensor | SupportsDLPack


@dataclass(frozen=True)
class _Array:
    """An argument: its name in messages, the tensor given, and a contiguous tensor to work on."""

    name: str
    given: Tensor
    work: Tensor

    @property
    def span(self) -> tuple[int, int]:
        """The addresses that the work tensor lies between."""
        begin = self.work.data_ptr()
        return begin, begin + self.work.numel() * self.work.itemsize

    def write_back(self) -> None:
        """Brings results to the tensor given and tells autograd that it has changed."""
        if self.work.data_ptr() != self.given.data_ptr():
            self.given.copy_(self.work.view(self.given.shape))
        elif not self.given.is_inference():
            torch.autograd.graph.increment_version(self.given)


class _Call:
    """One call of a public function: turns its arguments into arrays and words its errors."""

    def __init__(self, function: str, scale: float, accumulate: bool) -> None:
        self.function = function
        self.scale = float(scale)
        self.accumulate = bool(accumulate)

    def fail(self, message: str) -> ValueError:
        return ValueError(f"fsdpx.ops.{self.function}: {message}")

    def tensor(self, value: TensorLike, name: str) -> Tensor:
        if not isinstance(value, Tensor):
            if not isinstance(value, SupportsDLPack):
                raise TypeError(
                    f"fsdpx.ops.{self.function}: {name} is a {type(value).__name__}; give a tensor "
                    "or an array with __dlpack__"
                )
            try:
                value = from_dlpack(value)
            # A torch without CUDA asserts that an array of a GPU is none.
            except (AssertionError, BufferError, RuntimeError, TypeError, ValueError) as error:
                raise self.fail(f"{name} cannot be shared by DLPack: {error}") from error
        if value.layout is not torch.strided:
            raise self.fail(
                f"{name} has layout {value.layout}; only strided tensors have a flat order"
            )
        if value.device.type == "meta" or (value.numel() > 0 and value.data_ptr() == 0):
            raise self.fail(
                f"{name} (a {type(value).__name__} on {value.device}) has no memory of its own; "
                "give the tensor that holds the data (a sharded tensor's to_local())"
            )
        return value.detach()

    def source(self, value: TensorLike, name: str) -> _Array:
        given = self.tensor(value, name)
        return _Array(name, given, given.resolve_conj().resolve_neg().contiguous())

    def destination(self, value: TensorLike, name: str) -> _Array:
        if getattr(getattr(value, "flags", None), "writeable", True) is False:  # numpy's
            raise self.fail(f"{name} is read-only; give an array that may be written")
        given = self.tensor(value, name)
        plain = given.is_contiguous() and not given.is_conj() and not given.is_neg()
        # The old values matter to accumulation, and to elements that no span covers.
        work = given if plain else given.resolve_conj().resolve_neg().contiguous()
        return _Array(name, given, work)

    def check_pair(self, src: _Array, dst: _Array) -> None:
        """One source and one destination: same device, supported dtypes, separate memory."""
        if src.given.device != dst.given.device:
            raise self.fail(
                f"{src.name} is on {src.given.device} and {dst.name} on {dst.given.device}; "
                "all arguments must be on one device"
            )
        from_dtype, to_dtype = src.given.dtype, dst.given.dtype
        arithmetic = has_arithmetic(from_dtype) and has_arithmetic(to_dtype)
        plain = from_dtype == to_dtype and self.scale == 1.0 and not self.accumulate
        if not arithmetic and not plain:
            raise self.fail(
                f"{src.name} is {from_dtype} and {dst.name} {to_dtype} (scale={self.scale}, "
                f"accumulate={self.accumulate}); dtypes other than float32, float64, float16, "
                "bfloat16, float8_e4m3fn and float8_e5m2 can only be copied as they are"
            )
        self.check_apart(src, dst)

    def check_apart(self, a: _Array, b: _Array) -> None:
        (a_begin, a_end), (b_begin, b_end) = a.span, b.span
        if max(a_begin, b_begin) < min(a_end, b_end):
            raise self.fail(f"{a.name} and {b.name} overlap in memory; give separate tensors")

    def check_flat(self, flat: _Array) -> None:
        if flat.given.ndim != 1:
            raise self.fail(
                f"{flat.name} has shape {tuple(flat.given.shape)}; a flat buffer is 1-D "
                "(use view(-1))"
            )

    def offsets(
        self, arrays: Sequence[_Array], offsets: Sequence[int] | None, flat: _Array
    ) -> list[int]:
        """Where each array starts in `flat`: as given, or end to end."""
        numels = [array.given.numel() for array in arrays]
        if offsets is None:
            starts = [0]
            for numel in numels:
                starts.append(starts[-1] + numel)
            starts.pop()
        else:
            starts = [operator.index(offset) for offset in offsets]
            if len(starts) != len(arrays):
                raise self.fail(f"offsets has {len(starts)} entries for {len(arrays)} tensors")
        size = flat.given.numel()
        for array, start, numel in zip(arrays, starts, numels, strict=True):
            if start < 0 or start + numel > size:
                raise self.fail(
                    f"{array.name} takes elements {start} to {start + numel} of {flat.name}, which "
                    f"has {size}"
                )
        return starts


def cast(src: TensorLike, out: TensorLike, *, scale: float = 1.0, accumulate: bool = False) -> None:
    """out[i] = scale * src[i] (+ out[i] if `accumulate`), with out's dtype.

    Args:
        src: Any shape.
        out: As many elements as `src`; filled in order.
        scale: Factor, applied before rounding.
        accumulate: Add to what `out` holds.

    Raises:
        ValueError: Sizes, devices or dtypes do not fit, or the arguments overlap in memory.
        TypeError: An argument is no tensor.
    """
    call = _Call("cast", scale, accumulate)
    _reduce(call, [call.source(src, "src")], call.destination(out, "out"))


def reduce(
    srcs: Iterable[TensorLike], out: TensorLike, *, scale: float = 1.0, accumulate: bool = False
) -> None:
    """out[i] = scale * (srcs[0][i] + srcs[1][i] + ...) (+ out[i] if `accumulate`).

    The sum is taken in the order of `srcs`, in float32 or float64, and rounded once.

    Args:
        srcs: At least one; equal dtypes and sizes.
        out: As many elements as each source.
        scale: Factor of the sum.
        accumulate: Add to what `out` holds.

    Raises:
        ValueError: Sizes, devices or dtypes do not fit, or the arguments overlap in memory.
        TypeError: An argument is no tensor.
    """
    call = _Call("reduce", scale, accumulate)
    sources = [call.source(src, f"srcs[{i}]") for i, src in enumerate(srcs)]
    if not sources:
        raise call.fail("srcs is empty; give at least one tensor")
    for source in sources[1:]:
        if source.given.dtype != sources[0].given.dtype:
            raise call.fail(
                f"{source.name} is {source.given.dtype} and srcs[0] {sources[0].given.dtype}; "
                "sources must have one dtype"
            )
        if not has_arithmetic(source.given.dtype):
            raise call.fail(f"{source.given.dtype} cannot be added; use a floating dtype")
    _reduce(call, sources, call.destination(out, "out"))


def _reduce(call: _Call, sources: list[_Array], dst: _Array) -> None:
    numel = dst.given.numel()
    for source in sources:
        if source.given.numel() != numel:
            raise call.fail(f"{source.name} has {source.given.numel()} elements and out {numel}")
        call.check_pair(source, dst)
    arguments = (
        [source.work.data_ptr() for source in sources],
        dtype_code(sources[0].given.dtype),
        dst.work.data_ptr(),
        dtype_code(dst.given.dtype),
        numel,
        call.scale,
        call.accumulate,
    )
    if dst.given.device.type == "cpu":
        _C.reduce(*arguments)
    elif runs_on(dst.given.device):
        with stream_of(dst.given.device) as stream:
            _C.device_reduce(*arguments, stream)
    else:
        works = [source.work for source in sources]
        reference.reduce(works, dst.work, scale=call.scale, accumulate=call.accumulate)
    dst.write_back()


def runs_on(device: torch.device) -> bool:
    """Whether this build has passes for a device that is not the CPU."""
    return device.type == "cuda" and _C.has_cuda


@contextlib.contextmanager
def stream_of(device: torch.device) -> Iterator[int]:
    """The current stream of a GPU, which is made the current device."""
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream


def pack(
    tensors: Iterable[TensorLike],
    out: TensorLike,
    *,
    offsets: Sequence[int] | None = None,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Writes tensors into a flat buffer, with a cast, a factor and accumulation on the way.

    Args:
        tensors: Any shapes and dtypes; row-major order.
        out: 1-D buffer. Without `accumulate`, elements that no tensor covers become zero; with it
            they are left alone.
        offsets: Element of `out` where each tensor starts, ascending, without overlap; default: end
            to end.
        scale: Factor, applied before rounding.
        accumulate: Add to what `out` holds.

    Raises:
        ValueError: Sizes, offsets, devices or dtypes do not fit, or `out` overlaps a tensor.
        TypeError: An argument is no tensor.
    """
    call = _Call("pack", scale, accumulate)
    flat = call.destination(out, "out")
    call.check_flat(flat)
    sources = [call.source(tensor, f"tensors[{i}]") for i, tensor in enumerate(tensors)]
    starts = call.offsets(sources, offsets, flat)
    end = 0
    for source, start in zip(sources, starts, strict=True):
        call.check_pair(source, flat)
        if start < end:
            raise call.fail(
                f"{source.name} starts at element {start}, before the end of the tensor before it "
                f"({end}); offsets must ascend without overlap"
            )
        end = start + source.given.numel()
    if flat.given.device.type == "cpu":
        _pack_native(call, sources, starts, flat)
    elif runs_on(flat.given.device):
        _pack_on_device(call, sources, starts, flat)
    else:
        works = [source.work for source in sources]
        reference.pack(
            works, flat.work, offsets=starts, scale=call.scale, accumulate=call.accumulate
        )
    flat.write_back()


def _pack_on_device(call: _Call, sources: list[_Array], starts: list[int], flat: _Array) -> None:
    """One native call per dtype; what no tensor covers is a piece of zeros."""
    base, itemsize = flat.work.data_ptr(), flat.work.itemsize
    pieces: dict[torch.dtype, list[tuple[int, int, int]]] = {}
    end = 0
    for source, start in zip(sources, starts, strict=True):
        group = pieces.setdefault(source.given.dtype, [])
        if not call.accumulate:
            group.append((0, base + end * itemsize, start - end))
        numel = source.work.numel()
        group.append((source.work.data_ptr(), base + start * itemsize, numel))
        end = start + numel
    if not call.accumulate:
        group = pieces.setdefault(flat.work.dtype, [])
        group.append((0, base + end * itemsize, flat.work.numel() - end))
    to = dtype_code(flat.work.dtype)
    with stream_of(flat.work.device) as stream:
        for dtype, group in pieces.items():
            code = dtype_code(dtype)
            _C.device_convert(group, code, to, call.scale, call.accumulate, stream)


def _pack_native(call: _Call, sources: list[_Array], starts: list[int], flat: _Array) -> None:
    """One native call per run of equal dtypes, for the part of `flat` up to the next run."""
    if not sources:
        if not call.accumulate:
            flat.work.zero_()
        return
    dtypes = [source.given.dtype for source in sources]
    heads = [i for i, dtype in enumerate(dtypes) if i == 0 or dtype != dtypes[i - 1]]
    begins = [0, *(starts[i] for i in heads[1:])]
    for run, (head, begin) in enumerate(zip(heads, begins, strict=True)):
        last = run + 1 == len(heads)
        tail = len(sources) if last else heads[run + 1]
        end = flat.work.numel() if last else begins[run + 1]
        _C.pack(
            [
                (source.work.data_ptr(), source.work.numel(), start - begin)
                for source, start in zip(sources[head:tail], starts[head:tail], strict=True)
            ],
            dtype_code(dtypes[head]),
            flat.work.data_ptr() + begin * flat.work.itemsize,
            dtype_code(flat.work.dtype),
            end - begin,
            call.scale,
            call.accumulate,
        )


def unpack(
    flat: TensorLike,
    outs: Iterable[TensorLike],
    *,
    offsets: Sequence[int] | None = None,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Reads tensors back from a flat buffer: the inverse of `pack`.

    Args:
        flat: 1-D buffer.
        outs: Any shapes and dtypes; row-major order; separate in memory.
        offsets: Element of `flat` where each tensor starts; default: end to end.
        scale: Factor, applied before rounding.
        accumulate: Add to what the tensors hold.

    Raises:
        ValueError: Sizes, offsets, devices or dtypes do not fit, or tensors overlap in memory.
        TypeError: An argument is no tensor.
    """
    call = _Call("unpack", scale, accumulate)
    src = call.source(flat, "flat")
    call.check_flat(src)
    dsts = [call.destination(out, f"outs[{i}]") for i, out in enumerate(outs)]
    starts = call.offsets(dsts, offsets, src)
    for dst in dsts:
        call.check_pair(src, dst)
    by_address = sorted((dst for dst in dsts if dst.work.numel()), key=lambda dst: dst.span)
    for before, after in itertools.pairwise(by_address):
        call.check_apart(before, after)
    if src.given.device.type == "cpu":
        _unpack_native(call, src, dsts, starts)
    elif runs_on(src.given.device):
        _unpack_on_device(call, src, dsts, starts)
    else:
        works = [dst.work for dst in dsts]
        reference.unpack(
            src.work, works, offsets=starts, scale=call.scale, accumulate=call.accumulate
        )
    for dst in dsts:
        dst.write_back()


def _unpack_native(call: _Call, src: _Array, dsts: list[_Array], starts: list[int]) -> None:
    spans: dict[torch.dtype, list[tuple[int, int, int]]] = {}
    for dst, start in zip(dsts, starts, strict=True):
        span = (dst.work.data_ptr(), dst.work.numel(), start)
        spans.setdefault(dst.given.dtype, []).append(span)
    for dtype, group in spans.items():
        _C.unpack(
            src.work.data_ptr(),
            dtype_code(src.given.dtype),
            group,
            dtype_code(dtype),
            call.scale,
            call.accumulate,
        )


def _unpack_on_device(call: _Call, src: _Array, dsts: list[_Array], starts: list[int]) -> None:
    base, itemsize = src.work.data_ptr(), src.work.itemsize
    pieces: dict[torch.dtype, list[tuple[int, int, int]]] = {}
    for dst, start in zip(dsts, starts, strict=True):
        piece = (base + start * itemsize, dst.work.data_ptr(), dst.work.numel())
        pieces.setdefault(dst.given.dtype, []).append(piece)
    code = dtype_code(src.given.dtype)
    with stream_of(src.work.device) as stream:
        for dtype, group in pieces.items():
            to = dtype_code(dtype)
            _C.device_convert(group, code, to, call.scale, call.accumulate, stream)
