"""Tests of `actorlearner.compiled`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from actorlearner.compiled import compiled, copy_bytes

SOURCE = """
from actorlearner.compiled import compiled

@compiled
def total(numbers):
    result = 0.0
    for number in numbers:
        result += number
    return result
"""


def test_sums_are_in_the_order_in_which_they_are_written() -> None:
    """So that a run is bit-equal on every machine: no lanes, no fused multiply-add."""

    @compiled
    def dot(a, b):  # type: ignore[no-untyped-def]
        total = 0.0
        for i in range(len(a)):
            total += a[i] * b[i]
        return total

    a, b = np.random.default_rng(0).normal(size=(2, 1000))
    expected = 0.0
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        expected += x * y
    assert dot(a, b) == expected
    assert dot.__name__ == "dot"


@pytest.fixture
def compiles_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is kept does not know of changes to `copy_bytes`."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("compiles_anew")
@pytest.mark.parametrize("is_compiled", [True, False])
def test_bytes_are_copied(is_compiled: bool) -> None:
    """Those asked for, to where they are asked for, and no other; none at all is few enough."""

    def move(into, at, source, begin, count):  # type: ignore[no-untyped-def]
        copy_bytes(into, at, source, begin, count)

    source, into = np.arange(20, dtype=np.uint8), np.full(10, 255, np.uint8)
    call = compiled(move) if is_compiled else move
    call(into, 3, source, 15, 5)
    call(into, 0, source, 7, 1)
    call(into, 9, source, 1, 0)
    assert into.tolist() == [7, 255, 255, 15, 16, 17, 18, 19, 255, 255]


@pytest.mark.usefixtures("compiles_anew")
@pytest.mark.parametrize("wrong", ["strided", "float32", "read-only"])
def test_only_bytes_that_stand_together_are_copied(wrong: str) -> None:
    """For what else there is, it would write to other places than it is told."""

    @compiled
    def move(into, source):  # type: ignore[no-untyped-def]
        copy_bytes(into, 0, source, 0, 4)

    into: Any = np.zeros(8, "float32" if wrong == "float32" else "uint8")
    into.flags.writeable = wrong != "read-only"
    source = np.arange(8, dtype=np.uint8)
    source.flags.writeable = False  # may be
    with pytest.raises(numba.TypingError, match="copy_bytes"):
        move(into[:: 2 if wrong == "strided" else 1], source)
    fine = np.zeros(8, np.uint8)
    move(fine, source)
    assert fine.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]


@pytest.mark.parametrize("can_write", [True, False])
def test_code_is_kept_where_it_can_be(can_write: bool, tmp_path: Path) -> None:
    """And without a place for it, it still works."""
    (tmp_path / "sums.py").write_text(SOURCE)
    no_directory = tmp_path / "file"
    no_directory.touch()
    if not can_write:  # the superuser can write to a directory whatever its mode
        (tmp_path / "__pycache__").touch()
    environment = {**os.environ, "XDG_CACHE_HOME": str(no_directory), "HOME": str(no_directory)}
    environment.pop("NUMBA_CACHE_DIR", None)
    result = subprocess.run(
        [sys.executable, "-c", "import numpy as np, sums; print(sums.total(np.ones(3)))"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.stdout == "3.0\n", result.stderr
    assert any(tmp_path.glob("__pycache__/*.nbi")) == can_write
