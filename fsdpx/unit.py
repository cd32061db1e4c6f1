"""A unit: the parameters of one `fully_shard` call, their shards, and whether they are gathered."""

from __future__ import annotations

import copy
import operator
import os
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from . import _C, staging
from .comm import Communicator
from .dtypes import dtype_code as code
from .layout import Granularity, ParameterInfo, UnitLayout, plan_unit
from .memory import Place
from .mesh import ShardGroup
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy
from .shards import Managed, Shards, contents_of, original_of, take_edits
from .states import LEGAL_MOVES, Phase, Storage
from .zero import ZeroPolicy

_OUTDATED = -1  # generation of a gather that must not be used again
# Freed parameters become NaN: whoever still reads them is found out.
POISON = os.environ.get("FSDPX_POISON") == "1"
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
WAIT_FOREVER = 1e8  # seconds: the communicators' own limits end every collective


@dataclass(frozen=True)
class UnitOptions:
    """What `fully_shard` was told; see there."""

    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool | None
    prefetch: int
    granularity: Granularity | Callable[[str, Any], Granularity]
    zero_stage: int = 3
    offload: CPUOffloadPolicy | None = None


class Pending(NamedTuple):
    """A gather, in flight or attached: its place and the end of its collective together."""

    comm: Communicator
    event: _C.Event
    place: Place
    generation: int
    issued: _C.Instant | int  # ns


