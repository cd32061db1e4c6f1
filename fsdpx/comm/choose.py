"""Which kind of communicator a group gets, decided alike on all ranks."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ..errors import CommTimeout

T = TypeVar("T")

LONGEST_SECONDS = 10 * 365 * 24 * 3600.0

# How often this rank has met the others of a group.
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Host:
    """What decides whether two ranks can share memory."""

    boot: str  # one per start of a kernel
    uid: int
    network: str  # namespace of Unix sockets
    memory: str  # the file system behind /dev/shm
    pid: int


@dataclass(frozen=True)
class Kind:
    """A decision: the kind, why, and how shared memory travels ("sockets", "names", "private")."""

    name: str
    reason: str
    way: str = ""


def meet(group: dist.ProcessGroup, what: str, limit: float) -> None:
    """Waits until all ranks have come to do `what`, through the group's store. Collective.

    Raises:
        CommTimeout: Not all came within `limit` seconds; names those that did not.
    """
    rank, size = group.rank(), group.size()
    if size == 1:
        return
    try:
        store = group.get_group_store()
    except (AttributeError, RuntimeError):
        return  # a group without one: its own collectives, which come next, have a limit
    number = _meetings[group] = _meetings.get(group, 0) + 1
    keys = [f"fsdpx/meeting/{number}/{r}" for r in range(size)]
    store.set(keys[rank], what)
    try:
        store.wait(keys, timedelta(seconds=min(limit, LONGEST_SECONDS)))
    except RuntimeError:
        absent = [r for r in range(size) if not store.check([keys[r]])]
        store.delete_key(keys[rank])  # who comes now waits for this rank to come again
        _meetings[group] = number - 1
        if not absent:
            raise
        names = ", ".join(map(str, absent))
        raise CommTimeout(
            f"fsdpx: rank {rank} is to {what}; of {size} ranks, {names} did not come within "
            f"{limit:g} s; raise the time limit if they are only slow"
        ) from None


def timeout_of(group: dist.ProcessGroup) -> float:
    """The group's own time limit in seconds; torch's default where a backend does not tell."""
    for kind in ("cpu", "cuda"):
        try:
            return float(group._get_backend(torch.device(kind)).options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue
    return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


def tell(group: dist.ProcessGroup, mine: T) -> list[T]:
    """Every rank's value, in rank order. Collective."""
    if group.size() == 1:
        return [mine]
    all_of_them: list[T | None] = [None] * group.size()
    dist.all_gather_object(all_of_them, mine, group=group)
    return [one for one in all_of_them if one is not None]


def this_host() -> Host:
    """The facts about this process."""
    return Host(
        boot=_read("/proc/sys/kernel/random/boot_id"),
        uid=os.geteuid(),
        network=_inode("/proc/self/ns/net"),
        memory=_inode("/dev/shm"),
        pid=os.getpid(),
    )


def choose_kind(group: dist.ProcessGroup, kind: str) -> Kind:
    """The kind for this group; the same on every rank.

    Raises:
        ValueError: `kind` is "shm" and some rank cannot (on every rank).
    """
    if kind == "c10d":
        return Kind("c10d", "asked for")
    if group.size() == 1:
        return Kind("shm", "one rank", "private")
    decision = decide(tell(group, this_host()))
    if kind == "shm" and decision.name != "shm":
        raise ValueError(f"fsdpx: comm kind 'shm' is impossible: {decision.reason}")
    return decision


def decide(hosts: list[Host]) -> Kind:
    """The kind for ranks on these hosts."""
    first = hosts[0]
    for rank, host in enumerate(hosts):
        if not host.boot:
            return Kind("c10d", f"rank {rank} can't tell which host it is on")
        if host.boot != first.boot:
            return Kind("c10d", f"rank {rank} is on another host than rank 0")
        if host.uid != first.uid:
            return Kind("c10d", f"rank {rank} runs as user {host.uid}, rank 0 as {first.uid}")
    if all(host.network and host.network == first.network for host in hosts):
        return Kind("shm", "all ranks are on one host", "sockets")
    if all(host.memory and host.memory == first.memory for host in hosts):
        return Kind("shm", "all ranks are on one host", "names")
    apart = next(r for r, h in enumerate(hosts) if h.network != first.network or not h.network)
    return Kind("c10d", f"rank {apart} shares neither sockets nor /dev/shm with rank 0")


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _inode(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"
