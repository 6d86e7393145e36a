"""Environments small enough that the right values are known (learning.md E.1, items 9 and 10)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from actorlearner.agents.dqn import DQN
from actorlearner.replay import ReplayBuffer
from actorlearner.trainer import Trainer
from tests.tiny import Chain, Treadmill

GAMMA = 0.9


def learn(env: Any, total_steps: int, **settings: Any) -> DQN:
    """A linear double DQN on one-hot observations, which is a table, acting at random."""
    model = DQN(
        **{
            "hidden": (), "gamma": GAMMA, "batch_size": 32,
            "learning_rate": ((0, 0.03), (total_steps, 0.001)), "target_every_updates": 10,
            "epsilon": ((0, 1.0),), "dueling": False, **settings,
        }
    )  # fmt: skip
    trainer = Trainer(
        workers=0, lockstep=True, device="cpu", console="off", total_steps=total_steps,
        unroll_length=16, samples_per_insert=16.0, gradient_clip_val=None,
        evaluation={"episodes": 1, "step_limit": 1},
    )  # fmt: skip
    trainer.fit(env, ReplayBuffer(capacity=4096, warmup_env_steps=64, prioritized=False), model)
    return model


def values(model: DQN, size: int) -> Any:
    with torch.no_grad():
        return model.online({"observation": torch.eye(size)}).numpy()


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize(
    ("truncates", "shows_step", "value"),
    [(True, True, 10.0), (False, True, 6.5132), (True, False, 10.0), (False, False, 5.2632)],
    ids=["truncated", "terminated", "truncated, blind", "terminated, blind"],
)
def test_a_truncation_bootstraps_and_a_termination_does_not(
    truncates: bool, shows_step: bool, value: float, n_step: int
) -> None:
    """E.1 item 9: ten steps that pay 1 each, gamma 0.9.

    The rewards are 0.1, and the values a tenth: with rewards of 1 the errors at the end would be
    in the linear part of the Huber loss, whose fixed point of the blind case is 8.89 and not 5.26.
    """
    if not shows_step and n_step == 3:
        # Of the ten windows, seven see three rewards and go on; the others see 3, 2 and 1 and end.
        r = [1.0, 1.9, 2.71]
        value = (8 * r[2] + r[1] + r[0]) / 10 / (1 - 0.7 * GAMMA**3) if not truncates else value
    env = partial(Treadmill, truncates=truncates, shows_step=shows_step, reward=0.1)
    model = learn(env, 2_000, n_step=n_step)
    start = values(model, 10 if shows_step else 1)[0].max()
    assert start == pytest.approx(value / 10, rel=0.03)


def exact_chain() -> Any:
    """Values of `Chain` by value iteration, ``[places, actions]``."""
    size = Chain.PLACES
    exact = np.zeros((size, 2))
    for _ in range(200):
        best = np.append(exact.max(1), 0.0)  # beyond the right end
        for place in range(size):
            exact[place] = GAMMA * best[max(0, place - 1)], GAMMA * best[place + 1]
        exact[size - 1, 1] = 1.0
    assert exact[0, 1] == pytest.approx(GAMMA**4)
    return exact


def test_the_values_of_a_chain_are_the_exact_ones() -> None:
    """E.1 item 10: against value iteration."""
    learned = values(learn(Chain, 3_000), Chain.PLACES)
    assert np.abs(learned - exact_chain()).max() < 0.05


HEADS: dict[str, dict[str, Any]] = {
    "c51": {"head": "c51", "num_atoms": 11, "value_range": (0.0, 1.0)},
    "quantile": {"head": "quantile", "num_quantiles": 4},
    "iqn": {"head": "iqn", "num_tau_samples": 4, "num_tau_prime_samples": 4,
            "num_quantile_samples": 4, "quantile_embedding_dim": 16,
            "learning_rate": ((0, 0.02), (2_000, 0.001))},
    "noisy": {"noisy": True, "epsilon": ((0, 0.3),)},
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_every_head_learns_the_values_of_a_chain(name: str) -> None:
    """Linear ones; noise is left out of what is compared."""
    model = learn(Chain, 2_000, **{"learning_rate": ((0, 0.1), (2_000, 0.003)), **HEADS[name]})
    model.eval()
    assert np.abs(values(model, Chain.PLACES) - exact_chain()).max() < 0.05