class Unit:
    """Parameters that are gathered, freed and reduced together.

    The unit knows how to do each of these; when is the schedule's business.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: list[Managed],
        group: ShardGroup,
        options: UnitOptions,
        device: torch.device,
        layout: UnitLayout | None = None,
    ) -> None:
        self.modules = tuple(modules)
        self.name = self.class_name = type(modules[0]).__name__
        self.group = group
        self.options = options
        self.device = device
        self.parameters = parameters
        self.storage = Storage.SHARDED
        self.phase = Phase.IDLE
        self.pins = 0  # forwards of the unit that are running
        self.was_read = False  # by a backward since the last reduction
        self.num_calls = 0  # forwards of its modules in this pass
        self.gathered: Pending | None = None
        self.kept_by_user = False  # unshard() without reshard() or a forward since
        self.held = False  # inside full_parameters(): forwards leave it gathered too
        self.trainable: list[bool] = [bool(original_of(m).requires_grad) for m in parameters]
        layout = layout or self._plan(self.trainable)
        self.shards = Shards(parameters, layout, group, device, options.offload)
        self.is_offloaded = self.shards.device.type != device.type
        self._nothing = torch.empty(1, device="cpu")  # what a unit without elements is attached to
        self.lay_out(layout)
        self.zero = ZeroPolicy(options.zero_stage, options.reshard_after_forward)
        self.post_forward: Any = None  # a PostForward, where a smaller group shares it then
        self.gradient_divisor: float = group.size * group.num_replicas
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.forward_prefetch: Sequence[Unit] | None = None  # chosen by the user
        self.backward_prefetch: Sequence[Unit] | None = None
        self.listener: Any = None  # the schedule
        self.changed = False  # parameters or modules were registered since the last forward
        self.ignored: dict[int, nn.Parameter] = {}  # by id: parameters that are left alone
        self.dictionaries: list[Any] = []  # the native half borrows them
        self.containers = [(m, len(m._modules)) for m in containers(modules)]

    # ---- Initialization

    def lay_out(self, layout: UnitLayout) -> None:
        """Makes the native half and the full parameters."""
        self.layout = layout
        self.gathered_bytes = layout.gathered_bytes
        self.native = self._make_native()
        self.native.set_owner(self)
        self._make_leaves()
        if not self.gathered_bytes:
            self.native.attach(self._nothing.data_ptr())
        self.trained_segments = self._find_trained()  # with a parameter that trains now
        self._attached: int | None = None  # generation of what was gathered last
        self._plan_gather: _C.GatherPlan | None = None
        self._followed: int | None = None  # generation whose writes the stream has followed

    def _plan(self, trainable: Sequence[bool]) -> UnitLayout:
        policy = self.options.mp_policy
        infos = []
        for managed, trains in zip(self.parameters, trainable, strict=True):
            original = original_of(managed)
            infos.append(
                ParameterInfo(
                    managed.name,
                    tuple(original.shape),
                    original.dtype,
                    policy.compute_dtype(original.dtype),
                    policy.accumulate_dtype(original.dtype),
                    trains,
                )
            )
        return plan_unit(infos, self.group.size, self._granularities())

    def _granularities(self) -> list[Granularity]:
        """What a cut must leave whole, for each parameter."""
        chosen = self.options.granularity
        found: list[Granularity] = []
        for managed in self.parameters:
            each = chosen(managed.name, original_of(managed)) if callable(chosen) else chosen
            managed.whole = each == "parameter"
            found.append(each)
        return found

    def _make_native(self) -> _C.Unit:
        segments = []
        for segment in self.layout.segments:
            dtype = _torch(segment.dtype)
            wire = self.options.mp_policy.wire_dtype(dtype)
            dtypes = [segment.compute_dtype, wire, segment.reduce_dtype, dtype]
            gradient, travels, accumulator, shard = (code(_torch(d)) for d in dtypes)
            entries = [(e.index, e.offset, e.numel) for e in segment.entries]
            numel = segment.shard_numel
            segments.append((gradient, travels, accumulator, shard, numel, entries))
        return _C.Unit(self.name, self.layout.gathered_bytes, self.device, segments)

    def _make_leaves(self) -> None:
        for index, managed in enumerate(self.parameters):
            number, entry = self.layout.place(index)
            segment = self.layout.segments[number]
            offset = self.layout.gathered_offset(index)
            dtype = _torch(segment.compute_dtype)
            flat = self.native.segment(offset, entry.numel, dtype)
            view = flat.view(managed.sharded.shape)
            managed.leaf = nn.Parameter(view, requires_grad=managed.sharded.requires_grad)
            managed.traits.give_to(managed.leaf)
            managed.sharded._leaf, managed.sharded._module = managed.leaf, self.class_name
            self.native.add_leaf(managed.leaf)
            managed.watched = managed.sharded.requires_grad
            if managed.watched:
                self.native.watch(index)
        self.rename(self.name)

    def rename(self, name: str) -> None:
        """Sets the unit's name, and so its parameters' names in messages."""
        self.name = name
        ranges = []
        for index, managed in enumerate(self.parameters):
            begin = self.layout.gathered_offset(index)
            end = begin + managed.leaf.numel() * managed.leaf.itemsize
            ranges.append((begin, end, managed.name))
        self.native.set_names(name, ranges)
        self._plan_gather = None

    def twin(self, layout: UnitLayout) -> Unit:
        """A unit with copies of the shards; `copies.py` gives it modules of its own."""
        parameters = [managed.twin() for managed in self.parameters]
        options = (self.group, self.options, self.device, layout)
        made = Unit(self.modules, parameters, *options)
        made.rename(self.name)
        made.zero = copy.copy(self.zero)
        made.gradient_divisor = self.gradient_divisor
        made.all_reduce_hook = self.all_reduce_hook
        made.ignored = dict(self.ignored)
        return made

    # ---- Properties

    @cached_property
    def comm(self) -> Communicator:
        """The communicator; made, collectively, at the first use."""
        from . import comm

        return comm.create(self.group.process_group, kind=self.group.kind, device=self.device)

    @cached_property
    def replicate_comm(self) -> Communicator | None:
        """The communicator of the ranks that hold the same shard; None without replicas."""
        if self.group.num_replicas == 1:
            return None
        from . import comm

        group, kind = self.group.replicate_group, self.group.kind
        return comm.create(group, kind=kind, device=self.device, beside=self.comm)

    def forget_closed(self) -> None:
        """Lets the next use make communicators anew in place of closed ones."""
        for name in ("comm", "replicate_comm"):
            made: Communicator | None = self.__dict__.get(name)
            if made is not None and made.closed:
                del self.__dict__[name]
        if self.post_forward is not None:
            self.post_forward.forget_closed()

    @property
    def wire_bytes(self) -> int:
        """Bytes of the unit's packed gradients as they travel."""
        if self.zero.stage == 1:
            return self.accumulated_bytes
        policy = self.options.mp_policy
        segments = [s for s in self.layout.segments if s.trainable]
        return sum(s.numel * policy.wire_dtype(_torch(s.dtype)).itemsize for s in segments)

    @property
    def accumulated_bytes(self) -> int:
        """Bytes of full gradients that are added up in the reduce dtype."""
        segments = [s for s in self.layout.segments if s.trainable]
        return sum(s.numel * _torch(s.reduce_dtype).itemsize for s in segments)

    @property
    def is_gathered(self) -> bool:
        """Whether the full parameters take memory now (their gather may still run)."""
        return self.storage is not Storage.SHARDED

    @property
    def generation(self) -> int:
        """Moves with every in-place change of the shards."""
        return self.shards.generation

    @property
    def is_stale(self) -> bool:
        """Whether the gathered parameters are older than the shards."""
        return self.gathered is not None and self.gathered.generation != self.generation

    @property
    def is_edited(self) -> bool:
        """Whether a full parameter was changed in place since it was gathered."""
        return self.storage is Storage.GATHERED and self.native.edited

    # ---- Runtime

    def _to_storage(self, storage: Storage) -> None:
        if (self.storage, storage) not in LEGAL_MOVES:
            raise AssertionError(f"unit '{self.name}': {self.storage} -> {storage}")
        self.storage = storage

    def to_phase(self, phase: Phase) -> None:
        if phase is not self.phase and (self.phase, phase) not in LEGAL_MOVES:
            raise AssertionError(f"unit '{self.name}': {self.phase} -> {phase}")
        self.phase = phase

    def rehome(self) -> None:
        """Lets the flat shards follow pieces that were replaced; see conversions.py."""
        self.shards.rehome(self.layout)
        self._plan_gather = None

    def refresh(self) -> None:
        """Takes over `requires_grad` as the user has set it since."""
        now = list(map(_REQUIRES_GRAD, self.shards.sharded))
        if now != self.trainable:
            self._set_trainable(now)

    def _set_trainable(self, now: list[bool]) -> None:
        self.trainable = now
        self.trained_segments = self._find_trained()
        for index, (managed, trains) in enumerate(zip(self.parameters, now, strict=True)):
            managed.leaf.requires_grad_(trains)
            if trains and not managed.watched:
                self.native.watch(index)
                managed.watched = True
        self._plan_gather = None

    def _find_trained(self) -> list[int]:
        segments = enumerate(self.layout.segments)
        return [i for i, s in segments if any(self.trainable[e.index] for e in s.entries)]

    def start_gather(self, place: Place) -> None:
        """Issues the all-gather into `place`."""
        comm = self.comm
        generation = self.generation  # this rank's own: writes need not be alike on all ranks
        if self._plan_gather is None:
            self._plan_gather = self._make_gather_plan(self.shards.flat)
            self._followed = None
        # What wrote to the shards may still be queued. And the host runs ahead of a GPU: where it
        # gathers nothing ahead, nor must the stream.
        if self._followed != generation or not self.options.prefetch:
            comm.stream.follow(comm.stream.mark())
            self._followed = generation
        staged = self.is_offloaded and staging.copies(comm, self.shards.flat)
        plan = self._make_gather_plan(staged) if staged else self._plan_gather
        self.issue_gather(comm, plan, place, generation, self.shards.flat)

    def issue_gather(
        self, comm: Communicator, plan: _C.GatherPlan, place: Place, generation: int, used: Any
    ) -> None:
        """Issues an all-gather by `comm`, which runs on the unit's stream."""
        stream, recorder = self.comm.stream, self.comm.recorder
        for mark in place.free_after:
            stream.follow(mark)
        issued = stream.reached() if recorder.enabled else time.monotonic_ns()
        event = comm.native.all_gather(stream, plan, place.region, place.offset, recorder)
        comm.in_flight.add(event, used)
        self.gathered = Pending(comm, event, place, generation, issued)
        self._to_storage(Storage.GATHERING)

    def _make_gather_plan(self, shards: Sequence[torch.Tensor]) -> _C.GatherPlan:
        segments = []
        for segment, shard in zip(self.layout.segments, shards, strict=True):
            if shard.device.type == "meta":
                raise RuntimeError(
                    f"fsdpx: unit '{self.name}' is still on the meta device: call "
                    "model.to_empty(device=...) and initialise its parameters before the first "
                    "forward"
                )
            dtypes = (code(_torch(segment.dtype)), code(_torch(segment.compute_dtype)))
            pointer, numel = shard.data_ptr(), segment.shard_numel
            segments.append((pointer, dtypes[0], numel, segment.byte_offset, dtypes[1]))
        return _C.GatherPlan(self.name, segments, contents_of(self.parameters))

    def finish_gather(self) -> None:
        """Waits for the gather and attaches its memory."""
        if self.storage is not Storage.GATHERING:
            return
        gathered = self.gathered
        assert gathered is not None
        self.wait(gathered.event)
        newer = self._attached not in (None, gathered.generation)
        self.native.attach(gathered.place.pointer, newer, gathered.event)
        self._attached = gathered.generation
        self._to_storage(Storage.GATHERED)

    def wait(self, event: _C.Event) -> None:
        """Blocks until a collective of this unit has ended; recorded as exposed communication."""
        recorder = self.comm.recorder
        if not recorder.enabled:
            event.wait(WAIT_FOREVER)
            return
        begin = self.comm.stream.computed()
        event.wait(WAIT_FOREVER)
        end = self.comm.stream.computed()
        recorder.record("compute", self.name, "wait", begin, begin, end, 0)

    def wait_on_host(self, event: _C.Event) -> None:
        """Blocks until a collective has read or written what is in CPU memory beside a GPU."""
        if self.is_offloaded:
            staging.wait_on_host(self.comm, event, self.name)

    def on_any_rank(self, flags: Sequence[bool], group: Communicator) -> list[bool]:
        """Which of the flags are set on any rank of `group`; collective, in the order of issue."""
        if group.size == 1:
            return list(flags)
        control = group.control
        counts = array("f", flags)  # not a tensor: torch.func would wrap it
        address, numel = counts.buffer_info()
        where = (address, code(torch.float32), numel)
        self.wait(control.native.all_reduce(control.stream, self.name, *where))
        return [count > 0 for count in counts]

    def free(self) -> Place:
        """Detaches the full parameters; the caller gives the returned place back."""
        gathered = self.gathered
        assert gathered is not None
        self.native.detach()
        comm, place = self.comm, gathered.place
        if POISON:
            comm.native.poison(place.pointer, place.num_bytes)
        if marks := comm.stream.marks_of_users(gathered.event):
            place = place._replace(free_after=tuple(marks))
        self.gathered = None
        self._to_storage(Storage.SHARDED)
        recorder = self.comm.recorder
        if recorder.enabled:
            begin, end = gathered.issued, comm.stream.computed()
            recorder.record("resident", self.name, "full", begin, begin, end, 0)
        return place

    def write_back(self) -> None:
        """Takes this rank's piece of every full parameter over into the shard, where it differs."""
        if self.storage is not Storage.GATHERED:
            return
        if self.is_stale:  # what differs was edited in the shard
            self.check_unedited()
            return
        with torch.no_grad():
            for managed in self.parameters:
                # Values are compared: edits through `.data` move no version.
                take_edits(managed.leaf, managed.sharded)

    def check_unchanged(self) -> None:
        """Raises if the shards were changed since they were last gathered: a backward that reads
        the unit now would not see the weights that its forward saw.
        """
        if self._attached not in (None, self.generation):
            raise RuntimeError(
                f"fsdpx: parameters of unit '{self.name}' were changed (an optimizer step, a "
                "loaded state dict) after the forward whose backward now reads them: run backward "
                "before the change, or forward again"
            )

    def check_unconverted(self) -> None:
        """Raises if parameters were converted or moved in the middle of a step."""
        if (managed := self.shards.first_moved()) is not None:
            raise RuntimeError(
                f"fsdpx: parameter '{managed.name}' of unit '{self.name}' was converted or moved "
                f"(to(), half(), to_empty(); it is {managed.sharded.dtype} on "
                f"{managed.sharded.device} now) between a forward and its backward, or inside one "
                "of them: convert the model between steps"
            )

    def check_unedited(self) -> None:
        """Raises if a full parameter was changed in place since it was gathered: the change would
        be lost.
        """
        if self.is_edited:
            assert self.gathered is not None
            self.native.forget_edits()  # raises once
            self.gathered = self.gathered._replace(generation=_OUTDATED)
            raise RuntimeError(
                f"fsdpx: unit '{self.name}': forward changed a gathered parameter in place; the "
                "change would be lost when the unit is freed. Change model.parameters() under "
                "torch.no_grad() instead"
            )

    # ---- Called from autograd (csrc/torch_unit.cpp)

    def on_access(self) -> None:
        self.listener.on_access(self)

    def on_first_gradient(self) -> None:
        self.listener.on_first_gradient(self)

    def on_gradients(self) -> None:
        self.listener.on_gradients(self)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `fully_shard` made of `module` (alone or in a list), or None."""
    return module.__dict__.get("_fsdpx_unit")


def containers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those among all modules below that take modules in without registering them (`insert`)."""
    kinds = (nn.ModuleList, nn.Sequential)
    return [m for module in modules for m in module.modules() if isinstance(m, kinds)]


def units(model: nn.Module) -> list[Unit]:
    """The units of a model in registration order, outer before inner."""
    found = (unit_of(module) for module in model.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def communicators(model: nn.Module) -> list[Communicator]:
    """The communicators of a model's units, without duplicates; collective where they are not made
    yet.
    """
    return list(dict.fromkeys(unit.comm for unit in units(model)))


def _torch(dtype: Any) -> torch.dtype:
    assert isinstance(dtype, torch.dtype)
    return dtype


__all__ = ["Phase", "Storage", "Unit", "communicators", "unit_of", "units"]
