"""Checks that the native module fits before it is loaded: its errors say what to do."""

from __future__ import annotations

from pathlib import Path


def check_native_build() -> None:
    """Raises ImportError when `fsdpx._C` is missing or was compiled for another torch."""
    import torch

    try:
        from fsdpx._build_info import TORCH_VERSION
    except ImportError:
        raise ImportError(
            f"fsdpx: the native module is not built in {Path(__file__).parent}; run `make build` "
            "or `pip install -e . --no-build-isolation` in the checkout."
        ) from None
    running = torch.__version__
    # Builds of one torch release (CPU, CUDA x) share their C++ interface; releases do not.
    if TORCH_VERSION.split("+")[0] != running.split("+")[0]:
        raise ImportError(
            f"fsdpx: the native module was built for torch {TORCH_VERSION}, but torch {running} is "
            "installed here; build again with this environment (`make build VENV=...` or "
            "`pip install -e . --no-build-isolation`)."
        )
