"""How one environment is spoken to: spaces, actions, rewards, flags, lives."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from actorlearner.adapter import EnvAdapter, FlatSpaces, info_metrics
from actorlearner.contracts import ArraySpec, BadInput, UnsupportedSpace


class Spaces(gymnasium.Env):
    """An environment of any spaces, whose observations and rewards are told it."""

    def __init__(self, observation_space: Any, action_space: Any = None) -> None:
        self.observation_space = observation_space
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        self.observation = observation_space.sample()
        self.outcome: tuple[Any, Any, Any] = (0.0, False, False)
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation, {}

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        return self.observation, *self.outcome, {}


def adapted(observation_space: Any, action_space: Any = None) -> tuple[Spaces, EnvAdapter]:
    env = Spaces(observation_space, action_space)
    return env, EnvAdapter(env, "Spaces")


# ------------------------------------------------------------------------------------ observations

BOX = spaces.Box(0, 255, (2, 3), np.uint8)


@pytest.mark.parametrize(
    ("space", "specs"),
    [
        (BOX, {"observation": ArraySpec((2, 3), "uint8")}),
        (spaces.Box(-1, 1, (), np.float16), {"observation": ArraySpec((), "float16")}),
        (spaces.Discrete(4, start=2), {"observation": ArraySpec((), "int64", (4,))}),
        (spaces.MultiDiscrete([2, 5]), {"observation": ArraySpec((2,), "int64", (2, 5))}),
        (
            spaces.MultiDiscrete([[2, 5], [3, 4]]),
            {"observation": ArraySpec((2, 2), "int64", (2, 5, 3, 4))},
        ),
        (spaces.MultiBinary(3), {"observation": ArraySpec((3,), "int8", (2, 2, 2))}),
        (
            spaces.Dict(
                image=BOX,
                vector=spaces.Box(-1, 1, (3,), np.float32),
                kind=spaces.Discrete(4),
                deep=spaces.Tuple([spaces.MultiBinary(2), spaces.Dict(on=spaces.Discrete(2))]),
            ),
            {
                "image": ArraySpec((2, 3), "uint8"),
                "vector": ArraySpec((3,), "float32"),
                "kind": ArraySpec((), "int64", (4,)),
                "deep.0": ArraySpec((2,), "int8", (2, 2)),
                "deep.1.on": ArraySpec((), "int64", (2,)),
            },
        ),
        (
            spaces.Tuple([spaces.Discrete(32), spaces.Discrete(11), spaces.Discrete(2)]),
            {str(i): ArraySpec((), "int64", (n,)) for i, n in enumerate((32, 11, 2))},
        ),
    ],
    ids=str,
)
def test_observation_specs(space, specs):
    env, adapter = adapted(space)
    assert adapter.spec.observation == specs
    assert adapter.spec.observation_space == str(space)
    for seed in range(5):
        space.seed(seed)
        env.observation = space.sample()
        for observation in (adapter.reset(None), adapter.step(np.int64(0))[0]):
            assert observation.keys() == specs.keys()
            for key, spec in specs.items():
                leaf = env.observation
                for part in key.split(".") if key != "observation" else ():
                    leaf = leaf[int(part) if part.isdigit() else part]
                start = 2 if isinstance(space, spaces.Discrete) else 0
                assert np.array_equal(observation[key], leaf - start if start else leaf)
                assert np.shape(observation[key]) == spec.shape


def test_observations_count_from_zero():
    space = spaces.Dict(
        one=spaces.Discrete(3, start=-1), many=spaces.MultiDiscrete([3, 2], start=[-1, 5])
    )
    env, adapter = adapted(space)
    env.observation = {"one": -1, "many": np.array([1, 5])}
    observation = adapter.reset(None)
    assert observation["one"] == 0
    assert observation["many"].tolist() == [2, 0]
    assert env.observation["many"].tolist() == [1, 5]  # theirs stays as it is
    env.observation = {"one": np.int64(1), "many": np.array([-1, 6])}
    observation = adapter.step(np.int64(0))[0]
    assert observation["one"] == 2
    assert observation["many"].tolist() == [0, 1]


class OldGymBox:
    """As of the package that came before Gymnasium."""

    def sample(self) -> Any:
        return np.zeros(2)

    def __repr__(self) -> str:
        return "OldGymBox()"


OldGymBox.__module__ = "gym.spaces.box"


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Text(10), "Spaces: observation is Text"),
        (spaces.Sequence(BOX), "Spaces: observation is Sequence"),
        (spaces.Graph(BOX, None), "Spaces: observation is Graph"),
        (spaces.Dict(a=BOX, b=spaces.Dict(c=spaces.Text(3))), r"Spaces: b\.c is Text"),
        (spaces.Tuple([BOX, spaces.Text(3)]), "Spaces: 1 is Text"),
        (spaces.Dict(), "holds nothing"),
        (OldGymBox(), r"gym\.spaces\.box\.OldGymBox\); this is a gym space, gymnasium is needed"),
        (
            spaces.Dict({"a": spaces.Dict({"b": BOX}), "a.b": BOX}),
            r"Spaces: two parts .* are called a\.b",
        ),
    ],
    ids=str,
)
def test_refused_observation_spaces(space, words):
    with pytest.raises(UnsupportedSpace, match=words):
        adapted(space)


def test_an_action_has_bounds_where_they_are_finite():
    space = spaces.Box(np.float32([[-2, 0]]), np.float32([[2, 1.5]]))
    spec = FlatSpaces.of(space, space, "Spaces").spec
    assert spec.action == ArraySpec((1, 2), "float32", low=(-2, 0), high=(2, 1.5))
    assert spec.observation["observation"] == ArraySpec((1, 2), "float32")
    half = spaces.Box(np.float32([-1, -np.inf]), np.float32([1, 1]))
    assert FlatSpaces.of(space, half, "Spaces").spec.action == ArraySpec((2,), "float32")


def test_refused_action_space():
    with pytest.raises(UnsupportedSpace, match="Spaces: its action space is Text"):
        adapted(BOX, spaces.Text(3))
    with pytest.raises(UnsupportedSpace, match="Box, Discrete, MultiDiscrete, MultiBinary"):
        adapted(BOX, spaces.Dict(a=BOX))


@pytest.mark.parametrize("wrong", [np.zeros((3, 2), "u1"), np.zeros((1, 3), "u1"), np.uint8(0)])
def test_observation_of_another_shape(wrong):
    """Also where NumPy would fill the array with what fits by broadcasting."""
    env, adapter = adapted(BOX)
    env.observation = wrong
    promise = r"observation of shape .*; its observation space promises \(2, 3\)"
    with pytest.raises(BadInput, match=f"Spaces: reset gave {promise}"):
        adapter.reset(None)
    with pytest.raises(BadInput, match=f"Spaces: step gave {promise}"):
        adapter.step(np.int64(0))


# ----------------------------------------------------------------------------------------- actions


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3),
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([3, 2, 4]),
        spaces.MultiDiscrete([3, 2], start=[-1, 7]),
        spaces.MultiDiscrete([3, 2], np.int32),
        spaces.MultiDiscrete([[3, 2], [4, 5]]),
        spaces.MultiBinary(4),
        spaces.Box(-1, 1, (3,), np.float32),
        spaces.Box(-1, 1, (2, 2), np.float64),
        spaces.Box(-1, 1, (), np.float32),
        spaces.Box(0, 9, (3,), np.int32),
        spaces.Box(0, 1, (3,), np.bool_),
        spaces.Box(-1, 1, (3,), np.float16),
    ],
    ids=str,
)
def test_the_environment_sees_actions_of_its_space(space):
    env, adapter = adapted(BOX, space)
    spec = adapter.spec.action
    space.seed(0)
    row = spec.zeros(2)  # actions arrive as views of an unroll, which must not get out
    start = getattr(space, "start", None)
    for _ in range(10):
        wanted = space.sample()
        row[1] = wanted if start is None else wanted - start
        adapter.step(row[1])
    given = list(env.actions)
    row[:] = 0
    space.seed(0)
    for action in given:
        wanted = space.sample()
        assert space.contains(action), action
        assert type(action) is type(wanted)
        assert action.dtype == space.dtype
        assert np.array_equal(action, wanted)
    assert spec.is_discrete == isinstance(space, spaces.Discrete)


# ------------------------------------------------------------------------------- rewards and flags


@pytest.mark.parametrize(
    "reward",
    [1, 1.0, True, np.float32(1), np.int64(1), np.array(1.0), np.array([1.0], "f4")],
    ids=repr,
)
@pytest.mark.parametrize("flag", [True, np.True_, 1], ids=repr)
def test_reward_and_flags_become_plain(reward, flag):
    env, adapter = adapted(BOX)
    env.outcome = reward, flag, type(flag)(0)
    _, number, terminated, truncated, *_ = adapter.step(np.int64(0))
    assert type(number) is float
    assert number == 1.0
    assert terminated is True
    assert truncated is False


def test_reward_of_many_numbers():
    env, adapter = adapted(BOX)
    env.outcome = np.zeros(2), False, False
    with pytest.raises(BadInput, match=r"Spaces: step gave the reward array\(\[0\., 0\.\]\)"):
        adapter.step(np.int64(0))


# ------------------------------------------------------------------------------------------- lives
class Told(Spaces):
    """Has as many lives as it is told."""

    lives: Any = 3

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation, {"lives": self.lives}

    def step(self, action: Any) -> Any:
        return self.observation, *self.outcome, {"lives": self.lives}


def test_a_lost_life():
    """Where fewer are left than before, and the episode goes on."""
    env = Told(BOX)
    adapter = EnvAdapter(env, "Told", tells_lives=True)
    adapter.reset(None)

    def lost_life(lives: int, terminated: bool = False, truncated: bool = False) -> bool:
        env.lives, env.outcome = lives, (0.0, terminated, truncated)
        *_, step_terminated, step_truncated, lost, _ = adapter.step(np.int64(0))
        assert (step_terminated, step_truncated) == (terminated, truncated)
        return lost

    told = {3: False, 2: True, 1: True, 0: True, 5: False, 4: True}
    assert {lives: lost_life(lives) for lives in told} == told
    assert not lost_life(4)
    assert not lost_life(3, terminated=True)
    env.lives = 7
    adapter.reset(None)
    assert not lost_life(7)
    assert not lost_life(6, truncated=True)


def test_lives_that_are_not_told():
    env, _ = adapted(BOX)
    adapter = EnvAdapter(env, "Spaces", tells_lives=True)
    with pytest.raises(BadInput, match="Spaces: info has no lives, so terminal_on_life_loss"):
        adapter.reset(None)
    told = Told(BOX)
    adapter = EnvAdapter(told, "Told")
    adapter.reset(None)
    told.lives = 2  # nobody asks
    assert not adapter.step(np.int64(0))[4]


# ------------------------------------------------------------------------------ odd givings


def test_a_part_that_is_missing():
    env, adapter = adapted(spaces.Dict(a=BOX, b=spaces.Tuple([BOX, BOX])))
    env.observation = {"a": env.observation["a"]}
    with pytest.raises(BadInput, match=r"Spaces: reset gave an observation without b\.0: KeyError"):
        adapter.reset(None)
    env.observation = None
    with pytest.raises(BadInput, match="Spaces: step gave an observation without a: TypeError"):
        adapter.step(np.int64(0))


def test_a_reset_of_the_old_kind():
    """The observation alone."""
    env, adapter = adapted(BOX)
    env.reset = lambda **_: env.observation  # type: ignore[method-assign]
    with pytest.raises(BadInput, match=r"reset gave array(?s:.*)gives \(observation, info\)"):
        adapter.reset(None)


@pytest.mark.parametrize("promised", [np.uint8, np.int64, np.bool_])
def test_fractions_in_a_space_of_whole_numbers(promised):
    """They would be rounded down to nothing without a word."""
    env, adapter = adapted(spaces.Box(0, 1, (2,), promised))
    env.observation = np.array([0.4, 0.6])
    words = f"Spaces: reset gave observation of float64; .* {np.dtype(promised)}, .* fractions"
    with pytest.raises(BadInput, match=words):
        adapter.check_dtypes(adapter.reset(None))
    env.observation = np.array([0, 1])
    adapter.check_dtypes(adapter.reset(None))


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize <= 8, reason="has no longer floats")
def test_floats_that_torch_does_not_know():
    with pytest.raises(UnsupportedSpace, match=r"observation is Box.*up to 64 bits"):
        FlatSpaces.of(spaces.Box(0, 1, (2,), np.longdouble), spaces.Discrete(2), "Spaces")


# -------------------------------------------------------------------------------------- info


class Point(NamedTuple):
    x: float


@dataclass
class Record:
    success: bool = True


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (0, 0.0),
        (2.5, 2.5),
        (np.float32(0.5), 0.5),
        (np.int8(-3), -3.0),
        (np.True_, 1.0),
        (np.array(4.0), 4.0),
        (np.array([[7]], "u1"), 7.0),
        (np.array([1.0, 2.0]), None),
        (np.array([]), None),
        (np.array(["yes"]), None),
        (np.array([None], object), None),
        (None, None),
        ("1.0", None),
        (math.nan, None),
        (-math.inf, None),
        (10**400, None),
        (1j, None),
        (np.complex64(1), None),
        ([1.0], None),
        ({"x": 1.0}, None),
        (Point(1.0), None),
        (Record(), None),
        (threading.Lock(), None),
        (lambda: 1.0, None),
    ],
    ids=lambda value: type(value).__name__ if " at 0x" in repr(value) else repr(value),
)
def test_numbers_of_info(value, number):
    """One finite number or flag; whatever else stands there is none and does no harm."""
    info = {"other": object(), "success": value}
    wanted = () if number is None else (("success", number),)
    assert info_metrics(info, ("is_success", "success")) == wanted


@pytest.mark.parametrize("info", [None, [], Record(), {}, {1: 2}], ids=repr)
def test_info_without_numbers(info):
    assert info_metrics(info, ("success",)) == ()
