"""`load_policy`: it does what the evaluation did, whatever the spaces, and refuses the rest."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from actorlearner import checkpoint, load_policy
from actorlearner.agents.dqn import DQN, DQNSettings
from actorlearner.contracts import BadInput, CheckpointError, SettingError
from actorlearner.envs import GymEnvFactory
from actorlearner.replay import ReplayBuffer
from actorlearner.suites import MinAtarSettings
from actorlearner.trainer import Trainer
from tests.tiny import Guess, Regressor

DICT = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (6, 6, 3), np.uint8),
        "inner": spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiBinary(2)]),
        "pair": spaces.MultiDiscrete([3, 4]),
        "vector": spaces.Box(-1, 1, (2,), np.float64),
    }
)
SPACES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any], int]] = {
    "vector": (spaces.Box(-9, 9, (4,), np.float32), spaces.Discrete(4), 1),
    "stacked image": (spaces.Box(0, 255, (12, 12), np.uint8), spaces.Discrete(9), 3),
    "dict, start -1": (DICT, spaces.Discrete(5, start=-1), 1),
    "stacked dict": (DICT, spaces.MultiDiscrete([3, 5], start=[4, -2]), 2),
}


class Noise(gymnasium.Env[Any, Any]):
    """Episodes of 12 samples of a space; notes all that it was asked and gave."""

    log: ClassVar[list[tuple[Any, Any]]] = []

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self._left = 12
        return self._observe(None), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self._left -= 1
        return self._observe(action), 0.0, self._left == 0, False, {}

    def _observe(self, action: Any) -> Any:
        observation = self.observation_space.sample()
        self.log.append((action, observation))
        return observation


def trained(run_dir: Path, env: Any, agent: Any = None) -> Path:
    """A run whose log holds two evaluated episodes of an agent that knows nothing."""
    Noise.log.clear()
    agent = agent or DQN(hidden=(16,), batch_size=8)
    evaluation = {"episodes": 2, "step_limit": 100}
    trainer = Trainer(total_steps=0, workers=0, run_dir=run_dir, console="off",
                      evaluation=evaluation, seed=4)  # fmt: skip
    trainer.fit(env, ReplayBuffer(capacity=64), agent)
    return run_dir


def noise(name: str) -> GymEnvFactory:
    observation_space, action_space, stack = SPACES[name]
    return GymEnvFactory("Noise", lambda: Noise(observation_space, action_space), frame_stack=stack)


def episodes() -> list[list[tuple[Any, Any]]]:
    """Those of `Noise.log`, whose two environments took turns."""
    resets = [i for i, (action, _) in enumerate(Noise.log) if action is None]
    assert resets[-2:] == [len(Noise.log) - 26, len(Noise.log) - 25]
    both = Noise.log[-26:]
    return [both[0::2], both[1::2]]


@pytest.fixture(scope="module", params=SPACES)
def evaluated(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Which spaces, a run, and what its evaluation did."""
    run_dir = tmp_path_factory.mktemp("evaluated") / "run"
    trained(run_dir, noise(request.param), DQN(hidden=(64,), batch_size=8))
    return request.param, run_dir, episodes()


def test_it_does_what_the_evaluation_did(evaluated: Any) -> None:
    _, run_dir, both = evaluated
    policy = load_policy(run_dir)
    taken = []
    for episode in both:
        for (_, observation), (action, _) in pairwise(episode):
            mine = policy.act(observation)
            assert type(mine) is type(action)
            assert np.asarray(mine).dtype == np.asarray(action).dtype
            assert np.array_equal(mine, action)
            taken.append(np.asarray(mine).tolist())
        policy.reset()
    assert len(taken) == 24
    assert any(action != taken[0] for action in taken), "or it would prove nothing"


def batched(space: spaces.Space[Any], observations: list[Any]) -> Any:
    """As a vector environment gives them."""
    many = gymnasium.vector.utils.create_empty_array(space, len(observations))
    return gymnasium.vector.utils.concatenate(space, observations, many)


