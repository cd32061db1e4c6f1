"""The gradient shards of a unit: from the leaves' gradients to `.grad` of the sharded parameters."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _C
from .parameter import ShardedTensor
from .unit import Unit

# What `sys.getrefcount` gives for a gradient that only its buffer knows: the list, and the call itself.
_UNSHARED = 2


@dataclass
class Buffer:
    """The gradient shard of one segment: a flat tensor and, per parameter, the view that becomes `.grad`."""

    flat: torch.Tensor  # 1D, shard_numel, original dtype
    gradients: dict[int, ShardedTensor]  # parameter index -> view

    @property
    def is_unshared(self) -> bool:
        """Whether nobody outside holds a gradient of an earlier step (then it may be overwritten)."""
        if any(sys.getrefcount(g) > _UNSHARED for g in self.gradients.values()):
            return False
        holders = torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata)
        # The flat tensor, the views, and the storage object that the question itself makes.
        return bool(holders <= len(self.gradients) + 2)


@dataclass
class Gradients:
    """What a unit keeps between its backward and the optimizer."""

    unit: Unit
    buffers: dict[int, Buffer] = field(default_factory=dict)  # segment -> buffer
    accumulated: dict[int, torch.Tensor] = field(default_factory=dict)  # segment -> full gradients
    used: list[bool] = field(default_factory=list)  # parameters with a gradient in `accumulated`
    in_flight: list[_C.Reduction] = field(default_factory=list)
    written: set[int] = field(default_factory=set)  # segments that hold this backward's gradients

    # ---- Runtime

    def accumulate(self) -> None:
        """Adds the leaves' gradients to full gradients in the reduce dtype, without communication."""
        unit = self.unit
        self._note_used()
        first = not self.accumulated
        if first:
            for number in self._segments():
                segment = unit.layout.segments[number]
                dtype: Any = segment.reduce_dtype
                # Padding travels too: it must be zero, and accumulating leaves it alone.
                self.accumulated[number] = torch.zeros(segment.numel, dtype=dtype, device=unit.device)
        pointers = [(number, flat.data_ptr()) for number, flat in self.accumulated.items()]
        unit.native.accumulate(pointers, first)

    def reduce(self, scale: float) -> None:
        """Issues the reduce-scatter of all gradients so far; `deliver` ends it.

        A parameter without a gradient on this rank counts as zeros.
        """
        unit = self.unit
        if self.accumulated:
            self.accumulate()
        else:
            self._note_used()
        used, self.used = self.used, []
        accumulated, self.accumulated = self.accumulated, {}
        targets = []
        for number in self._segments():
            add = self._prepare(number)
            source = accumulated[number].data_ptr() if number in accumulated else 0
            targets.append((number, self.buffers[number].flat.data_ptr(), add, source))
            self.written.add(number)
        if not targets:
            return
        comm = unit.comm
        reduction = unit.native.reduce(
            comm.stream, comm.native, comm.recorder, unit.generation, scale, targets, used
        )
        kept = (accumulated, [self.buffers[number].flat for number in self.written])
        comm.in_flight.add(reduction.event, kept)
        self.in_flight.append(reduction)

    def deliver(self) -> None:
        """Waits for the reductions of this backward and sets `.grad` of every parameter that was used."""
        if not self.in_flight:
            return
        in_flight, self.in_flight = self.in_flight, []
        used = [False] * len(self.unit.parameters)
        for reduction in in_flight:
            self.unit.wait(reduction.event)
            used = [a or b for a, b in zip(used, reduction.used, strict=True)]
        for number in self.written:
            for index, gradient in self.buffers[number].gradients.items():
                parameter = self.unit.parameters[index].sharded
                if used[index] and parameter.grad is not gradient and self.unit.trainable[index]:
                    parameter.grad = gradient
        self.written.clear()
        self._run_hooks(used)

    def drop(self) -> None:
        """Forgets the gradients of a backward that failed."""
        self.unit.native.drop_gradients()
        self.in_flight.clear()
        self.written.clear()

    # ---- Details

    def _segments(self) -> list[int]:
        """Segments with a parameter that trains now."""
        trainable, segments = self.unit.trainable, self.unit.layout.segments
        return [i for i, s in enumerate(segments) if any(trainable[e.index] for e in s.entries)]

    def _note_used(self) -> None:
        now = self.unit.native.has_gradients()
        self.used = [a or b for a, b in zip(self.used, now, strict=True)] if self.used else now

    def _prepare(self, number: int) -> bool:
        """Makes the segment's buffer ready; returns whether to add to it rather than overwrite it."""
        if number in self.written:
            return True
        buffer = self.buffers.get(number)
        entries = self.unit.layout.segments[number].entries
        parameters = {e.index: self.unit.parameters[e.index].sharded for e in entries}
        if all(parameter.grad is None for parameter in parameters.values()):
            if buffer is None or not buffer.is_unshared:
                self.buffers[number] = self._make_buffer(number)
            return False
        if buffer is None:
            buffer = self.buffers[number] = self._make_buffer(number)
        with torch.no_grad():
            for index, parameter in parameters.items():
                gradient = buffer.gradients[index]
                if parameter.grad is None:
                    gradient.zero_()
                elif parameter.grad is not gradient:  # the user's own: sharded alike, or full
                    gradient.copy_(parameter.grad)
                    parameter.grad = gradient
        return True

    def _make_buffer(self, number: int) -> Buffer:
        layout, rank = self.unit.layout, self.unit.group.rank
        segment = layout.segments[number]
        dtype: Any = segment.dtype
        flat = torch.empty(segment.shard_numel, dtype=dtype, device=self.unit.device)
        gradients = {}
        for entry in segment.entries:
            start, length = layout.local_slice(entry.index, rank)
            spec = self.unit.parameters[entry.index].sharded._spec
            gradients[entry.index] = ShardedTensor(flat[start : start + length], spec)
        return Buffer(flat, gradients)

    def _run_hooks(self, used: list[bool]) -> None:
        """Autograd never sees the sharded parameters: their post-accumulate hooks are called here."""
        for managed, has_gradient in zip(self.unit.parameters, used, strict=True):
            hooks = managed.sharded._post_accumulate_grad_hooks
            if hooks and has_gradient:
                for hook in tuple(hooks.values()):
                    hook(managed.sharded)
