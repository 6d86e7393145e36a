"""States of environments: what is taken out is put back, wrappers and all, or nothing is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces, wrappers

from actorlearner.adapter import EnvAdapter
from actorlearner.envstate import get_state, set_state
from actorlearner.statetree import Packed, alike
from actorlearner.suites import AtariSettings


class Drift(gymnasium.Env):
    """A walk that draws from its own generator, and keeps its place in one array for all time."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(3)

    def __init__(self) -> None:
        self.at = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at[:] = self.np_random.random(2)
        return self.at.copy(), {}

    def step(self, action: Any) -> Any:
        self.at += [self.np_random.normal(), action]
        return self.at.copy(), float(self.at[0]), bool(self.at[1] > 20), False, {}

    def get_state(self) -> Any:
        return {"at": self.at, "tag": b"\x00walk", "deep": [(1, None), {"a": 2.5}]}

    def set_state(self, state: Any) -> None:
        assert state["tag"] == b"\x00walk"
        assert state["deep"] == [(1, None), {"a": 2.5}]
        self.at = state["at"]


def wrapped(*layers: Callable[[Any], Any]) -> Any:
    env: Any = Drift()
    for layer in layers:
        env = layer(env)
    return env


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "TimeLimit": lambda env: wrappers.TimeLimit(env, 9),
    "OrderEnforcing": wrappers.OrderEnforcing,
    "FrameStackObservation": lambda env: wrappers.FrameStackObservation(env, 3),
    "NormalizeObservation": wrappers.NormalizeObservation,
    "NormalizeReward": wrappers.NormalizeReward,
    "RecordEpisodeStatistics": lambda env: wrappers.RecordEpisodeStatistics(env, 4),
    "TransformReward": lambda env: wrappers.TransformReward(env, lambda reward: 2 * reward),
    "DelayObservation": lambda env: wrappers.DelayObservation(env, 2),
}


def run(env: Any, steps: int) -> list[Any]:
    rows = []
    for step in range(steps):
        observation, reward, terminated, truncated, info = env.step(step % 3)
        statistics = {k: v for k, v in info.get("episode", {}).items() if k != "t"}  # seconds
        rows.append((np.array(observation).tolist(), reward, terminated, truncated, statistics))
        if terminated or truncated:
            rows.append(np.array(env.reset()[0]).tolist())
    return rows


@pytest.mark.parametrize("names", [(), *((name,) for name in WRAPPERS), tuple(WRAPPERS)])
def test_goes_on_as_if_never_stopped(names):
    """In another environment with another past; and again, as the state is nobody's to change."""
    layers = [WRAPPERS[name] for name in names]
    env = wrapped(*layers)
    env.reset(seed=1)
    run(env, 25)
    state = get_state(env)
    expected = run(env, 40)
    for seed in (2, 3):
        other = wrapped(*layers)
        other.reset(seed=seed)
        run(other, 5)
        set_state(other, state)
        assert alike(get_state(other), state)
        assert run(other, 40) == expected


def test_a_state_can_be_stored():
    env = wrapped(*WRAPPERS.values())
    env.reset(seed=1)
    run(env, 25)
    assert Packed.of(get_state(env), "state").size_bytes > 0


def test_a_wrapper_with_a_state_of_its_own_speaks_for_all_inside():
    class Speaks(gymnasium.Wrapper):
        def __init__(self, env: Any) -> None:
            super().__init__(env)
            self.secret = object()

        def get_state(self) -> Any:
            return self.unwrapped.at.tolist()

        def set_state(self, state: Any) -> None:
            self.unwrapped.at[:] = state

    env, other = (wrapped(wrappers.OrderEnforcing, Speaks) for _ in range(2))
    env.reset(seed=1)
    other.reset(seed=2)
    state = get_state(env)
    assert state is not None
    assert state["layers"] == [env.unwrapped.at.tolist()]
    set_state(other, state)
    assert run(other, 10) == run(env, 10)


class Keeps(gymnasium.Wrapper):
    """Holds something that is no plain data."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.journal = object()


class OtherMeaning(gymnasium.Env):
    """As MuJoCo's: what `set_state` takes is not what `get_state` gives."""

    def get_state(self) -> Any:
        return 0

    def set_state(self, position: Any, velocity: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    "env", [gymnasium.make("CartPole-v1"), OtherMeaning(), wrapped(Keeps), wrapped(Keeps, Keeps)]
)
def test_one_that_can_not_tell(env):
    assert get_state(env) is None


@pytest.mark.parametrize(
    "layers", [(), (wrappers.NormalizeReward,), (wrappers.NormalizeObservation,) * 2]
)
def test_other_wrappers_than_the_state_tells_of(layers):
    env = wrapped(wrappers.NormalizeObservation)
    env.reset(seed=1)
    other = wrapped(*layers)
    other.reset(seed=1)
    with pytest.raises(ValueError, match=r"than its state tells of|takes no state"):
        set_state(other, get_state(env))


@pytest.mark.parametrize("frame_skip", [1, 4])
def test_a_game_of_ale(frame_skip):
    """To its end and beyond: with sticky actions, lives, and the frames that are joined."""
    factory = AtariSettings(
        sticky_actions=0.25, fire_on_reset=True, frame_skip=frame_skip, max_frames=1200
    ).factory()
    games = [EnvAdapter(factory(), "game", tells_lives=True) for _ in range(2)]
    try:
        for seed, game in enumerate(games):
            game.reset(seed)
        for step in range(60):
            games[0].step(step % 4)
        games[1].set_state(games[0].get_state())
        lives_lost = ended = 0
        for step in range(2000 // frame_skip):
            one, other = (game.step(step % 4) for game in games)
            (name,) = one[0]
            np.testing.assert_array_equal(one[0][name], other[0][name])
            assert one[1:5] == other[1:5]
            lives_lost += one[4]
            if one[2] or one[3]:
                ended += 1
                break
        assert lives_lost
        assert ended
    finally:
        for game in games:
            game.close()
