"""Every kind of environment with every agent: it trains, or says by design why it can't.

Each cell of the matrix goes all the way: probe, act, slot, replay, batch, update, evaluate. The
fast suite runs short cells, those of Rainbow only where its heads see something of their own;
``-m slow`` runs all of them, for 2,000 env steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from omegaconf import OmegaConf

from actorlearner import DQN, ReplayBuffer, Trainer
from actorlearner.config import config_dir, make
from actorlearner.contracts import UnsupportedSpace
from actorlearner.envs import EnvSettings, GymEnvFactory

FLOAT = spaces.Box(-1, 1, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (12, 12, 3), np.uint8)

OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "float32": FLOAT,
    "float64": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "float16": spaces.Box(-1, 1, (3,), np.float16),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "bool": spaces.Box(0, 1, (4,), np.bool_),
    "int8": spaces.Box(-128, 127, (3,), np.int8),
    "uint16": spaces.Box(0, 65535, (3,), np.uint16),
    "int32": spaces.Box(-9, 9, (3,), np.int32),
    "uint32": spaces.Box(0, 9, (3,), np.uint32),
    "int64": spaces.Box(-9, 9, (3,), np.int64),
    "uint64": spaces.Box(0, 9, (3,), np.uint64),
    "image HWC": IMAGE,
    "image CHW": spaces.Box(0, 255, (3, 36, 36), np.uint8),
    "image HW": spaces.Box(0, 255, (12, 12), np.uint8),
    "bool planes": spaces.Box(0, 1, (10, 10, 4), np.bool_),
    "float planes": spaces.Box(0, 1, (5, 5, 5), np.float32),
    "tiny image": spaces.Box(0, 255, (2, 2, 3), np.uint8),
    "discrete": spaces.Discrete(5),
    "discrete from -1": spaces.Discrete(3, start=-1),
    "multidiscrete": spaces.MultiDiscrete([3, 4], start=[0, 7]),
    "multidiscrete grid": spaces.MultiDiscrete([[3, 4], [5, 6]], np.int32),
    "multibinary": spaces.MultiBinary(5),
    "dict": spaces.Dict({"a b/c": FLOAT, "on": spaces.MultiBinary(2)}),
    "dict with image": spaces.Dict(image=IMAGE, vec=FLOAT, kind=spaces.Discrete(4)),
    "nested": spaces.Dict(
        one=spaces.Dict(two=spaces.Dict(three=FLOAT)), four=spaces.Tuple([spaces.Discrete(2)])
    ),
    "tuple": spaces.Tuple([FLOAT, spaces.Discrete(3, start=4), IMAGE]),
}
ACTIONS: dict[str, tuple[spaces.Space[Any], str]] = {
    "discrete": (spaces.Discrete(3), ""),
    "discrete from -1": (spaces.Discrete(3, start=-1), ""),
    "multidiscrete": (spaces.MultiDiscrete([3, 2], start=[-1, 5]), ""),
    "multidiscrete int32": (spaces.MultiDiscrete([2, 2], np.int32), ""),
    "multibinary": (spaces.MultiBinary(3), ""),
    "multidiscrete, 1,024": (spaces.MultiDiscrete([32, 32]), ""),
    "multidiscrete, 1,056": (spaces.MultiDiscrete([32, 33]), r"1,024; Any has .*, 1,056 of them"),
    "multibinary, 2,048": (spaces.MultiBinary(11), r"1,024; Any has .*, 2,048 of them"),
    "box": (spaces.Box(-1, 1, (2,), np.float32), r"DQN needs a Discrete, .*; Any has Box.*wrapper"),
}
"""Each with what is said of it if no agent takes it."""

AGENTS = ("dqn", "rainbow")


class AnyEnv(gymnasium.Env[Any, Any]):
    """Shows random observations of its space and takes only actions of its space.

    It ends after a few steps, by turns in a success and at a time limit. Arrays are used again.
    """

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._info: dict[str, Any] = {}
        self._episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._left = int(self.np_random.integers(1, 9))
        self._episodes += 1
        return self.observation_space.sample(), self._info

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self._left -= 1
        ended, succeeds = self._left == 0, self._episodes % 2 == 0
        self._info["success"] = np.array([succeeds])
        reward = np.array([np.sum(action)], np.float32)
        seen = self.observation_space.sample()
        return seen, reward, np.bool_(ended and succeeds), ended, self._info


def agent_of(name: str) -> DQN:
    """A tiny one with the settings of ``agent=name``."""
    node: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / "agent" / f"{name}.yaml"))
    agent = make({**node, "hidden": [8], "batch_size": 8}, "agent", "training_steps")
    assert isinstance(agent, DQN)
    return agent


def train(env: Any, agent: str, steps: int) -> dict[str, float]:
    """A tiny run in this process; a few updates."""
    trainer = Trainer(
        lockstep=True,  # one thread: much faster where others compute too
        workers=0,
        envs_per_worker=2,
        unroll_length=8,
        total_steps=steps,
        samples_per_insert=100 / steps,
        evaluation={"episodes": 2, "step_limit": 20},
        console="off",
    )
    buffer = ReplayBuffer(capacity=10 * steps, warmup_env_steps=steps // 4)
    metrics = trainer.fit(env, buffer, agent_of(agent))
    assert trainer.env_steps >= steps
    assert trainer.updates >= 5
    assert all(np.isfinite(value) for value in metrics.values())
    return metrics


def any_env(observation: Any, action: Any) -> GymEnvFactory:
    kwargs = {"observation_space": observation, "action_space": action}
    factory = GymEnvFactory.of(AnyEnv, kwargs)
    return GymEnvFactory("Any", factory.source, kwargs)


SHORT, LONG = 64, 2_000
"""Env steps of a cell in the fast suite, and in the slow one."""

OF_RAINBOW = {"dict with image", "discrete from -1", "multidiscrete", "box", "CartPole-v1"}
"""Where its short cells are run."""


def cells(names: Iterable[str]) -> pytest.MarkDecorator:
    """Every one of ``names`` with every agent, short and long."""
    found = []
    for name, agent in product(names, AGENTS):
        if agent == "dqn" or name in OF_RAINBOW:
            found.append(pytest.param(name, agent, SHORT, id=f"{name}-{agent}"))
        found.append(
            pytest.param(name, agent, LONG, id=f"{name}-{agent}-long", marks=pytest.mark.slow)
        )
    return pytest.mark.parametrize(("name", "agent", "steps"), found)


@cells(OBSERVATIONS)
def test_every_observation_space(name: str, agent: str, steps: int) -> None:
    metrics = train(any_env(OBSERVATIONS[name], spaces.Discrete(3)), agent, steps)
    assert 0 <= metrics["evaluation/success"] <= 1


@cells(ACTIONS)
def test_every_action_space(name: str, agent: str, steps: int) -> None:
    space, refusal = ACTIONS[name]
    env = any_env(FLOAT, space)
    if refusal:
        with pytest.raises(UnsupportedSpace, match=refusal):
            train(env, agent, steps)
    else:
        train(env, agent, steps)


TAXI = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))
IDS = {
    "CartPole-v1": "",
    "Acrobot-v1": "",
    "MountainCar-v0": "",
    "Blackjack-v1": "",
    "FrozenLake-v1": "",
    TAXI: "",
    "CliffWalking-v1": "",
    "Pendulum-v1": r"DQN needs a Discrete, .*; Pendulum-v1 has Box",
}


@cells(IDS)
def test_every_real_environment(name: str, agent: str, steps: int) -> None:
    env = EnvSettings.make({"id": name}).factory()
    if IDS[name]:
        with pytest.raises(UnsupportedSpace, match=IDS[name]):
            train(env, agent, steps)
    else:
        train(env, agent, steps)


@cells(["Pendulum-v1"])
def test_a_continuous_environment_made_discrete(name: str, agent: str, steps: int) -> None:
    """As the error advises."""
    wrapper = {"target": "gymnasium.wrappers:DiscretizeAction", "bins": 5}
    if not hasattr(gymnasium.wrappers, "DiscretizeAction"):
        pytest.skip("this Gymnasium has no such wrapper")
    train(EnvSettings.make({"id": name, "wrappers": [wrapper]}).factory(), agent, steps)
