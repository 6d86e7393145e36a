"""A worker as the learner sees it: a seat that one process after another takes."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from actorlearner.contracts import Array, Failure, Unroll, WorkerSpec
from actorlearner.launch._child import Commit, Slot, SnapshotBuffer
from actorlearner.pulse import Pulse
from actorlearner.shared_memory import SharedArrays

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
"""For workers to close their environments before they are killed."""
_NEXT_TO_NOTHING = 0.25  # of a core
_UNWATCHED_S = 5.0  # at most so much time between two looks counts as silence


class Seat:
    """A worker as the learner's process sees it: one process after another, if they are lost.

    Attributes:
        role: see `run_child`.
        index: of the worker.
        env: name of the environment.
        spec: what its process does; None for a probe.
        slots: where it puts unrolls.
        owned: the memory that ends with it.
        pulse: `Pulse.counts` of its process.
        owes: what it was told to do and has not done yet, oldest first.
        inbox: payloads that came while another's were waited for.
        attempt: how often in a row its process was lost before it had done anything.
        due_at: when to replace one that is lost, `time.monotonic` seconds.
        errors: how many of these attempts ended with an exception.
        rows_done: that its process handed over.
        held_s: for how long the limiter held back the last credit for each slot, seconds.
        cores: that its process kept busy when it last worked; one until it has told.
    """

    process: Any
    connection: Connection

    def __init__(self, role: str, index: int, env: str) -> None:
        self.role = role
        self.index = index
        self.env = env
        self.spec: WorkerSpec | None = None
        self.slots: list[Slot] = []
        self.owned: SharedArrays | SnapshotBuffer | None = None
        self.pulse: Array = Pulse.SPEC.zeros()
        self.owes: list[Any] = []
        self.inbox: deque[Any] = deque()
        self.attempt = 0
        self.due_at = 0.0
        self.errors = 0
        self.held_s: dict[int, float] = {}
        self.cores = 1.0
        self.is_lost = True

    def begun(self, process: Any, connection: Connection) -> None:
        """It has a new process."""
        self.process, self.connection = process, connection
        self.is_ready = self.is_lost = self.has_done = False
        self._looked_at = time.monotonic()
        self._silence_s = 0.0
        self._pulse_seen = self.pulse.tolist()
        self.rows_done = 0

    def send(self, message: Any) -> None:
        """Tell it; that it is gone will show when it is next listened to."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def order(self, message: Any) -> None:
        """Tell it what to do; one that is lost is told when it begins again."""
        if not self.owes:
            self._silence_s = 0.0
        self.owes.append(message)
        if not self.is_lost:
            self.send(message)

    def done(self, message: Any) -> None:
        """It has done what it owed."""
        self.owes.remove(message)
        self.has_done = True
        self.attempt = self.errors = 0

    def has_message(self) -> bool:
        """Whether it has said something, if only that it ended."""
        if self.is_lost:
            return False
        try:
            return self.connection.poll()
        except OSError:
            return True  # receiving tells

    def spoke(self) -> None:
        """It said something."""
        self.is_ready, self._silence_s = True, 0.0

    def silence_s(self) -> float:
        """Seconds for which it has owed something, or its start, without a sign of life.

        Only time that was watched counts: while all processes are paused, or the learner is busy,
        nobody is to blame.
        """
        now = time.monotonic()
        pulse = self.pulse.tolist()
        if pulse != self._pulse_seen or not (self.owes or not self.is_ready):
            self._pulse_seen, self._silence_s = pulse, 0.0
        else:
            self._silence_s += min(now - self._looked_at, _UNWATCHED_S)
        self._looked_at = now
        return self._silence_s

    @property
    def busy_cores(self) -> int:
        """How many cores it keeps busy now, in whole ones."""
        # Processes that share a core have a part of it each, and would have more; one that only
        # waits for its environment has next to nothing.
        return math.ceil(self.cores - _NEXT_TO_NOTHING) if self.owes and not self.is_lost else 0

    @property
    def rows_dropped(self) -> int:
        """Rows that its process stepped and handed to nobody."""
        if self.spec is None or self.role != "collect":
            return 0
        return (int(self.pulse[0]) - self.rows_done) * len(self.spec.streams)

    @property
    def phase(self) -> str:
        """What it is at, in words."""
        if not self.is_ready:
            return "constructing the environment"
        return {"collect": "an unroll", "evaluate": "an evaluation"}.get(self.role, self.role)

    def view(self, commit: Commit) -> Unroll:
        """The unroll that ``commit`` says is full, with whom its worker waited for."""
        self.cores = commit.cores
        unroll = self.slots[commit.slot].view(commit)
        waited = unroll.seconds.pop("wait")
        for_limiter = min(waited, self.held_s.get(commit.slot, 0.0))
        unroll.seconds |= {"slots": waited - for_limiter, "limiter": for_limiter}
        return unroll

    def failure(self, phase: str, detail: str) -> Failure:
        """A failure that the process can't tell of itself."""
        return Failure(self.index, self.env, phase, detail, at=time.monotonic())

    def death(self) -> Failure:
        """How the process ended."""
        self.process.join(1.0)
        code = self.process.exitcode
        pid = f"process {self.process.pid}"
        if code is None:
            how = f"{pid} closed its pipe"
        elif code < 0:
            how = f"{pid} was killed by {_signal_name(-code)}"
            if -code == signal.SIGKILL:
                how += " (out of memory?)"
        else:
            how = f"{pid} exited with code {code}"
        return self.failure(self.phase, how)

    def kill(self) -> None:
        """End the process and what it started, now; its group outlives it."""
        with suppress(ProcessLookupError, PermissionError):  # it has no group of its own yet
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()

    def end(self) -> None:
        """End the process, now, and give its pipe back; its memory stays for the next one."""
        self.kill()
        self.process.join(CLOSE_S)
        self.kill()  # what it started may have outlived it
        self.connection.close()
        self.is_lost = True
        if self.process.exitcode is None:
            # It sits in the kernel, in a device or a file system that does not answer, and will
            # run no further instruction of its own.
            logger.warning("process %d can't be killed; it is left behind", self.process.pid)
        else:
            self.process.close()


class Credit:
    """The right to fill ``slot`` of ``seat``, while the learner has it."""

    def __init__(self, seat: Seat, slot: int) -> None:
        self._seat, self._slot = seat, slot
        self._held_since: float | None = None

    def hold(self) -> None:
        """The limiter does not let it go, from now on."""
        if self._held_since is None:
            self._held_since = time.perf_counter()

    def give_back(self) -> None:
        """Let the worker fill the slot."""
        since = self._held_since
        self._seat.held_s[self._slot] = 0.0 if since is None else time.perf_counter() - since
        self._seat.order(self._slot)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of the real-time signals only two have names
        return f"signal {number}"


def close(seats: Sequence[Seat]) -> None:
    """End ``seats`` and give their pipes and memory back, within a bounded time."""
    running = [seat for seat in seats if not seat.is_lost]
    for seat in running:
        seat.send(None)
    deadline = time.monotonic() + CLOSE_S
    for seat in running:
        seat.process.join(max(0.0, deadline - time.monotonic()))
        seat.end()
    for seat in seats:
        seat.slots, seat.pulse = [], Pulse.SPEC.zeros()
        if seat.owned is not None:
            seat.owned.close()
