"""Environments stepped together: one by one or as one, they are alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from actorlearner.adapter import EnvAdapter
from actorlearner.columns import SeparateEnvs, VectorEnvs, adapt, make_envs
from actorlearner.contracts import BadInput
from actorlearner.envs import EnvSettings, GymEnvFactory


class Lives(gymnasium.Env):
    """Draws how many lives there are, when one is lost, and when the episode ends.

    What was drawn last can be seen.
    """

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._lives = int(self.np_random.integers(1, 5))
        return self._observe(0), {"lives": self._lives}

    def _observe(self, action: int) -> Any:
        self._drawn = self.np_random.random(2, np.float32)
        return self._drawn / (1 + action)

    def step(self, action: Any) -> Any:
        self._lives -= int(self._drawn[0] < 0.25)
        truncated = bool(self._drawn[1] < 0.1)
        seen = self._observe(action)
        return seen, float(self._drawn[0]), self._lives == 0, truncated, {"lives": self._lives}


@dataclass(frozen=True)
class VectorFactory(GymEnvFactory):
    """Steps many of its environments as one."""

    autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP

    def vector(self, num_envs: int, seed: int = 0) -> Any:
        return SyncVectorEnv([self] * num_envs, autoreset_mode=self.autoreset_mode)


def zeros(spec: Any, count: int) -> Any:
    return {key: array.zeros(count) for key, array in spec.observation.items()}


@pytest.mark.parametrize("tells_lives", [False, True])
def test_vector_and_separate_environments_are_alike(tells_lives):
    """Observations, rewards, flags and lives, over many episodes of three columns."""
    factory = replace(VectorFactory.of(Lives), terminal_on_life_loss=tells_lives)
    spec = adapt(factory).spec
    both = [make_envs(factory, spec, 3, seeded) for seeded in (False, True)]
    assert [type(envs) for envs in both] == [VectorEnvs, SeparateEnvs]
    seen = [zeros(spec, 3) for _ in both]
    for envs, into in zip(both, seen, strict=True):
        envs.begin(np.array([5, 5, 7]), into)
    resting, counts = np.zeros(3, np.bool_), np.zeros(3, int)
    generator = np.random.default_rng(0)
    for _ in range(300):
        assert np.array_equal(seen[0]["observation"], seen[1]["observation"])
        action = generator.integers(3, size=3)
        vector, separate = (
            envs.step(action, resting, into) for envs, into in zip(both, seen, strict=True)
        )
        for got, wanted in zip(vector, separate, strict=True):
            np.testing.assert_allclose(got, wanted)
        assert not any(flags[resting].any() for flags in separate)
        for envs, into in zip(both, seen, strict=True):
            envs.restart(np.flatnonzero(resting).tolist(), None, into)
        resting = separate.terminated | separate.truncated
        counts += [flags.sum() for flags in separate[1:]]
    assert (counts[:2] > 10).all()
    assert counts[2] > 10 if tells_lives else counts[2] == 0
    for envs in both:
        envs.close()


def test_environments_called_directly_get_the_same_actions_as_through_an_adapter():
    """Scalars as the space samples them."""
    given: list[Any] = []

    class Notes(Lives):
        def step(self, action: Any) -> Any:
            given.append(action)
            return super().step(action)

    envs = SeparateEnvs([EnvAdapter(Notes(), "Notes") for _ in range(2)])
    assert all(adapter.needs_no_adapting for adapter in envs.adapters)
    into = zeros(envs.adapters[0].spec, 2)
    envs.begin(np.array([1, 2]), into)
    envs.step(np.array([1, 2]), np.zeros(2, np.bool_), into)
    envs.adapters[0].step(np.int64(1))
    assert given == [1, 2, 1]
    assert {type(action) for action in given} == {type(Notes().action_space.sample())}
    envs.close()


def test_columns_that_rest_are_left_alone():
    """Neither stepped nor written to, until they are restarted."""
    envs = SeparateEnvs([EnvAdapter(Lives(), "Lives") for _ in range(2)])
    into = zeros(envs.adapters[0].spec, 2)
    envs.begin(np.array([1, 2]), into)
    before = into["observation"].copy()
    steps = envs.step(np.array([1, 1]), np.array([False, True]), into)
    assert (into["observation"][1] == before[1]).all()
    assert (into["observation"][0] != before[0]).all()
    assert steps.reward[0] > steps.reward[1] == 0
    envs.restart([1], [2], into)
    assert (into["observation"][1] == before[1]).all()
    envs.close()


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_other_autoreset_modes_are_refused(mode, monkeypatch):
    """With the words that set the right one; what was made is closed."""
    closed = []
    monkeypatch.setattr(SyncVectorEnv, "close_extras", lambda self, **_: closed.append(self))
    factory = replace(VectorFactory.of(Lives), autoreset_mode=mode)
    words = (
        f"Lives: .*NEXT_STEP, .*{mode.name}.*make it with autoreset_mode=AutoresetMode.NEXT_STEP"
    )
    with pytest.raises(BadInput, match=words):
        make_envs(factory, adapt(factory).spec, 2, seeded=False)
    assert len(closed) == 1


@pytest.mark.parametrize("bad", [-1, 3])
def test_actions_out_of_range_are_refused(bad):
    """Natively they may hang; nothing is stepped."""
    factory = VectorFactory.of(Lives)
    spec = adapt(factory).spec
    envs = make_envs(factory, spec, 2, seeded=False)
    into = zeros(spec, 2)
    envs.begin(np.array([1, 2]), into)
    before = into["observation"].copy()
    with pytest.raises(ValueError, match=rf"action=\[ ?0 +{bad}\]: must be in \[0, 3\)"):
        envs.step(np.array([0, bad]), np.zeros(2, np.bool_), into)
    assert (into["observation"] == before).all()
    envs.close()


# ----------------------------------------------------------------------- the user's own vector


class Everything(gymnasium.Env):
    """Nested observations and actions of several numbers, none of which counts from 0."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (2, 3), np.uint8),
        rest=spaces.Tuple(
            [spaces.Discrete(5, start=-2), spaces.MultiDiscrete([3, 4], start=[7, -1])]
        ),
    )
    action_space = spaces.MultiDiscrete([3, 2], np.int32, start=[-1, 5])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(1, 5))
        return self._observe(0), {}

    def _observe(self, salt: int) -> Any:
        draw = self.np_random.integers
        rest = int(draw(-2, 3)), np.array([draw(7, 10), draw(-1, 3)])
        return {"image": draw(0, 255, (2, 3)).astype(np.uint8) + np.uint8(salt), "rest": rest}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self._left -= 1
        seen = self._observe(int(action.sum()))
        info = {"success": float(action[0] > 0)} if action[1] > 5 else {}
        return seen, float(action[0]), self._left == 0, False, info


