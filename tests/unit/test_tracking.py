"""Experiment trackers: what they get, that their run goes on, and that they end no run.

The real libraries are extras that the tests do not need: without them two tests are skipped.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest

from actorlearner.callbacks import Callback
from actorlearner.contracts import BadInput, RunStatus, SettingError, Tracker
from actorlearner.runlog import RunLog
from actorlearner.tracking import MlflowTracker, WandbTracker
from tests.test_trainer import dqn, replay, trainer_of
from tests.tiny import Guess


class Notebook:
    """A tracker that notes what it gets.

    Args:
        breaks: the method that raises.
    """

    made: ClassVar[list[Notebook]] = []

    def __init__(self, breaks: str = "") -> None:
        self._breaks = breaks
        self.started: list[Any] = []
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self.status = ""
        self.made.append(self)

    def _call(self, name: str) -> None:
        if name == self._breaks:
            raise ConnectionError(f"no {name}")

    def start(self, config: Mapping[str, Any], run_dir: Path | None, run_id: str | None) -> str:
        self.started.append((config, run_dir, run_id))
        self._call("start")
        return run_id or "first"

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.lines.append((step, dict(metrics)))
        self._call("write")

    def close(self, status: RunStatus = "finished") -> None:
        self.closed += 1
        self.status = status
        self._call("close")


class OtherNotebook(Notebook):
    """Another service, which knows nothing of the first one's runs."""


def tracked(kind: type[Notebook] = Notebook, **settings: Any) -> dict[str, Any]:
    node = {"target": f"tests.unit.test_tracking:{kind.__name__}", **settings}
    return {"tracking": node, "trust": ["tests"]}


