"""Crafter: ``env=crafter`` (Hafner 2022, arXiv:2109.06780), a world to survive and craft in.

Needs the package of an extra (``pip install "actorlearner[crafter]"``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from actorlearner.config import optional_library, setting
from actorlearner.contracts import Array, BadInput
from actorlearner.envs import AnyEnvSettings, GymEnvFactory

ACHIEVEMENTS = (
    "collect_coal", "collect_diamond", "collect_drink", "collect_iron", "collect_sapling",
    "collect_stone", "collect_wood", "defeat_skeleton", "defeat_zombie", "eat_cow", "eat_plant",
    "make_iron_pickaxe", "make_iron_sword", "make_stone_pickaxe", "make_stone_sword",
    "make_wood_pickaxe", "make_wood_sword", "place_furnace", "place_plant", "place_stone",
    "place_table", "wake_up",
)  # fmt: skip
"""Each pays 1 when it is first done in an episode."""

_IDS = {"CrafterReward-v1": True, "CrafterNoReward-v1": False}


@dataclass(frozen=True, kw_only=True)
class CrafterSettings(AnyEnvSettings):
    """Settings of ``env=crafter``: pictures, 17 actions, 22 achievements."""

    id: str = "CrafterReward-v1"
    """Or ``CrafterNoReward-v1``, where nothing pays."""
    info_metrics: tuple[str, ...] = ("achievements", *ACHIEVEMENTS)
    """What to log of every episode: how many of the achievements it had, and which (0 or 1)."""
    screen_size: int = setting(64, low=18)
    """Pixels of each side of the observation."""
    max_steps: int = setting(10_000, low=1)
    """Env steps after which an episode is truncated."""

    def factory(self, imports: tuple[str, ...] = (), trust: Sequence[str] = ()) -> GymEnvFactory:
        """The recipe of this environment.

        Raises:
            BadInput: crafter is missing, or the id is none of its two.
            SettingError: see `AnyEnvSettings.wrappings`.
        """
        _repeatable()
        if self.id not in _IDS:
            raise BadInput(f"{self.key('id')}={self.id}: must be one of {', '.join(_IDS)}")
        return GymEnvFactory(
            name=self.id,
            source=functools.partial(CrafterEnv, self),
            imports=imports,
            wrappings=self.wrappings(trust),
            info_metrics=self.info_metrics,
        )


class CrafterEnv(gymnasium.Env[Array, Any]):
    """Crafter as a Gymnasium environment.

    Death is ``terminated``; the end of the time is ``truncated``. The last ``info`` of an episode
    holds how many ``achievements`` there were, and each of `ACHIEVEMENTS` as a flag.
    """

    def __init__(self, settings: CrafterSettings, render_mode: str | None = None) -> None:
        """Be ready to begin.

        Args:
            settings: whose ``id`` is one of Crafter's.
            render_mode: ``rgb_array`` to be filmed.
        """
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
        self.render_mode = render_mode
        self._settings = settings
        size = settings.screen_size
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = spaces.Discrete(17)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """See `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        self._world = _repeatable()(  # only its constructor takes a seed
            size=(self._settings.screen_size,) * 2,
            reward=_IDS[self._settings.id],
            length=self._settings.max_steps,
            seed=int(self.np_random.integers(2**31)),
        )
        self._picture: Array = self._world.reset()
        return self._picture, {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`."""
        self._picture, reward, is_over, given = self._world.step(int(action))
        if not is_over:
            return self._picture, float(reward), False, False, {}
        is_dead = given["discount"] == 0
        had = {name: given["achievements"][name] > 0 for name in ACHIEVEMENTS}
        info = {"achievements": sum(had.values()), **had}
        return self._picture, float(reward), is_dead, not is_dead, info

    def render(self) -> Any:
        """See `gymnasium.Env.render`: the last observation.

        Another picture would take from the random numbers that the world goes on with.
        """
        return None if self.render_mode is None else self._picture


@functools.cache
def _repeatable() -> Any:
    """``crafter.Env``, whose episodes here follow from their seeds and actions alone.

    Raises:
        BadInput: it is missing.
    """
    crafter = optional_library("crafter", "crafter", "env=crafter")

    class Repeatable(crafter.Env):  # type: ignore[name-defined, misc]
        """Puts the creatures of an area in order: in a set they stand by memory address."""

        def _balance_chunk(self, chunk: Any, objs: Any) -> None:
            super()._balance_chunk(chunk, sorted(objs, key=lambda obj: tuple(obj.pos)))

    return Repeatable
