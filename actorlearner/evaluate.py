"""What evaluations say: settings of the request, and the result as metrics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actorlearner.config import Settings, setting
from actorlearner.contracts import EvaluationRequest, EvaluationResult


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Settings):
    """Settings of every evaluation: greedy, raw rewards, seeds of its own."""

    group = "evaluation"

    episodes: int = setting(20, low=1)
    """Episodes per evaluation."""
    step_limit: int | None = setting(27_000, low=1)
    """Env steps after which an episode is cut (as on Atari: half an hour of play); null for no
    limit but the environment's."""
    seed: int = setting(0, low=0)
    """Of the episodes; training episodes never share one of theirs."""

    def request(self, env_steps: int) -> EvaluationRequest:
        """The request for a snapshot taken at ``env_steps``."""
        return EvaluationRequest(self.episodes, self.step_limit, self.seed, env_steps)


def summarise(result: EvaluationResult) -> dict[str, float]:
    """Metrics ``evaluation/...`` of ``result``: raw returns, lengths in env steps."""
    returns = np.array(result.returns)
    return {
        "evaluation/return_mean": float(returns.mean()),
        "evaluation/return_std": float(returns.std()),
        "evaluation/return_min": float(returns.min()),
        "evaluation/return_max": float(returns.max()),
        "evaluation/length_mean": float(np.mean(result.lengths)),
        "evaluation/episodes": float(len(returns)),
        "evaluation/episodes_cut": float(result.cut),
    }
