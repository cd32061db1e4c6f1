"""Gives modules that were made on the meta device their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from fsdpx.collect import managed_modules

from .ignored import Ignored

_UNSET = 0xA5  # a byte that no initialisation writes to a whole tensor


def materialise(
    root: nn.Module,
    ignored: Ignored,
    device: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
) -> None:
    """Initialises each module that has parameters or buffers on the meta device, once.

    Args:
        root: Modules below wrappers have been initialised with these.
        ignored: Modules and parameters to leave as they are.
        device: Where values go, unless `param_init_fn` decides it.
        param_init_fn: Called with each module, in place of its `reset_parameters`.

    Raises:
        ValueError: A module has no `reset_parameters`, or something was left without values; the
            message names it.
    """
    own = managed_modules([root]) - ignored.modules
    modules = {name: m for name, m in root.named_modules() if m in own}
    waiting = {n: m for n, m in modules.items() if any(_is_meta(m, ignored))}
    if param_init_fn is None:
        for name, module in waiting.items():
            if not callable(getattr(module, "reset_parameters", None)):
                raise ValueError(
                    f"FullyShardedDataParallel: module '{name or type(root).__name__}' "
                    f"({type(module).__name__}) is on the meta device and has no "
                    "reset_parameters(): give it one, or pass param_init_fn"
                )
    ties = _ties(waiting.values())
    with torch.no_grad():
        for name, module in waiting.items():
            if param_init_fn is not None:
                param_init_fn(module)
            else:
                _reset(name, module, device)
    for (first, first_name), *others in ties:
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]
    for name, module in waiting.items():
        for tensor_name in _is_meta(module, ignored):
            raise ValueError(
                f"FullyShardedDataParallel: '{_path(name, tensor_name)}' is still on the meta "
                "device after param_init_fn"
            )


def _states(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters and buffers, buffers that are not saved included."""
    for states in (module._parameters, module._buffers):
        yield from ((name, state) for name, state in states.items() if state is not None)


def states_of(
    root: nn.Module, own: set[nn.Module], ignored: Ignored
) -> list[tuple[str, torch.Tensor]]:
    """What a wrapper takes from the first rank: its own parameters, and all buffers below it."""
    parameters = [
        (_path(path, name), parameter)
        for path, module in root.named_modules()
        for name, parameter in module._parameters.items()
        if module in own and parameter is not None and parameter not in ignored.parameters
    ]
    return [*parameters, *root.named_buffers()]


def _ties(modules: Iterable[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """Who holds each parameter that is held more than once: new values must not part them."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((module, name))
    return [held for held in holders.values() if len(held) > 1]


def _is_meta(module: nn.Module, ignored: Ignored) -> Iterator[str]:
    for name, state in _states(module):
        if state.is_meta and state not in ignored.parameters:
            yield name


def _reset(name: str, module: nn.Module, device: torch.device) -> None:
    module.to_empty(device=device, recurse=False)
    for _, state in _states(module):
        _stored_bytes(state).fill_(_UNSET)
    reset: Callable[[], None] = module.reset_parameters  # type: ignore[assignment]
    reset()
    for tensor_name, state in _states(module):
        if _is_unset(state):
            raise ValueError(
                f"FullyShardedDataParallel: {type(module).__name__}.reset_parameters() left "
                f"'{_path(name, tensor_name)}' without values: let it set all parameters and "
                "buffers of the module, or pass param_init_fn"
            )


def _stored_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes behind a tensor, whatever its strides."""
    stored = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return stored.set_(tensor.untyped_storage())


def _is_unset(tensor: torch.Tensor) -> bool:
    stored = _stored_bytes(tensor)
    return bool(stored.numel()) and bool((stored == _UNSET).all())


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
