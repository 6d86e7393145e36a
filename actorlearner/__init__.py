"""Reinforcement learning on any Gymnasium environment by many worker processes and one learner."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from actorlearner.agents.dqn import DQN
    from actorlearner.callbacks import Callback
    from actorlearner.inference import load_policy
    from actorlearner.replay import ReplayBuffer
    from actorlearner.trainer import Trainer

_EXPORTS = {
    "Callback": "actorlearner.callbacks",
    "DQN": "actorlearner.agents.dqn",
    "ReplayBuffer": "actorlearner.replay",
    "Trainer": "actorlearner.trainer",
    "load_policy": "actorlearner.inference",
}
__all__ = ["DQN", "Callback", "ReplayBuffer", "Trainer", "__version__", "load_policy"]


def __getattr__(name: str) -> Any:
    # On demand: torch takes seconds to load, and the fork server wants to start before.
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'actorlearner' has no attribute {name!r}")
