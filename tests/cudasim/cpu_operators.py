"""Runs torch's own CUDA operators on the CPU, in the same memory: torch ships them without PTX.

    with CpuOperators():
        loss = model(x).sum(); loss.backward()

An operator first runs what is queued on the current stream (the virtual clock does not notice) and
computes on copies. Its results are written by an operation on that stream. So reads are early, and
writes as late as the order has it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import cudasim

# Operators that need no kernel: allocation, metadata, and copies that are cudaMemcpyAsync.
NATIVE = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"),
    *("_local_scalar_dense", "record_stream", "detach", "set_", "resize_", "is_pinned"),
    *("_pin_memory", "_unsafe_view", "_reshape_alias"),
}
PASSED_ON = {"c10d", "_c10d_functional", "prim", "profiler"}  # namespaces


def alias(tensor: Tensor) -> Tensor:
    """The same memory as a CPU tensor."""
    storage = tensor.untyped_storage()
    if not tensor.is_cuda:
        return tensor
    if storage.nbytes() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.from_numpy(np.ctypeslib.as_array(raw))
    items = storage.nbytes() // tensor.element_size() * tensor.element_size()
    typed = whole[:items].view(tensor.dtype)
    return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def tensors_in(*trees: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, trees)
    return found


def mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    arguments = func._schema.arguments
    values = dict(zip((a.name for a in arguments), args, strict=False), **kwargs)
    written = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
    return tensors_in([values[name] for name in written if name in values])


def device_of(tensors: list[Tensor], kwargs: Any) -> torch.device | None:
    for tensor in tensors:
        if tensor.is_cuda:
            return tensor.device
    device = kwargs.get("device")
    asked = torch.device(device) if device is not None else None
    return asked if asked is not None and asked.type == "cuda" else None


@functools.cache
def is_composite(func: Any) -> bool:
    """Whether the operator is defined by others, like `to`, `reshape` and `matmul`."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return func.namespace == "aten" and func.has_kernel_for_dispatch_key(key)


def nbytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def is_plain_copy(dst: Tensor, src: Tensor) -> bool:
    """Whether cudaMemcpyAsync can do it."""
    same = dst.dtype == src.dtype and dst.shape == src.shape
    return same and dst.is_contiguous() and src.is_contiguous()


def mark_written(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    if tensor.is_cuda and storage.nbytes():
        cudasim.wrote(storage.data_ptr(), storage.nbytes())


class CpuOperators(TorchDispatchMode):
    """The dispatch mode of this file's first lines; it reaches the threads of backward, too.

    Fused attention of GPUs has no counterpart: it is switched off in this process, for the CPU too.
    """

    def __init__(self) -> None:
        super().__init__()
        for kind in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t.__name__ == "FakeTensor" for t in types):
            return func(*args, **kwargs)
        if any(t not in (Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # subclasses have their own handlers first
        name, inputs = func._schema.name.split("::")[1], tensors_in(args, kwargs)
        device = device_of(inputs, kwargs)
        if device is not None and is_composite(func):  # below autograd they come as they are
            with self:
                return func.decompose(*args, **kwargs)
        if device is None or func.namespace in PASSED_ON or name in NATIVE or func.is_view:
            return func(*args, **kwargs)
        if name == "copy_":
            return self.copy(*args, **kwargs)
        if name in ("_to_copy", "clone"):
            return self.convert(args[0], **kwargs)
        return self.on_cpu(func, args, kwargs, inputs, device)

    def copy(self, dst: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
        if is_plain_copy(dst, src):
            return dst.copy_(src, non_blocking)
        device = dst.device if dst.is_cuda else src.device
        copied: Tensor = self.on_cpu(torch.ops.aten.copy_.default, (dst, src), {}, [src], device)
        return copied

    def convert(
        self,
        src: Tensor,
        dtype: Any = None,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: Any = torch.preserve_format,
        **_: Any,
    ) -> Tensor:
        dtype = dtype or src.dtype
        device = torch.device(device) if device is not None else src.device
        if src.is_cuda and device.type != "cuda" and dtype != src.dtype:
            src = self.convert(src, dtype)  # where it is; then it is moved
        like = {"dtype": dtype, "device": device, "memory_format": memory_format}
        return self.copy(torch.empty_like(src, **like), src, non_blocking)

    def on_cpu(
        self, func: Callable[..., Any], args: Any, kwargs: Any, inputs: Any, device: Any
    ) -> Any:
        with torch.cuda.device(device):
            for tensor in inputs:
                tensor.detach()  # lets dispatch keys below Python see it, as the operator would
            cudasim.drain()
            written = {id(tensor) for tensor in mutated(func, args, kwargs) if tensor.is_cuda}
            hosts: dict[int, Tensor] = {}  # by id of the original
            originals: dict[int, Tensor] = {}  # by id of the host tensor
            made: list[tuple[Tensor, Tensor]] = []

            def down(tensor: Tensor) -> Tensor:
                if id(tensor) not in hosts:
                    host = alias(tensor)
                    hosts[id(tensor)] = copy_of(host) if id(tensor) in written else host
                    originals[id(hosts[id(tensor)])] = tensor
                return hosts[id(tensor)]

            def up(tensor: Tensor) -> Tensor:
                if id(tensor) in originals:  # in place, or out=
                    return originals[id(tensor)]
                shape, strides = tensor.shape, tensor.stride()
                out = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device)
                made.append((out, tensor))
                return out

            a, k = tree_map_only(Tensor, down, (args, kwargs))
            if k.get("device") is not None:
                k = dict(k, device="cpu")
            result = tree_map_only(Tensor, up, func(*a, **k))
            made += [(originals[id(hosts[i])], hosts[i]) for i in written]
            charged = nbytes(inputs) + nbytes(tensors_in(result))
            cudasim.charge(charged, str(func))
            write(made)
            return result


def span(tensor: Tensor) -> int:
    """Elements from the first to the last in memory."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def copy_of(host: Tensor) -> Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype).copy_(host)


def write(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Puts the writing of (device, host) pairs of tensors on the current stream."""
    for device, host in pairs:
        if span(device) == device.numel():
            cudasim.write(device.data_ptr(), host.data_ptr(), nbytes([device]))
        else:  # a view with gaps, at once
            cudasim.drain()
            alias(device).copy_(host)
            mark_written(device)
