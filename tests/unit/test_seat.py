"""A worker's process as the learner ends it."""

from __future__ import annotations

import logging
import multiprocessing
from types import SimpleNamespace

import pytest

from actorlearner.launch import seat as seats
from actorlearner.launch.seat import Seat

NOBODY = 2**22 + 1  # one more than Linux gives out


class Stuck:
    """A process in the kernel: no signal ends it, and joining returns without it."""

    pid = NOBODY
    exitcode = None

    def __init__(self) -> None:
        self.killed, self.waited_s, self.closed = 0, 0.0, False

    def kill(self) -> None:
        self.killed += 1

    def join(self, timeout_s: float) -> None:
        self.waited_s += timeout_s

    def close(self) -> None:
        self.closed = True
        raise ValueError("Cannot close a process while it is still running.")


@pytest.fixture
def stuck():
    seat = Seat("collect", 3, "Stuck-v0")
    ours, theirs = multiprocessing.Pipe()
    seat.begun(Stuck(), ours)
    yield seat
    theirs.close()


def test_a_process_that_cant_be_killed_is_left_behind_and_told_of(stuck, caplog):
    with caplog.at_level(logging.WARNING):
        stuck.end()
    assert stuck.process.killed
    assert stuck.process.waited_s <= seats.CLOSE_S
    assert not stuck.process.closed
    assert stuck.is_lost  # so that another can take the seat
    assert stuck.connection.closed
    assert f"process {NOBODY} can't be killed" in caplog.text


def test_closing_does_not_wait_for_it_for_ever(stuck):
    memory = SimpleNamespace(closed=False)
    memory.close = lambda: setattr(memory, "closed", True)
    stuck.owned = memory
    seats.close([stuck])
    assert stuck.process.waited_s <= 2 * seats.CLOSE_S
    assert memory.closed
