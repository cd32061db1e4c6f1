"""Builds the simulated libraries with g++ (seconds), when their sources have changed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNTIME = HERE / "runtime"
OUT = HERE.parent.parent / "build" / "cudasim"
# Library -> prefixes of its sources. The names are those of the libraries that they stand for.
RUNTIME_LIBRARY = "libcudart.so.13"
LIBRARIES = {
    RUNTIME_LIBRARY: ("memory", "streams", "control", "cudart", "ptx"),
    "libnccl.so.2": ("nccl",),
    "libcuda.so.1": ("libcuda",),
}
FLAGS = ("-std=c++20", "-O2", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-fPIC")
FLOATS = ("-ffp-contract=off", "-pthread")


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    candidates = [f"{home}/bin/nvcc"] if home else []
    return next(
        filter(None, map(shutil.which, [*candidates, "nvcc", "/usr/local/cuda/bin/nvcc"])), None
    )


def missing() -> str | None:
    """Why the simulation cannot be built here, or None when it can."""
    if find_nvcc() is None:
        return "nvcc is not installed (put it on PATH, or set CUDA_HOME)"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "g++ is not installed"
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if int(torch.version.cuda.split(".")[0]) != 13:
        return f"torch is built for CUDA {torch.version.cuda}, and CUDA 13 is simulated"
    return None


def cuda_include() -> Path:
    """Headers of nvcc's toolkit. On PATH may be a script that calls the real one, so ask it."""
    command = [str(find_nvcc()), "--dryrun", "-E", "-x", "cu", os.devnull]
    plan = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    top = next(line for line in plan.splitlines() if line.startswith("#$ TOP="))
    return Path(top.split("=", 1)[1]) / "include"


def nccl_include() -> Path:
    """From the wheel that torch depends on, else from the toolkit."""
    spec = importlib.util.find_spec("nvidia")
    for base in (spec.submodule_search_locations or []) if spec else []:
        if (Path(base) / "nccl" / "include" / "nccl.h").exists():
            return Path(base) / "nccl" / "include"
    return cuda_include()


def build(libraries: Iterable[str] = LIBRARIES) -> Path:
    """The directory of the libraries, and of the objects that they are made of."""
    OUT.mkdir(parents=True, exist_ok=True)
    headers = max(h.stat().st_mtime for h in RUNTIME.glob("*.h"))
    includes = [f"-I{cuda_include()}", f"-I{nccl_include()}"]
    for library in libraries:
        sources = [s for s in RUNTIME.glob("*.cpp") if s.name.startswith(LIBRARIES[library])]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda s: _compile(s, headers, includes), sources))
        _link(OUT / library, sorted(objects))
    return OUT


def runtime_objects() -> list[Path]:
    """What makes up the simulated libcudart, to be linked into a library with kernels."""
    out, prefixes = build([RUNTIME_LIBRARY]), LIBRARIES[RUNTIME_LIBRARY]
    return sorted(o for o in out.glob("*.o") if o.name.startswith(prefixes))


def _compile(source: Path, headers: float, includes: list[str]) -> Path:
    target = OUT / f"{source.stem}.o"
    if not target.exists() or target.stat().st_mtime < max(headers, source.stat().st_mtime):
        _run("-c", *FLAGS, *FLOATS, *includes, str(source), target=target)
    return target


def _link(target: Path, objects: list[Path]) -> None:
    if target.exists() and target.stat().st_mtime > max(o.stat().st_mtime for o in objects):
        return
    extra = ["-ldl", "-Wl,-Bsymbolic"]
    if target.name.startswith("libcudart"):  # torch asks for the symbols with this version
        extra.append(f"-Wl,--version-script={RUNTIME / 'cudart.map'}")
    if target.name.startswith("libnccl"):
        extra.append(str(OUT / "libcudart.so.13"))
    _run(
        "-shared",
        "-pthread",
        f"-Wl,-soname,{target.name}",
        *map(str, objects),
        *extra,
        target=target,
    )


def _run(*arguments: str, target: Path) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}")
    subprocess.run([os.environ.get("CXX", "g++"), *arguments, "-o", str(part)], check=True)
    part.replace(target)
