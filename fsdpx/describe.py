"""What was decided for a model: communicators and why, layout, and the memory that a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import nn

from .comm import Communicator
from .hooks import all_schedules, make_schedule
from .schedule import Schedule
from .unit import Unit, units

_MIB = 2**20
_SELDOM = ("resharded", "staging", "host_shards", "host_gradients")


@dataclass(frozen=True)
class UnitDescription:
    """One unit. Bytes are of the whole unit where nothing else is said.

    Attributes:
        name: Path of its module.
        comm: Kind of its communicator.
        reason: Why that one was chosen.
        world_size: Ranks that share it.
        num_parameters: Parameter tensors.
        numel: Elements of all parameters.
        gathered_bytes: In the compute dtypes, padding included.
        padding_bytes: Of these, bytes that belong to no parameter.
        shard_bytes: On this rank, in the original dtypes.
        gradient_bytes: Full gradients of one backward, in the compute dtypes.
        zero_stage: 1, 2 or 3.
        kept: Whether it stays gathered from forward to backward (in stages 1 and 2 until its
            weights change).
        post_forward_ranks: How many ranks share it from forward to backward, if not `world_size`;
            else None.
        offloaded: Whether shards and gradients are in CPU memory though the ranks compute on GPUs.
    """

    name: str
    comm: str
    reason: str
    world_size: int
    num_parameters: int
    numel: int
    gathered_bytes: int
    padding_bytes: int
    shard_bytes: int
    gradient_bytes: int
    zero_stage: int
    kept: bool
    post_forward_ranks: int | None
    offloaded: bool


@dataclass(frozen=True)
class MemoryDescription:
    """Bytes that one training step takes on this rank, apart from activations and optimizer state.

    Those whose names begin with `host_` are in CPU memory while the ranks compute on GPUs, all
    others where they compute.

    Attributes:
        shards: Sharded parameters.
        gradients: Sharded gradients (as large as the trainable shards).
        staging: The largest share of an offloaded unit, on its way to or from CPU memory.
        arenas: Slots of the scheduled units, all nesting levels.
        kept: Memory of units that stay gathered.
        resharded: What is kept from forward to backward for gathers within smaller groups.
        accumulated: Full gradients, in the reduce dtype, of units of stage 1; only while
            micro-batches add up.
        unit_gradients: Full gradients of the largest unit, as backward makes them.
        send_buffers: What the communicators keep for packed gradients; "shm" sends those of large
            units in parts.
        host_shards: Sharded parameters of offloaded units.
        host_gradients: Their sharded gradients.
    """

    shards: int
    gradients: int
    staging: int
    arenas: int
    kept: int
    resharded: int
    accumulated: int
    unit_gradients: int
    send_buffers: int
    host_shards: int
    host_gradients: int

    @property
    def total(self) -> int:
        """Without what is in CPU memory while the ranks compute on GPUs."""
        return sum(num_bytes for name, num_bytes in self.parts if not name.startswith("host_"))

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Names and bytes."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


@dataclass(frozen=True)
class Description:
    """`describe`'s result; print it, or read its parts."""

    units: tuple[UnitDescription, ...]
    memory: MemoryDescription

    def __str__(self) -> str:
        lines = [f"{len(self.units)} units"]
        for unit in self.units:
            pad = 100 * unit.padding_bytes / max(1, unit.gathered_bytes)
            kept = ", kept" if unit.kept else ""
            if unit.post_forward_ranks is not None:
                kept = f", shared by {unit.post_forward_ranks} from forward to backward"
            where = " in CPU memory" if unit.offloaded else ""
            lines.append(
                f"  {unit.name}: {unit.num_parameters} parameters, {unit.numel:,} elements, "
                f"{_mib(unit.gathered_bytes)} gathered ({pad:.1f} % padding), "
                f"{_mib(unit.shard_bytes)} per rank of "
                f"{unit.world_size}{where}, ZeRO-{unit.zero_stage}{kept}; {unit.comm} "
                f"({unit.reason})"
            )
        memory = self.memory
        lines.append("memory of a step on this rank, without activations and optimizer state")
        for name, num_bytes in memory.parts:
            if num_bytes or name not in _SELDOM:
                lines.append(f"  {name.replace('_', ' ')}: {_mib(num_bytes)}")
        lines.append(f"  total: {_mib(memory.total)}")
        return "\n".join(lines)


