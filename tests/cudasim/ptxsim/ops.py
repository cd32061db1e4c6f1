"""What the instructions do, on one numpy array per register with an element per thread."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .parse import Instruction, Unsupported, Vector

if TYPE_CHECKING:
    from .machine import Threads

Array = NDArray[Any]
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
# What the hardware returns for every NaN result of arithmetic and conversion.
CANONICAL_NAN = {16: np.uint16(0x7FFF), 32: np.uint32(0x7FFFFFFF)}
CANONICAL_NAN[64] = np.uint64(0x7FFFFFFFFFFFFFFF)
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def type_of(instruction: Instruction, at: int = -1) -> tuple[str, int]:
    """("u", "s", "b" or "f", bits) of a type modifier."""
    match = re.fullmatch(r"([usbf])(8|16|32|64)", instruction.op[at])
    if not match:
        raise Unsupported(instruction.text)
    return match[1], int(match[2])


def expect(instruction: Instruction, *known: str) -> None:
    """Refuses modifiers other than `known` between opcode and type."""
    if set(instruction.op[1:-1]) - set(known):
        raise Unsupported(instruction.text)


def bits_of(values: Array) -> Array:
    """Results as register bits; NaNs as the hardware makes them."""
    bits = values.dtype.itemsize * 8
    raw = values.view(UNSIGNED[bits])
    return np.where(np.isnan(values), CANONICAL_NAN[bits], raw) if values.dtype.kind == "f" else raw


def read(threads: Threads, instruction: Instruction, first: int = 1) -> list[Array]:
    kind, bits = type_of(instruction)
    return [threads.source(arg, kind, bits) for arg in instruction.args[first:]]


def arithmetic(function: Callable[..., Array]) -> Callable[[Threads, Instruction], None]:
    def run(threads: Threads, instruction: Instruction) -> None:
        kind, _ = type_of(instruction)
        expect(instruction, "rn") if kind == "f" else expect(instruction)
        if kind == "f" and "rn" not in instruction.op:
            raise Unsupported(instruction.text)
        values = read(threads, instruction)
        threads.put(instruction.args[0], bits_of(function(*values).astype(values[0].dtype)))

    return run


def multiply(threads: Threads, instruction: Instruction) -> None:
    if "wide" not in instruction.op:
        return arithmetic(np.multiply)(threads, instruction)
    kind, bits = type_of(instruction)
    wide = (SIGNED if kind == "s" else UNSIGNED)[2 * bits]
    a, b = (value.astype(wide) for value in read(threads, instruction))
    return threads.put(instruction.args[0], bits_of(a * b))


def negate(threads: Threads, instruction: Instruction) -> None:
    kind, bits = type_of(instruction)
    if kind != "f":
        raise Unsupported(instruction.text)
    (value,) = read(threads, instruction)
    sign = UNSIGNED[bits](1 << (bits - 1))
    threads.put(instruction.args[0], value.view(UNSIGNED[bits]) ^ sign)


def logic(function: Callable[..., Array]) -> Callable[[Threads, Instruction], None]:
    def run(threads: Threads, instruction: Instruction) -> None:
        if instruction.op[-1] == "pred":
            values = [threads.source(arg, "b", 1) for arg in instruction.args[1:]]
        else:
            values = read(threads, instruction)
        threads.put(instruction.args[0], function(*values))

    return run


def shift(left: bool) -> Callable[[Threads, Instruction], None]:
    def run(threads: Threads, instruction: Instruction) -> None:
        kind, bits = type_of(instruction)
        value = threads.source(instruction.args[1], kind, bits)
        count = threads.source(instruction.args[2], "u", 32)
        amount = np.minimum(count, bits - 1).astype(value.dtype)
        result = value << amount if left else value >> amount
        if left or kind != "s":
            result = np.where(count >= bits, np.zeros_like(result), result)
        threads.put(instruction.args[0], bits_of(result))

    return run


def move(threads: Threads, instruction: Instruction) -> None:
    target, value = instruction.args
    kind, bits = type_of(instruction)
    if isinstance(value, Vector):  # pack, the first part lowest
        part_bits = bits // len(value.parts)
        packed = np.zeros(1, UNSIGNED[bits])
        for i, part in enumerate(value.parts):
            piece = threads.source(part, "b", part_bits).astype(UNSIGNED[bits])
            packed = packed | piece << UNSIGNED[bits](i * part_bits)
        threads.put(target, packed)
    elif isinstance(target, Vector):  # unpack
        part_bits = bits // len(target.parts)
        whole = threads.source(value, "b", bits)
        for i, part in enumerate(target.parts):
            piece = whole >> UNSIGNED[bits](i * part_bits)
            threads.put(part, piece.astype(UNSIGNED[part_bits]))
    else:
        threads.put(target, bits_of_raw(threads.source(value, kind, bits)))


def bits_of_raw(value: Array) -> Array:
    """Moved bits stay as they are, NaNs too."""
    return value.view(UNSIGNED[value.dtype.itemsize * 8])


def select(threads: Threads, instruction: Instruction) -> None:
    _, bits = type_of(instruction)
    a, b = (threads.source(arg, "b", bits) for arg in instruction.args[1:3])
    condition = threads.source(instruction.args[3], "b", 1)
    threads.put(instruction.args[0], np.where(condition, a, b))


def set_predicate(threads: Threads, instruction: Instruction) -> None:
    a, b = read(threads, instruction)
    relation = instruction.op[1]
    unordered = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(1, bool)
    if relation in COMPARE and len(instruction.args) == 3:
        result = COMPARE[relation](a, b) & ~unordered
    elif relation in ("nan", "num"):
        result = unordered if relation == "nan" else ~unordered
    else:
        raise Unsupported(instruction.text)
    threads.put(instruction.args[0], result)


def permute(threads: Threads, instruction: Instruction) -> None:
    """prmt: each nibble of the selector picks one of the eight bytes of the two sources."""
    if instruction.op != ("prmt", "b32"):
        raise Unsupported(instruction.text)
    a, b, selector = (value.astype(np.uint64) for value in read(threads, instruction))
    both, result = a | (b << np.uint64(32)), np.uint64(0)
    for i in range(4):
        nibble = (selector >> np.uint64(4 * i)) & np.uint64(15)
        byte = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        byte = np.where(nibble & np.uint64(8), sign, byte)
        result = result | (byte << np.uint64(8 * i))
    threads.put(instruction.args[0], np.asarray(result).astype(np.uint32))


def convert(threads: Threads, instruction: Instruction) -> None:
    to_kind, to_bits = type_of(instruction, -2)
    from_kind, from_bits = type_of(instruction)
    if set(instruction.op[1:-2]) - {"rn"} or (to_kind == "f") != (from_kind == "f"):
        raise Unsupported(instruction.text)
    value = threads.source(instruction.args[1], from_kind, from_bits)
    if to_kind == "f":
        if to_bits < from_bits and "rn" not in instruction.op:
            raise Unsupported(instruction.text)
        threads.put(instruction.args[0], bits_of(round_once(value, to_bits)))
    else:
        table = SIGNED if to_kind == "s" else UNSIGNED
        threads.put(instruction.args[0], bits_of_raw(value.astype(table[to_bits])))


def round_once(value: Array, bits: int) -> Array:
    if bits == 16 and value.dtype == np.float64:
        raise Unsupported("cvt.rn.f16.f64")
    return value.astype(FLOAT[bits])


def to_global(threads: Threads, instruction: Instruction) -> None:
    if instruction.op != ("cvta", "to", "global", "u64"):
        raise Unsupported(instruction.text)
    threads.put(instruction.args[0], threads.source(instruction.args[1], "u", 64))


def vector_parts(instruction: Instruction, operand: Any) -> list[Any]:
    sizes = [int(modifier[1]) for modifier in instruction.op[1:-1] if modifier in ("v2", "v4")]
    parts = list(operand.parts) if sizes else [operand]
    if len(parts) != (sizes[0] if sizes else 1):
        raise Unsupported(instruction.text)
    return parts


def load(threads: Threads, instruction: Instruction) -> None:
    space = instruction.op[1]
    kind, bits = type_of(instruction)
    if kind == "s" and bits < 32:
        raise Unsupported(instruction.text)  # would have to extend the sign
    expect(instruction, "global", "param", "v2", "v4")
    parts = vector_parts(instruction, instruction.args[0])
    if space == "param":
        columns = threads.load_parameter(instruction, bits // 8, len(parts))
    elif space == "global":
        columns = threads.load_global(instruction, bits // 8, len(parts))
    else:
        raise Unsupported(instruction.text)
    for part, column in zip(parts, columns, strict=True):
        threads.put(part, column)


def store(threads: Threads, instruction: Instruction) -> None:
    _, bits = type_of(instruction)
    expect(instruction, "global", "v2", "v4")
    if instruction.op[1] != "global":
        raise Unsupported(instruction.text)
    parts = vector_parts(instruction, instruction.args[1])
    columns = [threads.source(part, "b", bits) for part in parts]
    threads.store_global(instruction, bits // 8, columns)


def shuffle(threads: Threads, instruction: Instruction) -> None:
    """shfl.sync.bfly of whole warps, which must be here together."""
    if instruction.op != ("shfl", "sync", "bfly", "b32"):
        raise Unsupported(instruction.text)
    value, mask, clamp, members = (threads.source(arg, "u", 32) for arg in instruction.args[1:5])
    if (clamp != 31).any() or (members != 0xFFFFFFFF).any():
        raise Unsupported(instruction.text)
    if len(threads.active) % 32 or (threads.active.reshape(-1, 32) % 32 != np.arange(32)).any():
        raise Unsupported(f"not all threads of a warp reached `{instruction.text}` together")
    lanes = np.arange(len(value))
    threads.put(instruction.args[0], value[lanes ^ mask.astype(np.int64)])


OPERATIONS: dict[str, Callable[[Threads, Instruction], None]] = {
    "add": arithmetic(np.add),
    "sub": arithmetic(np.subtract),
    "min": arithmetic(np.minimum),
    "max": arithmetic(np.maximum),
    "mul": multiply,
    "neg": negate,
    "and": logic(np.bitwise_and),
    "or": logic(np.bitwise_or),
    "xor": logic(np.bitwise_xor),
    "not": logic(np.invert),
    "shl": shift(True),
    "shr": shift(False),
    "mov": move,
    "selp": select,
    "setp": set_predicate,
    "prmt": permute,
    "cvt": convert,
    "cvta": to_global,
    "ld": load,
    "st": store,
    "shfl": shuffle,
}
