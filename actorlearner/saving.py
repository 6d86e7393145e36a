"""When a run's checkpoints are written, and what came of it: one at a time, in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from actorlearner.background import Background
from actorlearner.checkpoint import Pace
from actorlearner.interrupts import Interrupts

logger = logging.getLogger(__name__)

Write: TypeAlias = Callable[[Pace | None], Path | None]
"""Writes what was captured, and tells where; None if it was not wanted after all."""
Point: TypeAlias = tuple[int, int]
"""Env steps and updates."""

_WAIT_S = 0.1  # how long to wait before looking at the deadline again


class Saver:
    """Writes checkpoints, and the weights that were evaluated best, while training goes on.

    A full disk ends no run, but it is told.

    Attributes:
        is_due: whether a checkpoint is wanted that has not been begun.
        saved_at: where the newest whole checkpoint stands.
        gave_up: whether a signal's time to save was over.
    """

    def __init__(
        self, interrupts: Interrupts, deadline_s: float | None, tell: Callable[[Path], None]
    ) -> None:
        """Nothing was saved.

        Args:
            interrupts: signals that have come.
            deadline_s: seconds after a signal in which to save; None for as long as it takes.
            tell: is told of each whole checkpoint.
        """
        self.is_due = False
        self.saved_at: Point = (0, 0)
        self.gave_up = False
        self._interrupts = interrupts
        self._deadline_s = deadline_s
        self._tell = tell
        self._writer: Background[Path | None] = Background("al-checkpoint")
        self._writing_at: Point | None = None  # None of weights that were evaluated best
        self._unwritten: set[str] = set()
        self._evaluated: tuple[int, Callable[[float, Pace | None], Path | None]] | None = None
        self._maybe_best: list[Write] = []

    @property
    def failed(self) -> bool:
        """Whether the newest checkpoint, or the best weights, could not be written."""
        return bool(self._unwritten)

    @property
    def is_busy(self) -> bool:
        """Whether something is being written, or was and nobody has looked since."""
        return self._writer.is_busy

    def hurry(self) -> None:
        """Somebody waits for what is being written."""
        self._writer.hurry()

    def save(self, capture: Callable[[], Write], at: Point) -> None:
        """Begin to write what ``capture`` gives; what is still being written is waited for.

        Only one at a time takes memory.

        Args:
            capture: of this moment.
            at: where it stands.
        """
        self.finish()
        self.is_due = False
        self._writing_at = at
        try:
            self._writer.start(partial(capture(), self._writer.pace))
        except OSError as error:
            self._tell_unwritten(error)

    def save_now(self, capture: Callable[[], Write]) -> Path:
        """Write what ``capture`` gives, and tell where.

        Raises:
            OSError: it could not be written; older ones stand.
        """
        write = capture()
        self.finish()
        path = write(None)
        assert path is not None
        self._tell(path)
        return path

    def look(self) -> None:
        """See whether something was written, and begin with what waits."""
        if self._writer.is_done:
            self._take()
        self._write_best()

    def finish(self) -> None:
        """Wait for what is being written, and what waits to be, and see what came of it.

        Raises:
            KeyboardInterrupt, SystemExit: a signal came, and the time to save is over.
        """
        self._write_best()
        while self._writer.is_busy:
            if self._writer.wait(_WAIT_S):
                self._take()
                self._write_best()
            elif self._deadline_s is not None and self._interrupts.seconds_since > self._deadline_s:
                logger.error(
                    "trainer.preempt_deadline_s=%g: the checkpoint was not written by then",
                    self._deadline_s,
                )
                self.gave_up = True
                self._interrupts.raise_if_any()

    # --------------------------------------------------------------------------- the best

    def hold(self, version: int, write: Callable[[float, Pace | None], Path | None]) -> None:
        """Hold on to weights whose evaluation begins, until its result tells their worth.

        Args:
            version: of the snapshot that is evaluated.
            write: writes them, given how good they are.
        """
        self._evaluated = version, write

    def judge(self, version: int, score: float) -> None:
        """The evaluation of ``version`` gave ``score``: its weights may be the best."""
        evaluated, self._evaluated = self._evaluated, None
        if evaluated is not None and evaluated[0] == version:
            self._maybe_best.append(partial(evaluated[1], score))

    def _write_best(self) -> None:
        """Begin to write weights that may be the best, unless something is being written."""
        if self._maybe_best and not self._writer.is_busy:
            self._writing_at = None
            self._writer.start(partial(self._maybe_best.pop(0), self._writer.pace))

    # ---------------------------------------------------------------------- what came of it

    def _take(self) -> None:
        try:
            path = self._writer.take()
        except OSError as error:
            self._tell_unwritten(error)
            return
        if path is not None:
            logger.debug("saved %s", path)
        if self._writing_at is None:
            if path is not None:  # else they were none of the best, and those are still missing
                self._unwritten.discard("best")
        else:
            self._unwritten.discard("newest")
            self.saved_at = self._writing_at
            if path is not None:
                self._tell(path)

    def _tell_unwritten(self, error: OSError) -> None:
        logger.error("no checkpoint was written, training goes on: %s", error)
        self._unwritten.add("best" if self._writing_at is None else "newest")