def test_many_at_once_as_one_by_one(evaluated: Any) -> None:
    name, run_dir, (one, other) = evaluated
    policy = load_policy(run_dir)
    space, action_space, _ = SPACES[name]
    # The second column begins anew after 5 steps, with the first episode.
    columns = [(one[t][1], (other[t] if t < 5 else one[t - 5])[1]) for t in range(12)]
    for t, pair in enumerate(columns):
        actions = policy.act_batch(batched(space, list(pair)), np.array([False, t == 5]))
        wanted = [one[t + 1][0], (other[t + 1] if t < 5 else one[t - 4])[0]]
        assert np.array_equal(actions, np.stack([np.asarray(action) for action in wanted]))
        assert all(action_space.contains(action) for action in actions)


@pytest.mark.slow
def test_minatar_plays_as_it_was_evaluated(tmp_path: Path) -> None:
    factory = MinAtarSettings(id="MinAtar/Breakout-v0").factory()
    trainer = Trainer(total_steps=0, workers=0, run_dir=tmp_path, console="off",
                      evaluation={"episodes": 1, "step_limit": 200})  # fmt: skip
    metrics = trainer.fit(factory, ReplayBuffer(capacity=64), DQN(hidden=(16,)))
    policy, env = load_policy(tmp_path), factory()
    from actorlearner.streams import stream_seed

    observation, _ = env.reset(seed=stream_seed(0, 0, 0, evaluation=True))
    total, steps, ended = 0.0, 0, False
    while not ended and steps < 200:
        observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
        total, steps, ended = total + float(reward), steps + 1, terminated or truncated
    env.close()
    assert (total, steps) == (metrics["evaluation/return_mean"], metrics["evaluation/length_mean"])


class TestChance:
    @pytest.fixture
    def explorer(self, tmp_path: Path) -> Path:
        return trained(tmp_path / "run", Guess, DQN(hidden=(8,), evaluation_epsilon=0.5))

    def test_without_a_seed_there_is_none(self, explorer: Path) -> None:
        seen = np.array([0.5, 0.5], np.float32)
        policy = load_policy(explorer)
        assert len({policy.act(seen) for _ in range(64)}) == 1

    def test_with_a_seed_it_explores_as_evaluations_do(self, explorer: Path) -> None:
        seen = np.tile(np.array([0.5, 0.5], np.float32), (4_000, 1))
        best = load_policy(explorer).act(seen[0])
        policy = load_policy(explorer, seed=3)
        actions = policy.act_batch(seen)
        assert np.array_equal(actions, load_policy(explorer, seed=3).act_batch(seen))
        assert not np.array_equal(actions, policy.act_batch(seen))
        # A quarter of the actions is another one; four standard deviations.
        assert np.mean(actions != best) == pytest.approx(0.25, abs=4 * (0.1875 / 4_000) ** 0.5)


def test_torch_draws_as_if_nothing_was_loaded(tmp_path: Path) -> None:
    trained(tmp_path, Guess)
    torch.manual_seed(5)
    wanted = torch.rand(())
    torch.manual_seed(5)
    load_policy(tmp_path)
    assert torch.rand(()) == wanted


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("bad") / "run", noise("stacked dict"))


