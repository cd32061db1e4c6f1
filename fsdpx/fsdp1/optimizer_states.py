"""Optimizer state dicts by parameter name, whole or sharded, as FSDP1 gives and takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from fsdpx.parameter import ShardedTensor, collectives
from fsdpx.sync import broadcast_states
from fsdpx.unit import Unit

State = dict[str, Any]


class How(NamedTuple):
    """What the settings of a model's wrappers say about optimizer states.

    Attributes:
        whole: Sharded values become whole ones.
        offload: Values are moved to CPU memory.
        rank0_only: Only the first rank saves, or has what is loaded.
        unit: Of the outermost wrapper.
    """

    whole: bool
    offload: bool
    rank0_only: bool
    unit: Unit


def save(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: State | None, how: How
) -> State:
    """An optimizer's state dict with names in place of numbers; collective if whole.

    Args:
        model: Whose parameters the optimizer has.
        optimizer: Its parameter groups give the meaning of the numbers.
        state_dict: What `optimizer.state_dict()` returned; called here if None.
        how: What becomes of values.

    Returns:
        The same structure; whole tensors share no memory with the optimizer's.
    """
    names = _names(model, optimizer)
    state_dict = optimizer.state_dict() if state_dict is None else state_dict
    drop = how.rank0_only and not how.unit.group.is_first
    states: State = {}
    for number, state in state_dict["state"].items():
        saved = {key: _save(value, how, drop) for key, value in state.items()}
        states[names[number]] = saved
    groups = []
    for group in state_dict["param_groups"]:
        groups.append({**group, "params": [names[number] for number in group["params"]]})
    return {} if drop else {"state": states, "param_groups": groups}


def _save(value: Any, how: How, drop: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if how.whole:
        value = value.full_tensor() if isinstance(value, ShardedTensor) else value.clone()
    if drop:
        return None  # one whole value at a time
    return value.cpu() if how.offload else value


def load(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: State, from_first: Unit | None
) -> State:
    """What `optimizer.load_state_dict` takes, from a state dict by names; collective if
    `from_first`.

    Args:
        model: Whose parameters the optimizer has.
        optimizer: That will load the result.
        saved: Whole or sharded values.
        from_first: The first of this unit's ranks has `saved`, the others get it from there. None:
            every rank has it.

    Raises:
        ValueError: A name is none of the optimizer's, or a parameter group lacks names; all are
            named.
    """
    names = _names(model, optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_name = dict(zip(names, parameters, strict=True))
    if from_first is not None:
        saved = _share(saved, from_first)
    _check_names("state", saved["state"], by_name)
    states = {}
    for number, name in enumerate(names):
        if name in saved["state"]:
            state = saved["state"][name]
            states[number] = {
                key: _load(key, value, by_name[name], from_first) for key, value in state.items()
            }
    return {"state": states, "param_groups": _groups(optimizer, names, saved["param_groups"])}


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in the order in which it numbers them."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    names = []
    for position, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"FullyShardedDataParallel: parameter {index} of the optimizer's group "
                    f"{position}, of shape {tuple(parameter.shape)}, is none of the model's"
                )
            names.append(known[id(parameter)])
    return names


def _check_names(what: str, found: Any, known: Any) -> None:
    unknown = [name for name in found if name not in known]
    if unknown:
        raise ValueError(
            f"FullyShardedDataParallel: the optimizer has no parameter {', '.join(unknown)}, "
            f"which the {what} to load names"
        )


def _groups(optimizer: Any, names: list[str], saved: list[State]) -> list[State]:
    """The saved options for each of the optimizer's groups, which must hold the same names."""
    groups, start = [], 0
    by_first = {group["params"][0]: group for group in saved if group["params"]}
    for group in optimizer.param_groups:
        numbers = range(start, start + len(group["params"]))
        start = numbers.stop
        mine = {names[number] for number in numbers}
        found: State = next((by_first[name] for name in mine if name in by_first), {"params": []})
        if set(found["params"]) != mine:
            differ = ", ".join(sorted(mine ^ set(found["params"])))
            raise ValueError(
                f"FullyShardedDataParallel: the saved parameter groups are others than the "
                f"optimizer's; they differ in {differ}"
            )
        groups.append({**found, "params": list(numbers)})
    return groups


def _load(key: str, value: Any, parameter: torch.Tensor, from_first: Unit | None) -> Any:
    """This rank's part of a value of the state."""
    if isinstance(value, _Shared):
        value = value.receive()
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, ShardedTensor):
        spec = getattr(parameter, "_spec", None)
        if spec is None or not spec.same_sharding(value._spec):
            raise ValueError(
                f"FullyShardedDataParallel: state '{key}' of parameter '{value._spec.name}' is "
                "sharded otherwise than the parameter: load it with torch.distributed.checkpoint"
            )
        return ShardedTensor(value.to_local().clone(), spec)
    # A parameter without dimensions has a state of that shape which is not like it: "step".
    is_alike = value.shape == parameter.shape and key != "step"
    if is_alike and isinstance(parameter, ShardedTensor):
        return ShardedTensor(parameter._spec.piece(value.detach()).clone(), parameter._spec)
    return value.clone()


class _Shared:
    """A tensor that the first rank has and the others will get, one at a time."""

    def __init__(self, value: torch.Tensor) -> None:
        self.shape, self.dtype = value.shape, value.dtype
        self.value: torch.Tensor | None = value.detach()
        self.unit: Unit | None = None

    def __getstate__(self) -> State:
        return {"shape": self.shape, "dtype": self.dtype, "value": None, "unit": None}

    def receive(self) -> torch.Tensor:
        value = torch.empty(self.shape, dtype=self.dtype) if self.value is None else self.value
        assert self.unit is not None
        broadcast_states([("", value)], self.unit.group, self.unit.device)
        return value


def _share(saved: State, unit: Unit) -> State:
    """The first rank's structure on all ranks, with tensors to be received."""
    mine: Any = None
    if unit.group.is_first:
        states = {
            name: {k: _Shared(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
            for name, state in saved["state"].items()
        }
        mine = {"state": states, "param_groups": saved["param_groups"]}
    for group in (unit.group.replicate_group, unit.group.process_group):
        theirs = collectives.gather_objects(mine, group)
        mine = theirs[0] if mine is None else mine
    for state in mine["state"].values():
        for value in state.values():
            if isinstance(value, _Shared):
                value.unit = unit
    return mine  # type: ignore[no-any-return]
