"""`FullyShardedDataParallel`: a module around a module, whose calls are those of one unit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fsdpx.clip import clip_grad_norm_
from fsdpx.collect import managed_modules
from fsdpx.conversions import conversion
from fsdpx.copies import copy_sharded
from fsdpx.fully_shard import make_unit
from fsdpx.hooks import all_schedules, cast_floating, run_forward, schedule_of
from fsdpx.module import no_sync
from fsdpx.probe import check_torch
from fsdpx.sync import broadcast_states
from fsdpx.unit import Unit, unit_of

from . import optimizer_states, state_dicts
from .auto_wrap import auto_wrap
from .ignored import resolve_ignored
from .initialise import materialise, states_of
from .options import (
    check_forward,
    prefetches_in_backward,
    resolve_device,
    resolve_ranks,
    unit_options,
)
from .precision import cast_buffers
from .summon import summon

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
        cpu_offload: With `offload_params` shards, gradients and so optimizer state live in pinned
            CPU memory; on CPU ranks they are in CPU memory anyway.
        auto_wrap_policy: Chooses modules below to wrap with the same arguments.
        backward_prefetch: None and BACKWARD_POST gather nothing ahead in backward.
        mixed_precision: Dtypes; `keep_low_precision_grads` is refused.
        ignored_modules: Modules to leave as they are. Their gradients stay local to each rank.
        param_init_fn: Initialises a module that is on the meta device (not those below it), in
            place of its `reset_parameters`.
        device_id: Where ranks compute: this rank's current GPU. None: where the module is.
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
        check_forward(module)
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        options = unit_options(strategy, mixed_precision, cpu_offload)
        ranks = resolve_ranks(strategy, process_group, device_mesh)
        offloads = options.offload is not None
        device = resolve_device(device_id, device_mesh, module, offloads=offloads)
        ignored = resolve_ignored(ignored_modules, ignored_states)
        if auto_wrap_policy is not None:
            arguments = {
                "process_group": process_group,
                "sharding_strategy": strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device,
                "sync_module_states": sync_module_states,
                "ignored_states": [*ignored.modules, *ignored.parameters],
                "device_mesh": device_mesh,
            }
            auto_wrap(module, auto_wrap_policy, ignored, arguments, type(self))
        own = managed_modules([module]) - ignored.modules
        materialise(module, ignored, device, param_init_fn)
        if sync_module_states:
            broadcast_states(states_of(module, own, ignored), ranks, device)
        unit = make_unit([module], ranks, device, options, ignored.parameters, caller=self)
        if not prefetches_in_backward(backward_prefetch):
            unit.backward_prefetch = ()
        setattr(self, WRAPPED, module)
        self.process_group = ranks.process_group
        self.sharding_strategy = strategy
        self.mixed_precision = mixed_precision or MixedPrecision()
        self._buffer_dtypes = cast_buffers(own, self.mixed_precision.buffer_dtype)
        self._state_dict_settings = state_dicts.settings(StateDictType.FULL_STATE_DICT)
        state_dicts.name_children_when_loading(self, WRAPPED)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy_sharded(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"FullyShardedDataParallel: the wrapper of {type(self._wrapped).__name__} cannot be "
            "pickled, nor copied by copy.copy: save model.state_dict() instead, or use "
            "copy.deepcopy"
        )

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(
            f"FullyShardedDataParallel: the wrapper of {type(self._wrapped).__name__} can't be "
            "compiled by torch.jit.script: load its whole state dict into a plain model, and "
            "compile that"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Behind `to()`, `half()`, `to_empty()`."""
        with conversion(self):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

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

    # ---- Parameters and gradients

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Calls `fn` with every module below and with this one, whose parameters are whole then.

        Edits last; each rank keeps what it wrote to its own share.
        """
        with self.summon_full_params(self, recurse=False):
            super().apply(fn)
        return self

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which parameters are whole, in full precision, for attributes and iteration.

        Collective. Each rank keeps what it wrote to its own share, so all ranks must write the
        same. Forwards inside see edits; where gathered parameters have full precision they gather
        nothing, so ranks may run different numbers of them.

        Args:
            module: A wrapper, or a module that holds some.
            recurse: Whether wrappers below `module` take part.
            writeback: Whether edits last.
            rank0_only: Whether only the first rank has whole parameters; needs `writeback=False`.
            offload_to_cpu: Whole parameters live in CPU memory; on CPU ranks they do anyway.
            with_grads: Whether gradients are whole too; there is no forward inside then.
        """
        return summon(module, recurse, writeback, rank0_only, offload_to_cpu, with_grads)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context: backwards inside add gradients up locally; the first one after reduces the
        sum.
        """
        return no_sync(self)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """See `fsdpx.clip_grad_norm_`; of the outermost wrapper only."""
        schedule = self._unit.listener
        if schedule is not None and schedule.levels[self._unit] > 0:
            raise RuntimeError(
                f"FullyShardedDataParallel: clip_grad_norm_ of '{self._unit.name}', an inner "
                "wrapper, would leave out the others' gradients: call the outermost one's"
            )
        return clip_grad_norm_(self, max_norm, norm_type)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Not supported: gradients travel packed, by the unit's communicator."""
        raise NotImplementedError(
            "FullyShardedDataParallel: register_comm_hook is not supported: use "
            "MixedPrecision(reduce_dtype=...) for compression, and "
            "register_post_accumulate_grad_hook on parameters for what follows the reduction"
        )

    def reset_iter_state(self) -> None:
        """Forgets a step that was left in the middle by an exception, as FSDP2's does."""
        for schedule in all_schedules(self):
            schedule.reset()

    # ---- State dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the plain model's, with whole or sharded values; see `set_state_dict_type`."""
        given = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **kwargs}
        prefix = given.get("prefix", "")
        with state_dicts.outermost() as outer:
            state = super().state_dict(**given)
        state_dicts.rename(state, f"{prefix}{WRAPPED}.", prefix)
        if outer and not given.get("keep_vars"):
            chosen, dtypes = self._state_dict_settings, self._saved_dtypes(prefix)
            state_dicts.convert(state, prefix, chosen, self._unit, dtypes)
        return state

    def _saved_dtypes(self, prefix: str) -> dict[str, torch.dtype]:
        """The dtypes that state dicts have for buffers, by key, where mixed precision cast them."""
        paths = {module: prefix + path for path, module in self.named_modules()}
        cast = [item for m in self.fsdp_modules(self) for item in m._buffer_dtypes.items()]
        return {
            f"{paths[module]}.{name}" if paths[module] else name: dtype
            for (module, name), dtype in cast
        }

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Chooses what `state_dict` and `optim_state_dict` of all wrappers in a model give.

        Args:
            module: A wrapper, or a module that holds some.
            state_dict_type: FULL_STATE_DICT (whole values; collective) or SHARDED_STATE_DICT.
            state_dict_config: Of the same kind.
            optim_state_dict_config: Of the same kind.

        Returns:
            The settings before.
        """
        before = FullyShardedDataParallel.get_state_dict_type(module)
        chosen = state_dicts.settings(state_dict_type, state_dict_config, optim_state_dict_config)
        for wrapper in FullyShardedDataParallel.fsdp_modules(module):
            wrapper._state_dict_settings = chosen
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of a model's wrappers; RuntimeError if these differ."""
        found = [m._state_dict_settings for m in FullyShardedDataParallel.fsdp_modules(module)]
        if not found:
            return state_dicts.settings(StateDictType.FULL_STATE_DICT)
        if any(each != found[0] for each in found):
            raise RuntimeError(
                "FullyShardedDataParallel: wrappers of one model have different state dict "
                "settings: call set_state_dict_type on the whole model"
            )
        return found[0]

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """A context with the settings of `set_state_dict_type`."""
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        before = FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper in wrappers:
                wrapper._state_dict_settings = before

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """An optimizer's state dict by parameter name, whole or sharded as set; collective if
        whole.

        Args:
            model: Whose parameters the optimizer has.
            optim: The optimizer.
            optim_state_dict: What to convert; `optim.state_dict()` if None.
            group: Accepted; a wrapper knows its ranks.
        """
        how = _how(model)
        if how.whole:
            state_dicts.meet(how.unit)
        return optimizer_states.save(model, optim, optim_state_dict, how)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from what `optim_state_dict` gave, here or on other
        numbers of ranks.

        Args:
            model: Whose parameters the optimizer has.
            optim: That will load it.
            optim_state_dict: By names, whole or sharded. With `rank0_only` set only the first rank
                needs it.
            is_named_optimizer: Not supported.
            load_directly: Whether to call `optim.load_state_dict` too.
            group: Accepted; a wrapper knows its ranks.
        """
        if is_named_optimizer:
            raise NotImplementedError(
                "FullyShardedDataParallel: is_named_optimizer=True is not supported: give the "
                "torch.optim optimizer within"
            )
        how = _how(model)
        from_first = how.unit if how.rank0_only else None
        loaded = optimizer_states.load(model, optim, optim_state_dict, from_first)
        if load_directly:
            optim.load_state_dict(loaded)
        return loaded


def _how(model: nn.Module) -> optimizer_states.How:
    chosen = FullyShardedDataParallel.get_state_dict_type(model)
    config: Any = chosen.optim_state_dict_config
    wrappers = FullyShardedDataParallel.fsdp_modules(model)
    if not wrappers:
        raise ValueError("FullyShardedDataParallel: the model holds no wrapper")
    return optimizer_states.How(
        chosen.state_dict_type is StateDictType.FULL_STATE_DICT,
        config.offload_to_cpu,
        getattr(config, "rank0_only", False),
        wrappers[0]._unit,
    )


def _refused(name: str, instead: str) -> Any:
    def method(*args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: deprecated in torch."""
        raise NotImplementedError(
            f"FullyShardedDataParallel: {name} is not supported: use {instead}"
        )

    method.__name__ = name
    return staticmethod(method)


_LATER_NAMES = {
    "full_optim_state_dict": "optim_state_dict",
    "sharded_optim_state_dict": "optim_state_dict",
    "shard_full_optim_state_dict": "optim_state_dict_to_load",
    "scatter_full_optim_state_dict": "optim_state_dict_to_load",
    "flatten_sharded_optim_state_dict": "optim_state_dict_to_load",
    "rekey_optim_state_dict": "optim_state_dict, whose keys are names",
}
for _name, _instead in _LATER_NAMES.items():
    setattr(FullyShardedDataParallel, _name, _refused(_name, _instead))
