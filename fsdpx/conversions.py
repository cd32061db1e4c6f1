"""What `Module.to()`, `half()`, `to_empty()` and their kin did to the parameters of units.

[Note: Conversions] `torch.nn.Module._apply` gives a sharded parameter new content: a piece of its
own, perhaps of another dtype. Before the next outermost forward (or `unshard()`) the flat shards
follow. Where dtypes changed the unit gets a new native half and new memory, but the cuts stay:
every rank keeps the elements that it has, so optimizer state and gradients still fit. Ranks that
were not converted alike find out before data moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .attributes import install_parameters, replace_in_lists
from .collect import managed_modules
from .gradients import Gradients
from .layout import ALIGNMENT_BYTES, Entry, ParameterInfo, Segment, UnitLayout
from .parameter import convert_leaf, keep_attributes
from .residency import Residency
from .unit import Unit, units


@contextlib.contextmanager
def conversion(module: nn.Module) -> Iterator[None]:
    """Around `_apply` of a sharded module: what `unshard()` has gathered is freed, parameters keep
    what the user hung on them, and `.grad` does not show what waits for its reduction.
    """
    used = [unit for unit in units(module) if unit.listener is not None]
    for unit in used:
        if unit.kept_by_user and not unit.held and unit.listener.is_idle:
            unit.listener.reshard(unit)
    gradients: list[Gradients] = [unit.listener.gradients[unit] for unit in used]
    for own in gradients:
        own.hide_waiting()
    with keep_attributes(list(module.parameters())):
        yield
    for own in gradients:
        own.show_waiting()


def settle_conversions(gradients: Mapping[Unit, Gradients], residency: Residency) -> None:
    """Lets units follow what was done to their parameters since the last forward; collective where
    dtypes changed.

    Raises:
        RuntimeError: A parameter is on another device, or gradients still wait in the old dtype.
        DesyncError: Ranks have converted a unit differently.
    """
    resized = False
    for unit, own in gradients.items():
        if not unit.shards.were_replaced:
            continue
        if unit.shards.first_moved() is not None:
            unit.shards.check_moved(unit.name)
            layout = layout_of(unit)
            if layout is not unit.layout:
                _check_reduced(unit, own)
                _agree(unit, layout)
                residency.drop(unit)
                _convert(unit, layout)
                resized = True
            unit.rehome()
            own.buffers.clear()
        unit.shards.keep_attributes()
        # Recurrent layers have made their lists of parameters anew.
        sharded = {id(managed.sharded): managed for managed in unit.parameters}
        replace_in_lists(managed_modules(unit.modules, unit), sharded)
    if resized:
        residency.size_arenas(list(gradients))


def _check_reduced(unit: Unit, gradients: Gradients) -> None:
    if gradients.is_pending:
        raise RuntimeError(
            f"fsdpx: unit '{unit.name}' was converted to another dtype while gradients of earlier "
            "micro-batches wait for their reduction: convert the model between steps, or drop "
            "them first with zero_grad() of the model"
        )


def _agree(unit: Unit, layout: UnitLayout) -> None:
    """Whoever does not convert the unit now, or to other dtypes, does another collective."""
    dtypes = ", ".join(dict.fromkeys(str(segment.dtype) for segment in layout.segments))
    for comm in (unit.comm, unit.replicate_comm):
        if comm is not None:
            unit.wait(comm.native.barrier(comm.stream, f"{unit.name}, converted to {dtypes}"))


def _convert(unit: Unit, layout: UnitLayout) -> None:
    leaves = [managed.leaf for managed in unit.parameters]
    unit.lay_out(layout)
    for managed, leaf in zip(unit.parameters, leaves, strict=True):
        convert_leaf(leaf, managed.leaf, managed.name)
        managed.leaf = managed.sharded._leaf = leaf
    install_parameters(unit)


# ---- Layout


def layout_of(unit: Unit) -> UnitLayout:
    """The unit's layout for the dtypes that its parameters have now; its own if those are the
    same.
    """
    policy, before = unit.options.mp_policy, unit.layout.parameters
    dtypes: list[Any] = [managed.sharded.dtype for managed in unit.parameters]
    if dtypes == [info.dtype for info in before]:
        return unit.layout
    infos = [
        replace(
            info,
            dtype=dtype,
            compute_dtype=policy.compute_dtype(dtype),
            reduce_dtype=policy.accumulate_dtype(dtype),
        )
        for info, dtype in zip(before, dtypes, strict=True)
    ]
    return converted(unit.layout, infos)


def converted(layout: UnitLayout, parameters: Sequence[ParameterInfo]) -> UnitLayout:
    """The same cuts for other dtypes.

    A segment of which some parameters were converted, and some not, becomes several of the same
    size, each with gaps where the others have parameters.

    Args:
        layout: As it was.
        parameters: With their new dtypes.
    """
    segments: list[Segment] = []
    position = 0
    for segment in layout.segments:
        groups: dict[tuple[Any, Any, Any], list[Entry]] = {}
        for entry in segment.entries:
            info = parameters[entry.index]
            key = (info.dtype, info.compute_dtype, info.reduce_dtype)
            groups.setdefault(key, []).append(entry)
        for (dtype, compute, reduce), entries in groups.items():
            made = replace(
                segment,
                dtype=dtype,
                compute_dtype=compute,
                reduce_dtype=reduce,
                entries=tuple(entries),
                byte_offset=position,
            )
            segments.append(made)
            position += -(-made.gathered_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return UnitLayout(tuple(parameters), layout.world_size, tuple(segments))
