"""Wraps the modules that a policy of torch.distributed.fsdp.wrap chooses, innermost first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fsdpx.torch_private import run_wrap_policy
from fsdpx.unit import unit_of

from .ignored import Ignored
from .options import has_forward
from .precision import compute_in_full_precision

Targets = dict[nn.Module, dict[str, Any]]  # module to wrap -> arguments


def auto_wrap(
    root: nn.Module,
    policy: Any,
    ignored: Ignored,
    arguments: dict[str, Any],
    wrap: Callable[..., nn.Module],
) -> None:
    """Replaces modules below `root` by their wrappers, wherever they are held.

    Containers without a forward are left out: nothing could gather their parameters, so these go to
    the module that holds the container.

    Args:
        root: Its wrapper is the caller's business.
        policy: A policy object, or a function (module, recurse, nonwrapped_numel) -> bool.
        ignored: Modules and parameters to leave out.
        arguments: Of `root`'s wrapper; a policy may change them for a module.
        wrap: Makes the wrapper of a module.

    Raises:
        ValueError: If a module below is wrapped already.
    """
    for name, module in root.named_modules():
        if unit_of(module) is not None:
            raise ValueError(
                f"FullyShardedDataParallel: auto_wrap_policy needs modules that are not sharded "
                f"yet, but '{name or type(root).__name__}' is"
            )
    targets = targets_of(root, policy, ignored, arguments)
    _leave_out_of_mixed_precision(root, ignored, arguments, targets)
    _check_ties(root, ignored, targets)
    holders: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, child in module._modules.items():
            if child is not None:
                holders.setdefault(child, []).append((module, name))
    for module in reversed(list(root.modules())):  # children before their parents
        if module in targets and module is not root and has_forward(module):
            wrapped = wrap(module, **targets[module])
            for parent, name in holders[module]:
                setattr(parent, name, wrapped)


def _check_ties(root: nn.Module, ignored: Ignored, targets: Targets) -> None:
    """Raises, before anything is wrapped, if two wrappers would have one parameter."""
    found: dict[int, tuple[str, nn.Module]] = {}
    seen: set[tuple[nn.Module, nn.Module]] = set()

    def visit(module: nn.Module, path: str, wrapper: nn.Module) -> None:
        wrapper = module if module in targets and has_forward(module) else wrapper
        if (module, wrapper) in seen:
            return
        seen.add((module, wrapper))
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in ignored.parameters:
                continue
            other, theirs = found.setdefault(id(parameter), (path + name, wrapper))
            if theirs is not wrapper:
                raise ValueError(
                    f"FullyShardedDataParallel: auto_wrap_policy puts parameter '{path}{name}' and "
                    f"'{other}', which are one, into different wrappers: let it wrap the module "
                    "that encloses both, and neither of the two on its own"
                )
        for name, child in module.named_children():
            visit(child, f"{path}{name}.", wrapper)

    visit(root, "", root)


def targets_of(
    root: nn.Module, policy: Any, ignored: Ignored, arguments: dict[str, Any]
) -> Targets:
    """The modules that a policy chooses, with their wrappers' arguments."""
    chosen = run_wrap_policy(policy, root, ignored.modules, dict(arguments))
    if chosen is not None:
        return chosen
    targets: Targets = {}
    _choose(root, policy, ignored, targets, lambda: dict(arguments), is_root=True)
    return targets


def _choose(
    module: nn.Module,
    policy: Callable[..., bool],
    ignored: Ignored,
    targets: Targets,
    arguments: Callable[[], dict[str, Any]],
    is_root: bool = False,
) -> int:
    """Asks a policy function about a module and all below; returns the number of elements in
    chosen modules.
    """
    numel = sum(p.numel() for p in module.parameters() if p not in ignored.parameters)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    wrapped = 0
    for child in module.children():
        if child not in ignored.modules:
            wrapped += _choose(child, policy, ignored, targets, arguments)
    rest = numel - wrapped
    if not is_root and policy(module=module, recurse=False, nonwrapped_numel=rest):
        targets[module] = arguments()
        return numel
    return wrapped


def _leave_out_of_mixed_precision(
    root: nn.Module, ignored: Ignored, arguments: dict[str, Any], targets: Targets
) -> None:
    """Gives modules of the classes that mixed precision ignores wrappers of their own, without
    it.
    """
    mixed = arguments["mixed_precision"]
    classes: Sequence[type[nn.Module]] = tuple(mixed._module_classes_to_ignore) if mixed else ()
    for module in root.modules():
        if module is root or module in ignored.modules:
            continue
        if isinstance(module, tuple(classes)):
            targets.setdefault(module, dict(arguments))
            targets[module] |= {"mixed_precision": None}
            compute_in_full_precision(module)
