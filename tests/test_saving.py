"""Checkpoints as the Trainer makes them: beside the training, in time, and of the best weights."""

from __future__ import annotations

import copy
import errno
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorlearner import checkpoint, load_policy, rows
from actorlearner.callbacks import Callback
from actorlearner.contracts import CheckpointError, SettingError
from actorlearner.interrupts import Interrupts
from actorlearner.launch.inline import InlineLauncher
from actorlearner.saving import Saver
from actorlearner.trainer import Trainer
from tests.test_trainer import (
    Recorder,
    at_step,
    checkpoints,
    differences,
    dqn,
    everything,
    replay,
    trainer_of,
    weights,
)
from tests.tiny import Guess


class SlowDisk:
    """`checkpoint.save` that begins to write when it is told to.

    Attributes:
        asked: env steps of the checkpoints that were asked for.
        go: lets them be written.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.go = threading.Event()
        save = checkpoint.save

        def slow(run_dir: Any, env_steps: int, *arguments: Any, **more: Any) -> Path:
            self.asked.append(env_steps)
            self.go.wait()
            return save(run_dir, env_steps, *arguments, **more)

        monkeypatch.setattr(checkpoint, "save", slow)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.go.set()  # what hangs ends


class AtUpdate(Callback):
    """Acts once, after an update from ``at`` on."""

    def __init__(self, at: int, action: Callable[[Trainer], None]) -> None:
        self._at, self._action = at, action

    def after_update(self, trainer: Trainer, metrics: Any) -> None:
        if trainer.updates >= self._at:
            self._at = 10**9
            self._action(trainer)


class Sees(Callback):
    """Notes ``what`` after every update."""

    def __init__(self, what: Callable[[Trainer], bool]) -> None:
        self._what = what
        self.seen: list[bool] = []

    def after_update(self, trainer: Trainer, metrics: Any) -> None:
        self.seen.append(self._what(trainer))


class TestBackground:
    @pytest.mark.parametrize("storage", ["memory", "disk"])
    def test_it_holds_the_moment_at_which_it_was_begun(
        self,
        storage: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        slow_disk: SlowDisk,
    ) -> None:
        """Though all of the replay is overwritten, and the weights change, before it is written."""
        monkeypatch.setattr(rows, "PAGE_BYTES", 200)
        kept: list[dict[str, Any]] = []
        begin = Trainer._captured

        def frames(store: Any) -> Any:
            return store._ring.observation["observation"][np.arange(store._ring.num_stored)]

        def captured(self: Trainer, agent: Any) -> Any:
            now = copy.deepcopy(everything(self, agent))
            kept.append({**now, "frames": frames(self._replay_buffer)})
            return begin(self, agent)

        monkeypatch.setattr(Trainer, "_captured", captured)
        diary = Sees(lambda trainer: trainer.is_saving and not slow_disk.go.is_set())
        trainer = trainer_of(
            run_dir=tmp_path, lockstep=False, total_steps=320, checkpoint_every_env_steps=150,
            callbacks=[AtUpdate(60, lambda _: slow_disk.go.set()), diary],
        )  # fmt: skip
        model, store = dqn(), replay(storage=storage, capacity=64)
        trainer.fit(Guess, store, model)
        assert sum(diary.seen) > 10, "it went on meanwhile"
        where = tmp_path / "checkpoints" / f"step_{checkpoints(tmp_path)[0]:012d}"
        states = checkpoint.load(where, ["agent", "optimizers", "progress", "replay"])
        assert differences(kept[0]["agent"], weights(model)), "or nothing is shown"
        for name in ("agent", "optimizers", "progress"):
            assert differences(kept[0][name], states[name]) == []
        restored = replay(capacity=64)
        restored.build(**{k: v for k, v in store._built_for.items() if k != "place"})
        restored.load_state_dict(states["replay"])
        assert np.array_equal(frames(restored), kept[0]["frames"])
        for state in (kept[0]["replay"], states["replay"]):
            del state["ring"]["rows"]["observation/observation"]
        assert differences(kept[0]["replay"], states["replay"]) == []

    def test_one_that_is_due_comes_when_the_one_before_it_is_written(
        self, tmp_path: Path, slow_disk: SlowDisk
    ) -> None:
        """Training does not wait, and two are never written at once."""
        threads: list[int] = []

        def after(trainer: Trainer) -> bool:
            threads.append(sum(t.name == "al-checkpoint" for t in threading.enumerate()))
            if trainer.env_steps >= 220:
                slow_disk.go.set()
                if len(slow_disk.asked) == 1:
                    time.sleep(0.03)  # for the disk to be quicker than the training
            return not slow_disk.go.is_set()

        trainer = trainer_of(
            run_dir=tmp_path, lockstep=False, total_steps=400, checkpoint_every_env_steps=100,
            callbacks=[Sees(after)], keep_last=9, keep_best=0,
        )  # fmt: skip
        trainer.fit(Guess, replay(), dqn())
        first, second, *_ = slow_disk.asked
        assert 100 <= first < 200
        assert 220 <= second < 300, "it was due at 200"
        assert checkpoints(tmp_path) == slow_disk.asked
        assert max(threads) == 1
        assert trainer.is_saved

    def test_what_is_being_written_when_an_update_fails_is_finished(
        self, tmp_path: Path, slow_disk: SlowDisk
    ) -> None:
        class Broken(type(dqn())):  # type: ignore[misc]
            def q_training_step(self, batch: Any) -> Any:
                if slow_disk.asked:
                    threading.Timer(0.1, slow_disk.go.set).start()
                    raise RuntimeError("the agent is broken")
                return super().q_training_step(batch)

        trainer = trainer_of(run_dir=tmp_path, lockstep=False, checkpoint_every_env_steps=32)
        with pytest.raises(RuntimeError, match="the agent is broken"):
            trainer.fit(Guess, replay(), Broken(hidden=(8,), batch_size=8))
        assert checkpoints(tmp_path) == slow_disk.asked
        assert len(slow_disk.asked) == 1


class TestDeadline:
    @pytest.mark.parametrize("hangs_before", [True, False])
    def test_a_save_that_hangs_ends_the_run_unsaved(
        self,
        hangs_before: bool,
        tmp_path: Path,
        slow_disk: SlowDisk,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Whether it hung when the signal came or was begun then; what stood before stands."""
        slow_disk.go.set()
        trainer_of(run_dir=tmp_path, total_steps=32).fit(Guess, replay(), dqn())
        before = checkpoints(tmp_path)
        slow_disk.go.clear()

        def end(trainer: Trainer) -> None:
            if hangs_before:
                trainer._save(trainer.model)  # type: ignore[arg-type]
            signal.raise_signal(signal.SIGTERM)

        trainer = trainer_of(
            run_dir=tmp_path, checkpoint=tmp_path, total_steps=10**6, lockstep=False,
            preempt_deadline_s=0.3, callbacks=[AtUpdate(12, end)],
        )  # fmt: skip
        begin = time.monotonic()
        with pytest.raises(SystemExit) as caught:
            trainer.fit(Guess, replay(), dqn())
        assert caught.value.code == 143
        assert 0.2 < time.monotonic() - begin < 5
        assert not trainer.is_saved  # so that the command's code is 1
        assert (
            "trainer.preempt_deadline_s=0.3: the checkpoint was not written by then" in caplog.text
        )
        assert checkpoints(tmp_path) == before
        checkpoint.verify(checkpoint.find(tmp_path))

    def test_in_time_nothing_is_lost(self, tmp_path: Path) -> None:
        trainer = trainer_of(
            run_dir=tmp_path, total_steps=10**6, lockstep=False, preempt_deadline_s=30,
            callbacks=[AtUpdate(3, lambda _: signal.raise_signal(signal.SIGTERM))],
        )  # fmt: skip
        with pytest.raises(SystemExit):
            trainer.fit(Guess, replay(), dqn())
        assert trainer.is_saved
        assert checkpoints(tmp_path) == [trainer.env_steps]


