"""Alignment of unrolls against a slow twin, what is refused, and evaluation."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from actorlearner.contracts import (
    ArraySpec,
    BadInput,
    EnvSpec,
    EvaluationRequest,
    NonFiniteError,
    SampleSpec,
    Snapshot,
    StreamLayout,
    StreamState,
    Unroll,
    UnsupportedSpace,
    WorkerSpec,
)
from actorlearner.envs import GymEnvFactory
from actorlearner.evaluate import summarise
from actorlearner.launch._child import Slot
from actorlearner.replay import ReplayBuffer
from actorlearner.streams import stream_seed
from actorlearner.worker import EnvWorker, probe
from tests.environments import (
    Misbehaves,
    Places,
    PlacesPolicy,
    RowChecker,
    pay,
    plan,
    snapshot,
    worker_specs,
)
from tests.unit.test_columns import VectorFactory

FIELDS = ("action", "reward", "terminated", "truncated", "valid", "first")


class Told:
    """A policy that does what a function of one observation says."""

    def __init__(self, function: Callable[[Any], Any], spec: EnvSpec) -> None:
        self._function, self._spec = function, spec

    def load(self, snapshot: Snapshot) -> None:
        pass

    def act(self, observation: Any, generator: np.random.Generator) -> Any:
        count = len(next(iter(observation.values())))
        rows = [{key: array[i] for key, array in observation.items()} for i in range(count)]
        return np.array([self._function(row) for row in rows], self._spec.action.dtype), {}


def recipe(make: Callable[..., Any]) -> Any:
    """A policy factory without extras."""
    make.extras_spec = {}  # type: ignore[attr-defined]
    return make


def told_spec(
    make: Any,
    function: Callable[[Any], Any],
    tells_lives: bool = False,
    kind: type[GymEnvFactory] = GymEnvFactory,
    **changes: Any,
) -> WorkerSpec:
    factory = replace(kind.of(make), terminal_on_life_loss=tells_lives)

    @recipe
    def policy(env_spec: EnvSpec, streams: Sequence[int], num_streams: int, greedy: bool) -> Told:
        return Told(function, env_spec)

    changes = {"env_spec": probe(factory), "policy_factory": policy, **changes}
    return worker_specs(factory, **changes)[0]


def new_unroll(spec: WorkerSpec) -> Unroll:
    """An unroll full of what an earlier one may have left there."""
    layout = spec.unroll_layout
    arrays = {name: array.zeros() + np.ones((), array.dtype) for name, array in layout.items()}
    return Unroll.from_arrays(spec.index, spec.streams, arrays)


def collected(worker: EnvWorker, version: int = 0) -> Unroll:
    unroll = new_unroll(worker.spec)
    worker.collect(snapshot(version), unroll)
    return unroll


# ---------------------------------------------------------------------------- the slow twin


def slow_twin(spec: WorkerSpec, function: Callable[[Any], Any], num_rows: int) -> list[Any]:
    """Per stream the rows, the observations (one more), the ends as (row, return, length), lives.

    Lives as ends; none where losing one means nothing.
    """
    streams = []
    for stream in spec.streams:
        env = spec.env_factory()
        rows, ends, life_ends = [], [], []
        episode, rewards, life_rewards = 0, [], []
        observation, info = env.reset(seed=stream_seed(spec.seed, stream, 0))
        observations, is_over = [{"observation": observation.copy()}], False
        while len(rows) < num_rows:
            if is_over:
                episode += 1
                seed = stream_seed(spec.seed, stream, episode) if spec.seed_every_episode else None
                observation, info = env.reset(seed=seed)
                rows.append((0, 0.0, False, False, False, False))
                is_over, rewards, life_rewards = False, [], []
            else:
                lives = info.get("lives")
                action = function(observations[-1])
                observation, reward, terminated, truncated, info = env.step(action)
                reward = np.asarray(reward).item()
                is_over = bool(terminated or truncated)
                tells_lives = spec.env_factory.terminal_on_life_loss
                life_lost = tells_lives and info["lives"] < lives
                learns_end = bool(terminated) or (life_lost and not is_over)
                first = not rewards
                rows.append(
                    (action, reward, learns_end, bool(truncated) and not learns_end, True, first)
                )  # fmt: skip
                rewards.append(reward)
                life_rewards.append(reward)
                if is_over:
                    ends.append((len(rows) - 1, sum(rewards), len(rewards)))
                if tells_lives and (life_lost or is_over):
                    life_ends.append((len(rows) - 1, sum(life_rewards), len(life_rewards)))
                    life_rewards = []
            observations.append({"observation": np.array(observation)})
        env.close()
        streams.append((rows, [o["observation"] for o in observations], ends, life_ends))
    return streams


def assert_like_the_twin(spec: WorkerSpec, function: Callable[[Any], Any], unrolls: int) -> None:
    worker = EnvWorker(spec)
    worker.open()
    twin = slow_twin(spec, function, unrolls * spec.unroll_length)
    for number in range(unrolls):
        unroll = collected(worker)
        start = number * spec.unroll_length
        episodes: list[Any] = []
        lives: list[Any] = []
        for column, (rows, observations, ends, life_ends) in enumerate(twin):
            stop = start + spec.unroll_length
            for name, wanted in zip(FIELDS, zip(*rows[start:stop], strict=True), strict=True):
                got = getattr(unroll, name)[:, column]
                np.testing.assert_array_equal(got, np.array(wanted, got.dtype), name)
            got = unroll.observation["observation"][:, column]
            np.testing.assert_array_equal(got, np.array(observations[start : stop + 1]))
            stream = spec.streams[column]
            for found, wanted in ((episodes, ends), (lives, life_ends)):
                found += [
                    (stream, row - start, *e, ()) for row, *e in wanted if start <= row < stop
                ]
        assert sorted(unroll.episodes) == sorted(episodes)
        assert sorted(unroll.lives) == sorted(lives)
        assert unroll.env_steps == sum(r[4] for rows, *_ in twin for r in rows[start:stop])
        assert unroll.sequence == number
        assert set(unroll.seconds) == {"env", "policy"}
    worker.close()


class Scheduled(gymnasium.Env):
    """Episodes of scheduled lengths and ends; careless in every way that Gymnasium lets pass.

    A life is lost in each of the steps ``lost`` (from 1) of every episode.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(7)
    steps = 0

    def __init__(
        self, schedule: Sequence[tuple[int, str, str]], lost: Collection[int] = ()
    ) -> None:
        self._schedule, self._episode, self._now = schedule, -1, np.zeros(3)
        self._lost = lost

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._episode += 1
        self._now[:] = self._episode, 0, self.np_random.random()
        self._lives = 9
        return self._now, {"lives": self._lives}

    def step(self, action: Any) -> Any:
        Scheduled.steps += 1
        length, end, form = self._schedule[self._episode % len(self._schedule)]
        self._now += [0, 1, self.np_random.random() + action]
        assert self._now[1] <= length
        is_end = self._now[1] == length
        value = float(self._now[1]) - 1.5
        reward, flag = {
            "plain": (value, bool),
            "NumPy": (np.float32(value), np.bool_),
            "array": (np.array([value]), np.bool_),
            "integer": (int(value), int),
        }[form]
        terminated, truncated = is_end and end != "truncated", is_end and end != "terminated"
        self._lives -= self._now[1] in self._lost
        return self._now, reward, flag(terminated), flag(truncated), {"lives": self._lives}


