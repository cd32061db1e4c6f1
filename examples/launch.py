"""The ranks that torchrun starts: which device each has, and their process group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist


def choose_device(wanted: str = "auto") -> torch.device:
    """This rank's device: a GPU where there is one, unless "cpu" is wanted.

    A GPU becomes the current one. Ranks share GPUs if there are fewer of them: neighbours the same,
    and NCCL is told so (it can do this from 2.30 on, for tests; it is slow).
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_gpus = torch.cuda.device_count()
    if num_gpus < num_ranks:
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("NCCL_MAX_CTAS", "2")
    device = torch.device("cuda", rank * min(num_gpus, num_ranks) // num_ranks)
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[tuple[int, int]]:
    """(rank, number of ranks) of torchrun's process group, or (0, 1) without torchrun.

    A group that there is already is used, and stays.
    """
    if dist.is_initialized():
        yield dist.get_rank(), dist.get_world_size()
        return
    if "RANK" not in os.environ:
        yield 0, 1
        return
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()
