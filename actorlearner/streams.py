"""Streams: which worker has which, what seeds their episodes, and where each of them stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from actorlearner.contracts import Array, EnvStates, StreamState, Unroll


def assign_streams(workers: int, envs_per_worker: int) -> list[tuple[int, ...]]:
    """The streams of each worker, in order."""
    return [
        tuple(range(worker * envs_per_worker, (worker + 1) * envs_per_worker))
        for worker in range(workers)
    ]


def stream_seed(seed: int, stream: int, episode: int, evaluation: bool = False) -> int:
    """The seed of one episode; training and evaluation episodes never share one.

    Args:
        seed: of the run (of the evaluation).
        stream: global index of the stream.
        episode: index of the episode in it.
        evaluation: whether this is an evaluation episode.

    Returns:
        An integer in ``[0, 2**31)``; the lowest bit tells evaluation from training.
    """
    words = np.random.SeedSequence([seed, stream, episode]).generate_state(1)
    return int(words[0] >> 2 << 1) | int(evaluation)


class StreamLedger:
    """Where every stream stands, told from the unrolls alone.

    An unroll that never arrived does not exist, so this is the truth to resume from. With
    ``record_actions`` (lockstep) an episode can be rebuilt from its seed and its actions, or from
    the state of its environment where that is known.
    """

    def __init__(self, num_streams: int, record_actions: bool) -> None:
        """All streams stand before their first step.

        Args:
            num_streams: over all workers.
            record_actions: keep the actions of the current episodes, the last observations, and
                what recurrent policies remember.
        """
        self._record_actions = record_actions
        self._sequence = [-1] * num_streams
        self._episode = [0] * num_streams
        self._actions: list[list[Array]] = [[] for _ in range(num_streams)]
        self._observation: list[dict[str, Array]] = [{} for _ in range(num_streams)]
        self._policy_state: list[dict[str, Array]] = [{} for _ in range(num_streams)]
        self._env_state: list[Any] = [None] * num_streams

    def note(self, unroll: Unroll) -> None:
        """Follow the streams of ``unroll`` to its end."""
        for column, stream in enumerate(map(int, unroll.streams)):
            skipped = unroll.sequence - self._sequence[stream] - 1
            if skipped:  # the worker says: so many episodes on, started anew
                self._begin(stream, self._episode[stream] + skipped)
            self._sequence[stream] = unroll.sequence
            self._env_state[stream] = None
            valid = unroll.valid[:, column]
            resets = np.flatnonzero(~valid)
            if len(resets):
                self._begin(stream, self._episode[stream] + len(resets))
            if self._record_actions:
                since = int(resets[-1]) + 1 if len(resets) else 0
                self._actions[stream].extend(unroll.action[since:, column].copy())
                self._observation[stream] = {
                    key: array[-1, column].copy() for key, array in unroll.observation.items()
                }
                self._policy_state[stream] = {
                    name: array[column].copy() for name, array in unroll.policy_state.items()
                }

    def note_env_states(self, states: EnvStates) -> None:
        """Keep ``states``, but for those of another moment than the streams stand at."""
        for stream, (sequence, state) in states.items():
            if sequence == self._sequence[stream]:
                self._env_state[stream] = state

    def _begin(self, stream: int, episode: int) -> None:
        self._episode[stream] = episode
        self._actions[stream] = []
        self._observation[stream] = {}
        self._policy_state[stream] = {}

    def going_on(
        self, streams: Sequence[int], attempt: int = 0
    ) -> tuple[int, tuple[StreamState, ...]]:
        """For a worker that goes on with ``streams``: its first sequence, and their states.

        Where the episodes can't be rebuilt they start anew, which a gap in the sequence tells: as
        many episodes are skipped as unrolls are missing.

        Args:
            streams: of the worker.
            attempt: see `contracts.GoOn`.
        """
        last = [self._sequence[stream] for stream in streams]
        if max(last) < 0 and not attempt:
            return 0, ()
        recorded = self._record_actions and all(self._observation[stream] for stream in streams)
        rebuild = recorded and len(set(last)) == 1 and not attempt
        if not rebuild:
            first = max(last) + 1 + max(1, attempt)
            skipped = [first - sequence - 1 for sequence in last]
            return first, tuple(
                StreamState(self._episode[stream] + skip)
                for stream, skip in zip(streams, skipped, strict=True)
            )
        states = tuple(
            StreamState(
                self._episode[s],
                np.array(self._actions[s]),
                self._observation[s],
                self._policy_state[s],
                self._env_state[s],
            )
            for s in streams
        )
        return last[0] + 1, states

    def state_dict(self) -> dict[str, Any]:
        """Of each stream where it stands, and what its episode can be rebuilt from."""
        return {
            "sequence": list(self._sequence),
            "episode": list(self._episode),
            "actions": [np.array(actions) for actions in self._actions],
            "observation": list(self._observation),
            "policy_state": list(self._policy_state),
            "env_state": list(self._env_state),
        }

    def load_state_dict(self, state: Any) -> None:
        """Go back to ``state``; streams that it does not know start at the beginning."""
        # Older checkpoints lack what came later.
        remembered = state.get("policy_state", [{}] * len(state["sequence"]))
        env_states = state.get("env_state", [None] * len(state["sequence"]))
        for stream in range(min(len(self._sequence), len(state["sequence"]))):
            self._sequence[stream] = state["sequence"][stream]
            self._episode[stream] = state["episode"][stream]
            self._actions[stream] = list(state["actions"][stream])
            self._observation[stream] = dict(state["observation"][stream])
            self._policy_state[stream] = dict(remembered[stream])
            self._env_state[stream] = env_states[stream]
