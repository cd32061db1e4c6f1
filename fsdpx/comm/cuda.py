"""Making the communicators of ranks that compute on GPUs."""

from __future__ import annotations

import os
from typing import TypeAlias

import torch
import torch.distributed as dist

from .. import _C
from ..errors import DesyncError
from . import c10d
from .choose import Kind, tell
from .communicator import Communicator
from .links import nvlink_problem

# Of GPU memory that collectives use: see csrc/cuda/device_memory.h.
SWITCH = "FSDPX_DEVICE_MEMORY"
SOURCES = {"plain": "nothing", "ipc": "CUDA IPC", "window": "NCCL windows"}

Surroundings: TypeAlias = tuple[_C.Stream, _C.Communicator, _C.Stream, float]


def connect(
    group: dist.ProcessGroup,
    kind: str,
    device: torch.device,
    timeout: float,
    control: Communicator,
    beside: Communicator | None,
) -> Communicator:
    """The communicator of `group` for tensors on `device`. Collective.

    Args:
        group: The ranks.
        kind: "auto", "nvlink", "nvlink-copy", "nccl" or "c10d".
        device: This rank's GPU.
        timeout: In seconds, of each collective.
        control: Of the same ranks' CPUs; the new communicator's own.
        beside: On whose stream it runs; None: a new one.

    Raises:
        RuntimeError: This build has no CUDA.
        ValueError: Some rank cannot use `kind` (on every rank).
    """
    if beside is not None:
        stream, torch_stream = beside.stream, beside.torch_stream
        assert torch_stream is not None
    else:
        torch_stream = c10d.high_priority_stream(device)
        stream = _C.device_stream(device, torch_stream.cuda_stream)
    surroundings = (stream, control.native, control.stream, timeout)
    native, reason = _connect(group, kind, surroundings, torch_stream, control)
    made = Communicator(
        native,
        reason,
        timeout,
        stream=stream,
        beside=beside,
        device=device,
        control=control,
    )
    made.torch_stream = torch_stream
    return made


def _connect(
    group: dist.ProcessGroup,
    kind: str,
    surroundings: Surroundings,
    torch_stream: torch.cuda.Stream,
    control: Communicator,
) -> tuple[_C.Communicator, str]:
    """The native communicator, and why it is of its kind."""
    apart, wanted = "", kind.startswith("nvlink")
    source = memory_source(group)
    if kind == "auto" and group.size() > 1:
        if source == "plain":
            apart = f"{SWITCH} is plain, and peers do not map that"
        elif control.kind == "shm":  # all ranks are on one host
            apart = nvlink_problem(group, torch_stream.device)
        wanted = not apart
    if wanted:
        try:
            return _connect_nvlink(surroundings, control, source, copies=kind == "nvlink-copy")
        except DesyncError:  # a rank is gone: there is no other way either
            raise
        except RuntimeError as error:  # on every rank
            apart = _bare(error)
            if kind != "auto" or source:
                raise ValueError(f"fsdpx: comm kind '{kind}' is impossible: {apart}") from None
    chosen = choose(group, kind)
    reason = f"{chosen.reason}; not nvlink: {apart}" if apart else chosen.reason
    if chosen.name == "local":
        return _C.local_communicator(*surroundings), reason
    if chosen.name == "nccl":
        if source == "ipc":
            raise ValueError(
                f"fsdpx: {SWITCH} is {source}, but ranks that communicate by NCCL map no memory of "
                f"each other ({reason}); use plain or window, or comm='nvlink'"
            )
        if source == "window":
            reason += "; it registers its memory"
        return _C.nccl_communicator(*surroundings, source or "plain"), reason
    timeout = surroundings[-1]
    return c10d.connect_on_device(group, surroundings, torch_stream, timeout), reason


def memory_source(group: dist.ProcessGroup) -> str:
    """Where FSDPX_DEVICE_MEMORY says that memory comes from; "" leaves it open. Collective.

    Raises:
        ValueError: There is no such source, or ranks differ (on every rank).
    """
    asked = tell(group, os.environ.get(SWITCH, ""))
    for rank, source in enumerate(asked):
        if source not in ("", *SOURCES):
            raise ValueError(
                f"fsdpx: {SWITCH} is '{source}' on rank {rank}; use one of {', '.join(SOURCES)}"
            )
        if source != asked[0]:
            raise ValueError(
                f"fsdpx: {SWITCH} is '{asked[0]}' on rank 0 and '{source}' on rank {rank}; set it "
                "alike on all ranks"
            )
    return asked[0]


def _connect_nvlink(
    surroundings: Surroundings, control: Communicator, source: str, *, copies: bool
) -> tuple[_C.Communicator, str]:
    """Raises RuntimeError on every rank when some rank cannot map another's memory."""
    if source == "plain":
        raise RuntimeError(f"{SWITCH} is plain, and peers do not map that; use window or ipc")
    if control.kind != "shm":
        raise RuntimeError(control.reason)  # which says who is on another host
    reason = f"all ranks map each other's GPU memory, by {SOURCES[source or 'window']}"
    if source:
        native = _C.nvlink_communicator(*surroundings, copies, source)
        return native, f"{reason} (asked for)"
    try:
        return _C.nvlink_communicator(*surroundings, copies, "window"), reason
    except DesyncError:
        raise
    except RuntimeError as error:  # on every rank
        reason = f"all ranks map each other's GPU memory, by {SOURCES['ipc']} ({_bare(error)})"
    return _C.nvlink_communicator(*surroundings, copies, "ipc"), reason


def _bare(error: Exception) -> str:
    return str(error).removeprefix("fsdpx: ")


def choose(group: dist.ProcessGroup, kind: str) -> Kind:
    """The kind for this group on GPUs; the same on every rank.

    Raises:
        ValueError: `kind` is "nccl" and some rank cannot (on every rank).
    """
    if kind == "c10d":
        return Kind("c10d", "asked for")
    if group.size() == 1 and kind == "auto":
        return Kind("local", "one rank")
    problems = tell(group, _nccl_problem())
    for rank, problem in enumerate(problems):
        if problem and kind == "nccl":
            raise ValueError(f"fsdpx: comm kind 'nccl' is impossible: rank {rank}: {problem}")
        if problem:
            return Kind("c10d", f"rank {rank}: {problem}")
    return Kind("nccl", "asked for" if kind == "nccl" else f"NCCL {_version(_C.nccl_version())}")


def _nccl_problem() -> str:
    try:
        _C.nccl_version()
    except RuntimeError as error:
        return _bare(error)
    return ""


def _version(code: int) -> str:
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
