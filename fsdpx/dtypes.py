"""torch dtypes and the codes that the native core knows them by (csrc/dtype.h)."""

from __future__ import annotations

import torch

FLOAT32 = 0
FLOAT64 = 1
FLOAT16 = 2
BFLOAT16 = 3
FLOAT8_E4M3 = 4
FLOAT8_E5M2 = 5

_FLOATING = {
    torch.float32: FLOAT32,
    torch.float64: FLOAT64,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.float8_e4m3fn: FLOAT8_E4M3,
    torch.float8_e5m2: FLOAT8_E5M2,
}
_BITS = {1: 6, 2: 7, 4: 8, 8: 9, 16: 10}  # by itemsize


def dtype_code(dtype: torch.dtype) -> int:
    """The native code of `dtype`.

    The six floating types that arithmetic exists for have codes of their own; every other type
    travels as bits of its size.

    Raises:
        ValueError: The native core has no elements of this size.
    """
    code = _FLOATING.get(dtype)
    if code is None:
        code = _BITS.get(dtype.itemsize)
    if code is None:
        raise ValueError(f"{dtype} has elements of {dtype.itemsize} bytes: not supported")
    return code


def torch_dtype(code: int) -> torch.dtype:
    """The floating dtype of a native code."""
    return next(dtype for dtype, known in _FLOATING.items() if known == code)


def has_arithmetic(dtype: torch.dtype) -> bool:
    """Whether elements of `dtype` can be cast, scaled and added (else only copied)."""
    return dtype in _FLOATING
