"""How many cores this process may use, and how busy they are, whoever keeps them busy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import psutil


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class CoreSeconds(NamedTuple):
    """Time of several cores, summed.

    Attributes:
        busy: seconds in which they worked, for any program.
        total: all seconds.
    """

    busy: float
    total: float


class CoreMeter:
    """Reads how busy the usable cores were between two looks."""

    def __init__(self) -> None:
        self._which = usable_cores()
        self._since = _counted(self._which)

    def flush(self) -> CoreSeconds:
        """What they did since the last flush; the system counts in hundredths of a second."""
        now, since = _counted(self._which), self._since
        self._since = now
        return CoreSeconds(now.busy - since.busy, now.total - since.total)


def _counted(cores: Sequence[int]) -> CoreSeconds:
    every = psutil.cpu_times(percpu=True)
    # Cores that are switched off have no line; those behind them then go by other numbers.
    times = [every[core] for core in cores if core < len(every)]
    # Linux counts the time of guests as that of users, too.
    total = sum(sum(t) - getattr(t, "guest", 0.0) - getattr(t, "guest_nice", 0.0) for t in times)
    idle = sum(t.idle + getattr(t, "iowait", 0.0) for t in times)
    return CoreSeconds(total - idle, total)
