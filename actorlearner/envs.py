"""From a Gymnasium environment to flat arrays and back.

`GymEnvFactory` is the recipe that travels to workers; `EnvAdapter` turns observations into a flat
mapping of arrays and action indices into what the environment expects.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

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

GymEnv: TypeAlias = gymnasium.Env[Any, Any]
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

    def factory(self, imports: tuple[str, ...] = ()) -> GymEnvFactory:
        """The recipe of this environment."""
        return GymEnvFactory.of(self.id, self.kwargs, imports)


@dataclass(frozen=True)
class GymEnvFactory:
    """A recipe that travels by value: what is registered or defined here need not be there.

    Attributes:
        name: the id, or the name of the class or callable.
        source: what makes the environment.
        kwargs: arguments for it.
        imports: modules to import first.
    """

    name: str
    source: GymnasiumSpec | Callable[..., GymEnv]
    kwargs: dict[str, Any] = field(default_factory=dict)
    imports: tuple[str, ...] = ()

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


def _import(module: str, key: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise BadInput(f"{key}={module}: can't be imported: {error}") from error


class EnvAdapter:
    """One environment, spoken to in arrays.

    Attributes:
        spec: its description.
    """

    def __init__(self, env: GymEnv, name: str) -> None:
        """Wrap ``env``.

        Raises:
            UnsupportedSpace: for a space that has no array form; names the key.
        """
        self._env = env
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
        specs = {key: _array_spec(space, name, key) for key, (_, space) in leaves.items()}
        self.spec = EnvSpec(name, specs, action, str(observation_space), str(action_space))
        self._leaves = [
            (key, path, _offset(space), specs[key].shape) for key, (path, space) in leaves.items()
        ]

    def reset(self, seed: int | None) -> Observation:
        """Start an episode; ``seed`` None goes on with the environment's own generator.

        Raises:
            BadInput: the observation has not the shape that the space promises.
        """
        return self._flatten(self._env.reset(seed=seed)[0], "reset")

    def step(self, action: Array) -> tuple[Observation, float, bool, bool]:
        """One env step: observation, raw reward, terminated, truncated.

        Raises:
            BadInput: the observation has not the shape that the space promises, or the reward is
                not one number.
        """
        if self._action_is_scalar:
            native: Any = int(action) + self._action_offset
        else:
            native = (
                np.array(action) if self._action_offset is None else action + self._action_offset
            )
        observation, reward, terminated, truncated, _ = self._env.step(native)
        if type(reward) is not float:
            reward = self._number(reward)
        return self._flatten(observation, "step"), reward, bool(terminated), bool(truncated)

    def _number(self, reward: Any) -> float:
        try:
            return float(np.asarray(reward).item())  # an array of one number is common
        except (TypeError, ValueError) as error:
            raise BadInput(
                f"{self.spec.name}: step gave the reward {reward!r}; it must be one number"
            ) from error

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _flatten(self, observation: Any, source: str) -> Observation:
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
