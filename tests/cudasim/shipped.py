"""The project's CUDA passes, host code and kernels, on a simulated device (see README.md)."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .build import find_nvcc, runtime_objects
from .device import Device

CSRC = Path(__file__).resolve().parent.parent.parent / "csrc"
HERE = Path(__file__).resolve().parent
MAX_MESSAGE = 1000


def build(directory: Path) -> Path:
    """Compiles csrc/cuda/*.cu and links them with the simulated runtime; the library."""
    flags = ["-std=c++20", "-fmad=false", "--no-compress", "-Xcompiler", "-fPIC", f"-I{CSRC}"]
    flags += ["-gencode", "arch=compute_90,code=compute_90"]

    def compile_one(source: Path) -> str:
        target = str(directory / f"{source.stem}.o")
        run([str(find_nvcc()), *flags, "-c", str(source), "-o", target])
        return target

    sources = [*sorted((CSRC / "cuda").glob("*.cu")), HERE / "launches.cpp"]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    library = directory / "passes.so"
    link = ["-shared", "-Xlinker", "-Bsymbolic", "--cudart=none", "-Xcompiler", "-pthread"]
    # The runtime goes first: kernels register themselves when the library is loaded.
    run([str(find_nvcc()), *link, *map(str, runtime_objects()), *objects, "-o", str(library)])
    return library


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


class _Piece(ctypes.Structure):
    _fields_ = (("src", ctypes.c_void_p), ("dst", ctypes.c_void_p), ("numel", ctypes.c_int64))


class SimulatedPasses:
    """csrc/cuda/kernels.h on simulated memory; errors of the host code become ValueError."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.memory = Device(self._library)

    @property
    def launches(self) -> list[str]:
        return self.memory.launches()

    def clear(self) -> None:
        self.memory.clear()

    def new_stream(self) -> int:
        stream = ctypes.c_void_p()
        self._library.cudaStreamCreate(ctypes.byref(stream))
        return int(stream.value or 0)

    def _call(self, function: str, *args: object) -> None:
        message = ctypes.create_string_buffer(MAX_MESSAGE)
        failed = getattr(self._library, function)(*args, message, MAX_MESSAGE)
        self.memory.check()
        if failed:
            raise ValueError(message.value.decode())

    def convert(
        self,
        pieces: Sequence[tuple[int | None, int, int]],
        from_code: int,
        to_code: int,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        stream: int = 0,
    ) -> None:
        table = (_Piece * len(pieces))(*(_Piece(*piece) for piece in pieces))
        self._call(
            "sim_convert",
            *(table, ctypes.c_int64(len(pieces)), from_code, to_code, ctypes.c_double(scale)),
            *(int(accumulate), ctypes.c_void_p(stream)),
        )

    def reduce(
        self,
        srcs: Sequence[int],
        from_code: int,
        dst: int,
        to_code: int,
        numel: int,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> None:
        table = (ctypes.c_void_p * len(srcs))(*srcs)
        self._call(
            "sim_reduce",
            *(table, ctypes.c_int64(len(srcs)), from_code, ctypes.c_void_p(dst), to_code),
            *(ctypes.c_int64(numel), ctypes.c_double(scale), int(accumulate), ctypes.c_void_p(0)),
        )
