"""From Gymnasium environments to flat arrays and back.

`GymEnvFactory` is the recipe that travels to workers; `EnvAdapter` turns observations into a flat
mapping of arrays and action indices into what the environment expects. A worker steps its
environments together: `SeparateEnvs` one after the other, `VectorEnvs` natively.

Legend of the suffixes: B columns, one environment each.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from actorlearner.config import Settings, setting
from actorlearner.contracts import (
    OBSERVATION,
    Array,
    ArraySpec,
    BadInput,
    EnvFactory,
    EnvSpec,
    Observation,
    UnsupportedSpace,
)

logger = logging.getLogger(__name__)

GymEnv: TypeAlias = gymnasium.Env[Any, Any]
GymVectorEnv: TypeAlias = gymnasium.vector.VectorEnv[Any, Any, Any]
EnvLike: TypeAlias = str | GymnasiumSpec | Callable[..., GymEnv] | EnvFactory
"""What people may hand in as an environment."""


@dataclass(frozen=True, kw_only=True)
class EnvSettings(Settings):
    """Settings of ``env=gym``."""

    group = "env"

    id: str = "CartPole-v1"
    """A Gymnasium id, or ``module:Id`` to import the module that registers it."""
    kwargs: dict[str, Any] = setting({})
    """Arguments of the environment's constructor."""
    frame_stack: int = setting(1, low=1, high=255)
    """Observations that the agent sees together, the newest last."""

    def factory(self, imports: tuple[str, ...] = ()) -> GymEnvFactory:
        """The recipe of this environment."""
        recipe = GymEnvFactory.of(self.id, self.kwargs, imports)
        return replace(recipe, frame_stack=self.frame_stack)


@dataclass(frozen=True)
class GymEnvFactory:
    """A recipe that travels by value: what is registered or defined here need not be there.

    Attributes:
        name: the id, or the name of the class or callable.
        source: what makes the environment.
        kwargs: arguments for it.
        imports: modules to import first.
        frame_stack: see `contracts.EnvFactory`.
        terminal_on_life_loss: likewise.
    """

    name: str
    source: GymnasiumSpec | Callable[..., GymEnv]
    kwargs: dict[str, Any] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    frame_stack: int = 1
    terminal_on_life_loss: bool = False

    @classmethod
    def of(
        cls, env: EnvLike, kwargs: Mapping[str, Any] | None = None, imports: tuple[str, ...] = ()
    ) -> GymEnvFactory:
        """The recipe of an id, spec, class or callable.

        Raises:
            BadInput: no such id, or not an environment at all.
        """
        if isinstance(env, GymEnvFactory):
            return env
        for module in imports:
            _import(module, "imports")
        if isinstance(env, gymnasium.Env):
            raise BadInput(
                f"env={env}: an environment object can't be copied to workers; "
                "give its class, or a function that makes one"
            )
        if isinstance(env, str):
            module, _, name = env.rpartition(":")
            if module:
                _import(module, "env.id")
            try:
                spec = gymnasium.spec(name)
            except gymnasium.error.Error as error:
                raise BadInput(
                    f"env.id={env}: {error}; module:Id imports a module first"
                ) from error
            return cls(env, spec, dict(kwargs or {}), imports)
        if isinstance(env, GymnasiumSpec):
            return cls(env.id, env, dict(kwargs or {}), imports)
        if callable(env):
            own = getattr(env, "name", None)  # of a class it may be a property
            name = own if isinstance(own, str) else getattr(env, "__name__", type(env).__name__)
            return cls(name, env, dict(kwargs or {}), imports)
        raise BadInput(f"env={env!r}: give a Gymnasium id, a spec, an Env class or a callable")

    def __call__(self) -> GymEnv:
        """A new environment.

        Raises:
            BadInput: what came out is no Gymnasium environment.
        """
        for module in self.imports:
            importlib.import_module(module)
        if isinstance(self.source, GymnasiumSpec):
            env = gymnasium.make(self.source, disable_env_checker=True, **self.kwargs)
        else:
            env = self.source(**self.kwargs)
        if not isinstance(env, gymnasium.Env):
            raise BadInput(f"env factory {self.name} returned {env!r}, not a gymnasium.Env")
        return env

    def vector(self, num_envs: int) -> GymVectorEnv | None:
        """See `contracts.EnvFactory`: there is none."""
        return None


