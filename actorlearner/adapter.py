"""One Gymnasium environment, spoken to in flat arrays.

`FlatSpaces` turns observations into a flat mapping of arrays, and actions that count from 0 into
what the environment expects; `EnvAdapter` steps one environment that way.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces

from actorlearner import envstate
from actorlearner.contracts import (
    OBSERVATION,
    Array,
    ArraySpec,
    BadInput,
    EnvSpec,
    InfoMetrics,
    NativeSpec,
    Observation,
    UnsupportedSpace,
)

GymEnv: TypeAlias = gymnasium.Env[Any, Any]

EnvStep: TypeAlias = tuple[Observation, float, bool, bool, bool, Mapping[str, Any]]
"""What one env step of one environment gave: the next (or final) observation, the raw reward,
whether the episode is over, whether it was cut, whether a life was lost and it goes on, and its
``info``, which the environment may use again."""


class FlatSpaces:
    """The spaces of an environment as specs of arrays, and the way from one to the other.

    Attributes:
        spec: their description.
        is_plain: whether observations are one array and actions indices from 0: nothing to do.
    """

    def __init__(self, spec: EnvSpec) -> None:
        """Translate for the spaces that ``spec`` describes, native parts and all."""
        assert spec.native_action is not None
        self.spec = spec
        self._action_is_scalar = spec.action.is_discrete
        self._action_offset = _offset(spec.action, spec.native_action)
        self._action_dtype = spec.native_action.dtype
        self._parts = [
            (key, native.path, _offset(spec.observation[key], native), spec.observation[key].shape)
            for key, native in spec.native_observation.items()
        ]
        is_one_box = all(
            not (native.path or spec.observation[key].categories)
            for key, native in spec.native_observation.items()
        )
        self.is_plain = is_one_box and self._action_is_scalar and self._action_offset is None

    @classmethod
    def of(
        cls,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        name: str,
        frame_stack: int = 1,
    ) -> FlatSpaces:
        """Describe the spaces.

        Args:
            observation_space: of one environment.
            action_space: likewise.
            name: of the environment, for messages.
            frame_stack: only noted in `spec`.

        Raises:
            UnsupportedSpace: for a space that has no array form; names the key.
        """
        found = _leaves(observation_space, (), name)
        leaves = dict(found)
        if len(leaves) < len(found):
            keys = [key for key, _ in found]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise UnsupportedSpace(f"{name}: two parts of its observation space are called {twice}")
        spec = EnvSpec(
            name,
            {
                key: replace(_array_spec(space, name, key), stack=frame_stack)
                for key, (_, space) in leaves.items()
            },
            _with_bounds(_array_spec(action_space, name, "its action space"), action_space),
            str(observation_space),
            str(action_space),
            {key: _native_spec(space, path) for key, (path, space) in leaves.items()},
            _native_spec(action_space),
        )
        return cls(spec)

    def flatten(self, observation: Any, source: str) -> Observation:
        """``observation`` of one environment by keys, counting from 0.

        Raises:
            BadInput: it has not the parts or the shapes that the space promises; ``source`` gave
                it.
        """
        flat = {}
        try:
            for key, path, offset, shape in self._parts:
                leaf = observation
                for part in path:
                    leaf = leaf[part]
                if np.shape(leaf) != shape:  # an assignment would broadcast what fits
                    raise BadInput(
                        f"{self.spec.name}: {source} gave {key} of shape {np.shape(leaf)}; "
                        f"its observation space promises {shape}"
                    )
                flat[key] = leaf if offset is None else np.asarray(leaf, np.int64) - offset
        except (LookupError, TypeError) as error:
            raise self._without(key, source, error) from error
        return flat

    def parts(self, observation: Any, source: str) -> Observation:
        """As `flatten`, of one environment or of many at once; shapes are not looked at.

        Raises:
            BadInput: a part is missing.
        """
        flat = {}
        try:
            for key, path, offset, _ in self._parts:
                leaf = observation
                for part in path:
                    leaf = leaf[part]
                flat[key] = leaf if offset is None else np.asarray(leaf, np.int64) - offset
        except (LookupError, TypeError) as error:
            raise self._without(key, source, error) from error
        return flat

    def _without(self, key: str, source: str, error: Exception) -> BadInput:
        return BadInput(
            f"{self.spec.name}: {source} gave an observation without {key}: "
            f"{type(error).__name__}: {error}"
        )

    def native(self, action: Any) -> Any:
        """The environment's own form of an action that counts from 0, as its space samples it.

        Args:
            action: an index for a discrete space, else an array; it is copied.
        """
        array = self.native_array(action)
        return array[()] if self._action_is_scalar else array

    def native_array(self, action: Any) -> Any:
        """As `native`, of one array or of many at once (``[B, ...]``)."""
        offset = self._action_offset
        return np.array(action if offset is None else action + offset, self._action_dtype)


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
        self._spaces = FlatSpaces.of(env.observation_space, env.action_space, name, frame_stack)
        self.spec = self._spaces.spec
        self.flatten, self._native = self._spaces.flatten, self._spaces.native
        self.native_array = self._spaces.native_array
        self.needs_no_adapting = self._spaces.is_plain and not tells_lives

    def reset(self, seed: int | None) -> Observation:
        """Start an episode; ``seed`` None goes on with the environment's own generator.

        Raises:
            BadInput: the observation has not the shape that the space promises.
        """
        given = self.env.reset(seed=seed)
        if not (isinstance(given, tuple) and len(given) == 2):
            raise BadInput(
                f"{self.spec.name}: reset gave {_shortened(given)}; Gymnasium's gives "
                "(observation, info)"
            )
        observation, info = given
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
        given = self.env.step(self._native(action))
        observation, reward, terminated, truncated, info = given
        if type(reward) is not float:
            reward = self.number(reward)
        lost_life = False
        if self._tells_lives:
            lives, self._lives = self._lives, self._lives_of(info)
            lost_life = self._lives < lives and not (terminated or truncated)
        flat = self.flatten(observation, "step")
        return flat, reward, bool(terminated), bool(truncated), lost_life, info

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

    def check_dtypes(self, observation: Observation) -> None:
        """Look whether ``observation`` fits into the dtypes of the space.

        Raises:
            BadInput: it holds fractions where the space promises whole numbers, which would be
                rounded down without a word.
        """
        for key, leaf in observation.items():
            given, promised = np.asarray(leaf).dtype, np.dtype(self.spec.observation[key].dtype)
            if given.kind == "f" and promised.kind != "f":
                raise BadInput(
                    f"{self.spec.name}: reset gave {key} of {given}; its observation space "
                    f"promises {promised}, which can't hold fractions"
                )

    def get_state(self) -> dict[str, Any] | None:
        """Where it stands, as data for `set_state`; None if its environment can't tell."""
        state = envstate.get_state(self.env)
        return None if state is None else {**state, "lives": self._lives}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Put it where another one stood that was made alike; it must have been reset.

        Raises:
            ValueError: it was made otherwise.
        """
        envstate.set_state(self.env, state)
        self._lives = state["lives"]

    @property
    def fps(self) -> float:
        """Env steps per second, for who watches."""
        return float(self.env.metadata.get("render_fps") or 30)

    def render(self) -> Array:
        """What it looks like now, uint8 ``[H, W, 3]``.

        Raises:
            BadInput: it shows no such picture.
        """
        name = self.spec.name
        try:
            frame = self.env.render()
        except (gymnasium.error.Error, NotImplementedError) as error:  # say, pygame is missing
            reason = str(error) or "it has no render()"
            raise BadInput(f"{name}: evaluation.video=true: can't be filmed: {reason}") from error
        if isinstance(frame, np.ndarray) and frame.ndim == 3 and frame.shape[2] == 3:
            if frame.dtype == np.uint8:
                return frame
            if frame.dtype.kind == "f":  # MinAtar's are from 0 to 1
                picture: Array = np.rint(255 * frame.clip(0, 1)).astype(np.uint8)
                return picture
        what = f"an array {frame.dtype} {frame.shape}" if isinstance(frame, np.ndarray) else frame
        raise BadInput(
            f"{name}: evaluation.video=true: render() must give an array uint8 [height, width, 3], "
            f"as with render_mode='rgb_array' in Gymnasium; it gave {what}"
        )

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def info_metrics(info: Any, names: Sequence[str]) -> InfoMetrics:
    """Those of ``names`` that are one finite number or flag in ``info``.

    Whatever else an environment leaves there is no metric and does no harm.
    """
    if not (isinstance(info, dict | Mapping) and info):  # a dict is told at once
        return ()
    found = []
    for name in names:
        value = info.get(name)
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.item()
        if not isinstance(value, bool | int | float | np.integer | np.floating | np.bool_):
            continue
        try:
            number = float(value)
        except OverflowError:  # an integer beyond every float
            continue
        if math.isfinite(number):
            found.append((name, number))
    return tuple(found)


def is_old_gym(kind: type) -> bool:
    """Whether ``kind`` is of the package that came before Gymnasium."""
    return any(base.__module__.partition(".")[0] == "gym" for base in inspect.getmro(kind))


def _shortened(thing: Any, most: int = 80) -> str:
    text = repr(thing)
    return text if len(text) <= most else f"{text[:most]}..."


def _leaves(
    space: spaces.Space[Any], path: tuple[Any, ...], name: str
) -> list[tuple[str, tuple[tuple[Any, ...], spaces.Space[Any]]]]:
    """``(key, (path, space))`` of every leaf; keys join the path with dots."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts: list[tuple[Any, spaces.Space[Any]]] = list(
            space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        )
        found = [leaf for key, part in parts for leaf in _leaves(part, (*path, key), name)]
        if not found:
            raise UnsupportedSpace(f"{name}: observation space {space} holds nothing")
        for key, _ in parts:
            if not isinstance(key, str | int):
                raise UnsupportedSpace(f"{name}: observation key {key!r}: must be a text or an int")
        return found
    return [(".".join(map(str, path)) or OBSERVATION, (path, space))]


