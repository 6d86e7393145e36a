"""`load_policy`: acting with what a run has learned, without the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorlearner import checkpoint
from actorlearner.adapter import FlatSpaces
from actorlearner.config import make
from actorlearner.contracts import (
    Agent,
    Array,
    ArraySpec,
    BadInput,
    CheckpointError,
    EnvSpec,
    Observation,
    RecurrentPolicy,
)
from actorlearner.frames import FrameStack
from actorlearner.runstate import read_weights


def load_policy(
    path: str | Path,
    *,
    agent: Agent | None = None,
    seed: int | None = None,
    trust: Sequence[str] = (),
) -> LoadedPolicy:
    """The policy of a checkpoint, on the CPU; no environment, optimiser or replay is made.

    Example::

        policy = load_policy("runs/mine")
        observation, info = env.reset()
        ended = False
        while not ended:
            action = policy.act(observation)
            observation, reward, terminated, truncated, info = env.step(action)
            ended = terminated or truncated
        policy.reset()

    Args:
        path: a run, a checkpoint directory or a file in it.
        agent: an agent with the settings of the trained one, where its class has no ``settings``
            that a checkpoint could tell; None makes the one that the checkpoint tells of.
        seed: of what the agent's evaluations leave to chance (DQN's ``evaluation_epsilon``); None
            leaves nothing to it: always the best action.
        trust: packages besides this one that the agent may come from.

    Raises:
        CheckpointError: missing, damaged, of another agent, or too old to tell what is needed.
        SettingError: the agent's package is not trusted.
    """
    where = checkpoint.find(path, ["agent"])
    manifest = checkpoint.read_manifest(where)
    try:
        env_spec = EnvSpec.from_json(manifest.info["env"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where}: an older version wrote it, which did not note how the environment holds "
            "its observations; go on from it for a while (resume=..., or Trainer(checkpoint=...)) "
            "and take the new checkpoint"
        ) from error
    if agent is None:
        target, settings = manifest.info["agent"], manifest.info.get("agent_settings")
        if settings is None:
            raise CheckpointError(
                f"{where}: does not tell the settings of its {target}; hand over an agent that "
                "has them: load_policy(path, agent=...)"
            )
        made: Agent = make({"target": target, **settings}, "agent", "training_steps", trust)
        agent = made
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn, and thrown away
        agent.build(env_spec)
    read_weights(where, agent, env_spec, names=())
    agent.train(False)
    return LoadedPolicy(agent, env_spec, manifest.env_steps, seed)


class LoadedPolicy:
    """Acts for one environment (`act`) or for many at once (`act_batch`).

    Attributes:
        agent: what was trained.
        env_spec: of the environment that it was trained on.
        env_steps: that the training took.
    """

    def __init__(
        self, agent: Agent, env_spec: EnvSpec, env_steps: int, seed: int | None = None
    ) -> None:
        """Begin an episode.

        Args:
            agent: built, with its weights.
            env_spec: with its native parts.
            env_steps: only noted.
            seed: see `load_policy`.
        """
        self.agent = agent
        self.env_spec = env_spec
        self.env_steps = env_steps
        self._spaces = FlatSpaces(env_spec)
        self._generator = None if seed is None else np.random.default_rng(seed)
        with torch.random.fork_rng(devices=[]):
            self._policy = agent.policy_factory()(env_spec, (0,), 1, True)
        self._policy.load(agent.snapshot(0))
        is_stacked = any(spec.stack > 1 for spec in env_spec.observation.values())
        self._remembers = is_stacked or isinstance(self._policy, RecurrentPolicy)
        self.reset()

    def reset(self) -> None:
        """The next observation begins an episode, in every column.

        Only policies that remember, or see several frames together, need to know.
        """
        self._stack: FrameStack | None = None
        self._num_columns = 0

    def act(self, observation: Any) -> Any:
        """What to do now.

        Args:
            observation: as the environment's ``reset`` or ``step`` gave it.

        Returns:
            What the environment's ``step`` takes, as its space samples it: for Discrete an integer
            of NumPy, else an array.

        Raises:
            BadInput: the environment's space has no such observation.
        """
        flat = self._spaces.flatten(observation, "the caller")
        action_B = self._act({key: np.asarray(leaf)[None] for key, leaf in flat.items()}, None)
        return self._spaces.native(action_B[0])

    def act_batch(self, observation: Any, first: NDArray[np.bool_] | None = None) -> Array:
        """What to do now in each of ``B`` environments.

        Args:
            observation: as a Gymnasium vector environment gives it: every array ``[B, ...]``.
            first: bool ``[B]``, where an episode begins; None for nowhere, but after `reset`
                everywhere.

        Returns:
            ``[B, ...]``, what the vector environment's ``step`` takes.

        Raises:
            BadInput: the space has no such observations, or there are more or fewer than before
                though the policy goes on from those.
        """
        flat = self._spaces.parts(observation, "the caller")
        action_B = self._act({key: np.asarray(leaf) for key, leaf in flat.items()}, first)
        native: Array = self._spaces.native_array(action_B)
        return native

    def export(self, path: str | Path) -> Path:
        """Write the agent's ``export``, and return its path.

        Raises:
            BadInput: the agent has no such method, or a package is missing.
        """
        export = getattr(self.agent, "export", None)
        if export is None:
            raise BadInput(f"{type(self.agent).__name__} has no export()")
        written: Path = export(path)
        return written

    def _act(self, given: Observation, first: NDArray[np.bool_] | None) -> Array:
        flat = {
            key: self._checked(key, given[key], spec)
            for key, spec in self.env_spec.observation.items()
        }
        counts = {key: len(array) for key, array in flat.items()}
        count = next(iter(counts.values()))
        if count == 0 or len(set(counts.values())) > 1:
            raise BadInput(f"{self.env_spec.name}: {counts} observations: one number is needed")
        if self._remembers:
            flat = self._going_on(flat, count, first)
        action_B, _ = self._policy.act(flat, self._generator)
        return action_B

    def _going_on(
        self, flat: Observation, count: int, first: NDArray[np.bool_] | None
    ) -> Observation:
        """``flat`` with its frames stacked; the policy forgets the columns ``first``."""
        first_B = np.zeros(count, np.bool_) if first is None else np.asarray(first, np.bool_)
        if first_B.shape != (count,):
            raise BadInput(f"first of shape {first_B.shape}: must be ({count},)")
        if self._stack is None:
            self._stack, self._num_columns = FrameStack(self.env_spec.observation, count), count
            first_B = np.ones(count, np.bool_)
        if count != self._num_columns:
            raise BadInput(
                f"{self.env_spec.name}: {count} observations after {self._num_columns}; the policy "
                "goes on from the ones before, so call reset() before their number changes"
            )
        if isinstance(self._policy, RecurrentPolicy) and first_B.any():
            self._policy.reset(first_B)
        self._stack.push(flat, first_B)
        return self._stack.over(flat)

    def _checked(self, key: str, given: Array, spec: ArraySpec) -> Array:
        """``given`` (``[B, ...]``) in the dtype of ``spec``, if that loses nothing but digits."""
        what = f"{self.env_spec.name}: the caller gave {key}"
        if given.ndim == 0 or given.shape[1:] != spec.shape:
            raise BadInput(f"{what} of shape {given.shape}; needed: {('B', *spec.shape)}")
        if given.dtype.kind not in "biuf":
            raise BadInput(f"{what} of dtype {given.dtype}; needed: {spec.dtype}")
        with np.errstate(all="ignore"):  # looked at below
            array = given.astype(spec.dtype)
        if array.dtype.kind == "f":
            if not np.isfinite(array).all():
                raise BadInput(f"{what} that is not finite, or beyond {spec.dtype}")
        elif not np.array_equal(array, given):
            raise BadInput(f"{what} of dtype {given.dtype} with numbers that are no {spec.dtype}")
        highest = np.reshape(spec.categories, spec.shape) if spec.categories else None
        if highest is not None and not ((array >= 0) & (array < highest)).all():
            raise BadInput(f"{what} that its observation space does not hold: {given}")
        return array
