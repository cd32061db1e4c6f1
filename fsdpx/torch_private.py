"""The private parts of torch that the Python half uses, all in one place; `probe` checks them.

The native half's are in csrc/torch_*.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

NO_BACKWARD = -1

current_backward = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread, or `NO_BACKWARD`."""


outside_of_transforms = torch._C._DisableFuncTorch
"""A context in which tensors are plain ones, though torch.func's transforms may be running."""


def device_types(group: torch.distributed.ProcessGroup) -> set[str]:
    """Of the tensors that a process group can communicate."""
    private: Any = group
    return {device.type for device in private._device_types}


def storage_use_count(tensor: torch.Tensor) -> int:
    """How many tensors share `tensor`'s storage, itself included."""
    # The storage object that the question itself makes counts as one.
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1


def tensor_use_count(tensor: torch.Tensor) -> int:
    """How many hold `tensor`'s content: its Python object, and graphs of forwards."""
    private: Any = tensor
    return int(private._use_count())


swap_values = torch._C._swap_tensor_impl
"""Exchanges the values of two tensor objects, with what autograd knows of them."""


def swap_content(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchanges the values, classes and attributes of two tensor objects."""
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    swap_values(a, b)


def is_traced() -> bool:
    """Whether a program is being recorded: by torch.jit.trace or torch.export."""
    return bool(torch._C._is_tracing()) or torch.compiler.is_exporting()


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is one of many that torch's vmap runs as one."""
    legacy = torch._C._dispatch_key_parse("Batched")
    is_legacy = torch._C._dispatch_keys(tensor).has(legacy)
    return is_legacy or bool(torch._C._functorch.is_batchedtensor(tensor))


def wrap_backward(run: Callable[..., Any], leaf_of: Callable[[Any], Any]) -> None:
    """Puts functions between torch's backward functions and what they look up in graphs.

    Args:
        run: Called in place of torch's runner of backwards, with it before its arguments.
        leaf_of: Gives the tensor whose gradient edge is that of a tensor.
    """
    graph: Any = torch.autograd.graph
    if hasattr(graph._engine_run_backward, "_fsdpx"):
        return
    running, node_of = graph._engine_run_backward, graph._get_grad_fn_or_grad_acc

    @functools.wraps(running)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        return run(running, outputs, *args, **kwargs)

    @functools.wraps(node_of)
    def node(tensor: Any) -> Any:
        return node_of(leaf_of(tensor))

    run_backward._fsdpx = True  # type: ignore[attr-defined]
    front: Any = torch.autograd
    front._engine_run_backward = run_backward
    graph._engine_run_backward, graph._get_grad_fn_or_grad_acc = run_backward, node


def leave_to_eager(*what: Any) -> None:
    """Keeps torch.compile out of the engine: these functions are neither traced nor inlined.

    What they call (the user's forwards) is compiled as usual. `torch.compiler.disable` would import
    the compiler and cost a microsecond per call.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    for function in _functions(what):
        frames.set_code_exec_strategy(function.__code__, skip)
        marked: Any = function
        marked._torchdynamo_disable = True
        marked._torchdynamo_disable_msg = "fsdpx gathers and frees parameters here"


def _functions(what: tuple[Any, ...]) -> list[FunctionType]:
    found = [each for each in what if isinstance(each, FunctionType)]
    for module in what:
        for member in vars(module).values() if isinstance(module, ModuleType) else ():
            if getattr(member, "__module__", None) != module.__name__:
                continue
            inner = vars(member).values() if inspect.isclass(member) else [member]
            functions = [getattr(each, "fget", each) for each in inner]
            found += [each for each in functions if isinstance(each, FunctionType)]
    return found


def run_wrap_policy(
    policy: Any, root: nn.Module, ignored: set[nn.Module], arguments: dict[str, Any]
) -> dict[nn.Module, dict[str, Any]] | None:
    """What a policy object of torch.distributed.fsdp.wrap chooses below `root`; None for functions.

    Args:
        policy: An object or a function.
        root: The model.
        ignored: Modules to leave out.
        arguments: Of the wrappers; the policy may change them for a module.
    """
    from torch.distributed.fsdp.wrap import _Policy

    if not isinstance(policy, _Policy):
        return None
    chosen: dict[nn.Module, dict[str, Any]] = policy._run_policy(root, ignored, arguments)
    return chosen
