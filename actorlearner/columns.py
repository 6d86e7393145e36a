"""The environments of one worker, stepped together.

`SeparateEnvs` steps them one after the other, `VectorEnvs` natively; `make_envs` chooses.

Legend of the suffixes: B columns, one environment each.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple, Protocol, TypeAlias

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from actorlearner.adapter import EnvAdapter, EnvStep, FlatSpaces, info_metrics
from actorlearner.contracts import (
    OBSERVATION,
    Array,
    BadInput,
    EnvFactory,
    EnvSpec,
    InfoMetrics,
    Observation,
)
from actorlearner.video import do_without_display

logger = logging.getLogger(__name__)

GymVectorEnv: TypeAlias = gymnasium.vector.VectorEnv[Any, Any, Any]


class ColumnSteps(NamedTuple):
    """What one step of many environments gave: 0 and False in columns that rested.

    Attributes:
        reward: float ``[B]``, raw.
        terminated: bool ``[B]``, as `EnvStep`.
        truncated: bool ``[B]``.
        lost_life: bool ``[B]``.
    """

    reward: NDArray[Any]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    lost_life: NDArray[np.bool_]


def _no_beat() -> None:
    """Nobody listens."""


class Envs(Protocol):
    """The environments of one worker.

    A column whose episode has ended *rests* in the next step and is restarted after it.
    Observations go to ``into``, arrays ``[B, ...]``; those of columns that rest stay as they are.
    """

    def begin(
        self, seeds: NDArray[np.int64], into: Observation, beat: Callable[[], None] = _no_beat
    ) -> None:
        """Start the first episodes, from ``seeds`` (int64 ``[B]``); ``beat`` after each reset."""
        ...

    def step(self, action: Array, resting: NDArray[np.bool_], into: Observation) -> ColumnSteps:
        """One env step of every column that does not rest."""
        ...

    def info_metrics(self, columns: Sequence[int], names: Sequence[str]) -> list[InfoMetrics]:
        """Those of ``names`` that the last step's ``info`` has of each of ``columns``."""
        ...

    def restart(
        self,
        columns: Sequence[int],
        seeds: Sequence[int] | None,
        into: Observation,
        beat: Callable[[], None] = _no_beat,
    ) -> None:
        """Start the next episode of each of ``columns``, which have rested; as `begin`."""
        ...

    def close(self) -> None:
        """Close every environment."""
        ...


class SeparateEnvs:
    """`Envs` stepped one after the other.

    Attributes:
        adapters: one per column.
    """

    def __init__(self, adapters: Sequence[EnvAdapter]) -> None:
        """Step ``adapters``, which are this object's to close."""
        self.adapters = list(adapters)
        self._infos: Sequence[Mapping[str, Any]] = ()
        # The commonest environments are called directly: through an adapter a call costs more than
        # a small environment's step.
        plain = all(adapter.needs_no_adapting for adapter in self.adapters)
        self._plain_steps = [a.env.step for a in self.adapters] if plain else None

    def begin(
        self, seeds: NDArray[np.int64], into: Observation, beat: Callable[[], None] = _no_beat
    ) -> None:
        """See `Envs`."""
        self.restart(range(len(seeds)), seeds.tolist(), into, beat)

    def step(self, action: Array, resting: NDArray[np.bool_], into: Observation) -> ColumnSteps:
        """See `Envs`."""
        if self._plain_steps is not None:
            return self._step_plain(self._plain_steps, action, resting, into[OBSERVATION])
        rests: list[bool] = resting.tolist()
        steps: list[EnvStep] = []
        for column, adapter in enumerate(self.adapters):
            if rests[column]:
                steps.append(_RESTED)
                continue
            step = adapter.step(action[column])
            for key, value in step[0].items():
                into[key][column] = value
            steps.append(step)
        _, *outcomes, self._infos = zip(*steps, strict=True)
        return ColumnSteps(*map(np.array, outcomes))

    def _step_plain(
        self,
        env_steps: Sequence[Callable[[Any], Any]],
        action: Array,
        resting: NDArray[np.bool_],
        rows: Array,
    ) -> ColumnSteps:
        """As `step`, by the environments' own ``env_steps``."""
        actions = self.adapters[0].native_array(action)
        steps = [
            _RESTED_PLAIN if rests else env_step(action)
            for env_step, action, rests in zip(env_steps, actions, resting.tolist(), strict=True)
        ]
        given, rewards, terminated, truncated, self._infos = zip(*steps, strict=True)
        observations = list(given)
        for column in resting.nonzero()[0].tolist():
            observations[column] = rows[column]
        shape = rows.shape[1:]
        if [getattr(o, "shape", None) for o in observations] != [shape] * len(rows):
            observations = [  # a list among them, or an error
                adapter.flatten(observation, "step")[OBSERVATION]
                for adapter, observation in zip(self.adapters, observations, strict=True)
            ]
        rows[:] = observations
        if set(map(type, rewards)) != {float}:
            rewards = tuple(a.number(r) for a, r in zip(self.adapters, rewards, strict=True))
        never = np.zeros(len(rows), np.bool_)
        return ColumnSteps(np.array(rewards), _flags(terminated), _flags(truncated), never)

    def info_metrics(self, columns: Sequence[int], names: Sequence[str]) -> list[InfoMetrics]:
        """See `Envs`."""
        return [info_metrics(self._infos[column], names) for column in columns]

    def restart(
        self,
        columns: Sequence[int],
        seeds: Sequence[int] | None,
        into: Observation,
        beat: Callable[[], None] = _no_beat,
    ) -> None:
        """See `Envs`."""
        for column, seed in zip(columns, seeds or repeat(None)):  # noqa: B905 (one has no end)
            for key, value in self.adapters[column].reset(seed).items():
                into[key][column] = value
            beat()

    def close(self) -> None:
        """Close every environment, whatever one of them says to it. Idempotent."""
        adapters, self.adapters = self.adapters, []
        for adapter in adapters:
            close(adapter)


