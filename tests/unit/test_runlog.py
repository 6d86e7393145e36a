"""What a run tells people and files."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from actorlearner import runlog
from actorlearner.contracts import Episode, EvaluationResult, Report, Unroll
from actorlearner.cores import CoreSeconds
from actorlearner.metrics import JsonLinesSink
from actorlearner.runlog import RunLog, parameters_in_words, process_started_at
from actorlearner.verdict import Layout
from tests.scripted import ScriptedWorker


class Recorder:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, step: int, metrics: Any) -> None:
        self.lines.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


def open_log(run_dir: Path | None = None, resumes_at: Any = None, **arguments: Any) -> Any:
    recorder = Recorder()
    log = RunLog(run_dir, sinks=[recorder], **arguments)
    log.open(1_000, "off", {"config.yaml": "seed: 1\n"}, resumes_at)
    return log, recorder


def unroll_of(version: int = 0, **changes: Any) -> Unroll:
    unroll = ScriptedWorker([0, 1], 8, max_episode_length=3).unroll()
    unroll.version = version
    for name, value in changes.items():
        setattr(unroll, name, value)
    return unroll


class TestTrainingLines:
    def test_speeds_lag_episodes_and_shares(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = [50.0]
        monkeypatch.setattr(runlog.time, "perf_counter", lambda: clock[0])
        log, recorder = open_log()
        first, second = unroll_of(version=3), unroll_of(version=9)
        second.valid[0] = False  # so that it weighs less
        first.seconds = {"env": 3.0, "policy": 1.0}
        second.seconds = {"env": 1.0, "policy": 0.0, "slots": 4.0, "limiter": 1.0}
        first.episodes = [Episode(0, 1, 2.0, 10), Episode(1, 1, 4.0, 20)]
        second.lives = [Episode(0, 1, 1.0, 6), Episode(1, 1, 2.0, 7), Episode(1, 2, 3.0, 8)]
        for unroll in (first, second):
            log.note(unroll, updates=10)
        log.means.add("q", {"loss": 1.0})
        log.means.add("q", {"loss": 2.0})
        clock[0] += 4.0
        log.write_training(100, 20, {"replay/size": 7.0})
        ((step, line),) = recorder.lines
        assert step == 100
        rows = first.env_steps, second.env_steps
        assert rows[0] != rows[1]
        assert line["speed/env_steps_per_s"] == 25.0
        assert line["speed/updates_per_s"] == 5.0
        assert line["policy/lag_mean"] == pytest.approx((7 * rows[0] + 1 * rows[1]) / sum(rows))
        assert line["policy/lag_max"] == 7.0
        assert line["q/loss"] == 1.5
        assert line["replay/size"] == 7.0
        assert line["train/episodes"] == 2.0
        assert line["train/return_mean"] == 3.0
        assert line["train/length_mean"] == 15.0
        assert line["train/life_return_mean"] == 2.0
        assert line["train/life_length_mean"] == 7.0
        shares = [line[f"worker/{name}"] for name in ("env", "policy", "slots", "limiter")]
        assert shares == [0.4, 0.1, 0.4, 0.1]
        assert all(type(value) is float for value in line.values())

    def test_each_period_starts_anew_except_for_the_episodes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = [50.0]
        monkeypatch.setattr(runlog.time, "perf_counter", lambda: clock[0])
        log, recorder = open_log()
        unroll = unroll_of(version=0)
        unroll.seconds, unroll.episodes = {"env": 1.0}, [Episode(0, 1, 2.0, 10)]
        log.note(unroll, updates=50)
        clock[0] += 1.0
        log.write_training(10, 5, {})
        clock[0] += 2.0
        log.write_training(40, 15, {})
        line = recorder.lines[1][1]
        assert line["speed/env_steps_per_s"] == 15.0
        assert line["speed/updates_per_s"] == 5.0
        assert not {"policy/lag_mean", "policy/lag_max", "worker/env"} & line.keys()
        assert not {"train/life_return_mean", "train/life_length_mean"} & line.keys()
        assert line["train/return_mean"] == 2.0

    def test_the_start_is_nobodys_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """While workers start the learner waits, which tells nothing of the run."""
        clock = [50.0]
        monkeypatch.setattr(runlog.time, "perf_counter", lambda: clock[0])
        log, recorder = open_log()
        with log.split("gather"):
            clock[0] += 9.0
            log.note(unroll_of(seconds={"env": 2.0}), 0)
            clock[0] += 1.0
            log.note(unroll_of(seconds={"policy": 6.0}), 0)
        with log.split("add"):
            clock[0] += 3.0
        log.write_training(10, 0, {})
        line = recorder.lines[0][1]
        assert (line["time/gather"], line["time/add"]) == (0.25, 0.75)
        assert (line["worker/env"], line["worker/policy"]) == (0.25, 0.75)

    def test_what_comes_before_the_first_update_is_no_part_of_the_verdict(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor of the shares of the line in which it comes."""
        clock = [50.0]
        monkeypatch.setattr(runlog.time, "perf_counter", lambda: clock[0])
        log, recorder = open_log(layout=Layout(workers=1, cores=4))

        def spend(part: str, updates: int) -> None:
            with log.split(part):
                clock[0] += 5.0
            waits = 4.0 if updates else 0.0
            log.note(unroll_of(seconds={"env": 5.0 - waits, "limiter": waits}), updates)

        for _ in range(4):
            spend("gather", 0)
        log.write_training(10, 0, {})
        assert log.verdict is not None
        assert log.verdict.part == "env", "of a run that does not learn, it is all there is"
        spend("gather", 0)
        spend("sample", 1)
        spend("update", 2)
        log.write_training(20, 2, {})
        assert log.verdict.part == "update"
        assert recorder.lines[1][1]["time/update"] == 1.0

    def test_how_busy_cores_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runlog.CoreMeter, "flush", lambda _: CoreSeconds(1.5, 2.0))
        log, recorder = open_log()
        log.write_training(10, 0, {})
        monkeypatch.setattr(runlog.CoreMeter, "flush", lambda _: CoreSeconds(0.0, 0.0))
        log.write_training(20, 0, {})  # so soon that the system has not counted on
        assert recorder.lines[0][1]["speed/cores_busy"] == 0.75
        assert "speed/cores_busy" not in recorder.lines[1][1]

    def test_what_it_waits_for_in_a_line_and_over_all(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        clock = [50.0]
        monkeypatch.setattr(runlog.time, "perf_counter", lambda: clock[0])
        log = RunLog(None, layout=Layout(workers=2, cores=4))
        log.open(30, "plain", {}, None)
        assert log.verdict is None
        for step, part, seconds, waits in [
            (10, "update", 3.0, {"slots": 4.0, "env": 1.0}),
            (20, "gather", 9.0, {"slots": 0.0, "env": 4.0}),
            (30, "update", 1.0, {"slots": 4.0, "env": 1.0}),
        ]:
            log.note(unroll_of(seconds=waits, episodes=[]), 0)
            with log.split(part):
                clock[0] += seconds
            log.write_training(step, step // 10, {})
        log.write_evaluation(EvaluationResult((1.0,), (5,), 0, version=3, env_steps=30))
        words = [line.partition("waits for ")[2] for line in capsys.readouterr().err.splitlines()]
        assert [word.partition(",")[0] for word in words] == ["update", "env", "update", ""]
        assert log.verdict is not None
        assert log.verdict.part == "slots", "over all it is another"

    def test_before_the_first_episode_nothing_is_made_up(self) -> None:
        log, recorder = open_log()
        log.write_training(10, 0, {})
        assert "train/return_mean" not in recorder.lines[0][1]
        assert all(math.isfinite(value) for value in recorder.lines[0][1].values())

    def test_numbers_of_info_are_means_over_the_episodes_that_had_them(self) -> None:
        """The last 100 of these; a name that is a metric already keeps its meaning."""
        log, recorder = open_log()
        unroll = unroll_of()
        unroll.episodes = [
            Episode(0, 1, 2.0, 10, (("success", 1.0), ("episodes", 77.0))),
            Episode(0, 2, 2.0, 10),
            Episode(0, 3, 2.0, 10, (("success", 0.0),)),
        ]
        log.note(unroll, 0)
        log.write_training(10, 0, {})
        line = recorder.lines[0][1]
        assert (line["train/success"], line["train/episodes"]) == (0.5, 3.0)
        resumed, recorder = open_log()
        resumed.load_state_dict(log.state_dict())
        unroll.episodes = [Episode(0, 1, 2.0, 10, (("success", 1.0),))] * 99
        resumed.note(unroll, 0)
        resumed.write_training(20, 0, {})
        assert recorder.lines[0][1]["train/success"] == 0.99

    def test_one_line_per_step(self) -> None:
        log, recorder = open_log()
        for step in (10, 10, 5, 20):
            log.write_training(step, 0, {})
        assert [step for step, _ in recorder.lines] == [10, 20]

    def test_the_first_env_step_since_the_process_started(self) -> None:
        log, recorder = open_log()
        started = process_started_at()
        for sequence, at in ((0, 7.0), (0, 5.0), (1, 3.0)):
            log.note(unroll_of(sequence=sequence, started_at=started + at), 0)
        log.write_training(10, 0, {})
        assert recorder.lines[0][1]["time/first_env_step_s"] == pytest.approx(5.0, abs=0.05)


class TestEvaluationLines:
    def test_at_the_step_of_the_snapshot_and_once(self) -> None:
        log, recorder = open_log()
        result = EvaluationResult((1.0, 3.0), (5, 7), 0, version=2, env_steps=300)
        metrics = log.write_evaluation(result)
        assert metrics["evaluation/return_mean"] == 2.0
        assert log.write_evaluation(result) == metrics
        assert [(step, line) for step, line in recorder.lines] == [(300, metrics)]


class TestReports:
    def test_a_line_and_films_once(self, tmp_path: Path) -> None:
        log, recorder = open_log(tmp_path)
        pictures = np.zeros((3, 4, 5, 3), np.uint8) + np.uint8([0, 9, 99]).reshape(3, 1, 1, 1)
        report = Report({"world/error": 2.0}, {"world/open_loop_a/b": pictures})
        for env_steps in (300, 300, 200):
            log.write_report(env_steps, 7, report)
        log.close()
        assert recorder.lines == [(300, {"world/error": 2.0})]
        (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line)["updates"] == 7
        (film,) = (tmp_path / "videos").iterdir()
        assert film.name == "step_000000000300_open_loop_a_b.gif"
        with Image.open(film) as image:
            assert image.n_frames == 3
        board = EventAccumulator(str(tmp_path)).Reload()
        (shown,) = board.Images("world/open_loop_a/b")
        assert (shown.step, shown.encoded_image_string) == (300, film.read_bytes())

    def test_no_film_is_made_for_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log, recorder = open_log()
        monkeypatch.setattr(runlog, "Film", None)
        log.write_report(0, 0, Report({"world/error": 2.0}, {"world/a": np.zeros((1, 1, 1, 3))}))
        assert recorder.lines == [(0, {"world/error": 2.0})]


def test_parameters_in_words() -> None:
    """Those that are learned, by the parts that have some."""
    model = torch.nn.Module()
    model.online, model.target = torch.nn.Linear(999, 2), torch.nn.Linear(999, 2)
    model.head, model.nothing = torch.nn.Linear(2, 3, bias=False), torch.nn.ReLU()
    model.target.requires_grad_(False)
    assert parameters_in_words(model) == "2,006 parameters: online 2,000, head 6"
    assert parameters_in_words(torch.nn.ReLU()) == "0 parameters"
    assert parameters_in_words("somebody's own") == ""


class TestFiles:
    def test_texts_lines_and_log(self, tmp_path: Path) -> None:
        run_dir = tmp_path / "a" / "b"
        log, _ = open_log(run_dir)
        log.write_training(10, 3, {"q/loss": math.nan})
        log.write_evaluation(EvaluationResult((1.0,), (5,), 0, version=2, env_steps=8))
        log.close()
        log.close()
        assert (run_dir / "config.yaml").read_text() == "seed: 1\n"
        training, evaluation = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        assert (training["env_steps"], training["updates"], training["q/loss"]) == (10, 3, None)
        assert (evaluation["env_steps"], evaluation["updates"]) == (8, 2)
        assert 0 < training["wall_s"] <= evaluation["wall_s"] < 5
        assert list(run_dir.glob("events.out.tfevents.*"))

    def test_without_a_run_directory_there_are_none(self, tmp_path: Path) -> None:
        before = sorted(os.listdir())
        log, recorder = open_log(None)
        log.write_training(10, 0, {})
        log.close()
        assert log.writer is None
        assert len(recorder.lines) == 1
        assert sorted(os.listdir()) == before

    def test_guests_are_not_closed(self) -> None:
        log, recorder = open_log()
        log.close()
        assert not recorder.closed

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
    def test_a_full_disk_is_told_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """In a write and, as something is left to write, in the end."""
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        log, recorder = open_log(tmp_path)
        assert not log.failed
        for step in (10, 20):
            log.write_training(step, 0, {})
        log.close()
        assert log.failed
        assert [step for step, _ in recorder.lines] == [10, 20]  # the others get theirs
        (record,) = caplog.records
        assert record.levelname == "ERROR"
        assert "metrics can't be written, training goes on: [Errno 28]" in record.getMessage()

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
    def test_a_disk_that_is_full_at_the_very_end(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        log, _ = open_log(tmp_path)
        (lines,) = (sink for sink in log._own if isinstance(sink, JsonLinesSink))
        lines._file.write("what is still to be written")
        log.close()
        assert log.failed

    def test_tensorboard_elsewhere(self, tmp_path: Path) -> None:
        log, _ = open_log(tmp_path / "run", tensorboard=tmp_path / "board")
        log.close()
        assert list((tmp_path / "board").glob("events.*"))
        assert not list((tmp_path / "run").glob("events.*"))


class TestState:
    def test_goes_on_where_it_was(self, tmp_path: Path) -> None:
        log, _ = open_log(tmp_path)
        log.episodes.add(3.0, 4)
        log.lives.add(2.0, 3)
        log.write_training(100, 10, {})
        log.write_evaluation(EvaluationResult((1.0,), (5,), 0, version=9, env_steps=100))
        log.write_report(100, 10, Report({"world/error": 2.0}, {}))
        state = log.state_dict()
        log.write_training(200, 20, {})
        log.close()

        resumed = RunLog(tmp_path)
        resumed.load_state_dict({**state, "wall_s": 1_000.0})
        resumed.open(1_000, "off", {}, (100, 10))
        assert resumed.episodes.count == 1
        assert resumed.lives.mean_return == 2.0
        assert resumed.wall_s > 1_000
        resumed.write_training(100, 10, {})  # has its line
        resumed.write_evaluation(EvaluationResult((1.0,), (5,), 0, version=9, env_steps=100))
        resumed.write_report(100, 10, Report({"world/error": 2.0}, {}))
        resumed.write_training(150, 15, {})
        resumed.close()
        lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [line["env_steps"] for line in lines] == [100, 100, 100, 150]
        assert sum("evaluation/return_mean" in line for line in lines) == 1
        # Speeds count from the checkpoint, not from 0.
        assert lines[-1]["speed/updates_per_s"] == pytest.approx(
            lines[-1]["speed/env_steps_per_s"] / 10
        )


def test_process_started_at_agrees_with_psutil() -> None:
    age = time.time() - psutil.Process().create_time()
    assert time.monotonic() - process_started_at() == pytest.approx(age, abs=1.1)
    assert np.isfinite(process_started_at())
