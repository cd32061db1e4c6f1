"""The communication stream: order, errors, limits, closing, forks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from fsdpx import _C
from fsdpx.errors import CommTimeout


def test_tasks_run_in_order_on_one_thread_that_is_not_ours() -> None:
    stream = _C.WorkerStream("test")
    seen: list[tuple[int, int]] = []
    for i in range(100):
        last = stream.enqueue(lambda i=i: seen.append((i, threading.get_ident())))
    last.wait(10)
    assert [i for i, _ in seen] == list(range(100))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    stream.close(1)


def test_no_thread_before_the_first_task() -> None:
    def num_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = num_threads()
    stream = _C.WorkerStream("test")
    assert num_threads() == before
    stream.enqueue(lambda: None).wait(10)
    assert num_threads() == before + 1
    stream.close(10)
    assert num_threads() == before


def test_an_error_goes_to_its_event_every_time_and_to_no_other() -> None:
    stream = _C.WorkerStream("test")
    bad = stream.enqueue(lambda: 1 / 0)
    good = stream.enqueue(lambda: None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            bad.wait(10)
    assert bad.query()
    good.wait(10)
    stream.close(1)


def test_a_wait_has_a_limit() -> None:
    stream = _C.WorkerStream("test")
    gate = threading.Event()
    event = stream.enqueue(gate.wait)
    assert not event.query()
    with pytest.raises(CommTimeout, match=r"within 0\.05 s"):
        event.wait(0.05)
    gate.set()
    event.wait(10)
    stream.close(1)


def test_what_a_task_owns_is_free_when_its_event_ends() -> None:
    class Owned:
        def __call__(self) -> None:
            pass

    stream = _C.WorkerStream("test")
    for _ in range(50):
        owned = Owned()
        reference = weakref.ref(owned)
        event = stream.enqueue(owned)
        del owned
        event.wait(10)
        assert reference() is None
    stream.close(1)


def test_close_runs_what_is_queued_and_takes_no_more() -> None:
    stream = _C.WorkerStream("test")
    done: list[int] = []
    events = [stream.enqueue(lambda i=i: (time.sleep(0.01), done.append(i))) for i in range(5)]
    stream.close(10)
    stream.close(10)
    assert done == [0, 1, 2, 3, 4]
    assert all(event.query() for event in events)
    with pytest.raises(RuntimeError, match="'test' is closed"):
        stream.enqueue(lambda: None)


def test_close_drops_what_does_not_end_in_time() -> None:
    stream = _C.WorkerStream("test")
    started, gate = threading.Event(), threading.Event()
    running = stream.enqueue(lambda: (started.set(), gate.wait()))
    assert started.wait(10)
    dropped = stream.enqueue(lambda: None)
    begin = time.monotonic()
    stream.close(0.1)
    assert time.monotonic() - begin < 5
    with pytest.raises(RuntimeError, match="closed before this task ran"):
        dropped.wait(10)
    gate.set()
    running.wait(10)
    stream.close(10)


def test_a_stream_that_nobody_closed_does_not_wait_when_it_goes() -> None:
    stream = _C.WorkerStream("test")
    started, gate = threading.Event(), threading.Event()
    running = stream.enqueue(lambda: (started.set(), gate.wait()))
    assert started.wait(10)
    begin = time.monotonic()
    del stream
    assert time.monotonic() - begin < 5
    gate.set()
    running.wait(10)


FORK = """
import os, sys
from fsdpx import _C
stream = _C.WorkerStream("test")
stream.enqueue(lambda: None).wait(10)
child = os.fork()
if child == 0:
    try:
        stream.enqueue(lambda: None)
    except RuntimeError as error:
        print(error, flush=True)
    stream.close(1)
    del stream
    sys.exit(3)
_, status = os.waitpid(child, 0)
stream.enqueue(lambda: None).wait(10)
stream.close(1)
print("exit code", os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_gets_a_clear_error_and_can_exit() -> None:
    run = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=True
    )
    assert "A forked child can't run collectives" in run.stdout
    assert "exit code 3" in run.stdout


def test_the_recorder_keeps_nothing_when_off_and_order_when_on() -> None:
    recorder = _C.Recorder()
    recorder.record("comm", "u", "all_gather", 1, 2, 3, 4)
    assert recorder.take() == []
    recorder.enable(True)
    for i in range(3):
        recorder.record("compute", f"u{i}", "forward", i, i, i + 1)
    assert recorder.take() == [("compute", f"u{i}", "forward", i, i, i + 1, 0) for i in range(3)]
    assert recorder.take() == []
    assert abs(_C.now_ns() - time.monotonic_ns()) < 1e9