def _flags(given: Sequence[Any]) -> NDArray[np.bool_]:
    """Bool ``[B]`` of what environments gave as flags, maybe in arrays of one."""
    try:
        flags = np.array(given, np.bool_)
    except ValueError:  # only some of them are arrays
        flags = np.zeros(0, np.bool_)
    return flags if flags.shape == (len(given),) else np.array([*map(bool, given)])


_RESTED: EnvStep = ({}, 0.0, False, False, False, {})
_RESTED_PLAIN: tuple[Any, ...] = (None, 0.0, False, False, {})


class VectorEnvs:
    """`Envs` that one Gymnasium vector environment steps.

    In NEXT_STEP mode its call after an end only resets; that is the step in which a column rests.
    """

    def __init__(self, env: GymVectorEnv, spec: EnvSpec, tells_lives: bool) -> None:
        """Step ``env``.

        Args:
            env: this object's to close.
            spec: of one environment; where an observation has an axis of length 1 more, it goes.
            tells_lives: watch ``info["lives"]``.

        Raises:
            BadInput: the environment's autoreset mode is another, or its spaces are not those of
                ``spec``.
        """
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            raise BadInput(
                f"{spec.name}: a vector environment must run in autoreset mode NEXT_STEP, "
                f"this one's is {mode}; make it with autoreset_mode=AutoresetMode.NEXT_STEP (and "
                "tell so in its metadata), or let single environments be stepped"
            )
        self._spaces = FlatSpaces.of(
            env.single_observation_space, env.single_action_space, spec.name
        )
        if _squeezed(self._spaces.spec) != _squeezed(spec):
            raise BadInput(
                f"{spec.name}: the vector environment observes {env.single_observation_space} and "
                f"acts in {env.single_action_space}, but a single one observes "
                f"{spec.observation_space} and acts in {spec.action_space}; both must be the same"
            )
        self._env = env
        self._name = spec.name
        # Native code may hang on an action that is out of range.
        self._num_actions = spec.action.categories[0] if spec.action.is_discrete else None
        self._tells_lives = tells_lives
        self._lives_B = np.zeros(env.num_envs, np.int64)
        self._never_B = np.zeros(env.num_envs, np.bool_)
        self._info: Mapping[str, Any] = {}

    def begin(
        self, seeds: NDArray[np.int64], into: Observation, beat: Callable[[], None] = _no_beat
    ) -> None:
        """See `Envs`."""
        observation, info = self._reset(seeds)
        beat()
        self._put(observation, into)
        if self._tells_lives:
            self._lives_B = np.array(info["lives"])

    def _reset(self, seeds: NDArray[np.int64]) -> Any:
        """Seed every environment by itself, or all by the first seed where no more is taken."""
        for seed in (seeds.tolist(), seeds):  # Gymnasium's want the one, ALE's the other
            try:
                return self._env.reset(seed=seed)  # type: ignore[arg-type]
            except (TypeError, ValueError, gymnasium.error.Error):
                continue
        return self._env.reset(seed=int(seeds[0]))

    def step(self, action: Array, resting: NDArray[np.bool_], into: Observation) -> ColumnSteps:
        """See `Envs`.

        Raises:
            ValueError: an action is out of range.
        """
        count = self._num_actions
        if count is not None and (action.min() < 0 or action.max() >= count):
            raise ValueError(f"action={action}: must be in [0, {count})")
        observation, reward, terminated, truncated, self._info = self._env.step(
            self._spaces.native_array(action)
        )
        self._put(observation, into)
        lost_life = self._never_B
        if self._tells_lives:
            lives, self._lives_B = self._lives_B, np.array(self._info["lives"])
            lost_life = (self._lives_B < lives) & ~(terminated | truncated | resting)
        if np.count_nonzero(resting):
            # What came of a reset is no outcome, whatever the environment says.
            reward = np.where(resting, 0.0, reward)
            terminated, truncated = terminated & ~resting, truncated & ~resting
        return ColumnSteps(reward, terminated, truncated, lost_life)

    def _put(self, observation: Any, into: Observation) -> None:
        for key, leaf in self._spaces.parts(observation, "the vector environment").items():
            rows, shape = into[key], np.shape(leaf)
            if math.prod(shape) != rows.size:
                raise BadInput(
                    f"{self._name}: the vector environment gave {key} of shape {shape}; "
                    f"{rows.shape} is needed"
                )
            rows[...] = leaf if shape == rows.shape else np.reshape(leaf, rows.shape)

    def info_metrics(self, columns: Sequence[int], names: Sequence[str]) -> list[InfoMetrics]:
        """See `Envs`; Gymnasium has ``name`` of all columns, and who has it in ``_name``."""
        found = {}
        for name in names:
            values, has = self._info.get(name), self._info.get(f"_{name}")
            if isinstance(values, np.ndarray):
                found[name] = values, np.ones(len(values)) if has is None else has
        if not found:
            return [()] * len(columns)
        return [
            info_metrics({k: of[column] for k, (of, has) in found.items() if has[column]}, names)
            for column in columns
        ]

    def restart(
        self,
        columns: Sequence[int],
        seeds: Sequence[int] | None,
        into: Observation,
        beat: Callable[[], None] = _no_beat,
    ) -> None:
        """See `Envs`: the vector environment has done it."""

    def close(self) -> None:
        """Close the vector environment."""
        close(self._env)


