"""Environments and an agent that are small enough to know the answers.

Worker processes import this module, so it imports nothing that is slow to load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from actorlearner.contracts import (
    Array,
    ArraySpec,
    Batch,
    EnvSpec,
    Observation,
    SampleSpec,
    Snapshot,
    StepOutput,
)


def vector_spec(size: int = 2, num_actions: int = 2) -> EnvSpec:
    """An environment with a float vector and ``num_actions`` actions."""
    observation = {"observation": ArraySpec((size,), "float32")}
    return EnvSpec("Vector", observation, ArraySpec((), "int64", (num_actions,)))


class Guess(gymnasium.Env[Any, Any]):
    """Pays 1 for action 1 where the first number is positive, and for action 0 elsewhere.

    Args:
        sleep_s: how long a step takes.
        uses_global_random: draw from NumPy's and torch's global generators at each step.
    """

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, sleep_s: float = 0.0, uses_global_random: bool = False) -> None:
        self._sleep_s = sleep_s
        self._uses_global_random = uses_global_random

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(3, 9))
        return self._observe(), {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        if self._uses_global_random:
            np.random.random()
            torch.rand(())
        reward = float(action == (self._seen[0] > 0))
        self._left -= 1
        return self._observe(), reward, self._left == 0, False, {}

    def _observe(self) -> Array:
        self._seen = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self._seen


class Treadmill(gymnasium.Env[Any, Any]):
    """Pays ``reward`` for each of ``limit`` steps; there is only one action.

    The observation is one-hot in the step; after the last step it is that of the last step again,
    so that the value of the final observation is one that is learned.

    Args:
        truncates: the end is a truncation, not a termination.
        shows_step: otherwise the observation is always the same.
        reward: for a step.
        limit: steps of an episode.
    """

    action_space = spaces.Discrete(1)

    def __init__(
        self, truncates: bool, shows_step: bool, reward: float = 1.0, limit: int = 10
    ) -> None:
        self._truncates = truncates
        self._reward = reward
        self._limit = limit
        self._size = limit if shows_step else 1
        self.observation_space = spaces.Box(0, 1, (self._size,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._step += 1
        ended = self._step == self._limit
        return self._observe(), self._reward, ended and not self._truncates, ended, {}

    def _observe(self) -> Array:
        return np.eye(self._size, dtype=np.float32)[min(self._step, self._size - 1)]


class Chain(gymnasium.Env[Any, Any]):
    """Five places in a row, one-hot; the right end pays 1 and terminates, the left is a wall."""

    PLACES = 5
    observation_space = spaces.Box(0, 1, (PLACES,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._place = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._place = max(0, self._place + (1 if action else -1))
        ended = self._place == self.PLACES
        return self._observe(), float(ended), ended, False, {}

    def _observe(self) -> Array:
        return np.eye(self.PLACES, dtype=np.float32)[min(self._place, self.PLACES - 1)]


@dataclass
class Features:
    """What the first training step of `Regressor` hands to the second."""

    features: Tensor
    batch: Batch


class Regressor(nn.Module):
    """Predicts the reward of each action (step ``reward``), then the next observation (``next``).

    Two training steps with an optimizer each, no target network, no priorities; it acts at random,
    greedily by the predicted reward.
    """

    def __init__(self, reward_lr: float = 0.1, next_lr: float = 0.1) -> None:
        super().__init__()
        self.learning_rates = {"reward": reward_lr, "next": next_lr}
        self.after_steps: list[tuple[str, int]] = []

    def build(self, env_spec: EnvSpec) -> None:
        if not hasattr(self, "reward"):
            (observation,) = env_spec.observation.values()
            self.reward = nn.Linear(observation.shape[0], env_spec.action.categories[0])
            self.next = nn.Linear(env_spec.action.categories[0], observation.shape[0])

    @property
    def sample_spec(self) -> SampleSpec:
        return SampleSpec(batch_size=8)

    def policy_factory(self, extras: Sequence[str] = ()) -> type[RegressorPolicy]:
        assert not extras
        return RegressorPolicy

    def snapshot(self, version: int) -> Snapshot:
        arrays = {k: v.detach().numpy() for k, v in self.reward.state_dict().items()}
        return Snapshot(version, arrays, self.scalars)

    @property
    def scalars(self) -> dict[str, float]:
        return {}

    def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        parts = {"reward": self.reward, "next": self.next}
        return {
            name: torch.optim.SGD(part.parameters(), lr=self.learning_rates[name])
            for name, part in parts.items()
        }

    def training_steps(self) -> dict[str, Callable[[Any], StepOutput]]:
        return {"reward": self.reward_step, "next": self.next_step}

    def reward_step(self, batch: Batch) -> StepOutput:
        features = self.reward(batch.observation["observation"])
        predicted = features.gather(1, batch.action.unsqueeze(1)).squeeze(1)
        loss = (predicted - batch.reward).square().mean()
        # With its graph: only the optimizers keep one part's loss from moving the other.
        return StepOutput(loss, {"loss": loss}, carry=Features(self.reward(
            batch.observation["observation"]), batch))  # fmt: skip

    def next_step(self, carry: Features) -> StepOutput:
        loss = (self.next(carry.features) - carry.batch.next_observation["observation"]).square()
        return StepOutput(loss.mean(), {"loss": loss.mean()})

    def after_step(self, name: str, updates: int) -> None:
        self.after_steps.append((name, updates))


class RegressorPolicy:
    """Acts for `Regressor`."""

    extras_spec: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, env_spec: EnvSpec, streams: Sequence[int], num_streams: int, greedy: bool
    ) -> None:
        self._num_actions = env_spec.action.categories[0]
        self._greedy = greedy

    def load(self, snapshot: Snapshot) -> None:
        self._weight, self._bias = snapshot.arrays["weight"].copy(), snapshot.arrays["bias"].copy()

    def act(self, observation: Observation, generator: np.random.Generator) -> Any:
        seen = observation["observation"]
        if not self._greedy:
            return generator.integers(self._num_actions, size=len(seen)), {}
        return (seen @ self._weight.T + self._bias).argmax(1), {}


class SlowPolicy(RegressorPolicy):
    """Takes its time in training."""

    SLEEP_S = 0.005

    def act(self, observation: Observation, generator: np.random.Generator) -> Any:
        if not self._greedy:
            time.sleep(self.SLEEP_S)
        return super().act(observation, generator)
