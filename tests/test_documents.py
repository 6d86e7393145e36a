"""What README and docs/ say exists and works, and what a run writes is in docs/metrics.md.

Every block of commands or Python on a page is run, in order, in one directory, with the numbers cut
down (`CUT`), or `ELSEWHERE` says what else runs it. ``make tutorial`` runs the tutorial as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
import yaml

from actorlearner import plot
from actorlearner.config import config_dir
from actorlearner.run import compose, main
from tests.command import SMALL, metrics
from tests.test_architecture import FLOORS, MODULES
from tests.tutorial import blocks

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
    """Every metric of a lockstep run with workers, one without lockstep, a game, a Dreamer."""
    names: set[str] = set()
    often = "trainer.evaluate_every_env_steps=100"
    for more in (
        ["lockstep=true", often, "workers=1"],
        ["lockstep=false", often, "workers=1", "trainer.nonfinite=skip"],
        ["env=atari", "agent.torso=mlp", "samples_per_insert=0.5", "evaluation.step_limit=5",
         "workers=0"],
    ):  # fmt: skip
        run_dir = tmp_path_factory.mktemp("run")
        assert main([*SMALL, f"run_dir={run_dir}", *more]) == 0
        names |= {name for line in metrics(run_dir) for name in line}
    dreamer = (
        "total_steps=200", "workers=0", "samples_per_insert=4", "trainer.log_every_env_steps=50",
        "evaluation.episodes=1", "replay.warmup_env_steps=50", "agent.units=8",
        "trainer.nonfinite=skip",
        "agent.deterministic=16", "agent.batch_length=8", "agent.imagine_last=2",
    )  # fmt: skip
    run_dir = tmp_path_factory.mktemp("run")
    assert main(["experiment=cartpole_dreamer", *dreamer, f"run_dir={run_dir}"]) == 0
    return names | {name for line in metrics(run_dir) for name in line}


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


def test_the_tests_that_reliability_names_are_there() -> None:
    """A test or a class of some by its file; one that begins with ``::`` is in that before it."""
    file, found = "", re.findall(r"`([\w/]*\w\.py)?((?:::\w+)+)`", text_of("docs/reliability.md"))
    assert len(found) > 20
    for path, names in found:
        file = path or file
        for name in names.split("::")[1:]:
            is_there = re.search(rf"(def|class) {name}\b", text_of(file))
            assert is_there, f"{file}::{name}"


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


# ------------------------------------------------------------------------------------ commands

PAGES = [p for p in DOCUMENTS if re.search(r"^```(bash|python|yaml)", p.read_text(), re.MULTILINE)]
LANGUAGES = {"bash", "python", "yaml", "text"}

CUT = (
    "workers=0",
    "lockstep=true",
    "unroll_length=4",
    "total_steps=32",
    "replay.warmup_env_steps=16",
    "evaluation.episodes=1",
    "evaluation.step_limit=5",
)
"""Overrides behind those of a page's command."""

ELSEWHERE = {
    "make ": "test_make_knows_the_targets_of_the_documents",
    "pip install ": "tests/tutorial.py, test_the_extras_of_the_documents_are_there",
    "mkdir catch": "tests/tutorial.py",
    "python3 -m venv ": "tests/tutorial.py",
    "source ": "tests/tutorial.py",
    "cd catch": "tests/tutorial.py",
    "tensorboard --logdir ": "tests/tutorial.py",
    "python examples/": "tests/test_examples.py",
    "docker ": "test_the_docker_commands_name_what_is_there; the image is built by hand",
}
"""What a command begins with, and what shows that it works."""


def commands(text: str) -> list[str]:
    """The commands of a bash block, without comments and each in one line."""
    joined = text.replace("\\\n", " ")
    lines = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in joined.splitlines()]
    return [line for line in lines if line]


def all_commands() -> list[str]:
    return [
        command
        for path in PAGES
        for block in blocks(path.read_text())
        if block.language == "bash"
        for command in commands(block.text)
    ]


def shorter(script: str) -> str:
    """A page's Python, with small numbers and in this process."""
    script = re.sub(r"\btotal_steps=[\d_]+", "total_steps=32", script)
    return re.sub(r"\bworkers=\d+", "workers=0, lockstep=True, unroll_length=4", script)


