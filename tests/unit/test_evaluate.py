"""What evaluations ask for and say."""

from __future__ import annotations

import pytest

from actorlearner.contracts import EvaluationRequest, EvaluationResult, SettingError
from actorlearner.evaluate import EvaluationSettings, summarise


def test_summary_by_hand() -> None:
    result = EvaluationResult((1.0, 2.0, 6.0), (10, 20, 60), cut=1, version=7, env_steps=500)
    metrics = summarise(result)
    assert metrics == pytest.approx(
        {
            "evaluation/return_mean": 3.0,
            "evaluation/return_std": (14 / 3) ** 0.5,  # of these episodes: no n - 1
            "evaluation/return_min": 1.0,
            "evaluation/return_max": 6.0,
            "evaluation/length_mean": 30.0,
            "evaluation/episodes": 3.0,
            "evaluation/episodes_cut": 1.0,
        }
    )
    assert {type(value) for value in metrics.values()} == {float}


def test_one_episode_has_no_spread() -> None:
    assert summarise(EvaluationResult((4.0,), (2,), 0, 0, 0))["evaluation/return_std"] == 0.0


def test_request() -> None:
    settings = EvaluationSettings(episodes=3, step_limit=None, seed=9)
    assert settings.request(700) == EvaluationRequest(3, None, 9, 700)


@pytest.mark.parametrize("name", ["episodes", "step_limit", "seed"])
def test_out_of_bounds(name: str) -> None:
    with pytest.raises(SettingError, match=f"^evaluation.{name}=-1: must be at least"):
        EvaluationSettings.make({name: -1})
