"""How busy the cores are that may be used."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from actorlearner.cores import CoreMeter, CoreSeconds, usable_cores


def test_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() == sorted(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == list(range(os.cpu_count() or 0))


def test_only_usable_cores_count_and_idle_ones_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorlearner.cores.usable_cores", lambda: [0, 2, 9])
    lines: list[Any] = []

    class Times(SimpleNamespace):
        """A line of psutil's, which sums up like a tuple."""

        def __iter__(self) -> Any:
            return iter(vars(self).values())

    def read(percpu: bool) -> list[Any]:
        assert percpu
        return lines

    def count(*cores: dict[str, float]) -> None:
        lines[:] = [Times(**times) for times in cores]

    monkeypatch.setattr(psutil, "cpu_times", read)
    unused = {"user": 100.0, "idle": 100.0}
    count({"user": 1.0, "idle": 2.0}, unused, {"user": 5.0, "idle": 0.0, "iowait": 3.0})
    meter = CoreMeter()
    count({"user": 2.0, "idle": 5.0}, {}, {"user": 5.5, "idle": 0.5, "iowait": 6.0})
    assert meter.flush() == CoreSeconds(1.5, 8.0)
    assert meter.flush() == CoreSeconds(0.0, 0.0)
    count({"user": 4.0, "idle": 5.0, "guest": 2.0}, {}, {"user": 5.5, "idle": 0.5, "iowait": 6.0})
    assert meter.flush() == CoreSeconds(2.0, 2.0), "a guest's time is user time already"


def test_it_reads_this_machine() -> None:
    busy, total = CoreMeter().flush()
    assert 0 <= busy <= total