def _squeezed(spec: EnvSpec) -> Any:
    """What must be alike of two specs: everything but their words and axes of length 1."""
    observation = {
        key: ([n for n in array.shape if n != 1], array.dtype, array.categories)
        for key, array in spec.observation.items()
    }
    return observation, spec.action


def adapt(factory: EnvFactory, render_mode: str | None = None) -> EnvAdapter:
    """A new environment, adapted, or closed if it can't be."""
    if render_mode is not None:
        do_without_display()
    env = factory(render_mode)
    try:
        return EnvAdapter(env, factory.name, factory.frame_stack, factory.terminal_on_life_loss)
    except Exception:
        env.close()
        raise


def make_envs(
    factory: EnvFactory, spec: EnvSpec, num_envs: int, seeded: bool, seed: int = 0
) -> Envs:
    """``num_envs`` environments, native ones where there are such.

    Args:
        factory: makes them.
        spec: of one.
        num_envs: how many.
        seeded: whether `Envs.restart` must keep its seeds.
        seed: of native ones, see `EnvFactory.vector`.
    """
    vector = None if seeded else factory.vector(num_envs, seed)
    if vector is None:
        adapters: list[EnvAdapter] = []
        try:
            for _ in range(num_envs):
                adapters.append(adapt(factory))
        except BaseException:
            SeparateEnvs(adapters).close()
            raise
        return SeparateEnvs(adapters)
    try:
        return VectorEnvs(vector, spec, factory.terminal_on_life_loss)
    except BaseException:
        vector.close()
        raise


def close(env: EnvAdapter | GymVectorEnv) -> None:
    """Close ``env``; a failure is only logged, as it must not hide what came before."""
    try:
        env.close()
    except Exception:
        logger.warning("closing %s failed", env, exc_info=True)
