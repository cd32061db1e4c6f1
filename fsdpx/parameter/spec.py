"""Which elements of a parameter this rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from fsdpx.layout import Ranges

Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offsets and sizes of an axis-aligned box of the parameter, and its start in the piece."""


class Spec:
    """How one parameter is spread over ranks: one immutable object for it, its gradient and state.

    Attributes:
        name: The parameter's fully qualified name; errors use it.
        shape: Global shape.
        ranges: For every rank the elements ``(begin, end)`` that it holds, row-major; a sequence
            that may compute them on demand, as `fsdpx.layout.Ranges` does.
        rank: This process's index in `ranges`.
        begin: First element that this rank holds.
        end: One past its last.
        whole: Whether it is never cut, so that one rank, the `owner`, has all of it.
        group: The process group that `ranges` is about, or None where there is one rank only (or
            where a tensor was unpickled outside of its group).
    """

    name: str
    shape: torch.Size
    ranges: Sequence[tuple[int, int]]
    rank: int
    group: dist.ProcessGroup | None
    begin: int
    end: int
    whole: bool

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        ranges: Sequence[tuple[int, int]],
        rank: int,
        group: dist.ProcessGroup | None,
        whole: bool = False,
    ) -> None:
        if not 0 <= rank < len(ranges):
            raise ValueError(f"parameter {name!r}: rank {rank} is not one of {len(ranges)}")
        set_ = object.__setattr__
        set_(self, "name", name)
        set_(self, "shape", torch.Size(shape))
        set_(self, "ranges", ranges if isinstance(ranges, Ranges) else tuple(ranges))
        set_(self, "rank", rank)
        set_(self, "group", group)
        set_(self, "begin", ranges[rank][0])
        set_(self, "end", ranges[rank][1])
        set_(self, "whole", whole)

    def rename(self, name: str) -> None:
        """Sets the name that messages use: a unit learns its place in a model only when that is
        called.
        """
        object.__setattr__(self, "name", name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Spec is immutable (setting {name!r})")

    def __repr__(self) -> str:
        held = f"rank {self.rank} of {len(self.ranges)} holds [{self.begin}, {self.end})"
        return f"Spec({self.name!r}, {tuple(self.shape)}, {held})"

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Spec)
            and self.same_sharding(other)
            and (self.name, self.rank, self.group) == (other.name, other.rank, other.group)
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.rank, self.begin, self.end))

    # A process group can't be copied, and two copies of something immutable are of no use.
    def __copy__(self) -> Spec:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Spec:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_spec, self.state()

    def state(self) -> tuple[Any, ...]:
        """All but the group, as plain numbers and tuples: `rebuild_spec` takes it."""
        ranges: tuple[Any, ...]
        if isinstance(self.ranges, Ranges):
            r = self.ranges
            ranges = (r.offset, r.numel, r.shard_numel, r.world_size)
        else:
            ranges = tuple(self.ranges)
        return self.name, tuple(self.shape), ranges, self.rank, self.whole

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @cached_property
    def owner(self) -> int:
        """The rank that has all of a parameter that is never cut."""
        held = (rank for rank, (begin, end) in enumerate(self.ranges) if end > begin)
        return next(held, 0)

    @cached_property
    def boxes(self) -> list[Box]:
        """This rank's elements as at most ``2 * ndim - 1`` boxes of the parameter."""
        if self.numel == 0:
            # Somebody must tell a checkpoint that the parameter exists.
            nothing = ((0,) * len(self.shape), tuple(self.shape), 0)
            return [nothing] if self.rank == 0 else []
        return boxes(tuple(self.shape), self.begin, self.end)

    def same_sharding(self, other: Spec) -> bool:
        """Whether the pieces of both belong together element by element."""
        return self is other or (self.shape == other.shape and _alike(self.ranges, other.ranges))

    def reshaped(self, shape: Sequence[int]) -> Spec:
        """The same elements seen in another shape (same order)."""
        if torch.Size(shape) == self.shape:
            return self
        return Spec(self.name, shape, self.ranges, self.rank, self.group, self.whole)

    def piece(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a whole value, 1-D; a view where `full` is contiguous.

        Args:
            full: Of the global shape, or broadcastable to it.

        Raises:
            RuntimeError: If `full` can't be broadcast to the global shape.
        """
        if full.shape != self.shape:
            full = full.expand(self.shape)
        if full.dim() >= 2 and self.numel and not full.is_contiguous():
            # Copy no more rows than the piece touches.
            row = self.numel // self.shape[0]
            first = self.begin // row
            full = full[first : -(-self.end // row)]
            return full.reshape(-1)[self.begin - first * row : self.end - first * row]
        return full.reshape(-1)[self.begin : self.end]


def _alike(mine: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> bool:
    if mine == other:
        return True
    if not (isinstance(mine, Ranges) and isinstance(other, Ranges)):
        return len(mine) == len(other) and all(a == b for a, b in zip(mine, other, strict=True))
    # Parameters of different units may lie differently and yet be cut alike. Inner owners hold
    # whole shares, so the first few and the last tell.
    owners = mine.owners
    if len(mine) != len(other) or mine.numel != other.numel or owners != other.owners:
        return False
    return all(mine[rank] == other[rank] for rank in (*owners[:2], *owners[-1:]))


def rebuild_spec(
    name: str, shape: Sequence[int], ranges: Sequence[Any], rank: int, whole: bool = False
) -> Spec:
    """Unpickles a `Spec`; the default group is taken if this process has the same place in it."""
    even = bool(ranges) and isinstance(ranges[0], int)
    every: Sequence[tuple[int, int]] = Ranges(*ranges) if even else [(a, b) for a, b in ranges]
    group = None
    if dist.is_available() and dist.is_initialized():
        world = dist.group.WORLD
        if dist.get_world_size(world) == len(every) and dist.get_rank(world) == rank:
            group = world
    return Spec(name, shape, every, rank, group, whole)


def boxes(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """The elements ``[begin, end)`` of a row-major tensor as axis-aligned boxes, in order.

    Args:
        shape: Of the tensor; no zero sizes unless the range is empty.
        begin: First element.
        end: One past the last element.

    Returns:
        At most ``2 * len(shape) - 1`` boxes.
    """
    if end <= begin:
        return []
    if len(shape) <= 1:
        return [((begin,) * len(shape), (end - begin,) * len(shape), 0)]
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(begin, row), divmod(end, row)

    def within(index: int, low: int, high: int, start: int) -> list[Box]:
        parts = boxes(shape[1:], low, high)
        return [((index, *offset), (1, *size), start + at) for offset, size, at in parts]

    if first == last:
        return within(first, head, tail, 0)
    found: list[Box] = []
    if head:
        found += within(first, head, row, 0)
        first += 1
    if last > first:
        offset = (first, *(0 for _ in shape[1:]))
        found.append((offset, (last - first, *shape[1:]), first * row - begin))
    if tail:
        found += within(last, 0, tail, last * row - begin)
    return found