def test_a_vector_environment_of_any_spaces():
    """Each key, each action, the rewards, and the numbers of info at the ends."""
    factory = GymEnvFactory.of(
        Everything, vector=lambda n: SyncVectorEnv([Everything] * n, copy=False)
    )
    spec = adapt(factory).spec
    both = [make_envs(factory, spec, 3, seeded) for seeded in (False, True)]
    assert [type(envs) for envs in both] == [VectorEnvs, SeparateEnvs]
    seen = [zeros(spec, 3) for _ in both]
    for envs, into in zip(both, seen, strict=True):
        envs.begin(np.array([5, 6, 7]), into)
    resting, ends = np.zeros(3, np.bool_), 0
    generator = np.random.default_rng(0)
    for _ in range(60):
        for key in spec.observation:
            assert np.array_equal(seen[0][key], seen[1][key]), key
        action = generator.integers((3, 2), size=(3, 2))
        vector, separate = (
            envs.step(action, resting, into) for envs, into in zip(both, seen, strict=True)
        )
        for got, wanted in zip(vector, separate, strict=True):
            np.testing.assert_array_equal(got, wanted)
        columns = np.flatnonzero(separate.terminated).tolist()
        numbers = [envs.info_metrics(columns, ("nothing", "success")) for envs in both]
        told = [
            (("success", float(action[column, 0] > 1)),) if action[column, 1] else ()
            for column in columns
        ]
        assert numbers[0] == numbers[1] == told
        ends += len(columns)
        for envs, into in zip(both, seen, strict=True):
            envs.restart(np.flatnonzero(resting).tolist(), None, into)
        resting = separate.terminated
    assert ends > 20
    for envs in both:
        envs.close()


