"""Which kind of communicator a group gets, decided alike on all ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from ..errors import DesyncError

T = TypeVar("T")


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


def tell(group: dist.ProcessGroup, mine: T) -> list[T]:
    """Every rank's value, in rank order. Collective."""
    if group.size() == 1:
        return [mine]
    all_of_them: list[T | None] = [None] * group.size()
    try:
        dist.all_gather_object(all_of_them, mine, group=group)
    except RuntimeError as error:
        raise DesyncError(
            "fsdpx: the ranks of a process group connect, and some rank did not come, raised or "
            "has left: all ranks must shard the same model, and begin its first forward together "
            f"({error})"
        ) from error
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
