"""Recipes of environments: from an id, a class or a function to a Gymnasium environment.

`GymEnvFactory` is the recipe that travels to workers; `EnvSettings` are the settings of
``env=gym``. What workers do with environments is in `adapter` and `columns`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, overload

import gymnasium
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode

from actorlearner.adapter import GymEnv, is_old_gym
from actorlearner.columns import GymVectorEnv
from actorlearner.config import Settings, resolve, setting
from actorlearner.contracts import BadInput, EnvFactory, SettingError

EnvLike: TypeAlias = str | GymnasiumSpec | Callable[..., GymEnv] | EnvFactory
"""What people may hand in as an environment."""

INFO_METRICS = ("success", "is_success")
"""Names under which environments commonly tell whether an episode succeeded."""


@dataclass(frozen=True, kw_only=True)
class AnyEnvSettings(Settings):
    """What the settings of all environments have in common."""

    group = "env"

    id: str
    """A Gymnasium id."""
    wrappers: tuple[str | dict[str, Any], ...] = ()
    """Gymnasium wrappers around it, the innermost first: ``gymnasium.wrappers:Class``, or
    ``{target: gymnasium.wrappers:Class, argument: value}``; other packages need ``trust``."""
    info_metrics: tuple[str, ...] = INFO_METRICS
    """Numbers and flags to log of every episode whose last ``info`` has them."""

    def wrappings(self, trust: Sequence[str]) -> tuple[Wrapping, ...]:
        """What ``wrappers`` name.

        Args:
            trust: packages that they may be of, besides Gymnasium and this one.

        Raises:
            SettingError: one is no wrapper, is not trusted, or does not take its arguments.
        """
        return tuple(
            Wrapping.of(wrapper, f"{self.key('wrappers')}[{index}]", trust)
            for index, wrapper in enumerate(self.wrappers)
        )


@dataclass(frozen=True, kw_only=True)
class EnvSettings(AnyEnvSettings):
    """Settings of ``env=gym``."""

    id: str = "CartPole-v1"
    """A Gymnasium id, or ``module:Id`` to import the module that registers it."""
    kwargs: dict[str, Any] = setting({})
    """Arguments of the environment's constructor."""
    frame_stack: int = setting(1, low=1, high=255)
    """Observations that the agent sees together, the newest last."""
    vector: bool = False
    """Step a worker's environments by the id's own vector environment, unless in lockstep."""

    def check(self) -> None:
        """A vector environment has no place for wrappers of single ones."""
        if self.vector and self.wrappers:
            raise SettingError(
                f"{self.key('vector')}=True: its environments can't be wrapped; leave "
                f"{self.key('wrappers')} empty, or {self.key('vector')} false"
            )

    def factory(self, imports: tuple[str, ...] = (), trust: Sequence[str] = ()) -> GymEnvFactory:
        """The recipe of this environment.

        Raises:
            BadInput: there is no such id, or no vector environment where one is asked for.
            SettingError: see `AnyEnvSettings.wrappings`.
        """
        recipe = GymEnvFactory.of(self.id, self.kwargs, imports, info_metrics=self.info_metrics)
        if self.vector:
            spec = recipe.source
            assert isinstance(spec, GymnasiumSpec)
            if spec.vector_entry_point is None:
                raise BadInput(
                    f"{self.key('vector')}=True: {self.id} has no vector environment of its own; "
                    f"leave {self.key('vector')} false"
                )
            recipe = replace(recipe, make_vector=functools.partial(_native, spec, self.kwargs))
        return replace(recipe, frame_stack=self.frame_stack, wrappings=self.wrappings(trust))


