"""What learns from sequences and remembers, through the same Trainer, workers and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorlearner.contracts import EvaluationRequest, Unroll
from actorlearner.envs import GymEnvFactory
from actorlearner.inference import LoadedPolicy
from actorlearner.replay import ReplayBuffer
from actorlearner.trainer import Trainer
from actorlearner.worker import EnvWorker, probe
from tests.environments import Places, plan, snapshot, worker_specs
from tests.recurrent import CountingPolicy, Dreamlet, DreamletPolicy
from tests.test_trainer import Recorder, differences, everything, trainer_of, weights
from tests.tiny import Guess


def replay(**changes: Any) -> ReplayBuffer:
    return ReplayBuffer(
        **{"capacity": 256, "warmup_env_steps": 16, "prioritized": False, **changes}
    )


def fit(**changes: Any) -> tuple[Trainer, Dreamlet]:
    trainer = trainer_of(**{"total_steps": 96, "samples_per_insert": 12.0, **changes})
    trainer.fit(Guess, replay(), model := Dreamlet())
    return trainer, model


# ------------------------------------------------------------------------------- the Trainer


@pytest.mark.parametrize(
    ("rates", "moving"),
    [((0.05, 0.0), {"world"}), ((0.0, 0.05), {"controller"}), ((0.0, 0.0), set())],
)
def test_each_optimizer_moves_its_own_parameters(
    rates: tuple[float, float], moving: set[str]
) -> None:
    """Two training steps with a carry between them, on sequences."""
    model = Dreamlet(*rates)
    before: dict[str, torch.Tensor] = {}
    model.configure_optimizers = lambda: (  # type: ignore[method-assign]
        before.update(weights(model)) or Dreamlet.configure_optimizers(model)
    )
    trainer_of(samples_per_insert=12.0).fit(Guess, replay(), model)
    moved = {n.partition(".")[0] for n, w in weights(model).items() if (w != before[n]).any()}
    assert moved == moving


def test_samples_per_insert_count_the_rows_that_are_learned_from() -> None:
    """Four sequences of six rows, without their context; feedback is never stale here."""
    recorder = Recorder()
    trainer, _ = fit(sinks=[recorder])
    assert trainer.updates == int(12 * (trainer.env_steps - 16) / 24)
    line = [line for _, line in recorder.lines if "replay/size" in line][-1]
    assert line["replay/stale_feedback"] == 0
    assert line["replay/new_sequences"] == 0
    assert {"world/loss", "controller/loss", "world/gradient_norm"} <= line.keys()


def test_feedback_reaches_the_rows() -> None:
    """Latents in the replay are those of the last update, not those noted when acting."""
    noted, fed_back = (everything(*fit(samples_per_insert=rate)) for rate in (0.01, 12.0))
    rows = [state["replay"]["ring"]["rows"]["extras/hidden"] for state in (noted, fed_back)]
    assert rows[0].shape == rows[1].shape
    assert np.abs(rows[0][:16] - rows[1][:16]).min(axis=1).max() > 0


def test_a_sequence_is_waited_for() -> None:
    """The limiter would hold the workers back before there is anything to learn from."""
    trainer = trainer_of(samples_per_insert=100.0, unroll_length=2, total_steps=44)
    trainer.fit(Guess, replay(warmup_env_steps=0), Dreamlet(length=40))
    assert trainer.env_steps >= 44
    assert trainer.updates > 0


# ------------------------------------------------------------------------- lockstep, resume


def test_lockstep_is_deterministic() -> None:
    first, second, other = (everything(*fit(seed=seed)) for seed in (1, 1, 2))
    assert differences(first, second) == []
    assert differences(first["agent"], other["agent"]) != []


def test_a_run_in_parts_is_the_run_in_one(tmp_path: Path) -> None:
    """Weights, moments, replay with latents and queue, and what the policy remembers."""
    changes: dict[str, Any] = {
        "envs_per_worker": 2,
        "unroll_length": 4,
        "samples_per_insert": 3.0,  # few latents are fed back, so that noted ones stay
    }
    whole = fit(run_dir=tmp_path / "whole", **changes)
    parts = tmp_path / "parts"
    for total, source in ((40, None), (56, parts), (96, parts)):
        torch.manual_seed(12345)
        part = fit(run_dir=parts, total_steps=total, checkpoint=source, **changes)
    assert whole[0].updates == part[0].updates > 5
    assert differences(everything(*whole), everything(*part)) == []
    remembered = whole[0]._progress.ledger.state_dict()["policy_state"]
    assert all(set(state) == {"hidden", "coin", "action"} for state in remembered)


def test_a_resume_without_the_memory_would_be_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail."""
    changes: dict[str, Any] = {
        "envs_per_worker": 2,
        "unroll_length": 4,
        "samples_per_insert": 3.0,
        "total_steps": 48,
    }
    whole = fit(run_dir=tmp_path / "whole", **changes)
    parts = tmp_path / "parts"
    fit(run_dir=parts, **(changes | {"total_steps": 40}))

    def forget(policy: DreamletPolicy, state: Any) -> None:
        policy.reset(np.ones(len(state["coin"]), np.bool_))

    monkeypatch.setattr(DreamletPolicy, "set_state", forget)
    part = fit(run_dir=parts, checkpoint=parts, **changes)
    assert differences(everything(*whole), everything(*part)) != []


