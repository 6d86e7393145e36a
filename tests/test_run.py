"""What people type, and what they get: DESIGN.md, section 8."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from actorlearner import checkpoint, tracking
from actorlearner import metrics as sinks
from actorlearner.run import CommandSettings, _run_dir_of, compose, main
from tests.command import SMALL, Command, metrics, tree

QUICK = (*SMALL, "workers=0", "total_steps=200", "evaluation.episodes=1")
"""Settings of a run that takes a third of a second in this process."""


@pytest.fixture(autouse=True)
def in_tmp_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest"])  # multirun sets it
    caplog.set_level(logging.INFO)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Command, Path]]:
    """The default path to its end in a real process, and where it ran."""
    directory = tmp_path_factory.mktemp("finished")
    with Command([*SMALL, "workers=2"], directory) as command:
        command.wait()
        assert command.leaves_nothing()
        yield command, directory


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `QUICK` that nobody may change."""
    directory = tmp_path_factory.mktemp("original") / "run"
    assert main([*QUICK, f"run_dir={directory}"]) == 0
    return directory


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A run of one's own, which ended at 200 env steps or a little later."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def replacing(old: str, new: str) -> Callable[[str], str]:
    """A change of a text that has ``old``."""

    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


def newest(run_dir: Path) -> Path:
    return checkpoint.find(run_dir)


def env_steps(run_dir: Path) -> int:
    return checkpoint.read_manifest(newest(run_dir)).env_steps


