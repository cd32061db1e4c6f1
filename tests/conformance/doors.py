"""Front doors of the conformance matrix: each shards a stack; and the reference, which does not."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as StockPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard

import fsdpx
from fsdpx.fsdp1 import CustomPolicy, FullyShardedDataParallel, MixedPrecision

from .kinds import Stack
from .patterns import Side

STOCK = "FSDP2"
COMPUTE_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def _fully_shard(stack: Stack, dtype: str, **options: Any) -> Side:
    if compute_dtype := COMPUTE_DTYPES[dtype]:
        options["mp_policy"] = fsdpx.MixedPrecisionPolicy(compute_dtype, torch.float32)
    for unit in stack.units():
        fsdpx.fully_shard(unit, **options)
    fsdpx.fully_shard(stack, **options)
    return Side(stack, stack, [dist.get_rank()], functools.partial(fsdpx.no_sync, stack))


@functools.cache  # a process keeps the threads of every group that it makes
def _mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def _hybrid(stack: Stack, dtype: str) -> Side:
    """Two replicas; where the ranks can't be halved, each rank is one."""
    size = dist.get_world_size()
    num_replicas = size if size % 2 else 2
    return _fully_shard(stack, dtype, mesh=_mesh(num_replicas, size // num_replicas))


def _fsdp1(stack: Stack, dtype: str) -> Side:
    units = stack.units()
    precision = None
    if compute_dtype := COMPUTE_DTYPES[dtype]:
        precision = MixedPrecision(
            param_dtype=compute_dtype,
            reduce_dtype=torch.float32,
            _module_classes_to_ignore=(),  # batch norms are cast as elsewhere
        )
    model = FullyShardedDataParallel(
        stack,
        auto_wrap_policy=CustomPolicy(lambda module: module in units),
        mixed_precision=precision,
        use_orig_params=True,
    )
    return Side(model, stack, [dist.get_rank()], model.no_sync)


def _stock(stack: Stack, dtype: str) -> Side:
    options: dict[str, Any] = {"mesh": _mesh(dist.get_world_size())}
    if compute_dtype := COMPUTE_DTYPES[dtype]:
        options["mp_policy"] = StockPolicy(compute_dtype, torch.float32)
    for unit in stack.units():
        stock_fully_shard(unit, **options)
    stock_fully_shard(stack, **options)

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        stack.set_requires_gradient_sync(False)
        yield
        stack.set_requires_gradient_sync(True)

    return Side(stack, stack, [dist.get_rank()], no_sync)


DOORS: dict[str, Callable[[Stack, str], Side]] = {
    "ZeRO-3": _fully_shard,
    "ZeRO-2": functools.partial(_fully_shard, zero_stage=2),
    "ZeRO-1": functools.partial(_fully_shard, zero_stage=1),
    "HSDP": _hybrid,
    "FSDP1": _fsdp1,
    STOCK: _stock,
}


def reference_of(stack: Stack, dtype: str, world_size: int) -> Side:
    """A copy of the stack that runs all ranks' batches in this process."""
    replica = copy.deepcopy(stack)
    if compute_dtype := COMPUTE_DTYPES[dtype]:
        _compute_in(replica, compute_dtype)
    return Side(replica, replica, [*range(world_size)], sharded=False)


def _compute_in(stack: Stack, dtype: torch.dtype) -> None:
    """Lets the blocks compute with casts of their parameters and inputs.

    One forward of the stack casts each parameter once, as a gather does: gradients of one that is
    used several times add up in the compute dtype.
    """
    casts: dict[tuple[Tensor, bool], Tensor] = {}

    def begin(block: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for module in block.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter.is_floating_point():
                    key = (parameter, torch.is_grad_enabled())
                    if key not in casts:
                        casts[key] = parameter.to(dtype)
                    module.__dict__[name] = casts[key]  # found before the parameter
            _list_weights(module)
        return tuple(value.to(dtype) for value in inputs)

    def end(block: nn.Module, *_: Any) -> None:
        for module in block.modules():
            for name in module._parameters:
                module.__dict__.pop(name, None)
            _list_weights(module)

    stack.register_forward_pre_hook(lambda *_: casts.clear())
    for block in stack.blocks:
        block.register_forward_pre_hook(begin)
        block.register_forward_hook(end, always_call=True)


def _list_weights(module: nn.Module) -> None:
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
