"""The shape of the package: who may import whom, and what every module owes its readers."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import actorlearner

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "actorlearner"

FLOORS = {
    "contracts": 0,
    "config": 1,
    "compiled": 1,
    "returns": 1,
    "schedules": 1,
    "networks": 1,
    "value_heads": 1,
    "distributions": 1,
    "optim": 1,
    "feedback": 1,
    "joint_actions": 1,
    "sum_tree": 1,
    "memory": 1,
    "cores": 1,
    "verdict": 1,
    "shared_memory": 1,
    "metrics": 1,
    "frames": 1,
    "video": 1,
    "checkpoint": 1,
    "statetree": 1,
    "randomness": 1,
    "interrupts": 1,
    "background": 1,
    "pulse": 1,
    "threads": 1,
    "envstate": 1,
    "messages": 1,
    "onnx_export": 1,
    "acting": 2,
    "callbacks": 1,
    "tracking": 2,
    "faults": 2,
    "streams": 2,
    "adapter": 2,
    "columns": 2,
    "envs": 2,
    "suites": 2,
    "dmc": 2,
    "crafter": 2,
    "policies": 2,
    "evaluator": 2,
    "worker": 2,
    "rows": 2,
    "ring": 2,
    "replay": 2,
    "evaluate": 2,
    "progress": 2,
    "control": 1,
    "runlog": 2,
    "launch": 3,
    "launch._child": 3,
    "launch._zygote": 3,
    "launch.inline": 3,
    "launch.local": 3,
    "launch.processes": 3,
    "launch.restarts": 3,
    "launch.seat": 3,
    "agents": 3,
    "agents.dqn": 3,
    "agents.world_model": 3,
    "agents.open_loop": 3,
    "agents.dreamer": 3,
    "trainersettings": 4,
    "assembly": 4,
    "runstate": 4,
    "saving": 4,
    "trainer": 4,
    "inference": 5,
    "run": 5,
    "plot": 5,
}
"""The floor of each module, as DESIGN.md and docs/architecture.md tell."""

SAME_FLOOR = {
    ("checkpoint", "statetree"),  # one state of it
    ("returns", "compiled"),  # loops over windows
    ("sum_tree", "compiled"),  # loops over nodes
    ("memory", "cores"),  # those that it is bound to
    ("shared_memory", "memory"),  # whether there is as much
    ("value_heads", "returns"),  # their losses
    ("suites", "envs"),  # recipes of its kind
    ("faults", "envs"),  # into which it puts them
    ("dmc", "envs"),  # likewise
    ("crafter", "envs"),  # likewise
    ("onnx_export", "config"),  # its optional libraries
    ("columns", "adapter"),  # each of them
    ("envs", "adapter"),  # what they are to it
    ("envs", "columns"),  # likewise of many
    ("suites", "adapter"),  # likewise
    ("suites", "columns"),  # likewise
    ("worker", "acting"),  # what runs the policy's network
    ("worker", "columns"),  # steps them
    ("worker", "evaluator"),  # cut out of it
    ("worker", "policies"),  # likewise
    ("worker", "streams"),  # seeds of episodes
    ("evaluator", "adapter"),  # numbers of info
    ("evaluator", "columns"),  # steps them
    ("evaluator", "policies"),  # likewise
    ("evaluator", "streams"),  # seeds of episodes
    ("progress", "streams"),  # where each stands
    ("runlog", "evaluate"),  # results as metrics
    ("launch.inline", "launch"),
    ("launch.inline", "launch.restarts"),
    ("launch.local", "launch.restarts"),
    ("launch.local", "launch"),
    ("launch.local", "launch._child"),
    ("launch.local", "launch.processes"),
    ("launch.local", "launch.seat"),
    ("launch.seat", "launch._child"),
    ("launch._zygote", "launch._child"),
    ("replay", "ring"),  # where it keeps rows
    ("replay", "rows"),  # those that were left behind
    ("ring", "rows"),  # likewise, of those that are large
    ("trainer", "assembly"),  # cut out of it
    ("trainer", "trainersettings"),  # likewise
    ("assembly", "trainersettings"),  # what it makes parts of
    ("agents.dreamer", "agents.world_model"),  # cut out of it
    ("agents.dreamer", "agents.open_loop"),  # likewise
    ("trainer", "runstate"),  # likewise
    ("trainer", "saving"),  # likewise
}
"""Who imports whom on one floor, and why; each must be needed."""

FOR_TYPES = {("callbacks", "trainer"), ("faults", "trainer")}
"""Upward imports for annotations only."""

FREE = {"", "run"}
"""``__init__`` exports from every floor; ``run`` is the composition root."""


def modules() -> dict[str, Path]:
    """Every module by its name without ``actorlearner.``; the package itself is ""."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