def run_command(command: str) -> None:
    """Run ``command`` cut down in this process, if nothing else runs it."""
    if command.startswith(tuple(ELSEWHERE)):
        return
    words = shlex.split(command)
    assert words[0] == "python", f"nothing runs: {command}"
    if words[1].endswith(".py"):
        script = Path(words[1])
        script.write_text(shorter(script.read_text()))
        ids = dict(gymnasium.registry)
        runpy.run_path(words[1], run_name="__main__")
        gymnasium.registry.clear()  # as that of a process that has ended
        gymnasium.registry.update(ids)
        return
    module, arguments = words[2], words[3:]
    if module == "actorlearner.plot":
        assert plot.main(arguments) == 0
        return
    assert module == "actorlearner.run", f"nothing runs: {command}"
    if len(arguments) == 1 and arguments[0].startswith("experiment="):
        # tests/test_configs.py runs every experiment.
        assert (config_dir() / "experiment" / f"{arguments[0][11:]}.yaml").exists()
    elif arguments == ["--help"]:
        with pytest.raises(SystemExit):
            main(arguments)
    else:
        run_dirs = sorted(Path("runs").glob("**/checkpoints"), key=lambda p: p.stat().st_mtime)
        run_dir = str(run_dirs[-1].parent) if run_dirs else "none"
        given = [re.sub(r"RUN_DIR(_or_FILE)?$", run_dir, argument) for argument in arguments]
        given = [re.sub(r"=(\w+)(,\w+)+$", r"=\1", argument) for argument in given]  # one of -m's
        assert main([*given, *CUT]) == 0, command


@pytest.fixture
def _own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory of its own; what a page imports and registers is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules, ids, threads = set(sys.modules), dict(gymnasium.registry), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
    gymnasium.registry.clear()
    gymnasium.registry.update(ids)


@pytest.mark.usefixtures("_own_process")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_works_from_top_to_bottom(path: Path) -> None:
    for block in blocks(path.read_text()):
        if block.title and block.language in ("python", "yaml"):
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            exec(compile(shorter(block.text), str(path), "exec"), {"__name__": "__main__"})
        elif block.language == "bash":
            for command in commands(block.text):
                run_command(command)


@pytest.mark.usefixtures("_own_process")
def test_a_command_that_nothing_runs_is_noticed() -> None:
    for command in ("frobnicate", "python -m this", "python -m actorlearner.run agent.colour=red"):
        with pytest.raises(AssertionError):
            run_command(command)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_says_what_language_it_is_in(path: Path) -> None:
    """One without would not be run."""
    fences = re.findall(r"^ *```(.*)$", path.read_text(), re.MULTILINE)
    assert len(fences) % 2 == 0
    assert {fence.partition(" ")[0] for fence in fences[::2]} <= LANGUAGES


def inline_commands() -> list[str]:
    quoted = [s for path in DOCUMENTS for s in re.findall(r"`([^`]+)`", path.read_text())]
    found = [" ".join(s.split()) for s in quoted if re.match(r"python -m actorlearner\.run ", s)]
    return sorted({s for s in found if "…" not in s and "RUN_DIR" not in s})


@pytest.mark.parametrize("command", inline_commands())
def test_settings_of_a_command_in_a_sentence_exist(command: str) -> None:
    arguments = [a for a in shlex.split(command)[3:] if a not in ("-m", "--help")]
    compose([re.sub(r",[^\[\]]*$", "", argument) for argument in arguments])


def test_make_knows_the_targets_of_the_documents() -> None:
    spans = [s for path in DOCUMENTS for s in re.findall(r"`(make [^`]+)`", path.read_text())]
    for command in {*spans, *(c for c in all_commands() if c.startswith("make "))}:
        dry = ["make", "--dry-run", *shlex.split(command)[1:]]
        result = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        if command == "make train":
            assert "-m actorlearner.run workers=8" in result.stdout


