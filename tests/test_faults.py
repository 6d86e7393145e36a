"""Faults on purpose: each does what its setting says, and a run survives them."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium
import psutil
import pytest

from actorlearner import checkpoint
from actorlearner.contracts import CheckpointError, SettingError
from actorlearner.envs import GymEnvFactory
from actorlearner.faults import Faults, FaultSettings, FaultyEnv, FaultyError
from actorlearner.run import main
from tests.command import SMALL, Command, metrics
from tests.environments import Places

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds workers by their names")


def faulty(**chances: float) -> gymnasium.Env:
    env = FaultyEnv(Places(), **chances)
    env.reset(seed=0)
    return env


def test_an_environment_raises_or_sleeps_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("actorlearner.faults.time.sleep", slept.append)
    with pytest.raises(FaultyError, match="on purpose"):
        faulty(raise_chance=1.0).step(0)
    assert faulty(slow_chance=1.0, slow_s=0.25).step(0)[0][2] == 1
    assert faulty(hang_chance=1.0, hang_s=77.0).step(0)[0][2] == 1
    faulty().step(0)
    assert slept == [0.25, 77.0]


def test_intervals_become_chances_of_the_wrapped_environment() -> None:
    settings = FaultSettings(raise_every_env_steps=4, slow_every_env_steps=10, slow_s=2)
    factory = GymEnvFactory.of(Places)
    made = Faults(settings).put_into(factory)
    (wrapping,) = made.wrappings  # type: ignore[attr-defined]
    wanted = {"raise_chance": 0.25, "slow_chance": 0.1, "hang_s": 3600.0, "slow_s": 2.0}
    assert (wrapping.kind, wrapping.arguments) == (FaultyEnv, wanted)
    assert Faults(FaultSettings(kill_worker_every_s=1)).put_into(factory) is factory


@pytest.mark.parametrize(("name", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_signals_go_to_workers_only(
    name: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, int]] = []

    class Process:
        def __init__(self, name: str = "python") -> None:
            self._name, self.pid = name, 1

        def children(self, recursive: bool) -> list[Any]:
            names = ("al-worker-0", "al-evaluate", "al-probe", "python", "al-worker-12")
            return [Process(child) for child in names] if recursive else []

        def name(self) -> str:
            return self._name

        def send_signal(self, number: int) -> None:
            sent.append((self._name, number))

    faults = Faults(FaultSettings.make({f"{name}_worker_every_s": 1e-9}))
    monkeypatch.setattr(psutil, "Process", Process)
    for _ in range(60):
        faults.after_update(None, {})  # type: ignore[arg-type]
    assert set(sent) == {(n, number) for n in ("al-worker-0", "al-evaluate", "al-worker-12")}


def test_a_checkpoint_is_damaged_when_it_is_its_turn(tmp_path: Path) -> None:
    faults = Faults(FaultSettings(damage_checkpoint_every=2))
    for step in (1, 2, 3):
        faults.at_save(None, checkpoint.save(tmp_path, step, {"a": {"x": 1}}))  # type: ignore[arg-type]
    folder = tmp_path / "checkpoints"
    for step in (1, 3):
        checkpoint.verify(folder / f"step_{step:012d}")
    with pytest.raises(CheckpointError):
        checkpoint.verify(folder / f"step_{2:012d}")


def test_files_are_limited_meanwhile(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write = Faults(FaultSettings(file_limit_bytes=1000)).limited(file.write_bytes)
    assert write(bytes(1000)) == 1000
    with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        write(bytes(1001))
    assert file.write_bytes(bytes(1001)) == 1001


def test_damage_has_one_name_only(tmp_path: Path) -> None:
    """A page of the replay is in several checkpoints, and in use."""
    directory = tmp_path / "step_1"
    directory.mkdir()
    (tmp_path / "page").write_bytes(b"x" * 100)
    os.link(tmp_path / "page", directory / "page")
    Faults(FaultSettings(damage_checkpoint_every=1)).at_save(None, directory)  # type: ignore[arg-type]
    assert (tmp_path / "page").read_bytes() == b"x" * 100 != (directory / "page").read_bytes()


def test_other_systems_say_what_they_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorlearner.faults.os.name", "nt")
    with pytest.raises(SettingError, match=r"faults\.kill_worker_every_s: this system can't"):
        FaultSettings(kill_worker_every_s=1)


def test_a_run_survives_chaos(tmp_path: Path) -> None:
    """Workers are killed and stopped and raise all the time; it gets to its end, and says so."""
    faults = [
        "faults=chaos",
        "faults.kill_worker_every_s=1",
        "faults.stop_worker_every_s=2",
        "faults.raise_every_env_steps=300",
        "faults.slow_every_env_steps=100",
        "faults.slow_s=0.01",
    ]
    launch = [
        f"launch.{it}" for it in ("on_env_error=restart", "max_restarts=1000", "env_timeout_s=1")
    ]
    run = [
        "workers=3",
        "total_steps=3_000",
        "trainer.checkpoint_every_env_steps=1_000",
        "run_dir=run",
    ]
    with Command([*SMALL, *run, *faults, *launch], tmp_path) as command:
        command.wait(60)
        assert command.leaves_nothing()
    assert command.code == 0, command.err
    last = [line for line in metrics(tmp_path / "run") if "workers/restarts" in line][-1]
    assert last["workers/restarts"] >= 3
    assert last["workers/rows_dropped"] >= 1
    assert "FaultyError: on purpose" in command.err


def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    """Exit code 3 tells; the log files are small enough to be written."""
    faults = ["faults.file_limit_bytes=20_000", "replay.save=true", f"run_dir={tmp_path}/run"]
    assert main([*SMALL, "workers=1", *faults]) == 3
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert metrics(tmp_path / "run")[-1]["env_steps"] >= 400