MODULES = modules()


def imports(path: Path, *, for_types: bool = False) -> set[str]:
    """Dotted names that a module imports, inside functions too.

    Args:
        path: of the module.
        for_types: those under ``if TYPE_CHECKING``, instead of the others.
    """
    found: set[str] = set()

    def visit(node: ast.AST, is_for_types: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for part in node.body:
                visit(part, True)
            for part in node.orelse:
                visit(part, is_for_types)
            return
        if is_for_types == for_types:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative imports are not used here"
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, is_for_types)

    visit(ast.parse(path.read_text()), False)
    return found


def imported_modules(name: str, *, for_types: bool = False) -> set[str]:
    """The modules of this package that module ``name`` imports, as in `FLOORS`."""
    found = set()
    for dotted in imports(MODULES[name], for_types=for_types):
        if dotted == "actorlearner" or not dotted.startswith("actorlearner."):
            continue
        inside = dotted.removeprefix("actorlearner.")
        found.add(inside if inside in MODULES else inside.rpartition(".")[0])
    return found


def importers_of(library: str, *, for_types: bool = False) -> set[str]:
    """The modules that import ``library``."""
    return {
        name
        for name, path in MODULES.items()
        if any(d.partition(".")[0] == library for d in imports(path, for_types=for_types))
    }


# --------------------------------------------------------------------------------------- floors


def test_every_module_has_a_floor() -> None:
    assert set(MODULES) - {""} == set(FLOORS)


@pytest.mark.parametrize("name", FLOORS)
def test_imports_go_only_downwards(name: str) -> None:
    for other in imported_modules(name):
        below = FLOORS[other] < FLOORS[name]
        assert below or (name, other) in SAME_FLOOR, f"{name} must not import {other}"
    for other in imported_modules(name, for_types=True):
        below = FLOORS[other] < FLOORS[name]
        assert below or (name, other) in FOR_TYPES, f"{name} must not look up {other}"


def test_every_exception_is_needed() -> None:
    assert {(n, o) for n, o in SAME_FLOOR if o in imported_modules(n)} == SAME_FLOOR
    assert {(n, o) for n, o in FOR_TYPES if o in imported_modules(n, for_types=True)} == FOR_TYPES


def test_floor_1_knows_no_other_but_the_contracts() -> None:
    on_it = {name for name, floor in FLOORS.items() if floor == 1}
    pairs = {(name, other) for name in on_it for other in imported_modules(name)}
    assert {other for _, other in pairs - SAME_FLOOR} <= {"contracts"}


def part(name: str) -> set[str]:
    """The modules of package ``name``."""
    return {module for module in MODULES if module == name or module.startswith(f"{name}.")}


def all_imports(names: set[str]) -> set[str]:
    return {
        other
        for name in names
        for for_types in (False, True)
        for other in imported_modules(name, for_types=for_types)
    }


def test_agents_import_floors_0_and_1_only() -> None:
    assert {FLOORS[other] for other in all_imports(part("agents")) - part("agents")} <= {0, 1}


def test_agents_and_launchers_do_not_know_each_other() -> None:
    assert not all_imports(part("agents")) & part("launch")
    assert not all_imports(part("launch")) & part("agents")


def test_launchers_import_floors_0_to_2_only() -> None:
    others = all_imports(part("launch")) - part("launch")
    assert {FLOORS[other] for other in others} <= {0, 1, 2}


@pytest.mark.parametrize("name", ["trainer", "assembly"])
def test_the_trainer_knows_contracts_only(name: str) -> None:
    forbidden = part("agents") | part("launch") | {"replay", "worker"}
    assert not all_imports({name}) & forbidden