def by_scheduled(observation: Any) -> int:
    return int(observation["observation"].sum() * 1000) % 7


@settings(max_examples=100, deadline=None)
@given(
    schedule=st.lists(
        st.tuples(
            st.integers(1, 6),
            st.sampled_from(["terminated", "truncated", "both"]),
            st.sampled_from(["plain", "NumPy", "array", "integer"]),
        ),
        min_size=1,
        max_size=5,
    ),
    lost=st.sets(st.integers(1, 6)),
    tells_lives=st.booleans(),
    kind=st.sampled_from([GymEnvFactory, VectorFactory]),
    unroll_length=st.integers(1, 7),
    envs=st.integers(1, 3),
    seed_every_episode=st.booleans(),
)
def test_alignment(schedule, lost, tells_lives, kind, unroll_length, envs, seed_every_episode):
    """Episodes end at any row: the first, the last, the only one. So do lives.

    Stepped one by one or as one.
    """
    if kind is VectorFactory:  # Gymnasium's own does not take all that environments may give
        schedule = [(length, end, form.replace("array", "plain")) for length, end, form in schedule]
    spec = told_spec(
        lambda: Scheduled(schedule, lost),
        by_scheduled,
        tells_lives=tells_lives,
        kind=kind,
        unroll_length=unroll_length,
        envs_per_worker=envs,
        seed_every_episode=seed_every_episode,
    )
    assert_like_the_twin(spec, by_scheduled, unrolls=6)