FULL = [
    *(("fsync", number) for number in (errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT)),
    *(("mkdir", number) for number in (errno.EROFS, errno.EACCES)),
    ("link", errno.EDQUOT),
]
"""Where it fails, and how."""


def test_an_old_checkpoint_that_can_not_be_deleted_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new one was written nevertheless, so nothing has failed."""
    real = shutil.rmtree

    def refuse(path: Any, **more: Any) -> None:
        if Path(path).name.startswith("step_") and not more:
            raise PermissionError(13, "Permission denied", str(path))
        real(path, **more)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    trainer = trainer_of(run_dir=tmp_path, checkpoint_every_env_steps=16, keep_last=1)
    trainer.fit(Guess, replay(), dqn())
    assert not trainer.save_failed
    assert len(checkpoints(tmp_path)) > 1
    assert "an old checkpoint can't be deleted: [Errno 13] Permission denied" in caplog.text


class TestNoRoom:
    @pytest.mark.parametrize(("call", "number"), FULL)
    def test_training_goes_on_and_the_old_one_stands(
        self,
        call: str,
        number: int,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(rows, "PAGE_BYTES", 200)
        owner: Any = Path if call == "mkdir" else os
        real = getattr(owner, call)

        def refuse(*arguments: Any, **more: Any) -> Any:
            if call == "mkdir" and arguments[0].name != "saving.tmp":
                return real(*arguments, **more)
            raise OSError(number, os.strerror(number))

        def fill_up() -> None:
            monkeypatch.setattr(owner, call, refuse)

        trainer = trainer_of(
            run_dir=tmp_path, checkpoint_every_env_steps=32, total_steps=96,
            sinks=[Recorder(at_step(48, fill_up))],
        )  # fmt: skip
        trainer.fit(Guess, replay(storage="disk"), dqn())
        monkeypatch.undo()
        assert trainer.save_failed  # so that the command's code is 3
        assert trainer.env_steps >= 96
        (stands,) = checkpoints(tmp_path)
        assert stands < 48
        checkpoint.verify(checkpoint.find(tmp_path))
        assert caplog.text.count("no checkpoint was written, training goes on") >= 2
        assert os.strerror(number) in caplog.text
        assert not (tmp_path / "checkpoints" / "saving.tmp").exists()


class Unwritable:
    """Writes of weights that fail until there is room; their worth is their score."""

    def __init__(self) -> None:
        self.has_room = False
        self.best = -math.inf

    def write(self, score: float, pace: Any) -> Path | None:
        if score <= self.best:
            return None
        if not self.has_room:
            raise OSError(28, "No space left on device")
        self.best = score
        return Path("best")


class TestBestThatFailed:
    @pytest.mark.parametrize(("later", "is_missing"), [(4.0, True), (6.0, False)])
    def test_it_is_missing_until_a_better_one_is_written(
        self, later: float, is_missing: bool
    ) -> None:
        """Worse ones that are none of the best don't make up for it."""
        writes = Unwritable()
        saver = Saver(Interrupts(), None, lambda path: None)

        def evaluated(version: int, score: float) -> None:
            saver.hold(version, writes.write)
            saver.judge(version, score)
            saver.finish()

        evaluated(1, 5.0)
        assert saver.failed
        writes.has_room, writes.best = True, 5.0 if is_missing else 4.0
        evaluated(2, later)
        assert saver.failed == is_missing