def describe(model: nn.Module) -> Description:
    """Says what was decided for a model's units: communicator and why, layout, memory.

    Collective if the model has not been called since it was sharded or converted: the ranks then
    agree on communicators and memory.

    Args:
        model: A module that `fully_shard` was called on, or one that holds such modules.

    Raises:
        ValueError: If it has no units.
    """
    found = units(model)
    if not found:
        raise ValueError("describe: the model has no units: call fully_shard first")
    if not all_schedules(model):
        make_schedule(model)
    schedules = all_schedules(model)
    for schedule in schedules:
        if schedule.is_idle:
            schedule.settle_conversions()
    owner = {unit: schedule for schedule in schedules for unit in schedule.units}
    described = tuple(_describe_unit(unit, owner[unit]) for unit in found)
    return Description(described, _describe_memory(found, described, schedules))


def _describe_unit(unit: Unit, schedule: Schedule) -> UnitDescription:
    layout, residency = unit.layout, schedule.residency
    few = unit.post_forward if not residency.has_own_memory(unit) else None
    return UnitDescription(
        name=unit.name,
        comm=unit.comm.kind,
        reason=unit.comm.reason,
        world_size=unit.group.size,
        num_parameters=len(unit.parameters),
        numel=sum(info.numel for info in layout.parameters),
        gathered_bytes=layout.gathered_bytes,
        padding_bytes=layout.padding.num_bytes,
        shard_bytes=layout.shard_bytes,
        gradient_bytes=layout.trainable_bytes,
        zero_stage=unit.zero.stage,
        kept=residency.has_own_memory(unit),
        post_forward_ranks=few.group.size if few else None,
        offloaded=unit.is_offloaded,
    )


def _describe_memory(
    found: Sequence[Unit], described: tuple[UnitDescription, ...], schedules: list[Schedule]
) -> MemoryDescription:
    memories = [memory for schedule in schedules for memory in schedule.residency.memories.values()]
    here = [unit for unit in found if not unit.is_offloaded]
    on_host = [unit for unit in found if unit.is_offloaded]
    return MemoryDescription(
        shards=_shard_bytes(here),
        gradients=_gradient_bytes(here),
        staging=max((_shard_bytes([unit]) for unit in on_host), default=0),
        arenas=sum(sum(memory.arena_num_bytes.values()) for memory in memories),
        kept=sum(unit.gathered_bytes for unit in described if unit.kept),
        resharded=sum(
            unit.post_forward.num_bytes
            for unit, each in zip(found, described, strict=True)
            if unit.post_forward and each.post_forward_ranks
        ),
        accumulated=sum(unit.accumulated_bytes for unit in found if unit.zero.stage == 1),
        unit_gradients=max((unit.gradient_bytes for unit in described), default=0),
        send_buffers=_send_buffers(found),
        host_shards=_shard_bytes(on_host),
        host_gradients=_gradient_bytes(on_host),
    )


def _shard_bytes(some: Sequence[Unit]) -> int:
    return sum(unit.layout.shard_bytes for unit in some)


def _gradient_bytes(some: Sequence[Unit]) -> int:
    segments = [segment for unit in some for segment in unit.layout.segments]
    return sum(segment.shard_bytes for segment in segments if segment.trainable)


def _send_buffers(found: Sequence[Unit]) -> int:
    largest: dict[Communicator, int] = {}
    for unit in found:
        largest[unit.comm] = max(unit.wire_bytes, largest.get(unit.comm, 0))
    return sum(comm.native.send_buffer_bytes(size) for comm, size in largest.items())


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.2f} MiB"
