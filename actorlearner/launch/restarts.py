"""What may be replaced, how often, and how soon."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from actorlearner.config import Settings, setting
from actorlearner.contracts import Failure

_HOUR_S = 3600.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0


@dataclass(frozen=True, kw_only=True)
class RestartSettings(Settings):
    """Settings of what becomes of a worker that is lost."""

    group = "launch"

    max_restarts: int = setting(20, low=0)
    """Workers replaced within an hour, all together, before the run ends; 0 ends it at once."""
    on_env_error: Literal["raise", "restart"] = "raise"
    """What an exception of an environment does: end the run, or replace its worker."""


class Restarts:
    """The replacements of one run's workers, over all of them.

    Attributes:
        count: how many there were.
        rows_dropped: that the lost workers were at, and that nobody has stored.
    """

    def __init__(
        self, settings: RestartSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """None yet.

        Args:
            settings: how many there may be, and of what.
            clock: in seconds.
        """
        self.count = 0
        self.rows_dropped = 0
        self._settings = settings
        self._clock = clock
        self._recent: deque[tuple[float, Failure]] = deque()

    def refuse(self, failure: Failure) -> list[Failure] | None:
        """What ends the run instead of a replacement, the first cause among it; None: nothing does.

        A process that was lost or hangs is replaced; so is one whose environment raised, if that
        was asked for. The error of a policy, and the user's own, would not go away.
        """
        if failure.error and not (failure.of_env and self._settings.on_env_error == "restart"):
            return [failure]
        now = self._clock()
        while self._recent and now - self._recent[0][0] >= _HOUR_S:
            self._recent.popleft()
        limit = self._settings.max_restarts
        if len(self._recent) < limit:
            return None
        told = replace(
            failure,
            detail=f"{failure.detail.rstrip()}\nlaunch.max_restarts={limit} allows no further "
            "replacement within an hour",
        )
        return [told, *(first for _, first in list(self._recent)[:1])]

    def note(self, failure: Failure, dropped: int) -> str:
        """Count a replacement; what to tell people of it.

        Args:
            failure: its cause.
            dropped: rows that the worker was at.
        """
        self.count += 1
        self.rows_dropped += dropped
        self._recent.append((self._clock(), failure))
        return (
            f"{failure.text()}\n{failure.worker_name} is replaced, without the {dropped} rows that "
            f"it was at; this is the replacement {len(self._recent)} of at most "
            f"{self._settings.max_restarts} in an hour (launch.max_restarts)"
        )

    def metrics(self) -> dict[str, float]:
        """See `contracts.Launcher`."""
        return {"restarts": self.count, "rows_dropped": self.rows_dropped}


def back_off_s(attempt: int) -> float:
    """Seconds to wait before a worker begins again.

    Args:
        attempt: how often in a row it was lost without handing anything over, from 1.
    """
    if attempt < 2:  # it had been doing its work
        return 0.0
    return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(attempt - 2, 10))
