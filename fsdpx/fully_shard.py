"""`fully_shard`: makes one unit of a module's parameters, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .attributes import install_parameters, replace_in_lists, watch
from .collect import collect, managed_modules
from .comm import KINDS
from .hooks import sharded_class
from .layout import Granularity
from .mesh import ShardGroup, resolve_mesh
from .module import FSDPModule
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .post_forward import PostForward
from .probe import check_torch
from .unit import Unit, UnitOptions, unit_of
from .zero import STAGES


@overload
def fully_shard(module: nn.Module, **options: Any) -> FSDPModule: ...
@overload
def fully_shard(module: list[nn.Module], **options: Any) -> list[FSDPModule]: ...


def fully_shard(  # type: ignore[misc]  # the overloads leave the options to this signature
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    zero_stage: int = 3,
    prefetch: int = 1,
    granularity: Granularity | Callable[[str, nn.Parameter], Granularity] = "element",
    comm: str = "auto",
) -> Any:
    """Shards a module's parameters over the ranks of a mesh, in place.

    All parameters below `module` that no earlier call took, and that are not ignored, become one
    unit: they are gathered together before the module's forward, freed after it, gathered again in
    backward, and their gradients are reduce-scattered together (averaged over the ranks). Call it
    bottom-up, on each block and then on the whole model.

    Args:
        module: A module, or a list of modules that form one unit. Its class is swapped for one that
            is also an `FSDPModule`; names, hooks and `requires_grad` stay as they were.
        mesh: 1-D mesh of the ranks that share the parameters, on CPU or CUDA. None: the default
            process group, or a single process, on the current GPU if a parameter is on a GPU or
            `offload_policy` offloads from it.
        reshard_after_forward: Whether to free the parameters between forward and backward. None:
            as `zero_stage` wants; in stage 3 True, but False for the outermost module, whose
            parameters backward needs at once. A number k, a divisor of the number of ranks that
            share the parameters: each rank keeps 1/k of them, in the compute dtype, from forward
            to backward, which then gathers within groups of k neighbours (of one host, say). The
            number of all ranks that share counts as True, and 1 as False.
        shard_placement_fn: Not supported; see `granularity`.
        mp_policy: Dtypes of computation and reduction; see `MixedPrecisionPolicy`.
        offload_policy: `CPUOffloadPolicy()` keeps shards, gradients and so optimizer state in CPU
            memory; on a CPU mesh they are there anyway.
        ignored_params: Parameters to leave as they are.
        zero_stage: Optimizer state is sharded in every stage. 3: parameters are gathered for each
            forward and backward, gradients are reduced in each backward. 2: parameters are gathered
            once after each change of the weights, and stay. 1: besides, full gradients are added up
            in the reduce dtype while `set_is_last_backward(False)` says that micro-batches follow.
        prefetch: Units to gather ahead in each direction; 0 for none.
        granularity: What a rank's share must not cut: "element" (nothing), "row", "parameter", or a
            block of that many elements; or a function of name and parameter that says which. Of a
            "parameter" one rank has all, so optimizers may treat it as a matrix (Muon, Adafactor).
        comm: "auto", "c10d" (any process group), on CPU also "shm" (ranks of one host), on CUDA
            "nccl"; see `fsdpx.comm.create`.

    Returns:
        `module`.

    Raises:
        ValueError: If a parameter is shared with another unit, the module is sharded already or has
            no forward, or an option has no such value; the message names the parameter, module or
            option.

    Source of the signature and of the method names: torch.distributed.fsdp.fully_shard (FSDP2).
    """
    check_torch()
    modules = module if isinstance(module, list) else [module]
    policy = mp_policy or MixedPrecisionPolicy()
    _check_options(prefetch, shard_placement_fn, offload_policy, zero_stage, comm)
    _check_modules(modules)
    offload = offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None
    parameters = (p for m in modules for p in m.parameters())
    group, device = resolve_mesh(mesh, comm, parameters, offloads=offload is not None)
    reshard, few = _check_reshard(reshard_after_forward, zero_stage, group.size)
    options = UnitOptions(policy, reshard, prefetch, granularity, zero_stage, offload)
    unit = make_unit(modules, group, device, options, ignored_params or set())
    if few is not None:
        unit.post_forward = PostForward(unit, few)
    for each in modules:
        each.__class__ = sharded_class(type(each), FSDPModule)
    return module


def make_unit(
    modules: Sequence[nn.Module],
    group: ShardGroup,
    device: torch.device,
    options: UnitOptions,
    ignored: set[nn.Parameter],
    caller: nn.Module | None = None,
) -> Unit:
    """Makes one unit of the modules' parameters.

    Args:
        modules: Whose parameters to take.
        group: The ranks.
        device: Of the ranks.
        options: Of the unit.
        ignored: Parameters to leave as they are.
        caller: The module whose calls are the unit's; the modules themselves if None.
    """
    parameters = collect(modules, ignored, device)
    originals = {id(managed.original): managed for managed in parameters}
    with torch.inference_mode(False):  # shards are written to in training
        unit = Unit(modules, parameters, group, options, device)
    managed = managed_modules(modules)
    watch(unit, managed)
    install_parameters(unit)
    replace_in_lists(managed, originals)
    unit.ignored = {id(parameter): parameter for parameter in ignored}
    _move_buffers(modules, device)
    for each in modules if caller is None else [caller]:
        each.__dict__["_fsdpx_unit"] = unit
    return unit


def _check_options(
    prefetch: int, placement: Any, offload: OffloadPolicy | None, stage: int, comm: str
) -> None:
    if placement is not None:
        raise ValueError(
            "fully_shard: shard_placement_fn is not supported (units are sharded flat): use "
            "granularity='row' or 'parameter' to keep rows or parameters whole"
        )
    if type(offload) not in (type(None), OffloadPolicy, CPUOffloadPolicy):
        raise ValueError(f"fully_shard: offload_policy must be an OffloadPolicy, got {offload!r}")
    if stage not in STAGES:
        raise ValueError(f"fully_shard: zero_stage must be 1, 2 or 3, got {stage!r}")
    if not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"fully_shard: prefetch must be an integer >= 0, got {prefetch!r}")
    if comm not in KINDS:
        raise ValueError(f"fully_shard: comm must be one of {', '.join(KINDS)}; got {comm!r}")


def _check_reshard(
    value: bool | int | None, stage: int, size: int
) -> tuple[bool | None, int | None]:
    """`reshard_after_forward` as a truth or None, and the size of a smaller group, or None."""
    few = None
    if not isinstance(value, int | None) or (type(value) is int and (value < 1 or size % value)):
        raise ValueError(
            f"fully_shard: reshard_after_forward={value!r} is not possible: give True, False, "
            f"None, or a divisor of the number of ranks that share the parameters ({size})"
        )
    if value is None or isinstance(value, bool):
        reshard = value
    else:
        reshard = value != 1
        few = value if 1 < value < size else None
    if reshard and stage < 3:
        raise ValueError(
            f"fully_shard: reshard_after_forward={value!r} contradicts zero_stage={stage}, which "
            "keeps parameters gathered: use zero_stage=3"
        )
    return reshard, few


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard: the list of modules is empty")
    for module in modules:
        name = type(module).__name__
        if (
            isinstance(module, (nn.ModuleList, nn.ModuleDict))
            and type(module).forward is nn.Module.forward
        ):
            raise ValueError(
                f"fully_shard: {name} has no forward: shard its elements, or the module that "
                "holds it"
            )
        if unit_of(module) is not None:
            raise ValueError(
                f"fully_shard: {name} is already sharded: call it once for each module"
            )


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for module in managed_modules(modules):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in (device.type, "meta"):
                module._buffers[name] = buffer.to(device)