class TestWhatItGets:
    def test_configuration_and_metrics(self, tmp_path: Path) -> None:
        trainer_of(run_dir=tmp_path, **tracked()).fit(Guess, replay(), dqn())
        tracker: Tracker = Notebook.made[-1]
        assert isinstance(tracker, Notebook)
        ((config, run_dir, run_id),) = tracker.started
        assert (config["total_steps"], config["agent"]["batch_size"]) == (64, 8)
        json.dumps(config)
        assert (run_dir, run_id) == (tmp_path, None)
        text = (tmp_path / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert [step for step, _ in tracker.lines] == [line["env_steps"] for line in lines]
        own = {"env_steps", "updates", "wall_s"}
        for (_, metrics), line in zip(tracker.lines, lines, strict=True):
            assert metrics == {k: v for k, v in line.items() if k not in own}
        assert (tracker.closed, tracker.status) == (1, "finished")

    @pytest.mark.parametrize(
        ("error", "status"), [(KeyError, "failed"), (KeyboardInterrupt, "interrupted")]
    )
    def test_how_the_run_ended(self, error: type[BaseException], status: str) -> None:
        class Ends(Callback):
            def after_update(self, *_: Any) -> None:
                raise error

        with pytest.raises(error):
            trainer_of(callbacks=[Ends()], **tracked()).fit(Guess, replay(), dqn())
        tracker = Notebook.made[-1]
        assert (tracker.closed, tracker.status) == (1, status)

    def test_how_each_service_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for status, code, name in (
            ("finished", 0, "FINISHED"), ("failed", 1, "FAILED"), ("interrupted", 1, "KILLED"),
        ):  # fmt: skip
            wandb, mlflow = MagicMock(), MagicMock()
            monkeypatch.setitem(sys.modules, "wandb", wandb)
            monkeypatch.setitem(sys.modules, "mlflow", mlflow)
            for tracker in (WandbTracker(), MlflowTracker()):
                tracker.close(status)  # not started
                tracker.start({}, None, "id")
                tracker.close(status)
                tracker.close(status)
            wandb.init.return_value.finish.assert_called_once_with(exit_code=code)
            mlflow.MlflowClient.return_value.set_terminated.assert_called_once_with("id", name)

    def test_a_resumed_run_goes_on_in_its_run_there(self, tmp_path: Path) -> None:
        trainer_of(run_dir=tmp_path, **tracked()).fit(Guess, replay(), dqn())
        for kind, run_id in ((Notebook, "first"), (OtherNotebook, None)):
            trainer = trainer_of(
                run_dir=tmp_path, checkpoint=tmp_path, total_steps=80, **tracked(kind)
            )
            trainer.fit(Guess, replay(), dqn())
            assert [started[2] for started in Notebook.made[-1].started] == [run_id]

    @pytest.mark.parametrize("elsewhere", ["other", None])
    def test_a_run_that_goes_on_elsewhere_has_one_of_its_own(
        self, elsewhere: str | None, tmp_path: Path
    ) -> None:
        trainer_of(run_dir=tmp_path / "run", **tracked()).fit(Guess, replay(), dqn())
        run_dir = elsewhere and tmp_path / elsewhere
        trainer = trainer_of(
            run_dir=run_dir, checkpoint=tmp_path / "run", total_steps=80, **tracked()
        )
        trainer.fit(Guess, replay(), dqn())
        assert [started[2] for started in Notebook.made[-1].started] == [None]

    @pytest.mark.parametrize(
        ("code", "goes_on"), [("RESOURCE_DOES_NOT_EXIST", True), ("INTERNAL_ERROR", False)]
    )
    def test_mlflow_begins_a_run_where_it_knows_none(
        self, code: str, goes_on: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class MlflowException(Exception):
            error_code = code

        class Client(MagicMock):
            def update_run(self, run_id: str, status: str) -> None:
                raise MlflowException(run_id)

        client = Client()
        client.create_run.return_value.info.run_id = "new"
        library = MagicMock(MlflowClient=lambda _: client)
        library.exceptions.MlflowException = MlflowException
        monkeypatch.setitem(sys.modules, "mlflow", library)
        tracker = MlflowTracker()
        with nullcontext() if goes_on else pytest.raises(MlflowException):
            assert tracker.start({}, None, "gone") == "new"


class TestFailures:
    @pytest.mark.parametrize("where", ["start", "write", "close"])
    def test_it_ends_no_run_and_is_told_once(
        self, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        trainer = trainer_of(run_dir=tmp_path, **tracked(breaks=where))
        trainer.fit(Guess, replay(), dqn())
        assert trainer.env_steps >= 64
        told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert told == [
            "Notebook failed and gets no more metrics, training goes on: "
            f"ConnectionError: no {where}"
        ]
        assert trainer.log_failed
        tracker = Notebook.made[-1]
        assert len(tracker.lines) == {"start": 0, "write": 1, "close": 5}[where]
        assert tracker.closed == 1
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5

    def test_what_did_not_start_has_no_run_to_go_on_with(self) -> None:
        log = RunLog(None)
        log.track(Notebook(breaks="start"), {}, goes_on_here=False)
        assert log.state_dict()["tracked"] == {"by": "", "id": ""}

    @pytest.mark.parametrize("kind", [WandbTracker, MlflowTracker])
    def test_a_missing_library_names_its_extra(
        self, kind: type[Tracker], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        extra = kind.__name__.removesuffix("Tracker").lower()
        monkeypatch.setitem(sys.modules, extra, None)
        with pytest.raises(BadInput, match=rf'tracking: {extra} .*"actorlearner\[{extra}\]"'):
            kind()

    def test_settings_are_checked_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(SettingError, match=r"tracking\.mode='of': must be one of online, off"):
            WandbTracker(mode="of")


def of_library(library: str, **settings: Any) -> dict[str, Any]:
    target = f"actorlearner.tracking:{library.capitalize()}Tracker"
    return {"tracking": {"target": target, **settings}}


@pytest.mark.filterwarnings("default")  # the libraries' own
class TestRealLibraries:
    def test_wandb_offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_SILENT", "true")
        settings = of_library("wandb", project="tests", mode="offline")
        trainer_of(run_dir=tmp_path, **settings).fit(Guess, replay(), dqn())
        trainer = trainer_of(run_dir=tmp_path, checkpoint=tmp_path, total_steps=80, **settings)
        trainer.fit(Guess, replay(), dqn())
        assert not trainer.log_failed
        files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        assert len(files) == 2
        assert len({file.name for file in files}) == 1, "the file is named as the run"
        content = b"".join(file.read_bytes() for file in files)
        for text in (b"q/loss", b"evaluation/return_mean", b"env_steps", b"total_steps"):
            assert text in content

    def test_mlflow_in_a_local_store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        mlflow = pytest.importorskip("mlflow")
        monkeypatch.chdir(tmp_path)
        pytest.importorskip("sqlalchemy")
        uri = f"sqlite:///{tmp_path}/mlflow.db"
        settings = of_library("mlflow", uri=uri, experiment="tests", name="mine")
        trainer_of(run_dir=tmp_path / "run", **settings).fit(Guess, replay(), dqn())
        trainer = trainer_of(
            run_dir=tmp_path / "run", checkpoint=tmp_path / "run", total_steps=80, **settings
        )
        trainer.fit(Guess, replay(), dqn())
        assert not trainer.log_failed
        client = mlflow.MlflowClient(uri)
        experiment = client.get_experiment_by_name("tests")
        (run,) = client.search_runs([experiment.experiment_id])
        assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
        assert run.data.params["agent.batch_size"] == "8"
        assert run.data.params["total_steps"] == "64"
        history = client.get_metric_history(run.info.run_id, "evaluation/return_mean")
        assert len(history) == 2
        assert history[0].step >= 64
        assert history[1].step == trainer.env_steps
