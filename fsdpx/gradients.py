"""The gradient shards of a unit: from the leaves' gradients to `.grad` of the sharded
parameters.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from . import _C, staging
from .dtypes import dtype_code
from .parameter import ShardedTensor, WaitingGradient
from .torch_private import storage_use_count
from .unit import Unit


def _most_references(objects: dict[int, Any]) -> int:
    return max(map(sys.getrefcount, objects.values()), default=0)


_AFTER_ACCUMULATION = operator.attrgetter("_post_accumulate_grad_hooks")
# What that is for objects that only the dict knows.
_UNSHARED = _most_references({0: object()})


@dataclass
class Buffer:
    """The gradient shard of one segment: a flat tensor and, per parameter, the view that becomes
    `.grad`.
    """

    flat: torch.Tensor  # 1D, shard_numel, original dtype
    gradients: dict[int, ShardedTensor]  # parameter index -> view
    parameters: list[ShardedTensor]  # whose gradients they are

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
    added_later: dict[int, torch.Tensor]  # segment -> sum that `deliver` adds to its buffer


class Delivered(NamedTuple):
    """What a unit's reductions in one backward have told.

    Attributes:
        used: Whether any rank had a gradient of the unit.
        read: Whether any rank's backward read it.
        news: The flags that came along, each set if it was on any rank.
    """

    used: bool
    read: bool
    news: list[bool]


@dataclass
class Gradients:
    """What a unit keeps between its backward and the optimizer."""

    unit: Unit
    buffers: dict[int, Buffer] = field(default_factory=dict)  # segment -> buffer
    accumulated: dict[int, torch.Tensor] = field(default_factory=dict)  # segment -> full gradients
    used: list[bool] = field(default_factory=list)  # parameters with a gradient in `accumulated`
    partial: dict[int, torch.Tensor] = field(default_factory=dict)  # segment -> sum of own replica
    partial_used: list[bool] = field(default_factory=list)  # parameters with one in `partial`
    waiting: dict[int, WaitingGradient] = field(default_factory=dict)  # in `.grad` of parameters
    _shown: dict[int, WaitingGradient] = field(default_factory=dict)  # kept from step to step
    _with_graph: bool = False  # whether the last backward made a graph of gradients
    in_flight: list[_InFlight] = field(default_factory=list)
    written: set[int] = field(default_factory=set)  # segments that hold this backward's gradients
    waited: set[int] = field(default_factory=set)  # of these, segments with earlier ones, too

    # ---- Properties

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients of earlier backwards that wait for their reduction."""
        if self.waiting:
            return any(self._parameter(i).grad is each for i, each in self.waiting.items())
        return bool(self.accumulated or self.partial)

    @property
    def is_due(self) -> bool:
        """Whether there are such gradients, and backwards reduce now."""
        zero = self.unit.zero
        partial = bool(self.partial) and zero.reduces_over_replicas_now
        return partial or (bool(self.accumulated) and zero.reduces_now)

    # ---- Runtime

    def accumulate(self) -> None:
        """Adds the leaves' gradients to full gradients in the reduce dtype, without
        communication.
        """
        unit = self.unit
        self._note_used()
        before = [(number, flat.data_ptr()) for number, flat in self.accumulated.items()]
        made = []
        for number in unit.trained_segments:
            if number not in self.accumulated:
                segment = unit.layout.segments[number]
                dtype: Any = segment.reduce_dtype
                # Padding travels too: it must be zero, and accumulating leaves it alone.
                flat = torch.zeros(segment.numel, dtype=dtype, device=unit.device)
                self.accumulated[number] = flat
                made.append((number, flat.data_ptr()))
        unit.native.accumulate(unit.comm.native, before, False)
        unit.native.accumulate(unit.comm.native, made, True)

    def reduce(self, scale: float, news: Sequence[bool] = ()) -> None:
        """Issues the reduction of all gradients so far; `deliver` ends it.

        A parameter without a gradient on this rank counts as zeros.

        Args:
            scale: Of the sum over ranks, replicas included.
            news: Flags that travel along; as many on all ranks.
        """
        unit = self.unit
        self._hide_waiting()
        if self.accumulated:
            self.accumulate()
        else:
            self._note_used()
        used, self.used = [*self.used, unit.was_read, *news], []
        unit.was_read = False
        self.waited |= self.accumulated.keys() | self.partial.keys()
        accumulated, self.accumulated = self.accumulated, {}
        numbers = sorted({*unit.trained_segments, *self.waited})
        if not numbers:
            return
        added_later: dict[int, torch.Tensor] = {}
        target = self._partial_target if self._stays_in_replica else self._target
        places = {number: target(number, added_later) for number in numbers}
        over_replicas = not self._stays_in_replica
        reduction, event = self._issue(places, accumulated, scale, used, over_replicas)
        self.in_flight.append(_InFlight(reduction, event, added_later))

    def show_waiting(self) -> None:
        """Lets `.grad` of parameters show that gradients wait; setting it to something else drops
        them.

        Also where this rank has none: all ranks must drop the same.
        """
        for number in self.accumulated.keys() | self.partial.keys():
            for entry in self.unit.layout.segments[number].entries:
                index, parameter = entry.index, self._parameter(entry.index)
                if index in self.waiting or not parameter.requires_grad:
                    continue
                shown = self._shown.get(index)
                if shown is None or shown.dtype != parameter.dtype:
                    shown = self._shown[index] = WaitingGradient.make(parameter)
                self.waiting[index] = shown
                shown.before, shown.is_zeroed = parameter.grad, False
                parameter.grad = shown

    def check_none_waits(self) -> None:
        """Raises if the gradient of a parameter waits."""
        for index, shown in self.waiting.items():
            if self._parameter(index).grad is shown:
                shown.full_tensor()

    def settle_waiting(self) -> None:
        """Takes over what the user did to gradients that wait."""
        dropped = {i for i, shown in self.waiting.items() if self._parameter(i).grad is not shown}
        if dropped == self.waiting.keys():
            if dropped:
                self.forget()
            return
        for index, shown in list(self.waiting.items()):
            if index in dropped or shown.is_zeroed:
                self._clear_waiting(index, index in dropped)
                shown.is_zeroed = False
            if index in dropped:
                self.waiting.pop(index).before = None

    def _clear_waiting(self, index: int, dropped: bool) -> None:
        """Sets what waits for one parameter to zero."""
        number, entry = self.unit.layout.place(index)
        if number in self.accumulated:
            self.accumulated[number][entry.offset : entry.offset + entry.numel].zero_()
        if number in self.partial:
            start, length = self.unit.layout.local_slice(index, self.unit.group.rank)
            self.partial[number][start : start + length].zero_()
        for used in (self.used, self.partial_used):
            if used and dropped:
                used[index] = False

    def hide_waiting(self) -> None:
        """Lets `.grad` be what it was before gradients waited, until `show_waiting`."""
        self.settle_waiting()
        self._hide_waiting()

    def _hide_waiting(self) -> None:
        for index, shown in self.waiting.items():
            parameter = self._parameter(index)
            if parameter.grad is shown:
                parameter.grad = shown.before
            shown.before = None
        self.waiting.clear()

    def reduce_apart(
        self, given: Mapping[int, torch.Tensor | None], scale: float
    ) -> Callable[[], dict[int, ShardedTensor | None]]:
        """Issues a reduction of whole gradients that do not go into `.grad`.

        Args:
            given: By parameter index; None: this rank has none.
            scale: Of the sum over ranks, replicas included.

        Returns:
            Waits, and gives the sharded gradients; None for parameters without one on any rank.
        """
        unit = self.unit
        numbers = sorted({unit.layout.place(index)[0] for index in given})
        buffers = {number: self._make_buffer(number) for number in numbers}
        places = {number: (made.flat, False) for number, made in buffers.items()}
        used = [given.get(index) is not None for index in range(len(unit.parameters))]
        kept = [managed.leaf.grad for managed in unit.parameters]
        try:
            for index, managed in enumerate(unit.parameters):
                managed.leaf.grad = given.get(index)
            reduction, event = self._issue(places, {}, scale, [*used, False], over_replicas=True)
        finally:
            for managed, gradient in zip(unit.parameters, kept, strict=True):
                managed.leaf.grad = gradient
        return functools.partial(self._finish_apart, given, buffers, reduction, event)

    def _finish_apart(
        self,
        given: Iterable[int],
        buffers: Mapping[int, Buffer],
        reduction: _C.Reduction,
        event: _C.Event,
    ) -> dict[int, ShardedTensor | None]:
        unit = self.unit
        unit.wait(event)
        used = reduction.used
        unit.wait_on_host(event)
        if unit.replicate_comm is not None:
            used = unit.on_any_rank(used, unit.replicate_comm)
        views = {i: view for made in buffers.values() for i, view in made.gradients.items()}
        return {index: views[index] if used[index] else None for index in given}

    def _issue(
        self,
        places: Mapping[int, tuple[torch.Tensor, bool]],
        accumulated: Mapping[int, torch.Tensor],
        scale: float,
        used: list[bool],
        over_replicas: bool,
    ) -> tuple[_C.Reduction, _C.Event]:
        """Issues a reduce-scatter and what follows it.

        Args:
            places: By segment: where its sum goes, and whether to add to what is there.
            accumulated: By segment: full gradients, where the leaves' are not meant.
            scale: Of the sum.
            used: By parameter: whether this rank has a gradient.
            over_replicas: Whether to sum over replicas too.

        Returns:
            The reduction, and the end of it all.
        """
        unit, comm = self.unit, self.unit.comm
        reduced = {number: self._on_device(*place) for number, place in places.items()}
        targets = []
        for number, (_, add) in places.items():
            source = accumulated[number].data_ptr() if number in accumulated else 0
            targets.append((number, reduced[number].data_ptr(), add, source))
        reduction = unit.native.reduce(
            comm.stream, comm.native, comm.recorder, scale, targets, used
        )
        summed = self._sum_over_replicas(list(reduced.values())) if over_replicas else None
        event = summed or reduction.event
        if unit.is_offloaded:
            flats = {number: flat for number, (flat, _) in places.items() if not flat.is_cuda}
            event = staging.bring_back(comm, [(f, reduced[n]) for n, f in flats.items()])
        comm.in_flight.add(event, (accumulated, [flat for flat, _ in places.values()]))
        return reduction, event

    def _sum_over_replicas(self, flats: list[torch.Tensor]) -> _C.Event | None:
        """Issues the all-reduce of reduced shards over the replicas, behind the reduce-scatter."""
        unit, replicas = self.unit, self.unit.replicate_comm
        if replicas is None:
            return None
        event = None
        for flat in flats:
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

    def deliver(self) -> Delivered:
        """Waits for the reductions of this backward and sets `.grad` of the parameters used."""
        in_flight, self.in_flight = self.in_flight, []
        count = len(self.unit.parameters) + 1
        used = self.partial_used or [False] * count
        self.partial_used = []
        news: list[bool] = []
        for each in in_flight:
            self.unit.wait(each.event)
            flags = each.reduction.used
            used = [a or b for a, b in zip(used, flags[:count], strict=True)]
            news = [a or b for a, b in zip(news or flags[count:], flags[count:], strict=True)]
            self.unit.wait_on_host(each.event)
            for number, flat in each.added_later.items():
                if self.unit.all_reduce_hook is not None:
                    self.unit.all_reduce_hook(flat)
                total = self.buffers[number].flat
                total.add_(flat.to(total.device))
        self.unit.comm.in_flight.prune()  # full gradients go now, not at the next collective
        if self.partial:  # the other replicas have not heard of it yet
            self.partial_used = used
            return Delivered(False, False, news)
        if self.unit.replicate_comm is not None:
            used = self.unit.on_any_rank(used, self.unit.replicate_comm)
        *used, read = used
        for number in self.written:
            buffer, trainable = self.buffers[number], self.unit.trainable
            # Not of one that was frozen since the forward, unless earlier ones have waited.
            waited = number in self.waited
            wanted = [used[i] and (waited or trainable[i]) for i in buffer.gradients]
            gradients = list(buffer.gradients.values())
            _C.set_gradients(buffer.parameters, gradients, wanted, waited)
        self._mark_graphless()
        self.written.clear()
        self.waited.clear()
        if any(map(_AFTER_ACCUMULATION, self.unit.shards.sharded)):
            self._run_hooks(used)
        return Delivered(any(used), read, news)

    def _mark_graphless(self) -> None:
        """Lets gradients of a backward with create_graph=True require grad: the sum over ranks is
        not part of the graph, so that they must not become part of a loss.
        """
        with_graph = self.unit.native.took_graph()
        if with_graph or self._with_graph:
            for number in self.written:
                for gradient in self.buffers[number].gradients.values():
                    gradient.requires_grad_(with_graph)
        self._with_graph = with_graph

    def drop(self) -> None:
        """Forgets the gradients of a backward that failed."""
        self.unit.native.drop_gradients()
        for each in self.in_flight:  # what still writes into `.grad` must not meet `zero_()`
            with contextlib.suppress(RuntimeError):  # the backward has an error of its own
                self.unit.wait(each.event)
        self.in_flight.clear()
        self.written.clear()
        self.waited.clear()

    def forget(self) -> None:
        """Forgets all gradients that wait for their reduction."""
        self.drop()
        self._hide_waiting()
        self.accumulated.clear()
        self.partial.clear()
        self.used, self.partial_used = [], []

    # ---- Details

    def _on_device(self, flat: torch.Tensor, add: bool) -> torch.Tensor:
        """`flat`, or what stands for it on the GPU where it is in CPU memory."""
        unit = self.unit
        if not unit.is_offloaded or flat.is_cuda:
            return flat
        return staging.copies(unit.comm, [flat])[0] if add else staging.room_for(unit.comm, flat)

    def _parameter(self, index: int) -> ShardedTensor:
        return self.unit.shards.sharded[index]

    @property
    def _stays_in_replica(self) -> bool:
        """Whether reductions leave the sum over replicas (HSDP) to a later one."""
        unit = self.unit
        return unit.group.num_replicas > 1 and not unit.zero.requires_all_reduce

    def _note_used(self) -> None:
        now = self.unit.native.has_gradients()
        self.used = [a or b for a, b in zip(self.used, now, strict=True)] if self.used else now

    def _target(
        self, number: int, added_later: dict[int, torch.Tensor]
    ) -> tuple[torch.Tensor, bool]:
        """Where the segment's reduction goes, and whether to add to what is there.

        What has to be summed once more goes elsewhere than `.grad`, and is put in `added_later`.
        """
        add = self._prepare(number)
        self.written.add(number)
        flat = self.buffers[number].flat
        partial = self.partial.pop(number, None)
        summed_again = self.unit.group.num_replicas > 1 and add
        if partial is None and not summed_again and self.unit.all_reduce_hook is None:
            return flat, add
        if not add:
            flat.zero_()
        room = torch.empty_like(flat, device=self.unit.device) if partial is None else partial
        added_later[number] = room
        return room, partial is not None

    def _partial_target(
        self, number: int, added_later: dict[int, torch.Tensor]
    ) -> tuple[torch.Tensor, bool]:
        """As `_target`, for a reduction that stays in this replica."""
        if (partial := self.partial.get(number)) is not None:
            return partial, True
        segment = self.unit.layout.segments[number]
        dtype: Any = segment.dtype
        partial = torch.empty(segment.shard_numel, dtype=dtype, device=self.unit.device)
        self.partial[number] = partial
        return partial, False

    def _prepare(self, number: int) -> bool:
        """Makes the segment's buffer ready; returns whether to add to it rather than overwrite
        it.
        """
        if number in self.written:
            return True
        buffer = self.buffers.get(number)
        if buffer is None:
            buffer = self.buffers[number] = self._make_buffer(number)
        if not _C.any_gradients(buffer.parameters):
            if not buffer.is_unshared:
                self.buffers[number] = self._make_buffer(number)
            return False
        with torch.no_grad():
            for parameter, gradient in zip(
                buffer.parameters, buffer.gradients.values(), strict=True
            ):
                if parameter.grad is None:
                    gradient.zero_()
                elif parameter.grad is not gradient:  # the user's own: sharded alike, or full
                    gradient.copy_(parameter.grad)
                    parameter.grad = gradient
        return True

    def _make_buffer(self, number: int) -> Buffer:
        layout, rank = self.unit.layout, self.unit.group.rank
        flat = self.unit.shards.empty(number)
        gradients = {}
        for entry in layout.segments[number].entries:
            start, length = layout.local_slice(entry.index, rank)
            spec = self.unit.parameters[entry.index].sharded._spec
            gradients[entry.index] = ShardedTensor(flat[start : start + length], spec)
        return Buffer(flat, gradients, [self._parameter(index) for index in gradients])

    def _run_hooks(self, used: list[bool]) -> None:
        """Autograd never sees the sharded parameters: their post-accumulate hooks are called
        here.
        """
        for managed, has_gradient in zip(self.unit.parameters, used, strict=True):
            hooks = managed.sharded._post_accumulate_grad_hooks
            if hooks and has_gradient:
                for hook in tuple(hooks.values()):
                    hook(managed.sharded)
