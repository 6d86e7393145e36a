"""The state of an environment between two env steps: taken out as data, and put back.

An environment tells its state by ``get_state()`` and takes it back by ``set_state(state)``; those
of ALE are known. A wrapper with such methods speaks for all that it wraps. Of other wrappers the
state is in their attributes, where these are plain data, as those of Gymnasium's are.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.wrappers.utils import RunningMeanStd

_Env: TypeAlias = gymnasium.Env[Any, Any]
_NOT_STATE = frozenset(
    {"env", "_saved_kwargs", "_action_space", "_observation_space", "_metadata", "_cached_spec"}
)
"""Attributes of every wrapper that say how it was made."""

_MOMENTS = ("mean", "var", "count")  # of a `RunningMeanStd`


def get_state(env: _Env) -> dict[str, Any] | None:
    """The state of ``env`` and of its wrappers, the outermost first, as data.

    Returns:
        What `set_state` takes: numbers, arrays and bytes in lists, tuples and dicts. None if the
        environment, or one of its wrappers, can't tell its state.
    """
    layers: list[Any] = []
    while True:
        own = _own_state(env)
        if own is not None:
            # Copied: what it gave may be what it goes on with.
            return copy.deepcopy({"layers": [*layers, own], "generator": _generator_state(env)})
        if not isinstance(env, gymnasium.Wrapper):
            return None
        attributes = _attributes(env)
        if attributes is None:
            return None
        layers.append(attributes)
        env = env.env


def set_state(env: _Env, state: Mapping[str, Any]) -> None:
    """Put ``env`` where it stood when `get_state` gave ``state``.

    Args:
        env: made as that one was, and reset.
        state: see `get_state`.

    Raises:
        ValueError: ``env`` has other layers, or other attributes.
    """
    *wrappers, own = copy.deepcopy(state["layers"])
    for attributes in wrappers:
        if not isinstance(env, gymnasium.Wrapper):
            raise ValueError(f"{env} has fewer wrappers than its state tells of")
        held = _attributes(env)
        if held is None or set(held) != set(attributes):
            raise ValueError(f"{env} has other attributes than its state tells of")
        for name, value in attributes.items():
            _put(env, name, value)
        env = env.env
    if state["generator"] is not None:
        env.unwrapped.np_random.bit_generator.state = state["generator"]
    if _has_own_state(env):
        env.set_state(own)  # type: ignore[attr-defined]
    elif _is_of_ale(env):
        from ale_py import ALEState

        env.ale.restoreState(ALEState(own))  # type: ignore[attr-defined]
    else:
        raise ValueError(f"{env} takes no state")


def _own_state(env: _Env) -> Any:
    """What ``env`` itself tells; None if it does not."""
    if _has_own_state(env):
        return env.get_state()  # type: ignore[attr-defined]
    if _is_of_ale(env):
        return env.ale.cloneState(include_rng=True).serialize()  # type: ignore[attr-defined]
    return None


def _has_own_state(env: _Env) -> bool:
    """Whether it has both methods, which take no and one argument: others mean something else."""
    try:
        inspect.signature(env.get_state).bind()  # type: ignore[attr-defined]
        inspect.signature(env.set_state).bind(None)  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def _is_of_ale(env: _Env) -> bool:
    return type(env).__module__.startswith("ale_py.") and hasattr(env, "ale")


def _generator_state(env: _Env) -> Any:
    """Of the generator that Gymnasium gives every environment, if it has drawn from it."""
    drawn_from = getattr(env.unwrapped, "_np_random", None)
    return None if drawn_from is None else drawn_from.bit_generator.state


def _attributes(wrapper: gymnasium.Wrapper[Any, Any, Any, Any]) -> dict[str, Any] | None:
    """The attributes of a wrapper that may change; None if one of them is no plain data.

    Texts, spaces and functions say how it was made: they are left out.
    """
    state: dict[str, Any] = {}
    for name, value in vars(wrapper).items():
        if name in _NOT_STATE or callable(value) or isinstance(value, str | gymnasium.Space):
            continue
        if isinstance(value, RunningMeanStd):
            state[name] = {moment: getattr(value, moment) for moment in _MOMENTS}
        elif _is_plain(value):
            state[name] = list(value) if isinstance(value, deque) else value
        else:
            return None
    return state


def _is_plain(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return not value.dtype.hasobject
    if isinstance(value, list | tuple | deque):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return value is None or isinstance(value, bool | int | float | str | bytes)


def _put(wrapper: gymnasium.Wrapper[Any, Any, Any, Any], name: str, value: Any) -> None:
    """Give ``wrapper`` its attribute back, in what holds it there."""
    held = getattr(wrapper, name)
    if isinstance(held, RunningMeanStd):
        for moment in _MOMENTS:
            setattr(held, moment, value[moment])
    elif isinstance(held, deque):
        setattr(wrapper, name, deque(value, held.maxlen))
    else:
        setattr(wrapper, name, value)
