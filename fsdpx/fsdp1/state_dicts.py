"""State dicts of wrappers: the plain model's keys, whole values or sharded ones.

A wrapper's child appears in no key. Whole values share no memory with the model. Loading takes
either kind, without communication; all ranks load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fsdpx.parameter import ShardedTensor, state_dicts
from fsdpx.unit import Unit

CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}

_saving: ContextVar[bool] = ContextVar("saving", default=False)  # by an outer wrapper


def settings(
    kind: StateDictType,
    config: StateDictConfig | None = None,
    optim: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Checked settings, with torch's defaults for what is None."""
    if kind not in CONFIGS:
        raise NotImplementedError(
            f"FullyShardedDataParallel: {kind} is not supported: use SHARDED_STATE_DICT, which "
            "is as local, or FULL_STATE_DICT"
        )
    made = []
    for given, wanted in zip((config, optim), CONFIGS[kind], strict=True):
        if given is not None and type(given) is not wanted:
            raise RuntimeError(
                f"FullyShardedDataParallel: {kind} needs a {wanted.__name__}, got {given!r}"
            )
        made.append(wanted() if given is None else given)
    return StateDictSettings(kind, made[0], made[1])  # type: ignore[arg-type]


# ---- Saving


@contextlib.contextmanager
def outermost() -> Iterator[bool]:
    """Whether no other wrapper's state dict is being made around."""
    outer = not _saving.get()
    token = _saving.set(True)
    try:
        yield outer
    finally:
        _saving.reset(token)


def meet(unit: Unit) -> None:
    """Lets all ranks fail by name if some do something else, where they would wait for each
    other.
    """
    unit.on_any_rank([True], unit.comm)


def rename(state: Any, old: str, new: str) -> None:
    """Replaces a prefix of the keys of a state dict, and of its metadata, in place and in order."""
    for mapping, cut in ((state, ""), (getattr(state, "_metadata", {}), ".")):
        # Metadata are kept by the paths of modules, without the dot at the end.
        found = [key for key in mapping if (key + cut).startswith(old)]
        for key in found:
            renamed = new + (key + cut)[len(old) :]
            mapping[renamed.removesuffix(cut) if cut else renamed] = mapping.pop(key)


def convert(
    state: dict[str, Any],
    prefix: str,
    chosen: StateDictSettings,
    unit: Unit,
    dtypes: dict[str, torch.dtype],
) -> None:
    """Makes the entries under `prefix` what the settings want, in place; collective if whole.

    Args:
        state: Sharded values and plain ones.
        prefix: Of the outermost wrapper's keys.
        chosen: The settings.
        unit: Of the outermost wrapper.
        dtypes: Of buffers that mixed precision has cast, by key.
    """
    config: Any = chosen.state_dict_config
    whole = chosen.state_dict_type is StateDictType.FULL_STATE_DICT
    if state_dicts.sharded_for_torch():
        config, whole = ShardedStateDictConfig(), False
    drop = getattr(config, "rank0_only", False) and not unit.group.is_first
    if whole:
        meet(unit)
    gathered: dict[int, torch.Tensor] = {}  # by the piece: tied keys share a whole value too
    for key in [key for key in state if key.startswith(prefix)]:
        value = state[key]
        if isinstance(value, ShardedTensor):
            value = _convert_sharded(value, whole, gathered, drop)
        elif isinstance(value, torch.Tensor):
            value = value.to(dtypes.get(key, value.dtype))
            value = value.clone() if whole and value is state[key] else value
        if config.offload_to_cpu and isinstance(value, torch.Tensor):
            value = value.cpu()
        if drop:
            del state[key]
        else:
            state[key] = value


def _convert_sharded(
    value: ShardedTensor, whole: bool, gathered: dict[int, torch.Tensor], drop: bool
) -> torch.Tensor:
    if not whole:
        return value
    found = gathered.get(id(value._local))
    if found is None:
        found = value.full_tensor()
        gathered[id(value._local)] = found.new_empty(0) if drop else found
    return found


# ---- Loading


def name_children_when_loading(wrapper: nn.Module, child: str) -> None:
    """Lets a wrapper load keys in which its child does not appear, and report such keys."""
    errors: list[list[str]] = []

    def before(module: Any, state: Any, prefix: str, *args: Any) -> None:
        errors.append(args[-1])
        if not any(key.startswith(f"{prefix}{child}.") for key in state):
            rename(state, prefix, f"{prefix}{child}.")

    def after(module: nn.Module, found: Any) -> None:
        for names in (found.missing_keys, found.unexpected_keys, errors.pop()):
            names[:] = [name.replace(f"{child}.", "") for name in names]

    module: Any = wrapper  # torch has no types for these two
    module.register_load_state_dict_pre_hook(before)
    module.register_load_state_dict_post_hook(after)
