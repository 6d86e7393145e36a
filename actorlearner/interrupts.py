"""SIGINT and SIGTERM as a flag, looked at when it is safe to stop."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_S = 0.5  # `timeout`, `uv run` and others signal both the process and its group


class Terminated(SystemExit):
    """SIGTERM came: an end that was asked for, unlike a ``sys.exit`` of somebody's code."""


class Interrupts:
    """While it is entered and `defer` was called, the first SIGINT or SIGTERM is only noted.

    Before that, when there is nothing to save yet, it acts at once. A second one, at least a moment
    later, acts at once too. Outside the main thread, where Python delivers no signals, it does
    nothing.

    Attributes:
        signal: the one that came, or None.
        insists: whether a second one came.
    """

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.signal: signal.Signals | None = None
        self.insists = False
        self._deferred = False
        self._noted_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put back the handlers that were there."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def seconds_since(self) -> float:
        """How long ago the first signal came; 0 if none has."""
        return 0.0 if self.signal is None else time.monotonic() - self._noted_at

    def defer(self) -> None:
        """From now on note the first signal only."""
        self._deferred = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if time.monotonic() - self._noted_at < _SAME_S:
                return
            self.insists = True
            self._raise(signal.Signals(number))
        self._noted_at = time.monotonic()
        self.signal = signal.Signals(number)
        if not self._deferred:
            self._raise(self.signal)

    def raise_if_any(self) -> None:
        """End as the signal asked for.

        Raises:
            KeyboardInterrupt: SIGINT came.
            SystemExit: SIGTERM came; with code 143.
        """
        if self.signal is not None:
            self._raise(self.signal)

    @staticmethod
    def _raise(number: signal.Signals) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(128 + number)
