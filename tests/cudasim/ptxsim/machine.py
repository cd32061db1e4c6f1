"""Memory with checks, and the execution of launches.

Each instruction runs once for all threads that are at it, the lowest address first, which brings
threads of structured code together again after a branch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .ops import FLOAT, OPERATIONS, SIGNED, UNSIGNED, Array
from .parse import Address, Immediate, Instruction, Kernel, Register, Symbol, Unsupported
from .parse import parse_module as parse_module

GLOBAL_BASE = 0x2000_0000_0000  # where global memory begins
RED_ZONE = 512  # bytes after each allocation that must not be touched
BATCH = 1 << 15  # threads that run together


class SimError(Exception):
    """The kernel does something wrong."""


class Memory:
    """Global memory. `state` of a byte: 0 not allocated, 1 allocated, 2 written."""

    def __init__(self, nbytes: int = 16 << 20) -> None:
        self.data = np.zeros(nbytes, np.uint8)
        self.state = np.zeros(nbytes, np.uint8)
        self.writer = np.zeros(nbytes, np.int64)  # launch << 40 | thread, of the last write
        self.launches = 0
        self.top = RED_ZONE
        # By "ld" or "st" and width: bytes, and sectors of 32 bytes that the warps' requests touch.
        self.moved: Counter[tuple[str, int]] = Counter()
        self.sectors: Counter[tuple[str, int]] = Counter()

    def allocate(self, nbytes: int, *, shift: int = 0) -> int:
        """The address of `nbytes` uninitialised bytes, `shift` bytes after a multiple of 256."""
        offset = self.top + shift
        self.top = -(-(offset + nbytes + RED_ZONE) // 256) * 256
        if self.top > len(self.data):
            raise MemoryError(f"the simulated memory of {len(self.data)} bytes is full")
        self.state[offset : offset + nbytes] = 1
        return GLOBAL_BASE + offset

    def upload(self, array: Array, *, shift: int = 0) -> int:
        raw = np.ascontiguousarray(array).view(np.uint8).ravel()
        address = self.allocate(raw.size, shift=shift)
        offset = address - GLOBAL_BASE
        self.data[offset : offset + raw.size] = raw
        self.state[offset : offset + raw.size] = 2
        return address

    def download(self, address: int, dtype: Any, count: int) -> Array:
        offset = address - GLOBAL_BASE
        nbytes = count * np.dtype(dtype).itemsize
        if (self.state[offset : offset + nbytes] != 2).any():
            raise SimError("download of bytes that were never written")
        return self.data[offset : offset + nbytes].copy().view(dtype)


class Threads:
    """The threads of some blocks of one launch, and the values of their registers."""

    def __init__(
        self, kernel: Kernel, memory: Memory, blocks: range, num_threads: int, argument: bytes
    ) -> None:
        self.kernel, self.memory = kernel, memory
        self.count = len(blocks) * num_threads
        block = np.repeat(np.arange(blocks.start, blocks.stop), num_threads)
        thread = np.tile(np.arange(num_threads), len(blocks))
        self.ids = block * num_threads + thread
        self.special = {"%tid.x": thread.astype(np.uint32), "%ctaid.x": block.astype(np.uint32)}
        self.registers = {
            name: np.zeros(self.count, bool if bits == 1 else UNSIGNED[bits])
            for name, bits in kernel.registers.items()
        }
        self.argument = np.frombuffer(argument, np.uint8)
        self.active: NDArray[np.int64] = np.arange(self.count)

    # ---- Operands

    def source(self, operand: Any, kind: str, bits: int) -> Array:
        """Values for the active threads, as numbers of a PTX type ("b": bits; 1 bit: predicate)."""
        if isinstance(operand, Register):
            raw = self.registers[operand.name][self.active]
        elif isinstance(operand, Immediate):
            raw = np.full(len(self.active), operand.bits & ((1 << bits) - 1), UNSIGNED[bits])
        elif isinstance(operand, Symbol) and operand.name in self.special:
            raw = self.special[operand.name][self.active]
        elif isinstance(operand, Symbol) and operand.name == self.kernel.parameter:
            raw = np.zeros(len(self.active), UNSIGNED[bits])  # its offset among the parameters
        else:
            raise Unsupported(f"operand {operand}")
        if bits == 1:
            return raw
        if raw.dtype != UNSIGNED[bits]:
            raw = raw.astype(UNSIGNED[bits])  # an instruction may read the low part of a register
        return raw.view({"s": SIGNED, "f": FLOAT}.get(kind, UNSIGNED)[bits])

    def put(self, operand: Any, values: Array) -> None:
        register = self.registers[operand.name]
        if values.dtype.itemsize > register.dtype.itemsize:
            raise SimError(f"{values.dtype} does not fit {operand.name}")
        register[self.active] = values

    # ---- Memory

    def addresses(self, address: Address) -> NDArray[np.int64]:
        return self.source(address.base, "s", 64).astype(np.int64) + address.offset

    def load_parameter(self, instruction: Instruction, width: int, count: int) -> list[Array]:
        address = instruction.args[1]
        assert isinstance(address, Address)
        offsets = self.addresses(address)
        if (offsets < 0).any() or (offsets + width * count > len(self.argument)).any():
            raise SimError(f"outside the kernel's argument: `{instruction.text}`")
        return [self.gather(self.argument, offsets + i * width, width) for i in range(count)]

    @staticmethod
    def gather(data: Array, offsets: NDArray[np.int64], width: int) -> Array:
        rows = data[offsets[:, None] + np.arange(width)]
        return np.ascontiguousarray(rows).view(UNSIGNED[width * 8])[:, 0]

    def load_global(self, instruction: Instruction, width: int, count: int) -> list[Array]:
        offsets = self.check_access(instruction, instruction.args[1], width * count)
        return [self.gather(self.memory.data, offsets + i * width, width) for i in range(count)]

    def store_global(self, instruction: Instruction, width: int, columns: list[Array]) -> None:
        nbytes = width * len(columns)
        offsets = self.check_access(instruction, instruction.args[0], nbytes)
        if len(np.unique(offsets)) != len(offsets):
            raise SimError(f"two threads store to one address: `{instruction.text}`")
        raw = np.stack(columns, axis=1).view(np.uint8)
        span = offsets[:, None] + np.arange(nbytes)
        self.memory.data[span] = raw
        self.memory.state[span] = 2
        self.memory.writer[span] = self.stamp()[:, None]

    def stamp(self) -> NDArray[np.int64]:
        return (self.memory.launches << 40) + self.ids[self.active]

    def check_access(self, instruction: Instruction, address: Any, nbytes: int) -> Array:
        """The offsets into global memory that the active threads access, after all checks."""
        memory, offsets = self.memory, self.addresses(address) - GLOBAL_BASE

        def refuse(bad: Array, what: str) -> None:
            if bad.any():
                first = int(np.flatnonzero(bad)[0])
                raise SimError(
                    f"{what}: `{instruction.text}`, thread {int(self.ids[self.active[first]])}, "
                    f"address {int(offsets[first]) + GLOBAL_BASE:#x} ({int(bad.sum())} threads)"
                )

        refuse(offsets % nbytes != 0, "misaligned access")
        outside = (offsets < 0) | (offsets + nbytes > len(memory.state))
        refuse(outside, "out of bounds")
        span = offsets[:, None] + np.arange(nbytes)
        refuse((memory.state[span] == 0).any(axis=1), "out of bounds")
        if instruction.op[0] == "ld":
            refuse((memory.state[span] == 1).any(axis=1), "read of memory never written")
        writer = memory.writer[span]
        others = (writer >> 40 == memory.launches) & (writer != self.stamp()[:, None])
        refuse(others.any(axis=1), "race: another thread wrote here")
        kind = instruction.op[0], nbytes
        memory.moved[kind] += len(offsets) * nbytes
        memory.sectors[kind] += len(np.unique((self.ids[self.active] // 32 << 40) + offsets // 32))
        return offsets

    # ---- Control flow

    def run(self) -> None:
        waiting: dict[int, Array] = {0: np.arange(self.count)}  # program counter -> threads there
        while waiting:
            counter = min(waiting)
            here = waiting.pop(counter)
            instruction = self.kernel.code[counter]
            chosen = np.ones(len(here), bool)
            if instruction.predicate is not None:
                chosen = self.registers[instruction.predicate.name][here] ^ instruction.negated
            self.active = here[chosen]
            self.step(instruction, counter, here[~chosen], waiting)

    def step(
        self, instruction: Instruction, counter: int, skipped: Array, waiting: dict[int, Array]
    ) -> None:
        def arrive(at: int, threads: Array) -> None:
            if len(threads):
                waiting[at] = np.sort(np.concatenate([waiting.get(at, threads[:0]), threads]))

        arrive(counter + 1, skipped)
        if instruction.op[0] == "ret" or not len(self.active):
            return
        if instruction.op[0] == "bra":
            target = instruction.args[0]
            assert isinstance(target, Symbol)
            arrive(self.kernel.labels[target.name], self.active)
            return
        operation = OPERATIONS.get(instruction.op[0])
        if operation is None:
            raise Unsupported(instruction.text)
        operation(self, instruction)
        arrive(counter + 1, self.active)


class Sim:
    """A module of kernels and the memory that they run on. A simulation: see the README."""

    def __init__(self, ptx: str, memory: Memory | None = None) -> None:
        self.kernels = parse_module(ptx)
        self.memory = memory or Memory()

    def launch(self, name: str, num_blocks: int, num_threads: int, argument: bytes) -> None:
        """Runs a kernel of 1-D blocks, given its by-value parameter."""
        kernel = self.kernels[name]
        if len(argument) != kernel.parameter_bytes:
            raise SimError(f"{name} takes {kernel.parameter_bytes} bytes, not {len(argument)}")
        if num_threads > kernel.max_threads:
            raise SimError(f"{name} takes at most {kernel.max_threads} threads per block")
        if not kernel.code:
            kernel.parse()
        self.memory.launches += 1
        per_batch = max(1, BATCH // num_threads)
        with np.errstate(all="ignore"):
            for first in range(0, num_blocks, per_batch):
                blocks = range(first, min(first + per_batch, num_blocks))
                Threads(kernel, self.memory, blocks, num_threads, argument).run()