@pytest.mark.parametrize("name", ["CartPole-v1", "MountainCar-v0"])
def test_alignment_of_a_real_environment(name):
    def policy(observation: Any) -> int:
        return int(observation["observation"][1] > 0)

    spec = told_spec(name, policy, unroll_length=50, seed_every_episode=True)
    assert_like_the_twin(spec, policy, unrolls=10)


def test_conservation():
    """As many env steps as valid rows: no step is lost, none is made for a reset row."""
    schedule = [(1, "both", "plain"), (3, "truncated", "plain")]
    spec = told_spec(lambda: Scheduled(schedule), by_scheduled, envs_per_worker=3)
    worker = EnvWorker(spec)
    worker.open()
    Scheduled.steps = 0
    assert sum(collected(worker).env_steps for _ in range(20)) == Scheduled.steps > 0


@pytest.mark.parametrize("kind", [GymEnvFactory, VectorFactory])
@pytest.mark.parametrize("seed_every_episode", [False, True])
def test_every_number_is_where_it_belongs(kind, seed_every_episode):
    spec = worker_specs(
        *[kind.of(Places)] * 2, envs_per_worker=3, seed_every_episode=seed_every_episode
    )[1]
    worker, checker = EnvWorker(spec), RowChecker(3, seed_every_episode)
    worker.open()
    for version in (0, 0, 1, 5, 5, 6):
        checker.check(collected(worker, version))


def test_lives_add_up_to_the_episode():
    """The score of a game goes on over the lives lost in it, and over the end of an unroll."""
    spec = told_spec(
        lambda: Scheduled([(6, "terminated", "plain"), (5, "truncated", "plain")], {2, 3}),
        by_scheduled,
        tells_lives=True,
        unroll_length=4,
        envs_per_worker=1,
    )
    worker = EnvWorker(spec)
    worker.open()
    unrolls = [collected(worker) for _ in range(4)]
    # Rewards are -0.5, 0.5, 1.5, ...; rows 6 and 12 are reset rows, row 13 begins the third one.
    games = [[tuple(e[:4]) for e in unroll.episodes] for unroll in unrolls]
    assert games == [[], [(0, 1, 12.0, 6)], [(0, 3, 7.5, 5)], []]
    lives = [[tuple(e[:4]) for e in unroll.lives] for unroll in unrolls]
    assert lives == [
        [(0, 1, 0.0, 2), (0, 2, 1.5, 1)],
        [(0, 1, 10.5, 3)],
        [(0, 0, 0.0, 2), (0, 1, 1.5, 1), (0, 3, 6.0, 2)],
        [(0, 2, 0.0, 2), (0, 3, 1.5, 1)],
    ]


@pytest.mark.parametrize("differs", [False, True])
def test_scores_of_an_episode_that_goes_on(differs):
    """Its repeated steps count, unless it could not be repeated and was started anew."""
    spec = told_spec(
        lambda: Scheduled([(6, "terminated", "plain")], {3}),
        lambda observation: 0,
        tells_lives=True,
        seed_every_episode=True,
        unroll_length=4,
        envs_per_worker=1,
    )
    env = spec.env_factory()
    env.reset(seed=stream_seed(spec.seed, 0, 0))
    env.step(0)
    observation = env.step(0)[0] + differs
    state = StreamState(0, np.zeros(2, np.int64), {"observation": observation})
    worker = EnvWorker(replace(spec, stream_states=(state,)))
    worker.open()
    unroll = collected(worker)
    assert bool(worker.notes) == differs
    assert unroll.episodes == ([] if differs else [(0, 3, 12.0, 6, ())])
    assert [e[:4] for e in unroll.lives] == (
        [(0, 2, 1.5, 3)] if differs else [(0, 0, 1.5, 3), (0, 3, 10.5, 3)]
    )


