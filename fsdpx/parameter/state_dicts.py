"""Teaches `torch.distributed.checkpoint.state_dict` whole state dicts of sharded parameters.

Its functions know torch's own sharded classes by `isinstance`. Ours would pass through
``get_*_state_dict(full_state_dict=True)`` still sharded, and ``set_optimizer_state_dict`` would
load whole tensors as state, both without a word. So three helpers of that module are wrapped;
saving and loading sharded state dicts needs none of this.

A fourth one lets modules that give whole state dicts by default (FSDP1's) know that sharded ones
are wanted here, as torch tells its own.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fsdpx.parameter import collectives
from fsdpx.parameter.tensor import ShardedTensor

MODULE = "torch.distributed.checkpoint.state_dict"
WRAPPED = (
    "_gather_state_dict",
    "_distribute_state_dict",
    "_broadcast_state_dict",
    "_state_dict_fn",
)

_for_torch: ContextVar[bool] = ContextVar("for_torch", default=False)


def sharded_for_torch() -> bool:
    """Whether the helpers ask for the state dict that is being made: they want it sharded."""
    return _for_torch.get()


def install() -> None:
    """Wraps the helpers, now or as soon as their module is imported (that takes a second)."""
    module = sys.modules.get(MODULE)
    if module is not None:
        _wrap(module)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets the module load as ever, then wraps its helpers."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            _wrap(module)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def _wrap(module: ModuleType) -> None:
    for name, make in zip(
        WRAPPED, (_gathering, _distributing, _broadcasting, _asking), strict=True
    ):
        original = getattr(module, name)
        if not hasattr(original, "_fsdpx_original"):
            wrapped = make(original)
            wrapped._fsdpx_original = original  # type: ignore[attr-defined]
            setattr(module, name, wrapped)


def _map(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same structure with every tensor replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map(function, item) for item in value)
    return value


def _holds_sharded(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_sharded, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_sharded, value))
    return isinstance(value, ShardedTensor)


def _gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    def gather_state_dict(state_dict: Any, **options: Any) -> Any:
        ranks, offload = options.get("ranks_only", ()), options.get("cpu_offload", False)

        def whole(value: ShardedTensor) -> torch.Tensor:
            full = value.full_tensor()
            if ranks and dist.get_rank(options.get("pg")) not in ranks:
                return full.new_empty(0)  # one whole tensor at a time
            return full.cpu() if offload else full

        def own(value: torch.Tensor) -> torch.Tensor:
            """A whole copy: later steps must not change it, whatever was sharded."""
            return whole(value) if isinstance(value, ShardedTensor) else value.detach().clone()

        if _holds_sharded(state_dict):
            state_dict = _map(own, state_dict)
        return original(state_dict, **options)

    return gather_state_dict


def _sharded_keys(local: dict[str, Any]) -> dict[str, ShardedTensor]:
    return {key: value for key, value in local.items() if isinstance(value, ShardedTensor)}


def _take(local: dict[str, Any], key: str, full: torch.Tensor, device: torch.device) -> None:
    """Puts a whole value into the sharded tensor at `key`."""
    target = local[key]
    if not target.is_meta:
        with torch.no_grad():
            target.detach().copy_(full)
        return
    piece = target._spec.piece(full.detach()).to(device=device, dtype=target.dtype, copy=True)
    made = ShardedTensor(piece, target._spec, target.requires_grad)
    made._is_param = target._is_param
    local[key] = made


def _distributing(original: Callable[..., Any]) -> Callable[..., Any]:
    def distribute_state_dict(
        full: dict[str, Any], local: dict[str, Any], device: torch.device, pg: Any = None
    ) -> None:
        mine = [k for k in _sharded_keys(local) if isinstance(full.get(k), torch.Tensor)]
        original({k: v for k, v in full.items() if k not in mine}, local, device, pg)
        for key in mine:
            _take(local, key, full[key], device)

    return distribute_state_dict


def _broadcasting(original: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_state_dict(
        full: dict[str, Any],
        local: dict[str, Any],
        device: torch.device,
        pg: Any = None,
        **options: Any,
    ) -> None:
        source = dist.get_rank() == 0
        mine = _sharded_keys(local)
        present = [k for k in mine if isinstance(full.get(k), torch.Tensor)] if source else []
        keys = collectives.broadcast_object(present, pg)
        for key in keys:  # one whole tensor at a time
            shape, dtype = mine[key].shape, mine[key].dtype
            value = full[key].detach() if source else torch.empty(shape, device="cpu")
            value = value.to(device=device, dtype=dtype).contiguous()
            collectives.broadcast_whole(value, pg)
            _take(local, key, value, device)
        rest = {key: value for key, value in local.items() if key not in keys}
        original({k: v for k, v in full.items() if k not in keys}, rest, device, pg, **options)
        for key in [k for k in local if k not in keys and k not in rest]:
            del local[key]
        local.update(rest)

    return broadcast_state_dict


def _asking(original: Callable[..., Any]) -> Callable[..., Any]:
    def state_dict_fn(obj: Any, api: str) -> Callable[..., Any]:
        call = original(obj, api)

        def called(*args: Any, **options: Any) -> Any:
            token = _for_torch.set(True)
            try:
                return call(*args, **options)
            finally:
                _for_torch.reset(token)

        return called

    return state_dict_fn
