"""Where this package's log messages go while a run goes on."""

from __future__ import annotations

import logging
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

_PACKAGE = logging.getLogger("actorlearner")
_NEVER = logging.CRITICAL + 1


class Messages:
    """Messages from INFO up reach the run's file; and the console, if nobody configured logging.

    The root logger stays as it is, and gets what it would have got anyway. So does the logger
    ``actorlearner`` if somebody gave it a level or a handler.
    """

    def __init__(self, console: bool) -> None:
        """Nothing changes yet.

        Args:
            console: whether to write to standard error if logging is not configured.
        """
        self._console = console
        self._early = MemoryHandler(capacity=1_000, flushLevel=_NEVER)
        self._own: list[logging.Handler] = []

    def __enter__(self) -> Messages:
        """Take over the package's messages; those for the file wait until it has a place."""
        self._before = _PACKAGE.level, _PACKAGE.propagate
        is_untouched = not _PACKAGE.level and not _PACKAGE.handlers and _PACKAGE.propagate
        self._add(self._early)
        if is_untouched:
            _PACKAGE.setLevel(logging.INFO)
            _PACKAGE.propagate = False
            to_console = self._console and not logging.root.handlers
            self._add(_Console() if to_console else _Root())
        return self

    def _add(self, handler: logging.Handler) -> None:
        self._own.append(handler)
        _PACKAGE.addHandler(handler)

    def to_file(self, path: Path | None) -> None:
        """Append all messages to ``path``, also those that came before; None for no file."""
        if path is not None:
            file = logging.FileHandler(path, encoding="utf-8")
            file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            self._early.setTarget(file)
            self._add(file)
        self._early.close()
        _PACKAGE.removeHandler(self._early)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put everything back."""
        for handler in self._own:
            _PACKAGE.removeHandler(handler)
            handler.close()
        level, _PACKAGE.propagate = self._before
        _PACKAGE.setLevel(level)


class _Root(logging.Handler):
    """Hands on what the root logger would have got without us."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.root.isEnabledFor(record.levelno):
            logging.root.callHandlers(record)


class _Console(logging.Handler):
    """Writes to standard error, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)
