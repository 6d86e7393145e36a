"""What README and docs/ say exists, and what a run writes is in docs/metrics.md."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from actorlearner.run import main
from tests.command import SMALL, metrics
from tests.test_architecture import FLOORS, MODULES

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=lambda path: path.name)
BESIDES = {"env_steps", "updates", "wall_s"}
"""What a line of ``metrics.jsonl`` holds besides metrics."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize(
    "name", ["README.md", "docs/architecture.md", "docs/deviations.md", "docs/metrics.md"]
)
def test_the_documents_are_there(name: str) -> None:
    assert len(text_of(name).split()) > 100


# ------------------------------------------------------------------------------------- metrics


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every metric of a short lockstep run with workers, one without lockstep, and a game."""
    names: set[str] = set()
    often = "trainer.evaluate_every_env_steps=100"
    for more in (
        ["lockstep=true", often, "workers=1"],
        ["lockstep=false", often, "workers=1"],
        ["env=atari", "agent.torso=mlp", "samples_per_insert=0.5", "evaluation.step_limit=5",
         "workers=0"],
    ):  # fmt: skip
        run_dir = tmp_path_factory.mktemp("run")
        assert main([*SMALL, f"run_dir={run_dir}", *more]) == 0
        names |= {name for line in metrics(run_dir) for name in line}
    return names


def documented() -> list[str]:
    rows = re.findall(r"^\| *`([a-z_]+/[a-z_]+)` *\|", text_of("docs/metrics.md"), re.MULTILINE)
    assert rows
    return rows


def test_every_metric_is_documented(written: set[str]) -> None:
    assert written - BESIDES - set(documented()) == set()
    assert written >= BESIDES
    for name in BESIDES:
        assert f"`{name}`" in text_of("docs/metrics.md")


def test_every_documented_metric_is_written(written: set[str]) -> None:
    assert set(documented()) - written == set()


def test_no_metric_is_documented_twice() -> None:
    assert len(documented()) == len(set(documented()))


# --------------------------------------------------------------------------------------- names


def exists(dotted: str) -> bool:
    """Whether a module, or a name in one, or a name in a class, is there."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(thing, part):
                return False
            thing = getattr(thing, part)
        return True
    return False


def test_the_check_of_names_can_fail() -> None:
    assert exists("actorlearner.trainer.Trainer.fit")
    assert not exists("actorlearner.trainer.Trainer.fly")
    assert not exists("actorlearner.nowhere")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_names_and_files_in_backticks_exist(path: Path) -> None:
    text = path.read_text()
    quoted = [*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^```.*?^```", text, re.M | re.S)]
    for span in quoted:
        for dotted in re.findall(r"\bactorlearner(?:\.[A-Za-z_]\w*)+", span):
            assert dotted.endswith(".py") or exists(dotted), dotted
        for module, name in re.findall(r"\b(actorlearner[\w.]*):([A-Za-z_]\w*)", span):
            assert exists(f"{module}.{name}"), f"{module}:{name}"
        for file in re.findall(r"^(?:actorlearner|tests|configs|docs|benchmarks)/[\w./-]*$", span):
            assert (ROOT / file).exists(), file


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_resolve(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file) if file else path
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, link


def test_the_floors_are_those_of_the_test() -> None:
    """docs/architecture.md has a table of floor, modules, meaning; an empty floor goes on."""
    table = text_of("docs/architecture.md").partition("## Floors")[2].partition("\n## ")[0]
    floor, told = -1, {}
    for number, names in re.findall(r"^\| *(\d*) *\| *([^|]+?) *\|", table, re.MULTILINE):
        if not names.startswith("`"):
            continue
        floor = int(number) if number else floor
        for name in re.findall(r"`([\w/]+?)(?:\.py|/)`", names):
            told[name] = floor
    assert set(MODULES) - {""} == set(FLOORS)
    tops = {n.partition(".")[0] for n in FLOORS}
    assert told == {name: FLOORS[name] for name in tops}
