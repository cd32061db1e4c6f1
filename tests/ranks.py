"""Runs test functions on several ranks: worker processes that stay up from one test to the next.

    def check_sum(rank, world_size, value): ...        # importable, at the top level of a module

    def test_sum():
        results = run_ranks(2, check_sum, 3)            # results[r] is what rank r returned

The workers of one world size share one process group, made once (the default group): gloo, and
nccl for CUDA tensors where there is CUDA, real or simulated. Ranks share GPUs when there are fewer;
a test whose ranks fail because these GPUs cannot do what it asks for is skipped, with the reason.
What a rank raises comes back as `RankError`. After a failure, a crash or a passed time limit the
workers are killed, and the next call starts new ones.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import multiprocessing
import os
import pickle
import re
import shutil
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import cudasim
import pytest
from cudasim.jobs import job, new_session

START_LIMIT = 120.0  # seconds: importing torch on a busy machine
GRACE = 5.0  # seconds that other ranks get after one has failed
# Of NCCL 2.30 and later, for several ranks on one GPU.
SHARED_GPUS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}


@dataclass(frozen=True)
class Failure:
    """What one rank raised, or why there is no result."""

    rank: int
    text: str
    exception: BaseException | None = None


class RankError(AssertionError):
    """Some ranks failed; `failures` has one entry for each of them."""

    def __init__(self, failures: list[Failure]) -> None:
        parts = (f"--- rank {f.rank} ---\n{f.text}" for f in failures)
        super().__init__(f"{len(failures)} rank(s) failed\n" + "\n".join(parts))
        self.failures = failures


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Calls `fn(rank, world_size, *args)` on every rank; returns the results in rank order."""
    pool = _pools.get(world_size)
    if pool is None or not pool.healthy():
        stop_pool(world_size)
        pool = _pools[world_size] = _Pool(world_size)
    try:
        return pool.run(fn, args, timeout)
    except BaseException as error:
        stop_pool(world_size)
        if (reason := refused(world_size, str(error))) is not None:
            pytest.skip(reason)
        raise


def refused(world_size: int, text: str) -> str | None:
    """What GPUs of this machine cannot do, if that is why ranks failed."""
    import torch

    if cudasim.active or not torch.cuda.is_available():
        return None
    num_gpus = torch.cuda.device_count()
    if num_gpus < world_size and re.search("Duplicate GPU|using the same GPU", text):
        return f"NCCL {torch.cuda.nccl.version()} refuses several ranks on one GPU"
    gpus = range(min(num_gpus, world_size))
    apart = [(a, b) for a, b in itertools.permutations(gpus, 2) if not _is_peer(a, b)]
    if apart and (impossible := re.search("kind 'nvlink.* is impossible.*|not nvlink: .*", text)):
        return f"GPUs {apart[0]} cannot map each other's memory: {impossible[0]}"
    return None


def _is_peer(gpu: int, other: int) -> bool:
    import torch

    return bool(torch.cuda.can_device_access_peer(gpu, other))


def stop_pool(world_size: int) -> None:
    """Kills the workers of this world size; the next `run_ranks` starts new ones."""
    pool = _pools.pop(world_size, None)
    if pool is not None:
        pool.kill()


def stop_all() -> None:
    """Kills all workers."""
    for world_size in list(_pools):
        stop_pool(world_size)


class _Pool:
    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        self.variables = new_session()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, world_size, theirs, os.getpid()), daemon=True
            )
            # Set here: the simulation begins when torch is imported, which may be before `_work`.
            with pytest.MonkeyPatch.context() as patch:
                for name, value in {**self.variables, "CUDASIM_SLOT": str(rank)}.items():
                    patch.setenv(name, value)
                process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        try:
            # Rank 0 binds a free port; the others learn it from here.
            port = self._collect(START_LIMIT, ranks=[0])[0]
            for pipe in self.pipes[1:]:
                pipe.send(port)
            self._collect(START_LIMIT)
        except BaseException:
            self.kill()
            raise

    def healthy(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        job = pickle.dumps((fn, args))
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a dead worker: reported by _collect
                pipe.send_bytes(job)
        return self._collect(timeout)

    def _collect(self, timeout: float, ranks: list[int] | None = None) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        pending = {self.pipes[r]: r for r in (ranks or range(len(self.pipes)))}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                text = (
                    f"no result within {timeout} s" if not failures else "stuck after the failure"
                )
                failures += [Failure(rank, text) for rank in pending.values()]
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                outcome = self._receive(pipe, rank)
                if isinstance(outcome, Failure):
                    failures.append(outcome)
                    deadline = min(deadline, time.monotonic() + GRACE)
                else:
                    results[rank] = outcome[0]
        if failures:
            raise RankError(sorted(failures, key=lambda failure: failure.rank))
        return [results[rank] for rank in sorted(results)]

    def _receive(self, pipe: Connection, rank: int) -> tuple[Any] | Failure:
        try:
            outcome = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            process = self.processes[rank]
            process.join(1.0)
            return Failure(rank, f"the worker died (exit code {process.exitcode})")
        assert isinstance(outcome, tuple | Failure)
        return outcome

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10.0)
            process.close()
        for pipe in self.pipes:
            pipe.close()
        if self.variables:
            shutil.rmtree(self.variables["CUDASIM_SESSION"], ignore_errors=True)


_pools: dict[int, _Pool] = {}
atexit.register(stop_all)


def _work(rank: int, world_size: int, pipe: Connection, parent: int) -> None:
    """The life of one worker."""
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    _init_group(rank, world_size, pipe)
    gc.collect()
    gc.freeze()  # what has been imported stays: no later collection needs to look at it
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        pipe.send_bytes(_outcome(request, rank, world_size))
        gc.collect()


def _init_group(rank: int, world_size: int, pipe: Connection) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, limit, wait_for_workers=False)
        pipe.send_bytes(pickle.dumps((store.port,)))
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), world_size, False, limit)
    backend = "gloo"
    if torch.cuda.is_available():
        num_gpus = min(torch.cuda.device_count(), world_size)
        if num_gpus < world_size:
            os.environ.update(SHARED_GPUS)
        torch.cuda.set_device(rank * num_gpus // world_size)  # neighbours share
        torch.cuda.current_stream().synchronize()  # the first stream, whatever comes later
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    pipe.send_bytes(pickle.dumps((None,)))


def _outcome(request: bytes, rank: int, world_size: int) -> bytes:
    try:
        fn, args = pickle.loads(request)
        with job():
            return pickle.dumps((fn(rank, world_size, *args),))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            error.__traceback__ = None
            return pickle.dumps(Failure(rank, text, error))
        except Exception:
            return pickle.dumps(Failure(rank, text))


def _die_with(parent: int) -> None:
    """Ends this process when the one that started it is gone, whatever it is waiting for."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
