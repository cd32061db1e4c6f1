"""Communicators: collectives of one group of ranks, fused with the casts around them.

    comm = fsdpx.comm.create()                        # collective over the default group
    full = comm.allocate(comm.size * shard.numel(), torch.bfloat16)
    comm.all_gather(shard, full).wait()               # float32 shards arrive as bfloat16
    comm.reduce_scatter(grads, shard_grad, scale=1 / comm.size).wait()

Importing starts no thread. The worker thread of a communicator starts with its first collective;
at exit it gets a short time to finish what is queued.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

from . import c10d, cuda, shm
from .choose import Kind, choose_kind, meet, timeout_of
from .communicator import Communicator, InFlight, Work

__all__ = ["Communicator", "InFlight", "Work", "create"]

KINDS = ("auto", "shm", "c10d", "nvlink", "nvlink-copy", "nccl")
EXIT_SECONDS = 2.0  # for what is queued when the interpreter exits

# By identity of the process group, as long as that lives. Ranks may be threads of one process,
# each with a group object of its own, so nothing here is "the" rank of the process. What runs on
# another's stream is a communicator of its own: each has one order of collectives.
_Key = tuple[int, str, str, Communicator | None]
_registry: dict[_Key, Communicator] = {}
_made: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()  # in order
_numbers = itertools.count()
_lock = threading.RLock()  # guards these only: creating is collective and must not be serialised


def create(
    group: dist.ProcessGroup | None = None,
    *,
    kind: str = "auto",
    device: torch.device | str = "cpu",
    timeout: float | None = None,
    max_bytes: int | None = None,
    beside: Communicator | None = None,
) -> Communicator:
    """The communicator of a process group; made at the first call, collectively.

    Args:
        group: The ranks that take part. None: the default group, or only this process where
            torch.distributed is not initialised.
        kind: "c10d" (any process group), on CPU "shm" (ranks of one host, through shared memory),
            on a GPU "nvlink" (ranks that can map each other's memory), "nvlink-copy" (the same,
            with all-gathers by the copy engines) and "nccl", or "auto": on CPU shm, on a GPU
            nvlink (where there is NVLink between all) or nccl if every rank can, else c10d;
            `Communicator.reason` says why. The environment variable FSDPX_DEVICE_MEMORY, alike on
            all ranks, says how nvlink's ranks map each other's memory: "window" (of NCCL; where
            all have it, the default) or "ipc" (of CUDA). With "plain" they map nothing.
        device: Of the tensors: "cpu" or a CUDA device ("cuda": the current one).
        timeout: Limit of each wait for other ranks, in seconds; the group's own if None. Ignored if
            the communicator exists already.
        max_bytes: Largest size of each of the two hidden send buffers of "shm", the same on all
            ranks; larger reductions go in parts. None: 2 MiB. Ignored if the communicator exists
            already.
        beside: A communicator of the same device on whose stream the new one runs, so that their
            collectives follow each other in the order of their issue.

    Returns:
        A communicator. The same one for the same group, kind and stream, until it is closed. It
        closes itself when the group's object and all that uses it are gone.

    Raises:
        ValueError: `kind` is unknown, or some rank of the group cannot use it (on every rank).
        CommTimeout: Some rank did not come; the message names it.
    """
    if kind not in KINDS:
        raise ValueError(f"fsdpx: comm kind '{kind}' is unknown; use one of {', '.join(KINDS)}")
    device = _resolve_device(device)
    if kind not in ("auto", "c10d") and (kind == "shm") != (device.type == "cpu"):
        raise ValueError(f"fsdpx: comm kind '{kind}' is not for tensors on {device}")
    resolved = _resolve(group)
    if resolved is _ALONE and kind == "c10d":
        raise ValueError(
            "fsdpx: comm kind 'c10d' needs a process group: call "
            "torch.distributed.init_process_group first"
        )
    key = (id(resolved), kind, str(device), beside)
    with _lock:
        known = _registry.get(key)
        if known is not None and not known.closed:
            return known
    limit = timeout_of(resolved) if timeout is None else timeout
    meet(resolved, f"connect ('{kind}' on {device.type})", limit)
    if device.type == "cuda":
        made = _make_on_device(resolved, kind, device, limit, beside)
    else:
        made = _make(resolved, kind, limit, max_bytes, beside)
    _register(resolved, key, made)
    return made


def _register(group: dist.ProcessGroup, key: _Key, made: Communicator) -> None:
    """Under the kind that was asked for and the one that it is."""
    with _lock:
        _made[next(_numbers)] = made
        if all(known[0] != id(group) for known in _registry):
            weakref.finalize(group, _forget_group, id(group)).atexit = False
        for each in (key, (key[0], made.kind, *key[2:])):
            if each not in _registry or _registry[each].closed:
                _registry[each] = made


def _resolve_device(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"fsdpx: there are no communicators for tensors on {device}")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class _Alone:
    """Stands for the process group of a process without torch.distributed."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


_ALONE: Any = _Alone()


def _resolve(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is not None:
        return group
    world = dist.group.WORLD if dist.is_initialized() else _ALONE
    assert world is not None
    return world


def _make_on_device(
    group: dist.ProcessGroup,
    kind: str,
    device: torch.device,
    limit: float,
    beside: Communicator | None,
) -> Communicator:
    control = _make(group, "auto", limit, None, None)
    try:
        return cuda.connect(group, kind, device, limit, control, beside)
    except BaseException:
        control.close(seconds=0.0)
        raise


def _make(
    group: dist.ProcessGroup,
    kind: str,
    limit: float,
    max_bytes: int | None,
    beside: Communicator | None,
) -> Communicator:
    chosen: Kind = choose_kind(group, kind)
    if chosen.name == "shm":
        try:
            native = shm.connect(group, chosen, timeout=limit, max_bytes=max_bytes)
            return Communicator(native, chosen.reason, limit, beside=beside)
        except shm.Unavailable as error:  # on every rank
            if kind == "shm":
                raise ValueError(f"fsdpx: comm kind 'shm' is impossible: {error}") from None
            chosen = Kind("c10d", str(error))
    native, leave = c10d.connect(group, timeout=limit)
    return Communicator(native, chosen.reason, limit, beside=beside, leave=leave)


def _forget(communicator: Communicator) -> None:
    with _lock:
        for key in [key for key, known in _registry.items() if known is communicator]:
            del _registry[key]


def _forget_group(identity: int) -> None:
    with _lock:
        dropped = [_registry.pop(key) for key in list(_registry) if key[0] == identity]
    del dropped  # without the lock: what nobody uses closes itself


def _close_all() -> None:
    """Ends the worker threads before torch goes, the latest communicator first."""
    with _lock:
        open_ones = list(_made.values())
        _registry.clear()
    for communicator in reversed(open_ones):
        communicator.close(seconds=EXIT_SECONDS)
        for leave in (communicator.leave, communicator.control.leave):
            if leave is not None:
                leave()


atexit.register(_close_all)