def test_rewards_are_raw_until_a_batch_clips_them():
    """The learner sees 1 where the score says 7."""

    class Pays(Places):
        def step(self, action: Any) -> Any:
            observation, _, *rest = super().step(action)
            return observation, 7, *rest

    (spec,) = worker_specs(GymEnvFactory.of(Pays), unroll_length=40)
    worker = EnvWorker(spec)
    worker.open()
    unroll = collected(worker)
    assert unroll.episodes
    assert all(episode.ret == 7 * episode.length for episode in unroll.episodes)
    buffer = ReplayBuffer(capacity=200)
    buffer.build(spec.env_spec, SampleSpec(50, reward_clip=1.0), StreamLayout(2, 40), 10)
    buffer.add(unroll)
    assert buffer.sample().reward.tolist() == [1.0] * 50


@pytest.mark.parametrize("kind", [GymEnvFactory, VectorFactory])
def test_extras_are_noted_in_every_row(kind):
    """Also in reset rows, whose observation is the final one: a bootstrap value is noted there."""

    class Noting(PlacesPolicy):
        def act(self, observation: Any, generator: Any) -> Any:
            action, _ = super().act(observation, generator)
            return action, {"seen": observation["observation"].sum(1).astype("f4")}

    class Recipe:
        extras_spec: ClassVar[dict[str, Any]] = {"seen": ArraySpec((), "float32")}
        __call__ = Noting

    (spec,) = worker_specs(kind.of(Places), policy_factory=Recipe(), unroll_length=20)
    worker = EnvWorker(spec)
    worker.open()
    unroll = collected(worker)
    assert not unroll.valid.all()
    seen = unroll.observation["observation"][:-1].sum(-1).astype("f4")
    assert np.array_equal(unroll.extras["seen"], seen)


def test_draws_follow_from_seed_stream_and_unroll_alone():
    specs = worker_specs(*[GymEnvFactory.of(Places)] * 2)
    numbers = {}
    for spec in (*specs, replace(specs[0], seed=4)):
        worker = EnvWorker(spec)
        worker.open()
        drawn = [collected(worker).action.tolist() for _ in range(2)]
        again = EnvWorker(replace(spec, first_sequence=1))
        again.open()
        assert collected(again).action[0, 0] == drawn[1][0][0]
        numbers[spec.index, spec.seed] = drawn
    assert len({str(n) for drawn in numbers.values() for n in drawn}) == 6


def test_global_generators_are_left_alone():
    state = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    @recipe
    def policy(env_spec: EnvSpec, *rest: Any) -> Told:
        torch.nn.Linear(3, 3)  # draws its first weights
        return Told(by_scheduled, env_spec)

    schedule = [(2, "both", "plain")]
    spec = told_spec(lambda: Scheduled(schedule), by_scheduled, policy_factory=policy)
    worker = EnvWorker(spec)
    worker.open()
    collected(worker)
    worker.evaluate(snapshot(0), EvaluationRequest(2, None, 0))
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == state


def test_dict_observations_and_array_actions():
    class Env(gymnasium.Env):
        observation_space = spaces.Dict(
            image=spaces.Box(0, 255, (2, 2), np.uint8), kind=spaces.Discrete(3, start=-1)
        )
        action_space = spaces.MultiDiscrete([3, 4], start=[-1, 0])

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return {"image": np.full((2, 2), 255), "kind": 1}, {}

        def step(self, action: Any) -> Any:
            assert self.action_space.contains(action)
            return {"image": np.full((2, 2), action[1]), "kind": action[0]}, 0.0, False, False, {}

    spec = told_spec(Env, lambda o: [(o["kind"] + 1) % 3, o["image"][0, 0] % 4], unroll_length=4)
    worker = EnvWorker(spec)
    worker.open()
    unroll = collected(worker)
    assert unroll.observation["image"].dtype == np.uint8
    assert unroll.observation["image"].shape == (5, 2, 2, 2)
    assert unroll.observation["kind"].dtype == unroll.action.dtype == np.int64
    assert unroll.observation["kind"][:, 0].tolist() == [2, 0, 1, 2, 0]
    assert unroll.observation["image"][:, 1, 1, 1].tolist() == [255, 3, 3, 3, 3]
    assert unroll.action[:, 0].tolist() == [[0, 3], [1, 3], [2, 3], [0, 3]]


