"""tests/CASES.md names tests that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = re.findall(r"^\| (\d+) \|[^|]*\| (.*) \|$", (ROOT / "tests/CASES.md").read_text(), re.M)


@cache
def names_in(file: str) -> frozenset[str]:
    """The tests of a file as pytest names them, without parameters."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return frozenset(name for name in found if name.split("::")[-1].startswith("test_"))


def test_each_case_comes_once_and_in_order() -> None:
    numbers = [int(number) for number, _ in ROWS]
    assert numbers == sorted(set(numbers))
    assert len(numbers) > 70


@pytest.mark.parametrize(("number", "answer"), ROWS, ids=[number for number, _ in ROWS])
def test_what_it_names_is_there(number: str, answer: str) -> None:
    """A test, or a line of words why the case can't occur."""
    named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", answer)
    assert named or len(answer.split()) > 5
    for file, test in named:
        assert test in names_in(file), f"{file}::{test}"
