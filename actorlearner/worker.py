"""What a worker does: step environments with a policy and fill unrolls. Knows no process.

Legend of the suffixes: B columns, one stream each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorlearner.acting import equip
from actorlearner.columns import ColumnSteps, Envs, SeparateEnvs, adapt, close, make_envs
from actorlearner.contracts import (
    Array,
    EnvFactory,
    EnvSpec,
    EnvStates,
    Episodes,
    EvaluationRequest,
    EvaluationResult,
    Failure,
    InfoMetrics,
    NonFiniteError,
    Observation,
    RecurrentPolicy,
    Snapshot,
    StreamState,
    Unroll,
    WorkerSpec,
)
from actorlearner.evaluator import Evaluator
from actorlearner.frames import FrameStack
from actorlearner.policies import act, check_categories, make_policy
from actorlearner.pulse import Pulse
from actorlearner.statetree import Packed, alike
from actorlearner.streams import stream_seed

_PHASES_OF_ENV = frozenset(
    {
        "constructing the environment",
        "reset",
        "step",
        "repeating an episode",
        "reset of an evaluation episode",
        "step of an evaluation episode",
        "rendering an evaluation episode",
    }
)
"""Those in which the environment is at work: what is raised then is its error."""


class EnvWorker:
    """The environments of one worker, and the policy that acts in them.

    What it does follows from its spec and the snapshots alone, wherever it runs: every draw comes
    from the run's seed, the stream, the episode or the unroll's number.

    Attributes:
        notes: what the user should know of how its streams began.
        pulse: its signs of life.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        """Build nothing yet: see `open`."""
        self.spec = spec
        self.pulse = Pulse()
        self.notes: list[str] = []
        self._envs: Envs = SeparateEnvs([])
        self._evaluator = Evaluator(spec)
        self._sequence = spec.first_sequence
        self._tells_state = True
        self._snapshot: Snapshot | None = None

    def open(self) -> None:
        """Build the environments and the policy."""
        spec = self.spec
        count = len(spec.streams)
        self.pulse.phase = "constructing the environment"
        episode = spec.stream_states[0].episode if spec.stream_states else 0
        seed = stream_seed(spec.seed, spec.streams[0], episode)
        self._envs = make_envs(
            spec.env_factory, spec.env_spec, count, spec.seed_every_episode, seed
        )
        self.pulse.phase = "constructing the policy"
        self._policy = make_policy(spec, greedy=False)
        self._adopt = equip(self._policy, spec.acting)
        # Looked at once: of a protocol it takes as long as a row of an unroll.
        self._recurrent = self._policy if isinstance(self._policy, RecurrentPolicy) else None
        self._observation = {
            key: array.zeros(count) for key, array in spec.env_spec.observation.items()
        }
        self._stack = FrameStack(spec.env_spec.observation, count)
        self._rests_B = np.zeros(count, np.bool_)  # its episode has ended: the next row resets it
        self._first_B = np.ones(count, np.bool_)
        self._episodes_B = np.zeros(count, np.int64)
        self._episode_score = Score(spec.streams, spec.env_factory.info_metrics)
        self._life_score = Score(spec.streams, spec.env_factory.info_metrics)
        self._has_begun = False

    # ------------------------------------------------------------------------- beginning

    def _begin(self) -> None:
        """Bring each stream to where it stood: start its episode, then go to that place in it."""
        self._has_begun = True
        states = self.spec.stream_states or tuple(StreamState(0) for _ in self.spec.streams)
        self._start_episodes([state.episode for state in states])
        if self._restore(states):
            self._remember(states)
            return
        differ = self._repeat(states)
        if not differ:
            self._remember(states)
            return
        streams = self.spec.streams
        self.notes.append(
            f"{self.spec.env_factory.name} gave other observations when streams "
            f"{[streams[column] for column in differ]} repeated the actions of their episodes; "
            f"the episodes of streams {list(streams)} were started anew"
        )
        # All of them, as there is one sequence for all: its gap says so to whoever stores.
        self._sequence = self.spec.first_sequence + 1
        self._start_episodes([state.episode + 1 for state in states])

    def _remember(self, states: Sequence[StreamState]) -> None:
        """Bring a recurrent policy to where it stood; new streams have nothing to remember."""
        self.pulse.phase = "the policy"
        if self._recurrent is not None and all(s.policy_state for s in states):
            self._recurrent.set_state(
                {
                    name: np.stack([state.policy_state[name] for state in states])
                    for name in states[0].policy_state
                }
            )

    def _start_episodes(self, episodes: Sequence[int]) -> None:
        self.pulse.phase = "reset"
        spec = self.spec
        seeds = [stream_seed(spec.seed, s, e) for s, e in zip(spec.streams, episodes, strict=True)]
        self._envs.begin(np.array(seeds), self._observation, self.pulse.beat)
        self._episodes_B[:] = episodes
        self._rests_B, self._first_B = np.zeros_like(self._rests_B), np.ones_like(self._rests_B)
        self._episode_score.clear()
        self._life_score.clear()
        self._stack.push(self._observation, self._first_B)

    def _restore(self, states: Sequence[StreamState]) -> bool:
        """Put the environments where they stood, if ``states`` tell; else they are as before."""
        if not all(state.env_state for state in states):
            return False
        self.pulse.phase = "giving the environment its state"
        try:
            for column, state in enumerate(states):
                self._restore_column(column, state)
                self.pulse.beat()
        except Exception as error:  # an environment may raise anything
            self.notes.append(
                f"{self.spec.env_factory.name} did not take its state back "
                f"({type(error).__name__}: {error}); its episodes are rebuilt from their actions"
            )
            self._start_episodes([state.episode for state in states])
            return False
        return True

    def _restore_column(self, column: int, state: StreamState) -> None:
        assert isinstance(self._envs, SeparateEnvs)  # in lockstep they are
        adapter, held = self._envs.adapters[column], state.env_state
        adapter.set_state(held["env"])
        if not alike(adapter.get_state(), held["env"]):
            raise ValueError("get_state() after set_state(state) gives another state")
        for key, array in (state.observation or {}).items():
            self._observation[key][column] = array
        self._stack.set_state(column, held["frames"])
        self._rests_B[column], self._first_B[column] = held["rests"], held["first"]
        self._episode_score.set_state(column, held["episode_score"])
        self._life_score.set_state(column, held["life_score"])

    def env_states(self) -> EnvStates:
        """See `contracts.Launcher.env_states`: of the streams of this worker."""
        if not (self._has_begun and self._tells_state):
            return {}
        before, self.pulse.phase = self.pulse.phase, "taking the environment's state"
        states: EnvStates = {}
        try:
            for column, stream in enumerate(self.spec.streams):
                state = self._env_state(column)
                if state is None:
                    self._tells_state = False
                    return {}
                Packed.of(state, "get_state()")  # it can be stored
                states[stream] = self._sequence - 1, state
                self.pulse.beat()
        except Exception as error:  # an environment may raise anything
            self._tells_state = False
            self.notes.append(
                f"{self.spec.env_factory.name} does not tell its state "
                f"({type(error).__name__}: {error}); a resumed run rebuilds episodes from their "
                "actions"
            )
            return {}
        self.pulse.phase = before
        return states

    def _env_state(self, column: int) -> dict[str, Any] | None:
        if not isinstance(self._envs, SeparateEnvs):
            return None
        env_state = self._envs.adapters[column].get_state()
        return (
            None
            if env_state is None
            else {
                "env": env_state,
                "frames": self._stack.get_state(column),
                "rests": bool(self._rests_B[column]),
                "first": bool(self._first_B[column]),
                "episode_score": self._episode_score.get_state(column),
                "life_score": self._life_score.get_state(column),
            }
        )

    def _repeat(self, states: Sequence[StreamState]) -> list[int]:
        """Repeat the actions of ``states``; the columns that did not come to where they stood."""
        self.pulse.phase = "repeating an episode"
        recorded: list[Any] = [() if s.actions is None else s.actions for s in states]
        differ: set[int] = set()
        for step in range(max(map(len, recorded))):
            over_B = np.array([step >= len(actions) for actions in recorded])
            differ |= set(np.flatnonzero(self._rests_B & ~over_B).tolist())
            still_B = over_B | self._rests_B
            action_B = self.spec.env_spec.action.zeros(len(states))
            for column in np.flatnonzero(~still_B).tolist():
                action_B[column] = recorded[column][step]
            steps = self._envs.step(action_B, still_B, self._observation)
            self._rests_B |= self._score(steps, ~still_B, row=-1)
            self._stack.push(self._observation, np.zeros_like(still_B), still_B)
            self._first_B &= still_B
            self.pulse.beat()
        for score in (self._episode_score, self._life_score):
            score.take()  # what ended was told of when it did
        for column, state in enumerate(states):
            wanted = state.observation or {}
            if not all(np.array_equal(self._observation[k][column], wanted[k]) for k in wanted):
                differ.add(column)
        return sorted(differ)

    # ------------------------------------------------------------------------ collecting

    def collect(self, snapshot: Snapshot, into: Unroll) -> None:
        """Fill ``into`` with what ``snapshot`` does next.

        Raises:
            NonFiniteError: an observation or a reward is NaN or infinite.
            BadInput: a categorical observation is none of its categories.
        """
        spec = self.spec
        if not self._has_begun:
            self._begin()  # not in `open`: a long episode is no slow constructor
        self.pulse.phase = "the policy"
        if snapshot is not self._snapshot:
            self._policy.load(snapshot)
            self._adopt()
            self._snapshot = snapshot
        # The generator is a function of the unroll's number, so none needs saving.
        generator = np.random.Generator(
            np.random.Philox(np.random.SeedSequence([spec.seed, spec.streams[0], self._sequence]))
        )
        into.sequence, into.version = self._sequence, snapshot.version
        recurrent = self._recurrent
        policy_s = env_s = 0.0
        now = time.perf_counter()
        for key, array in self._observation.items():
            into.observation[key][0] = array
        for row in range(spec.unroll_length):
            self.pulse.phase = "the policy"
            observation = {key: array[row] for key, array in into.observation.items()}
            if recurrent is not None and self._first_B.any():
                recurrent.reset(self._first_B)
            action_B, extras = act(self._policy, spec, observation, self._stack, generator)
            for name, extra in extras.items():
                into.extras[name][row] = extra
            policy_s -= now - (now := time.perf_counter())
            if row == 0:
                into.started_at = time.monotonic()
            self._fill(row, action_B, into)
            self.pulse.row()
            env_s -= now - (now := time.perf_counter())
        for key, array in into.observation.items():
            self._observation[key][:] = array[-1]
        into.episodes, into.lives = self._episode_score.take(), self._life_score.take()
        into.truncated &= ~into.terminated
        into.action[~into.valid] = 0
        self._check_numbers(into)
        self.pulse.phase = "the policy"
        if recurrent is not None:
            for name, array in recurrent.state().items():
                into.policy_state[name][:] = array
        self.pulse.phase = "handing over an unroll"
        into.seconds = {"env": env_s, "policy": policy_s}
        self._sequence += 1

    def _fill(self, row: int, action_B: Array, into: Unroll) -> None:
        """One row: a step, or a reset, of every stream."""
        rests_B = self._rests_B
        following = {key: array[row + 1] for key, array in into.observation.items()}
        self.pulse.phase = "step"
        steps = self._envs.step(action_B, rests_B, following)
        into.action[row] = action_B
        into.reward[row] = steps.reward
        into.terminated[row] = steps.terminated | steps.lost_life
        into.truncated[row] = steps.truncated
        into.first[row] = self._first_B
        valid_B = np.logical_not(rests_B, out=into.valid[row])
        self._first_B = rests_B
        self._rests_B = self._score(steps, valid_B, row)
        resting = rests_B.nonzero()[0]
        if len(resting):
            self._restart(resting, following)
        self._stack.push(following, first=rests_B)

    def _restart(self, columns: NDArray[np.int64], into: Observation) -> None:
        self.pulse.phase = "reset"
        spec, seeds = self.spec, None
        self._episodes_B[columns] += 1
        if spec.seed_every_episode:
            numbers = self._episodes_B[columns].tolist()
            seeds = [
                stream_seed(spec.seed, spec.streams[column], number)
                for column, number in zip(columns.tolist(), numbers, strict=True)
            ]
        self._envs.restart(columns.tolist(), seeds, into, self.pulse.beat)

    def _score(self, steps: ColumnSteps, valid_B: NDArray[np.bool_], row: int) -> NDArray[np.bool_]:
        """Add to the scores; the columns whose episode has ended."""
        ended_B: NDArray[np.bool_] = steps.terminated | steps.truncated
        self._episode_score.add(steps.reward, valid_B)
        self._episode_score.end(ended_B, row, self._infos_of)
        if self.spec.env_factory.terminal_on_life_loss:
            self._life_score.add(steps.reward, valid_B)
            self._life_score.end(ended_B | steps.lost_life, row)
        return ended_B

    def _infos_of(self, columns: Sequence[int]) -> Sequence[InfoMetrics]:
        return self._envs.info_metrics(columns, self.spec.env_factory.info_metrics)

    def _check_numbers(self, unroll: Unroll) -> None:
        self.pulse.phase = "step"
        check_categories(self.spec, unroll.observation)
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

    # ------------------------------------------------------------------------ evaluating

    def evaluate(self, snapshot: Snapshot, request: EvaluationRequest) -> EvaluationResult:
        """See `Evaluator.evaluate`."""
        return self._evaluator.evaluate(snapshot, request, self.pulse)

    def failure(self, error: BaseException) -> Failure:
        """What to tell of ``error``, which came out of one of the methods above."""
        of_env = self.pulse.phase in _PHASES_OF_ENV
        return Failure.of(
            self.spec.index, self.spec.env_factory.name, self.pulse.phase, error, of_env
        )

    def close(self) -> None:
        """Close every environment that was built, whatever one of them says to it. Idempotent."""
        self._envs.close()
        self._evaluator.close()