class TestReplayOnDisk:
    def test_a_run_in_parts_is_the_run_in_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And the run with the replay in memory; also from an older checkpoint that was kept."""
        monkeypatch.setattr(rows, "PAGE_BYTES", 200)
        ends = []

        def fit(storage: str, run_dir: Path, source: Path | None = None, steps: int = 160) -> None:
            trainer, model = trainer_of(
                run_dir=run_dir, checkpoint=source, total_steps=steps,
                checkpoint_every_env_steps=40, keep_last=2,
            ), dqn()  # fmt: skip
            trainer.fit(Guess, replay(storage=storage, capacity=64), model)
            ends.append(weights(model))

        fit("memory", tmp_path / "memory")
        fit("disk", tmp_path / "whole")
        fit("disk", tmp_path / "parts", steps=60)
        fit("disk", tmp_path / "parts", tmp_path / "parts", steps=120)
        fit("disk", tmp_path / "parts", tmp_path / "parts")
        older = checkpoint.find(tmp_path / "whole").parent
        older /= f"step_{checkpoints(tmp_path / 'whole')[0]:012d}"
        fit("disk", tmp_path / "whole", older)
        fit("memory", tmp_path / "changed", older)
        for end in (ends[1], *ends[4:]):
            assert differences(ends[0], end) == []

    def test_one_that_can_not_be_taken_over_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No room for its pages, say; the checkpoint stays as it is."""
        monkeypatch.setattr(rows, "PAGE_BYTES", 200)
        trainer_of(run_dir=tmp_path).fit(Guess, replay(storage="disk"), dqn())

        def refuse(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(rows.DiskRows, "load", refuse)
        again = trainer_of(run_dir=tmp_path, checkpoint=tmp_path, total_steps=96)
        with pytest.raises(CheckpointError, match=r"its replay can't be taken over: .*No space"):
            again.fit(Guess, replay(storage="disk"), dqn())
        checkpoint.verify(checkpoint.find(tmp_path))

    def test_it_needs_a_run_directory(self) -> None:
        with pytest.raises(SettingError, match=r"replay\.storage=disk: needs a run directory"):
            trainer_of().fit(Guess, replay(storage="disk"), dqn())


class TestBest:
    class Watches(InlineLauncher):
        """Keeps the weights of every snapshot that is evaluated."""

        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[int, Any] = {}

        def request_evaluation(self, snapshot: Any, request: Any) -> bool:
            self.seen[request.env_steps] = weights(self.model)
            return super().request_evaluation(snapshot, request)

        model: Any

    @pytest.mark.parametrize("lockstep", [True, False])
    def test_the_weights_that_were_evaluated_best_stay(
        self, lockstep: bool, tmp_path: Path
    ) -> None:
        launcher, recorder = self.Watches(), Recorder()
        launcher.model = model = dqn()
        trainer = trainer_of(
            run_dir=tmp_path, launcher=launcher, lockstep=lockstep, total_steps=128, keep_last=1,
            evaluate_every_env_steps=16, checkpoint_every_env_steps=64, sinks=[recorder],
        )  # fmt: skip
        trainer.fit(Guess, replay(), model)
        returns = {
            step: line["evaluation/return_mean"]
            for step, line in recorder.lines
            if "evaluation/return_mean" in line
        }
        assert len(set(returns.values())) > 1
        at = max(returns, key=lambda step: (returns[step], -step))
        best = tmp_path / "checkpoints" / "best"
        where = checkpoint.find(best)
        assert where.name == f"best_{at:012d}"
        assert checkpoint.read_manifest(where).info["score"] == returns[at]
        assert differences(checkpoint.load(where, ["agent"])["agent"], launcher.seen[at]) == []
        assert not trainer.save_failed

        other = dqn()
        metrics = trainer_of(checkpoint=best).evaluation(Guess, other)
        assert differences(weights(other), launcher.seen[at]) == []
        assert metrics["evaluation/return_mean"] == returns[at]
        assert load_policy(best).env_steps == at
        with pytest.raises(CheckpointError, match=rf"weights only.*to go on, resume={tmp_path}"):
            trainer_of(checkpoint=best).fit(Guess, replay(), dqn())

    def test_none_is_kept_if_none_is_asked_for(self, tmp_path: Path) -> None:
        trainer_of(run_dir=tmp_path, keep_best=0).fit(Guess, replay(), dqn())
        assert not list((tmp_path / "checkpoints").glob("best*"))

    def test_a_run_that_starts_afresh_knows_none(self, tmp_path: Path) -> None:
        """Such as after one that was killed before its first checkpoint."""
        checkpoint.save_best(tmp_path, 5, 1e9, {"agent": {}})
        trainer = trainer_of(run_dir=tmp_path)
        trainer.fit(Guess, replay(), dqn())
        assert checkpoint.find(tmp_path / "checkpoints" / "best").name.endswith(
            f"{trainer.env_steps:012d}"
        )
