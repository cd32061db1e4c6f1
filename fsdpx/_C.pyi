"""Types of the native module; what is not listed here is untyped."""

from typing import Any

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
    srcs: list[tuple[int, int, int]],
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
    dsts: list[tuple[int, int, int]],
    to_dtype: int,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None: ...
def reduce(
    srcs: list[int],
    from_dtype: int,
    dst: int,
    to_dtype: int,
    numel: int,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...
def __getattr__(name: str) -> Any: ...