def test_every_library_has_its_place() -> None:
    suites = {"suites", "dmc", "crafter"}
    others = {"adapter", "columns", "envs", "envstate", "faults", "launch._zygote"}
    assert importers_of("gymnasium") == others | suites
    assert importers_of("gymnasium", for_types=True) == {"contracts"}
    assert importers_of("hydra") == {"run"}
    assert importers_of("omegaconf") <= {"run", "trainer", "plot"}
    assert importers_of("ray") <= {"launch.ray"}
    assert importers_of("multiprocessing") <= part("launch") | {"shared_memory"}
    assert importers_of("safetensors") == {"checkpoint"}
    assert importers_of("pickle") == set()
    assert importers_of("numba") == {"compiled"}
    assert importers_of("cloudpickle") <= part("launch")


# --------------------------------------------------------------------------- what loads when


def loaded_by(code: str) -> set[str]:
    """Top-level modules and those of this package that a process has after ``code``."""
    code += "; import sys; print('loaded:', *sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return set(result.stdout.rpartition("loaded:")[2].split())


def test_torch_waits_until_the_fork_server_has_started() -> None:
    loaded = loaded_by(
        "import actorlearner, actorlearner.launch.local, actorlearner.launch._child, "
        "actorlearner.run"
    )
    assert "actorlearner.run" in loaded
    assert not {"torch", "gymnasium"} & loaded


def test_workers_do_without_numba() -> None:
    """Which takes 60 MB, of each of many."""
    loaded = loaded_by("import actorlearner.worker, actorlearner.agents.dqn")
    assert "actorlearner.compiled" in loaded
    assert "numba" not in loaded


@pytest.mark.parametrize("argument", ["total_step=5", "agent=foo", "--foo", "a=[1,"])
def test_an_error_of_the_command_line_is_told_before_torch_loads(argument: str) -> None:
    loaded = loaded_by(f"from actorlearner.run import main; assert main(['{argument}']) == 2")
    assert "hydra" in loaded
    assert not {"torch", "gymnasium"} & loaded


def test_star_names_load_on_demand() -> None:
    assert "torch" in loaded_by("from actorlearner import Trainer")
    with pytest.raises(AttributeError, match="has no attribute 'Nope'"):
        getattr(actorlearner, "Nope")  # noqa: B009 (mypy knows that it is not there)


# ------------------------------------------------------------------------------------ readers


def test_public_names() -> None:
    assert actorlearner.__all__ == [
        "DQN", "Callback", "ReplayBuffer", "Trainer", "__version__", "load_policy",
    ]  # fmt: skip
    for name in actorlearner.__all__:
        assert getattr(actorlearner, name) is not None
    assert re.fullmatch(r"\d+\.\d+\.\d+", actorlearner.__version__)


@pytest.mark.parametrize("name", MODULES)
def test_no_print_and_no_note_to_oneself(name: str) -> None:
    source = MODULES[name].read_text()
    for node in ast.walk(ast.parse(source)):
        is_print = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        assert not is_print, f"line {getattr(node, 'lineno', 0)}: use logging"
    assert not re.findall(r"\b(TODO|FIXME|XXX|HACK)\b", source)


def load(name: str) -> ModuleType:
    return importlib.import_module(f"actorlearner.{name}" if name else "actorlearner")


def public_things(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Public functions and classes that ``module`` defines, and the classes' public methods."""
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.isclass(thing):
            yield name, thing
            for inner, method in vars(thing).items():
                unwrapped = getattr(method, "__func__", getattr(method, "fget", method))
                if not inner.startswith("_") and inspect.isfunction(unwrapped):
                    yield f"{name}.{inner}", unwrapped


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"launch._zygote"}))  # changes its process
def test_everything_public_has_a_docstring(name: str) -> None:
    module = load(name)
    assert (module.__doc__ or "").strip(), "the module itself"
    for what, thing in public_things(module):
        doc = (vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__) or ""
        assert doc.strip(), what
        assert not doc.startswith(f"{what}("), f"{what} has only what dataclasses generate"
