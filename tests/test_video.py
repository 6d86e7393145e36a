"""Films of a run: where they are, what TensorBoard has of them, and what can't be filmed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from actorlearner import checkpoint
from actorlearner.contracts import BadInput, EvaluationResult, SettingError
from actorlearner.run import compose, main
from actorlearner.runlog import RunLog
from actorlearner.trainer import Trainer
from tests.command import SMALL, metrics, tree
from tests.tiny import Guess

GIF = b"GIF89a\x28\x00\x1e\x00"
"""Enough of one to tell its size: 40 x 30."""


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest"])


def images(run_dir: Path) -> dict[str, dict[int, Any]]:
    """TensorBoard's, by tag and step."""
    events = EventAccumulator(str(run_dir)).Reload()
    return {tag: {e.step: e for e in events.Images(tag)} for tag in events.Tags()["images"]}


def test_films_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of each evaluation; `--eval-only` makes the last one again."""
    pytest.importorskip("pygame")  # CartPole's painter
    often = ["workers=0", "trainer.evaluate_every_env_steps=150", "evaluation.episodes=1"]
    assert main([*SMALL, *often, "evaluation.video=true", "run_dir=run"]) == 0
    steps = [line["env_steps"] for line in metrics(Path("run")) if "evaluation/episodes" in line]
    films = sorted(Path("run/videos").iterdir())
    assert [film.name for film in films] == [f"step_{n:012d}_episode_0.gif" for n in steps]
    assert len(steps) >= 2
    seen = images(Path("run"))["evaluation/episode_0"]
    assert sorted(seen) == steps
    for step, film in zip(steps, films, strict=True):
        assert seen[step].encoded_image_string == film.read_bytes()
        assert (seen[step].width, seen[step].height) == (300, 200)
    filmed = ["evaluation.video=true", "run_dir=again"]
    assert main(["--eval-only", "ckpt=run", *filmed]) == 0
    told = json.loads(capsys.readouterr().out)
    (film,) = Path("again/videos").iterdir()
    assert film.read_bytes() == films[-1].read_bytes()
    assert main(["--eval-only", "ckpt=run", "evaluation.video=false"]) == 0
    assert json.loads(capsys.readouterr().out) == told, "to be filmed changes nothing"


@pytest.mark.parametrize("entry_point", [Guess, "tests.tiny:Guess"])
def test_what_cant_be_filmed_is_told_before_training(
    entry_point: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gymnasium.register("Unfilmed-v0", entry_point)
    try:
        wanted = ["workers=0", "env.id=Unfilmed-v0", "evaluation.video=true", "run_dir=run"]
        assert main([*SMALL, *wanted]) == 2
    finally:
        del gymnasium.registry["Unfilmed-v0"]
    err = capsys.readouterr().err
    assert "error: Unfilmed-v0: evaluation.video=true: can't be filmed" in err
    assert tree(Path.cwd()) == {}


def test_films_need_a_place() -> None:
    with pytest.raises(SettingError, match=r"^run_dir=None: evaluation.video=true needs"):
        Trainer(evaluation={"video": True})


def result_of(env_steps: int) -> EvaluationResult:
    return EvaluationResult((1.0,), (2,), 0, 5, env_steps, films=(GIF, GIF + b"more"))


def test_a_film_is_written_once_and_under_its_step(tmp_path: Path) -> None:
    log = RunLog(Path("run"))
    log.open(1_000, "off", {}, None)
    for env_steps in (300, 700, 700, 500):
        log.write_evaluation(result_of(env_steps))
    log.close()
    names = [f"step_{n:012d}_episode_{i}.gif" for n in (300, 700) for i in (0, 1)]
    assert sorted(path.name for path in Path("run/videos").iterdir()) == names
    seen = images(Path("run"))
    assert {tag: sorted(steps) for tag, steps in seen.items()} == {
        "evaluation/episode_0": [300, 700], "evaluation/episode_1": [300, 700],
    }  # fmt: skip
    image = seen["evaluation/episode_1"][700]
    assert (image.encoded_image_string, image.width, image.height) == (GIF + b"more", 40, 30)


def test_films_of_what_a_resume_cuts_off_go() -> None:
    def log(resumes_at: tuple[int, int] | None) -> RunLog:
        log = RunLog(Path("run"))
        log.open(1_000, "off", {}, resumes_at)
        return log

    before = log(None)
    for env_steps in (300, 700):
        before.write_evaluation(result_of(env_steps))
    before.close()
    for name in ("step_mine_episode_0.gif", "step_000000000700_open_loop_observation.gif"):
        Path("run/videos", name).touch()
    log((300, 10)).close()
    names = [f"step_{300:012d}_episode_{i}.gif" for i in (0, 1)]
    assert sorted(path.name for path in Path("run/videos").iterdir()) == [
        *names,
        "step_mine_episode_0.gif",
    ]


def test_a_film_that_cant_be_written_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog(Path("run"))
    log.open(1_000, "off", {}, None)
    Path("run/videos").write_text("in the way")
    assert log.write_evaluation(result_of(300))["evaluation/episodes"] == 1
    log.close()
    assert log.failed
    assert "can't be written, training goes on" in caplog.text


def test_a_checkpoint_from_before_films_can_be_filmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose([])
    OmegaConf.set_struct(config, False)
    for name in ("video", "video_episodes", "video_frames"):
        del config.evaluation[name]
    OmegaConf.save(config, tmp_path / "config_unresolved.yaml")
    monkeypatch.setattr(checkpoint, "find", lambda path, states=None: tmp_path)
    asked = ["ckpt=old", "eval_only=true", "run_dir=new"]
    assert compose([*asked, "evaluation.video=true"]).evaluation.video is True
    with pytest.raises(BadInput, match=r"evaluation.vide: .* did you mean evaluation.video\?"):
        compose([*asked, "evaluation.vide=true"])
