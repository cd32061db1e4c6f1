"""The gradient shards of a unit: from the leaves' gradients to `.grad` of the sharded
parameters.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from . import _C
from .dtypes import dtype_code
from .parameter import ShardedTensor
from .torch_private import storage_use_count
from .unit import Unit


def _most_references(objects: dict[int, Any]) -> int:
    return max((sys.getrefcount(each) for each in objects.values()), default=0)


# What that is for objects that only the dict knows.
_UNSHARED = _most_references({0: object()})


@dataclass
class Buffer:
    """The gradient shard of one segment: a flat tensor and, per parameter, the view that becomes
    `.grad`.
    """

    flat: torch.Tensor  # 1D, shard_numel, original dtype
    gradients: dict[int, ShardedTensor]  # parameter index -> view

    @property
    def is_unshared(self) -> bool:
        """Whether nobody outside holds a gradient of an earlier step (then it may be
        overwritten).
        """
        if _most_references(self.gradients) > _UNSHARED:
            return False
        return storage_use_count(self.flat) <= 1 + len(self.gradients)  # itself and the views


class _InFlight(NamedTuple):
    """A reduction together with what is to be done when it has ended."""

    reduction: _C.Reduction
    event: _C.Event  # of the last collective
    added_later: dict[int, torch.Tensor]  # segment -> sum over replicas, to be added to its buffer


@dataclass
class Gradients:
    """What a unit keeps between its backward and the optimizer."""

    unit: Unit
    buffers: dict[int, Buffer] = field(default_factory=dict)  # segment -> buffer
    accumulated: dict[int, torch.Tensor] = field(default_factory=dict)  # segment -> full gradients
    used: list[bool] = field(default_factory=list)  # parameters with a gradient in `accumulated`
    in_flight: list[_InFlight] = field(default_factory=list)
    written: set[int] = field(default_factory=set)  # segments that hold this backward's gradients

    # ---- Runtime

    def accumulate(self) -> None:
        """Adds the leaves' gradients to full gradients in the reduce dtype, without
        communication.
        """
        unit = self.unit
        self._note_used()
        first = not self.accumulated
        if first:
            for number in self._segments():
                segment = unit.layout.segments[number]
                dtype: Any = segment.reduce_dtype
                # Padding travels too: it must be zero, and accumulating leaves it alone.
                self.accumulated[number] = torch.zeros(
                    segment.numel, dtype=dtype, device=unit.device
                )
        pointers = [(number, flat.data_ptr()) for number, flat in self.accumulated.items()]
        unit.native.accumulate(unit.comm.native, pointers, first)

    def reduce(self, scale: float) -> None:
        """Issues the reduce-scatter of all gradients so far; `deliver` ends it.

        A parameter without a gradient on this rank counts as zeros.
        """
        unit = self.unit
        if self.accumulated:
            self.accumulate()
        else:
            self._note_used()
        used, self.used = [*self.used, unit.was_read], []
        unit.was_read = False
        accumulated, self.accumulated = self.accumulated, {}
        targets, added_later = [], {}
        for number in self._segments():
            add = self._prepare(number)
            target = self.buffers[number].flat
            if add and unit.replicate_comm is not None:
                # Only this step's sum goes through all replicas.
                target = added_later[number] = torch.empty_like(target)
                add = False
            source = accumulated[number].data_ptr() if number in accumulated else 0
            targets.append((number, target.data_ptr(), add, source))
            self.written.add(number)
        if not targets:
            return
        comm = unit.comm
        reduction = unit.native.reduce(
            comm.stream, comm.native, comm.recorder, scale, targets, used
        )
        event = self._sum_over_replicas(targets, added_later) or reduction.event
        flats = [self.buffers[number].flat for number in self.written]
        comm.in_flight.add(event, (accumulated, flats, added_later))
        self.in_flight.append(_InFlight(reduction, event, added_later))

    def _sum_over_replicas(
        self, targets: list[Any], added_later: dict[int, torch.Tensor]
    ) -> _C.Event | None:
        """Issues the all-reduce of the reduced shards over the replicas, behind the
        reduce-scatter.
        """
        unit, replicas = self.unit, self.unit.replicate_comm
        if replicas is None:
            return None
        event = None
        for number, *_ in targets:
            flat = added_later.get(number, self.buffers[number].flat)
            event = replicas.native.all_reduce(
                unit.comm.stream,
                unit.name,
                flat.data_ptr(),
                dtype_code(flat.dtype),
                flat.numel(),
                1.0,
                unit.comm.recorder,
            )
        return event

    def wait(self) -> None:
        """Waits until the reductions so far no longer hold full gradients."""
        for each in self.in_flight:
            self.unit.wait(each.event)

    def deliver(self) -> tuple[bool, bool]:
        """Waits for the reductions of this backward and sets `.grad` of the parameters used.

        Returns:
            Whether any rank had a gradient of the unit, and whether any rank's backward read it.
        """
        in_flight, self.in_flight = self.in_flight, []
        used = [False] * (len(self.unit.parameters) + 1)
        for each in in_flight:
            self.unit.wait(each.event)
            used = [a or b for a, b in zip(used, each.reduction.used, strict=True)]
            for number, flat in each.added_later.items():
                self.buffers[number].flat.add_(flat)
        if self.unit.replicate_comm is not None:
            used = self.unit.on_any_rank(used, self.unit.replicate_comm)
        *used, read = used
        for number in self.written:
            for index, gradient in self.buffers[number].gradients.items():
                parameter = self.unit.parameters[index].sharded
                if used[index] and parameter.grad is not gradient and self.unit.trainable[index]:
                    parameter.grad = gradient
        self.written.clear()
        self._run_hooks(used)
        return any(used), read

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
        """Makes the segment's buffer ready; returns whether to add to it rather than overwrite
        it.
        """
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
        """Autograd never sees the sharded parameters: their post-accumulate hooks are called
        here.
        """
        for managed, has_gradient in zip(self.unit.parameters, used, strict=True):
            hooks = managed.sharded._post_accumulate_grad_hooks
            if hooks and has_gradient:
                for hook in tuple(hooks.values()):
                    hook(managed.sharded)