# ----------------------------------------------------------------------------------- refusals


class Poisoned(gymnasium.Env):
    """Gives a number that is none, in one field of its third reset or its third step."""

    observation_space = spaces.Dict(
        count=spaces.Box(0, 255, (2,), np.uint8), at=spaces.Box(-1, 1, (2,), np.float16)
    )
    action_space = spaces.Discrete(2)

    def __init__(self, where: str, what: float) -> None:
        self._where, self._what = where, what
        self._resets = self._steps = 0

    def _observe(self, is_bad: bool) -> Any:
        bad = self._what if is_bad else 0.0
        return {"count": np.zeros(2, np.uint8), "at": np.array([0, bad])}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._resets += 1
        return self._observe(self._where == "reset" and self._resets == 3), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        is_bad = self._steps == 3
        reward = self._what if self._where == "reward" and is_bad else 0.0
        observation = self._observe(self._where == "step" and is_bad)
        return observation, reward, self._steps % 2 == 0, False, {}


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    ("where", "words"),
    [  # rows: step 0, step 1, reset 2, step 3 (the third), step 4, reset 5 (the third)
        ("reset", "observation 'at' is {} in stream 1, at or just before row 1 of unroll 1"),
        ("step", "observation 'at' is {} in stream 1, at or just before row 4 of unroll 0"),
        ("reward", "reward is {} in stream 1, at or just before row 3 of unroll 0"),
    ],
)
def test_numbers_that_are_none(where, words, what):
    """In the second of two environments; named with field, stream and row."""
    built = []

    def make() -> Any:
        built.append(None)
        return Poisoned(where if len(built) % 2 == 0 else "", what)

    spec = told_spec(lambda: Poisoned("", 0.0), lambda observation: 0)
    spec = replace(spec, env_factory=GymEnvFactory.of(make))
    worker = EnvWorker(spec)
    worker.open()
    with pytest.raises(NonFiniteError) as caught:
        [collected(worker) for _ in range(3)]
    assert words.format(what) in str(caught.value)
    assert worker.failure(caught.value).phase == "step"


def test_an_infinite_reward_in_an_evaluation():
    spec = told_spec(lambda: Poisoned("", 0), lambda observation: 0)
    spec = replace(spec, env_factory=GymEnvFactory.of(lambda: Poisoned("reward", np.inf)))
    with pytest.raises(NonFiniteError, match=r"returns are .*inf"):
        EnvWorker(spec).evaluate(snapshot(0), EvaluationRequest(9, None, 0))


@pytest.mark.parametrize(
    ("where", "phase"),
    [
        ("constructor", "constructing the environment"),
        ("reset", "reset"),
        ("step", "step"),
    ],
)
def test_phases_of_failures(where, phase):
    (spec,) = worker_specs(GymEnvFactory.of(Misbehaves, {"where": where}))
    worker = EnvWorker(spec)
    with pytest.raises(ZeroDivisionError) as caught:
        (worker.open(), collected(worker))
    failure = worker.failure(caught.value)
    assert (failure.phase, failure.error) == (phase, "ZeroDivisionError: boom")
    assert failure.text().startswith(
        f"worker 0 (Misbehaves) failed in {phase}: ZeroDivisionError: boom\nTraceback"
    )


def test_probe_looks_at_what_reset_gives():
    class Liar(Places):
        observation_space = spaces.Box(-1, 1, (5,), np.float32)

    with pytest.raises(BadInput, match=r"shape \(4,\); its observation space promises \(5,\)"):
        probe(GymEnvFactory.of(Liar))