def told(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def steps_of(run_dir: Path, name: str) -> list[int]:
    return [line["env_steps"] for line in metrics(run_dir) if name in line]


def evaluation_of(out: str) -> dict[str, float]:
    """The metrics in the last line of standard output."""
    result: dict[str, float] = json.loads(out.splitlines()[-1])
    assert all(name.startswith("evaluation/") for name in result)
    assert np.isfinite(result["evaluation/return_mean"])
    return result


def assert_equal_trees(one: Any, other: Any, where: str = "") -> None:
    """Bit-equal, of the same kinds."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_equal_trees(value, other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_equal_trees(*pair, f"{where}/{index}")
    elif isinstance(one, torch.Tensor):
        assert_equal_trees(one.numpy(), other.numpy(), where)
    elif isinstance(one, np.ndarray | np.generic):
        assert one.dtype == other.dtype, where
        assert one.shape == other.shape, where
        assert one.tobytes() == other.tobytes(), where
    else:
        assert one == other, where


def assert_equal_runs(one: Path, other: Path, *names: str) -> None:
    states, others = (checkpoint.load(newest(run_dir), names) for run_dir in (one, other))
    for state in (states, others):
        state.get("log", {}).pop("wall_s", None)
    assert_equal_trees(states, others)


# -------------------------------------------------------------------------- the default path


def test_it_trains_to_the_end_and_says_where_the_results_are(
    finished: tuple[Command, Path],
) -> None:
    command, directory = finished
    assert command.code == 0, command.err
    (run_dir,) = (directory / "runs" / "cartpole_dqn").iterdir()
    relative = run_dir.relative_to(directory)
    lines = command.err.splitlines()
    what = "Training DQN on CartPole-v1 for 400 env steps"
    assert lines[0] == f"{what}: 2 worker processes, learner on cpu."
    assert lines[1] == f"Results go to {relative}; to watch: tensorboard --logdir {relative}"
    assert lines[2] == "Ctrl-C saves and stops."
    of_what = r"evaluation return [\d.]+ ± [\d.]+ over 2 episodes\."
    assert re.fullmatch(rf"Finished after \d+ env steps, \d+ s: {of_what}", lines[-4])
    assert re.search(r": .*\w=.*\.$", lines[-3]), "a setting that would make it faster"
    assert lines[-2] == f"Results are in {relative}."
    evaluate = f"python -m actorlearner.run --eval-only ckpt={relative}"
    assert lines[-1] == f"To evaluate again: {evaluate}"
    assert "\r" not in command.err, "no terminal, no bar"
    assert command.out == ""
    assert {path.name for path in run_dir.iterdir() if "tfevents" not in path.name} == {
        "checkpoints", "config.yaml", "config_unresolved.yaml", "metrics.jsonl", "run.log",
    }  # fmt: skip
    assert any("tfevents" in path.name for path in run_dir.iterdir())
    assert {path.name for path in directory.iterdir()} == {"runs"}, "Hydra writes nothing"


def test_the_command_that_it_ends_with_works_and_writes_nothing(
    finished: tuple[Command, Path],
) -> None:
    trained, directory = finished
    line = trained.err.splitlines()[-1].partition("python -m actorlearner.run ")[2]
    before = tree(directory)
    with Command(shlex.split(line), directory) as command:
        command.wait()
        assert command.leaves_nothing()
    assert command.code == 0, command.err
    result = evaluation_of(command.out)
    (run_dir,) = (directory / "runs" / "cartpole_dqn").iterdir()
    (last,) = (m for m in metrics(run_dir) if "evaluation/return_mean" in m)
    assert result == {name: last[name] for name in result}, "the same episodes again"
    assert tree(directory) == before


def test_the_log_tells_when_the_first_env_step_was(finished: tuple[Command, Path]) -> None:
    (run_dir,) = (finished[1] / "runs" / "cartpole_dqn").iterdir()
    first = metrics(run_dir)[0]
    assert 0.1 < first["time/first_env_step_s"] < 30


def test_no_line_of_the_log_comes_twice(finished: tuple[Command, Path]) -> None:
    (run_dir,) = (finished[1] / "runs" / "cartpole_dqn").iterdir()
    steps = steps_of(run_dir, "speed/env_steps_per_s")
    assert steps == sorted(set(steps))
    assert steps[-1] == env_steps(run_dir) >= 400
    assert steps_of(run_dir, "evaluation/return_mean") == [env_steps(run_dir)]


def test_zero_workers_train_in_this_process(original: Path) -> None:
    assert env_steps(original) >= 200
    assert steps_of(original, "q/loss")


def test_a_relative_run_dir_lies_below_the_current_directory(tmp_path: Path) -> None:
    assert main([*QUICK, "run_dir=here/a run (1), lr=0.1"]) == 0
    assert env_steps(tmp_path / "here" / "a run (1), lr=0.1") >= 200


def test_the_evaluate_command_quotes_its_path(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, "run_dir=a run (1), lr=0.1"]) == 0
    command = told(caplog).rpartition("python -m actorlearner.run ")[2]
    assert main(shlex.split(command)) == 0
    evaluation_of(capsys.readouterr().out)


def test_two_runs_of_the_same_second_have_directories_of_their_own(tmp_path: Path) -> None:
    for _ in range(3):
        assert main([*QUICK, "total_steps=64"]) == 0
    assert len(list((tmp_path / "runs" / "cartpole_dqn").iterdir())) == 3


def test_two_runs_that_start_together_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Frozen(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Frozen:
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr("actorlearner.run.datetime", Frozen)
    one, other = (OmegaConf.create({"run_dir": None, "experiment": "e"}) for _ in range(2))
    command = CommandSettings()
    with _run_dir_of(one, command), _run_dir_of(other, command):  # and neither has written yet
        assert one.run_dir == "runs/e/2026-01-02_03-04-05"
        assert other.run_dir == "runs/e/2026-01-02_03-04-05_2"
    assert tree(tmp_path) == {}, "empty ones do not stay"


def test_a_run_whose_last_save_fails_says_so_in_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def save(*_: Any, **__: Any) -> Path:
        raise OSError(28, "No space left on device; 5 bytes needed")

    monkeypatch.setattr(checkpoint, "save", save)
    assert main([*QUICK, "run_dir=full"]) == 3
    assert "no checkpoint was written, training goes on: " in told(caplog)
    assert "No space left on device; 5 bytes needed" in told(caplog)


def test_so_does_a_run_whose_metrics_can_not_be_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sinks.JsonLinesSink, "write", write)
    assert main([*QUICK, "run_dir=full"]) == 3
    assert env_steps(Path("full")) >= 200
    assert told(caplog).count("metrics can't be written, training goes on: [Errno 28]") == 1


# ------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("file", ["", "checkpoints", "checkpoints/latest", "{step}",
                                  "{step}/manifest.json", "{step}/agent.safetensors"])  # fmt: skip
def test_ckpt_may_be_a_run_a_checkpoint_or_a_file_of_it(
    file: str, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = newest(original).relative_to(original)
    before = tree(original)
    path = original / file.format(step=step)
    assert main(["--eval-only", f"ckpt={path}"]) == 0
    evaluation_of(capsys.readouterr().out)
    assert tree(original) == before
    assert tree(tmp_path) == {}


def test_an_evaluation_takes_overrides_and_tells_them(
    original: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--eval-only", f"ckpt={original}", "evaluation.episodes=3"]) == 0
    assert evaluation_of(capsys.readouterr().out)["evaluation/episodes"] == 3
    assert "changed: evaluation.episodes 1 -> 3" in told(caplog)


def test_an_evaluation_writes_to_a_run_dir_that_is_given(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(original)
    assert main(["--eval-only", f"ckpt={original}", "run_dir=results/one"]) == 0
    result = evaluation_of(capsys.readouterr().out)
    assert json.loads((tmp_path / "results" / "one" / "evaluation.json").read_text()) == result
    assert set(tree(tmp_path)) == {"results", "results/one", "results/one/evaluation.json"}
    assert tree(original) == before


def test_an_evaluation_without_a_directory_makes_no_films(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(newest(run), "config_unresolved.yaml", replacing("video: false", "video: true"))
    assert main(["--eval-only", "ckpt=run"]) == 0
    assert "run_dir=None: evaluation.video=true needs" in refused(
        ["--eval-only", "ckpt=run", "evaluation.video=true"], capsys
    )
    assert compose(["eval_only=true", "ckpt=run", "run_dir=films"]).evaluation.video is True


def test_an_evaluation_calls_nobody_back_and_tracks_nothing(run: Path) -> None:
    forge(newest(run), "config_unresolved.yaml", replacing("callbacks: []", CALLBACKS))
    forge(
        newest(run), "config_unresolved.yaml", replacing("imports: []", f"imports: []\n{TRACKING}")
    )
    assert main(["--eval-only", "ckpt=run"]) == 0


# ----------------------------------------------------------------------------------- resume


def test_resume_goes_on_to_the_end(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, lines = env_steps(run), metrics(run)
    arguments = [f"resume={run}", "total_steps=400", "agent.learning_rate=1e-4"]
    assert main(arguments) == 0
    assert env_steps(run) >= 400 > before
    assert metrics(run)[: len(lines)] == lines
    resumed = [line for line in metrics(run) if line["env_steps"] > before]
    assert resumed[0]["q/learning_rate"] == 1e-4, "the command line wins over the optimizer's state"
    for name in ("speed/env_steps_per_s", "evaluation/return_mean"):
        steps = steps_of(run, name)
        assert steps == sorted(set(steps))
    assert resumed[0]["wall_s"] > lines[-1]["wall_s"]
    assert resumed[0]["updates"] > lines[-1]["updates"]
    assert "changed: total_steps 200 -> 400" in told(caplog)
    assert "changed: agent.learning_rate 0.001 -> 0.0001" in told(caplog)
    assert told(caplog).count("changed: ") == 2


def test_a_resume_keeps_its_overrides(run: Path) -> None:
    assert main([f"resume={run}", "total_steps=300"]) == 0
    assert main([f"resume={run}"]) == 0, "there is nothing left to do"
    assert 300 <= env_steps(run) < 400


def test_resume_from_an_older_checkpoint_cuts_the_log_back(run: Path) -> None:
    older = sorted((run / "checkpoints").glob("step_*"))[0]
    at = checkpoint.read_manifest(older).env_steps
    assert any(line["env_steps"] > at for line in metrics(run))
    assert main([f"resume={older}", "total_steps=300"]) == 0
    for name in ("speed/env_steps_per_s", "evaluation/return_mean"):
        steps = steps_of(run, name)
        assert steps == sorted(set(steps))
    assert steps_of(run, "evaluation/return_mean") == [env_steps(run)], "that of 200 is cut"


def test_resume_into_another_run_dir_leaves_the_old_one(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = tree(run)
    assert main(["resume=run", "run_dir=other", "total_steps=300"]) == 0
    assert env_steps(tmp_path / "other") >= 300
    assert tree(run) == before
    assert "another run directory: other" in told(caplog)


def test_auto_starts_afresh_where_there_is_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert main([*QUICK, "resume=auto"]) == 0
    assert "starting afresh" in told(caplog)
    (run_dir,) = (tmp_path / "runs" / "cartpole_dqn").iterdir()
    assert env_steps(run_dir) >= 200


def test_auto_starts_afresh_where_the_first_save_was_killed(tmp_path: Path) -> None:
    (tmp_path / "killed" / "checkpoints" / "saving.tmp").mkdir(parents=True)
    assert main([*QUICK, "total_steps=64", "resume=auto", "run_dir=killed"]) == 0
    assert env_steps(tmp_path / "killed") >= 64


def test_auto_takes_the_same_command_line_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Choices too, even if what they refer to has changed; but no other choice."""
    changing = ("agent.learning_rate", "total_steps")  # that of the experiment refers to this
    quick = [argument for argument in QUICK if not argument.startswith(changing)]
    arguments = [*quick, "experiment=cartpole_dqn", "agent=dqn", "env=gym", "resume=auto"]
    for total in (200, 300):
        assert main([*arguments, "replay=uniform", f"total_steps={total}"]) == 0
    (run_dir,) = (tmp_path / "runs" / "cartpole_dqn").iterdir()
    assert env_steps(run_dir) >= 300
    text = refused([*arguments, "replay=prioritized"], capsys)
    assert text.startswith("replay=prioritized: a checkpoint keeps its replay; single settings")


def test_auto_trusts_what_the_command_line_asks_for_anyway(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    settings = ["# @package _global_", "env: {id: 'tests.faulty:Faulty-v0'}", "trust: [tests]",
                "agent: {target: 'tests.faulty:BrokenDQN'}", "imports: [json]"]  # fmt: skip
    (folder / "own.yaml").write_text("\n".join(settings))
    arguments = [*QUICK, "--config-dir=mine", "experiment=own", "resume=auto", "run_dir=own"]
    for total in (32, 64):  # before the warm-up has ended, and so before the first update
        assert main([*arguments, f"total_steps={total}"]) == 0
        assert total <= env_steps(tmp_path / "own") < total + 32


def test_auto_goes_on_from_the_newest(tmp_path: Path, original: Path) -> None:
    runs = tmp_path / "runs" / "cartpole_dqn"
    shutil.copytree(original, runs / "z")
    assert main([*QUICK, f"run_dir={runs / 'a'}"]) == 0
    untouched = tree(runs / "z")
    assert main(["resume=auto", "total_steps=300"]) == 0
    assert env_steps(runs / "a") >= 300
    assert tree(runs / "z") == untouched
    assert {path.name for path in runs.iterdir()} == {"a", "z"}


def test_auto_looks_in_the_run_dir_that_is_given(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    again = [*QUICK, "resume=auto", "total_steps=300"]
    assert main([*again, "run_dir=new"]) == 0
    assert "starting afresh" in told(caplog)
    assert steps_of(tmp_path / "new", "speed/env_steps_per_s")[0] <= 200
    assert main([*again, "run_dir=run"]) == 0
    assert env_steps(run) >= 300
    assert "another run directory" not in told(caplog)


def test_10000_is_newer_than_9999_and_junk_is_ignored(
    run: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, good = run / "checkpoints", newest(run)
    shutil.copytree(good, folder / "step_9999")
    shutil.copytree(good, folder / "step_10000")
    (folder / "step_9999" / "manifest.json").write_text("damaged, which looking at it would tell")
    (folder / "step_abc.pt").write_text("junk")
    (folder / "step_99999999").write_text("a file")
    assert newest(run) == folder / "step_10000"
    assert main(["--eval-only", f"ckpt={run}"]) == 0
    assert "skipped" not in told(caplog)


# --------------------------------------------------------------------------------- lockstep


@pytest.mark.parametrize("workers", [0, 2])
def test_lockstep_gives_the_same_weights_twice(workers: int, tmp_path: Path) -> None:
    arguments = [*QUICK, f"workers={workers}", "lockstep=true", "envs_per_worker=2"]
    for name in ("one", "two"):
        assert main([*arguments, f"run_dir={name}"]) == 0
    assert main([*arguments, "run_dir=other", "seed=1"]) == 0
    states = ("agent", "optimizers", "progress", "replay", "log")
    assert_equal_runs(tmp_path / "one", tmp_path / "two", *states)
    with pytest.raises(AssertionError):
        assert_equal_runs(tmp_path / "one", tmp_path / "other", "agent")


def test_lockstep_gives_the_same_with_workers_in_processes_and_here(tmp_path: Path) -> None:
    for workers in (0, 1):
        assert main([*QUICK, "lockstep=true", f"workers={workers}", f"run_dir={workers}"]) == 0
    assert_equal_runs(tmp_path / "0", tmp_path / "1", "agent", "optimizers", "replay")


def test_an_interrupted_lockstep_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    half = 1_000
    arguments = [
        *SMALL, "workers=2", "envs_per_worker=2", "lockstep=true", f"total_steps={2 * half}",
        "trainer.evaluate_every_env_steps=400", "trainer.checkpoint_every_env_steps=700",
    ]  # fmt: skip
    with Command([*arguments, "run_dir=interrupted"], tmp_path) as command:
        command.wait_for_env_steps(tmp_path / "interrupted", half)
        command.signal(signal.SIGTERM)
        command.wait()
        assert command.leaves_nothing()
    assert command.code == 143, command.err
    assert half <= env_steps(tmp_path / "interrupted") < 2 * half
    assert main(["resume=interrupted"]) == 0
    assert main([*arguments, "run_dir=whole"]) == 0
    states = ("agent", "optimizers", "progress", "replay", "log")
    assert_equal_runs(tmp_path / "interrupted", tmp_path / "whole", *states)
    for name in ("speed/env_steps_per_s", "evaluation/return_mean"):
        steps, wanted = (steps_of(tmp_path / d, name) for d in ("interrupted", "whole"))
        assert steps == wanted == sorted(set(wanted))
    returns = [
        [line["evaluation/return_mean"] for line in metrics(tmp_path / d) if len(line) < 12]
        for d in ("interrupted", "whole")
    ]
    assert returns[0] == returns[1]


# ------------------------------------------------------------------- through Hydra's own main


def test_help_names_groups_settings_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert not caught.value.code
    out = capsys.readouterr().out
    for what in ("replay: prioritized, uniform", "agent: dqn", "experiment: cartpole_dqn",
                 "total_steps: ", "learning_rate", "python -m actorlearner.run workers=8",
                 "resume=RUN_DIR", "--eval-only ckpt=RUN_DIR"):  # fmt: skip
        assert what in out


def test_cfg_prints_the_settings_and_runs_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["workers=3", "--cfg", "job", "replay=uniform"]) == 0
    out = capsys.readouterr().out
    assert "workers: 3" in out
    assert "prioritized: false" in out
    assert tree(tmp_path) == {}


def test_multirun_runs_every_job(tmp_path: Path) -> None:
    assert main([*QUICK, "total_steps=64", "-m", "seed=0,1"]) == 0
    run_dirs = list((tmp_path / "runs" / "cartpole_dqn").iterdir())
    assert len(run_dirs) == 2
    assert {checkpoint.find(d).exists() for d in run_dirs} == {True}
    texts = ["\n".join((d / "config.yaml").read_text().splitlines()) for d in run_dirs]
    assert sorted(re.findall(r"^seed: (\d)", "\n".join(texts), re.MULTILINE)) == ["0", "1"]


def test_runs_of_a_multirun_have_the_directory_that_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = "run_dir=my runs/seed_${seed}"
    settings = [*QUICK, "total_steps=64", "hydra.job.chdir=true"]
    assert main(["-m", *settings, "seed=0,1", where]) == 0
    assert sorted(path.name for path in (tmp_path / "my runs").iterdir()) == ["seed_0", "seed_1"]
    assert re.search(r"^Run 1: .*seed=1 ", told(caplog), re.MULTILINE)


def test_a_job_that_fails_shows_in_the_exit_code_while_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = "env.id=Bad-v0,CartPole-v1,tests.faulty:Missing-v0"
    assert main(["-m", *QUICK, "total_steps=64", ids]) == 2
    (run_dir,) = (tmp_path / "runs" / "cartpole_dqn").iterdir()
    assert env_steps(run_dir) >= 64
    err = capsys.readouterr().err
    assert "error: env.id=Bad-v0: " in err
    assert "error: env.id=tests.faulty:Missing-v0: " in err


def test_multirun_evaluates_checkpoints_with_their_own_settings(
    original: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(run)
    assert main(["--eval-only", "-m", f"ckpt={original},run"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(lines) == 2
    assert evaluation_of(lines[0]) == evaluation_of(lines[1])
    assert tree(run) == before


def test_multirun_resumes(run: Path) -> None:
    assert main(["-m", "resume=run", "total_steps=300"]) == 0
    assert env_steps(run) >= 300


def test_config_dir_brings_an_experiment_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    settings = ["# @package _global_", "experiment: own", "total_steps: 64", "workers: 0",
                "evaluation: {episodes: 1, step_limit: 20}"]  # fmt: skip
    (folder / "own.yaml").write_text("\n".join(settings))
    for flag in (["--config-dir", "mine"], ["--config-dir=mine"]):
        assert main([*flag, "experiment=own", "seed=3"]) == 0
    assert main(["-m", "--config-dir", "mine", "experiment=own", "seed=3,4"]) == 0
    run_dirs = list((tmp_path / "runs" / "own").iterdir())
    assert len(run_dirs) == 4
    assert all(64 <= env_steps(d) < 100 for d in run_dirs)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ("bogus=1", "bogus: there is no such setting"),
        ("replay=foo", "replay=foo: there is no such"),
    ],
)
def test_a_typo_beside_a_choice_of_ones_own(
    extra: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "own.yaml").write_text("# @package _global_\nexperiment: own\n")
    assert text in refused(["--config-dir=mine", "experiment=own", extra], capsys)


@pytest.mark.parametrize("agent", ["dqn", "rainbow", "dreamer"])
def test_an_agent_brings_its_experiment_unless_one_is_named(agent: str) -> None:
    assert compose([f"agent={agent}"]) == compose([f"experiment=cartpole_{agent}"])
    assert compose([f"agent={agent}", "env=minatar"]).env.id == "MinAtar/Breakout-v0"
    assert "experiment" not in compose([f"agent={agent}", "experiment=null"])


def test_null_is_no_choice_of_a_group_that_needs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose(["tracking=null", "experiment=null", "seed=3"])
    assert (config.get("tracking"), config.get("experiment"), config.seed) == (None, None, 3)
    for null in ("tracking=null", "experiment=null"):
        assert refused([null, "bogus=1"], capsys).startswith("bogus: there is no such setting")
    assert main(["-m", *QUICK, "total_steps=64", "tracking=null", "experiment=null"]) == 0
    assert len(list((tmp_path / "runs" / "unnamed").iterdir())) == 1


# --------------------------------------------------------------------------------- bad input


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that tells why ``arguments`` are refused; nothing may have been written."""
    before = tree(Path.cwd())
    capsys.readouterr()
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    assert "Traceback" not in err
    assert tree(Path.cwd()) == before
    return err.removeprefix("error: ").rstrip()


BAD_SETTINGS = {
    # Unknown things, told with what there is.
    "total_step=5": "total_step: there is no such setting; did you mean total_steps?",
    "agnet.gamma=1": "did you mean agent.gamma?",
    "agent.foo=1": "agent.foo: there is no such setting; there are: agent.adam_epsilon, ",
    "+unknown=1": "unknown: there is no such setting; there are: acting, agent, ",
    "++unknown=1": "unknown: there is no such setting",
    "+agent.foo=1": "agent.foo: there is no such setting; there are: agent.adam_epsilon, ",
    "trainer.keep=1": "did you mean trainer.keep_last?",
    "agent=foo": "agent=foo: there is no such choice; there are: dqn",
    "replay=none": "replay=none: there is no such choice; there are: prioritized, uniform",
    "experiment=foo": "experiment=foo: there is no such choice; there are: atari100k_dreamer, ",
    "agent=null": "agent=None: the name of a choice is needed",
    "trainer=5": "trainer=5: the name of a choice is needed",
    "tracking.project=x": "tracking.project: has no meaning without a choice of tracking, which",
    "tracking=foo": "tracking=foo: there is no such choice; there are: mlflow, wandb",
    "trainer.callbacks=[{target: os:environ}]": "trainer.callbacks[0]: target='os:environ': os is",
    "trainer.callbacks=x": "trainer.callbacks='x': a list is needed",
    "--foo": "--foo: there is no such option",
    "--workers=3": "--workers=3: there is no such option; settings read key=value",
    "--config-dir=nowhere": "--config-dir nowhere: there is no such directory",
    "--config-dir": "--config-dir : there is no such directory",
    # Malformed.
    "a=[1,": "a=[1,: ",
    "total_steps": "total_steps: missing EQUAL",
    "=5": "there is no such setting",
    "~seed": "~seed: a setting can't be deleted",
    "seed=1,2": "Ambiguous value for argument 'seed=1,2'",
    "seed=${nowhere}": "Interpolation key 'nowhere' not found",
    # Of a wrong type.
    "total_steps=abc": "total_steps='abc': an integer is needed",
    "total_steps=1.5": "total_steps=1.5: an integer is needed",
    "total_steps=": "total_steps='': an integer is needed",
    "seed=null": "seed=None: an integer is needed",
    "agent.batch_size=2.5": "agent.batch_size=2.5: an integer is needed",
    "agent.hidden=5": "agent.hidden=5: a list is needed",
    "agent.hidden=[a]": "agent.hidden='a': an integer is needed",
    "lockstep=1": "lockstep=1: true or false is needed",
    "eval_only=5": "eval_only=5: true or false is needed",
    "imports=os": "imports='os': a list is needed",
    "trust=os": "trust='os': a list is needed",
    "env.id=5": "env.id=5: a text is needed",
    "env.kwargs=5": "env.kwargs=5: a mapping is needed",
    # Out of bounds.
    "workers=-1": "workers=-1: must be at least 0",
    "envs_per_worker=0": "envs_per_worker=0: must be at least 1",
    "unroll_length=0": "unroll_length=0: must be at least 1",
    "total_steps=-5": "total_steps=-5: must be at least 0",
    "samples_per_insert=0": "samples_per_insert=0.0: must be greater than 0",
    "agent.learning_rate=0": "agent.learning_rate=0.0: must be greater than 0",
    "agent.learning_rate=nan": "agent.learning_rate=nan: must be at least 0",
    "agent.gamma=1.5": "agent.gamma=1.5: must be at least 0 and at most 1",
    "agent.epsilon=[[10,1],[5,0.1]]": "each x must be greater than the one before",
    "agent.epsilon=[[0,2]]": "a probability is at most 1",
    "agent.epsilon=[]": "agent.epsilon=()",
    "replay.capacity=3": "replay.capacity=3: must be at least 32",
    "replay.beta_start=2": "replay.beta_start=2.0: must be at least 0 and at most 1",
    "evaluation.episodes=0": "evaluation.episodes=0: must be at least 1",
    "trainer.console=loud": "must be one of auto, bar, plain, off",
    "device=gpu": "device=gpu: not to be had here",
    # What can't be had.
    "env.id=Foo-v0": "env.id=Foo-v0: Environment `Foo` doesn't exist.; module:Id imports",
    "env.id=nowhere:Foo-v0": "env.id=nowhere: can't be imported: No module named 'nowhere'",
    "imports=[nowhere]": "imports=nowhere: can't be imported: No module named 'nowhere'",
    "env.id=Pendulum-v1": "DQN needs a Discrete, MultiDiscrete or MultiBinary action space; Pe",
    "env.id=tests.faulty:Texts-v0": "tests.faulty:Texts-v0: words is Text(1, 10",
    "env.wrappers=[3]": "env.wrappers=3: a text is needed, or a mapping is needed",
    "env.wrappers=[os:system]": "env.wrappers[0]: target='os:system': os is not trusted",
    "env.wrappers=[gymnasium.wrappers:TimeLimit]": "missing a required argument: 'max_epis",
    # Targets.
    "agent.target=os:system": "os is not trusted; add trust=[os] if you trust it",
    "replay.target=random:Random": "random is not trusted",
    "env.target=subprocess:Popen": "subprocess is not trusted",
    "agent.target=null": "agent.target=None: must read package.module:Name",
    "agent.target=foo": "must read package.module:Name",
    "agent.target=actorlearner.nowhere:A": "No module named 'actorlearner.nowhere'",
    "agent.target=actorlearner.agents.dqn:A": "has no attribute 'A'",
    "agent.target=actorlearner.config:resolve": "must be a class with training_steps()",
    "agent.target=actorlearner.replay:ReplayBuffer": "must be a class with training_steps()",
    "replay.target=actorlearner.agents.dqn:DQN": "must be a class with sample()",
    "env.target=actorlearner.agents.dqn:DQN": "must be a class with factory()",
    # Checkpoints.
    "resume=nowhere": "/nowhere: there is no such file or directory",
    "--eval-only": "ckpt=null: --eval-only needs ckpt=RUN_DIR_or_FILE",
}  # fmt: skip


@pytest.mark.parametrize("argument", BAD_SETTINGS)
def test_bad_input_is_told_in_one_line(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert BAD_SETTINGS[argument] in refused([*QUICK, argument], capsys)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("launch.start_method=fork", "launch.start_method='fork': must be one of auto, forkserver"),
        ("launch.slots=abc", "launch.slots='abc': an integer is needed"),
        ("launch.slots=null", "launch.slots=None: an integer is needed"),
        ("launch.slots=0", "launch.slots=0: must be at least 1"),
        ("launch.target=os:system", "os is not trusted"),
    ],
)
def test_bad_input_to_the_launcher(
    argument: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in refused([*QUICK, "workers=1", argument], capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has what must be missing")
def test_a_missing_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert "device=cuda: not to be had here" in refused([*QUICK, "device=cuda"], capsys)


def test_the_error_of_a_real_command_is_one_line(tmp_path: Path) -> None:
    with Command(["agent.gamma=1.5"], tmp_path) as command:
        command.wait()
        assert command.leaves_nothing()
    assert command.code == 2
    assert command.err == "error: agent.gamma=1.5: must be at least 0 and at most 1\n"
    assert command.out == ""
    assert tree(tmp_path) == {}


def test_a_run_dir_that_has_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused([*QUICK, "run_dir=run"], capsys)
    assert "run_dir=run: holds the checkpoints of another run; go on from them with" in text


def test_a_run_dir_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert "run_dir=file: " in refused([*QUICK, "run_dir=file"], capsys)


def test_a_default_run_dir_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").touch()
    assert re.match(r"run_dir=runs/cartpole_dqn/[\d_-]+: Not a dir", refused([*QUICK], capsys))


def test_ckpt_without_eval_only(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused([*QUICK, "ckpt=run"], capsys)
    assert text.endswith("/run/" + str(newest(run).relative_to(run)) + ": goes with --eval-only; "
                         "to train on, resume=...")  # fmt: skip


def test_resume_with_eval_only(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--eval-only needs ckpt" in refused(["--eval-only", "resume=run"], capsys)


@pytest.mark.parametrize("flags", [["--eval-only", "ckpt={}"], ["resume={}"]])
def test_what_is_no_checkpoint(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file.txt").write_text("")

    def text(path: str) -> str:
        return refused([flag.format(path) for flag in flags], capsys)

    assert text("empty") == f"{tmp_path}/empty: an empty directory"
    assert text("other") == f"{tmp_path}/other: neither a checkpoint nor a run that has one"
    assert text("other/file.txt") == f"{tmp_path}/other/file.txt: not a file of a checkpoint"
    assert text("missing") == f"{tmp_path}/missing: there is no such file or directory"


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("agent=dqn", "agent=dqn: a checkpoint keeps its agent; single settings can be changed"),
        ("experiment=cartpole_dqn", "a checkpoint keeps its experiment"),
        ("agent.foo=1", "agent.foo: there is no such setting; there are: agent.adam_epsilon"),
        ("+agent.foo=1", "agent.foo: there is no such setting"),
        ("agent.gamma=2", "agent.gamma=2.0: must be at least 0 and at most 1"),
        ("agent.hidden=[17]", "other agent settings"),
        ("env.id=Acrobot-v1", "was trained on CartPole-v1, whose name is CartPole-v1; that of"),
        ("env.id=CartPole-v0", "was trained on CartPole-v1, whose name is CartPole-v1; that of"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")  # of CartPole-v0
def test_what_a_resume_refuses(
    override: str, text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in refused(["resume=run", "total_steps=300", override], capsys)


@pytest.mark.parametrize(
    ("settings", "starts"),
    [
        (["workers=1"], True),
        (["workers=1", "launch.start_method=forkserver"], True),
        (["workers=1", "launch.start_method=spawn"], False),
        (["workers=0"], False),
    ],
)
def test_the_fork_server_starts_early_where_it_is_needed(
    settings: list[str], starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []
    monkeypatch.setattr("actorlearner.run.start_processes", lambda: started.append(True))
    assert main([*QUICK, *settings, "env.id=Foo-v0"]) == 2
    assert started == [True] * starts


# ------------------------------------------------------------------ checkpoints of strangers


def forge(directory: Path, name: str, change: Callable[[str], str]) -> None:
    """Change a file of a checkpoint, and all checksums with it."""
    path = directory / name
    text = change(path.read_text())
    path.write_text(text)
    manifest = json.loads((directory / "manifest.json").read_text())
    if name != "manifest.json":
        digest = hashlib.sha256(text.encode()).hexdigest()
        manifest["files"][name] = {"size_bytes": len(text.encode()), "sha256": digest}
    content = json.dumps(manifest)
    (directory / "manifest.json").write_text(content)
    digest = hashlib.sha256(content.encode()).hexdigest()
    (directory / "manifest.sha256").write_text(f"{digest}  manifest.json\n")


@pytest.mark.parametrize("flags", [["--eval-only", "ckpt=run"], ["resume=run"]])
def test_a_checkpoint_of_another_agent(
    flags: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(newest(run), "manifest.json", lambda text: text.replace("dqn:DQN", "other:Other"))
    text = refused(flags, capsys)
    assert "holds actorlearner.agents.other:Other, not actorlearner.agents.dqn:DQN" in text


@pytest.mark.parametrize("flags", [["--eval-only", "ckpt=run"], ["resume=run"]])
@pytest.mark.parametrize(
    ("target", "more", "text"),
    [
        ("os:system", "", "os is not trusted"),
        ("tests.faulty:BrokenDQN", "", "tests is not trusted"),
        ("tests.faulty:BrokenDQN", "trust: [tests]\n", "tests is not trusted"),
        ("actorlearner.launch._child:run_child", "", "must be a class with training_steps()"),
    ],
)
def test_a_checkpoint_names_no_code_but_this_package_s(
    target: str,
    more: str,
    text: str,
    flags: list[str],
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def change(yaml: str) -> str:
        yaml = yaml.replace("target: actorlearner.agents.dqn:DQN", f"target: {target}")
        return yaml.replace("trust: []\n", more) if more else yaml

    forge(newest(run), "config_unresolved.yaml", change)
    assert text in refused(flags, capsys)


def test_who_runs_a_checkpoint_says_whom_to_trust(run: Path) -> None:
    def change(text: str) -> str:
        return text.replace("actorlearner.agents.dqn:DQN", "tests.faulty:BrokenDQN")

    for name in ("config_unresolved.yaml", "manifest.json"):
        forge(newest(run), name, change)
    assert main(["--eval-only", "ckpt=run", "trust=[tests]"]) == 0


def test_wrappers_train_resume_and_evaluate() -> None:
    stack = "{target: gymnasium.wrappers:FrameStackObservation, stack_size: 2}"
    wrappers = f"env.wrappers=[gymnasium.wrappers:TimeAwareObservation, {stack}]"
    assert main([*QUICK, wrappers, "run_dir=run"]) == 0
    manifest = json.loads((newest(Path("run")) / "manifest.json").read_text())
    assert manifest["info"]["env"]["observation"]["observation"]["shape"] == [2, 5]
    assert main(["resume=run", "total_steps=220"]) == 0
    assert main(["--eval-only", "ckpt=run"]) == 0


@pytest.mark.parametrize("flags", [["--eval-only", "ckpt=run"], ["resume=run"]])
def test_a_checkpoint_wraps_environments_in_nothing_that_is_not_trusted(
    flags: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(text: str) -> str:
        return text.replace("wrappers: []", "wrappers: [evil:Wrapper]")

    forge(newest(run), "config_unresolved.yaml", change)
    assert "env.wrappers[0]: target='evil:Wrapper': evil is not trusted" in refused(flags, capsys)


CALLBACKS = "callbacks: [{target: 'evil:Callback'}]"
TRACKING = "tracking: {target: 'actorlearner.tracking:MlflowTracker', uri: 'https://evil.example'}"


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trackers that talk to nobody; what they were started with."""
    started: list[str] = []

    def start(tracker: Any, config: Any, run_dir: Path | None, run_id: str | None) -> str:
        started.append(tracker.settings.uri if "uri" in vars(tracker.settings) else "wandb")
        return "id"

    for kind in (tracking.MlflowTracker, tracking.WandbTracker):
        monkeypatch.setattr(kind, "start", start)
        monkeypatch.setattr(kind, "write", lambda *_: None)
    monkeypatch.setattr(tracking, "optional_library", lambda *_: None)
    return started


@pytest.mark.parametrize(
    ("target", "package"),
    [
        ("actorlearner.tracking:MlflowTracker", "mlflow"),
        ("actorlearner.tracking:WandbTracker", "wandb"),
        ("actorlearner.elsewhere:Tracker", "Tracker"),
        ("evil.deep:MlflowTracker", "evil"),
    ],
)
@pytest.mark.parametrize("flags", [["resume=run"], ["resume=auto", "run_dir=run"]])
def test_a_checkpoint_sends_nothing_where_it_says(
    flags: list[str],
    target: str,
    package: str,
    run: Path,
    services: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = TRACKING.replace("actorlearner.tracking:MlflowTracker", target)
    forge(newest(run), "config_unresolved.yaml", replacing("imports: []", f"imports: []\n{text}"))
    assert refused(flags, capsys).startswith(
        f"tracking={package}: the checkpoint asks to send the run's settings and metrics to "
        f"where it says; add trust=[{package}] if you trust it"
    )
    assert services == []


@pytest.mark.parametrize("flags", [["resume=run"], ["resume=auto", "run_dir=run"]])
def test_a_tracker_may_be_trusted_added_and_dropped_on_resume(
    flags: list[str], run: Path, services: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "total_steps=204", "tracking=wandb"]) == 0
    assert services == ["wandb"]
    assert refused([*flags, "total_steps=208"], capsys).startswith("tracking=wandb: ")
    assert main([*flags, "total_steps=208", "trust=[wandb]"]) == 0
    assert services == ["wandb"] * 2
    uri = "tracking.uri=http://mine"
    assert main([*flags, "total_steps=212", uri, "tracking=mlflow"]) == 0
    assert services[2:] == ["http://mine"]
    assert main([*flags, "total_steps=216", "tracking=null"]) == 0
    assert main([*flags, "total_steps=220"]) == 0
    assert len(services) == 3
    assert "tracking=foo: there is no such choice; there are: mlflow, wandb" in refused(
        [*flags, "tracking=foo"], capsys
    )


def test_what_a_run_ends_with_trusts_its_tracker_where_that_is_needed(
    services: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("actorlearner.trainer.Trainer._tell_end", interrupted)
        assert main([*QUICK, "tracking=mlflow", "run_dir=run"]) == 130
    said = caplog.messages[-1].partition("actorlearner.run ")[2]
    assert said == "resume=run 'trust=[mlflow]'"
    assert main([*QUICK, "tracking=mlflow", "run_dir=other"]) == 0
    assert caplog.messages[-1].endswith("--eval-only ckpt=other")


@pytest.mark.parametrize(
    "text",
    ["${oc.env:SECRET}", "x${ oc.env:SECRET }", "${oc.${device}:SECRET}", "${oc.create:[1]}"],
)
@pytest.mark.parametrize(
    ("flags", "where"),
    [
        (["--eval-only", "ckpt=run"], "experiment: cartpole_dqn"),
        (["resume=run"], "start_method: auto"),
    ],
)
def test_a_checkpoint_reads_nothing_of_this_machine(
    flags: list[str],
    where: str,
    text: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SECRET", "the secret")
    key, _, value = where.partition(": ")
    name = "launch." * (key == "start_method") + key
    forge(newest(run), "config_unresolved.yaml", replacing(where, f"{key}: '{text}'"))
    told = refused(flags, capsys)
    assert told.startswith(f"{name}={text}: a checkpoint may refer to its own settings only")
    assert "the secret" not in told
    if name != "experiment":
        assert compose(
            [a.replace("--eval-only", "eval_only=true") for a in [*flags, f"{name}={value}"]]
        )


def test_a_command_line_may_read_this_machine_and_so_may_auto_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GAME", "CartPole-v1")
    arguments = [*QUICK, "total_steps=64", "env.id=${oc.env:GAME}", "resume=auto", "run_dir=run"]
    for _ in range(2):
        assert main(arguments) == 0


STRANGE = {
    "imports: []": "imports: [actorlearner, evil.deep]",
    "id: CartPole-v1": "id: evil.deep:Evil-v0",
}


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module ``evil.deep`` that registers ``Evil-v0``."""
    cart_pole = "gymnasium.envs.classic_control:CartPoleEnv"
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "deep.py").write_text(
        f"import gymnasium\ngymnasium.register('Evil-v0', {cart_pole!r}, max_episode_steps=9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("evil", "evil.deep"):
        sys.modules.pop(name, None)
    gymnasium.registry.pop("Evil-v0", None)


@pytest.mark.usefixtures("evil")
@pytest.mark.parametrize(
    "flags", [["--eval-only", "ckpt=run"], ["resume=run"], ["resume=auto", "run_dir=run"]]
)
@pytest.mark.parametrize("harmless", STRANGE)
def test_a_checkpoint_imports_nothing_that_is_not_trusted(
    harmless: str, flags: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(text: str) -> str:
        return text.replace(harmless, STRANGE[harmless]).replace("trust: []", "trust: [evil]")

    forge(newest(run), "config_unresolved.yaml", change)
    text = refused(flags, capsys)
    assert "=evil.deep: the checkpoint asks to import evil; add trust=[evil] if you trust" in text
    assert "evil" not in sys.modules


@pytest.mark.usefixtures("evil")
@pytest.mark.parametrize("harmless", STRANGE)
def test_who_runs_a_checkpoint_may_trust_what_it_imports(harmless: str, run: Path) -> None:
    def change(text: str) -> str:
        return text.replace(harmless, STRANGE[harmless])

    forge(newest(run), "config_unresolved.yaml", change)
    assert main(["--eval-only", "ckpt=run", "trust=[evil]"]) == 0
    assert "evil.deep" in sys.modules


@pytest.mark.usefixtures("evil")
def test_the_command_that_evaluates_again_trusts_what_the_run_imports(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert main([*QUICK, "env.id=evil.deep:Evil-v0", "run_dir=run"]) == 0
    said = caplog.messages[-1].partition("actorlearner.run ")[2]
    assert said == "--eval-only ckpt=run 'trust=[evil]'"
    assert main(shlex.split(said)) == 0


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_threads_of_torch_spin_briefly_unless_told(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP", "OMP"))} | given
    monkeypatch.setattr(os, "environ", environment)
    assert main(["workers=-1"]) == 2
    wanted = None if "OMP_WAIT_POLICY" in given else given.get("GOMP_SPINCOUNT", "10000")
    assert environment.get("GOMP_SPINCOUNT") == wanted
