"""Work in a thread: its result, its errors, and how much of the time it takes."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from actorlearner.background import Background


def work_for(seconds: float) -> None:
    """Use the processor."""
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


def test_a_result() -> None:
    background: Background[int] = Background("worker")
    assert not background.is_busy
    go = threading.Event()
    background.start(lambda: 3 if go.wait() else 0)
    assert background.is_busy
    assert not background.is_done
    assert not background.wait(0.01)
    go.set()
    assert background.wait(10)
    assert background.is_done
    assert background.is_busy, "until somebody has taken it"
    assert background.take() == 3
    assert not background.is_busy
    assert not background.is_done


@pytest.mark.parametrize("kind", [OSError, TimeoutError, KeyboardInterrupt, ValueError])
def test_an_error_is_raised_where_the_result_is_taken(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("broken")

    background: Background[None] = Background("worker")
    for _ in range(2):
        background.start(fail)
        assert background.wait(10)
        with pytest.raises(kind, match="broken"):
            background.take()
        assert not background.is_busy


def test_what_failed_lets_go_of_what_it_had() -> None:
    class Copy:
        pass

    seen: list[weakref.ref[Copy]] = []

    def fail() -> None:
        copy = Copy()
        seen.append(weakref.ref(copy))
        raise OSError("full")

    background: Background[None] = Background("worker")
    background.start(fail)
    with pytest.raises(OSError, match="full"):
        background.take()
    gc.collect()
    assert seen[0]() is None


def test_it_rests_most_of_the_time_unless_somebody_waits() -> None:
    background: Background[float] = Background("worker")

    def work() -> float:
        begin = time.monotonic()
        for _ in range(5):
            work_for(0.002)
            background.pace()
        return time.monotonic() - begin

    background.start(work)
    while not background.is_done:
        time.sleep(0.01)
    assert background.take() > 29 * 5 * 0.002
    background.start(work)
    assert background.take() < 29 * 5 * 0.002 / 2

    def work_hard() -> float:
        work_for(0.05)
        background.pace()  # for 1.5 s
        return 0.0

    background.start(work_hard)
    time.sleep(0.1)
    begin = time.monotonic()
    background.hurry()
    assert background.take() == 0.0
    assert time.monotonic() - begin < 1


def test_no_end_of_the_process_waits_for_it() -> None:
    background: Background[bool] = Background("worker")
    background.start(lambda: threading.current_thread().daemon)
    assert background.take()
