"""Sharded parameters as the `inputs` of torch's backward functions, and their gradient edges.

Graphs hold a unit's full parameters; the user has the sharded ones. So where torch looks an input
up in a graph, the full parameter takes its place. `backward(inputs=...)` needs no more: what it
accumulates is reduced as always. `torch.autograd.grad` gives this rank's whole gradients, which are
reduced here: a rank that applied its own to its piece would train on its own batch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from . import _C
from .parameter import ShardedTensor
from .torch_private import is_batched, wrap_backward
from .unit import Unit


def install() -> None:
    """Lets torch's backward functions find sharded parameters; done at import, harmless when
    repeated.
    """
    wrap_backward(_run_backward, _full)


def _full(tensor: Any) -> Any:
    """What graphs hold in place of a sharded parameter; anything else is itself.

    Raises:
        RuntimeError: If it is made like a parameter, but no graph can hold it.
    """
    if not isinstance(tensor, ShardedTensor) or not tensor._is_param:
        return tensor
    if tensor._leaf is None:
        raise RuntimeError(
            f"fsdpx: {tensor!r} is a copy, or stands for several parameters: no forward reads it, "
            "so there is no gradient by it; give backward the parameters of the sharded module"
        )
    return tensor._leaf


def _run_backward(
    run: Callable[..., Any],
    outputs: Sequence[Any],
    output_gradients: Sequence[Any],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unreachable: bool,
    accumulate_grad: bool,
) -> Any:
    """Stands for torch's function of the same arguments, `run`."""
    given = (outputs, output_gradients, retain_graph, create_graph)
    sharded = [i for i, each in enumerate(inputs) if isinstance(each, ShardedTensor)]
    # Elementwise operators on sharded parameters make graphs that hold these themselves.
    if not sharded or any(isinstance(each, ShardedTensor) for each in outputs):
        return run(*given, inputs, allow_unreachable, accumulate_grad=accumulate_grad)
    full = tuple(_full(each) for each in inputs)
    if accumulate_grad:
        return run(*given, full, allow_unreachable, accumulate_grad=True)
    if create_graph:
        _refuse(inputs[sharded[0]], "with create_graph=True")
    if any(is_batched(each) for each in output_gradients if each is not None):
        _refuse(inputs[sharded[0]], "with is_grads_batched=True")
    # Whether a parameter is used is for all ranks to say.
    found = list(run(*given, full, True, accumulate_grad=False))
    reduced = _reduce([(inputs[i], found[i]) for i in sharded])
    for i, gradient in zip(sharded, reduced, strict=True):
        found[i] = gradient
    for each, gradient in zip(inputs, found, strict=True):
        if gradient is None and not allow_unreachable:
            name = f"parameter '{each._spec.name}'" if isinstance(each, ShardedTensor) else "input"
            raise RuntimeError(
                f"torch.autograd.grad: {name} was not used in the graph on any rank: set "
                "allow_unused=True if that is meant"
            )
    return tuple(found)


def _refuse(parameter: ShardedTensor, how: str) -> NoReturn:
    raise RuntimeError(
        f"fsdpx: torch.autograd.grad by the sharded parameter '{parameter._spec.name}' {how}: the "
        "sum over ranks is not part of a graph. Ask for this rank's whole gradient, by "
        "torch.autograd.graph.get_gradient_edge(parameter)"
    )


def _reduce(found: list[tuple[ShardedTensor, torch.Tensor | None]]) -> list[torch.Tensor | None]:
    """The mean over ranks of whole gradients, sharded as their parameters; None where no rank has
    one. Collective.
    """
    places = [_place(parameter) for parameter, _ in found]
    by_unit: dict[Unit, dict[int, torch.Tensor | None]] = {}
    for (unit, index), (_, gradient) in zip(places, found, strict=True):
        if unit.listener is not None:  # else no forward has read it
            by_unit.setdefault(unit, {})[index] = gradient
    running = {
        unit: unit.listener.gradients[unit].reduce_apart(given, 1.0 / unit.gradient_divisor)
        for unit, given in by_unit.items()
    }
    reduced = {unit: finish() for unit, finish in running.items()}
    for schedule in dict.fromkeys(unit.listener for unit in by_unit):
        if schedule.is_idle:
            schedule.free_after_backward()  # on a rank whose backward read no unit, too
    return [reduced[unit][index] if unit in reduced else None for unit, index in places]


def _place(parameter: ShardedTensor) -> tuple[Unit, int]:
    """A parameter's unit, and its number there."""
    unit: Unit = _C.Unit.owner_of(_full(parameter))
    numbers = (i for i, managed in enumerate(unit.parameters) if managed.sharded is parameter)
    return unit, next(numbers)


install()
