"""Settings: typed, bounded, immutable; and the one way from a text to an object.

A component declares its settings as a frozen dataclass derived from `Settings`, in its own file.
Building one checks every field, whether the values come from Python or from the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import operator
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from actorlearner.contracts import ActorLearnerError, BadInput, SettingError

SettingsT = TypeVar("SettingsT", bound="Settings")


def setting(
    default: Any = dataclasses.MISSING, *, low: float | None = None, above: float | None = None,
    high: float | None = None, below: float | None = None, live: bool = False,
) -> Any:  # fmt: skip
    """A dataclass field with bounds: ``low <= value <= high``, ``above < value < below``.

    Bounds are checked on numbers and on each number of a sequence. A ``live`` field may change
    during a run.
    """
    bounds = {"low": low, "above": above, "high": high, "below": below}
    metadata: dict[str, Any] = {n: bound for n, bound in bounds.items() if bound is not None}
    if live:
        metadata["live"] = True
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Settings:
    """Base of every settings dataclass (``@dataclass(frozen=True, kw_only=True)``).

    Values are converted where nothing is lost (``1e6`` to an int, a list to a tuple) and refused
    otherwise.

    Raises:
        SettingError: naming the dotted key, the value and what is allowed.
    """

    group: ClassVar[str] = ""
    """Where these settings stand in the config tree; "" is the root."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(typing.cast(Any, self)):
            key = self.key(item.name)
            value = _convert(getattr(self, item.name), hints[item.name], key)
            _check_bounds(value, item.metadata, key)
            object.__setattr__(self, item.name, value)
        self.check()

    def check(self) -> None:
        """Checks across fields; called when each field is known to be good."""

    @classmethod
    def key(cls, name: str) -> str:
        """The dotted key of field ``name``."""
        return f"{cls.group}.{name}" if cls.group else name

    @classmethod
    def make(cls: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
        """Settings from ``values``.

        Raises:
            SettingError: also for an unknown key, with the nearest known one.
        """
        known = [item.name for item in dataclasses.fields(typing.cast(Any, cls))]
        for name in values:
            if name not in known:
                raise SettingError(unknown_key(cls.key(name), [cls.key(n) for n in known]))
        return cls(**values)

    def changed(self: SettingsT, values: Mapping[str, Any]) -> SettingsT:
        """A copy with other ``values`` of live settings.

        Raises:
            SettingError: also for a setting that is not live.
        """
        live = [f.name for f in dataclasses.fields(typing.cast(Any, self)) if "live" in f.metadata]
        for name in values:
            if name not in live:
                known = ", ".join(self.key(n) for n in live) or "none"
                raise SettingError(
                    f"{self.key(name)}: can't change during a run; these can: {known}"
                )
        copy: SettingsT = dataclasses.replace(typing.cast(Any, self), **values)
        return copy


def unknown_key(key: str, known: Sequence[str]) -> str:
    """The error text for ``key``, which is not one of ``known``: the nearest, or its neighbours."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    # A long group makes any two of its names alike: the names themselves must be, too.
    if near and _similarity(key.rpartition(".")[2], near[0].rpartition(".")[2]) >= 0.6:
        return f"{key}: there is no such setting; did you mean {near[0]}?"
    group = key.rpartition(".")[0]
    inside = [name for name in known if name.rpartition(".")[0] == group] or known
    return f"{key}: there is no such setting; there are: {', '.join(sorted(inside))}"


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _convert(value: Any, annotation: Any, key: str) -> Any:
    """``value`` as ``annotation`` says, or a `SettingError`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        errors: list[SettingError] = []
        for option in (a for a in arguments if a is not type(None)):
            try:
                return _convert(value, option, key)
            except SettingError as error:
                errors.append(error)
        reasons = dict.fromkeys(str(error).partition(": ")[2] for error in errors)
        raise SettingError(f"{key}={value!r}: {', or '.join(reasons)}")
    if origin is typing.Literal:
        if value in arguments and not isinstance(value, bool):
            return value
        raise SettingError(f"{key}={value!r}: must be one of {', '.join(map(str, arguments))}")
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise SettingError(f"{key}={value!r}: a list is needed")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_convert(item, arguments[0], key) for item in value)
        if len(value) != len(arguments):
            raise SettingError(f"{key}={value!r}: exactly {len(arguments)} values are needed")
        return tuple(_convert(i, a, key) for i, a in zip(value, arguments, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise SettingError(f"{key}={value!r}: a mapping is needed")
        return dict(value)
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        if isinstance(value, annotation):
            return value
        return annotation.make(_convert(value, dict[str, Any], key))
    return _convert_scalar(value, annotation, key)


def _convert_scalar(value: Any, annotation: Any, key: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is float and is_number:
        with suppress(OverflowError):  # an integer beyond every float
            return float(value)
    if annotation is int and is_number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    if annotation in (bool, str) and isinstance(value, annotation):
        return value
    if annotation is Path and isinstance(value, str | Path):
        return Path(value)
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
    what = names.get(annotation, getattr(annotation, "__name__", str(annotation)))
    raise SettingError(f"{key}={value!r}: {what} is needed")


_BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "low": (operator.ge, "at least"),
    "above": (operator.gt, "greater than"),
    "high": (operator.le, "at most"),
    "below": (operator.lt, "less than"),
}


def _check_bounds(value: Any, metadata: Mapping[str, Any], key: str) -> None:
    bounds = {name: metadata[name] for name in _BOUNDS if name in metadata}
    if isinstance(value, tuple):
        for item in value:
            _check_bounds(item, bounds, key)
        return
    if value is None or isinstance(value, str | bool) or not bounds:
        return
    if not all(_BOUNDS[name][0](value, bound) for name, bound in bounds.items()):  # as NaN
        wanted = " and ".join(f"{_BOUNDS[name][1]} {bound:g}" for name, bound in bounds.items())
        raise SettingError(f"{key}={value!r}: must be {wanted}")


def resolve(target: str, trust: Sequence[str] = ()) -> Any:
    """The object that ``"package.module:Name"`` names.

    Configs and checkpoints may be other people's, so a target resolves only inside this package,
    in an installed entry point of group ``actorlearner``, or in the packages of ``trust``.

    Raises:
        SettingError: for another package, a missing module or a missing name.
    """
    module_name, _, name = target.partition(":")
    package = module_name.partition(".")[0]
    if not name or not module_name:
        raise SettingError(f"target={target!r}: must read package.module:Name")
    allowed = {"actorlearner", *trust}
    if package not in allowed and target not in {
        e.value for e in entry_points(group="actorlearner")
    }:
        raise SettingError(
            f"target={target!r}: {package} is not trusted; add trust=[{package}] if you trust it"
        )
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise SettingError(f"target={target!r}: {error}") from error


def make(
    node: Mapping[str, Any], group: str, needs: str, trust: Sequence[str] = (), **arguments: Any
) -> Any:
    """The component that ``node`` names by its ``target``, with the rest of it as settings.

    Args:
        node: ``target`` and settings.
        group: where it stands in the config tree, for messages.
        needs: a method that the component has; this package holds more than components, and the
            text may be a stranger's.
        trust: see `resolve`.
        arguments: of the constructor, besides the settings.

    Raises:
        SettingError: the target is no such component, or does not take the settings.
    """
    settings = dict(node)
    target = settings.pop("target", None)
    if not isinstance(target, str):
        raise SettingError(f"{group}.target={target}: must read package.module:Name")
    try:
        component = resolve(target, trust)
    except SettingError as error:
        raise SettingError(f"{group}: {error}") from error
    if not (isinstance(component, type) and hasattr(component, needs)):
        raise SettingError(f"{group}.target={target}: must be a class with {needs}()")
    try:
        inspect.signature(component).bind(**arguments, **settings)
    except TypeError as error:
        raise SettingError(f"{group}: {target}: {error}") from error
    return component(**arguments, **settings)


def optional_library(name: str, extra: str, wanted_by: str) -> Any:
    """The module ``name``, which comes with an extra of this package.

    Args:
        name: as it is imported.
        extra: of this package.
        wanted_by: for the message.

    Raises:
        BadInput: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadInput(
            f'{wanted_by}: {name} can\'t be imported ({error}); pip install "actorlearner[{extra}]"'
        ) from error


def config_dir() -> Path:
    """The Hydra tree: beside the modules in a wheel, beside the package in a checkout."""
    here = Path(__file__).resolve().parent
    return here / "configs" if (here / "configs").is_dir() else here.parent / "configs"


def dotted(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested mapping by their dotted keys; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= dotted(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def told_plainly(job: Callable[[], int]) -> int:
    """The exit code of ``job``; errors as people want them: a line for what is theirs to mend."""
    try:
        return job()
    except BadInput as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    except ActorLearnerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130  # before there was anything to save
    except Exception:
        traceback.print_exc()
        return 1
