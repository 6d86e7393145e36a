"""Faults that users of other systems met with spaces and environments; see tests/CASES.md."""

from __future__ import annotations

import tracemalloc
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from actorlearner import DQN, ReplayBuffer, Trainer
from actorlearner.adapter import EnvAdapter
from actorlearner.contracts import SampleSpec, StreamLayout, Unroll, UnsupportedSpace
from actorlearner.envs import EnvSettings, GymEnvFactory
from actorlearner.launch.inline import InlineLauncher
from actorlearner.launch.local import LocalLauncher
from actorlearner.worker import EnvWorker, probe
from tests.environments import snapshot, worker_specs
from tests.tiny import Guess


def tiny_trainer(**settings: Any) -> Trainer:
    """A run of a few updates in this process."""
    settings = {"total_steps": 60, "samples_per_insert": 1.0, **settings}
    return Trainer(
        lockstep=True, workers=0, unroll_length=8, console="off",
        evaluation={"episodes": 2, "step_limit": 20}, **settings,
    )  # fmt: skip


class FromMinusOne(gymnasium.Env):
    """Takes -1, 0 and 1, and pays the action; remembers what it was given."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(3, start=-1)
    given: list[Any]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        type(self).given.append(action)
        assert self.action_space.contains(action)
        ended = bool(self.np_random.random() < 0.1)
        return np.zeros(2, np.float32), float(action), ended, False, {}


def test_case_34_actions_from_minus_one() -> None:
    """The environment sees -1, 0, 1, the learner 0, 1, 2, of which the last pays most."""
    FromMinusOne.given = []
    batches = []

    class Learner(DQN):
        def q_training_step(self, batch: Any) -> Any:
            batches.append((batch.action.numpy(), batch.reward.numpy()))
            return super().q_training_step(batch)

    model = Learner(hidden=[], gamma=0.0, learning_rate=0.3, batch_size=16, epsilon=[[0, 0.9]])
    trainer = tiny_trainer(total_steps=200, samples_per_insert=4.0)
    metrics = trainer.fit(FromMinusOne, ReplayBuffer(capacity=500, warmup_env_steps=50), model)
    assert set(FromMinusOne.given) == {-1, 0, 1}
    assert all((reward == action - 1).all() for action, reward in batches)
    assert {int(a) for action, _ in batches for a in action} == {0, 1, 2}
    assert metrics["evaluation/return_mean"] == metrics["evaluation/length_mean"]  # 1 each step


class ImageVecKind(gymnasium.Env):
    """Shows an image, a vector and a kind, all of which say the step."""

    observation_space = spaces.Dict(
        img=spaces.Box(0, 255, (64, 64, 3), np.uint8),
        vec=spaces.Box(-1e3, 1e3, (3,), np.float32),
        k=spaces.Discrete(4),
    )
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._img = np.zeros((64, 64, 3), np.uint8)  # used again

    def _observe(self) -> Any:
        self._img[:] = self._step
        return {"img": self._img, "vec": np.full(3, self._step, "f4"), "k": self._step % 4}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._observe(), 1.0, self._step == 9, False, {}


@pytest.mark.parametrize("workers", [1, 3])
def test_case_38_each_key_in_its_own_dtype(workers: int) -> None:
    """In the replay and in the batch, whatever the number of workers; memory is that of the parts.

    And a batch holds what the environment showed at that step, in every key.
    """

    class Acts:
        extras_spec: dict[str, Any] = {}  # noqa: RUF012 - as the protocol asks

        def __call__(self, *_: Any) -> Any:
            return self

        def load(self, _: Any) -> None:
            pass

        def act(self, observation: Any, generator: Any) -> Any:
            return generator.integers(2, size=len(observation["k"])), {}

    factory = GymEnvFactory.of(ImageVecKind)
    env_spec = probe(factory)
    specs = worker_specs(
        *[factory] * workers, env_spec=env_spec, policy_factory=Acts(), unroll_length=10
    )
    buffer = ReplayBuffer(capacity=300, prioritized=False)
    buffer.build(env_spec, SampleSpec(batch_size=32), StreamLayout(2 * workers, 10), 10)
    with InlineLauncher() as launcher:
        launcher.start(specs, snapshot(0))
        for _ in range(4):
            for unroll in launcher.gather(0.0, lambda: True):
                buffer.add(unroll)
    batch = buffer.sample()
    for side in (batch.observation, batch.next_observation):
        assert {k: (str(v.dtype), tuple(v.shape)) for k, v in side.items()} == {
            "img": ("torch.uint8", (32, 64, 64, 3)),
            "vec": ("torch.float32", (32, 3)),
            "k": ("torch.int64", (32,)),
        }
        step = side["vec"][:, 0].numpy()
        assert (side["img"].flatten(1).numpy() == step[:, None]).all()
        assert (side["k"].numpy() == step % 4).all()
    assert (batch.next_observation["vec"] == batch.observation["vec"] + 1).all()


def test_case_38_memory_is_the_sum_of_the_parts() -> None:
    """Image, vector and kind of a row, and a few bytes for action, reward, flags and links."""
    spec = EnvAdapter(ImageVecKind(), "ImageVecKind").spec
    buffer = ReplayBuffer(capacity=1_000, prioritized=False)
    tracemalloc.start()
    buffer.build(spec, SampleSpec(batch_size=8), StreamLayout(1, 20), 10)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    parts = 64 * 64 * 3 + 3 * 4 + 8
    assert parts <= taken / 1_000 < parts + 100


def test_case_40_a_stack_of_colour_images() -> None:
    """Made by a wrapper it is refused, with the way that stores each frame once; that works."""
    wrapper = {"target": "gymnasium.wrappers:FrameStackObservation", "stack_size": 2}
    kwargs = {"observation_space": spaces.Box(0, 255, (12, 12, 3), np.uint8)}

    class Colours(FromMinusOne):
        def reset(self, **arguments: Any) -> Any:
            super().reset(**arguments)
            return np.zeros((12, 12, 3), np.uint8), {}

        def step(self, action: Any) -> Any:
            return np.zeros((12, 12, 3), np.uint8), *super().step(action)[1:]

    Colours.given, Colours.observation_space = [], kwargs["observation_space"]
    settings = EnvSettings.make({"wrappers": [wrapper]})
    stacked = GymEnvFactory("Colours", Colours, wrappings=settings.wrappings(()))
    buffer = {"capacity": 100, "warmup_env_steps": 20}
    words = r"observation has frames of shape \(2, 12, 12, 3\).*env\.frame_stack.*agent\.torso=mlp"
    with pytest.raises(UnsupportedSpace, match=words):
        tiny_trainer().fit(stacked, ReplayBuffer(**buffer), DQN(batch_size=8))
    tiny_trainer().fit(stacked, ReplayBuffer(**buffer), DQN(batch_size=8, torso="mlp"))
    merged = DQN(batch_size=8)
    ours = GymEnvFactory("Colours", Colours, frame_stack=2)
    tiny_trainer().fit(ours, ReplayBuffer(**buffer), merged)
    (first, *_) = [p for p in merged.online.parameters() if p.dim() == 4]
    assert first.shape[1] == 6


def test_case_23_workers_are_never_plain_forks() -> None:
    """So that they start clean where the learner has used a GPU; snapshots are on the CPU."""
    for method in ("auto", "forkserver", "spawn"):
        context = LocalLauncher(start_method=method)._context
        assert context.get_start_method() in ("forkserver", "spawn")
    model = DQN()
    model.build(EnvAdapter(Guess(), "Guess").spec)
    assert all(isinstance(array, np.ndarray) for array in model.snapshot(0).arrays.values())


class Flickers(gymnasium.Env):
    """Draws from the global generators."""

    observation_space = spaces.Box(0, 1, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def _observe(self) -> Any:
        import random

        return np.array([np.random.random(), random.random()])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        return self._observe(), 0.0, False, False, {}


def test_case_92_global_generators_inline() -> None:
    """A run seeds them once, in the learner's process; the environments of a run then differ."""
    seen = []
    for _ in range(2):
        firsts: list[Any] = []

        class Watched(EnvWorker):
            def collect(self, snapshot: Any, into: Unroll) -> None:
                super().collect(snapshot, into)
                firsts.append(into.observation["observation"].copy())  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("actorlearner.launch.inline.EnvWorker", Watched)
            buffer = ReplayBuffer(capacity=100, warmup_env_steps=20)
            tiny_trainer(envs_per_worker=2).fit(Flickers, buffer, DQN(hidden=[4], batch_size=8))
        seen.append(np.array(firsts))
    assert np.array_equal(*seen)
    assert len(np.unique(seen[0][0])) == seen[0][0].size
