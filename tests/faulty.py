"""An environment and an agent that fail on demand: ``env.id=tests.faulty:Faulty-v0``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from actorlearner.agents.dqn import DQN
from actorlearner.contracts import Batch, StepOutput

EPISODE = 10
"""Env steps of an episode."""


class Faulty(gymnasium.Env[Any, Any]):
    """Counts its env steps. In the worker processes ``workers`` it has a fault."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fault: str = "none", at: int = 0, workers: tuple[int, ...] = (1,)) -> None:
        """Fail now, or from env step ``at`` on.

        Args:
            fault: none, constructor, reset, step, no-number, sleep or exit.
            at: env steps that it makes before.
            workers: those where it fails; -1 is the evaluation worker.
        """
        process = Path("/proc/self/comm").read_text().strip()
        names = {"al-evaluate" if i < 0 else f"al-worker-{i}" for i in workers}
        self.fault = fault if process in names else "none"
        self.at = at
        self.steps = 0
        self._fail("constructor")

    def _fail(self, phase: str) -> None:
        if self.fault == phase and self.steps >= self.at:
            raise ValueError(f"boom in the {phase}")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._fail("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self._fail("step")
        is_due = self.steps >= self.at
        if is_due and self.fault == "sleep":
            Path(os.environ["ASLEEP"]).touch()
            time.sleep(60)
        if is_due and self.fault == "exit":
            os._exit(3)
        value = np.nan if is_due and self.fault == "no-number" else self.np_random.random()
        ends = self.steps % EPISODE == 0
        return np.full(2, value, np.float32), float(action), False, ends, {}


gymnasium.register("Faulty-v0", Faulty)


class BrokenDQN(DQN):
    """Raises in its fifth update."""

    def q_training_step(self, batch: Batch) -> StepOutput:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 5:
            raise RuntimeError("the agent is broken")
        return super().q_training_step(batch)


class Texts(Faulty):
    """Observes words, among other things."""

    observation_space = gymnasium.spaces.Dict(
        {"words": gymnasium.spaces.Text(10), "count": gymnasium.spaces.Discrete(3)}
    )


gymnasium.register("Texts-v0", Texts)
