"""However a run ends: the first cause is told, what was learned is saved, and nothing is left."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from actorlearner import checkpoint
from actorlearner.run import main
from tests.command import SMALL, Command, metrics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds workers by their names")

FAULTY = (*SMALL, "workers=2", "env.id=tests.faulty:Faulty-v0", "run_dir=run")
ENDLESS = ("total_steps=1_000_000", "trainer.checkpoint_every_env_steps=0")


def fault(kind: str, at: int = 0, workers: str = "[1]") -> list[str]:
    kwargs = {"fault": kind, "at": at, "workers": workers}
    return [f"+env.kwargs.{name}={value}" for name, value in kwargs.items()]


def saved_env_steps(run_dir: Path) -> int:
    return checkpoint.read_manifest(checkpoint.find(run_dir)).env_steps


def goes_on(run_dir: Path, *overrides: str) -> bool:
    """Assert that `resume` learns on from where ``run_dir`` stands."""
    before = saved_env_steps(run_dir)
    more = [f"total_steps={before + 100}", "trust=[tests]", *overrides]
    arguments = [f"resume={run_dir}", *more]
    assert main(arguments) == 0
    assert saved_env_steps(run_dir) >= before + 100
    steps = [line["env_steps"] for line in metrics(run_dir) if "q/loss" in line]
    assert steps == sorted(set(steps))
    return True


# --------------------------------------------------------------------------------- environments


@pytest.mark.parametrize(("kind", "at"), [("constructor", 0), ("reset", 150), ("step", 155)])
def test_the_error_of_an_environment_is_told_first(kind: str, at: int, tmp_path: Path) -> None:
    with Command([*FAULTY, *ENDLESS, *fault(kind, at)], tmp_path) as command:
        command.wait()
        assert command.leaves_nothing()
    assert command.code == 1, command.err
    told = command.err[command.err.index("error: ") :]
    phase = {"constructor": "constructing the environment"}.get(kind, kind)
    first, second = told.splitlines()[:2]
    assert first.startswith("error: worker 1 (tests.faulty:Faulty-v0) failed in ")
    assert first.endswith(f"{phase}: ValueError: boom in the {kind}")
    assert second.startswith("Traceback")
    assert "tests/faulty.py" in told
    assert command.err.count("Traceback") == 1, "only the worker's"
    if kind != "constructor":
        # Ten of eleven rows are env steps, and of those of worker 1 only one unroll is lost.
        assert saved_env_steps(tmp_path / "run") > (at - 16) * 10 / 11 - 16
        assert goes_on(tmp_path / "run", "env.kwargs.fault=none")


@pytest.mark.slow  # the launchers' own suite does this too
def test_the_errors_of_two_workers_are_both_told(tmp_path: Path) -> None:
    faults = fault("step", 20, workers="[0,1]")
    with Command([*FAULTY, *ENDLESS, *faults], tmp_path) as command:
        command.wait()
        assert command.leaves_nothing()
    assert command.code == 1, command.err
    for worker in (0, 1):
        assert f"worker {worker} (tests.faulty:Faulty-v0) failed in step: ValueError" in command.err
    assert command.err.count("Traceback") == 2


def test_a_nan_is_told_with_its_worker_stream_and_field(tmp_path: Path) -> None:
    with Command([*FAULTY, *ENDLESS, *fault("no-number", 155)], tmp_path) as command:
        command.wait()
        assert command.leaves_nothing()
    assert command.code == 1, command.err
    told = next(line for line in command.err.splitlines() if line.startswith("error: "))
    for what in ("worker 1", "Faulty-v0", "observation 'observation' is nan", "stream 1"):
        assert what in told
    states = checkpoint.load(checkpoint.find(tmp_path / "run"), ["replay"])
    assert "nan" not in repr(states).lower()
    assert goes_on(tmp_path / "run", "env.kwargs.fault=none")


@pytest.mark.slow  # the launchers' own suite does this too
def test_a_worker_that_exits_is_told_by_its_code(tmp_path: Path) -> None:
    faults = [*fault("exit", 30), "launch.max_restarts=0"]
    with Command([*FAULTY, *ENDLESS, *faults], tmp_path) as command:
        command.wait()
        assert command.leaves_nothing()
    assert command.code == 1, command.err
    assert "worker 1 (tests.faulty:Faulty-v0) failed in an unroll: process" in command.err
    assert "exited with code 3" in command.err
    assert "Traceback" not in command.err


def test_killed_workers_are_replaced_until_there_were_too_many(tmp_path: Path) -> None:
    """The error tells the first cause, and the last."""
    with Command([*FAULTY, *ENDLESS, "workers=3", "launch.max_restarts=1"], tmp_path) as command:
        pids = []
        for env_steps in (300, 600):
            command.wait_for_env_steps(tmp_path / "run", env_steps)
            worker = command.worker(2)
            assert worker is not None
            worker.kill()
            pids.append(worker.pid)
        command.wait(10)
        assert command.leaves_nothing()
    assert command.code == 1, command.err
    told = command.err[command.err.index("error: ") :].splitlines()
    for line, pid in zip(told, pids, strict=False):
        assert "worker 2 (tests.faulty:Faulty-v0)" in line
        assert f"process {pid} was killed by SIGKILL" in line
    assert "replacement 1 of at most 1 in an hour (launch.max_restarts)" in command.err
    assert "Traceback" not in command.err
    assert saved_env_steps(tmp_path / "run") >= 600
    assert metrics(tmp_path / "run")[-1]["workers/restarts"] == 1
    assert goes_on(tmp_path / "run", "workers=2")


# -------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("signals", "group", "code"),
    [
        pytest.param([signal.SIGINT], True, 130, id="ctrl-c"),
        pytest.param([signal.SIGINT], False, 130, id="SIGINT-to-the-learner"),
        pytest.param([signal.SIGTERM], False, 143, id="SIGTERM"),
        pytest.param([signal.SIGTERM] * 2, False, 143, id="SIGTERM-twice-as-timeout-sends-it"),
    ],
)
def test_an_interrupted_run_is_saved(
    signals: list[signal.Signals], group: bool, code: int, tmp_path: Path
) -> None:
    with Command([*FAULTY, *ENDLESS], tmp_path) as command:
        command.wait_for_env_steps(tmp_path / "run", 300)
        for number in signals:
            command.signal(number, group=group)
            time.sleep(0.01)  # or the kernel would make one of two
        command.wait(10)
        assert command.leaves_nothing()
    assert command.code == code, command.err
    assert "Traceback" not in command.err
    assert "saving and closing" in command.err
    last = metrics(tmp_path / "run")[-1]["env_steps"]
    assert saved_env_steps(tmp_path / "run") >= last >= 300
    assert goes_on(tmp_path / "run")


def test_a_signal_while_workers_start_ends_the_run(tmp_path: Path) -> None:
    sleepy = fault("sleep", 0, workers="[0,1]")
    asleep = tmp_path / "asleep"
    with Command([*FAULTY, *ENDLESS, *sleepy], tmp_path, ASLEEP=str(asleep)) as command:
        command.wait_until(asleep.exists)
        command.signal(signal.SIGINT, group=True)
        command.wait(10)
        assert command.leaves_nothing()
    assert "Saved" not in command.err
    assert "there was nothing to save" in command.err
    assert command.code == 130, command.err
    assert "Traceback" not in command.err


@pytest.mark.parametrize(
    ("number", "code", "processes"),
    [
        pytest.param(signal.SIGINT, 130, 1, id="SIGINT-probe"),
        pytest.param(signal.SIGTERM, 143, 1, marks=pytest.mark.slow, id="SIGTERM-probe"),
        pytest.param(signal.SIGINT, 130, 2, marks=pytest.mark.slow, id="SIGINT-workers"),
        pytest.param(signal.SIGTERM, 143, 2, marks=pytest.mark.slow, id="SIGTERM-workers"),
    ],
)
def test_a_signal_is_not_for_processes_that_are_being_spawned(
    number: signal.Signals, code: int, processes: int, tmp_path: Path
) -> None:
    """It comes before their first line of code; the first is the probe."""
    seen: set[int] = set()

    def have_begun() -> bool:
        for process in command.processes():
            with suppress(psutil.NoSuchProcess):
                if "spawn_main" in " ".join(process.cmdline()):
                    seen.add(process.pid)
        return len(seen) >= processes

    with Command([*FAULTY, *ENDLESS, "launch.start_method=spawn"], tmp_path) as command:
        command.wait_until(have_begun)
        time.sleep(0.05)  # for Python to get as far as to handle signals
        command.signal(number, group=True)
        command.wait(10)
        assert command.leaves_nothing()
    assert command.code == code, command.err
    assert "Traceback" not in command.err


def test_a_signal_during_the_last_evaluation_ends_a_saved_run(tmp_path: Path) -> None:
    sleepy = fault("sleep", 5, workers="[-1]")
    asleep = tmp_path / "asleep"
    with Command([*FAULTY, *sleepy], tmp_path, ASLEEP=str(asleep)) as command:
        command.wait_until(asleep.exists)
        command.signal(signal.SIGTERM)
        command.wait(6)
        assert command.leaves_nothing()
    assert command.code == 143, command.err
    assert saved_env_steps(tmp_path / "run") >= 400


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after_s", [0.1, 0.4, 0.8, 1.2, 1.6, 2.0, 2.5, 3.0, 3.5])
def test_a_signal_at_any_moment_of_the_start_leaves_nothing(
    number: signal.Signals, after_s: float, tmp_path: Path
) -> None:
    with Command([*FAULTY, *ENDLESS], tmp_path) as command:
        time.sleep(after_s)
        command.signal(number, group=True)
        command.wait(15)
        assert command.leaves_nothing(temporary_files=command.code > 0)
    codes = {signal.SIGINT: {130, -2}, signal.SIGTERM: {143, -15}}[number]
    assert command.code in codes, command.err
    assert "al-worker" not in command.err
    assert command.err.count("Traceback") <= (after_s < 2), command.err


# ----------------------------------------------------------------------------------- the learner


def test_children_die_with_a_killed_learner_also_in_a_long_step(tmp_path: Path) -> None:
    asleep = tmp_path / "asleep"
    arguments = [*FAULTY, *ENDLESS, *fault("sleep", 300), "trainer.checkpoint_every_env_steps=150"]
    with Command(arguments, tmp_path, ASLEEP=str(asleep)) as command:
        command.wait_until(asleep.exists)
        assert len(command.processes()) >= 3
        command.signal(signal.SIGKILL)
        command.wait()
        assert command.leaves_nothing(temporary_files=False)
    assert command.code == -signal.SIGKILL, command.err
    assert goes_on(tmp_path / "run", "env.kwargs.fault=none")


def test_an_error_of_the_agent_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    broken = ["agent.target=tests.faulty:BrokenDQN", "trust=[tests]", "samples_per_insert=0.5"]
    often = ["trainer.checkpoint_every_env_steps=50"]
    with Command([*FAULTY, *ENDLESS, *broken, *often], tmp_path) as command:
        command.wait(20)
        assert command.leaves_nothing()
    assert command.code == 1, command.err
    assert command.err.rstrip().endswith("RuntimeError: the agent is broken")
    assert "q_training_step" in command.err
    assert "saving" not in command.err, "in an update the weights may be half changed"
    where = checkpoint.find(tmp_path / "run")
    assert checkpoint.read_manifest(where).info["updates"] < 5
    assert goes_on(tmp_path / "run", "trust=[tests]", "samples_per_insert=0.1")
