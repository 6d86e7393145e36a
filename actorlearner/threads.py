"""How many torch threads make updates fastest: found out by trying, while the run learns."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch

logger = logging.getLogger(__name__)

_WARMUP = 10  # updates, of which the first allocate memory
_TURNS = 5  # of each number
_TURN_UPDATES, _TURN_S = 4, 0.25  # what a turn takes at least: it meets workers at work and not
_SMALL_S = 0.002  # an update that takes less has nothing to share out
_WORTH = 0.9  # more threads must need at most this share of the time


class UpdateThreads:
    """The torch threads of updates, and of nothing else; all else runs with one.

    With one number there is nothing to find out. With several they take turns, as other processes
    come and go, and the number whose median update is fastest stays; of nearly equals the smallest.
    Updates that are short anyway keep the smallest.

    Threads share an update out evenly, and wait for the one whose core has other work to do, too.
    So while others compute, updates leave them their cores, down to the smallest number.

    Attributes:
        busy_cores: on which others compute now; whoever knows sets it.

    Example::

        threads = UpdateThreads([1, 2])
        while learns:
            threads.busy_cores = launcher.busy_cores()
            with threads.update():
                update()
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        """Try ``numbers``, at least one, each at least 1; of several the largest is all cores."""
        self.busy_cores = 0
        self._numbers = sorted(set(numbers))
        self._chosen: int | None = self._numbers[0] if len(self._numbers) == 1 else None
        self._seconds: dict[int, list[float]] = {number: [] for number in self._numbers}
        self._updates = 0
        self._turn = 0
        self._of_turn: list[float] = []

    @property
    def chosen(self) -> int | None:
        """The number that stays; None while it is being found out."""
        return self._chosen

    @contextmanager
    def update(self) -> Iterator[None]:
        """Run one update with the threads that it is to have."""
        number = self._number()
        torch.set_num_threads(number)
        since = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - since
            torch.set_num_threads(1)
        if self._chosen is None and number == self._tried:
            self._note(number, spent)

    @property
    def _tried(self) -> int:
        """Whose turn it is."""
        return self._numbers[self._turn % len(self._numbers)]

    def _number(self) -> int:
        smallest = self._numbers[0]
        room = max(smallest, self._numbers[-1] - self.busy_cores)
        if self._chosen is not None:
            return min(self._chosen, room)
        # If the smallest is too slow for workers that compute, they come to wait, and leave room.
        return self._tried if self._tried <= room else smallest

    def _note(self, number: int, seconds: float) -> None:
        self._updates += 1
        if self._updates <= _WARMUP:
            return
        self._of_turn.append(seconds)
        if len(self._of_turn) < _TURN_UPDATES or sum(self._of_turn) < _TURN_S:
            return
        self._seconds[number].append(median(self._of_turn))
        if self._turn == 0 and self._seconds[number][0] < _SMALL_S:
            self._chosen = number
            return
        self._turn, self._of_turn = self._turn + 1, []
        if self._turn == _TURNS * len(self._numbers):
            self._choose()

    def _choose(self) -> None:
        medians = {number: median(seconds) for number, seconds in self._seconds.items()}
        best = self._numbers[0]
        for number in self._numbers[1:]:
            if medians[number] <= _WORTH * medians[best]:
                best = number
        self._chosen = best
        told = ", ".join(f"{1e3 * medians[n]:.1f} ms with {n}" for n in self._numbers)
        logger.info("Updates run with %d torch thread%s: %s.", best, "s" * (best > 1), told)
