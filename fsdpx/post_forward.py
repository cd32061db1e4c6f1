"""What a unit keeps between forward and backward where it is resharded to a smaller group.

[Note: Smaller groups] With `reshard_after_forward=k` the ranks that share a unit form groups of k
neighbours. At the end of a forward that records a graph each rank copies its 1/k of the gathered
unit, in the compute dtypes; backward gathers these copies within the group. Every segment has equal
shares, and k divides their number, so a copy is one range of each segment.

Which of the two gathers runs is decided alike on all ranks: copies are made by forwards, used by
backwards only, and dropped by the end of the outermost backward. Without a copy a backward gathers
from all ranks as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from . import _C
from .comm import Communicator, create
from .dtypes import dtype_code
from .memory import Place
from .mesh import smaller_group
from .shards import contents_of
from .torch_private import outside_of_transforms
from .unit import Unit


class Kept(NamedTuple):
    """A copy of this rank's part, as of the weights of `generation`.

    Attributes:
        pieces: One flat tensor per segment.
        plan: Of the gather that puts the unit together from them.
        generation: Of the shards that the unit was gathered from.
        written: The event after which the pieces have their values.
    """

    pieces: Sequence[torch.Tensor]
    plan: _C.GatherPlan
    generation: int
    written: Any


class PostForward:
    """The smaller group of a unit, and this rank's part of the unit.

    Attributes:
        group: The ranks of the smaller group.
        kept: None before a forward and after backward.
    """

    def __init__(self, unit: Unit, size: int) -> None:
        self._unit = unit
        self.group = smaller_group(unit.group, size)
        self.kept: Kept | None = None

    @cached_property
    def comm(self) -> Communicator:
        """The smaller group's communicator; made, collectively, at the first use."""
        group, beside = self.group, self._unit.comm
        return create(group.process_group, kind=group.kind, device=beside.device, beside=beside)

    def forget_closed(self) -> None:
        """Lets the next use make the communicator anew if it is closed."""
        made: Communicator | None = self.__dict__.get("comm")
        if made is not None and made.closed:
            del self.comm

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank keeps."""
        segments = self._unit.layout.segments
        return sum(segment.gathered_bytes for segment in segments) // self.group.size

    def keep(self) -> None:
        """Copies this rank's part of the unit, if it is gathered."""
        unit = self._unit
        if unit.gathered is None or (self.kept and self.kept.generation == unit.generation):
            return
        pieces, rows = [], []
        with outside_of_transforms(), torch.no_grad():
            for segment in unit.layout.segments:
                dtype: Any = segment.compute_dtype
                numel = segment.numel // self.group.size
                offset = segment.byte_offset + self.group.rank * numel * dtype.itemsize
                piece = unit.native.segment(offset, numel, dtype).clone()
                code = dtype_code(dtype)
                rows.append((piece.data_ptr(), code, numel, segment.byte_offset, code))
                pieces.append(piece)
        plan = _C.GatherPlan(unit.name, rows, contents_of(unit.parameters))
        self.kept = Kept(pieces, plan, unit.gathered.generation, unit.comm.stream.mark())

    def forget(self) -> None:
        """Drops what was kept."""
        self.kept = None

    def start_gather(self, place: Place) -> None:
        """Issues the all-gather, within the smaller group, of what was kept."""
        unit, kept, stream = self._unit, self.kept, self._unit.comm.stream
        assert kept is not None
        if kept.generation != unit.generation:
            unit.check_unchanged()
        # Without prefetch a GPU must not gather ahead either.
        stream.follow(kept.written if unit.options.prefetch else stream.mark())
        unit.issue_gather(self.comm, kept.plan, place, kept.generation, kept.pieces)


def communicators_of(unit: Unit) -> list[Communicator]:
    """Those that gather the unit: of all ranks that share it, and of the smaller group."""
    few = unit.post_forward
    return [unit.comm] if few is None else [unit.comm, few.comm]