def _array_spec(space: spaces.Space[Any], name: str, what: str) -> ArraySpec:
    """Categorical values are int64, whatever the space's own dtype: counted from 0 they fit."""
    if isinstance(space, spaces.Discrete):
        return ArraySpec((), "int64", (int(space.n),))
    if isinstance(space, spaces.MultiDiscrete):
        return ArraySpec(tuple(space.nvec.shape), "int64", tuple(map(int, space.nvec.flat)))
    if isinstance(space, spaces.MultiBinary):
        return ArraySpec(tuple(space.shape), "int8", (2,) * int(np.prod(space.shape)))
    if isinstance(space, spaces.Box):
        dtype = np.dtype(space.dtype)
        if dtype.itemsize > 8:
            raise UnsupportedSpace(f"{name}: {what} is {space}; numbers may have up to 64 bits")
        return ArraySpec(tuple(space.shape), dtype.name)
    kind = type(space)
    hint = "this is a gym space, gymnasium is needed" if is_old_gym(kind) else (
        "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these are understood"
    )  # fmt: skip
    raise UnsupportedSpace(f"{name}: {what} is {space} ({kind.__module__}.{kind.__name__}); {hint}")


def _with_bounds(spec: ArraySpec, space: spaces.Space[Any]) -> ArraySpec:
    """``spec`` with those of a Box in which every entry has finite ones."""
    if not (isinstance(space, spaces.Box) and space.is_bounded("both")):
        return spec
    low, high = tuple(space.low.ravel().tolist()), tuple(space.high.ravel().tolist())
    return replace(spec, low=low, high=high)


def _native_spec(space: spaces.Space[Any], path: tuple[Any, ...] = ()) -> NativeSpec:
    start: Any = getattr(space, "start", None)  # of Discrete and MultiDiscrete
    counts_from_0 = start is None or not np.any(start)
    starts = () if counts_from_0 else tuple(np.ravel(start).tolist())
    return NativeSpec(np.dtype(space.dtype).name, path, starts)


def _offset(spec: ArraySpec, native: NativeSpec) -> Any:
    """What to add to a value that counts from 0; None for nothing."""
    if not native.start:
        return None
    return native.start[0] if spec.is_discrete else np.reshape(native.start, spec.shape)
