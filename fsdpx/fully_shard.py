"""`fully_shard` and the methods that a sharded module gains."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .hooks import (
    all_schedules,
    install_parameters,
    replace_in_lists,
    run_forward,
    schedule_of,
    sharded_class,
)
from .layout import Granularity
from .parameter import ShardedTensor
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .unit import Managed, ShardGroup, Unit, UnitOptions, unit_of, units

_KINDS = ("auto", "shm", "c10d")


@overload
def fully_shard(module: nn.Module, **options: Any) -> FSDPModule: ...
@overload
def fully_shard(module: list[nn.Module], **options: Any) -> list[FSDPModule]: ...


def fully_shard(  # type: ignore[misc]  # the overloads leave the options to this signature
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    zero_stage: int = 3,
    prefetch: int = 1,
    granularity: Granularity = "element",
    comm: str = "auto",
) -> Any:
    """Shards a module's parameters over the ranks of a mesh, in place.

    All parameters below `module` that no earlier call took, and that are not ignored, become one unit: they are gathered
    together before the module's forward, freed after it, gathered again in backward, and their gradients are
    reduce-scattered together (averaged over the ranks). Call it bottom-up, on each block and then on the whole model.

    Args:
        module: A module, or a list of modules that form one unit. Its class is swapped for one that is also an
            `FSDPModule`; names, hooks and `requires_grad` stay as they were.
        mesh: 1-D mesh of the ranks that share the parameters. None: the default process group, or a single process.
        reshard_after_forward: Whether to free the parameters between forward and backward. None: True, but False for
            the outermost module, whose parameters backward needs at once.
        shard_placement_fn: Not supported; see `granularity`.
        mp_policy: Dtypes of computation and reduction; see `MixedPrecisionPolicy`.
        offload_policy: On a CPU mesh the shards are in CPU memory anyway.
        ignored_params: Parameters to leave as they are.
        zero_stage: 3. Stages 1 and 2 are not supported yet.
        prefetch: Units to gather ahead in each direction; 0 for none.
        granularity: What a rank's share must not cut: "element" (nothing), "row", "parameter", or a block of that many
            elements.
        comm: "auto", "shm" (ranks of one host) or "c10d" (any process group).

    Returns:
        `module`.

    Raises:
        ValueError: If a parameter is shared with another unit, the module is sharded already or has no forward, or an
            option has no such value; the message names the parameter, module or option.

    Source of the signature and of the method names: torch.distributed.fsdp.fully_shard (FSDP2).
    """
    modules = module if isinstance(module, list) else [module]
    options = UnitOptions(mp_policy or MixedPrecisionPolicy(), reshard_after_forward, prefetch, granularity)
    _check_options(options, shard_placement_fn, offload_policy, zero_stage, comm)
    _check_modules(modules)
    group, device = _shard_group(mesh, comm)
    parameters = _collect(modules, ignored_params or set())
    originals = {id(managed.original): managed for managed in parameters}
    for managed in parameters:
        managed.original.__dict__["_fsdpx_taken"] = (type(modules[0]).__name__, managed.name)
    unit = Unit(modules, parameters, group, options, device)
    install_parameters(unit)
    replace_in_lists(_managed_modules(modules), originals)
    _move_buffers(modules, device)
    for each in modules:
        each.__dict__["_fsdpx_unit"] = unit
        each.__class__ = sharded_class(type(each), FSDPModule)
    return module


def _check_options(
    options: UnitOptions, placement: Any, offload: OffloadPolicy | None, stage: int, comm: str
) -> None:
    if placement is not None:
        raise ValueError(
            "fully_shard: shard_placement_fn is not supported (units are sharded flat): use "
            "granularity='row' or 'parameter' to keep rows or parameters whole"
        )
    if type(offload) not in (type(None), OffloadPolicy, CPUOffloadPolicy):
        raise ValueError(f"fully_shard: offload_policy must be an OffloadPolicy, got {offload!r}")
    if stage != 3:
        raise ValueError(
            f"fully_shard: zero_stage={stage} is not supported yet; zero_stage=3 with reshard_after_forward=False "
            "keeps parameters gathered between forward and backward, as stage 2 does"
        )
    if not isinstance(options.prefetch, int) or options.prefetch < 0:
        raise ValueError(f"fully_shard: prefetch must be an integer >= 0, got {options.prefetch!r}")
    reshard = options.reshard_after_forward
    if reshard is not None and not isinstance(reshard, bool):
        raise ValueError(
            f"fully_shard: reshard_after_forward={reshard!r} is not supported: give True, False or None"
        )
    if comm not in _KINDS:
        raise ValueError(f"fully_shard: comm must be one of {', '.join(_KINDS)}; got {comm!r}")


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard: the list of modules is empty")
    for module in modules:
        name = type(module).__name__
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(f"fully_shard: {name} has no forward: shard its elements, or the module that holds it")
        if unit_of(module) is not None:
            raise ValueError(f"fully_shard: {name} is already sharded: call it once for each module")


def _shard_group(mesh: DeviceMesh | None, comm: str) -> tuple[ShardGroup, torch.device]:
    if mesh is None:
        if not dist.is_initialized():
            return ShardGroup(None, 0, 1, comm), torch.device("cpu")
        group = dist.group.WORLD
        return ShardGroup(group, dist.get_rank(group), dist.get_world_size(group), comm), torch.device("cpu")
    if mesh.device_type != "cpu":
        raise ValueError(f"fully_shard: a mesh on {mesh.device_type} is not supported yet: only CPU meshes are")
    if mesh.ndim != 1:
        raise ValueError(f"fully_shard: the mesh has {mesh.ndim} dimensions; only 1-D meshes are supported yet")
    group = mesh.get_group()
    return ShardGroup(group, dist.get_rank(group), dist.get_world_size(group), comm), torch.device("cpu")


def _managed_modules(modules: Sequence[nn.Module]) -> set[nn.Module]:
    """The modules whose parameters belong to the unit: all below, except below units of their own."""
    found: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in found or unit_of(module) is not None:
            return
        found.add(module)
        for child in module.children():
            visit(child)

    for module in modules:
        visit(module)
    return found


def _collect(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[Managed]:
    """The unit's parameters in registration order; one that several modules hold appears once."""
    managed = _managed_modules(modules)
    ignored_ids = {id(parameter) for parameter in ignored}
    found: dict[int, Managed] = {}
    for root in modules:
        for prefix, module in root.named_modules():
            if module not in managed:
                continue
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in ignored_ids:
                    continue
                path = f"{prefix}.{name}" if prefix else name
                _check_parameter(path, parameter)
                entry = found.setdefault(id(parameter), Managed(path, parameter, []))
                if (module, name) not in entry.owners:
                    entry.owners.append((module, name))
    return list(found.values())


