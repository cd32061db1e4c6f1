"""What fsdpx.ops and the native kernels refuse, and what their messages name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fsdpx import _C, ops
from fsdpx.dtypes import BFLOAT16, FLOAT32, dtype_code

F32 = torch.float32


def zeros(numel: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


def overlapping() -> tuple[torch.Tensor, torch.Tensor]:
    room = zeros(10)
    return room[:6], room[4:]


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "cast sizes": (r"src has 3 elements and out 4", lambda: ops.cast(zeros(3), zeros(4))),
    "cast overlap": (r"src and out overlap", lambda: ops.cast(*overlapping())),
    "cast in place": (r"src and out overlap", lambda: ops.cast(*[zeros(3)] * 2)),
    "cast of ints": (
        r"src is torch.int32 and out torch.float32",
        lambda: ops.cast(zeros(3, torch.int32), zeros(3)),
    ),
    "scaled ints": (
        r"scale=2.0.*can only be copied",
        lambda: ops.cast(zeros(3, torch.int32), zeros(3, torch.int32), scale=2),
    ),
    "accumulated ints": (
        r"accumulate=True.*can only be copied",
        lambda: ops.pack([zeros(3, torch.int8)], zeros(3, torch.int8), accumulate=True),
    ),
    "equal sizes, other dtype": (
        r"torch.int32.*torch.uint32",
        lambda: ops.cast(zeros(1, torch.int32), zeros(1, torch.uint32)),
    ),
    "meta": (
        r"src .* on meta\) has no memory",
        lambda: ops.cast(torch.empty(3, device="meta"), zeros(3)),
    ),
    "sparse": (
        r"src has layout torch.sparse_coo",
        lambda: ops.cast(zeros(3).to_sparse(), zeros(3)),
    ),
    "read-only array": (
        r"out is read-only",
        lambda: ops.cast(zeros(1), np.broadcast_to(np.float32(0), 1)),
    ),
    "pack: out 2-D": (r"out has shape \(2, 2\); .* 1-D", lambda: ops.pack([], zeros(4).view(2, 2))),
    "pack: does not fit": (
        r"tensors\[1\] takes elements 3 to 6 of out, which has 5",
        lambda: ops.pack([zeros(3), zeros(3)], zeros(5)),
    ),
    "pack: negative offset": (
        r"tensors\[0\] takes elements -1 to 2",
        lambda: ops.pack([zeros(3)], zeros(5), offsets=[-1]),
    ),
    "pack: number of offsets": (
        r"offsets has 2 entries for 1 tensors",
        lambda: ops.pack([zeros(3)], zeros(5), offsets=[0, 3]),
    ),
    "pack: offsets descend": (
        r"tensors\[1\] starts at element 2, before the end .* \(3\)",
        lambda: ops.pack([zeros(3), zeros(3)], zeros(9), offsets=[0, 2]),
    ),
    "pack: overlap": (
        r"tensors\[0\] and out overlap",
        lambda: ops.pack([(pair := overlapping())[0][2:]], pair[1]),
    ),
    "unpack: too long": (
        r"outs\[1\] takes elements 2 to 5 of flat, which has 4",
        lambda: ops.unpack(zeros(4), [zeros(2), zeros(3)]),
    ),
    "unpack: outs overlap": (
        r"outs\[[01]\] and outs\[[01]\] overlap",
        lambda: ops.unpack(zeros(12), overlapping()),
    ),
    "unpack: flat overlaps": (
        r"flat and outs\[0\] overlap",
        lambda: ops.unpack((pair := overlapping())[0], [pair[1]]),
    ),
    "reduce: nothing": (r"srcs is empty", lambda: ops.reduce([], zeros(3))),
    "reduce: sizes": (
        r"srcs\[1\] has 2 elements and out 3",
        lambda: ops.reduce([zeros(3), zeros(2)], zeros(3)),
    ),
    "reduce: dtypes": (
        r"srcs\[1\] is torch.float16 and srcs\[0\] torch.float32",
        lambda: ops.reduce([zeros(3), zeros(3, torch.float16)], zeros(3)),
    ),
    "reduce: ints": (
        r"torch.int32 cannot be added",
        lambda: ops.reduce([zeros(3, torch.int32)] * 2, zeros(3, torch.int32)),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_name(case: str) -> None:
    message, call = REFUSED[case]
    with pytest.raises(ValueError, match=rf"fsdpx\.ops\.\w+: .*?{message}"):
        call()


def test_what_is_no_tensor_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"tensors\[1\] is a list"):
        ops.pack([zeros(1), [1.0]], zeros(2))  # type: ignore[list-item]


def test_a_refused_call_leaves_the_output_alone() -> None:
    out = torch.ones(5)
    with pytest.raises(ValueError, match=r"tensors\[1\]"):
        ops.pack([zeros(3), zeros(1, torch.int32)], out)
    assert torch.equal(out, torch.ones(5))


def native(src: torch.Tensor, dst: torch.Tensor, shift: int = 0, numel: int = 2) -> None:
    _C.cast(
        src.data_ptr() + shift,
        dtype_code(src.dtype),
        dst.data_ptr(),
        dtype_code(dst.dtype),
        numel,
    )


def test_the_native_side_checks_for_itself() -> None:
    half = torch.bfloat16
    with pytest.raises(ValueError, match="source 0 is not aligned to the 4 bytes of float32"):
        native(zeros(4), zeros(4, half), shift=2)
    with pytest.raises(ValueError, match="numel is -1"):
        native(zeros(4), zeros(4, half), numel=-1)
    with pytest.raises(ValueError, match="bits32 to float32"):
        native(zeros(4, torch.int32), zeros(4))
    with pytest.raises(ValueError, match="source 0 is a null pointer"):
        _C.cast(0, FLOAT32, zeros(4).data_ptr(), BFLOAT16, 4)
    with pytest.raises(ValueError, match="dtype code 11 does not exist"):
        _C.cast(0, 11, 0, 11, 0)
    flat, src = zeros(8), zeros(8)
    spans = [(src.data_ptr(), 3, 0), (src.data_ptr(), 3, 2)]
    with pytest.raises(ValueError, match="span 1 starts at 2, before the end of the one before it"):
        _C.pack(spans, FLOAT32, flat.data_ptr(), FLOAT32, 8)
    with pytest.raises(ValueError, match="span 0 covers elements"):
        _C.pack([(src.data_ptr(), 4, 2**62)], FLOAT32, flat.data_ptr(), FLOAT32, 8)
    with pytest.raises(ValueError, match="overlap at span 0"):
        _C.unpack(flat.data_ptr(), FLOAT32, [(flat.data_ptr(), 4, 2)], FLOAT32)
    with pytest.raises(ValueError, match="there are no sources"):
        _C.reduce([], FLOAT32, flat.data_ptr(), FLOAT32, 8)
    with pytest.raises(ValueError, match='"sse9" is not an instruction set that this machine has'):
        _C.set_isa("sse9")


class OnAnotherGpu:
    """Memory that torch cannot have here."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("not for you")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # CUDA's number in DLPack


def test_an_array_that_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="src cannot be shared by DLPack"):
        ops.cast(OnAnotherGpu(), zeros(3))


def test_a_null_span_stands_for_zeros() -> None:
    flat, src = torch.ones(6), torch.full((2,), 3.0)
    spans = [(src.data_ptr(), 2, 0), (0, 2, 2)]
    _C.pack(spans, FLOAT32, flat.data_ptr(), FLOAT32, 6, 1.0, True)
    assert flat.tolist() == [4, 4, 1, 1, 1, 1]
    _C.pack(spans, FLOAT32, flat.data_ptr(), FLOAT32, 6)
    assert flat.tolist() == [3, 3, 0, 0, 0, 0]
