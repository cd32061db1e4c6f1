"""PTX text -> kernels -> instructions. Refuses what it does not know."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


class Unsupported(Exception):
    """Outside the subset that is simulated."""


@dataclass(frozen=True)
class Register:
    name: str


@dataclass(frozen=True)
class Immediate:
    bits: int


@dataclass(frozen=True)
class Symbol:
    """A special register, a kernel parameter or a label."""

    name: str


@dataclass(frozen=True)
class Address:
    base: Register | Symbol
    offset: int


@dataclass(frozen=True)
class Vector:
    parts: tuple[Register | Immediate, ...]


Operand = Register | Immediate | Symbol | Address | Vector


@dataclass(frozen=True)
class Instruction:
    text: str
    op: tuple[str, ...]  # the opcode and its modifiers
    args: tuple[Operand, ...]
    predicate: Register | None
    negated: bool


@dataclass
class Kernel:
    """A kernel with its one by-value parameter; parsed when first launched."""

    name: str
    parameter: str
    parameter_bytes: int
    max_threads: int
    body: str
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)  # name -> bits

    def parse(self) -> None:
        position = 0
        while match := _STATEMENT.match(self.body, position):
            position = match.end()
            label, text = match[1], " ".join((match[2] or "").split())
            if label:
                self.labels[label] = len(self.code)
            elif text.startswith(".reg"):
                self._declare(text)
            elif text.startswith(".pragma"):
                pass  # advice to the compiler
            elif text.startswith("."):
                raise Unsupported(text)
            elif text:
                self.code.append(self._instruction(text))
        if self.body[position:].strip(" \t\n{}"):
            raise Unsupported(f"cannot parse: {self.body[position : position + 80]}")

    def _declare(self, text: str) -> None:
        match = re.fullmatch(r"\.reg \.(pred|[bfsu](\d+)) (%\w+)<(\d+)>", text)
        if not match:
            raise Unsupported(text)
        bits = int(match[2] or 1)
        self.registers |= {f"{match[3]}{i}": bits for i in range(int(match[4]))}

    def _instruction(self, text: str) -> Instruction:
        match = re.fullmatch(r"(?:@(!?)(%\w+) )?([\w.]+)(?: (.*))?", text)
        if not match:
            raise Unsupported(text)
        args = tuple(self._operand(a) for a in _OPERAND.findall(match[4] or ""))
        predicate = Register(match[2]) if match[2] else None
        return Instruction(text, tuple(match[3].split(".")), args, predicate, match[1] == "!")

    def _operand(self, text: str) -> Operand:
        text = text.strip()
        if text in self.registers:
            return Register(text)
        if "|" in text:  # a register and a predicate that is not looked at
            return self._operand(text.split("|")[0])
        if text.startswith("{"):
            parts = [self._operand(part) for part in text[1:-1].split(",")]
            return Vector(tuple(p for p in parts if isinstance(p, Register | Immediate)))
        if match := re.fullmatch(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", text):
            base = self._operand(match[1])
            assert isinstance(base, Register | Symbol)
            return Address(base, int(match[2] or 0))
        if match := re.fullmatch(r"0[fFdD]([0-9a-fA-F]{8}|[0-9a-fA-F]{16})", text):
            return Immediate(int(match[1], 16))
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
            return Immediate(int(text, 0))
        if re.fullmatch(r"[%$\w.]+", text):
            return Symbol(text)
        raise Unsupported(f"operand {text}")


# Scopes of inline assembly declare nothing in these kernels, so their braces are skipped.
_STATEMENT = re.compile(r"[\s{}]*(?:([$\w]+)\s*:|([^;:{}]*(?:\{[^{};]*\}[^;{}]*)*);)")
_OPERAND = re.compile(r"\{[^{}]*\}|\[[^\]]*\]|[^,\s]+")
_ENTRY = re.compile(
    r"\.entry\s+(\w+)\s*\(\s*\.param\s+\.align\s+\d+\s+\.b8\s+(\w+)\[(\d+)\]\s*\)"
    r"\s*\.maxntid\s+(\d+), 1, 1\s*(?:\.minnctapersm \d+\s*)?\{(.*?)\n\}",
    re.DOTALL,
)


def parse_module(ptx: str) -> dict[str, Kernel]:
    """The kernels of a module by name."""
    ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    kernels = {
        name: Kernel(name, parameter, int(nbytes), int(threads), body)
        for name, parameter, nbytes, threads, body in _ENTRY.findall(ptx)
    }
    if len(kernels) != ptx.count(".entry"):
        raise Unsupported("a kernel's head: one by-value parameter and launch bounds are known")
    return kernels
