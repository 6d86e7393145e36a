"""Environment suites with settings of their own: ``env=atari``, ``env=minatar``.

Each needs a package of an extra (``pip install "actorlearner[atari]"``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
from gymnasium.wrappers import AtariPreprocessing

from actorlearner.adapter import GymEnv
from actorlearner.columns import GymVectorEnv
from actorlearner.config import optional_library, setting
from actorlearner.contracts import BadInput
from actorlearner.envs import AnyEnvSettings, GymEnvFactory

_FRAMES_PER_S = 60  # of an Atari


@dataclass(frozen=True, kw_only=True)
class AtariSettings(AnyEnvSettings):
    """Settings of ``env=atari``: the preprocessing of Machado et al. (2018), arXiv:1709.06009.

    The games come with ale-py. An env step is ``frame_skip`` frames, of the last two of which the
    agent sees the maximum. A life loss is noticed after the frames of its env step.
    ``wrappers`` go around all that.
    """

    id: str = "ALE/Breakout-v5"
    """A Gymnasium id of ale-py."""
    frame_skip: int = setting(4, low=1)
    """Frames for which an action is repeated."""
    frame_stack: int = setting(4, low=1, high=255)
    """Observations that the agent sees together, the newest last."""
    screen_size: int = setting(84, low=1)
    """Pixels of each side of the observation."""
    grayscale: bool = True
    """Gray instead of RGB (a last axis of 3)."""
    sticky_actions: float = setting(0.0, low=0, high=1)
    """Probability that a frame repeats the action of the frame before it (0.25 in Machado)."""
    noop_max: int = setting(30, low=0)
    """An episode begins with a random number of frames without action, at most these."""
    fire_on_reset: bool = False
    """An episode begins with FIRE, in games that have it."""
    full_action_space: bool = False
    """All 18 actions instead of those that the game knows."""
    terminal_on_life_loss: bool = True
    """A life loss is terminal for learning; the game and its score go on."""
    max_frames: int = setting(108_000, low=1)
    """Frames after which a game is truncated."""
    vector: bool = True
    """Step a worker's games by ale-py's vector environment, unless in lockstep or wrapped."""

    def factory(self, imports: tuple[str, ...] = (), trust: Sequence[str] = ()) -> AtariEnvFactory:
        """The recipe of this environment.

        Raises:
            BadInput: ale-py or OpenCV is missing, or the id is none of ale-py's.
            SettingError: see `AnyEnvSettings.wrappings`.
        """
        for library in ("ale_py", "cv2"):
            optional_library(library, "atari", "env=atari")
        plain = GymEnvFactory.of(self.id, {}, imports)
        spec = plain.source
        if not _is_of(spec, "ale_py"):
            raise BadInput(f"env.id={self.id}: is no game of ale-py; they read ALE/Breakout-v5")
        return AtariEnvFactory(
            name=plain.name,
            source=spec,
            imports=imports,
            frame_stack=self.frame_stack,
            terminal_on_life_loss=self.terminal_on_life_loss,
            info_metrics=self.info_metrics,
            wrappings=self.wrappings(trust),
            settings=self,
        )


@dataclass(frozen=True)
class AtariEnvFactory(GymEnvFactory):
    """Makes one game by Gymnasium's wrappers, or many by ale-py's vector environment.

    Both give the same observations, rewards and lives for the same actions; what they draw (no-ops,
    sticky actions) comes from different generators, and only Gymnasium's counts the frames of a
    reset (no-ops, FIRE) towards ``max_frames``.
    """

    settings: AtariSettings = field(default_factory=AtariSettings)

    def _make(self, render_mode: str | None) -> GymEnv:
        s = self.settings
        _quieten()
        assert isinstance(self.source, gymnasium.envs.registration.EnvSpec)
        env: GymEnv = gymnasium.make(
            self.source,
            disable_env_checker=True,
            frameskip=1,
            repeat_action_probability=s.sticky_actions,
            full_action_space=s.full_action_space,
            max_num_frames_per_episode=s.max_frames,
            render_mode=render_mode,
        )
        env.metadata = {**env.metadata, "render_fps": _FRAMES_PER_S / s.frame_skip}
        if s.fire_on_reset and "FIRE" in env.unwrapped.get_action_meanings():  # type: ignore[attr-defined]
            env = _FireOnReset(env)
        return AtariPreprocessing(
            env,
            noop_max=s.noop_max,
            frame_skip=s.frame_skip,
            screen_size=s.screen_size,
            grayscale_obs=s.grayscale,
        )

    def vector(self, num_envs: int, seed: int = 0, *, stack: int = 1) -> GymVectorEnv | None:
        """See `contracts.EnvFactory`.

        Args:
            num_envs: games.
            seed: not heeded: ale-py's takes seeds when it is reset.
            stack: frames that the vector environment itself stacks; a worker's are stacked by
                `frames`, so that records hold each frame once.
        """
        from ale_py.vector_env import AtariVectorEnv

        s = self.settings
        if not s.vector or self.wrappings:
            return None
        _quieten()
        assert isinstance(self.source, gymnasium.envs.registration.EnvSpec)
        vector: GymVectorEnv = AtariVectorEnv(
            self.source.kwargs["game"],
            num_envs,
            num_threads=1,  # a worker is one core's work
            max_num_frames_per_episode=s.max_frames,
            repeat_action_probability=s.sticky_actions,
            full_action_space=s.full_action_space,
            img_height=s.screen_size,
            img_width=s.screen_size,
            grayscale=s.grayscale,
            stack_num=stack,
            frameskip=s.frame_skip,
            noop_max=s.noop_max,
            use_fire_reset=s.fire_on_reset,
            episodic_life=False,  # it would reset the whole game
            reward_clipping=False,  # the batch clips
        )
        return vector


class _FireOnReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Begins an episode with one frame of FIRE, as ale-py's vector environment does."""

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        self.env.reset(**arguments)
        observation, _, _, _, info = self.env.step(1)
        return observation, info