@pytest.mark.parametrize("how", ["fine", "reset", "space", "close"])
def test_every_environment_that_was_built_is_closed(tmp_path, how, caplog):
    class Env(Misbehaves):
        def close(self) -> None:
            super().close()
            if how == "close":
                raise ZeroDivisionError("close")

    kwargs = {"directory": tmp_path, "where": "reset" if how == "reset" else ""}
    factory = GymEnvFactory.of(Env, kwargs)
    (spec,) = worker_specs(factory, envs_per_worker=3)
    worker = EnvWorker(spec)
    if how == "space":
        Env.observation_space = spaces.Text(3)
        with pytest.raises(UnsupportedSpace):
            worker.open()
        with pytest.raises(UnsupportedSpace):
            probe(factory)
    elif how == "reset":
        worker.open()
        with pytest.raises(ZeroDivisionError):
            collected(worker)
        with pytest.raises(ZeroDivisionError):
            probe(factory)
    else:
        worker.open()
        probe(factory)
    with caplog.at_level(logging.WARNING):
        worker.close()
        worker.close()
    built = sorted(path.name.partition("-")[2] for path in tmp_path.glob("built-*"))
    closed = sorted(path.name.partition("-")[2] for path in tmp_path.glob("closed-*"))
    assert built == closed != []
    if how == "close":
        assert caplog.text.count("ZeroDivisionError: close") == 4


# --------------------------------------------------------------------------------- evaluation

REQUEST = EvaluationRequest(episodes=11, step_limit=None, seed=5, env_steps=77)


def test_evaluation_is_of_its_seeds_alone(monkeypatch):
    """The same whatever the number of environments that step together, and the second time."""
    (spec,) = worker_specs(GymEnvFactory.of(Places))
    results = []
    for envs in (8, 1, 3, 20):
        monkeypatch.setattr("actorlearner.evaluator.EVALUATION_ENVS", envs)
        worker = EnvWorker(spec)
        results += [worker.evaluate(snapshot(2), REQUEST) for _ in range(2)]
        worker.close()
    lengths = [plan(stream_seed(5, 0, episode, evaluation=True), 0)[0] for episode in range(11)]
    returns = [sum(pay(0, step) for step in range(length)) for length in lengths]
    assert [result[:5] for result in results] == [(tuple(returns), tuple(lengths), 0, 2, 77)] * 8
    assert len(set(lengths)) > 3


def test_evaluation_of_a_real_environment(monkeypatch):
    def policy(observation: Any) -> int:
        return int(observation["observation"][2] > 0)

    spec = told_spec("CartPole-v1", policy)
    results = []
    for envs in (8, 3):
        monkeypatch.setattr("actorlearner.evaluator.EVALUATION_ENVS", envs)
        worker = EnvWorker(spec)
        results.append(worker.evaluate(snapshot(0), REQUEST))
        worker.close()
    assert results[0] == results[1]
    assert len(set(results[0].lengths)) > 1
    assert results[0].returns == results[0].lengths


def test_step_limit_of_an_evaluation():
    """Cut episodes are counted; one that ends exactly at the limit is not cut."""
    (spec,) = worker_specs(GymEnvFactory.of(Places))
    worker = EnvWorker(spec)
    whole = worker.evaluate(snapshot(0), REQUEST)
    limited = worker.evaluate(snapshot(0), REQUEST._replace(step_limit=5))
    assert limited.lengths == tuple(min(5, length) for length in whole.lengths)
    assert limited.cut == sum(length > 5 for length in whole.lengths) > 0
    assert 5 in whole.lengths
    worker.close()


def test_a_lost_life_ends_no_evaluation_episode():
    schedule = [(6, "terminated", "plain")]
    spec = told_spec(lambda: Scheduled(schedule, {2, 3}), by_scheduled, tells_lives=True)
    result = EnvWorker(spec).evaluate(snapshot(0), REQUEST)
    assert (result.returns, result.lengths, result.cut) == ((12.0,) * 11, (6,) * 11, 0)


