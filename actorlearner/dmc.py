"""The suite of dm_control: ``env=dmc`` (Tassa et al. 2018, arXiv:1801.00690).

Needs packages of an extra (``pip install "actorlearner[dmc]"``), and OpenGL for pictures.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from actorlearner.config import optional_library, setting
from actorlearner.contracts import Array, BadInput, SettingError
from actorlearner.envs import AnyEnvSettings, GymEnvFactory

PIXELS = "pixels"
"""The key of the picture where there are vectors beside it."""

_FILM_SIZE = 240
_UNBOUNDED = 1e10
"""What dm_control gives as the bound of an action that has none."""
_PAINTER = "MUJOCO_GL"
"""The environment variable that chooses how pictures are painted."""
_HINT = (
    f"without a display it takes OpenGL by EGL, {_PAINTER}=egl (Debian: apt-get install libegl1 "
    f"libgl1-mesa-dri), or by OSMesa, {_PAINTER}=osmesa (libosmesa6)"
)


@dataclass(frozen=True, kw_only=True)
class DMCSettings(AnyEnvSettings):
    """Settings of ``env=dmc``: continuous control, actions within ±1, rewards within [0, 1].

    A control step is the suite's own; an env step is ``action_repeat`` of them. An episode is
    truncated after the suite's 1,000 control steps.
    """

    id: str = "cartpole-swingup"
    """Domain and task, as in ``walker-walk`` or ``ball_in_cup-catch``."""
    observation: Literal["state", "pixels", "both"] = "state"
    """What the agent sees: the vectors of the task, a picture, or both."""
    action_repeat: int = setting(2, low=1)
    """Control steps for which an action is repeated; their rewards are added up."""
    screen_size: int = setting(64, low=1, high=480)
    """Pixels of each side of the picture."""
    camera: int | None = setting(None, low=0)
    """That pictures are taken by; null for 2 with a quadruped and 0 elsewhere, as Dreamer's."""

    def factory(self, imports: tuple[str, ...] = (), trust: Sequence[str] = ()) -> GymEnvFactory:
        """The recipe of this environment.

        Raises:
            BadInput: dm_control is missing or can't start, or has no such task.
            SettingError: see `AnyEnvSettings.wrappings`.
        """
        tasks = _suite().TASKS_BY_DOMAIN
        domain, _, task = self.id.partition("-")
        if task not in tasks.get(domain, ()):
            known = [f"{domain}-{task}" for task in tasks.get(domain, ())]
            others = ", ".join(known) or f"domain-task, with a domain of {', '.join(tasks)}"
            raise BadInput(
                f"{self.key('id')}={self.id}: is no task of dm_control's suite; they read {others}"
            )
        return GymEnvFactory(
            name=self.id,
            source=functools.partial(ControlEnv, self),
            imports=imports,
            wrappings=self.wrappings(trust),
            info_metrics=self.info_metrics,
        )


class ControlEnv(gymnasium.Env[Any, Array]):
    """A task of the suite as a Gymnasium environment.

    Its observation is a picture, uint8 ``[S, S, 3]``, or a Dict: float32 vectors under the task's
    own names, and `PIXELS`. The last step of an episode is ``terminated`` where the task says that
    nothing is to come (discount 0; only ``lqr`` does), else ``truncated``: its time is up.
    """

    def __init__(self, settings: DMCSettings, render_mode: str | None = None) -> None:
        """Build the task.

        Args:
            settings: whose ``id`` is one of the suite.
            render_mode: ``rgb_array`` to be filmed.

        Raises:
            BadInput: no pictures can be taken, and some are wanted.
            SettingError: there is no such camera.
        """
        self.render_mode = render_mode
        self._settings = settings
        domain, _, task = settings.id.partition("-")
        # Some tasks draw their bodies here: always the same, `reset` seeds what they draw later.
        self._env = env = _suite().load(domain, task, task_kwargs={"random": 0})
        seconds = env.control_timestep() * settings.action_repeat
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 1 / seconds}
        camera = settings.camera
        self._camera = (2 if domain == "quadruped" else 0) if camera is None else camera
        if settings.observation != "state" or render_mode is not None:
            self._try_to_paint()
        spec = env.action_spec()
        is_free = spec.maximum >= _UNBOUNDED
        self._low = np.where(is_free, -1.0, spec.minimum)
        self._high = np.where(is_free, 1.0, spec.maximum)
        self.action_space = spaces.Box(-1.0, 1.0, spec.shape, np.float32)
        self.observation_space = self._space()

    def _try_to_paint(self) -> None:
        cameras = self._env.physics.model.ncam
        if self._camera >= cameras:
            key, most = self._settings.key("camera"), cameras - 1
            raise SettingError(
                f"{key}={self._camera}: must be at most {most} in {self._settings.id}"
            )
        try:
            self._picture(1)
        except Exception as error:  # each way to paint has its own
            raise BadInput(f"env=dmc: no pictures can be taken ({error}): {_HINT}") from error

    def _space(self) -> spaces.Space[Any]:
        size = self._settings.screen_size
        picture = spaces.Box(0, 255, (size, size, 3), np.uint8)
        if self._settings.observation == "pixels":
            return picture
        parts: dict[str, spaces.Space[Any]] = {
            name: spaces.Box(-np.inf, np.inf, (math.prod(spec.shape),), np.float32)
            for name, spec in self._env.observation_spec().items()
        }
        if self._settings.observation == "both":
            parts[PIXELS] = picture
        return spaces.Dict(parts)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        self._env.task.random.seed(int(self.np_random.integers(2**32)))
        return self._seen(self._env.reset().observation), {}

    def step(self, action: Array) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`; an episode that ends cuts the repetition short."""
        control = self._low + (np.asarray(action, np.float64) + 1) / 2 * (self._high - self._low)
        reward = 0.0
        for _ in range(self._settings.action_repeat):
            step = self._env.step(control)
            reward += float(step.reward)
            if step.last():
                break
        terminated = step.last() and step.discount == 0
        return self._seen(step.observation), reward, terminated, step.last() and not terminated, {}

    def _seen(self, given: Any) -> Any:
        s = self._settings
        if s.observation == "pixels":
            return self._picture(s.screen_size)
        seen = {name: np.ravel(value).astype(np.float32) for name, value in given.items()}
        if s.observation == "both":
            seen[PIXELS] = self._picture(s.screen_size)
        return seen

    def _picture(self, size: int) -> Array:
        """Uint8 ``[size, size, 3]``."""
        picture: Array = self._env.physics.render(size, size, camera_id=self._camera)
        return picture

    def render(self) -> Any:
        """See `gymnasium.Env.render`; None unless it is to be filmed."""
        return None if self.render_mode is None else self._picture(_FILM_SIZE)

    def close(self) -> None:
        """See `gymnasium.Env.close`."""
        self._env.physics.free()  # which the suite's own close() leaves to chance


def _suite() -> Any:
    """``dm_control.suite``, without pictures where there is no OpenGL.

    Raises:
        BadInput: it is missing, or can't paint as the environment variable says.
    """
    try:
        return _imported()
    except (AttributeError, RuntimeError) as error:  # PyOpenGL's and dm_control's way to say so
        if _PAINTER in os.environ:
            raise BadInput(f"env=dmc: dm_control can't start ({error}): {_HINT}") from error
    os.environ[_PAINTER] = "disabled"
    return _imported()


def _imported() -> Any:
    with warnings.catch_warnings():
        # GLFW only warns where there is no display; as an error it lets dm_control try EGL next.
        warnings.filterwarnings("error", module="glfw")
        return optional_library("dm_control.suite", "dmc", "env=dmc")