def _import(module: str, key: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise BadInput(f"{key}={module}: can't be imported: {error}") from error


EnvStep: TypeAlias = tuple[Observation, float, bool, bool, bool]
"""What one env step of one environment gave: the next (or final) observation, the raw reward,
whether the episode is over, whether it was cut, and whether a life was lost and it goes on."""


class EnvAdapter:
    """One environment, spoken to in arrays.

    Attributes:
        spec: its description.
        env: the environment.
        needs_no_adapting: whether its observation is one array and its action an index from 0, so
            that only shapes and rewards are to be checked.
    """

    def __init__(
        self, env: GymEnv, name: str, frame_stack: int = 1, tells_lives: bool = False
    ) -> None:
        """Wrap ``env``.

        Args:
            env: to be wrapped.
            name: for messages.
            frame_stack: only noted in `spec`.
            tells_lives: watch ``info["lives"]``.

        Raises:
            UnsupportedSpace: for a space that has no array form; names the key.
        """
        self.env = env
        self._tells_lives = tells_lives
        self._lives = 0
        observation_space, action_space = env.observation_space, env.action_space
        found = _leaves(observation_space, (), name)
        leaves = dict(found)
        if len(leaves) < len(found):
            keys = [key for key, _ in found]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise UnsupportedSpace(f"{name}: two parts of its observation space are called {twice}")
        self._action_offset = _offset(action_space)
        action = _array_spec(action_space, name, "its action space")
        self._action_is_scalar = action.is_discrete
        specs = {
            key: replace(_array_spec(space, name, key), stack=frame_stack)
            for key, (_, space) in leaves.items()
        }
        self.spec = EnvSpec(name, specs, action, str(observation_space), str(action_space))
        self._leaves = [
            (key, path, _offset(space), specs[key].shape) for key, (path, space) in leaves.items()
        ]
        self.needs_no_adapting = (
            isinstance(observation_space, spaces.Box)
            and action.is_discrete
            and self._action_offset == 0
            and not tells_lives
        )

    def reset(self, seed: int | None) -> Observation:
        """Start an episode; ``seed`` None goes on with the environment's own generator.

        Raises:
            BadInput: the observation has not the shape that the space promises.
        """
        observation, info = self.env.reset(seed=seed)
        if self._tells_lives:
            self._lives = self._lives_of(info)
        return self.flatten(observation, "reset")

    def step(self, action: Any) -> EnvStep:
        """One env step.

        Args:
            action: an index for a discrete space, else an array.

        Raises:
            BadInput: the observation has not the shape that the space promises, or the reward is
                not one number.
        """
        if self._action_is_scalar:
            native: Any = int(action)
            if self._action_offset:
                native += self._action_offset
        else:
            native = (
                np.array(action) if self._action_offset is None else action + self._action_offset
            )
        observation, reward, terminated, truncated, info = self.env.step(native)
        if type(reward) is not float:
            reward = self.number(reward)
        lost_life = False
        if self._tells_lives:
            lives, self._lives = self._lives, self._lives_of(info)
            lost_life = self._lives < lives and not (terminated or truncated)
        flat = self.flatten(observation, "step")
        return flat, reward, bool(terminated), bool(truncated), lost_life

    def _lives_of(self, info: Mapping[str, Any]) -> int:
        if "lives" not in info:
            raise BadInput(
                f"{self.spec.name}: info has no lives, so terminal_on_life_loss can't be kept"
            )
        return int(info["lives"])

    def number(self, reward: Any) -> float:
        """``reward`` as a number.

        Raises:
            BadInput: it is not one number.
        """
        try:
            return float(np.asarray(reward).item())  # an array of one number is common
        except (TypeError, ValueError) as error:
            raise BadInput(
                f"{self.spec.name}: step gave the reward {reward!r}; it must be one number"
            ) from error

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def flatten(self, observation: Any, source: str) -> Observation:
        """``observation`` by keys, counting from 0.

        Raises:
            BadInput: it has not the shape that the space promises; ``source`` gave it.
        """
        flat = {}
        for key, path, offset, shape in self._leaves:
            leaf = observation
            for part in path:
                leaf = leaf[part]
            if np.shape(leaf) != shape:  # an assignment would broadcast what fits
                raise BadInput(
                    f"{self.spec.name}: {source} gave {key} of shape {np.shape(leaf)}; "
                    f"its observation space promises {shape}"
                )
            flat[key] = leaf if offset is None else leaf - offset
        return flat


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


class Envs(Protocol):
    """The environments of one worker.

    A column whose episode has ended *rests* in the next step and is restarted after it.
    Observations go to ``into``, arrays ``[B, ...]``; those of columns that rest stay as they are.
    """

    def begin(self, seeds: NDArray[np.int64], into: Observation) -> None:
        """Start the first episodes, from ``seeds`` (int64 ``[B]``)."""
        ...

    def step(self, action: Array, resting: NDArray[np.bool_], into: Observation) -> ColumnSteps:
        """One env step of every column that does not rest."""
        ...

    def restart(self, column: int, seed: int | None, into: Observation) -> None:
        """Start the next episode of ``column``, which has rested."""
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

    def begin(self, seeds: NDArray[np.int64], into: Observation) -> None:
        """See `Envs`."""
        for column, seed in enumerate(seeds.tolist()):
            self.restart(column, seed, into)

    def step(self, action: Array, resting: NDArray[np.bool_], into: Observation) -> ColumnSteps:
        """See `Envs`."""
        if all(adapter.needs_no_adapting for adapter in self.adapters):
            return self._step_unadapted(action.tolist(), resting.tolist(), into[OBSERVATION])
        rests: list[bool] = resting.tolist()
        steps: list[EnvStep] = []
        scalar = self.adapters[0].spec.action.is_discrete
        actions = action.tolist() if scalar else action
        for column, adapter in enumerate(self.adapters):
            if rests[column]:
                steps.append(_RESTED)
                continue
            step = adapter.step(actions[column])
            for key, value in step[0].items():
                into[key][column] = value
            steps.append(step)
        _, *outcomes = zip(*steps, strict=True)
        return ColumnSteps(*map(np.array, outcomes))

    def _step_unadapted(self, actions: list[int], rests: list[bool], rows: Array) -> ColumnSteps:
        """As `step`, for the commonest environments, where calls would cost more than they do."""
        shape = rows.shape[1:]
        steps: list[tuple[Any, ...]] = []
        for column, adapter in enumerate(self.adapters):
            if rests[column]:
                steps.append(_RESTED)
                continue
            step = adapter.env.step(actions[column])
            observation = step[0]
            if getattr(observation, "shape", None) != shape:  # a list, or an error
                observation = adapter.flatten(observation, "step")[OBSERVATION]
            rows[column] = observation
            steps.append(step)
        _, rewards, terminated, truncated, _ = zip(*steps, strict=True)
        if set(map(type, rewards)) != {float}:
            rewards = tuple(a.number(r) for a, r in zip(self.adapters, rewards, strict=True))
        never = np.zeros(len(rests), np.bool_)
        flags = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        return ColumnSteps(np.array(rewards), *flags, never)

    def restart(self, column: int, seed: int | None, into: Observation) -> None:
        """See `Envs`."""
        for key, value in self.adapters[column].reset(seed).items():
            into[key][column] = value

    def close(self) -> None:
        """Close every environment, whatever one of them says to it. Idempotent."""
        adapters, self.adapters = self.adapters, []
        for adapter in adapters:
            close(adapter)


_RESTED: EnvStep = ({}, 0.0, False, False, False)


class VectorEnvs:
    """`Envs` that one Gymnasium vector environment steps: plain Box observations, Discrete actions.

    In NEXT_STEP mode its call after an end only resets; that is the step in which a column rests.
    """

    def __init__(self, env: GymVectorEnv, spec: EnvSpec, tells_lives: bool) -> None:
        """Step ``env``.

        Args:
            env: this object's to close.
            spec: of one environment; where an observation has an axis of length 1 more, it goes.
            tells_lives: watch ``info["lives"]``.

        Raises:
            BadInput: the environment's autoreset mode is another.
        """
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            raise BadInput(
                f"{spec.name}: a vector environment must run in autoreset mode NEXT_STEP, "
                f"this one's is {mode}; make it with autoreset_mode=AutoresetMode.NEXT_STEP"
            )
        self._env = env
        self._num_actions = spec.action.categories[0]
        self._tells_lives = tells_lives
        self._lives_B = np.zeros(env.num_envs, np.int64)
        self._never_B = np.zeros(env.num_envs, np.bool_)

    def begin(self, seeds: NDArray[np.int64], into: Observation) -> None:
        """See `Envs`."""
        observation, info = self._env.reset(seed=seeds)  # type: ignore[arg-type] # ALE's takes it
        self._put(observation, into)
        if self._tells_lives:
            self._lives_B = info["lives"]

    def step(self, action: Array, resting: NDArray[np.bool_], into: Observation) -> ColumnSteps:
        """See `Envs`.

        Raises:
            ValueError: an action is out of range, at which native code may hang.
        """
        if action.min() < 0 or action.max() >= self._num_actions:
            raise ValueError(f"action={action}: must be in [0, {self._num_actions})")
        observation, reward, terminated, truncated, info = self._env.step(action)
        self._put(observation, into)
        lost_life = self._never_B
        if self._tells_lives:
            lives, self._lives_B = self._lives_B, info["lives"]
            lost_life = (self._lives_B < lives) & ~(terminated | truncated | resting)
        return ColumnSteps(reward, terminated, truncated, lost_life)

    def _put(self, observation: Array, into: Observation) -> None:
        rows = into[OBSERVATION]
        rows[...] = observation.reshape(rows.shape)

    def restart(self, column: int, seed: int | None, into: Observation) -> None:
        """See `Envs`: the vector environment has done it."""

    def close(self) -> None:
        """Close the vector environment."""
        close(self._env)


def adapt(factory: EnvFactory) -> EnvAdapter:
    """A new environment, adapted, or closed if it can't be."""
    env = factory()
    try:
        return EnvAdapter(env, factory.name, factory.frame_stack, factory.terminal_on_life_loss)
    except Exception:
        env.close()
        raise


def make_envs(factory: EnvFactory, spec: EnvSpec, num_envs: int, seeded: bool) -> Envs:
    """``num_envs`` environments, native ones where there are such.

    Args:
        factory: makes them.
        spec: of one.
        num_envs: how many.
        seeded: whether `Envs.restart` must keep its seeds.
    """
    vector = None if seeded else factory.vector(num_envs)
    if vector is None:
        envs = SeparateEnvs([])
        try:
            for _ in range(num_envs):
                envs.adapters.append(adapt(factory))
        except BaseException:
            envs.close()
            raise
        return envs
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


def _leaves(
    space: spaces.Space[Any], path: tuple[Any, ...], name: str
) -> list[tuple[str, tuple[tuple[Any, ...], spaces.Space[Any]]]]:
    """``(key, (path, space))`` of every leaf; keys join the path with dots."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        found = [leaf for key, part in parts for leaf in _leaves(part, (*path, key), name)]
        if not found:
            raise UnsupportedSpace(f"{name}: observation space {space} holds nothing")
        return found
    return [(".".join(map(str, path)) or OBSERVATION, (path, space))]


def _array_spec(space: spaces.Space[Any], name: str, what: str) -> ArraySpec:
    if isinstance(space, spaces.Discrete):
        return ArraySpec((), "int64", (int(space.n),))
    if isinstance(space, spaces.MultiDiscrete):
        return ArraySpec(tuple(space.nvec.shape), "int64", tuple(map(int, space.nvec.flat)))
    if isinstance(space, spaces.MultiBinary):
        return ArraySpec(tuple(space.shape), "int8", (2,) * int(np.prod(space.shape)))
    if isinstance(space, spaces.Box):
        return ArraySpec(tuple(space.shape), np.dtype(space.dtype).name)
    kind = type(space)
    hint = "a space of the old gym package? gymnasium's are needed" if _is_old_gym(kind) else (
        "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these are understood"
    )  # fmt: skip
    raise UnsupportedSpace(f"{name}: {what} is {space} ({kind.__module__}.{kind.__name__}); {hint}")


def _is_old_gym(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "gym" for base in inspect.getmro(kind))


def _offset(space: spaces.Space[Any]) -> Any:
    """What to add to a value that counts from 0; None for nothing."""
    if isinstance(space, spaces.Discrete):
        return int(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        start = getattr(space, "start", None)
        return np.asarray(start) if start is not None and np.any(start) else None
    return None
