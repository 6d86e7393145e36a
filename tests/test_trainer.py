"""The Trainer, row by row of the checklist (I1 to I21), and what the whole system does."""

from __future__ import annotations

import copy
import fcntl
import json
import logging
import multiprocessing
import os
import pty
import random
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from actorlearner import checkpoint, interrupts, runstate
from actorlearner.agents.dqn import DQN
from actorlearner.contracts import (
    Acting,
    BadInput,
    CheckpointError,
    NetworkPolicy,
    NonFiniteError,
    SettingError,
    StepOutput,
    WorkerError,
)
from actorlearner.launch.inline import InlineLauncher
from actorlearner.launch.local import LocalLauncher
from actorlearner.replay import ReplayBuffer
from actorlearner.run import compose
from actorlearner.trainer import Trainer
from actorlearner.trainersettings import TrainerSettings
from tests.saved import saved
from tests.tiny import Features, Guess, Regressor, Treadmill, vector_spec

EVALUATION_KEYS = {
    f"evaluation/{name}"
    for name in (
        "return_mean", "return_std", "return_min", "return_max", "length_mean", "episodes",
        "episodes_cut",
    )
}  # fmt: skip

SMALL: dict[str, Any] = {
    "workers": 0,
    "unroll_length": 8,
    "total_steps": 64,
    "samples_per_insert": 2.0,
    "lockstep": True,
    "device": "cpu",
    "console": "off",
    "log_every_env_steps": 16,
    "evaluation": {"episodes": 2},
}


def trainer_of(**changes: Any) -> Trainer:
    return Trainer(**{**SMALL, **changes})


def replay(**changes: Any) -> ReplayBuffer:
    # The exponent of the weights must not depend on how long a run is planned to be.
    return ReplayBuffer(**{"capacity": 256, "warmup_env_steps": 16, "beta_updates": 100, **changes})


def dqn(**changes: Any) -> DQN:
    knots = ((0, 1.0), (100, 0.1))
    return DQN(**{"hidden": (8,), "batch_size": 8, "target_every_updates": 5, "epsilon": knots,
                  "learning_rate": 0.01, **changes})  # fmt: skip


class Recorder:
    """A sink that keeps everything, and calls back."""

    def __init__(self, callback: Callable[[int], None] = lambda step: None) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self._callback = callback

    def write(self, step: int, metrics: Any) -> None:
        self.lines.append((step, dict(metrics)))
        self._callback(step)

    def close(self) -> None:
        raise AssertionError("a guest stays its owner's to close")

    def steps(self, name: str) -> list[int]:
        return [step for step, line in self.lines if name in line]


def at_step(step: int, action: Callable[[], None]) -> Callable[[int], None]:
    """A callback that acts once, at the first write from ``step`` on."""
    done: list[int] = []

    def callback(now: int) -> None:
        if now >= step and not done:
            done.append(now)
            action()

    return callback


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise RuntimeError("the sink failed")


