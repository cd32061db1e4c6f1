"""How the GPUs of a group are joined."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .. import _C
from .choose import tell


def nvlink_problem(group: dist.ProcessGroup, device: torch.device) -> str:
    """Which ranks, all of one host, have no NVLink between them; empty if there are none.

    Peers' memory can be mapped over PCIe too. But there every rank's stores to all others share a
    few links, reads from afar are slow, and NCCL, whose rings pass each link once, is the better
    choice. The same on every rank: collective.
    """
    names = tell(group, _C.gpu_bus_id(device.index))
    apart = [rank for rank, name in enumerate(names) if not _C.may_have_nvlink(device.index, name)]
    mine = f"no NVLink between ranks {group.rank()} and {apart[0]}" if apart else ""
    return next(filter(None, tell(group, mine)), "")
