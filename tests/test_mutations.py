"""The list of deliberate bugs does not rot; `make mutations` plants them."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation, main, planted, verdict

PACKAGE = ROOT / "actorlearner"


def test_there_are_as_many_as_is_said_and_each_has_its_name() -> None:
    for page in ("Makefile", "CONTRIBUTING.md"):
        assert re.findall(r"plants? (\d+) bugs", (ROOT / page).read_text()) == [str(len(MUTATIONS))]
    assert max(Counter(mutation.name for mutation in MUTATIONS).values()) == 1


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_can_be_planted_and_is_python_then(mutation: Mutation) -> None:
    before = ast.dump(ast.parse((PACKAGE / mutation.file).read_text()))
    assert ast.dump(ast.parse(planted(mutation, PACKAGE))) != before


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_its_tests_are_there(mutation: Mutation) -> None:
    assert mutation.tests
    for node_id in mutation.tests:
        file, *names = node_id.partition("[")[0].split("::")
        body = ast.parse((ROOT / file).read_text()).body
        for name in names:
            found = {getattr(node, "name", None): getattr(node, "body", []) for node in body}
            assert name in found, node_id
            body = found[name]


@pytest.mark.parametrize("old", ["no such text", "self"])
def test_an_old_text_must_occur_once(old: str) -> None:
    mutation = MUTATIONS[0]._replace(old=old)
    with pytest.raises(ValueError, match=rf"{mutation.name}: its old text occurs \d+ times in"):
        planted(mutation, PACKAGE)


def test_only_a_failed_test_has_caught_a_bug() -> None:
    summary = (
        "x\nFAILED tests/test_a.py::test_b[c d] - assert 1 == 2\nFAILED tests/test_a.py::test_e\n"
    )
    assert verdict(1, summary) == "tests/test_a.py::test_b[c d]"
    assert verdict(0, "1 passed") is None
    for code, output in ((1, "no summary"), (2, summary), (4, "no such test"), (5, "no tests")):
        with pytest.raises(RuntimeError, match=f"pytest returned {code}"):
            verdict(code, output)


def test_some_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(MUTATIONS)
    assert main(["--list", "-k", "dqn_", "-k", "limiter"]) == 0
    names = [line.partition("_")[0] for line in capsys.readouterr().out.splitlines()]
    assert set(names) == {"dqn", "limiter"}
    with pytest.raises(SystemExit) as caught:
        main(["-k", "nonesuch"])
    assert caught.value.code == 2
