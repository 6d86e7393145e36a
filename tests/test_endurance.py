"""Short ones of what `tests/endurance.py` does for long."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import endurance

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds workers by their names"),
]


def test_chaos(tmp_path: Path) -> None:
    told = endurance.chaos(tmp_path, minutes=1)
    assert told["restarts"] >= 10


@pytest.mark.parametrize("preset", endurance.PRESETS)
def test_kills(preset: str, tmp_path: Path) -> None:
    told = endurance.kills(tmp_path, count=5, preset=preset)
    assert told["kills"] == 5
    assert told["bit_equal"] >= 1


def test_soak(tmp_path: Path) -> None:
    endurance.soak(tmp_path, minutes=1)
