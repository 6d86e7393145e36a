"""The default experiment learns."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from actorlearner.agents.dqn import DQN
from actorlearner.config import config_dir
from actorlearner.replay import ReplayBuffer
from actorlearner.trainer import Trainer


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cartpole_by_the_default_config(tmp_path: Path) -> None:
    """E.2: the final snapshot, greedy, raw returns; 500 is the most there is."""
    with initialize_config_dir(str(config_dir()), version_base=None):
        config = compose("config", ["seed=1", f"run_dir={tmp_path}", "evaluation.episodes=100"])
    tree = OmegaConf.to_container(config, resolve=True)
    assert isinstance(tree, dict)
    agent, replay = (
        {k: v for k, v in tree[name].items() if k != "target"} for name in ("agent", "replay")
    )
    trainer = Trainer.from_config(config)
    metrics = trainer.fit(tree["env"]["id"], ReplayBuffer(**replay), DQN(**agent))
    assert metrics["evaluation/return_mean"] >= 400