def test_a_frame_rate_that_is_none_is_the_environments_fault():
    class Odd(Places):
        metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": "fast"}

        def __init__(self, render_mode: str | None = None) -> None:
            super().__init__()
            self.render_mode = render_mode

    (spec,) = worker_specs(GymEnvFactory.of(Odd))
    worker = EnvWorker(spec)
    with pytest.raises(ValueError, match="fast") as caught:
        worker.evaluate(snapshot(0), REQUEST._replace(films=1))
    failure = worker.failure(caught.value)
    assert (failure.phase, failure.of_env) == ("constructing the environment", True)


def test_no_episodes_at_all():
    (spec,) = worker_specs(GymEnvFactory.of(Places))
    result = EnvWorker(spec).evaluate(snapshot(0), REQUEST._replace(episodes=0))
    assert result[:5] == ((), (), 0, 0, 77)


def test_evaluation_is_greedy_with_a_policy_of_its_own():
    asked = []

    @recipe
    def policy(env_spec: EnvSpec, streams: Any, num_streams: int, greedy: bool) -> Told:
        asked.append(greedy)
        return Told(lambda observation: 0, env_spec)

    (spec,) = worker_specs(GymEnvFactory.of(Places), policy_factory=policy)
    EnvWorker(spec).evaluate(snapshot(0), REQUEST)
    assert asked == [True]


# -------------------------------------------------------------------------------------- draws


def test_every_unroll_has_draws_of_its_own():
    """Others than any other unroll, stream and run: else all explore in one way, over and over."""
    drawn = []

    class Draws(PlacesPolicy):
        def act(self, observation: Any, generator: np.random.Generator) -> Any:
            drawn.append(int(generator.integers(2**62)))
            return super().act(observation, generator)

    specs = worker_specs(*[GymEnvFactory.of(Places)] * 2, policy_factory=Draws)
    for spec in (*specs, replace(specs[0], seed=4)):
        worker = EnvWorker(spec)
        worker.open()
        for _ in range(2):
            collected(worker)
    assert len(set(drawn)) == len(drawn) == 3 * 2 * specs[0].unroll_length


# --------------------------------------------------------------------------------------- info


