"""Callbacks at the Trainer's seams, what the Trainer takes when it is told little, and messages."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from actorlearner import Callback, checkpoint
from actorlearner.agents.dqn import DQN
from actorlearner.contracts import SettingError
from actorlearner.trainer import Trainer
from tests.test_trainer import checkpoints, dqn, replay, trainer_of
from tests.tiny import Guess
from tests.unit.test_messages import unconfigured


class Diary(Callback):
    """Notes what it is told."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.pages: list[tuple[str, int, int]] = []
        self.metrics: list[Mapping[str, Any]] = []

    def _note(self, what: str, trainer: Trainer) -> None:
        self.pages.append((what, trainer.env_steps, trainer.updates))

    def after_update(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self._note("update", trainer)
        self.metrics.append(metrics)

    def after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._note("evaluation", trainer)
        assert metrics["evaluation/episodes"] == 2

    def at_save(self, trainer: Trainer, directory: Path) -> None:
        self._note("save", trainer)
        assert checkpoint.verify(directory).env_steps == trainer.env_steps
        assert trainer.is_saved
        assert isinstance(trainer.model, DQN)

    def of(self, what: str) -> list[tuple[int, int]]:
        return [page[1:] for page in self.pages if page[0] == what]


class Breaks(Callback):
    """Raises once."""

    def __init__(self, where: str = "after_update", at: int = 5) -> None:
        self._at = at
        setattr(self, where, self._break)

    def _break(self, trainer: Trainer, _: Any) -> None:
        if trainer.updates == self._at:
            self._at = -1
            raise OSError("the callback broke")


class StopsAt(Callback):
    def __init__(self, env_steps: int) -> None:
        self._env_steps = env_steps

    def after_update(self, trainer: Trainer, metrics: Any) -> None:
        if trainer.env_steps >= self._env_steps:
            trainer.stop()


class TestSeams:
    def test_every_update_evaluation_and_save_is_told(self, tmp_path: Path) -> None:
        first, second = Diary(), Diary()
        trainer = trainer_of(
            run_dir=tmp_path,
            callbacks=[first, second],
            evaluate_every_env_steps=32,
            checkpoint_every_env_steps=24,
        )
        trainer.fit(Guess, replay(), dqn())
        assert [updates for _, updates in first.of("update")] == [*range(1, trainer.updates + 1)]
        assert [steps // 32 for steps, _ in first.of("evaluation")] == [1, 2]
        assert [steps // 24 for steps, _ in first.of("save")] == [1, 2, 2]
        assert second.pages == first.pages
        assert first.pages[-1][0] == "save"

    def test_metrics_are_those_of_the_steps_as_they_are(self) -> None:
        diary = Diary()
        trainer_of(callbacks=[diary]).fit(Guess, replay(), dqn())
        for metrics in diary.metrics:
            assert {"q/loss", "q/td_error", "q/gradient_norm"} <= metrics.keys()
            assert all(isinstance(value, torch.Tensor) for value in metrics.values())

    def test_a_save_by_hand_is_told_too(self, tmp_path: Path) -> None:
        diary, model = Diary(), dqn()
        trainer = trainer_of(run_dir=tmp_path, callbacks=[diary])
        trainer.fit(Guess, replay(), model)
        trainer.save_checkpoint(model)
        assert diary.of("save") == [(trainer.env_steps, trainer.updates)] * 2

    def test_they_change_nothing(self, tmp_path: Path) -> None:
        models = [dqn(), dqn()]
        for model, callbacks in zip(models, ([], [Diary()]), strict=True):
            trainer_of(callbacks=callbacks).fit(Guess, replay(), model)
        for one, other in zip(*(m.state_dict().values() for m in models), strict=True):
            assert torch.equal(one, other)


class TestStop:
    def test_it_ends_as_at_the_end(self, tmp_path: Path) -> None:
        diary = Diary()
        trainer = trainer_of(run_dir=tmp_path, callbacks=[StopsAt(32), diary])
        metrics = trainer.fit(Guess, replay(), dqn())
        assert 32 <= trainer.env_steps < 48
        assert metrics["evaluation/episodes"] == 2
        assert diary.of("evaluation") == [(trainer.env_steps, trainer.updates)]
        assert checkpoints(tmp_path) == [trainer.env_steps]

    def test_without_lockstep_no_further_update_is_made(self) -> None:
        diary = Diary()
        trainer = trainer_of(callbacks=[diary, StopsAt(24)], lockstep=False)
        trainer.fit(Guess, replay(), dqn())
        assert [steps >= 24 for steps, _ in diary.of("update")].count(True) == 1

    def test_in_lockstep_a_resume_goes_on_as_if_it_had_not_ended(self, tmp_path: Path) -> None:
        whole, resumed = dqn(), dqn()
        trainer_of().fit(Guess, replay(), whole)
        trainer_of(run_dir=tmp_path, callbacks=[StopsAt(32)]).fit(Guess, replay(), dqn())
        trainer_of(run_dir=tmp_path, checkpoint=tmp_path).fit(Guess, replay(), resumed)
        for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(one, other)

    def test_the_next_fit_starts_afresh(self) -> None:
        trainer = trainer_of(callbacks=[StopsAt(32)])
        trainer.stop()
        trainer.fit(Guess, replay(), dqn())
        assert 32 <= trainer.env_steps < 48


class TestFailures:
    @pytest.mark.parametrize("where", ["after_update", "after_evaluation", "at_save"])
    def test_an_exception_saves_closes_and_is_raised(self, where: str, tmp_path: Path) -> None:
        trainer = trainer_of(
            run_dir=tmp_path,
            callbacks=[Breaks(where, at=4)],
            evaluate_every_env_steps=32,
            checkpoint_every_env_steps=32,
        )
        with pytest.raises(OSError, match="the callback broke"):
            trainer.fit(Guess, replay(), dqn())
        assert trainer.updates == 4
        assert checkpoints(tmp_path) == [trainer.env_steps]
        assert trainer.is_saved
        assert not trainer.save_failed, "an OSError of a callback is no full disk"

    def test_what_came_first_is_raised(self, tmp_path: Path) -> None:
        class Worse(Callback):
            def at_save(self, trainer: Trainer, directory: Path) -> None:
                raise ValueError("and then this")

        trainer = trainer_of(run_dir=tmp_path, callbacks=[Breaks(), Worse()])
        with pytest.raises(OSError, match="the callback broke"):
            trainer.fit(Guess, replay(), dqn())
        assert checkpoints(tmp_path) == [trainer.env_steps]

    def test_workers_are_closed(self, tmp_path: Path) -> None:
        trainer = trainer_of(
            workers=1, lockstep=False, total_steps=100_000, callbacks=[Breaks(at=50)],
            run_dir=tmp_path,
        )  # fmt: skip
        with pytest.raises(OSError, match="the callback broke"):
            trainer.fit(Guess, replay(capacity=50_000), dqn())
        assert trainer.updates == 50
        assert multiprocessing.active_children() == []
        assert checkpoints(tmp_path) == [trainer.env_steps]


class TestByName:
    NODE: Mapping[str, Any] = {"target": "tests.test_callbacks:Diary", "name": "mine"}

    def test_settings_make_one(self) -> None:
        trainer = trainer_of(callbacks=[self.NODE, Diary("instance")], trust=["tests"])
        assert [c.name for c in trainer._callbacks if isinstance(c, Diary)] == ["mine", "instance"]
        assert trainer.settings.callbacks == (self.NODE,)

    @pytest.mark.parametrize(
        ("callbacks", "message"),
        [
            ([{"target": "tests.test_callbacks:Diary"}], r"tests is not trusted; add trust=\["),
            ([{"target": "actorlearner.replay:ReplayBuffer"}], "a class with after_update"),
            (
                [{"name": "x"}],
                r"trainer\.callbacks\[0\]\.target=None: must read package.module:Name",
            ),
            (["x"], "a mapping is needed"),
            (Diary(), "a list is needed"),
        ],
    )
    def test_what_is_none_is_refused(self, callbacks: Any, message: str) -> None:
        with pytest.raises(SettingError, match=message):
            trainer_of(callbacks=callbacks)


class TestDefaults:
    def test_an_id_is_enough(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        trainer = Trainer(total_steps=40, workers=0, console="off", evaluation={"episodes": 1})
        metrics = trainer.fit("CartPole-v1")
        assert metrics["evaluation/episodes"] == 1
        assert isinstance(trainer.model, DQN)
        assert trainer.model.settings == DQN().settings
        assert list(tmp_path.iterdir()) == []


@unconfigured()
def test_a_script_is_told_what_happens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer_of(run_dir=tmp_path, console="plain").fit(Guess, replay(), dqn())
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "Training DQN on Guess for 64 env steps: all in this process, on cpu."
    assert told[1] == f"Results go to {tmp_path}; to watch: tensorboard --logdir {tmp_path}"
    assert told[2] == "Ctrl-C saves and stops."
    assert told[3] == "DQN has 51 parameters: online 51."
    assert told[4].startswith("The replay takes 0.0 MiB of memory for 256 rows; ")
    assert told[5].startswith("The replay needs up to 0.0 MiB of disk with its checkpoints; ")
    assert "of 64 env steps (" in told[6]
    assert re.match(r"Finished after 6\d env steps, \d+ s: evaluation return ", told[-3])
    assert re.search(r": .*\w=.*\.$", told[-2]), "a setting that would make it faster"
    assert told[-1] == f"Results are in {tmp_path}."
    log = (tmp_path / "run.log").read_text().splitlines()
    assert log[0].endswith(f"INFO {told[0]}")
    assert log[-1].endswith(f"INFO {told[-1]}")


@unconfigured()
def test_without_a_run_directory_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    trainer_of(console="plain").fit(Guess, replay(), dqn())
    told = capsys.readouterr().err
    assert "Nothing is written; run_dir=... keeps checkpoints and metrics." in told
    assert "Ctrl-C" not in told
    trainer_of(console="off").fit(Guess, replay(), dqn())
    assert capsys.readouterr().err == ""
