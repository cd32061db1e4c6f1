"""The project's CUDA passes, host code and kernels, on a simulated device (see README.md)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .build import OUT, find_nvcc, runtime_objects
from .device import Device

CSRC = Path(__file__).resolve().parent.parent.parent / "csrc"
HERE = Path(__file__).resolve().parent
MAX_MESSAGE = 1000
NO_LIMIT = 2**31 - 1  # kNoLimit of csrc/cuda/kernels.h


def build() -> Path:
    """Compiles csrc/cuda/*.cu and links them with the simulated runtime; the library.

    One that was built of the same sources before is used again.
    """
    sources = [*sorted((CSRC / "cuda").glob("*.cu")), CSRC / "shard_passes.cpp"]
    sources.append(HERE / "launches.cpp")
    headers = [*CSRC.glob("*.h"), *(CSRC / "cuda").glob("*.h"), *(CSRC / "cuda").glob("*.cuh")]
    objects = runtime_objects()
    content = [path.read_bytes() for path in (*sources, *sorted(headers), *objects)]
    digest = hashlib.sha256(b"".join(content)).hexdigest()
    library = OUT / f"passes-{digest[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=OUT) as scratch:
            made = compile_in(Path(scratch), sources, objects)
            made.replace(library)
    return library


def compile_in(directory: Path, sources: list[Path], runtime: list[Path]) -> Path:
    flags = ["-std=c++20", "-fmad=false", "--no-compress", "-Xcompiler", "-fPIC", f"-I{CSRC}"]
    flags += ["-gencode", "arch=compute_90,code=compute_90"]

    def compile_one(source: Path) -> str:
        target = str(directory / f"{source.stem}.o")
        launcher = os.environ.get("CMAKE_CUDA_COMPILER_LAUNCHER", "").split()
        run([*launcher, str(find_nvcc()), *flags, "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    library = directory / "passes.so"
    link = ["-shared", "-Xlinker", "-Bsymbolic", "--cudart=none", "-Xcompiler", "-pthread"]
    # The runtime goes first: kernels register themselves when the library is loaded.
    run([str(find_nvcc()), *link, *map(str, runtime), *objects, "-o", str(library)])
    return library


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


class _Piece(ctypes.Structure):
    _fields_ = (("src", ctypes.c_void_p), ("dst", ctypes.c_void_p), ("numel", ctypes.c_int64))


class _GatherPiece(ctypes.Structure):
    _fields_ = (("src", ctypes.c_void_p), ("numel", ctypes.c_int64), ("offset", ctypes.c_int64))


class AdamWOptions(ctypes.Structure):
    """Of csrc/adamw.h."""

    _fields_ = (
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("step", ctypes.c_int64),
        ("grad_scale", ctypes.c_double),
        ("maximize", ctypes.c_bool),
    )


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

    def gather(
        self,
        pieces: Sequence[tuple[int | None, int, int]],
        peers: Sequence[int],
        from_code: int,
        to_code: int,
        *,
        max_blocks: int = NO_LIMIT,
    ) -> None:
        """Pieces of (source, numel, offset)."""
        table = (_GatherPiece * len(pieces))(*(_GatherPiece(*piece) for piece in pieces))
        bases = (ctypes.c_void_p * len(peers))(*peers)
        self._call(
            "sim_gather",
            *(table, ctypes.c_int64(len(pieces)), bases, ctypes.c_int64(len(peers))),
            *(from_code, to_code, max_blocks),
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
        max_blocks: int = NO_LIMIT,
    ) -> None:
        table = (ctypes.c_void_p * len(srcs))(*srcs)
        self._call(
            "sim_reduce",
            *(table, ctypes.c_int64(len(srcs)), from_code, ctypes.c_void_p(dst), to_code),
            *(ctypes.c_int64(numel), ctypes.c_double(scale), int(accumulate), max_blocks),
        )

    def norm_and_check(
        self, src: int, code: int, numel: int, workspace: int | None, out: int | None
    ) -> None:
        pointers = ctypes.c_void_p(src), ctypes.c_void_p(workspace), ctypes.c_void_p(out)
        self._call("sim_norm", pointers[0], code, ctypes.c_int64(numel), *pointers[1:])

    def adamw(
        self,
        data: Sequence[int | None],
        grad_code: int,
        copy_code: int,
        numel: int,
        options: AdamWOptions,
    ) -> None:
        """On (parameter, exp_avg, exp_avg_sq, gradient, copy)."""
        pointers = (ctypes.c_void_p * len(data))(*data)
        self._call(
            "sim_adamw",
            *(pointers, grad_code, copy_code, ctypes.c_int64(numel), ctypes.byref(options)),
        )

    def barrier(
        self,
        peers: Sequence[int],
        rank: int,
        epoch: int,
        *,
        error: int,
        abort: int,
        seconds: float = 0.01,
        waits: bool = True,
        stream: int = 0,
    ) -> None:
        """`peers` are the flags of each rank."""
        flags = (ctypes.c_void_p * len(peers))(*peers)
        self._call(
            "sim_barrier",
            *(flags, len(peers), rank, ctypes.c_uint64(int(seconds * 1e9)), ctypes.c_void_p(error)),
            *(ctypes.c_void_p(abort), ctypes.c_uint64(epoch), int(waits), ctypes.c_void_p(stream)),
        )
