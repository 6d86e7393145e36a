"""What a worker does: step environments with a policy and fill unrolls. Knows no process."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch

from actorlearner.contracts import (
    EnvFactory,
    EnvSpec,
    Episode,
    EvaluationRequest,
    EvaluationResult,
    Failure,
    NonFiniteError,
    Observation,
    Snapshot,
    StreamState,
    Unroll,
    WorkerSpec,
)
from actorlearner.envs import EnvAdapter
from actorlearner.streams import stream_seed

logger = logging.getLogger(__name__)

EVALUATION_ENVS = 8
"""Environments that an evaluation steps together."""


class EnvWorker:
    """The environments of one worker, and the policy that acts in them.

    What it does follows from its spec and the snapshots alone, wherever it runs: every draw comes
    from the run's seed, the stream, the episode or the unroll's number.

    Attributes:
        phase: what it is doing, in words, for error messages.
        notes: what the user should know of how its streams began.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        """Build nothing yet: see `open`."""
        self.spec = spec
        self.phase = "start-up"
        self.notes: list[str] = []
        self._envs: list[EnvAdapter] = []
        self._sequence = spec.first_sequence
        self._snapshot: Snapshot | None = None

    def open(self) -> None:
        """Build the environments and the policy."""
        spec = self.spec
        self.phase = "constructing the environment"
        self._envs = []
        for _ in spec.streams:
            self._envs.append(_adapter(spec.env_factory))
        self.phase = "constructing the policy"
        self._policy = self._make_policy(greedy=False)
        count = len(spec.streams)
        self._observation = {
            key: array.zeros(count) for key, array in spec.env_spec.observation.items()
        }
        self._needs_reset = np.zeros(count, bool)
        self._first = np.ones(count, bool)
        self._returns = np.zeros(count)
        self._lengths = np.zeros(count, np.int64)
        self._episodes = np.zeros(count, np.int64)
        self._has_begun = False

    def _make_policy(self, greedy: bool) -> Any:
        spec = self.spec
        # A new network draws its initial weights from torch's global generator; that of whoever
        # runs this worker must not notice.
        with torch.random.fork_rng(devices=[]):
            return spec.policy_factory(spec.env_spec, spec.streams, spec.num_streams, greedy)

    def _begin(self) -> None:
        """Bring each stream to where it stood: start its episode, and repeat its actions."""
        self._has_begun = True
        states = self.spec.stream_states or tuple(StreamState(0) for _ in self.spec.streams)
        for column, state in enumerate(states):
            self._start_episode(column, state.episode, seeded=True)
        differ = [column for column, state in enumerate(states) if not self._repeat(column, state)]
        if not differ:
            return
        streams = self.spec.streams
        self.notes.append(
            f"{self.spec.env_factory.name} gave other observations when streams "
            f"{[streams[column] for column in differ]} repeated the actions of their episodes; "
            f"the episodes of streams {list(streams)} were started anew"
        )
        # All of them, as there is one sequence for all: its gap says so to whoever stores.
        self._sequence = self.spec.first_sequence + 1
        self._needs_reset[:] = False
        for column, state in enumerate(states):
            self._start_episode(column, state.episode + 1, seeded=True)

    def _repeat(self, column: int, state: StreamState) -> bool:
        """Whether the actions of ``state`` lead to where it stood."""
        if state.actions is None or state.observation is None:
            return True
        self.phase = "repeating an episode"
        for action in state.actions:
            if self._needs_reset[column]:
                return False
            observation, _, terminated, truncated = self._step(column, action)
            self._put(column, observation)
            self._needs_reset[column] = terminated or truncated
        self._first[column] = len(state.actions) == 0
        wanted = state.observation
        return all(np.array_equal(self._observation[k][column], wanted[k]) for k in wanted)

    def _start_episode(self, column: int, episode: int, seeded: bool) -> None:
        self.phase = "reset"
        seed = stream_seed(self.spec.seed, self.spec.streams[column], episode) if seeded else None
        self._put(column, self._envs[column].reset(seed))
        self._episodes[column] = episode
        self._first[column] = True
        self._returns[column] = 0.0
        self._lengths[column] = 0

    def _put(self, column: int, observation: Observation) -> None:
        for key, value in observation.items():
            self._observation[key][column] = value

    def _step(self, column: int, action: Any) -> tuple[Observation, float, bool, bool]:
        step = self._envs[column].step(action)
        self._returns[column] += step[1]
        self._lengths[column] += 1
        return step

    def collect(self, snapshot: Snapshot, into: Unroll) -> None:
        """Fill ``into`` with what ``snapshot`` does next.

        Raises:
            NonFiniteError: an observation or a reward is NaN or infinite.
        """
        spec = self.spec
        if not self._has_begun:
            self._begin()  # not in `open`: a long episode is no slow constructor
        if snapshot is not self._snapshot:
            self._policy.load(snapshot)
            self._snapshot = snapshot
        # The generator is a function of the unroll's number, so none needs saving.
        generator = np.random.Generator(
            np.random.Philox(np.random.SeedSequence([spec.seed, spec.streams[0], self._sequence]))
        )
        into.sequence, into.version = self._sequence, snapshot.version
        into.episodes = []
        policy_s = env_s = 0.0
        now = time.perf_counter()
        for key, array in self._observation.items():
            into.observation[key][0] = array
        for row in range(spec.unroll_length):
            self.phase = "the policy"
            observation = {key: array[row] for key, array in into.observation.items()}
            into.action[row] = self._policy.act(observation, generator)
            policy_s -= now - (now := time.perf_counter())
            if row == 0:
                into.started_at = time.monotonic()
            self._step_all(row, into)
            env_s -= now - (now := time.perf_counter())
        for key, array in into.observation.items():
            self._observation[key][:] = array[-1]
        self._check_finite(into)
        into.seconds = {"env": env_s, "policy": policy_s}
        self._sequence += 1

    def _step_all(self, row: int, into: Unroll) -> None:
        """One row: a step, or a reset, of every stream."""
        spec = self.spec
        observations = [(array[row + 1], key) for key, array in into.observation.items()]
        for column, stream in enumerate(spec.streams):
            if self._needs_reset[column]:
                self._start_episode(column, self._episodes[column] + 1, spec.seed_every_episode)
                self._needs_reset[column] = False
                next_observation = {k: a[column] for k, a in self._observation.items()}
                reward, terminated, truncated, valid, first = 0.0, False, False, False, False
                into.action[row, column] = 0
            else:
                self.phase = "step"
                action = into.action[row, column]
                next_observation, reward, terminated, truncated = self._step(column, action)
                truncated = truncated and not terminated
                valid, first = True, bool(self._first[column])
                self._first[column] = False
                if terminated or truncated:
                    self._needs_reset[column] = True
                    into.episodes.append(
                        Episode(
                            stream, row, float(self._returns[column]), int(self._lengths[column])
                        )
                    )
            for array, key in observations:
                array[column] = next_observation[key]
            into.reward[row, column] = reward
            into.terminated[row, column] = terminated
            into.truncated[row, column] = truncated
            into.valid[row, column] = valid
            into.first[row, column] = first

    def _check_finite(self, unroll: Unroll) -> None:
        self.phase = "step"
        fields = {f"observation {key!r}": array for key, array in unroll.observation.items()}
        for name, array in {**fields, "reward": unroll.reward}.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                index = tuple(np.argwhere(~np.isfinite(array))[0])
                row, column = index[:2]
                raise NonFiniteError(
                    f"{name} is {array[index]} in stream {self.spec.streams[column]}, at or just "
                    f"before row {row} of unroll {self._sequence}; the environment must give "
                    "finite numbers"
                )

    def evaluate(self, snapshot: Snapshot, request: EvaluationRequest) -> EvaluationResult:
        """Greedy episodes with raw rewards; training environments are not touched.

        Episode ``i`` starts from a seed of its own, so the result depends neither on how many
        environments step together nor on earlier evaluations.

        Args:
            snapshot: acts throughout.
            request: what to run.

        Raises:
            NonFiniteError: a return is NaN or infinite.
        """
        spec = self.spec
        count = min(EVALUATION_ENVS, request.episodes)
        self.phase = "constructing the environment"
        while len(self._envs) < count:
            self._envs.append(_adapter(spec.env_factory))
        self.phase = "constructing the policy"
        policy = self._make_policy(greedy=True)
        policy.load(snapshot)
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([request.seed])))
        observation = {k: a.zeros(count) for k, a in spec.env_spec.observation.items()}
        waiting = list(range(request.episodes))
        episode = [-1] * count
        returns, lengths = np.zeros(request.episodes), np.zeros(request.episodes, np.int64)
        cut = 0

        def begin(column: int) -> None:
            episode[column] = waiting.pop(0) if waiting else -1
            if episode[column] >= 0:
                self.phase = "reset of an evaluation episode"
                seed = stream_seed(request.seed, 0, episode[column], evaluation=True)
                for key, value in self._envs[column].reset(seed).items():
                    observation[key][column] = value

        for column in range(count):
            begin(column)
        while any(e >= 0 for e in episode):
            self.phase = "the policy, evaluating"
            action = policy.act(observation, generator)
            self.phase = "step of an evaluation episode"
            for column, number in enumerate(episode):
                if number < 0:
                    continue
                step, reward, terminated, truncated = self._envs[column].step(action[column])
                for key, value in step.items():
                    observation[key][column] = value
                returns[number] += reward
                lengths[number] += 1
                limited = request.step_limit is not None and lengths[number] >= request.step_limit
                if terminated or truncated or limited:
                    cut += not (terminated or truncated)
                    begin(column)
        if not np.isfinite(returns).all():
            raise NonFiniteError(f"the evaluation's returns are {returns}; rewards must be finite")
        return EvaluationResult(
            tuple(map(float, returns)),
            tuple(map(int, lengths)),
            cut,
            snapshot.version,
            request.env_steps,
        )

    def failure(self, error: BaseException) -> Failure:
        """What to tell of ``error``, which came out of one of the methods above."""
        return Failure.of(self.spec.index, self.spec.env_factory.name, self.phase, error)

    def close(self) -> None:
        """Close every environment that was built, whatever one of them says to it. Idempotent."""
        envs, self._envs = self._envs, []
        for env in envs:
            _close(env)


def _close(env: EnvAdapter) -> None:
    try:
        env.close()
    except Exception:  # must neither keep others open nor hide what came before
        logger.warning("closing %s failed", env.spec.name, exc_info=True)


def _adapter(factory: EnvFactory) -> EnvAdapter:
    """A new environment, adapted, or closed if it can't be."""
    env = factory()
    try:
        return EnvAdapter(env, factory.name)
    except Exception:
        env.close()
        raise


def probe(factory: EnvFactory) -> EnvSpec:
    """What ``factory`` makes, after a first look at what it really gives."""
    adapter = _adapter(factory)
    try:
        adapter.reset(None)
        return adapter.spec
    finally:
        _close(adapter)