class Tells(Places):
    """Tells of success in the ``info`` of each step, one mapping for all time."""

    def __init__(self) -> None:
        super().__init__()
        self._info: dict[str, Any] = {"lock": threading.Lock(), "text": "no"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._info["success"] = np.array([-1.0])
        return super().reset(seed=seed)[0], self._info

    def step(self, action: Any) -> Any:
        *rest, _ = super().step(action)
        self._info["success"] = np.array([self.place[2] % 2])
        self._info["odd"] = None if self.place[2] % 2 else np.True_
        return *rest, self._info


def infos_of(length: int) -> Any:
    """What an episode of `Tells` ends with."""
    odd = () if length % 2 else (("odd", 1.0),)
    return (("success", float(length % 2)), *odd)


@pytest.mark.parametrize("kind", [GymEnvFactory, VectorFactory])
def test_numbers_of_info_are_those_of_the_last_step(kind):
    """Of training and evaluation episodes; they stand in the slot, in columns of their own."""
    factory = replace(kind.of(Tells), info_metrics=("success", "odd", "text", "never"))
    (spec,) = worker_specs(factory, envs_per_worker=3, unroll_length=30)
    worker = EnvWorker(spec)
    worker.open()
    layout = Slot.layout(spec)
    assert layout["ended"].shape == (2 * 30 * 3, 4 + 4)
    slot = Slot(spec, {name: array.zeros() for name, array in layout.items()})
    for _ in range(3):
        worker.collect(snapshot(0), slot.unroll)
        episodes = list(slot.unroll.episodes)
        assert {e.length % 2 for e in episodes} == {0, 1}
        for episode in episodes:
            assert episode.info == infos_of(episode.length)
        commit = slot.commit(0, cores=0.5)
        assert len(pickle.dumps(commit)) < 400
        slot.unroll.episodes = []
        assert slot.view(commit).episodes == episodes
    result = worker.evaluate(snapshot(0), REQUEST)
    assert result.infos == tuple(map(infos_of, result.lengths))
    metrics = summarise(result)
    assert metrics["evaluation/success"] == np.mean([length % 2 for length in result.lengths])
    assert metrics["evaluation/odd"] == 1.0  # of those that had it
    assert "evaluation/never" not in metrics
    worker.close()


# --------------------------------------------------------------------------------- categories


@pytest.mark.parametrize("value", [-2, 2, 99])
@pytest.mark.parametrize("where", [0, 3])
def test_a_category_that_the_space_does_not_have(value, where):
    """Told with its key at once, not by an index error in the learner."""

    class Env(gymnasium.Env):
        observation_space = spaces.Dict(
            ok=spaces.Box(-1, 1, (2,), np.float32), kind=spaces.Discrete(3, start=-1)
        )
        action_space = spaces.Discrete(2)
        now = 0

        def _observe(self) -> Any:
            return {"ok": np.zeros(2, "f4"), "kind": value if self.now == where else 1}

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return self._observe(), {}

        def step(self, action: Any) -> Any:
            self.now += 1
            return self._observe(), 0.0, False, False, {}

    spec = told_spec(Env, lambda observation: 0, unroll_length=3)
    worker = EnvWorker(spec)
    worker.open()
    words = f"Env: observation 'kind' is out of its space: .* it is {value + 1}, .* has 3 values"
    with pytest.raises(BadInput, match=words):
        collected(worker)


def test_a_policy_that_fails_at_a_bad_category_is_not_at_fault():
    """In training and in evaluation; an error of its own stays its own."""

    class Env(gymnasium.Env):
        observation_space = spaces.Discrete(3)
        action_space = spaces.Discrete(2)
        given = 5

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return self.given, {}

        def step(self, action: Any) -> Any:
            return self.given, 0.0, False, False, {}

    def one_hot(observation: Any) -> int:
        if observation != 1:
            raise IndexError("no such category")
        return 0

    worker = EnvWorker(told_spec(Env, one_hot, unroll_length=3))
    worker.open()
    for use in (collected, lambda worker: worker.evaluate(snapshot(0), REQUEST)):
        with pytest.raises(BadInput, match=r"out of its space: .* it is 5, .* has 3 values"):
            use(worker)
    Env.given = 2
    with pytest.raises(IndexError, match="no such category"):
        worker.evaluate(snapshot(0), REQUEST)


def test_entries_of_many_categories():
    class Env(gymnasium.Env):
        observation_space = spaces.MultiDiscrete([2, 9])
        action_space = spaces.Discrete(2)
        last = np.array([1, 8])

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.array([0, 8]), {}

        def step(self, action: Any) -> Any:
            return self.last, 0.0, False, False, {}

    spec = told_spec(Env, lambda observation: 0, unroll_length=3)
    worker = EnvWorker(spec)
    worker.open()
    collected(worker)
    Env.last = np.array([2, 1])
    with pytest.raises(BadInput, match="it is 2, where the space has 2 values"):
        collected(worker)


def test_what_runs_the_network_is_told_of_each_snapshot(monkeypatch):
    """Once, after the policy has loaded it."""
    told: list[int] = []

    def equip(policy: Any, acting: Any) -> Callable[[], None]:
        return lambda: told.append(policy.version)

    monkeypatch.setattr("actorlearner.worker.equip", equip)
    (spec,) = worker_specs(GymEnvFactory.of(Places))
    worker = EnvWorker(spec)
    worker.open()
    unroll = Unroll.from_arrays(
        0, spec.streams, {name: array.zeros() for name, array in spec.unroll_layout.items()}
    )
    first, second = snapshot(1), snapshot(2)
    for each in (first, first, second):
        worker.collect(each, unroll)
    assert told == [1, 2]
    worker.close()


def test_workers_make_vector_environments_with_seeds_of_their_own():
    """And one that goes on makes its own with another seed than at first."""
    seeds: list[int] = []

    def many(num_envs: int, seed: int) -> SyncVectorEnv:
        seeds.append(seed)
        return SyncVectorEnv([Places] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)

    factory = GymEnvFactory.of(Places, vector=many)
    first, second = worker_specs(factory, factory)
    later = replace(second, stream_states=(StreamState(7), StreamState(9)))
    for spec in (first, second, later, first):
        worker = EnvWorker(spec)
        worker.open()
        worker.close()
    assert len(set(seeds)) == 3
    assert seeds[3] == seeds[0]
