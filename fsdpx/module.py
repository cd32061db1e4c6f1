"""What a sharded module can do: the methods of `FSDPModule`, under FSDP2's names."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from .conversions import conversion
from .copies import copy_sharded
from .hooks import all_schedules, run_forward, schedule_of
from .unit import Unit, unit_of, units


class UnshardHandle:
    """What `FSDPModule.unshard(async_op=True)` returns."""

    def __init__(self, module: nn.Module, unit: Unit) -> None:
        self._module, self._unit = module, unit

    def wait(self) -> None:
        """Returns when the module's full parameters can be read."""
        schedule_of(self._module, self._unit).finish_unshard(self._unit)


class FSDPModule:
    """Mixed into the class of every module that `fully_shard` was called on; method names are
    FSDP2's.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Indexing an nn.Sequential makes a new one with its class: that one is not sharded.
        original: Any = cls.__mro__[2]
        self = original.__new__(original)
        self.__init__(*args, **kwargs)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy_sharded(cast(nn.Module, self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"fsdpx: the sharded module {type(self).__name__} cannot be pickled, nor copied by "
            "copy.copy: save model.state_dict() instead, or use copy.deepcopy"
        )

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(
            f"fsdpx: the sharded module {type(self).__name__} can't be compiled by "
            "torch.jit.script: load its whole state dict into a plain model, and compile that"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Behind `to()`, `half()`, `to_empty()`."""
        with conversion(cast(nn.Module, self)):
            return super()._apply(fn, recurse)  # type: ignore[misc]

    def _units(self, recurse: bool) -> list[Unit]:
        module = cast(nn.Module, self)
        own = unit_of(module)
        return units(module) if recurse else [own] if own else []

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's parameters (not its children's units) until `reshard` or its next
        forward ends.

        Args:
            async_op: Return at once, with a handle whose `wait()` must be called before parameters
                are read.
        """
        module = cast(nn.Module, self)
        unit = self._units(recurse=False)[0]
        schedule_of(module, unit).unshard(unit)
        handle = UnshardHandle(module, unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees this module's full parameters."""
        for unit in self._units(recurse=False):
            schedule_of(cast(nn.Module, self), unit).reshard(unit)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; gradients that were added up without synchronisation go, too."""
        # First: a backward that failed may still write to `.grad`.
        for unit in self._units(recurse=True):
            if unit.listener is not None:
                unit.listener.forget_gradients([unit])
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def reset_iter_state(self) -> None:
        """Forgets a step that was left in the middle by an exception; gradients that are not in
        `.grad` yet are dropped.
        """
        for schedule in all_schedules(cast(nn.Module, self)):
            schedule.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether no more micro-batches follow before the optimizer steps.

        False lets units of ZeRO stage 1 add gradients up locally, as
        `set_requires_gradient_sync(False)` does in every stage. Units of stages 2 and 3 reduce in
        every backward.
        """
        for unit in self._units(recurse=True):
            unit.zero.is_last_backward = is_last_backward

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards reduce gradients, or add them up locally in the reduce dtype until one
        does.
        """
        for unit in self._units(recurse):
            unit.zero.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With replicas (HSDP): whether backwards sum gradients over replicas, or only over the
        ranks that share a parameter until one does. `.grad` shows them after that.
        """
        for unit in self._units(recurse):
            unit.zero.requires_all_reduce = requires_all_reduce

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None
    ) -> None:
        """Lets `hook` change this module's reduced gradients before they are added to `.grad`.

        Args:
            hook: Takes the gradient shard of one backward, 1-D, in the parameters' dtype, already
                divided; changes it in place. Called at the end of backward, after the sum over
                replicas if there are any. All ranks call it in the same order.
            stream: Not supported.
        """
        if stream is not None:
            _refuse("set_all_reduce_hook(stream=...)", "a hook that waits for its own stream")
        for unit in self._units(recurse=False):
            unit.all_reduce_hook = hook

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed between forward and backward; takes the place of a number
        of ranks that `fully_shard` was given.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward: got {reshard_after_forward!r}: give True or False; a "
                "number of ranks is for fully_shard(reshard_after_forward=...)"
            )
        for unit in self._units(recurse):
            unit.zero.reshard_after_forward = reshard_after_forward
            unit.post_forward = None

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters are freed after backward; not freeing them saves gathers between
        micro-batches.
        """
        for unit in self._units(recurse):
            unit.zero.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gathers these modules while this one's forward runs, in place of the recorded order."""
        for unit in self._units(recurse=False):
            unit.forward_prefetch = _prefetch_list(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gathers these modules while this one's backward runs, in place of the recorded order."""
        for unit in self._units(recurse=False):
            unit.backward_prefetch = _prefetch_list(modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the sum of gradients over ranks (replicas included) by `factor` in place of the
        number of ranks.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor: factor must be > 0, got {factor}")
        for unit in self._units(recurse=False):
            unit.gradient_divisor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The earlier name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    # ---- Accepted: needless here

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted; reductions always sum, and scale while they unpack."""

    def set_reduce_scatter_unused_params(self, enable: bool, *, recurse: bool = True) -> None:
        """Accepted; a parameter without gradient on some ranks counts as zeros there, always."""

    def set_reduce_scatter_max_input_buffers(self, count: int, *, recurse: bool = True) -> None:
        """Accepted; a communicator owns two send buffers, and packing waits on the stream, not
        here.
        """

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Accepted; gathers and reductions run in the order of their issue."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted; slots are the communicator's own memory already."""

    def set_post_optim_event(self, event: Any) -> None:
        """Accepted; on CPU an optimizer step has ended when it returns."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accepted; parameters that backward does not read are not gathered in it."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted; gathers run beside the computation, always."""

    # ---- Refused

    def set_custom_all_gather(self, comm: Any) -> None:
        """Not supported: communicators are chosen by `fully_shard(comm=...)`."""
        _refuse("set_custom_all_gather", "fully_shard(comm=...)")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Not supported: communicators are chosen by `fully_shard(comm=...)`."""
        _refuse("set_custom_reduce_scatter", "fully_shard(comm=...)")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Not supported on CPU."""
        _refuse("set_symm_mem_for_comm", "fully_shard(comm='shm')")


def _refuse(method: str, instead: str) -> None:
    raise NotImplementedError(f"fsdpx: {method} is not supported: use {instead}")


def _prefetch_list(modules: Sequence[Any]) -> list[Unit]:
    found = []
    for module in modules:
        unit = unit_of(module)
        if unit is None:
            raise ValueError(
                f"fsdpx: {type(module).__name__} in a prefetch list is not sharded: call "
                "fully_shard on it"
            )
        found.append(unit)
    return found


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Lets `module.<method_name>(...)` gather the module's parameters as its forward does.

    Args:
        module: Nothing happens if it is not sharded.
        method_name: Of an existing method.

    Raises:
        ValueError: If the module has no such method.
    """
    if unit_of(module) is None:
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ValueError(
            f"register_fsdp_forward_method: {type(module).__name__} has no method '{method_name}'"
        )

    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit = unit_of(self)
        assert unit is not None
        return run_forward(unit, self, method, args, kwargs)

    setattr(module, method_name, types.MethodType(wrapped, module))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Needless: root modules on the same process group share their communicator and its stream.

    Raises:
        ValueError: If a module is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"share_comm_ctx: {type(module).__name__} is not sharded: call fully_shard on it"
            )


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside add gradients up locally; the first one outside reduces the sum."""
    before = {unit: unit.zero.requires_gradient_sync for unit in units(model)}
    for unit in before:
        unit.zero.requires_gradient_sync = False
    try:
        yield
    finally:
        for unit, value in before.items():
            unit.zero.requires_gradient_sync = value