class TestBadObservations:
    GOOD: ClassVar[dict[str, Any]] = {
        "image": np.zeros((6, 6, 3), np.uint8),
        "inner": (-1, [0, 1]),
        "pair": np.array([2, 3]),
        "vector": [0.5, 1],
    }

    def test_plain_numbers_and_lists_will_do(self, run: Path) -> None:
        other = {**self.GOOD, "image": np.full((6, 6, 3), 3.0), "vector": torch.zeros(2)}
        policy = load_policy(run)
        for observation in (self.GOOD, other):
            assert SPACES["stacked dict"][1].contains(policy.act(observation))

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("image", np.zeros((6, 6), np.uint8), "image of shape"),
            ("image", np.full((6, 6, 3), 0.5), "float64 with numbers that are no uint8"),
            ("image", np.full((6, 6, 3), 256), "int64 with numbers that are no uint8"),
            ("vector", [0.0, float("nan")], "vector that is not finite"),
            ("vector", ["a", "b"], "of dtype <U1; needed: float64"),
            ("inner", (2, [0, 1]), r"inner.0 that its observation space does not hold"),
            ("inner", (-1, [0, 2]), r"inner.1 that its observation space does not hold"),
            ("inner", (-1,), "without inner.1: IndexError"),
            ("pair", np.array([2, -1]), "pair that its observation space does not hold"),
        ],
    )
    def test_one_error_says_what_is_wrong(
        self, run: Path, key: str, value: Any, message: str
    ) -> None:
        with pytest.raises(BadInput, match=f"Noise: the caller gave .*{message}"):
            load_policy(run).act({**self.GOOD, key: value})

    def test_nothing_like_it(self, run: Path) -> None:
        for observation in (None, 3, [], np.zeros(3)):
            with pytest.raises(BadInput, match="without image"):
                load_policy(run).act(observation)

    def test_batches_of_other_sizes(self, run: Path) -> None:
        policy = load_policy(run)
        two = batched(DICT, [DICT.sample(), DICT.sample()])
        policy.act_batch(two)
        with pytest.raises(BadInput, match="1 observations after 2; the policy goes on"):
            policy.act(self.GOOD)
        with pytest.raises(BadInput, match=r"first of shape \(3,\): must be \(2,\)"):
            policy.act_batch(two, np.zeros(3, np.bool_))
        with pytest.raises(BadInput, match="one number is needed"):
            policy.act_batch({**two, "vector": np.zeros((3, 2))})
        policy.reset()
        policy.act(self.GOOD)


class TestWhatIsLoaded:
    def test_no_environment_is_made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trained(tmp_path, Guess)
        monkeypatch.setattr(Guess, "__init__", None)
        monkeypatch.setattr(DQN, "configure_optimizers", None)
        policy = load_policy(checkpoint.find(tmp_path) / "agent.json")
        assert policy.env_steps == 0
        assert policy.env_spec.name == "Guess"
        assert policy.agent.training is False

    def test_a_foreign_agent_needs_trust_and_its_settings(self, tmp_path: Path) -> None:
        trained(tmp_path, Guess, Regressor())
        with pytest.raises(CheckpointError, match=r"settings of its tests.tiny:Regressor; hand"):
            load_policy(tmp_path, trust=["tests"])
        seen = np.array([0.5, 0.5], np.float32)
        assert load_policy(tmp_path, agent=Regressor()).act(seen) in (0, 1)
        with pytest.raises(CheckpointError, match=r"holds tests.tiny:Regressor, not .*DQN"):
            load_policy(tmp_path, agent=DQN())

    def test_an_agent_of_another_package_needs_trust(self, tmp_path: Path) -> None:
        trained(tmp_path, Guess, Foreign(hidden=(8,)))
        with pytest.raises(SettingError, match=r"tests is not trusted; add trust=\[tests\]"):
            load_policy(tmp_path)
        assert isinstance(load_policy(tmp_path, trust=["tests"]).agent, Foreign)

    def test_settings_that_json_can_not_hold_end_no_run(self, tmp_path: Path) -> None:
        trained(tmp_path, Guess, Unwritten(hidden=(8,)))
        assert checkpoint.read_manifest(checkpoint.find(tmp_path)).info["agent_settings"] is None

    def test_what_an_older_version_wrote(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trained(tmp_path, Guess)
        manifest = checkpoint.read_manifest(checkpoint.find(tmp_path))
        old = json.loads(json.dumps(manifest.info))
        del old["env"]["native_observation"], old["env"]["native_action"], old["agent_settings"]
        monkeypatch.setattr(type(manifest), "info", property(lambda _: old), raising=False)
        monkeypatch.setattr(checkpoint, "read_manifest", lambda _: manifest)
        with pytest.raises(CheckpointError, match="an older version wrote it"):
            load_policy(tmp_path)


class Foreign(DQN):
    """An agent of another package."""


@dataclass(frozen=True, kw_only=True)
class UnwrittenSettings(DQNSettings):
    """With a number that JSON has no word for."""

    limit: float = math.inf


class Unwritten(DQN):
    """Tells settings that a checkpoint can't hold."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.settings = UnwrittenSettings(**settings)