def test_worker_processes_make_the_same_run() -> None:
    """Latents and states travel through shared memory."""
    inline, processes = (
        everything(*fit(workers=workers, envs_per_worker=2, unroll_length=4, total_steps=64))
        for workers in (0, 1)
    )
    for part in ("agent", "optimizers", "replay"):
        assert differences(inline[part], processes[part]) == []


# --------------------------------------------------------------------------------- the worker


def collected(worker: EnvWorker) -> Unroll:
    arrays = {name: spec.zeros() for name, spec in worker.spec.unroll_layout.items()}
    unroll = Unroll.from_arrays(worker.spec.index, worker.spec.streams, arrays)
    worker.collect(snapshot(0), unroll)
    return unroll


def test_a_policy_forgets_where_an_episode_begins() -> None:
    """In each column on its own; a reset row is still of the episode that has ended."""
    spec = worker_specs(
        GymEnvFactory.of(Places), envs_per_worker=4, policy_factory=CountingPolicy, unroll_length=5
    )[0]
    worker = EnvWorker(spec)
    worker.open()
    resets = 0
    for _ in range(8):
        unroll = collected(worker)
        step = unroll.observation["observation"][..., 2]
        assert np.array_equal(unroll.extras["seen"], step[:-1] + 1)
        assert np.array_equal(unroll.action[unroll.valid], (step[:-1] + 1)[unroll.valid])
        assert not unroll.action[~unroll.valid].any()
        # What row T finds, unless it is the first of an episode, where it is forgotten.
        goes_on = step[-1] > 0
        assert np.array_equal(unroll.policy_state["seen"][goes_on], step[-1][goes_on])
        resets += np.count_nonzero(~unroll.valid)
    assert resets > 10
    worker.close()


def test_it_forgets_in_evaluations_too() -> None:
    """More episodes than columns, of other lengths, and another number of them than streams."""
    heard: list[tuple[list[int], list[int]]] = []

    class Policy(CountingPolicy):
        def act(self, observation: Any, generator: Any) -> Any:
            action, extras = super().act(observation, generator)
            heard.append((observation["observation"][:, 2].tolist(), action.tolist()))
            return action, extras

    spec = worker_specs(GymEnvFactory.of(Places), envs_per_worker=2, policy_factory=Policy)[0]
    worker = EnvWorker(spec)
    for _ in range(2):
        result = worker.evaluate(snapshot(0), EvaluationRequest(20, None, 5))
        assert len(set(result.lengths)) > 2
    for steps, actions in heard:
        # A column without a further episode stays at the last observation of its own.
        assert all(a == s + 1 or a > s for s, a in zip(steps, actions, strict=True))
    moving = [(s, a) for steps, actions in heard for s, a in zip(steps, actions, strict=True)]
    tagged = sum(a == s + 1 for s, a in moving)
    assert tagged >= 2 * sum(result.lengths)
    worker.close()


class CountingAgent:
    """Only its policy is asked for."""

    def policy_factory(self) -> type[CountingPolicy]:
        return CountingPolicy

    def snapshot(self, version: int) -> Any:
        return snapshot(version)


def test_it_forgets_where_load_policy_is_told_to() -> None:
    """One environment, then many that begin on their own."""
    env_spec = probe(GymEnvFactory.of(Places))
    agent: Any = CountingAgent()
    policy = LoadedPolicy(agent, env_spec, 0)
    here = np.zeros(4, np.int64)
    assert [policy.act(here) for _ in range(3)] == [1, 2, 3]
    policy.reset()
    assert policy.act(here) == 1
    policy.reset()
    many = np.zeros((3, 4), np.int64)
    assert policy.act_batch(many).tolist() == [1, 1, 1]
    assert policy.act_batch(many, np.array([False, True, False])).tolist() == [2, 1, 2]
    assert policy.act_batch(many).tolist() == [3, 2, 3]


def test_plans_differ() -> None:
    """The episodes above are of several lengths."""
    assert len({plan(seed, 0)[0] for seed in range(0, 40, 2)}) == 7