@dataclass(frozen=True, kw_only=True)
class MinAtarSettings(AnyEnvSettings):
    """Settings of ``env=minatar``: five small games (Young & Tian 2019, arXiv:1903.03176)."""

    id: str = "MinAtar/Breakout-v0"
    """``-v0`` has all six actions, ``-v1`` those that the game uses."""
    sticky_actions: float = setting(0.1, low=0, high=1)
    """Probability that an action is replaced by the one before it."""
    difficulty_ramping: bool = True
    """Games get harder as they go on."""

    def factory(self, imports: tuple[str, ...] = (), trust: Sequence[str] = ()) -> GymEnvFactory:
        """The recipe of this environment.

        Raises:
            BadInput: MinAtar is missing, or has no such game.
            SettingError: see `AnyEnvSettings.wrappings`.
        """
        minatar = optional_library("minatar.gym", "minatar", "env=minatar")
        if "MinAtar/Breakout-v0" not in gymnasium.registry:
            minatar.register_envs()
        arguments = {
            "sticky_action_prob": self.sticky_actions,
            "difficulty_ramping": self.difficulty_ramping,
        }
        factory = MinAtarEnvFactory.of(self.id, arguments, imports, info_metrics=self.info_metrics)
        if not _is_of(factory.source, "minatar"):
            raise BadInput(
                f"env.id={self.id}: is no game of MinAtar; they read MinAtar/Breakout-v0"
            )
        return replace(factory, wrappings=self.wrappings(trust))


@dataclass(frozen=True)
class MinAtarEnvFactory(GymEnvFactory):
    """Makes games whose episodes follow from their seeds and actions alone."""

    def _make(self, render_mode: str | None) -> GymEnv:
        return _ForgetAction(super()._make(render_mode))


class _ForgetAction(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Begins an episode as if no action had been before it, which MinAtar might repeat."""

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        self.env.unwrapped.game.last_action = 0  # type: ignore[attr-defined]
        return self.env.reset(**arguments)


def _is_of(source: Any, package: str) -> bool:
    """Whether ``source`` is registered by ``package``."""
    return str(getattr(source, "entry_point", "")).startswith(f"{package}.")


def _quieten() -> None:
    """Keep the emulator from writing its banner for every environment."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
