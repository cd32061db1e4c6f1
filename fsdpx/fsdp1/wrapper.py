"""`FullyShardedDataParallel`: a module around a module, whose calls are those of one unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)

from fsdpx.collect import managed_modules
from fsdpx.copies import copy_sharded
from fsdpx.fully_shard import make_unit
from fsdpx.hooks import cast_floating, run_forward, schedule_of
from fsdpx.module import no_sync
from fsdpx.probe import check_torch
from fsdpx.unit import Unit, unit_of

from .auto_wrap import auto_wrap, has_forward
from .ignored import resolve_ignored
from .options import prefetches_in_backward, resolve_ranks, unit_options
from .precision import cast_buffers

WRAPPED = "_fsdp_wrapped_module"


class FullyShardedDataParallel(nn.Module):
    """Shards a module's parameters over ranks; called in place of the module.

    All parameters below `module` that no inner wrapper has, and that are not ignored, become one
    unit. `model.parameters()` yields them one by one under the plain model's names, as
    `fsdpx.ShardedTensor`, whatever `use_orig_params` says; attributes that the wrapper lacks are
    the module's.

    Args:
        module: Must have a forward. It may hold wrappers.
        process_group: Ranks that share; for hybrid strategies a pair (share, replicate). None: the
            default group, or a single process.
        sharding_strategy: FULL_SHARD if None.
        cpu_offload: On CPU ranks shards are in CPU memory anyway.
        auto_wrap_policy: Chooses modules below to wrap with the same arguments.
        backward_prefetch: None and BACKWARD_POST gather nothing ahead in backward.
        mixed_precision: Dtypes; `keep_low_precision_grads` is refused.
        ignored_modules: Modules to leave as they are. Their gradients stay local to each rank.
        param_init_fn: Initialises a module that is on the meta device (not those below it), in
            place of its `reset_parameters`.
        device_id: Must be the ranks' device.
        sync_module_states: Whether to start from the first rank's parameters and buffers.
        forward_prefetch: Accepted; the next unit is always gathered ahead.
        limit_all_gathers: Accepted; memory for gathered parameters is bounded anyway.
        use_orig_params: Accepted; parameters are always the original ones.
        ignored_states: Parameters or modules to leave as they are.
        device_mesh: 1-D, or 2-D (replicate, share) for hybrid strategies.

    Raises:
        ValueError, TypeError, NotImplementedError: The message names the argument, parameter or
            module.

    Source of the signature and of the method names: torch.distributed.fsdp (FSDP1).
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        check_torch()
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        options = unit_options(strategy, mixed_precision, cpu_offload)
        ranks, device = resolve_ranks(strategy, process_group, device_mesh)
        ignored = resolve_ignored(ignored_modules, ignored_states)
        if auto_wrap_policy is not None:
            arguments = {
                "process_group": process_group,
                "sharding_strategy": strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "ignored_states": [*ignored.modules, *ignored.parameters],
                "device_mesh": device_mesh,
            }
            auto_wrap(module, auto_wrap_policy, ignored, arguments, type(self))
        if not has_forward(module):
            raise ValueError(
                f"FullyShardedDataParallel: {type(module).__name__} has no forward: wrap its "
                "elements, or the module that holds it"
            )
        own = managed_modules([module])
        unit = make_unit([module], ranks, device, options, ignored.parameters, caller=self)
        if not prefetches_in_backward(backward_prefetch):
            unit.backward_prefetch = ()
        setattr(self, WRAPPED, module)
        self.process_group = ranks.process_group
        self.sharding_strategy = strategy
        self.mixed_precision = mixed_precision or MixedPrecision()
        self._buffer_dtypes = cast_buffers(own - ignored.modules, self.mixed_precision.buffer_dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy_sharded(self, memo)

    # ---- Calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with its unit gathered."""
        mixed = self.mixed_precision
        unit = self._unit
        if mixed.param_dtype is not None:
            is_root = schedule_of(self, unit).levels[unit] == 0
            if mixed.cast_root_forward_inputs if is_root else mixed.cast_forward_inputs:
                args, kwargs = cast_floating((args, kwargs), mixed.param_dtype)
        return run_forward(unit, self, self._wrapped, args, kwargs)

    @property
    def _unit(self) -> Unit:
        unit = unit_of(self)
        assert unit is not None
        return unit

    # ---- The module within

    @property
    def _wrapped(self) -> nn.Module:
        wrapped: nn.Module = self._modules[WRAPPED]  # type: ignore[assignment]
        return wrapped

    @property
    def module(self) -> nn.Module:
        """The module, without a checkpointing wrapper that was put around it later."""
        inner: nn.Module = getattr(self._wrapped, "_checkpoint_wrapped_module", self._wrapped)
        return inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if WRAPPED not in self.__dict__.get("_modules", ()):
                raise
            return getattr(self._wrapped, name)

    def __getitem__(self, key: Any) -> Any:
        wrapped: Any = self._wrapped
        return wrapped[key]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper and the module bear the same name, so all names are the plain model's."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self._wrapped.named_modules(memo, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint.state_dict which child is not in names."""
        return {"": WRAPPED}

    # ---- Structure

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in a model, outer before inner.

        Args:
            module: Any module.
            root_only: Only those that no other one encloses.
        """
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        if not root_only:
            return found
        inner = {m for outer in found for m in outer.modules() if m is not outer}
        return [m for m in found if m not in inner]

    def check_is_root(self) -> bool:
        """Whether no other wrapper encloses this one; collective before the first forward."""
        unit = self._unit
        return schedule_of(self, unit).levels[unit] == 0

    def no_sync(self) -> Any:
        """A context: backwards inside add gradients up locally; the first one after reduces the
        sum.
        """
        return no_sync(self)
