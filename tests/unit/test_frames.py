"""Frame stacks: those that policies see, and that replay makes the same ones of single frames."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from hypothesis import given, settings
from hypothesis import strategies as st

from actorlearner.contracts import (
    ArraySpec,
    EnvSpec,
    EvaluationRequest,
    SampleSpec,
    Snapshot,
    StreamLayout,
    Unroll,
    WorkerSpec,
)
from actorlearner.envs import GymEnvFactory
from actorlearner.frames import FrameStack
from actorlearner.replay import ReplayBuffer
from actorlearner.streams import StreamLedger, assign_streams, stream_seed
from actorlearner.worker import EnvWorker, probe
from tests.saved import saved

# -------------------------------------------------------------------------------- the stack alone


@settings(max_examples=100, deadline=None)
@given(
    stacks=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    num_columns=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_stacks_equal_the_twin(stacks, num_columns, seed):
    """Every column a list of frames, padded at the front with the first one of the episode."""
    shapes = {"image": (2, 3), "number": ()}
    specs = {
        key: ArraySpec(shape, "int32", stack=stack)
        for (key, shape), stack in zip(shapes.items(), stacks, strict=True)
    }
    generator = np.random.default_rng(seed)
    frame_stack = FrameStack(specs, num_columns)
    episodes: list[list[dict[str, Any]]] = [[] for _ in range(num_columns)]
    for turn in range(20):
        observation = {
            key: generator.integers(1000, size=(num_columns, *shape), dtype=np.int32)
            for key, shape in shapes.items()
        }
        first = generator.random(num_columns) < (1.0 if turn == 0 else 0.2)
        still = ~first & (generator.random(num_columns) < 0.3)
        for column, frames in enumerate(episodes):
            if first[column]:
                frames.clear()
            if not still[column]:
                frames.append({key: array[column].copy() for key, array in observation.items()})
        given_still = still if still.any() or turn % 2 else None
        frame_stack.push(observation, first, given_still)
        stacked = frame_stack.over(observation)
        assert stacked.keys() == shapes.keys()
        for key, spec in specs.items():
            if spec.stack == 1:
                assert stacked[key] is observation[key]
                continue
            assert stacked[key].shape == (num_columns, *spec.stacked_shape)
            assert stacked[key].dtype == spec.dtype
            for column, frames in enumerate(episodes):
                padded = [frames[0]] * spec.stack + frames
                wanted = [frame[key] for frame in padded[-spec.stack :]]
                assert np.array_equal(stacked[key][column], wanted)


def test_stacks_equal_gymnasiums():
    """``FrameStackObservation`` with ``padding_type="reset"``, over a few episodes."""
    wrapped = FrameStackObservation(gymnasium.make("CartPole-v1"), 3, padding_type="reset")
    env = gymnasium.make("CartPole-v1")
    frame_stack = FrameStack({"observation": ArraySpec((4,), "float32", stack=3)}, 1)
    is_over = True
    for turn in range(80):
        first = is_over
        if first:
            wanted, here, is_over = wrapped.reset(seed=turn)[0], env.reset(seed=turn)[0], False
        else:
            wanted = wrapped.step(turn % 2)[0]
            here, _, is_over, _, _ = env.step(turn % 2)
        frame_stack.push({"observation": here[None]}, np.array([first]))
        stacked = frame_stack.over({"observation": here[None]})["observation"]
        assert np.array_equal(stacked[0], wanted)
    wrapped.close()
    env.close()


# ---------------------------------------------------------------------------- acting and replay


class Film(gymnasium.Env):
    """Observes ``(seed, resets since, step)`` and the step once more; the rest is drawn from these.

    Episodes have 1 to 9 steps; lives are lost, and episodes end in every way.
    """

    observation_space = spaces.Dict(
        where=spaces.Box(0, 2**31 - 1, (3,), np.int64), step=spaces.Box(0, 255, (), np.uint8)
    )
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._where = [0, 0, 0]

    @staticmethod
    def plan(seed: int, episode: int) -> tuple[int, str, Any]:
        """Length and end of an episode, and in which of its steps a life is lost."""
        generator = np.random.default_rng([seed, episode])
        length = int(generator.integers(1, 10))
        end = generator.choice(["terminated", "truncated", "both"])
        return length, str(end), generator.random(length) < 0.2

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._where = [self._where[0], self._where[1] + 1, 0] if seed is None else [seed, 0, 0]
        self._lives = 100
        return self._observe(), {"lives": self._lives}

    def step(self, action: Any) -> Any:
        length, end, lost = self.plan(*self._where[:2])
        self._lives -= int(lost[self._where[2]])
        self._where[2] += 1
        is_end = self._where[2] == length
        terminated, truncated = is_end and end != "truncated", is_end and end != "terminated"
        return self._observe(), 1.0, terminated, truncated, {"lives": self._lives}

    def _observe(self) -> Any:
        return {"where": np.array(self._where), "step": np.uint8(self._where[2])}


def assert_whole(observation: Any, column: int, stack: int) -> None:
    """A stack of ``where`` that ends with what it should begin with; ``step`` has none."""
    frames = np.asarray(observation["where"][column]).reshape(stack, 3).tolist()
    seed, episode, step = frames[-1]
    assert frames == [[seed, episode, max(0, step - back)] for back in reversed(range(stack))]
    assert observation["step"][column] == step


class Watcher:
    """A policy that acts at random, and looks at what it sees.

    Attributes:
        observations: how many it has seen.
    """

    observations = 0

    def __init__(self, env_spec: EnvSpec, greedy: bool) -> None:
        self._stack, self._greedy = env_spec.observation["where"].stack, greedy

    def load(self, snapshot: Snapshot) -> None:
        pass

    def act(self, observation: Any, generator: np.random.Generator) -> Any:
        for column, where in enumerate(observation["where"].reshape(-1, self._stack, 3)):
            seed, episode, step = map(int, where[-1])
            # In an evaluation the observations of columns that have nothing left to do stay.
            if not self._greedy or step < Film.plan(seed, episode)[0]:
                assert_whole(observation, column, self._stack)
                Watcher.observations += 1
        return generator.integers(2, size=len(observation["step"])), {}


class WatcherFactory:
    """The recipe of `Watcher`."""

    extras_spec: ClassVar[dict[str, Any]] = {}

    def __call__(self, env_spec: EnvSpec, streams: Any, num_streams: int, greedy: bool) -> Watcher:
        return Watcher(env_spec, greedy)


def film_specs(stack: int, unroll_length: int, workers: int, envs: int) -> list[WorkerSpec]:
    """Of workers that `Film` for; only ``where`` is stacked."""
    factory = replace(GymEnvFactory.of(Film), frame_stack=stack, terminal_on_life_loss=True)
    env_spec = probe(factory)
    assert {spec.stack for spec in env_spec.observation.values()} == {stack}
    observation = {**env_spec.observation, "step": ArraySpec((), "uint8")}
    return [
        WorkerSpec(
            index=index,
            streams=streams,
            num_streams=workers * envs,
            seed=3,
            unroll_length=unroll_length,
            env_factory=factory,
            policy_factory=WatcherFactory(),
            env_spec=replace(env_spec, observation=observation),
            seed_every_episode=True,
        )
        for index, streams in enumerate(assign_streams(workers, envs))
    ]


class Studio:
    """Workers that `Film`, and the buffer that they fill."""

    def __init__(self, stack: int, unroll_length: int, num_blocks: int, n_step: int) -> None:
        self._stack, self._length = stack, unroll_length
        self._capacity, self._n_step = num_blocks * unroll_length, n_step
        self._ledger = StreamLedger(4, record_actions=True)
        self._begin(workers=2, envs=2)

    def _begin(self, workers: int, envs: int) -> None:
        """Go on from where the ledger says that streams stand."""
        ledger, self._ledger = self._ledger, StreamLedger(workers * envs, record_actions=True)
        self._ledger.load_state_dict(copy.deepcopy(ledger.state_dict()))
        self._specs = film_specs(self._stack, self._length, workers, envs)
        self._workers = [self._opened(spec) for spec in self._specs]
        self.buffer = self._new_buffer()

    def _opened(self, spec: WorkerSpec) -> EnvWorker:
        sequence, states = self._ledger.going_on(spec.streams)
        worker = EnvWorker(replace(spec, first_sequence=sequence, stream_states=states))
        worker.open()
        return worker

    def _new_buffer(self) -> ReplayBuffer:
        buffer = ReplayBuffer(capacity=self._capacity)
        spec, num_streams = self._specs[0], self._specs[0].num_streams
        layout = StreamLayout(num_streams, self._length)
        buffer.build(spec.env_spec, SampleSpec(200, n_step=self._n_step), layout, 100)
        return buffer

    def do(self, operation: str) -> None:
        """Let one thing happen."""
        verb, _, argument = operation.partition(" ")
        if verb == "reload":
            state = saved(self.buffer)
            if argument == "same":
                self.buffer = self._new_buffer()
            else:
                self._begin(*map(int, argument.split("x")))
            self.buffer.load_state_dict(state)
            self._check()
            return
        for index in (int(digit) % len(self._workers) for digit in argument):
            if verb == "collect":
                self._collect(index, is_lost=False)
            elif verb == "lose":
                self._collect(index, is_lost=True)
            else:
                self._workers[index].close()
                self._workers[index] = self._opened(self._specs[index])

    def _collect(self, index: int, is_lost: bool) -> None:
        spec = self._specs[index]
        arrays = {name: s.zeros() + np.ones((), s.dtype) for name, s in spec.unroll_layout.items()}
        unroll = Unroll.from_arrays(index, spec.streams, arrays)
        self._workers[index].collect(Snapshot(0, {}), unroll)
        if not is_lost:
            self._ledger.note(unroll)
            self.buffer.add(unroll)
            self._check()

    def _check(self) -> None:
        self.buffer.check_valid()
        if self.buffer.ready():
            batch = self.buffer.sample()
            for observation in (batch.observation, batch.next_observation):
                arrays = {key: tensor.numpy() for key, tensor in observation.items()}
                for column in range(len(batch.keys)):
                    assert_whole(arrays, column, self._stack)


OPERATIONS = [
    *("collect 01", "collect 10", "collect 000", "collect 111", "lose 0", "restart 0", "restart 1"),
    *("reload same", "reload 1x1", "reload 1x3", "reload 1x4", "reload 2x2"),
]


@settings(max_examples=100, deadline=None)
@given(
    operations=st.lists(
        st.sampled_from(OPERATIONS),
        min_size=3,
        max_size=15,
    ),
    stack=st.integers(2, 5),
    extra_rows=st.integers(0, 3),
    extra_blocks=st.integers(0, 6),
    n=st.sampled_from([1, 3, 5]),
)
def test_replay_makes_the_stacks_that_acting_saw(operations, stack, extra_rows, extra_blocks, n):
    """To the bit, for all that real workers do, whatever happens to them and to the buffer.

    Both are compared with what a stack must be that ends where it ends.
    """
    studio = Studio(stack, stack - 1 + extra_rows, 8 + extra_blocks, n)
    Watcher.observations = 0
    for operation in ["collect 01", *operations, "collect 01"]:
        studio.do(operation)
    assert Watcher.observations > 0


def test_evaluations_stack_too():
    """Also where one column begins an episode while others go on."""
    (spec,) = film_specs(3, 4, 1, 2)
    Watcher.observations = 0
    result = EnvWorker(spec).evaluate(Snapshot(0, {}), EvaluationRequest(30, None, seed=5))
    seeds = [stream_seed(5, 0, episode, evaluation=True) for episode in range(30)]
    assert list(result.lengths) == [Film.plan(seed, 0)[0] for seed in seeds]
    assert Watcher.observations == sum(result.lengths)
