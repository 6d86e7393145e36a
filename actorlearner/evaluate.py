"""What evaluations say: settings of the request, the result as metrics, and films of episodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actorlearner.config import Settings, setting
from actorlearner.contracts import EvaluationRequest, EvaluationResult
from actorlearner.video import RENDER_MODE


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
    video: bool = False
    """Film each evaluation: GIFs in RUN_DIR/videos, and in TensorBoard."""
    video_episodes: int = setting(1, low=1, high=8)
    """Episodes that are filmed, the first ones."""
    video_frames: int = setting(1_000, low=1)
    """Pictures per film at most, one per env step; the episode goes on without."""

    @property
    def render_mode(self) -> str | None:
        """How environments must be made to be filmed; None if they are not."""
        return RENDER_MODE if self.video else None

    def request(self, env_steps: int) -> EvaluationRequest:
        """The request for a snapshot taken at ``env_steps``."""
        films = self.video_episodes if self.video else 0
        return EvaluationRequest(
            self.episodes, self.step_limit, self.seed, env_steps, films, self.video_frames
        )


def summarise(result: EvaluationResult) -> dict[str, float]:
    """Metrics ``evaluation/...`` of ``result``: raw returns, lengths in env steps.

    What episodes ended with in their ``info`` is a mean over those that had it.
    """
    returns = np.array(result.returns)
    infos: dict[str, list[float]] = {}
    for name, number in (pair for info in result.infos for pair in info):
        infos.setdefault(f"evaluation/{name}", []).append(number)
    return {
        **{name: float(np.mean(numbers)) for name, numbers in infos.items()},
        "evaluation/return_mean": float(returns.mean()),
        "evaluation/return_std": float(returns.std()),
        "evaluation/return_min": float(returns.min()),
        "evaluation/return_max": float(returns.max()),
        "evaluation/length_mean": float(np.mean(result.lengths)),
        "evaluation/episodes": float(len(returns)),
        "evaluation/episodes_cut": float(result.cut),
    }


def forget_films(run_dir: Path, env_steps: int) -> None:
    """Delete the films made after ``env_steps``, to which a run has gone back."""
    for film in (run_dir / "videos").glob("step_*_*.gif"):
        step = film.name.split("_")[1]
        if step.isdecimal() and int(step) > env_steps:
            film.unlink()


def films_of(result: EvaluationResult) -> dict[str, bytes]:
    """The films of ``result`` by name: ``evaluation/episode_0``, ..."""
    return {f"evaluation/episode_{i}": film for i, film in enumerate(result.films)}


def write_films(run_dir: Path, env_steps: int, films: Mapping[str, bytes]) -> None:
    """Write ``films``, GIFs by ``group/name``, as ``videos/step_NNNNNNNNNNNN_name.gif``.

    Raises:
        OSError: the disk is full, or not to be written to.
    """
    directory = run_dir / "videos"
    for name, film in films.items():
        directory.mkdir(parents=True, exist_ok=True)
        file = re.sub(r"[^\w.-]", "_", name.partition("/")[2])
        (directory / f"step_{env_steps:012d}_{file}.gif").write_bytes(film)
