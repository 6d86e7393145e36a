"""``experiment=breakout_labml`` against the page's numbers, row by row of the checklist.

Rows that are tested where the thing itself is: P1, I3 (test_trainer), P2, P10, P11, X9
(unit/test_suites, unit/test_networks), P6 (test_trainer), P7 (unit/test_suites), P9, P14, P15
(unit/test_dqn), P12 (unit/test_worker, unit/test_runlog), P13, X3 (unit/test_replay,
unit/test_sum_tree), P16 (test_trainer), P18 (test_documents), P19, P21 (test_trainer, test_run),
P20, X6 (test_failures), X1 (learning/test_exact_values), X5, X8 (unit/test_worker), X7
(contracts/test_launchers, test_trainer).
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from actorlearner.agents.dqn import DQN
from actorlearner.config import config_dir, make
from actorlearner.contracts import ArraySpec, EnvSpec
from actorlearner.launch.inline import InlineLauncher
from actorlearner.replay import ReplayBuffer
from actorlearner.trainer import Trainer

GAME = EnvSpec(
    "Game",
    {"observation": ArraySpec((84, 84), "uint8", stack=4)},
    ArraySpec((), "int64", (4,)),
)


@pytest.fixture(scope="module")
def config() -> DictConfig:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("config", ["experiment=breakout_labml"])


def agent_of(config: DictConfig, **changes: Any) -> DQN:
    agent = make({**config.agent, **changes}, "agent", "training_steps")
    assert isinstance(agent, DQN)
    return agent


def test_p3_the_settings_of_the_page(config: DictConfig) -> None:
    rounds, epochs, workers, worker_steps, batch = 1_000_000, 8, 8, 4, 32
    assert (config.workers, config.envs_per_worker) == (workers, 1)
    assert config.unroll_length == worker_steps
    assert config.agent.batch_size == batch
    rows = workers * worker_steps
    assert config.total_steps == rounds * rows
    assert config.samples_per_insert == epochs * batch / rows
    assert config.agent.target_every_updates == 250 * epochs
    assert config.agent.learning_rate == 1e-4


def test_p4_what_the_page_writes_into_its_code(config: DictConfig) -> None:
    agent, replay = config.agent, config.replay
    assert (agent.gamma, agent.n_step, agent.reward_clip) == (0.99, 1, None)
    assert (agent.double, agent.dueling, agent.adam_epsilon) == (True, True, 1e-8)
    assert (replay.alpha, replay.beta_start, replay.beta_updates) == (0.6, 0.4, None)
    assert (replay.capacity, replay.priority_epsilon) == (2**14, 1e-6)
    assert (replay.prioritized, replay.initial_priority) == (True, "max")
    assert config.trainer.gradient_clip_val == 0.5
    env = config.env
    assert (env.id, env.sticky_actions, env.frame_skip) == ("ALE/Breakout-v5", 0.0, 4)
    assert (env.screen_size, env.frame_stack, env.grayscale) == (84, 4, True)
    assert (env.terminal_on_life_loss, env.fire_on_reset) == (True, False)


@pytest.mark.parametrize(
    ("round_number", "epsilon"),
    [(0, 1.0), (511, 0.9816), (12_500, 0.55), (25_000, 0.1), (500_000, 0.01), (10**6, 0.01)],
)
def test_p5_epsilon(round_number: int, epsilon: float, config: DictConfig) -> None:
    agent = agent_of(config)
    agent.current_step = round_number * 32
    assert agent.scalars["epsilon"] == pytest.approx(epsilon, abs=5e-5)


def test_the_network_has_the_parameters_of_the_page(config: DictConfig) -> None:
    agent = agent_of(config)
    agent.build(GAME)
    assert sum(p.numel() for p in agent.online.parameters()) == 1_948_069


class Endless(gymnasium.Env[Any, Any]):
    """Never ends."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Counting(ReplayBuffer):
    """Notes what was stored at each batch, and the rows of each round."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.rounds: list[int] = []
        self.stored_at_batch: list[int] = []
        self.betas: list[float] = []

    def add(self, unroll: Any) -> None:
        super().add(unroll)
        if unroll.worker == 0:
            self.rounds.append(0)
        self.rounds[-1] += unroll.env_steps

    def sample(self) -> Any:
        self.stored_at_batch.append(len(self.rounds) - 1)
        self.betas.append(self.beta)
        return super().sample()


def test_p8_p17_rounds_of_32_and_training_from_round_511_on(config: DictConfig) -> None:
    # Everything as there but the game and the network, for 514 rounds.
    rows = 514 * 32
    settings = {k: v for k, v in config.replay.items() if k != "target"}
    replay = Counting(**settings)
    agent = agent_of(config, torso="auto", hidden=[4], dueling_hidden=None)
    trainer = Trainer(
        workers=config.workers,
        unroll_length=config.unroll_length,
        samples_per_insert=config.samples_per_insert,
        total_steps=rows,
        lockstep=True,
        launcher=InlineLauncher(),
        console="off",
        evaluation={"episodes": 1, "step_limit": 1},
    )
    trainer.fit(Endless, replay, agent)
    assert replay.rounds == [32] * 514
    assert replay.stored_at_batch == [511] * 8 + [512] * 8 + [513] * 8
    assert replay.metrics()["size"] == 2**14
    assert replay.betas == sorted(replay.betas)
    assert replay.betas[0] == 0.4
