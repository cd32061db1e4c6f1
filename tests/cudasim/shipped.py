"""The project's CUDA passes, host code and kernels, run in the simulator (see README.md)."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .ptxsim import Memory, Sim

CSRC = Path(__file__).resolve().parent.parent.parent / "csrc"
HERE = Path(__file__).resolve().parent
LIBRARY = "passes.so"
MAX_MESSAGE = 1000
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p)


def find_nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def build() -> tuple[Path, list[str]]:
    """Compiles csrc/cuda; the library with its host code, and the PTX of its kernels.

    What was built of the same sources before is used again.
    """
    sources = sorted((CSRC / "cuda").glob("*.cu"))
    inputs = [*sorted(CSRC.glob("*.h")), *sorted((CSRC / "cuda").iterdir()), HERE / "launches.cpp"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()[:16]
    made = CSRC.parent / "build" / f"cuda-passes-{digest}"
    if not made.exists():
        made.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
            compile_in(Path(scratch), sources)
            with contextlib.suppress(OSError):  # another process was quicker
                Path(scratch).rename(made)
                Path(scratch).mkdir()
    modules = [(made / f"{source.stem}.ptx").read_text() for source in sources]
    return made / LIBRARY, modules


def compile_in(directory: Path, sources: list[Path]) -> None:
    command = [
        *(str(find_nvcc()), "-std=c++20", "-gencode", "arch=compute_90,code=compute_90"),
        *("-shared", "-Xlinker", "-Bsymbolic", "-Xcompiler", "-fPIC", "--cudart=none", f"-I{CSRC}"),
        *("-keep", "-keep-dir", str(directory), "--threads", "2"),
        *(*map(str, sources), str(HERE / "launches.cpp"), "-o", LIBRARY),
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=directory, check=False)
    assert result.returncode == 0, result.stderr


class _Piece(ctypes.Structure):
    _fields_ = (("src", ctypes.c_void_p), ("dst", ctypes.c_void_p), ("numel", ctypes.c_int64))


class _GatherPiece(ctypes.Structure):
    _fields_ = (("src", ctypes.c_void_p), ("numel", ctypes.c_int64), ("offset", ctypes.c_int64))


@dataclass(frozen=True)
class Launch:
    kernel: str
    num_blocks: int


class SimulatedPasses:
    """csrc/cuda/kernels.h on simulated memory; errors of the host code become ValueError."""

    def __init__(self, library: Path, modules: list[str]) -> None:
        self.memory = Memory()
        self.sims = {name: sim for sim in map(Sim, modules) for name in sim.kernels}
        self.launches: list[Launch] = []
        self._failure: Exception | None = None
        self._library = ctypes.CDLL(str(library))
        self._library.sim_last_stream.restype = ctypes.c_void_p
        self._callback = _Callback(self._launch)  # kept: the library calls it
        self._library.sim_set_callback(self._callback)

    def clear(self) -> None:
        self.memory = Memory()
        self.launches.clear()

    @property
    def last_stream(self) -> int | None:
        value = self._library.sim_last_stream()
        return int(value) if value is not None else None

    def _launch(self, name: bytes, num_blocks: int, num_threads: int, argument: int) -> None:
        try:  # an exception must not cross the C++ frames
            sim = self.sims[name.decode()]
            sim.memory = self.memory
            kernel = sim.kernels[name.decode()]
            self.launches.append(Launch(kernel.name, num_blocks))
            raw = ctypes.string_at(argument, kernel.parameter_bytes)
            sim.launch(kernel.name, num_blocks, num_threads, raw)
        except Exception as error:
            self._failure = self._failure or error

    def _call(self, function: str, *args: object) -> None:
        message = ctypes.create_string_buffer(MAX_MESSAGE)
        failed = getattr(self._library, function)(*args, message, MAX_MESSAGE)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
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
    ) -> None:
        """Pieces of (source, numel, offset)."""
        table = (_GatherPiece * len(pieces))(*(_GatherPiece(*piece) for piece in pieces))
        bases = (ctypes.c_void_p * len(peers))(*peers)
        self._call(
            "sim_gather",
            *(table, ctypes.c_int64(len(pieces)), bases, ctypes.c_int64(len(peers))),
            *(from_code, to_code),
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