def test_native_and_single_cartpoles_make_the_same_transitions():
    """From the same states, by the same actions; only what a reset draws differs.

    The native one draws all its resets from one generator, four numbers for each of its carts, so
    each single one is put where the native one has begun.
    """
    factory = EnvSettings.make({"id": "CartPole-v1", "vector": True}).factory()
    spec = adapt(factory).spec
    native, single = (make_envs(factory, spec, 4, seeded) for seeded in (False, True))
    assert isinstance(native, VectorEnvs)
    assert isinstance(single, SeparateEnvs)
    seen, twin = zeros(spec, 4), zeros(spec, 4)
    native.begin(np.array([3, 4, 5, 6]), seen)
    single.begin(np.array([3, 4, 5, 6]), twin)
    generator = np.random.default_rng(0)
    resting, fresh, ends = np.zeros(4, np.bool_), np.ones(4, np.bool_), 0
    for _ in range(200):
        for column in np.flatnonzero(fresh).tolist():
            assert (np.abs(seen["observation"][column]) <= 0.05).all()
            cart: Any = single.adapters[column].env.unwrapped
            cart.state = tuple(map(float, native._env.unwrapped.state[:, column]))
            twin["observation"][column] = seen["observation"][column]
        np.testing.assert_array_equal(seen["observation"], twin["observation"])
        action = generator.integers(2, size=4)
        ours, theirs = native.step(action, resting, seen), single.step(action, resting, twin)
        for got, wanted in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(got, wanted)
        single.restart(np.flatnonzero(resting).tolist(), None, twin)
        fresh, resting = resting, ours.terminated | ours.truncated
        ends += int(resting.sum())
    assert ends > 20
    native.close()
    single.close()


def test_a_vector_environment_of_other_spaces():
    factory = GymEnvFactory.of(Lives, vector=lambda n: SyncVectorEnv([Everything] * n))
    words = "Lives: the vector environment observes Dict.*, but a single one observes Box"
    with pytest.raises(BadInput, match=words):
        make_envs(factory, adapt(factory).spec, 2, seeded=False)


@pytest.mark.parametrize("made", [None, 3, "another number of them"], ids=str)
def test_what_is_no_vector_environment(made):
    factory = GymEnvFactory.of(
        Lives, vector=lambda n: SyncVectorEnv([Lives] * (n + 1)) if isinstance(made, str) else made
    )
    words = "the vector environment of Lives: .* came, 2 environments in a .*VectorEnv are needed"
    with pytest.raises(BadInput, match=words):
        factory.vector(2)


def test_outcomes_of_a_reset_are_none():
    """Whatever a careless vector environment says of the step that only resets."""

    class Careless(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            observation, reward, *_, info = super().step(actions)
            ones = np.ones(self.num_envs, np.bool_)
            return observation, reward + 5, ones, ones, info

    factory = GymEnvFactory.of(Lives, vector=lambda n: Careless([Lives] * n))
    spec = adapt(factory).spec
    envs, into = make_envs(factory, spec, 2, seeded=False), zeros(spec, 2)
    envs.begin(np.array([1, 2]), into)
    steps = envs.step(np.zeros(2, np.int64), np.array([False, True]), into)
    assert steps.reward[0] >= 5
    assert steps.reward[1] == 0
    assert steps.terminated.tolist() == steps.truncated.tolist() == [True, False]
    envs.close()


@pytest.mark.parametrize("flag", [np.True_, np.array([True]), np.array(True), 1], ids=repr)
@pytest.mark.parametrize("reward", [np.float32(1), np.array([1.0], "f4"), 1], ids=repr)
def test_odd_flags_and_rewards_of_plain_environments(flag, reward):
    """Where environments need no adapting; one of them is odd, one is not."""

    class Odd(Lives):
        def step(self, action: Any) -> Any:
            observation, *_, info = super().step(action)
            return observation, reward, flag, False, info

    envs = SeparateEnvs([EnvAdapter(Odd(), "Odd"), EnvAdapter(Lives(), "Lives")])
    assert all(adapter.needs_no_adapting for adapter in envs.adapters)
    into = zeros(envs.adapters[0].spec, 2)
    envs.begin(np.array([1, 1]), into)
    steps = envs.step(np.zeros(2, np.int64), np.zeros(2, np.bool_), into)
    assert steps.terminated.dtype == np.bool_
    assert steps.terminated[0]
    assert steps.terminated.shape == steps.reward.shape == (2,)
    assert steps.reward[0] == 1.0
    envs.close()