@dataclass(frozen=True)
class Wrapping:
    """A Gymnasium wrapper and its arguments.

    Attributes:
        name: for messages.
        kind: its class.
        arguments: of its constructor, besides the environment.
    """

    name: str
    kind: Callable[..., GymEnv]
    arguments: dict[str, Any]

    @classmethod
    def of(cls, wrapper: str | Mapping[str, Any], key: str, trust: Sequence[str]) -> Wrapping:
        """The wrapper that a setting names.

        Args:
            wrapper: its target, or a mapping with ``target`` and arguments.
            key: where it stands, for messages.
            trust: see `config.resolve`; Gymnasium's own wrappers need none.

        Raises:
            SettingError: it is no wrapper, is not trusted, or does not take the arguments.
        """
        arguments = {"target": wrapper} if isinstance(wrapper, str) else dict(wrapper)
        target = arguments.pop("target", None)
        if not isinstance(target, str):
            raise SettingError(f"{key}={wrapper}: must name its target, module:Class")
        name = f"{key}={target}"
        module, _, class_name = target.partition(":")
        is_harmless = f"{module}.".startswith("gymnasium.wrappers.") and (
            class_name != "RecordVideo"  # it writes files where a stranger's config may say
        )
        try:
            kind = resolve(target, [*trust, "gymnasium"] if is_harmless else trust)
        except SettingError as error:
            raise SettingError(f"{key}: {error}") from error
        if not (isinstance(kind, type) and issubclass(kind, gymnasium.Wrapper)):
            raise SettingError(f"{name}: must be a subclass of gymnasium.Wrapper")
        try:
            inspect.signature(kind).bind(None, **arguments)
        except TypeError as error:
            raise SettingError(f"{name}: {error}") from error
        return cls(name, kind, arguments)

    def __call__(self, env: GymEnv) -> GymEnv:
        """``env`` in the wrapper.

        Raises:
            BadInput: the wrapper can't be put around it; ``env`` is closed.
        """
        try:
            return self.kind(env, **self.arguments)
        except Exception as error:
            env.close()
            raise BadInput(f"{self.name}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class GymEnvFactory:
    """A recipe that travels by value: what is registered or defined here need not be there.

    Attributes:
        name: the id, or the name of the class or callable.
        source: what makes the environment.
        kwargs: arguments for it.
        imports: modules to import first.
        wrappings: to be put around it, the innermost first.
        make_vector: ``vector`` of `of`; None if there is no such.
        frame_stack: see `contracts.EnvFactory`.
        terminal_on_life_loss: likewise.
        info_metrics: likewise.
    """

    name: str
    source: GymnasiumSpec | Callable[..., GymEnv]
    kwargs: dict[str, Any] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    wrappings: tuple[Wrapping, ...] = ()
    make_vector: Callable[..., GymVectorEnv] | None = None
    frame_stack: int = 1
    terminal_on_life_loss: bool = False
    info_metrics: tuple[str, ...] = INFO_METRICS

    @overload
    @classmethod
    def of(
        cls,
        env: str | GymnasiumSpec,
        kwargs: Mapping[str, Any] | None = None,
        imports: tuple[str, ...] = (),
        *,
        vector: Callable[..., GymVectorEnv] | None = None,
        info_metrics: Sequence[str] = INFO_METRICS,
    ) -> GymEnvFactory: ...

    @overload
    @classmethod
    def of(
        cls,
        env: EnvLike,
        kwargs: Mapping[str, Any] | None = None,
        imports: tuple[str, ...] = (),
        *,
        vector: Callable[..., GymVectorEnv] | None = None,
        info_metrics: Sequence[str] = INFO_METRICS,
    ) -> EnvFactory: ...

    @classmethod
    def of(
        cls,
        env: EnvLike,
        kwargs: Mapping[str, Any] | None = None,
        imports: tuple[str, ...] = (),
        *,
        vector: Callable[..., GymVectorEnv] | None = None,
        info_metrics: Sequence[str] = INFO_METRICS,
    ) -> EnvFactory:
        """The recipe of an id, spec, class or callable, a `GymEnvFactory`.

        A recipe (any `contracts.EnvFactory`) is taken as it is, and alone.

        Args:
            env: makes one environment.
            kwargs: arguments for it.
            imports: modules to import first.
            vector: makes a number of environments as one vector environment, in autoreset mode
                NEXT_STEP; used where the seed of every episode need not be kept. If it has a
                parameter ``seed`` it is told one, another in each worker.
            info_metrics: see `contracts.EnvFactory`.

        Raises:
            BadInput: no such id, or not an environment at all; or more than a recipe.
        """
        if isinstance(env, EnvFactory) and not isinstance(env, type):
            if kwargs or imports or vector or tuple(info_metrics) != INFO_METRICS:
                raise BadInput(
                    f"env={env.name}: a recipe is taken as it is; give kwargs, imports, vector and "
                    "info_metrics where it is made"
                )
            return env
        for module in imports:
            _import(module, "imports")
        if isinstance(env, gymnasium.Env | gymnasium.vector.VectorEnv):
            raise BadInput(
                f"env={env}: an environment object can't be copied to workers; "
                "give its class, or a function that makes one"
            )
        source: GymnasiumSpec | Callable[..., GymEnv]
        if isinstance(env, str):
            name, source = env, _registered(env)
        elif isinstance(env, GymnasiumSpec):
            name, source = env.id, env
        elif callable(env):
            own = getattr(env, "name", None)  # of a class it may be a property
            name = own if isinstance(own, str) else getattr(env, "__name__", type(env).__name__)
            source = env
        else:
            raise BadInput(f"env={env!r}: give a Gymnasium id, a spec, an Env class or a callable")
        return cls(
            name,
            source,
            dict(kwargs or {}),
            imports,
            make_vector=vector,
            info_metrics=tuple(info_metrics),
        )

    def __call__(self, render_mode: str | None = None) -> GymEnv:
        """A new environment.

        Raises:
            BadInput: what came out is no Gymnasium environment, or can't be wrapped.
        """
        for module in self.imports:
            importlib.import_module(module)
        env = self._checked(self._make(render_mode))
        for wrapping in self.wrappings:
            env = wrapping(env)
        return env

    def _make(self, render_mode: str | None) -> Any:
        arguments = dict(self.kwargs)
        if render_mode is not None and self._takes_render_mode():
            arguments["render_mode"] = render_mode
        if isinstance(self.source, GymnasiumSpec):
            return gymnasium.make(self.source, disable_env_checker=True, **arguments)
        return self.source(**arguments)

    def _takes_render_mode(self) -> bool:
        """Whether what makes the environment can be told how it shall show itself."""
        maker: Any = self.source
        if isinstance(maker, GymnasiumSpec):
            maker = maker.entry_point
        if isinstance(maker, str):
            maker = load_env_creator(maker)
        try:
            parameters = inspect.signature(maker).parameters.values()
        except ValueError:  # not written in Python
            return False
        return any(p.name == "render_mode" or p.kind is p.VAR_KEYWORD for p in parameters)

    def _checked(self, env: Any) -> GymEnv:
        if isinstance(env, gymnasium.Env):
            return env
        hint = ""
        if isinstance(env, gymnasium.vector.VectorEnv):
            hint = (
                ", but a vector environment; let it make a single one, and give what makes many as "
                "GymEnvFactory.of(make_env, vector=make_vector_env)"
            )
            env.close()
        elif is_old_gym(type(env)):
            hint = ", but of the old gym package; gymnasium is needed"
        raise BadInput(f"env factory {self.name} returned {env!r}, not a gymnasium.Env{hint}")

    def vector(self, num_envs: int, seed: int = 0) -> GymVectorEnv | None:
        """See `contracts.EnvFactory`.

        Raises:
            BadInput: what came out is no vector environment of ``num_envs``.
        """
        if self.make_vector is None:
            return None
        for module in self.imports:
            importlib.import_module(module)
        make = self.make_vector
        env = make(num_envs, seed=seed) if _takes(make, "seed") else make(num_envs)
        if not isinstance(env, gymnasium.vector.VectorEnv) or env.num_envs != num_envs:
            raise BadInput(
                f"the vector environment of {self.name}: {env!r} came, "
                f"{num_envs} environments in a gymnasium.vector.VectorEnv are needed"
            )
        return env


def _takes(function: Callable[..., Any], parameter: str) -> bool:
    """Whether ``function`` takes ``parameter`` by its name, and nobody has bound it yet."""
    if isinstance(function, functools.partial) and parameter in function.keywords:
        return False
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # nothing can be known
        return False
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return parameter in parameters and parameters[parameter].kind in by_name


def _native(
    spec: GymnasiumSpec, kwargs: Mapping[str, Any], num_envs: int, seed: int = 0
) -> GymVectorEnv:
    """The vector environment of ``spec``, in the mode that is needed if it can be asked for."""
    point = spec.vector_entry_point
    assert point is not None
    make = gymnasium.envs.registration.load_env_creator(point) if isinstance(point, str) else point
    wanted: dict[str, Any] = dict(kwargs)
    if _takes(make, "autoreset_mode"):
        wanted["autoreset_mode"] = AutoresetMode.NEXT_STEP
    if _takes(make, "seed") and "seed" not in {**spec.kwargs, **kwargs}:
        wanted["seed"] = seed
    return gymnasium.make_vec(
        spec, num_envs=num_envs, vectorization_mode="vector_entry_point", **wanted
    )


def _registered(env: str) -> GymnasiumSpec:
    """The spec of ``id`` or ``module:Id``."""
    module, _, name = env.rpartition(":")
    if module:
        _import(module, "env.id")
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise BadInput(f"env.id={env}: {error}; module:Id imports a module first") from error


def _import(module: str, key: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise BadInput(f"{key}={module}: can't be imported: {error}") from error
