"""One thing at a time in a thread, while the loop goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_REST = 29.0
"""Seconds of rest for each of work, so that it takes a thirtieth of a core."""


class Background(Generic[T]):
    """Does one piece of work at a time in a thread that no end of the process waits for.

    The loop and its threads keep all cores busy, and would be slowed down by a thread more. So the
    work calls `pace` between its parts, which rests until it has taken a small share of the time;
    or not at all if somebody waits for the work. A niceness would not do: a thread that is held
    back by it may have the interpreter, or a lock, in its hands.
    """

    def __init__(self, name: str) -> None:
        """Idle.

        Args:
            name: of the thread.
        """
        self._name = name
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._rested_at = 0.0
        self._result: T
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is work whose result nobody has taken."""
        return self._thread is not None

    @property
    def is_done(self) -> bool:
        """Whether there is a result, or an error, to be taken at once."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, work: Callable[[], T]) -> None:
        """Begin ``work``; the result of the one before must have been taken."""
        assert self._thread is None
        self._hurry.clear()
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name)
        self._thread.daemon = True
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        self._rested_at = time.thread_time()
        try:
            self._result = work()
        except BaseException as error:
            self._error = error

    def pace(self) -> None:
        """Rest: called by the work between its parts."""
        self._hurry.wait(_REST * (time.thread_time() - self._rested_at))
        self._rested_at = time.thread_time()

    def hurry(self) -> None:
        """Let the work rest no more: somebody waits for it."""
        self._hurry.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether the work has ended, waited for at most ``timeout_s``; it hurries from now on."""
        assert self._thread is not None
        self.hurry()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def take(self) -> T:
        """The result of the work, waited for.

        Raises:
            BaseException: what the work raised.
        """
        assert self._thread is not None
        self.hurry()
        self._thread.join()
        self._thread = None
        # An error holds on to all that the work had in its hands.
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result
