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


def test_numbers_of_info_are_means_over_the_episodes_that_had_them() -> None:
    infos = ((("success", 1.0), ("episodes", 77.0)), (), (("success", 0.0), ("far", 2.5)))
    result = EvaluationResult((1.0, 2.0, 6.0), (10, 20, 60), 1, 7, 500, infos)
    metrics = summarise(result)
    assert (metrics["evaluation/success"], metrics["evaluation/far"]) == (0.5, 2.5)
    assert metrics["evaluation/episodes"] == 3.0


def test_one_episode_has_no_spread() -> None:
    assert summarise(EvaluationResult((4.0,), (2,), 0, 0, 0))["evaluation/return_std"] == 0.0


def test_request() -> None:
    settings = EvaluationSettings(episodes=3, step_limit=None, seed=9)
    assert settings.request(700) == EvaluationRequest(3, None, 9, 700, 0, 1_000)
    assert settings.render_mode is None
    filmed = EvaluationSettings(video=True, video_episodes=2, video_frames=7)
    assert filmed.request(700) == EvaluationRequest(20, 27_000, 0, 700, 2, 7)
    assert filmed.render_mode == "rgb_array"


@pytest.mark.parametrize(
    "name", ["episodes", "step_limit", "seed", "video_episodes", "video_frames"]
)
def test_out_of_bounds(name: str) -> None:
    with pytest.raises(SettingError, match=f"^evaluation.{name}=-1: must be at least"):
        EvaluationSettings.make({name: -1})
