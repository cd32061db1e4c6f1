"""A simulated device in an ordinary process, for tests of kernels on their own.

    device = Device()                      # or of a library that has the runtime linked in
    src = device.upload(array)
    dst = device.allocate(nbytes)
    kernels = Kernels(device, ptx_text)
    kernels.launch(name, num_blocks, num_threads, argument_bytes)
    device.download(dst, dtype, count)

What a kernel does wrong, and what the simulation does not know, raises SimError.
"""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import COUNTERS
from .build import RUNTIME_LIBRARY, build

NOT_ALLOCATED, ALLOCATED, WRITTEN = range(3)
COPY_KIND = 4  # cudaMemcpyDefault
_POINTERS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class SimError(Exception):
    """The kernel, or a call of the runtime, does something wrong."""


class Device:
    """The memory of the simulated device, with red zones around each allocation."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self.library = library or ctypes.CDLL(str(build([RUNTIME_LIBRARY]) / RUNTIME_LIBRARY))
        for name in ("cudasim_fault", "cudasim_traffic", "cudasim_trace"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.cudaMemcpy.argtypes = (*_POINTERS, ctypes.c_int)
        self.library.cudasim_mark.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.library.cudasim_is_marked.argtypes = self.library.cudasim_mark.argtypes
        self.library.cudaFree.argtypes = (ctypes.c_void_p,)
        self._allocated: list[int] = []

    def check(self) -> None:
        """Raises what has gone wrong since the last call."""
        self.library.cudasim_drain_all()
        text = self.library.cudasim_fault().decode()
        if text:
            self.library.cudasim_reset()
            raise SimError(text)

    def clear(self) -> None:
        """Frees everything; traffic and trace begin again."""
        for address in self._allocated:
            self.library.cudaFree(address)
        self._allocated.clear()
        self.library.cudasim_reset()

    def allocate(self, nbytes: int, *, shift: int = 0) -> int:
        """The address of `nbytes` uninitialised bytes, `shift` bytes after a multiple of 512."""
        address = ctypes.c_void_p()
        if self.library.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes + shift)):
            raise MemoryError("the simulated device is full")
        assert address.value is not None
        self._allocated.append(address.value)
        self.library.cudasim_mark(address.value, shift, NOT_ALLOCATED)
        return address.value + shift

    def upload(self, array: NDArray[Any], *, shift: int = 0) -> int:
        raw = np.ascontiguousarray(array).view(np.uint8).ravel()
        address = self.allocate(raw.size, shift=shift)
        self.library.cudaMemcpy(address, raw.ctypes.data, raw.size, COPY_KIND)
        return address

    def download(self, address: int, dtype: Any, count: int) -> NDArray[Any]:
        target = np.empty(count, dtype)
        self.check()
        if not self.library.cudasim_is_marked(address, target.nbytes, WRITTEN):
            raise SimError("download of bytes that were never written")
        self.library.cudaMemcpy(target.ctypes.data, address, target.nbytes, COPY_KIND)
        return target

    def traffic(self) -> list[dict[str, Any]]:
        """Accesses to global memory: kernel, op, width, threads, bytes, requests, sectors."""
        found: list[dict[str, Any]] = json.loads(self.library.cudasim_traffic())
        return found

    @property
    def moved(self) -> Counter[tuple[str, int]]:
        """("ld" or "st", width) -> bytes, since the last clear or forget."""
        total: Counter[tuple[str, int]] = Counter()
        for access in self.traffic():
            total[access["op"], access["width"]] += access["bytes"]
        return total

    def launches(self) -> list[str]:
        """Names of the kernels that ran since the last clear or forget."""
        spans = json.loads(self.library.cudasim_trace())
        return [span["name"] for span in spans if not span["name"].startswith("mem")]

    @property
    def num_blocks(self) -> int:
        """Of all launches since the last clear or forget."""
        self.library.cudasim_counter.restype = ctypes.c_uint64
        return int(self.library.cudasim_counter(COUNTERS.index("blocks")))

    def forget(self) -> None:
        """Traffic and trace begin again."""
        self.library.cudasim_reset()


class Kernels:
    """Kernels from the text of their PTX."""

    def __init__(self, device: Device, ptx: str) -> None:
        self.device = device
        device.library.cudasim_module.restype = ctypes.c_void_p
        self._module = ctypes.c_void_p(device.library.cudasim_module(ptx.encode()))
        device.check()

    def launch(self, name: str, num_blocks: int, num_threads: int, arguments: bytes) -> None:
        size = ctypes.c_size_t(len(arguments))
        self.device.library.cudasim_launch(
            self._module, name.encode(), num_blocks, num_threads, arguments, size
        )
        self.device.check()