def _check_parameter(path: str, parameter: torch.Tensor) -> None:
    taken = parameter.__dict__.get("_fsdpx_taken")
    if taken is None and isinstance(parameter, ShardedTensor):
        taken = ("another module", parameter._spec.name)
    if taken is not None:
        unit, other = taken
        raise ValueError(
            f"fully_shard: parameter '{path}' is shared with '{other}', which is already in the unit of {unit}: shard "
            "the module that encloses both first, without sharding them on their own"
        )
    if parameter.layout is not torch.strided:
        raise ValueError(f"fully_shard: parameter '{path}' has layout {parameter.layout}: make it dense")
    if parameter.is_complex():
        raise ValueError(f"fully_shard: parameter '{path}' is complex: store its real and imaginary parts, or ignore it")
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"fully_shard: parameter '{path}' is not initialised: run a lazy module once before")
    if parameter.device.type not in ("cpu", "meta"):
        raise ValueError(f"fully_shard: parameter '{path}' is on {parameter.device}: only CPU is supported yet")


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for module in _managed_modules(modules):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in (device.type, "meta"):
                module._buffers[name] = buffer.to(device)


class UnshardHandle:
    """What `FSDPModule.unshard(async_op=True)` returns."""

    def __init__(self, module: nn.Module, unit: Unit) -> None:
        self._module, self._unit = module, unit

    def wait(self) -> None:
        """Returns when the module's full parameters can be read."""
        schedule_of(self._module, self._unit).finish_unshard(self._unit)


class FSDPModule:
    """Mixed into the class of every module that `fully_shard` was called on; method names are FSDP2's."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Indexing an nn.Sequential makes a new one with its class: that one is not sharded.
        original = cls.__mro__[2]
        self = original.__new__(original)
        self.__init__(*args, **kwargs)
        return self

    def _units(self, recurse: bool) -> list[Unit]:
        module = cast(nn.Module, self)
        own = unit_of(module)
        return units(module) if recurse else [own] if own else []

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's parameters (not its children's units) until `reshard` or its next forward ends.

        Args:
            async_op: Return at once, with a handle whose `wait()` must be called before parameters are read.
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

    def reset_iter_state(self) -> None:
        """Forgets a step that was left in the middle by an exception; gradients in flight are dropped."""
        for schedule in all_schedules(cast(nn.Module, self)):
            schedule.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted; every backward waits for its own reductions, so there is nothing left to do."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backwards reduce gradients, or add them up locally in the reduce dtype until one does."""
        for unit in self._units(recurse):
            unit.requires_gradient_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed between forward and backward."""
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are freed after backward; not freeing them saves gathers between micro-batches."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gathers these modules while this one's forward runs, in place of the recorded order."""
        for unit in self._units(recurse=False):
            unit.forward_prefetch = _prefetch_list(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gathers these modules while this one's backward runs, in place of the recorded order."""
        for unit in self._units(recurse=False):
            unit.backward_prefetch = _prefetch_list(modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the sum of gradients over ranks by `factor` in place of the number of ranks."""
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor: factor must be > 0, got {factor}")
        for unit in self._units(recurse=False):
            unit.gradient_divisor = factor


def _prefetch_list(modules: Sequence[Any]) -> list[Unit]:
    found = []
    for module in modules:
        unit = unit_of(module)
        if unit is None:
            raise ValueError(f"fsdpx: {type(module).__name__} in a prefetch list is not sharded: call fully_shard on it")
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
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ValueError(f"register_fsdp_forward_method: {type(module).__name__} has no method '{method_name}'")

    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit = unit_of(self)
        assert unit is not None
        return run_forward(unit, self, method, args, kwargs)

    setattr(module, method_name, wrapped.__get__(module, type(module)))


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside add gradients up locally; the first one outside reduces the sum."""
    before = {unit: unit.requires_gradient_sync for unit in units(model)}
    for unit in before:
        unit.requires_gradient_sync = False
    try:
        yield
    finally:
        for unit, value in before.items():
            unit.requires_gradient_sync = value