class Score:
    """Sums of raw rewards and counts of env steps, per column, until something ends."""

    def __init__(self, streams: Sequence[int], names: Sequence[str]) -> None:
        """All zero.

        Args:
            streams: of the columns.
            names: of numbers that an episode may end with.
        """
        self._stream_B = np.array(streams)
        self._names = names
        self._return_B = np.zeros(len(streams))
        self._length_B = np.zeros(len(streams), np.int64)
        self._ended: list[tuple[Any, ...]] = []

    def clear(self) -> None:
        """All columns begin anew, and nothing has ended."""
        self._return_B[:], self._length_B[:] = 0.0, 0
        self._ended = []

    def get_state(self, column: int) -> list[float]:
        """Sum and count of ``column``."""
        return [float(self._return_B[column]), float(self._length_B[column])]

    def set_state(self, column: int, state: Sequence[float]) -> None:
        """Make ``column`` stand at ``state``."""
        self._return_B[column], self._length_B[column] = state

    def add(self, reward_B: NDArray[np.floating], valid_B: NDArray[np.bool_]) -> None:
        """Count one row."""
        self._return_B += reward_B
        self._length_B += valid_B

    def end(
        self,
        ended_B: NDArray[np.bool_],
        row: int,
        infos_of: Callable[[Sequence[int]], Sequence[InfoMetrics]] | None = None,
    ) -> None:
        """Note what ended in ``row``; those columns begin anew.

        Args:
            ended_B: which did.
            row: of the unroll.
            infos_of: numbers that the episodes of columns ended with; None for no such.
        """
        columns = ended_B.nonzero()[0]
        if len(columns):
            infos: Sequence[InfoMetrics] = ()
            if infos_of is not None and self._names:
                infos = infos_of(columns.tolist())
            ended = self._stream_B[columns], row, self._return_B[columns], self._length_B[columns]
            self._ended.append((*ended, infos))
            self._return_B[columns], self._length_B[columns] = 0.0, 0

    def take(self) -> Episodes:
        """What has ended since this was last asked."""
        ended, self._ended = self._ended, []
        counts = [len(streams) for streams, *_ in ended]
        lines = np.full((sum(counts), Episodes.width(self._names)), np.nan)
        if ended:
            streams, rows, returns, lengths, infos = zip(*ended, strict=True)
            lines[:, 0] = np.concatenate(streams)
            lines[:, 1] = np.repeat(rows, counts)
            lines[:, 2] = np.concatenate(returns)
            lines[:, 3] = np.concatenate(lengths)
            if noted := list(chain.from_iterable(infos)):
                for line, info in zip(lines, noted, strict=True):
                    for name, value in info:
                        line[4 + self._names.index(name)] = value
        return Episodes(lines, self._names)


def probe(factory: EnvFactory, render_mode: str | None = None) -> EnvSpec:
    """What ``factory`` makes, after a first look at what it really gives.

    Raises:
        BadInput: it gives something else than it promises; or with a ``render_mode`` no pictures.
    """
    adapter = adapt(factory, render_mode)
    try:
        adapter.check_dtypes(adapter.reset(None))
        if render_mode is not None:
            adapter.render()
        return adapter.spec
    finally:
        close(adapter)