def test_the_extras_of_the_documents_are_there() -> None:
    section = text_of("pyproject.toml").partition("[project.optional-dependencies]")[2]
    extras = set(re.findall(r"^([a-z0-9]+) = \[", section.partition("\n[")[0], re.MULTILINE))
    named = [n for path in DOCUMENTS for n in re.findall(r"\.\[([a-z0-9,]+)\]", path.read_text())]
    assert named
    assert {extra for names in named for extra in names.split(",")} <= extras


# --------------------------------------------------------------------------------------- pages


def configuration() -> Any:
    spec = importlib.util.spec_from_file_location("page", ROOT / "docs" / "configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_page_is_that_of_the_code() -> None:
    """If it is not: ``make docs`` writes it."""
    assert text_of("docs/configuration.md") == configuration().page()


def test_the_agent_of_the_page_learns() -> None:
    """docs/adding-an-agent.md: it always finds the goal of its maze."""
    from actorlearner import ReplayBuffer, Trainer

    page = blocks(text_of("docs/adding-an-agent.md"))
    (source,) = (block.text for block in page if block.title == "tabular.py")
    assert sum(bool(line.strip()) for line in source.splitlines()) < 60
    names: dict[str, Any] = {}
    exec(compile(source, "tabular.py", "exec"), names)
    trainer = Trainer(total_steps=2_500, workers=0, lockstep=True, console="off")
    metrics = trainer.fit(
        lambda: gymnasium.make("FrozenLake-v1", is_slippery=False),
        ReplayBuffer(warmup_env_steps=500),
        names["TabularQ"](),
    )
    assert metrics["evaluation/return_mean"] == 1


def test_every_page_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """Knows no Python names, which the file does not need."""

    def paths(tree: Any) -> Iterator[str]:
        for item in tree if isinstance(tree, list) else tree.values():
            yield from [item] if isinstance(item, str) else paths(item)

    tree = yaml.load(text_of("mkdocs.yml"), Loader)
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert set(paths(tree["nav"])) == pages


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "reference" / "index.html").exists()


# ---------------------------------------------------------------------------------------- image


def compose_file(name: str) -> Any:
    return yaml.safe_load(text_of(f"docker/{name}"))


def test_the_docker_commands_name_what_is_there() -> None:
    known = re.findall(r"^ARG (\w+)", text_of("docker/Dockerfile"), re.MULTILINE)
    services = compose_file("compose.yaml")["services"]
    for command in (c for c in all_commands() if c.startswith("docker ")):
        words = shlex.split(command)
        for flag, value in pairwise(words):
            if flag == "-f":
                assert (ROOT / value).is_file()
            if flag == "--build-arg":
                assert value.partition("=")[0] in known
        if words[1:2] == ["run"]:
            given = [w for w in words[words.index("run") + 1 :] if "=" in w]
            compose(given)
        if "compose" in words and "run" in words:
            assert words[words.index("--rm") + 1] in services


def test_the_image_holds_what_the_wheel_is_built_from_and_has_no_rights() -> None:
    kept = set(re.findall(r"^!(.+)$", text_of(".dockerignore"), re.MULTILINE))
    assert kept == {"actorlearner", "configs", "pyproject.toml", "constraints.txt", "README.md",
                    "LICENSE"}  # fmt: skip
    dockerfile = text_of("docker/Dockerfile")
    last_user = re.findall(r"^USER (.+)$", dockerfile, re.MULTILINE)[-1]
    assert last_user == "learner"
    assert 'ENTRYPOINT ["python", "-m", "actorlearner.run"]' in dockerfile


def test_compose_shows_tensorboard_to_this_machine_only() -> None:
    services = compose_file("compose.yaml")["services"]
    assert set(services) == {"learner", "tensorboard"}
    assert services["tensorboard"]["ports"] == ["127.0.0.1:6006:6006"]
    for service in services.values():
        assert service["image"] == "actorlearner"
        assert [v.partition(":")[2].partition(":")[0] for v in service["volumes"]] == ["/runs"]
    build = services["learner"]["build"]
    assert (ROOT / "docker" / build["context"] / build["dockerfile"]).samefile(
        ROOT / "docker" / "Dockerfile"
    )
    assert services["tensorboard"]["entrypoint"][:3] == ["tensorboard", "--logdir", "/runs"]
    over = compose_file("compose.gpu.yaml")["services"]
    assert set(over) <= set(services)
