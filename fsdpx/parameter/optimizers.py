"""What torch does before and after every step of an optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from fsdpx.parameter.identity import copied_into
from fsdpx.parameter.tensor import ShardedTensor
from fsdpx.torch_private import leave_to_eager

# Numbers that optimizers keep as tensors: without dimensions, whatever the parameter's are.
_NUMBERS = frozenset(["step", "eta", "mu", "mu_product"])
_CHECKED = "_fsdpx_checked"


def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Shards state that is whole: made before its parameter was sharded, or loaded since.

    Raises:
        RuntimeError: If the optimizer holds a parameter that is not the model's.
    """
    if torch.compiler.is_compiling():
        return
    # Loading makes a new dictionary; sharding changes classes, which only a look at each can tell.
    groups = optimizer.param_groups
    now = (optimizer.state, ShardedTensor.num_taken_over, [len(g["params"]) for g in groups])
    before: _Checked | None = optimizer.__dict__.get(_CHECKED)
    if before is None or before.state is not now[0] or before[1:3] != now[1:]:
        before = optimizer.__dict__[_CHECKED] = _Checked(*now, _settle(optimizer))
    for parameter in before.special:
        parameter.check_before_step()


class _Checked(NamedTuple):
    """What an optimizer was like when it was looked through; `special`: of subclasses of ours."""

    state: Any
    num_taken_over: int
    lengths: list[int]
    special: list[ShardedTensor]


def _settle(optimizer: torch.optim.Optimizer) -> list[ShardedTensor]:
    ours = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _check(type(optimizer).__name__, parameter)
            if isinstance(parameter, ShardedTensor):
                ours.append(parameter)
                if parameter in optimizer.state:
                    _shard_state(parameter, optimizer.state[parameter])
    return [parameter for parameter in ours if type(parameter) is not ShardedTensor]


def _check(optimizer: str, parameter: torch.Tensor) -> None:
    name = copied_into(parameter)
    if name is not None:
        raise RuntimeError(
            f"{optimizer} holds a parameter that is not the model's: its values were assigned to "
            f"the sharded parameter {name!r}, which stayed; build optimizers of model.parameters()"
        )


def _shard_state(parameter: ShardedTensor, state: dict[str, Any]) -> None:
    spec = parameter._spec
    for key, value in state.items():
        plain = isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor)
        if plain and value.shape == spec.shape and (value.dim() or key not in _NUMBERS):
            piece = spec.piece(value.detach()).to(parameter.device, copy=True)
            state[key] = ShardedTensor(piece, spec)


def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Counts the writes of compiled steps, which go behind the back of everything that counts."""
    if torch.compiler.is_compiling():
        _count_writes(optimizer)


def _count_writes(optimizer: torch.optim.Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    increment_version([p._local for p in parameters if isinstance(p, ShardedTensor)])


leave_to_eager(_count_writes)