def checkpoints(run_dir: Path) -> list[int]:
    folder = run_dir / "checkpoints"
    return sorted(int(p.name[5:]) for p in folder.glob("step_*")) if folder.exists() else []


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_board(directory: Path) -> dict[str, list[Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    board.Reload()
    return {tag: board.Scalars(tag) for tag in board.Tags()["scalars"]}


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two state trees differ in any bit."""
    if isinstance(a, dict):
        keys = [f"{where}: keys"] if set(a) != set(b) else []
        return keys + [d for k in a if k in b for d in differences(a[k], b[k], f"{where}/{k}")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{where}: length"]
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in differences(x, y, f"{where}/{i}")]
    if isinstance(a, torch.Tensor | np.ndarray):
        return [] if np.array_equal(np.asarray(a), np.asarray(b)) else [where]
    return [] if a == b else [where]


def everything(trainer: Trainer, model: Any) -> dict[str, Any]:
    """All that a checkpoint holds and a later step depends on."""
    return {
        "agent": model.state_dict(),
        "optimizers": {name: o.state_dict() for name, o in trainer._optimizers.items()},
        "progress": trainer._progress.state_dict(),
        "replay": saved(trainer._replay_buffer),
        "episodes": trainer._log.episodes.state_dict(),
    }


# ---------------------------------------------------------------------- what it is built from


class TestSettings:
    CHANGED: ClassVar[dict[str, Any]] = {
        "workers": 3, "envs_per_worker": 2, "unroll_length": 4, "seed": 5, "total_steps": 77,
        "device": "cpu", "lockstep": True, "samples_per_insert": 3.5, "run_dir": Path("x"),
        "trust": ("mine",), "launch": {"slots": 3}, "dtype": "float64", "gradient_clip_val": 0.5,
        "nonfinite": "skip", "compile": "max-autotune",
        "publish_every_updates": 4, "threads": 1, "evaluate_every_env_steps": 10,
        "checkpoint_every_env_steps": 20, "log_every_env_steps": 30, "keep_last": 2,
        "keep_best": 0, "preempt_deadline_s": 9.5,
        "console": "off", "tracking": {"target": "mine:Tracker"},
        "callbacks": ({"target": "actorlearner.callbacks:Callback"},),
    }  # fmt: skip

    def test_i1_each_is_readable(self) -> None:
        changed = self.CHANGED
        evaluation = {"episodes": 4, "step_limit": 9, "seed": 2}
        for without in ({"lockstep"}, {"dtype", "compile"}):  # these two don't go together
            some = {name: value for name, value in changed.items() if name not in without}
            trainer = Trainer(**some, evaluation=evaluation)
            for name, value in some.items():
                assert getattr(trainer.settings, name) == value
        for name, value in changed.items():
            assert getattr(TrainerSettings(), name) != value or name == "device", name
        assert trainer.settings.evaluation.episodes == 4
        assert trainer.settings.num_streams == 6
        names = {item.name for item in fields(TrainerSettings)}
        assert set(self.CHANGED) | {"acting", "evaluation", "faults"} == names

    def test_auto_is_a_number_and_stays_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the configuration too, from which a resume takes it, on whatever machine."""
        monkeypatch.setattr("actorlearner.trainersettings.core_count", lambda: 3)
        config = compose(["workers=auto", "envs_per_worker=auto"])
        trainer = Trainer.from_config(config)
        assert (trainer.settings.workers, trainer.settings.envs_per_worker) == (3, 16)
        assert trainer.settings.num_streams == 48
        assert trainer.config is not None
        assert (trainer.config.workers, trainer.config.envs_per_worker) == (3, 16)
        monkeypatch.setattr("actorlearner.trainersettings.core_count", lambda: 5)
        assert Trainer.from_config(trainer.config).settings.workers == 3
        assert trainer_of(workers=2, envs_per_worker="auto").settings.num_streams == 32

    def test_workers_act_as_is_chosen(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        asked: list[Any] = []

        def choose(*arguments: Any) -> Acting:
            asked.append(arguments)
            return Acting(precision="bfloat16")

        equipped: list[Acting] = []

        def equip(policy: Any, acting: Acting) -> Any:
            equipped.append(acting)
            return lambda: None

        monkeypatch.setattr("actorlearner.trainer.choose", choose)
        monkeypatch.setattr("actorlearner.worker.equip", equip)
        acting = {"backend": "auto"}
        trainer = trainer_of(
            lockstep=False, acting=acting, envs_per_worker=2, total_steps=4, run_dir=tmp_path
        )
        trainer.fit(Guess, replay(), dqn())
        ((settings, policy, spec, *counts, cache),) = asked
        assert settings.backend == "auto"
        assert isinstance(policy, NetworkPolicy)
        assert spec.name == "Guess"
        assert counts == [2, trainer.settings.unroll_length]
        assert cache == tmp_path / "acting.json"
        assert equipped == [Acting(precision="bfloat16")], "evaluations act as they always do"

    @pytest.mark.parametrize(
        ("name", "key"),
        [
            *[(n, n) for n in ("workers", "envs_per_worker", "unroll_length", "seed")],
            *[(n, n) for n in ("total_steps", "samples_per_insert")],
            *[
                (n, f"trainer.{n}")
                for n in ("gradient_clip_val", "publish_every_updates", "evaluate_every_env_steps",
                          "checkpoint_every_env_steps", "log_every_env_steps", "keep_last")
            ],
        ],
    )  # fmt: skip
    def test_i1_wrong_type_or_negative_names_the_key(self, name: str, key: str) -> None:
        for value, message in ((-1, "must be"), ("many", "is needed"), ([2], "is needed")):
            with pytest.raises(SettingError, match=f"^{key}=.*{message}"):
                trainer_of(**{name: value})

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"lockstep": 1}, "^lockstep=1: true or false is needed"),
            ({"console": "loud"}, "^trainer.console='loud': must be one of auto, bar, plain, off"),
            ({"dtype": "int32"}, "^trainer.dtype='int32': must be one of float32"),
            ({"dtype": torch.int64}, "^trainer.dtype='int64': must be one of float32"),
            ({"device": "abacus"}, "^device=abacus: not to be had here: "),
            ({"device": "cuda:99"}, "^device=cuda:99: not to be had here: "),
            ({"device": 3}, "^device=3: a text is needed"),
            ({"device": "meta"}, "^device=meta: not to be had here: "),
            ({"nonfinite": "go on"}, "^trainer.nonfinite='go on': must be one of stop, skip"),
            ({"compile": True}, "^trainer.compile=True: must be one of default, reduce-overhead"),
            ({"compile": "default"}, "^trainer.compile=default: lockstep needs null"),
            ({"dtype": "bfloat16", "lockstep": True}, "^trainer.dtype=bfloat16: lockstep needs"),
            ({"acting": {"backend": "auto"}}, "^acting.backend=auto: lockstep needs acting.backe"),
            ({"acting": {"precision": "bfloat16"}}, "^acting.precision=bfloat16: lockstep needs"),
            ({"samples_per_insert": float("inf")}, "^samples_per_insert=inf: must be greater"),
            ({"samples_per_insert": float("nan")}, "^samples_per_insert=nan: must be greater"),
            ({"evaluation": {"episodes": 0}}, "^evaluation.episodes=0: must be at least 1"),
            ({"gradient_clip": 3}, "^trainer.gradient_clip: .* mean trainer.gradient_clip_val"),
            ({"worker": 3}, "^trainer.worker: there is no such setting"),
        ],
    )
    def test_i1_refused(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(SettingError, match=message):
            trainer_of(**settings)

    def test_lockstep_refuses_another_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(SettingError, match=r"^device=cuda: lockstep needs cpu"):
            trainer_of(device="cuda")
        devices = [trainer_of(device="auto", lockstep=on).device.type for on in (True, False)]
        assert devices == ["cpu", "cuda"]
        assert trainer_of(device="cuda", lockstep=False).device.type == "cuda"

    def test_lockstep_refuses_parts_that_can_not_keep_it(self) -> None:
        with pytest.raises(SettingError, match=r"^replay.save=False: lockstep needs the replay"):
            trainer_of().fit(Guess, replay(save=False), dqn())
        with pytest.raises(BadInput, match=r"^launcher=.*: must be made with lockstep=True"):
            trainer_of(workers=1, launcher=LocalLauncher()).fit(Guess, replay(), dqn())

    def test_the_launcher_may_be_named(self) -> None:
        """As an instance, or as a target, made for lockstep too."""
        ends = []
        for launcher in (InlineLauncher(), "actorlearner.launch.inline:InlineLauncher"):
            trainer, model = trainer_of(workers=2, launcher=launcher), dqn()
            trainer.fit(Guess, replay(), model)
            ends.append(everything(trainer, model))
        assert differences(*ends) == []

    def test_settings_of_the_launcher_reach_it(self) -> None:
        with pytest.raises(SettingError, match=r"^launch.slots=0: must be at least 1"):
            trainer_of(workers=1, launch={"slots": 0}).fit(Guess, replay(), dqn())
        with pytest.raises(SettingError, match="not trusted"):
            trainer_of(workers=1, launch={"target": "elsewhere:Launcher"}).fit(
                Guess, replay(), dqn()
            )

    @pytest.mark.parametrize(
        ("device", "dtype", "expected"),
        [
            ("cpu", "float64", torch.float64),
            (torch.device("cpu"), torch.float64, torch.float64),
            ("auto", torch.float32, torch.float32),
            ("cpu", "bfloat16", torch.bfloat16),
        ],
    )
    def test_i3_device_and_dtype_as_text_or_object(
        self, device: Any, dtype: Any, expected: torch.dtype
    ) -> None:
        trainer, model = trainer_of(device=device, dtype=dtype, lockstep=False), dqn()
        trainer.fit(Guess, replay(), model)
        wanted = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu"
        assert {p.device.type for p in model.parameters()} == {wanted}
        assert {p.dtype for p in model.parameters()} == {expected}
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert trainer.device.type == wanted
        assert trainer.dtype == expected
        assert trainer.updates > 0


class TestGradientClipping:
    def change(self, clip: float | None) -> tuple[float, float]:
        class Steep(Regressor):
            def reward_step(self, batch: Any) -> StepOutput:
                output = super().reward_step(batch)
                return replace(output, loss=1_000 * output.loss)

        model = Steep(reward_lr=1.0, next_lr=1.0)
        recorder = Recorder()
        before: dict[str, torch.Tensor] = {}
        model.configure_optimizers = lambda: (  # type: ignore[method-assign]
            before.update(weights(model)) or Regressor.configure_optimizers(model)
        )
        # Warm-up 16, batches of 8, one sample per insert: 24 env steps are one update.
        trainer = trainer_of(
            gradient_clip_val=clip, total_steps=24, samples_per_insert=1.0, sinks=[recorder]
        )
        trainer.fit(Guess, replay(prioritized=False), model)
        assert trainer.updates == 1
        after = {k: v for k, v in weights(model).items() if k.startswith("reward.")}
        moved = sum(float((after[k] - before[k]).square().sum()) for k in after) ** 0.5
        norms = [line["reward/gradient_norm"] for _, line in recorder.lines
                 if "reward/gradient_norm" in line]  # fmt: skip
        return moved, norms[-1]

    def test_i2_a_tiny_bound_leaves_the_parameters(self) -> None:
        moved, norm = self.change(1e-9)
        assert moved < 1e-7
        assert norm > 100  # as it was before clipping

    def test_i2_none_does_not_clip(self) -> None:
        moved, norm = self.change(None)
        assert norm > 100
        assert moved == pytest.approx(norm, rel=1e-4)  # SGD with a learning rate of 1

    def test_p16_the_norm_is_at_most_the_bound(self) -> None:
        moved, norm = self.change(0.05)
        assert norm > 0.05
        assert moved == pytest.approx(0.05, rel=1e-3)


class TestConfig:
    TREE: ClassVar[dict[str, Any]] = {
        "seed": 3, "workers": 0, "total_steps": 32, "lockstep": True, "device": "cpu",
        "unroll_length": "${trainer.keep_last}", "run_dir": None,
        "trainer": {"keep_last": 8, "console": "off"},
        "evaluation": {"episodes": 2, "seed": "${seed}"},
        "launch": {"slots": 2}, "agent": {"anything": "${seed}"},
    }  # fmt: skip

    def test_i6_settings_come_from_the_config(self) -> None:
        trainer = Trainer.from_config(OmegaConf.create(self.TREE))
        s = trainer.settings
        assert (s.seed, s.unroll_length, s.keep_last, s.evaluation.seed) == (3, 8, 8, 3)
        assert s.launch == {"slots": 2}

    def test_i6_it_is_stored_resolved_and_equal_after_reload(self, tmp_path: Path) -> None:
        config = OmegaConf.create({**self.TREE, "run_dir": str(tmp_path / "run")})
        Trainer.from_config(config).fit(Guess, replay(), dqn())
        resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
        stored = [tmp_path / "run", checkpoint.find(tmp_path / "run")]
        for directory in stored:
            assert OmegaConf.load(directory / "config.yaml") == resolved
            assert OmegaConf.load(directory / "config_unresolved.yaml") == config
        text = (stored[1] / "config_unresolved.yaml").read_text()
        assert "${seed}" in text

    def test_i6_without_a_config_the_settings_are_stored(self, tmp_path: Path) -> None:
        trainer_of(run_dir=tmp_path / "run", seed=9, trust=["mine"]).fit(Guess, replay(), dqn())
        stored = OmegaConf.load(checkpoint.find(tmp_path / "run") / "config.yaml")
        again = Trainer(**OmegaConf.to_container(stored))  # type: ignore[arg-type]
        assert (
            again.settings == trainer_of(run_dir=tmp_path / "run", seed=9, trust=["mine"]).settings
        )

    @pytest.mark.parametrize(
        ("key", "message"),
        [
            ("trainer.kep_last", "^trainer.kep_last: .* did you mean trainer.keep_last"),
            ("evaluation.episode", "^evaluation.episode: .* did you mean evaluation.episodes"),
        ],
    )
    def test_i6_an_unknown_key_is_an_error(self, key: str, message: str) -> None:
        config = OmegaConf.create(self.TREE)
        OmegaConf.update(config, key, 1)
        with pytest.raises(SettingError, match=message):
            Trainer.from_config(config)


# ------------------------------------------------------------------------------------- the flow


class SpyModel(DQN):
    """Writes down what is done to it."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(hidden=(8,), batch_size=8)
        self.__dict__["calls"] = calls
        self.__dict__["seen"] = []

    @property
    def device(self) -> Any:
        return self.__dict__["given_device"]

    @device.setter
    def device(self, value: Any) -> None:
        self.calls.append("attributes")
        self.__dict__["given_device"] = value

    def build(self, env_spec: Any) -> None:
        super().build(env_spec)
        self.calls.append("build")

    def to(self, *arguments: Any, **more: Any) -> Any:
        assert {"device", "dtype", "tensorboard", "log_every_env_steps", "current_episode"} <= {
            name for name in dir(self)
        }
        self.calls.append("to")
        return super().to(*arguments, **more)

    def configure_optimizers(self) -> Any:
        self.calls.append("optimizers")
        return super().configure_optimizers()

    def load_state_dict(self, *arguments: Any, **more: Any) -> Any:
        self.calls.append("load")
        return super().load_state_dict(*arguments, **more)

    def q_training_step(self, batch: Any) -> StepOutput:
        self.calls.append("step")
        self.seen.append((self.current_step, self.current_episode, self.training))
        return super().q_training_step(batch)


class SpyLauncher(InlineLauncher):
    """Writes down what is asked of it."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls
        self.unrolls: list[tuple[int, int, float]] = []
        self.env_steps = self.episodes = 0

    def gather(self, timeout: float, may_insert: Callable[[], bool]) -> Iterator[Any]:
        self.calls.append("collect")
        for unroll in super().gather(timeout, may_insert):
            self.env_steps += unroll.env_steps
            self.episodes += len(unroll.episodes)
            yield unroll

    def request_evaluation(self, snapshot: Any, request: Any) -> bool:
        self.calls.append("evaluation")
        return super().request_evaluation(snapshot, request)


def without_repeats(calls: list[str]) -> list[str]:
    return [call for i, call in enumerate(calls) if i == 0 or calls[i - 1] != call]


class TestFlow:
    def test_i7_returns_the_evaluation_as_floats(self) -> None:
        trainer = trainer_of()
        metrics = trainer.fit(Guess, replay(), dqn())
        assert metrics.keys() == EVALUATION_KEYS
        assert {type(value) for value in metrics.values()} == {float}
        assert metrics["evaluation/episodes"] == 2.0
        assert trainer.env_steps >= 64

    def test_i7_order(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        save = checkpoint.save
        monkeypatch.setattr(
            checkpoint, "save", lambda *a, **k: (calls.append("save"), save(*a, **k))[1]
        )
        trainer = trainer_of(run_dir=tmp_path, launcher=SpyLauncher(calls), total_steps=32)
        trainer.fit(Guess, replay(), SpyModel(calls))
        order = without_repeats(calls)
        # Of the DQN: the copy of the target network when it is built is a load of its own.
        assert order[:4] == ["build", "attributes", "to", "optimizers"]
        assert order[4] == "attributes"  # again, now with a writer
        body = [call for call in order[5:] if call != "attributes"]
        assert body[0] == "collect"
        assert body[-2:] == ["evaluation", "save"]
        assert body[1:-2] == ["step", "collect"] * (len(body[1:-2]) // 2) + ["step"]
        assert calls.count("evaluation") == calls.count("save") == 1

        calls.clear()
        trainer = trainer_of(
            run_dir=tmp_path, launcher=SpyLauncher(calls), total_steps=48, checkpoint=tmp_path
        )
        trainer.fit(Guess, replay(), SpyModel(calls))
        order = [c for c in without_repeats(calls) if c != "attributes"]
        assert order[:5] == ["build", "to", "optimizers", "load", "collect"]
        assert order[-2:] == ["evaluation", "save"]

    def test_i8_attributes_and_true_counters(self, tmp_path: Path) -> None:
        calls: list[str] = []
        launcher, model = SpyLauncher(calls), SpyModel(calls)
        truth: list[tuple[int, int]] = []
        step = model.q_training_step
        model.__dict__["q_training_step"] = lambda batch: (
            truth.append((launcher.env_steps, launcher.episodes)),
            step(batch),
        )[1]
        trainer = trainer_of(run_dir=tmp_path, launcher=launcher)
        trainer.fit(Guess, replay(), model)
        assert [seen[:2] for seen in model.seen] == truth
        assert all(training for _, _, training in model.seen)
        assert truth[-1][0] > truth[0][0] > 0
        assert truth[-1][1] > truth[0][1]
        assert model.current_step == launcher.env_steps == trainer.env_steps
        assert model.current_episode == launcher.episodes
        assert model.device == torch.device("cpu")
        assert model.dtype == torch.float32
        assert model.log_every_env_steps == 16
        assert type(model.tensorboard).__name__ == "SummaryWriter"

    def test_i8_without_a_run_directory_there_is_no_writer(self) -> None:
        model = dqn()
        trainer_of().fit(Guess, replay(), model)
        assert model.tensorboard is None

    @pytest.mark.parametrize("lockstep", [True, False])
    def test_i14_evaluations_and_checkpoints_are_counted_exactly(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lockstep: bool
    ) -> None:
        """Step 0 does not count; the end does, once."""
        saved: list[int] = []
        save = checkpoint.save
        monkeypatch.setattr(
            checkpoint,
            "save",
            lambda d, step, *a, **k: (saved.append(step), save(d, step, *a, **k))[1],
        )
        calls: list[str] = []
        recorder = Recorder()
        # Treadmill: 21 rows of an unroll in 22 are env steps... so let no episode end: limit 10**6.
        env = partial(Treadmill, truncates=True, shows_step=False, limit=10**6)
        trainer = trainer_of(
            run_dir=tmp_path, launcher=SpyLauncher(calls), lockstep=lockstep, total_steps=96,
            evaluate_every_env_steps=24, checkpoint_every_env_steps=32, sinks=[recorder],
            evaluation={"episodes": 1, "step_limit": 5}, keep_last=2,
        )  # fmt: skip
        trainer.fit(env, replay(), dqn())
        assert trainer.env_steps == 96
        assert calls.count("evaluation") == 4
        assert recorder.steps("evaluation/return_mean") == [24, 48, 72, 96]
        # Without lockstep one that is due comes when what is being written has been.
        assert saved == [32, 64, 96] if lockstep else saved[-1] == 96
        assert all(step - due >= 0 for step, due in zip(saved, (32, 64, 96), strict=False))
        assert len(set(saved)) == len(saved) <= 3
        assert checkpoints(tmp_path) == saved[-2:]  # I5: keep_last
        assert recorder.steps("train/episodes") == [16, 32, 48, 64, 80, 96]

    def test_i14_no_steps_at_all(self, tmp_path: Path) -> None:
        recorder = Recorder()
        trainer = trainer_of(run_dir=tmp_path, total_steps=0, sinks=[recorder],
                             evaluate_every_env_steps=1, checkpoint_every_env_steps=1)  # fmt: skip
        metrics = trainer.fit(Guess, replay(), dqn())
        assert metrics.keys() == EVALUATION_KEYS
        assert recorder.steps("evaluation/return_mean") == [0]
        assert checkpoints(tmp_path) == [0]

    def test_p17_no_update_before_the_warm_up(self) -> None:
        model = SpyModel([])
        env = partial(Treadmill, truncates=True, shows_step=False, limit=10**6)
        trainer_of(total_steps=96, evaluation={"episodes": 1, "step_limit": 5}).fit(
            env, replay(warmup_env_steps=40), model
        )
        steps = [step for step, _, _ in model.seen]
        # 2 samples per insert, 8 in a batch: each unroll of 8 rows after the warm-up owes 2.
        assert steps == [step for step in range(48, 97, 8) for _ in range(2)]

    def test_published_weights_are_those_of_the_last_update(self) -> None:
        """In lockstep each unroll is made by the newest snapshot."""
        versions: list[tuple[int, int]] = []

        class Launcher(InlineLauncher):
            def gather(self, timeout: float, may_insert: Any) -> Iterator[Any]:
                for unroll in super().gather(timeout, may_insert):
                    versions.append((unroll.version, trainer.updates))
                    yield unroll

        trainer = trainer_of(launcher=Launcher(), publish_every_updates=1000)
        trainer.fit(Guess, replay(), dqn(epsilon=((0, 0.5),)))  # which publishes nothing by itself
        assert all(version == updates for version, updates in versions)
        assert versions[-1][0] > 0

    def test_p5_the_exponent_of_the_weights_is_1_at_the_end(self) -> None:
        recorder, buffer = Recorder(), replay(beta_updates=None, capacity=1024)
        trainer = trainer_of(total_steps=512, sinks=[recorder])
        trainer.fit(Guess, buffer, dqn())
        assert trainer.updates == pytest.approx((512 - 16) * 2 / 8, abs=3)
        assert buffer.beta == pytest.approx(1.0, abs=0.02)
        (halfway,) = [line["replay/beta"] for step, line in recorder.lines
                      if 256 <= step < 272 and "replay/beta" in line]  # fmt: skip
        assert halfway == pytest.approx(0.7, abs=0.03)

    def test_updates_hear_of_cores_that_workers_keep_busy(self) -> None:
        class Launcher(InlineLauncher):
            def busy_cores(self) -> int:
                return 3

        trainer = trainer_of(launcher=Launcher())
        trainer.fit(Guess, replay(), dqn())
        assert trainer._threads.busy_cores == 3

    def test_threads_and_the_learners_generator_come_back(self) -> None:
        before = torch.get_num_threads()
        seen = []

        class Model(DQN):
            def q_training_step(self, batch: Any) -> StepOutput:
                seen.append(torch.get_num_threads())
                return super().q_training_step(batch)

        torch.set_num_threads(2)
        try:
            trainer_of().fit(Guess, replay(), Model(hidden=(8,), batch_size=8))
            assert set(seen) == {1}
            assert torch.get_num_threads() == 2
            with pytest.raises(RuntimeError, match="sink"):
                trainer_of(sinks=[Recorder(at_step(1, fail))]).fit(Guess, replay(), dqn())
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)


class TestTwoTrainingSteps:
    def test_i20_another_model_class_fits_through_the_same_trainer(self) -> None:
        recorder, model = Recorder(), Regressor()
        trainer = trainer_of(total_steps=1200, samples_per_insert=8.0, sinks=[recorder],
                             evaluation={"episodes": 20})  # fmt: skip
        metrics = trainer.fit(Guess, replay(prioritized=False, capacity=2000), model)
        losses = [line["reward/loss"] for _, line in recorder.lines if "reward/loss" in line]
        assert losses[-1] < 0.7 * losses[0]
        assert metrics["evaluation/return_mean"] > 0.85 * metrics["evaluation/length_mean"]
        names = [name for name, _ in model.after_steps]
        assert names == ["reward", "next"] * trainer.updates
        assert [u for _, u in model.after_steps[::2]] == list(range(1, trainer.updates + 1))
        assert {
            "next/loss",
            "next/gradient_norm",
            "next/learning_rate",
            "reward/learning_rate",
        } <= (recorder.lines[-2][1].keys())

    @pytest.mark.parametrize(
        ("rates", "moving"),
        [((0.1, 0.0), "reward"), ((0.0, 0.1), "next"), ((0.0, 0.0), None)],
    )
    def test_i13_each_optimizer_moves_its_own_parameters(
        self, rates: tuple[float, float], moving: str | None
    ) -> None:
        model = Regressor(*rates)
        before: dict[str, torch.Tensor] = {}
        model.configure_optimizers = lambda: (  # type: ignore[method-assign]
            before.update(weights(model)) or Regressor.configure_optimizers(model)
        )
        trainer_of().fit(Guess, replay(prioritized=False), model)
        moved = {n.partition(".")[0] for n, w in weights(model).items() if (w != before[n]).any()}
        assert moved == ({moving} if moving else set())

    def test_i12_the_second_step_gets_what_the_first_carried(self) -> None:
        carried: list[Any] = []

        class Model(Regressor):
            def next_step(self, carry: Features) -> StepOutput:
                carried.append(carry)
                return super().next_step(carry)

        trainer = trainer_of()
        trainer.fit(Guess, replay(prioritized=False), Model())
        assert len(carried) == trainer.updates > 0
        assert all(isinstance(carry, Features) for carry in carried)

    def test_without_a_carry_the_next_step_gets_the_same(self) -> None:
        carried: list[Any] = []

        class Model(Regressor):
            def reward_step(self, batch: Any) -> StepOutput:
                carried.append(batch)
                output = super().reward_step(batch)
                return StepOutput(output.loss, output.metrics)

            def next_step(self, carry: Any) -> StepOutput:
                carried.append(carry)
                return super().next_step(
                    Features(self.reward(carry.observation["observation"]), carry)
                )

        trainer_of().fit(Guess, replay(prioritized=False), Model())
        assert carried
        assert all(a is b for a, b in zip(carried[::2], carried[1::2], strict=True))


# ------------------------------------------------------------------------------------- the log


class TestLog:
    def test_i4_i16_tensorboard_in_the_run_directory(self, tmp_path: Path) -> None:
        trainer_of(run_dir=tmp_path).fit(Guess, replay(), dqn())
        board = read_board(tmp_path)
        assert {"q/loss", "q/td_error", "q/value", "q/target", "q/gradient_norm",
                "q/learning_rate", "policy/epsilon", "replay/beta", "train/return_mean",
                "train/length_mean", "speed/updates_per_s"} <= board.keys()  # fmt: skip
        assert board.keys() >= EVALUATION_KEYS  # I16
        for tag, scalars in board.items():
            steps = [scalar.step for scalar in scalars]
            assert steps == sorted(set(steps)), tag
            if tag != "replay/samples_per_insert":  # there is none before the first insert
                assert all(np.isfinite(scalar.value) for scalar in scalars), tag
        assert len(board["q/loss"]) > 1

    def test_i4_tensorboard_in_a_directory_of_its_own(self, tmp_path: Path) -> None:
        trainer_of(tensorboard=tmp_path / "board").fit(Guess, replay(), dqn())
        assert "q/loss" in read_board(tmp_path / "board")
        assert os.listdir(tmp_path) == ["board"]

    def test_i4_a_writer_stays_its_owners(self, tmp_path: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        model = dqn()
        with SummaryWriter(str(tmp_path)) as writer:
            trainer_of(tensorboard=writer).fit(Guess, replay(), model)
            assert model.tensorboard is writer
            writer.add_scalar("mine/after", 1.0, 1)
        assert {"q/loss", "mine/after"} <= read_board(tmp_path).keys()

    def test_i18_lines_are_numbers(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trainer_of(run_dir=tmp_path, console="plain").fit(Guess, replay(), dqn())
        lines = read_lines(tmp_path)
        assert [line["env_steps"] for line in lines if "q/loss" in line][-1] >= 64
        for line in lines:
            assert all(v is None or isinstance(v, int | float) for v in line.values())
        output = capsys.readouterr()
        assert "tensor" not in output.err + output.out
        assert ", loss 0." in output.err

    def test_i17_plain_lines_where_there_is_no_terminal(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trainer_of(console="auto", log_every_env_steps=32).fit(Guess, replay(), dqn())
        output = capsys.readouterr()
        assert output.out == ""
        assert "\r" not in output.err
        lines = output.err.splitlines()
        assert all(" of 64 env steps (" in line for line in lines)
        assert 2 <= len(lines) <= 4

    def test_i17_off(self, capsys: pytest.CaptureFixture[str]) -> None:
        trainer_of(console="off").fit(Guess, replay(), dqn())
        assert capsys.readouterr() == ("", "")

    def test_i17_a_bar_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        chunks: list[bytes] = []

        def read() -> None:
            try:
                while chunk := os.read(master, 4096):
                    chunks.append(chunk)
            except OSError:  # as Linux says that the other end is closed
                pass

        reader = threading.Thread(target=read)
        reader.start()
        with os.fdopen(slave, "w") as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            handler = logging.StreamHandler(terminal)
            logging.root.addHandler(handler)
            try:
                log = Recorder(at_step(48, lambda: logging.getLogger("mine").warning("look here")))
                trainer_of(console="auto", sinks=[log]).fit(Guess, replay(), dqn())
            finally:
                logging.root.removeHandler(handler)
        reader.join(5)
        os.close(master)
        text = b"".join(chunks).decode()
        last = text.rstrip().split("\r")[-1]
        assert "100%" in last
        assert "/64.0 " in last
        assert "loss 0." in last
        # A log line stands alone: the bar is wiped before it and drawn again below.
        (line,) = [part for part in text.replace("\r", "\n").split("\n") if "look here" in part]
        assert line.strip() == "look here"

    def test_no_run_directory_writes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        trainer = trainer_of(evaluate_every_env_steps=16, checkpoint_every_env_steps=16)
        trainer.fit(Guess, replay(), dqn())
        assert os.listdir(tmp_path) == []
        assert not trainer.save_failed
        with pytest.raises(BadInput, match="run_dir=None"):
            trainer.save_checkpoint(dqn())


# -------------------------------------------------------------------------------- checkpoints


class TestLiveChanges:
    @staticmethod
    def asks(run_dir: Path, text: str) -> Callable[[], None]:
        return lambda: [None, (run_dir / "control.json").write_text(text)][0]

    def run(self, tmp_path: Path, text: str) -> tuple[Trainer, DQN, Recorder]:
        recorder = Recorder(at_step(32, self.asks(tmp_path, text)))
        trainer, model = trainer_of(run_dir=tmp_path, sinks=[recorder]), dqn()
        trainer.fit(Guess, replay(), model)
        return trainer, model, recorder

    def test_p6_a_change_is_made_logged_and_seen(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "actorlearner")
        text = '{"agent.learning_rate": 0.002, "trainer.gradient_clip_val": 0.5}'
        trainer, model, recorder = self.run(tmp_path, text)
        rates = [line["q/learning_rate"] for _, line in recorder.lines if "q/loss" in line]
        asked_at = next(i for i, (step, _) in enumerate(recorder.lines) if step >= 32)
        assert set(rates[:asked_at]) == {0.01}
        assert rates[-1] == 0.002
        assert model.configure_optimizers()["q"].param_groups[0]["lr"] == 0.002
        assert trainer.settings.gradient_clip_val == 0.5
        log = (tmp_path / "run.log").read_text()
        assert "control.json: agent.learning_rate is 0.002 from env step" in log

    def test_p6_a_resumed_run_reads_it_anew(self, tmp_path: Path) -> None:
        self.run(tmp_path, '{"agent.learning_rate": 0.002}')
        recorder = Recorder()
        resumed = trainer_of(
            run_dir=tmp_path, checkpoint=tmp_path, total_steps=96, sinks=[recorder]
        )
        resumed.fit(Guess, replay(), dqn())
        rates = {line["q/learning_rate"] for _, line in recorder.lines if "q/loss" in line}
        assert rates == {0.002}

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"agent.learning_rate": -1}', "agent.learning_rate=-1.0: must be at least 0"),
            ('{"agent.learning_rate": "x"}', "a number is needed"),
            ('{"agent.gamma": 0.9}', "agent.gamma: can't change during a run; these can: agent.l"),
            ('{"seed": 3}', "seed: keys read agent.name or trainer.name"),
            ('{"trainer.gradient_clip_val": 1, "agent.gamma": 0.9}', "agent.gamma: can't change"),
            ("{", "nothing was changed"),
        ],
    )
    def test_p6_what_can_not_be_changes_nothing(
        self, text: str, message: str, tmp_path: Path
    ) -> None:
        trainer, model, _ = self.run(tmp_path, text)
        assert trainer.env_steps >= 64
        assert model.settings == dqn().settings
        assert trainer.settings.gradient_clip_val == 10.0
        log = (tmp_path / "run.log").read_text()
        assert message in log
        assert log.count("nothing was changed") == 1


class TestCheckpoints:
    def fitted(self, tmp_path: Path, **changes: Any) -> tuple[Trainer, DQN]:
        trainer, model = trainer_of(run_dir=tmp_path, **changes), dqn()
        trainer.fit(Guess, replay(), model)
        return trainer, model

    def test_i5_files_of_a_run(self, tmp_path: Path) -> None:
        self.fitted(tmp_path, checkpoint_every_env_steps=16, keep_last=2)
        names = {path.name for path in tmp_path.iterdir() if not path.name.startswith("events.")}
        assert names == {"checkpoints", "config.yaml", "config_unresolved.yaml", "metrics.jsonl",
                         "run.log"}  # fmt: skip
        assert len(checkpoints(tmp_path)) == 2
        where = checkpoint.find(tmp_path)
        manifest = checkpoint.read_manifest(where)
        assert manifest.states == {"agent", "optimizers", "progress", "log", "replay"}  # I9
        assert manifest.info["agent"] == "actorlearner.agents.dqn:DQN"
        assert manifest.info["env"]["name"] == "Guess"
        assert manifest.info["lockstep"] is True
        assert manifest.versions["actorlearner"]

    def test_i5_the_source_may_be_a_run_a_checkpoint_or_a_file(self, tmp_path: Path) -> None:
        _, model = self.fitted(tmp_path)
        where = checkpoint.find(tmp_path)
        for source in (tmp_path, where, where / "agent.safetensors", str(tmp_path)):
            other = dqn()
            trainer_of(checkpoint=source).evaluation(Guess, other)
            assert differences(model.state_dict(), other.state_dict()) == []

    def test_i10_everything_is_restored_exactly(self, tmp_path: Path) -> None:
        first, model = self.fitted(tmp_path)
        kept = everything(first, model)
        states = checkpoint.load(checkpoint.find(tmp_path), ["agent", "optimizers", "progress"])
        assert differences(kept["agent"], states["agent"]) == []
        assert differences(kept["optimizers"], states["optimizers"]) == []
        moments = kept["optimizers"]["q"]["state"]
        assert any(m["exp_avg"].abs().sum() > 0 for m in moments.values())
        second, other = trainer_of(checkpoint=tmp_path), dqn()
        second.fit(Guess, replay(), other)  # which has nothing left to do
        assert second.updates == first.updates > 0
        assert differences(kept, everything(second, other)) == []

    def test_i10_by_name_save_and_load(self, tmp_path: Path) -> None:
        trainer, model = self.fitted(tmp_path)
        kept = {name: (w.clone() if isinstance(w, torch.Tensor) else w)
                for name, w in model.state_dict().items()}  # fmt: skip
        where = trainer.save_checkpoint(model)
        assert where == checkpoint.find(tmp_path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        trainer.checkpoint = where
        trainer.load_checkpoint(model)
        assert differences(kept, model.state_dict()) == []

    def test_i10_a_run_in_two_parts_is_the_run_in_one(self, tmp_path: Path) -> None:
        """Bit-equal: weights, moments, replay, counters, limiter, schedules, generators."""

        class Noisy(DQN):
            def q_training_step(self, batch: Any) -> StepOutput:
                output = super().q_training_step(batch)
                noise = torch.rand(()) * random.random() * np.random.random()
                return replace(output, loss=output.loss * noise)

        def fit(name: str, **changes: Any) -> tuple[Trainer, DQN]:
            trainer = trainer_of(run_dir=tmp_path / name, **changes)
            trainer.fit(Guess, replay(), model := Noisy(hidden=(8,), batch_size=8))
            return trainer, model

        whole, model = fit("whole", total_steps=160)
        first, other = fit("parts", total_steps=80)
        assert differences(everything(whole, model), everything(first, other)) != []
        torch.manual_seed(12345)  # what the process did before does not matter
        second, other = fit("parts", total_steps=160, checkpoint=tmp_path / "parts")
        assert whole.updates == second.updates > first.updates > 0
        assert differences(everything(whole, model), everything(second, other)) == []

    def test_i10_so_is_an_interrupted_one(self, tmp_path: Path) -> None:
        changes = {"total_steps": 160, "envs_per_worker": 2, "evaluate_every_env_steps": 48}
        whole, model = self.fitted(tmp_path / "whole", **changes)
        changes["run_dir"] = tmp_path / "parts"
        for step in (50, 110):
            source = tmp_path / "parts" if step > 50 else None
            recorder = Recorder(at_step(step, interrupt))
            with pytest.raises(KeyboardInterrupt):
                trainer_of(**changes, sinks=[recorder], checkpoint=source).fit(
                    Guess, replay(), dqn()
                )
        second, other = trainer_of(**changes, checkpoint=tmp_path / "parts"), dqn()
        second.fit(Guess, replay(), other)
        assert differences(everything(whole, model), everything(second, other)) == []
        # I11: one line per step and kind, in files and on the board.
        lines = read_lines(tmp_path / "parts")
        for name in ("train/episodes", "evaluation/return_mean"):
            steps, in_whole = (
                [line["env_steps"] for line in read_lines(run_dir) if name in line]
                for run_dir in (tmp_path / "parts", tmp_path / "whole")
            )
            assert steps == in_whole
            assert len(steps) > 3
        for tag, scalars in read_board(tmp_path / "parts").items():
            on_board = [scalar.step for scalar in scalars]
            assert on_board == sorted(set(on_board)), tag
        assert lines[-1]["wall_s"] > 0
        assert [line["wall_s"] for line in lines] == sorted(line["wall_s"] for line in lines)

    def test_i10_so_is_one_that_failed_within_a_round(self, tmp_path: Path) -> None:
        """Worker 0 had delivered: what is saved is the round before."""

        class Breaks(Guess):
            built = fails_at = 0

            def __init__(self) -> None:
                super().__init__()
                Breaks.built += 1
                self.of_worker_1 = Breaks.built == 3  # the first is the probe's
                self.steps = 0

            def step(self, action: Any) -> Any:
                self.steps += 1
                if self.of_worker_1 and self.steps == Breaks.fails_at:
                    raise ZeroDivisionError("in the third round")
                return super().step(action)

        def fit(name: str, fails_at: int, **changes: Any) -> dict[str, Any]:
            Breaks.built, Breaks.fails_at = 0, fails_at
            changes = {"workers": 2, "launcher": InlineLauncher(), **changes}
            trainer, model = trainer_of(run_dir=tmp_path / name, total_steps=128, **changes), dqn()
            if fails_at:
                with pytest.raises(WorkerError, match=r"worker 1 .* in the third round"):
                    trainer.fit(Breaks, replay(), model)
                going_on = trainer._progress.ledger.going_on
                assert [going_on((stream,))[0] for stream in (0, 1)] == [2, 2]
                assert trainer.updates > 0
            else:
                trainer.fit(Breaks, replay(), model)
            return everything(trainer, model)

        whole = fit("whole", 0)
        fit("parts", 18)
        assert differences(whole, fit("parts", 0, checkpoint=tmp_path / "parts")) == []

    @pytest.mark.parametrize("is_pending", [True, False])
    def test_an_evaluation_that_was_running_is_made_up(
        self, tmp_path: Path, is_pending: bool
    ) -> None:
        """At the next chance after a resume; one that was finished is not made twice."""

        class Launcher(InlineLauncher):
            def poll_evaluation(self, timeout: float = 0.0) -> Any:
                return None if is_pending and not timeout else super().poll_evaluation()

        env = partial(Treadmill, truncates=True, shows_step=False, limit=10**6)
        changes: dict[str, Any] = {
            "run_dir": tmp_path, "lockstep": False, "evaluate_every_env_steps": 32,
            "log_every_env_steps": 8, "evaluation": {"episodes": 1, "step_limit": 5},
        }  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            trainer_of(
                **changes, launcher=Launcher(), sinks=[Recorder(at_step(48, interrupt))]
            ).fit(env, replay(), dqn())
        assert checkpoints(tmp_path) == [48]
        recorder = Recorder()
        changes |= {"checkpoint": tmp_path, "sinks": [recorder], "total_steps": 80}
        trainer_of(**changes).fit(env, replay(), dqn())
        assert recorder.steps("evaluation/return_mean") == [56, 64, 80][not is_pending :]

    def test_streams_that_start_anew_are_told_at_once_and_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Moody(Guess):
            mood = 0

            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                return super().reset(seed=None if seed is None else seed + Moody.mood)

        trainer_of(run_dir=tmp_path).fit(Moody, replay(), dqn())
        Moody.mood = 1
        told: list[int] = []
        sink = Recorder(at_step(0, lambda: told.append(caplog.text.count("started anew"))))
        trainer_of(checkpoint=tmp_path, total_steps=128, sinks=[sink]).fit(Moody, replay(), dqn())
        assert told == [1]
        assert caplog.text.count("Moody gave other observations when streams [0] repeated") == 1

    def test_environments_go_on_from_their_own_state(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One whose episodes follow from no seed; only what it tells brings them back."""

        class Moody(Treadmill):
            mood = 0.0

            def __init__(self) -> None:
                super().__init__(truncates=True, shows_step=False, limit=10**6)
                self._mood = Moody.mood

            def _observe(self) -> Any:
                return super()._observe() * self._mood

            def get_state(self) -> Any:
                return [self._mood, self._step]

            def set_state(self, state: Any) -> None:
                self._mood, self._step = state

        def run(**changes: Any) -> dict[str, Any]:
            model = dqn()
            trainer_of(evaluation={"episodes": 1, "step_limit": 5}, **changes).fit(
                Moody, replay(), model
            )
            return model.state_dict()

        Moody.mood = 0.5
        wanted = run()
        run(run_dir=tmp_path, total_steps=32)
        Moody.mood = 0.75  # what is made from now on is another
        torch.testing.assert_close(run(checkpoint=tmp_path), wanted, rtol=0, atol=0)
        assert "Moody" not in "".join(m for m in caplog.messages if "Training" not in m)

    def test_i11_the_log_goes_on_from_the_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A run that was killed had logged more than its last checkpoint knows."""
        env = partial(Treadmill, truncates=True, shows_step=False, limit=10**6)
        changes = {"run_dir": tmp_path, "checkpoint_every_env_steps": 32, "log_every_env_steps": 8,
                   "evaluation": {"episodes": 1, "step_limit": 5}}  # fmt: skip
        save, saved = checkpoint.save, []

        def save_once(*arguments: Any, **more: Any) -> Path:
            if saved:
                raise OSError(28, "No space left on device")
            saved.append(save(*arguments, **more))
            return saved[0]

        monkeypatch.setattr(checkpoint, "save", save_once)
        with pytest.raises(RuntimeError, match="sink"):
            trainer_of(**changes, sinks=[Recorder(at_step(56, fail))]).fit(env, replay(), dqn())
        monkeypatch.setattr(checkpoint, "save", save)
        assert checkpoints(tmp_path) == [32]
        assert [line["env_steps"] for line in read_lines(tmp_path)][-1] == 48
        recorder = Recorder()
        trainer_of(**changes, checkpoint=tmp_path, sinks=[recorder]).fit(env, replay(), dqn())
        assert recorder.steps("train/episodes") == [40, 48, 56, 64]
        steps = [line["env_steps"] for line in read_lines(tmp_path) if "train/episodes" in line]
        assert steps == list(range(8, 65, 8))
        scalars = read_board(tmp_path)["train/episodes"]
        assert [scalar.step for scalar in scalars] == list(range(8, 65, 8))

    def test_a_learning_rate_changed_on_resume_counts(self, tmp_path: Path) -> None:
        self.fitted(tmp_path)
        recorder = Recorder()
        trainer = trainer_of(checkpoint=tmp_path, total_steps=96, sinks=[recorder])
        trainer.fit(Guess, replay(), dqn(learning_rate=0.25))
        assert {line["q/learning_rate"] for _, line in recorder.lines if "q/loss" in line} == {0.25}
        moments = trainer._optimizers["q"].state_dict()["state"][0]
        assert int(moments["step"]) == trainer.updates  # the rest goes on

    def test_so_do_other_options_of_an_optimizer(self, tmp_path: Path) -> None:
        self.fitted(tmp_path)
        trainer = trainer_of(checkpoint=tmp_path, total_steps=96)
        trainer.fit(Guess, replay(), dqn(adam_epsilon=0.25))
        (group,) = trainer._optimizers["q"].param_groups
        assert group["eps"] == 0.25

    def test_a_learning_rate_that_the_agent_leaves_alone_goes_on(self, tmp_path: Path) -> None:
        """It may be on a schedule of torch's."""
        buffers = [replay(prioritized=False) for _ in range(2)]
        trainer_of(run_dir=tmp_path).fit(Guess, buffers[0], Regressor(reward_lr=0.1))
        trainer = trainer_of(checkpoint=tmp_path, total_steps=96)
        trainer.fit(Guess, buffers[1], Regressor(reward_lr=0.2))
        assert trainer._optimizers["reward"].param_groups[0]["lr"] == 0.1

    def test_without_replay_the_warm_up_begins_anew(self, tmp_path: Path) -> None:
        trainer_of(run_dir=tmp_path, lockstep=False).fit(Guess, replay(save=False), dqn())
        assert "replay" not in checkpoint.read_manifest(checkpoint.find(tmp_path)).states
        trainer = trainer_of(run_dir=tmp_path, checkpoint=tmp_path, total_steps=128)
        start = checkpoints(tmp_path)[-1]
        trainer.fit(Guess, replay(), dqn())
        assert trainer.updates > 0
        limiter = trainer._progress.limiter.state_dict()
        assert limiter["inserted"] == trainer.env_steps - start - 16
        assert abs(limiter["sampled"] - 2 * limiter["inserted"]) < 8

    def test_a_fresh_run_refuses_a_used_directory(self, tmp_path: Path) -> None:
        self.fitted(tmp_path)
        before = sorted(path.name for path in tmp_path.iterdir())
        model = dqn()
        with pytest.raises(CheckpointError, match=r"holds the checkpoints of another run.*resume="):
            trainer_of(run_dir=tmp_path).fit(Guess, replay(), model)
        assert not hasattr(model, "online")
        assert sorted(path.name for path in tmp_path.iterdir()) == before

    def test_a_full_disk_ends_no_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def full(*arguments: Any, **more: Any) -> Path:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoint, "save", full)
        trainer, model = trainer_of(run_dir=tmp_path, checkpoint_every_env_steps=16), dqn()
        assert trainer.fit(Guess, replay(), model).keys() == EVALUATION_KEYS
        assert trainer.save_failed
        assert not trainer.is_saved
        assert trainer.env_steps >= 64
        assert "no checkpoint was written, training goes on" in caplog.text

    def test_a_later_save_mends_a_failed_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save, failed = checkpoint.save, []

        def full_once(*arguments: Any, **more: Any) -> Path:
            if not failed:
                failed.append(True)
                raise OSError(28, "No space left on device")
            return save(*arguments, **more)

        monkeypatch.setattr(checkpoint, "save", full_once)
        trainer, _ = self.fitted(tmp_path, checkpoint_every_env_steps=16)
        assert failed
        assert not trainer.save_failed
        assert trainer.is_saved

    @pytest.mark.parametrize("source", ["fit", "evaluation"])
    def test_foreign_checkpoints_are_refused(self, tmp_path: Path, source: str) -> None:
        self.fitted(tmp_path)

        def use(env: Any, model: Any) -> None:
            trainer = trainer_of(checkpoint=tmp_path)
            if source == "fit":
                trainer.fit(env, replay(), model)
            else:
                trainer.evaluation(env, model)

        with pytest.raises(
            CheckpointError, match=r"holds actorlearner.agents.dqn:DQN, not .*:Regressor"
        ):
            use(Guess, Regressor())
        with pytest.raises(CheckpointError, match=r"(?s)other agent settings: .*size mismatch"):
            use(Guess, dqn(hidden=(9,)))
        wide = partial(Treadmill, truncates=True, shows_step=True)
        with pytest.raises(CheckpointError, match="was trained on Guess"):
            use(wide, dqn())

    def test_a_state_of_another_version_is_named(self, tmp_path: Path) -> None:
        model = dqn()
        trainer_of(run_dir=tmp_path).fit(Guess, replay(), model)

        class Older(ReplayBuffer):
            def load_state_dict(self, state: Any) -> None:
                super().load_state_dict({k: v for k, v in state.items() if k != "ring"})

        older = Older(capacity=1_000)
        with pytest.raises(CheckpointError, match=r"KeyError: 'ring'.*the run can't go on"):
            trainer_of(checkpoint=tmp_path).fit(Guess, older, dqn())

    def test_a_missing_checkpoint_is_named(self, tmp_path: Path) -> None:
        for use in (
            lambda t: t.fit(Guess, replay(), dqn()),
            lambda t: t.evaluation(Guess, dqn()),
        ):
            with pytest.raises(CheckpointError, match=f"{tmp_path}/none: there is no such file"):
                use(trainer_of(checkpoint=tmp_path / "none"))


class TestEvaluation:
    def test_i15_changes_nothing_and_repeats(self, tmp_path: Path) -> None:
        trainer_of(run_dir=tmp_path).fit(Guess, replay(), trained := dqn())
        files = sorted(tmp_path.rglob("*"))
        model = dqn()
        model.configure_optimizers = fail  # type: ignore[assignment]
        trainer = trainer_of(checkpoint=tmp_path, run_dir=tmp_path, evaluation={"episodes": 9})
        metrics = trainer.evaluation(Guess, model)
        assert differences(trained.state_dict(), model.state_dict()) == []
        assert metrics.keys() == EVALUATION_KEYS
        assert metrics["evaluation/episodes"] == 9.0
        before = weights(model)
        assert trainer.evaluation(Guess, model) == metrics
        assert differences(before, model.state_dict()) == []
        assert sorted(tmp_path.rglob("*")) == files
        another = trainer_of(checkpoint=tmp_path, evaluation={"episodes": 9, "seed": 1})
        assert another.evaluation(Guess, dqn()) != metrics

    def test_i15_the_model_has_its_attributes(self, tmp_path: Path) -> None:
        trainer_of(run_dir=tmp_path).fit(Guess, replay(), dqn())
        model = dqn()
        trainer_of(checkpoint=tmp_path).evaluation(Guess, model)
        assert model.device == torch.device("cpu")
        assert model.dtype == torch.float32
        assert model.tensorboard is None
        assert not model.training

    def test_i15_after_a_fit_with_the_same_trainer(self, tmp_path: Path) -> None:
        trainer, model = trainer_of(run_dir=tmp_path), dqn()
        fitted = trainer.fit(Guess, replay(), model)
        trainer.checkpoint = tmp_path
        assert trainer.evaluation(Guess, model) == fitted

    def test_i15_builds_no_environment_in_vain(self, tmp_path: Path) -> None:
        class Counts(Guess):
            built = 0

            def __init__(self) -> None:
                super().__init__()
                Counts.built += 1

        changes = {"envs_per_worker": 32, "total_steps": 0, "evaluation": {"episodes": 3}}
        trainer_of(run_dir=tmp_path, **changes).fit(Counts, replay(capacity=512), dqn())
        Counts.built = 0
        trainer_of(checkpoint=tmp_path, **changes).evaluation(Counts, dqn())
        assert Counts.built <= 3 + 2  # one to look at, one of the worker that does not train

    def test_i15_needs_a_checkpoint(self) -> None:
        with pytest.raises(CheckpointError, match="evaluation needs checkpoint="):
            trainer_of().evaluation(Guess, dqn())

    def test_i15_another_environment_of_the_same_spaces_is_welcome(self, tmp_path: Path) -> None:
        trainer_of(run_dir=tmp_path).fit(Guess, replay(), dqn())

        class Harder(Guess):
            pass

        assert trainer_of(checkpoint=tmp_path).evaluation(Harder, dqn()).keys() == EVALUATION_KEYS
        with pytest.raises(
            CheckpointError, match=r"was trained on Guess, .* that of Harder is Harder"
        ):
            trainer_of(checkpoint=tmp_path).fit(Harder, replay(), dqn())

    def test_x5_evaluating_does_not_disturb_the_training(self) -> None:
        results = []
        for every in (0, 8):
            trainer, model = trainer_of(evaluate_every_env_steps=every), dqn()
            trainer.fit(Guess, replay(), model)
            results.append(everything(trainer, model))
            for result in results:
                result["progress"]["parts"].pop("evaluation_clock", None)
        assert differences(*results) == []

    def test_only_while_fit_runs(self) -> None:
        """`evaluate` by name, from a sink: the same numbers as the line of the log."""
        got = []
        model = dqn()
        recorder = Recorder(at_step(16, lambda: got.append(trainer.evaluate(model))))
        trainer = trainer_of(sinks=[recorder])
        trainer.fit(Guess, replay(), model)
        assert got[0].keys() == EVALUATION_KEYS


# ------------------------------------------------------------------------------ how it can end


class TestEnds:
    @pytest.mark.parametrize(
        ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
    )
    def test_i21_a_signal_saves_closes_and_is_raised(
        self, tmp_path: Path, number: signal.Signals, kind: type[BaseException]
    ) -> None:
        before = signal.getsignal(number)
        sink = Recorder(at_step(30, lambda: signal.raise_signal(number)))
        trainer = trainer_of(run_dir=tmp_path, sinks=[sink])
        with pytest.raises(kind) as caught:
            trainer.fit(Guess, replay(), dqn())
        assert checkpoints(tmp_path) == [trainer.env_steps]
        assert 30 <= trainer.env_steps < 64
        assert trainer.is_saved
        assert getattr(caught.value, "code", 143) == 143
        assert signal.getsignal(number) == before
        assert not [h for h in logging.getLogger("actorlearner").handlers
                    if isinstance(h, logging.FileHandler)]  # fmt: skip

    def test_i21_a_signal_before_the_first_step_ends_it_at_once(self, tmp_path: Path) -> None:
        class Model(DQN):
            def configure_optimizers(self) -> Any:
                interrupt()
                raise AssertionError("the signal should have ended it")

        trainer = trainer_of(run_dir=tmp_path)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(Guess, replay(), Model(hidden=(8,), batch_size=8))
        assert os.listdir(tmp_path) == []

    def test_i21_leaves_no_child(self, tmp_path: Path) -> None:
        sink = Recorder(at_step(40, interrupt))
        trainer = trainer_of(workers=2, lockstep=False, run_dir=tmp_path, sinks=[sink],
                             total_steps=100_000, log_every_env_steps=8)  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(Guess, replay(capacity=50_000), dqn())
        assert multiprocessing.active_children() == []
        assert checkpoints(tmp_path) == [trainer.env_steps]

    def test_i21_a_second_signal_ends_at_once_and_saves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def insist() -> None:
            interrupt()
            later = time.monotonic() + 60
            monkeypatch.setattr(interrupts.time, "monotonic", lambda: later)
            interrupt()
            raise AssertionError("the second signal should have ended it")

        trainer = trainer_of(run_dir=tmp_path, sinks=[Recorder(at_step(30, insist))])
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(Guess, replay(), dqn())
        assert checkpoints(tmp_path) == []
        assert not trainer.is_saved

    def test_i21_an_error_outside_an_update_saves_and_is_raised(self, tmp_path: Path) -> None:
        trainer = trainer_of(run_dir=tmp_path, sinks=[Recorder(at_step(30, fail))])
        with pytest.raises(RuntimeError, match="the sink failed"):
            trainer.fit(Guess, replay(), dqn())
        assert checkpoints(tmp_path) == [trainer.env_steps]

    def test_i21_so_does_the_failure_of_an_environment(self, tmp_path: Path) -> None:
        class Breaks(Guess):
            total = 0

            def step(self, action: Any) -> Any:
                Breaks.total += 1
                if Breaks.total == 40:
                    raise ZeroDivisionError("in step 40")
                return super().step(action)

        trainer = trainer_of(run_dir=tmp_path)
        with pytest.raises(WorkerError, match=r"worker 0 \(Breaks\) failed in step: ZeroDivision"):
            trainer.fit(Breaks, replay(), dqn())
        assert checkpoints(tmp_path) == [trainer.env_steps]
        assert 0 < trainer.env_steps < 40

    def test_i21_an_error_inside_an_update_saves_nothing(self, tmp_path: Path) -> None:
        class Fails(DQN):
            def q_training_step(self, batch: Any) -> StepOutput:
                if self.current_step > 40:
                    raise ZeroDivisionError("in the loss")
                return super().q_training_step(batch)

        trainer = trainer_of(run_dir=tmp_path, checkpoint_every_env_steps=24)
        with pytest.raises(ZeroDivisionError, match="in the loss"):
            trainer.fit(Guess, replay(), Fails(hidden=(8,), batch_size=8))
        (stands,) = checkpoints(tmp_path)
        assert 24 <= stands <= 40 < trainer.env_steps

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_loss_that_is_not_finite(self, tmp_path: Path, value: float) -> None:
        kept: list[dict[str, torch.Tensor]] = []

        class Explodes(DQN):
            def q_training_step(self, batch: Any) -> StepOutput:
                output = super().q_training_step(batch)
                if self.current_step > 40:
                    kept.append(weights(self))
                    output.loss = output.loss * value
                return output

        trainer = trainer_of(run_dir=tmp_path, checkpoint_every_env_steps=24)
        model = Explodes(hidden=(8,), batch_size=8)
        with pytest.raises(NonFiniteError, match=rf"^q/loss is {value:g} .* in update") as caught:
            trainer.fit(Guess, replay(), model)
        assert f"in update {trainer.updates + 1};" in str(caught.value)
        assert "this step was not made" in str(caught.value)
        assert differences(kept[0], model.state_dict()) == []
        (stands,) = checkpoints(tmp_path)
        assert stands <= 40

    def test_a_gradient_that_is_not_finite(self) -> None:
        class Explodes(DQN):
            def q_training_step(self, batch: Any) -> StepOutput:
                output = super().q_training_step(batch)
                # Finite, but the root of 0 has no finite slope.
                output.loss = output.loss + (output.loss - output.loss.detach()).sqrt()
                return output

        trainer = trainer_of(gradient_clip_val=None)
        with pytest.raises(NonFiniteError, match=r"gradient's norm (nan|inf) in update 1;"):
            trainer.fit(Guess, replay(), Explodes(hidden=(8,), batch_size=8))

    def test_a_trainer_can_fit_again(self, tmp_path: Path) -> None:
        trainer = trainer_of(run_dir=tmp_path)
        trainer.fit(Guess, replay(), first := dqn())
        with pytest.raises(CheckpointError, match="another run"):
            trainer.fit(Guess, replay(), dqn())
        trainer = trainer_of()
        trainer.fit(Guess, replay(), second := dqn())
        trainer.fit(Guess, replay(), third := dqn())
        assert differences(first.state_dict(), second.state_dict()) == []
        assert differences(first.state_dict(), third.state_dict()) == []


# -------------------------------------------------------------------------------- determinism


class TestDeterminism:
    def run(self, env: Any = Guess, **changes: Any) -> dict[str, Any]:
        trainer, model = trainer_of(total_steps=96, **changes), dqn()
        trainer.fit(env, replay(), model)
        return everything(trainer, model)

    def test_x7_one_seed_gives_the_same_bits_another_does_not(self) -> None:
        first, second, other = self.run(seed=1), self.run(seed=1), self.run(seed=2)
        assert differences(first, second) == []
        assert differences(first["agent"], other["agent"]) != []
        increments = [r["replay"]["generator"]["state"]["inc"] for r in (first, other)]
        assert increments[0] != increments[1]  # the store is seeded too

    def test_x7_an_environment_that_draws_from_global_generators_does_no_harm(self) -> None:
        calm, noisy = self.run(), self.run(partial(Guess, uses_global_random=True))
        for part in ("agent", "optimizers", "replay"):
            assert differences(calm[part], noisy[part]) == []

    @pytest.mark.parametrize("workers", [1, 2])
    def test_x7_with_worker_processes(self, workers: int) -> None:
        settings = {"workers": workers, "envs_per_worker": 2, "unroll_length": 4}
        first, second = (self.run(**settings) for _ in range(2))
        assert differences(first, second) == []


# ------------------------------------------------------------------------ actors and learner


class Slow(DQN):
    """Each update takes a while."""

    sleep_s = 0.0

    def q_training_step(self, batch: Any) -> StepOutput:
        began = time.monotonic()
        time.sleep(self.sleep_s)
        self.__dict__.setdefault("spans", []).append((began, time.monotonic()))
        return super().q_training_step(batch)


class TestOverlap:
    def fit(self, env_s: float, update_s: float, total: int, target: float = 1.0) -> Any:
        started: list[float] = []

        class Launcher(LocalLauncher):
            def gather(self, timeout: float, may_insert: Any) -> Iterator[Any]:
                for unroll in super().gather(timeout, may_insert):
                    started.append(unroll.started_at)
                    yield unroll

        model, recorder = Slow(hidden=(8,), batch_size=8), Recorder()
        model.sleep_s = update_s
        trainer = trainer_of(
            workers=2, unroll_length=4, lockstep=False, total_steps=total, sinks=[recorder],
            samples_per_insert=target, log_every_env_steps=100, launcher=Launcher(),
        )  # fmt: skip
        trainer.fit(partial(Guess, sleep_s=env_s), replay(capacity=4096), model)
        return trainer, model, recorder, started

    @pytest.mark.parametrize(
        ("env_s", "update_s", "total", "target"),
        [(0.002, 0.0, 1000, 2.0), (0.0, 0.005, 1000, 1.0)],
        ids=["slow environment", "slow learner"],
    )
    def test_x2_samples_per_insert_hold_whichever_side_is_slow(
        self, env_s: float, update_s: float, total: int, target: float
    ) -> None:
        """E.1 item 11; policy lag is measured and bounded."""
        trainer, model, recorder, started = self.fit(env_s, update_s, total, target)
        sampled, inserted = trainer.updates * 8, trainer.env_steps - 16
        assert len(model.spans) == trainer.updates
        assert abs(sampled / (target * inserted) - 1) <= 0.05
        lines = [line for _, line in recorder.lines if "policy/lag_mean" in line]
        assert len(lines) > 3
        # At most 2 slots of 2 workers wait, each with 4 rows: what is learned meanwhile is bounded.
        in_flight = 2 * 2 * 4
        bound = (in_flight + 2 * 8) * target / 8 + in_flight
        for line in lines:
            assert 0 <= line["policy/lag_mean"] <= line["policy/lag_max"] <= bound
        if update_s:  # actors act while the learner learns
            spans = np.array(model.spans)
            during = [((spans[:, 0] < at) & (at < spans[:, 1])).any() for at in started]
            assert sum(during) > 0.2 * len(started)
            assert lines[-1]["worker/slots"] + lines[-1]["worker/limiter"] > 0.2


def test_a_spec_from_before_arrays_had_bounds() -> None:
    """Their checkpoints stay good."""
    noted = json.loads(json.dumps(asdict(vector_spec())))
    older = copy.deepcopy(noted)
    for spec in (older["action"], *older["observation"].values()):
        del spec["low"], spec["high"]
    for part in ("name", "action", "observation"):
        assert runstate._with_bounds(part, older[part]) == noted[part]
        assert runstate._with_bounds(part, noted[part]) == noted[part]
    assert runstate._with_bounds("action", None) is None
