"""Builds fsdpx._C: finds the tools and torch, then lets CMake and Ninja do the work.

Environment: FSDPX_CUDA=0|1 leaves the CUDA sources out or insists on them (default: built when
nvcc is found and torch has CUDA); FSDPX_WERROR=1 turns warnings into errors; MAX_JOBS limits
parallel compilation; CXX and CMAKE_* variables mean what they mean to CMake.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def fail(message: str) -> SystemExit:
    return SystemExit(f"fsdpx: {message}")


def find_tool(name: str) -> str | None:
    """A program of this environment (pip installs cmake and ninja there) or of PATH."""
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


def require_tool(name: str) -> str:
    found = find_tool(name)
    if found is None:
        raise fail(
            f"the build needs {name}, which was not found; install it with "
            f"`{sys.executable} -m pip install {name}`."
        )
    return found


def require_compiler() -> None:
    named = os.environ.get("CXX")
    for name in [named.split()[0]] if named else ["c++", "g++", "clang++"]:
        if shutil.which(name):
            return
    what = f"CXX={named} was not found" if named else "none was found"
    raise fail(
        f"the build needs a C++20 compiler and {what}; install g++ 12 or newer "
        "(Debian: `apt install g++`)."
    )


def require_python_headers() -> None:
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        raise fail(
            f"Python.h is not in {include}; install the headers of this Python "
            "(Debian: `apt install python3-dev`)."
        )


@dataclass(frozen=True)
class TorchInfo:
    """What the build needs to know about the torch it compiles against."""

    root: Path
    version: str
    cuda: str | None


def require_torch() -> TorchInfo:
    # torch.version is read without importing torch: that is quick and needs none of its libraries.
    spec = importlib.util.find_spec("torch")
    version_file = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    if version_file is None or not version_file.exists():
        raise fail(
            f"torch is not installed for {sys.executable}; install it first (`pip install "
            "torch==2.14.1`) and build with `pip install --no-build-isolation`, so that fsdpx is "
            "compiled against the torch it will run with."
        )
    values: dict[str, object] = {}
    exec(compile(version_file.read_text(), str(version_file), "exec"), values)
    cuda = values.get("cuda")
    return TorchInfo(version_file.parent, str(values["__version__"]), str(cuda) if cuda else None)


def choose_nvcc(torch: TorchInfo) -> str | None:
    """The nvcc to build the CUDA sources with, or None for a CPU build."""
    wish = os.environ.get("FSDPX_CUDA", "auto")
    if wish not in ("0", "1", "auto", ""):
        raise fail(
            f"FSDPX_CUDA={wish} is not understood; use 0 (CPU only), 1 (build the CUDA sources) "
            "or leave it unset."
        )
    if wish == "0" or (wish != "1" and torch.cuda is None):
        return None
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [
        os.environ.get("CUDACXX"),
        *(f"{home}/bin/nvcc" for home in homes),
        "nvcc",
        "/usr/local/cuda/bin/nvcc",
    ]
    for candidate in filter(None, candidates):
        found = shutil.which(candidate)
        if found:
            require_same_cuda(found, torch)
            return toolkit_nvcc(found)
    if wish == "1":
        raise fail(
            "FSDPX_CUDA=1 asks for the CUDA sources, but nvcc was not found; put it on PATH or "
            "set CUDA_HOME."
        )
    return None


def require_same_cuda(nvcc: str, torch: TorchInfo) -> None:
    """One process has one CUDA runtime, and that is torch's: only its minor version may differ."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.", said)
    if release and torch.cuda and release[1] != torch.cuda.split(".")[0]:
        raise fail(
            f"{nvcc} is of CUDA {release[1]}, but torch {torch.version} is built for CUDA "
            f"{torch.cuda}; set CUDA_HOME to a toolkit of that major version, or FSDPX_CUDA=0."
        )


def toolkit_nvcc(nvcc: str) -> str:
    """The compiler inside its toolkit: on PATH may be a script or a link that hides the root."""
    dry = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in dry.stderr.splitlines():
        if line.startswith("#$ _HERE_="):
            real = Path(line.removeprefix("#$ _HERE_=")) / "nvcc"
            if real.exists():
                return str(real.resolve())
    return str(Path(nvcc).resolve())


class CMakeBuild(build_ext):
    """One extension, compiled by CMake in a directory of its own per Python and torch."""

    def build_extension(self, ext: Extension) -> None:
        torch = require_torch()
        require_compiler()
        require_python_headers()
        cmake, ninja = require_tool("cmake"), require_tool("ninja")
        nvcc = choose_nvcc(torch)
        kind = "cuda" if nvcc else "cpu"
        tag = f"{torch.version}-{sys.implementation.cache_tag}-{platform.machine()}-{kind}"
        build_dir = ROOT / "build" / f"torch-{tag}".replace("+", "_")
        defines = {
            "CMAKE_BUILD_TYPE": os.environ.get("CMAKE_BUILD_TYPE", "Release"),
            "CMAKE_MAKE_PROGRAM": ninja,
            "FSDPX_PYTHON": "ON",
            "FSDPX_WERROR": "ON" if os.environ.get("FSDPX_WERROR") == "1" else "OFF",
            "FSDPX_CUDA": "ON" if nvcc else "OFF",
            "FSDPX_TORCH_ROOT": str(torch.root),
            "FSDPX_TORCH_VERSION": torch.version,
            "FSDPX_PYTHON_INCLUDE": sysconfig.get_path("include"),
            "FSDPX_EXTENSION_SUFFIX": str(sysconfig.get_config_var("EXT_SUFFIX")),
        }
        if nvcc:
            defines["CMAKE_CUDA_COMPILER"] = nvcc
        how = f"CUDA by {nvcc}" if nvcc else "CPU only"
        print(f"fsdpx: building _C for torch {torch.version} ({how})", flush=True)
        self.cmake(
            cmake,
            "--log-level=WARNING",
            "-S",
            str(ROOT),
            "-B",
            str(build_dir),
            "-G",
            "Ninja",
            *(f"-D{k}={v}" for k, v in defines.items()),
        )
        jobs = (
            os.environ.get("MAX_JOBS")
            or os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL")
            or str(os.cpu_count() or 1)
        )
        self.cmake(cmake, "--build", str(build_dir), "--target", "_C", "--parallel", jobs)
        target = Path(self.get_ext_fullpath(ext.name))
        install(build_dir / f"_C{defines['FSDPX_EXTENSION_SUFFIX']}", target)
        install(build_dir / "_build_info.py", target.parent / "_build_info.py")

    def copy_extensions_to_source(self) -> None:
        """In-place and editable builds: like setuptools' copy, but each file in one move."""
        source = Path(self.build_lib, "fsdpx")
        for name in (self.get_ext_filename("_C"), "_build_info.py"):
            install(source / name, ROOT / "fsdpx" / name)

    def cmake(self, *command: str) -> None:
        if subprocess.run(command, check=False).returncode:
            raise fail("the native build failed; the compiler's message is above.")


def install(source: Path, target: Path) -> None:
    """Puts a build product in place in one move: a process may have the old one mapped."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    part = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copy2(source, part)
    part.replace(target)


if int(setuptools.__version__.split(".")[0]) < 77:
    raise fail(
        f"setuptools {setuptools.__version__} is too old to read pyproject.toml; upgrade it with "
        f"`{sys.executable} -m pip install 'setuptools>=77'`."
    )
setup(ext_modules=[Extension("fsdpx._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
