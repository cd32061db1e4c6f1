"""Making the shared-memory communicator of a group."""

from __future__ import annotations

import torch.distributed as dist

from .. import _C
from .choose import Kind, tell

CONNECT_SECONDS = 60.0


class Unavailable(RuntimeError):
    """Some rank can't share memory; raised on every rank, naming it."""


def connect(
    group: dist.ProcessGroup, kind: Kind, *, timeout: float, max_bytes: int | None
) -> _C.Communicator:
    """Connects the ranks of `group`. Collective.

    Raises:
        Unavailable: It failed on some rank.
    """
    rank, size = group.rank(), group.size()
    bootstrap, problem = None, ""
    try:
        bootstrap = _C.ShmBootstrap(kind.way)
    except RuntimeError as error:
        problem = str(error)
    address = bootstrap.address if bootstrap is not None else ""
    offers = tell(group, (address, problem))
    _check([problem for _, problem in offers])
    assert bootstrap is not None
    native = None
    limit = min(timeout, CONNECT_SECONDS) if size > 1 else timeout
    try:
        addresses = [address for address, _ in offers]
        native = bootstrap.connect(
            rank, addresses, timeout, -1 if max_bytes is None else max_bytes, connect_timeout=limit
        )
    except RuntimeError as error:
        problem = str(error)
    problems = tell(group, problem)
    if native is not None and any(problems):
        native.close()
    _check(problems)
    assert native is not None
    return native


def _check(problems: list[str]) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise Unavailable(f"rank {rank} can't share memory: {problem}")
