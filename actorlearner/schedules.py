"""What happens when: values over time, periodic work, and the pace of learning."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any


def check_knots(knots: Sequence[tuple[float, float]]) -> None:
    """Check that ``knots`` make a schedule.

    Raises:
        ValueError: there are none, one is not finite, or their positions do not increase.
    """
    if not knots:
        raise ValueError("a schedule needs at least one (x, y) knot")
    if not all(math.isfinite(number) for knot in knots for number in knot):
        raise ValueError(f"knots={list(knots)}: every number must be finite")
    if any(left >= right for (left, _), (right, _) in pairwise(knots)):
        raise ValueError(f"knots={list(knots)}: each x must be greater than the one before")


def piecewise(knots: Sequence[tuple[float, float]], x: float) -> float:
    """The value at ``x``: linear between ``knots``, constant before the first and after the last.

    Args:
        knots: ``(x, y)`` pairs by increasing x.
        x: where to look.

    Raises:
        ValueError: as `check_knots`.
    """
    check_knots(knots)
    right = bisect_right(knots, x, key=lambda knot: knot[0])
    if right == 0:
        return knots[0][1]
    if right == len(knots):
        return knots[-1][1]
    (x0, y0), (x1, y1) = knots[right - 1], knots[right]
    return y0 + (y1 - y0) * ((x - x0) / (x1 - x0))


class Every:
    """A clock for periodic work: it strikes at each multiple of its period.

    Example::

        should_log = Every(1_000)
        while env_steps < total:
            ...
            if should_log.due(env_steps):
                log()

    Args:
        period: in the unit of the counts; 0 never strikes.

    Raises:
        ValueError: the period is negative.
    """

    def __init__(self, period: int) -> None:
        if period < 0:
            raise ValueError(f"period={period}: must be at least 0")
        self.period = period
        self._struck_at = 0

    def due(self, count: int) -> bool:
        """Whether ``count`` has reached a multiple of the period since the last strike.

        Several multiples passed at once make one strike, and 0 is not a multiple.
        """
        if self.period == 0 or count // self.period <= self._struck_at // self.period:
            return False
        self._struck_at = count
        return True

    def state_dict(self) -> dict[str, Any]:
        """The count of the last strike, which stays true when the period changes."""
        return {"struck_at": self._struck_at}

    def load_state_dict(self, state: Any) -> None:
        """Go back to ``state``."""
        self._struck_at = state["struck_at"]


class SamplesPerInsert:
    """Holds sampled rows / inserted rows at a target, whichever side is the slower.

    Only what comes after the warm-up counts. The learner may not run ahead of the target at all;
    the workers may run ahead by a slack, so that neither waits for the other at every turn. At no
    time are both held back.

    Example::

        for unroll in launcher.gather(timeout, limiter.may_insert):
            store.add(unroll)
            limiter.insert(unroll.env_steps)
        while limiter.owes_an_update():
            learn(store.sample())
            limiter.sample()

    Args:
        target: sampled rows per inserted row.
        batch_size: rows sampled for one update.
        warmup_env_steps: env steps before the first update.
        slack_rows: inserted rows by which workers may run ahead; what is in flight is enough.

    Raises:
        ValueError: a number is out of its bounds.
    """

    def __init__(
        self, target: float, batch_size: int, warmup_env_steps: int, slack_rows: int
    ) -> None:
        if not 0 < target < math.inf:
            raise ValueError(f"target={target}: must be positive and finite")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1")
        if warmup_env_steps < 0:
            raise ValueError(f"warmup_env_steps={warmup_env_steps}: must be at least 0")
        if slack_rows < 0:
            raise ValueError(f"slack_rows={slack_rows}: must be at least 0")
        self.target = target
        self.batch_size = batch_size
        self.warmup_env_steps = warmup_env_steps
        # Less than one batch of slack would hold back the workers before an update is owed.
        self._slack = max(2 * batch_size, target * slack_rows)
        self.restart_warmup()

    def restart_warmup(self) -> None:
        """Begin the warm-up anew, with no debt: for a resume that brought no replay."""
        self._warmup_left = self.warmup_env_steps
        self._inserted = 0
        self._sampled = 0

    def insert(self, env_steps: int) -> None:
        """Note that ``env_steps`` rows went into the store."""
        warming_up = min(env_steps, self._warmup_left)
        self._warmup_left -= warming_up
        self._inserted += env_steps - warming_up

    def sample(self) -> None:
        """Note that the batch of one update was sampled."""
        if self._warmup_left == 0:
            self._sampled += self.batch_size

    def owes_an_update(self) -> bool:
        """Whether one more update keeps to the target."""
        return self._inserted > 0 and self._debt >= self.batch_size

    def may_insert(self) -> bool:
        """Whether workers may go on."""
        return self._debt <= self._slack

    def ratio(self) -> float:
        """Samples per insert so far; NaN before the first insert after the warm-up."""
        return self._sampled / self._inserted if self._inserted else math.nan

    def state_dict(self) -> dict[str, Any]:
        """The counts, and the target that they were held to."""
        return {
            "target": self.target,
            "warmup_left": self._warmup_left,
            "inserted": self._inserted,
            "sampled": self._sampled,
        }

    def load_state_dict(self, state: Any) -> None:
        """Go back to ``state``; counts held to another target would be a debt, so they go."""
        self._warmup_left = state["warmup_left"]
        same_target = state["target"] == self.target
        self._inserted = state["inserted"] if same_target else 0
        self._sampled = state["sampled"] if same_target else 0

    @property
    def _debt(self) -> float:
        """Rows still to be sampled."""
        return self.target * self._inserted - self._sampled
