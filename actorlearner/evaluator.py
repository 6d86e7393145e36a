"""What a worker does when it evaluates: greedy episodes in environments kept for that.

Legend of the suffixes: B columns, one environment each.
"""

from __future__ import annotations

import numpy as np

from actorlearner.adapter import info_metrics
from actorlearner.columns import SeparateEnvs, adapt
from actorlearner.contracts import (
    EvaluationRequest,
    EvaluationResult,
    InfoMetrics,
    NonFiniteError,
    Policy,
    RecurrentPolicy,
    Snapshot,
    WorkerSpec,
)
from actorlearner.frames import FrameStack
from actorlearner.policies import act, make_policy
from actorlearner.pulse import Pulse
from actorlearner.streams import stream_seed
from actorlearner.video import RENDER_MODE, Film

EVALUATION_ENVS = 8
"""Environments that an evaluation steps together."""


class Evaluator:
    """Evaluates snapshots; its environments last from one evaluation to the next."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Build nothing yet."""
        self._spec = spec
        self._envs = SeparateEnvs([])
        self._filmable = 0  # of these, the first ones

    def evaluate(
        self, snapshot: Snapshot, request: EvaluationRequest, pulse: Pulse
    ) -> EvaluationResult:
        """Greedy episodes with raw rewards; training environments are not touched.

        Episode ``i`` starts from a seed of its own. So the result depends neither on how many
        environments step together nor on earlier evaluations, if the policy leaves nothing to
        chance. A life loss ends nothing.

        Args:
            snapshot: acts throughout.
            request: what to run.
            pulse: of whoever does it.

        Raises:
            NonFiniteError: a return is NaN or infinite.
        """
        pulse.phase = "constructing the environment"
        count = min(EVALUATION_ENVS, request.episodes)
        filmed = min(request.films, count)  # so episode i is in column i
        self._build(count, filmed, pulse)
        envs = SeparateEnvs(self._envs.adapters[:count])
        evaluation = _Evaluation(self._spec, request, envs, filmed, pulse)
        pulse.phase = "constructing the policy"
        policy = make_policy(self._spec, greedy=True)
        policy.load(snapshot)
        evaluation.play(policy)
        return evaluation.result(snapshot)

    def _build(self, count: int, filmed: int, pulse: Pulse) -> None:
        """Have ``count`` environments, of which the first ``filmed`` give pictures."""
        if filmed > self._filmable:
            self._envs.close()
            self._filmable = filmed
        adapters = self._envs.adapters
        while len(adapters) < count:
            render_mode = RENDER_MODE if len(adapters) < filmed else None
            adapters.append(adapt(self._spec.env_factory, render_mode))
            pulse.beat()

    def close(self) -> None:
        """Close every environment, whatever one of them says to it. Idempotent."""
        self._envs.close()


class _Evaluation:
    """One evaluation: which episode is in which column, and what the episodes came to."""

    def __init__(
        self,
        spec: WorkerSpec,
        request: EvaluationRequest,
        envs: SeparateEnvs,
        filmed: int,
        pulse: Pulse,
    ) -> None:
        self._spec, self._request, self._envs, self._pulse = spec, request, envs, pulse
        count, observation = len(envs.adapters), spec.env_spec.observation
        self._films = [Film(env.fps, request.film_frames) for env in envs.adapters[:filmed]]
        self._observation = {key: array.zeros(count) for key, array in observation.items()}
        self._stack = FrameStack(observation, count)
        self._first_B = np.zeros(count, np.bool_)
        self._waiting = list(range(request.episodes))
        self._episode = [-1] * count  # in each column; -1 for none
        self._returns = np.zeros(request.episodes)
        self._lengths = np.zeros(request.episodes, np.int64)
        self._infos: list[InfoMetrics] = [()] * request.episodes
        self._cut = 0

    def play(self, policy: Policy) -> None:
        """Play all episodes to their ends."""
        seeds = np.random.SeedSequence([self._request.seed])
        generator = np.random.Generator(np.random.Philox(seeds))
        for column in range(len(self._episode)):
            self._begin(column)
        while any(episode >= 0 for episode in self._episode):
            self._stack.push(self._observation, self._first_B)
            self._pulse.phase = "the policy, evaluating"
            if isinstance(policy, RecurrentPolicy) and self._first_B.any():
                policy.reset(self._first_B)
            self._first_B[:] = False
            action_B, _ = act(policy, self._spec, self._observation, self._stack, generator)
            self._pulse.phase = "step of an evaluation episode"
            for column, episode in enumerate(self._episode):
                if episode >= 0:
                    self._step(column, episode, action_B[column])

    def _begin(self, column: int) -> None:
        """Start the next episode in ``column``, if one waits."""
        self._episode[column] = episode = self._waiting.pop(0) if self._waiting else -1
        if episode < 0:
            return
        self._pulse.phase = "reset of an evaluation episode"
        seed = stream_seed(self._request.seed, 0, episode, evaluation=True)
        self._envs.restart([column], [seed], self._observation, self._pulse.beat)
        self._first_B[column] = True
        self._film(episode)

    def _step(self, column: int, episode: int, action: np.generic) -> None:
        step = self._envs.adapters[column].step(action)
        self._pulse.beat()
        following, reward, terminated, truncated, _, info = step
        for key, value in following.items():
            self._observation[key][column] = value
        self._film(episode)
        self._returns[episode] += reward
        self._lengths[episode] += 1
        limit = self._request.step_limit
        if terminated or truncated or (limit is not None and self._lengths[episode] >= limit):
            self._cut += not (terminated or truncated)
            self._infos[episode] = info_metrics(info, self._spec.env_factory.info_metrics)
            self._begin(column)

    def _film(self, episode: int) -> None:
        if episode < len(self._films) and not self._films[episode].is_full:
            before, self._pulse.phase = self._pulse.phase, "rendering an evaluation episode"
            self._films[episode].add(self._envs.adapters[episode].render())
            self._pulse.phase = before

    def result(self, snapshot: Snapshot) -> EvaluationResult:
        """What came of it.

        Raises:
            NonFiniteError: a return is NaN or infinite.
        """
        if not np.isfinite(self._returns).all():
            raise NonFiniteError(
                f"the evaluation's returns are {self._returns}; rewards must be finite"
            )
        return EvaluationResult(
            tuple(map(float, self._returns)),
            tuple(map(int, self._lengths)),
            self._cut,
            snapshot.version,
            self._request.env_steps,
            tuple(self._infos),
            tuple(film.gif() for film in self._films),
        )
