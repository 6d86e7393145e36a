"""A run with one slow part says at its end what it waited for, and which setting to change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actorlearner.contracts import Batch, SampleSpec, StepOutput, Unroll
from actorlearner.cores import CoreMeter, CoreSeconds
from actorlearner.launch.inline import InlineLauncher
from actorlearner.replay import ReplayBuffer
from actorlearner.trainer import Trainer
from tests.tiny import Guess, Regressor, RegressorPolicy, SlowPolicy


class SlowStore(ReplayBuffer):
    """Takes its time to sample, to take feedback, or to give its state to a checkpoint."""

    def __init__(
        self, sample_s: float = 0.0, feedback_s: float = 0.0, state_s: float = 0.0
    ) -> None:
        super().__init__(capacity=256, warmup_env_steps=8, prioritized=False)
        self._sample_s, self._feedback_s, self._state_s = sample_s, feedback_s, state_s

    def feed_back(self, keys: Any, feedback: Any) -> None:
        time.sleep(self._feedback_s)

    def sample(self) -> Any:
        time.sleep(self._sample_s)
        return super().sample()

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self._state_s)
        return super().state_dict()


class SlowAgent(Regressor):
    """Takes its time to update, or has a policy that does to act."""

    def __init__(
        self,
        update_s: float = 0.0,
        batch_size: int = 8,
        policy: type[RegressorPolicy] = RegressorPolicy,
    ) -> None:
        super().__init__()
        self._update_s, self._batch_size, self._policy = update_s, batch_size, policy

    @property
    def sample_spec(self) -> SampleSpec:
        return SampleSpec(self._batch_size)

    def policy_factory(self, extras: Sequence[str] = ()) -> type[RegressorPolicy]:
        return self._policy

    def reward_step(self, batch: Batch) -> StepOutput:
        time.sleep(self._update_s)
        output = super().reward_step(batch)
        return replace(output, feedback={"priority": batch.reward})


SLOW_ENV: dict[str, Any] = {"env": partial(Guess, sleep_s=0.005)}
SLOW_POLICY: dict[str, Any] = {"model": partial(SlowAgent, policy=SlowPolicy)}
# Four unrolls make an update, and one slot has room for one: then each waits for the other.
FEW_SLOTS: dict[str, Any] = {
    "env": partial(Guess, sleep_s=0.002),
    "model": partial(SlowAgent, update_s=0.06, batch_size=32),
    "launch": {"slots": 1},
    "total_steps": 128,
}
IN_TURNS: dict[str, Any] = {
    **FEW_SLOTS,
    "model": partial(SlowAgent, update_s=0.03, batch_size=32),
    "lockstep": True,
}
TIGHT_LIMITER: dict[str, Any] = {"samples_per_insert": 16.0}
SLOW_SAMPLE: dict[str, Any] = {"replay_buffer": partial(SlowStore, sample_s=0.03)}
SLOW_FEEDBACK: dict[str, Any] = {"replay_buffer": partial(SlowStore, feedback_s=0.03)}
SLOW_UPDATE: dict[str, Any] = {"model": partial(SlowAgent, update_s=0.03)}
SLOW_CHECKPOINT: dict[str, Any] = {
    "replay_buffer": partial(SlowStore, state_s=0.02),
    "checkpoint_every_env_steps": 8,
    "lockstep": True,  # else one that is due while another is written waits for no one
}


@pytest.fixture(scope="module", autouse=True)
def _first_update() -> None:
    """In the first update of a process torch loads hundreds of modules: as long as a run here."""
    trainer = Trainer(
        workers=0, unroll_length=8, device="cpu", console="off", tensorboard=Nowhere(),
        total_steps=16, run_dir=None, evaluation={"episodes": 1, "step_limit": 1},
    )  # fmt: skip
    trainer.fit(Guess, SlowStore(), SlowAgent())
    assert trainer.updates


@pytest.mark.parametrize(
    ("workers", "slow", "says", "setting"),
    [
        (0, SLOW_ENV, "Environments took", "workers="),
        (0, SLOW_POLICY, "The policy took", "envs_per_worker="),
        (0, TIGHT_LIMITER, "samples_per_insert asked for", "samples_per_insert="),
        (0, SLOW_SAMPLE, "The replay took", "samples_per_insert="),
        (0, SLOW_UPDATE, "Updates took", "samples_per_insert="),
        (0, SLOW_CHECKPOINT, "Checkpoints took", "trainer.checkpoint_every_env_steps="),
        (1, SLOW_ENV, "Environments took", "workers="),
        (1, SLOW_POLICY, "The policy took", "envs_per_worker="),
        (1, FEW_SLOTS, "Workers waited for a free slot", "launch.slots="),
        (1, IN_TURNS, "Environments took", "workers="),
        (1, TIGHT_LIMITER, "samples_per_insert asked for", "samples_per_insert="),
        (1, SLOW_FEEDBACK, "The replay took", "samples_per_insert="),
        (1, SLOW_UPDATE, "Updates took", "samples_per_insert="),
        (1, SLOW_CHECKPOINT, "Checkpoints took", "trainer.checkpoint_every_env_steps="),
    ],
)
def test_it_is_told_at_the_end(
    workers: int,
    slow: dict[str, Any],
    says: str,
    setting: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CoreMeter, "flush", lambda _: CoreSeconds(0.0, 1.0))  # whoever else runs
    parts = {"env": Guess, "replay_buffer": SlowStore, "model": SlowAgent} | slow
    env, store, model = (parts.pop(name) for name in ("env", "replay_buffer", "model"))
    settings: dict[str, Any] = {
        "samples_per_insert": 1.0,
        "total_steps": 64,
        "run_dir": tmp_path if "checkpoint_every_env_steps" in parts else None,
        "evaluation": {"episodes": 1, "step_limit": 1},
        **parts,
    }
    trainer = Trainer(
        workers=workers, unroll_length=8, device="cpu", console="off", tensorboard=Nowhere(),
        **settings,
    )  # fmt: skip
    with caplog.at_level("INFO", logger="actorlearner"):
        trainer.fit(env, store(), model())
    (at,) = [i for i, m in enumerate(caplog.messages) if m.startswith("Finished")]
    sentence = caplog.messages[at + 1]
    assert sentence.startswith(says)
    assert setting in sentence.partition(": ")[2]


@pytest.mark.parametrize(("samples_per_insert", "name"), [(1.0, "gather"), (64.0, "add")])
def test_while_updates_are_owed_nobody_waits_for_rows(samples_per_insert: float, name: str) -> None:
    """A learner that takes in what is there, slowly, must not be taken for one that is idle."""

    class Reluctant(InlineLauncher):
        def gather(self, timeout: float, may_insert: Callable[[], bool]) -> Iterator[Unroll]:
            time.sleep(0.02)
            yield from super().gather(timeout, may_insert)

    lines: list[dict[str, float]] = []
    trainer = Trainer(
        workers=1, launcher=Reluctant(), unroll_length=8, device="cpu", console="off",
        samples_per_insert=samples_per_insert, total_steps=40, evaluation={"episodes": 1},
        sinks=[SimpleNamespace(write=lambda _, metrics: lines.append(metrics))],
    )  # fmt: skip
    trainer.fit(Guess, SlowStore(), SlowAgent())
    other = {"gather": "add", "add": "gather"}[name]
    assert lines[0][f"time/{name}"] > 4 * lines[0][f"time/{other}"]


class Nowhere:
    """TensorBoard's place, where nothing is written: its import takes a second."""

    def add_scalar(self, *_: Any) -> None:
        pass

    def flush(self) -> None:
        pass
