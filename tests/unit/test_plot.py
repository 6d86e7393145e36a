"""Curves of runs: statistics against slow twins, what is read, how runs are grouped and drawn."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorlearner import plot
from actorlearner.contracts import BadInput
from actorlearner.plot import bootstrap_interval, curves, group_runs, iqm, main, read_runs


def slow_iqm(values: Sequence[float]) -> float:
    """The mean of what is left when ``len // 4`` values are taken off at each end."""
    left = list(values)
    for _ in range(len(values) // 4):
        left.remove(min(left))
        left.remove(max(left))
    return sum(left) / len(left)


def slow_quantile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest order statistics."""
    ordered = sorted(values)
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def write_run(path: Path, points: dict[int, float], **config: Any) -> Path:
    """A run directory with evaluations, a line of training, and one that a crash has torn."""
    path.mkdir(parents=True)
    tree = {"experiment": "one", "env": {"id": "A-v0"}, "agent": {"n_step": 1}, **config}
    (path / "config.yaml").write_text(json.dumps(tree))
    lines = [{"env_steps": 5, "updates": 1, "wall_s": 0.5, "q/loss": 2.0, "q/value": None}]
    for step, value in points.items():
        line = {"env_steps": step, "updates": step // 2, "wall_s": step / 10}
        lines.append({**line, "evaluation/return_mean": value})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text + '{"torn": \n{"env_steps": 9')
    return path


# ------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("count", range(1, 14))
def test_iqm_agrees_with_its_slow_twin(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count).round(1)
    assert iqm(values) == pytest.approx(slow_iqm(values.tolist()), abs=1e-12)


def test_iqm_of_one_outlier_in_four_is_without_it() -> None:
    assert iqm([1, 2, 3, 1000]) == 2.5
    assert iqm([[1, 2, 3, 1000], [4, 4, 4, 4]]).tolist() == [2.5, 4]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_interval_agrees_with_its_slow_twin(count: int) -> None:
    values = np.random.default_rng(count).normal(size=(2, count))
    low, high = bootstrap_interval(values, resamples=200, seed=3)
    drawn = np.random.default_rng(3).integers(count, size=(200, count)).tolist()
    for row, ends in zip(values.tolist(), zip(low, high, strict=True), strict=True):
        means = [slow_iqm([row[i] for i in indices]) for indices in drawn]
        expected = [slow_quantile(means, share) for share in (0.025, 0.975)]
        assert ends == pytest.approx(expected, abs=1e-12)


# ------------------------------------------------------------------------------------------- runs


def test_runs_are_found_however_deep_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "sweep" / "a" / "0", {10: 1.0}, seed=3)
    write_run(tmp_path / "sweep" / "b", {})
    runs = read_runs([tmp_path / "sweep", "sweep/b"])
    assert [run.path.name for run in runs] == ["0", "b"]
    assert (runs[0].setting("seed"), runs[0].setting("env.id")) == (3, "A-v0")
    assert runs[0].setting("env.id.more") is runs[0].setting("no.such") is None
    assert runs[0].last["q/loss"] == 2.0


@pytest.mark.parametrize("x", ["env_steps", "updates", "wall_s"])
def test_points_come_in_the_order_of_the_axis(tmp_path: Path, x: str) -> None:
    run = read_runs([write_run(tmp_path / "a", {20: 2.0, 10: 1.0})])[0]
    at, values = run.points("evaluation/return_mean", x)
    factor = {"env_steps": 1, "updates": 0.5, "wall_s": 0.1}[x]
    assert at.tolist() == pytest.approx([10 * factor, 20 * factor])
    assert values.tolist() == [1.0, 2.0]
    assert [len(part) for part in run.points("q/value")] == [0, 0], "null is no value"


def test_runs_are_grouped_by_what_differs(tmp_path: Path) -> None:
    for name, more in {
        "a0": {"seed": 0}, "a1": {"seed": 1}, "b0": {"env": {"id": "B-v0"}},
        "c0": {"agent": {"n_step": 3}},
    }.items():  # fmt: skip
        write_run(tmp_path / name, {10: 1.0}, **more)
    runs = read_runs([tmp_path])

    def names(*by: str) -> dict[str, list[str]]:
        grouped = group_runs(runs, by) if by else group_runs(runs)
        return {label: [run.path.name for run in members] for label, members in grouped.items()}

    assert names() == {"A-v0": ["a0", "a1", "c0"], "B-v0": ["b0"]}
    assert names("agent.n_step") == {"n_step=1": ["a0", "a1", "b0"], "n_step=3": ["c0"]}
    assert list(names("env.id", "agent.n_step")) == ["A-v0, n_step=1", "A-v0, n_step=3",
                                                     "B-v0, n_step=1"]  # fmt: skip
    assert list(group_runs(runs[:2])) == ["one"]


def test_runs_of_scripts_go_by_their_directory(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, {10: 1.0}, experiment=None, env=None)
    assert list(group_runs(read_runs([tmp_path]))) == ["a", "b"]


def test_seeds_of_scripts_are_one_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/dqn/0", "runs/dqn/1", "runs/rainbow/seed_0", "runs/rainbow/seed=1",
                 "runs/dqn2", "other/dqn"):  # fmt: skip
        write_run(tmp_path / name, {10: 1.0}, experiment=None, env=None)
    grouped = group_runs(read_runs(["runs", tmp_path / "other"]))
    assert {label: len(runs) for label, runs in grouped.items()} == {
        "runs/dqn": 2, "runs/rainbow": 2, "runs/dqn2": 1, "other/dqn": 1,
    }  # fmt: skip
    assert list(group_runs(read_runs(["runs/dqn/0"]))) == ["dqn"]


# ----------------------------------------------------------------------------------------- curves


def test_a_curve_goes_as_far_as_all_of_its_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {10: 0.0, 20: 10.0, 30: 20.0})
    write_run(tmp_path / "b", {15: 1.0, 25: 3.0})
    write_run(tmp_path / "running", {})
    (curve,) = curves({"both": read_runs([tmp_path])})
    assert curve.x.tolist() == [15, 20, 25]
    assert curve.centre.tolist() == [(5 + 1) / 2, (10 + 2) / 2, (15 + 3) / 2]
    assert (curve.interval, curve.statistic, len(curve.runs)) == (None, "mean of 2 runs", 2)


def test_three_runs_have_an_interval(tmp_path: Path) -> None:
    for index in range(4):
        write_run(tmp_path / str(index), {10: index, 20: 2.0 * index})
    (curve,) = curves({"g": read_runs([tmp_path])[:3]})
    assert curve.interval is not None
    low, high = curve.interval
    assert (low.tolist(), high.tolist()) == ([0, 0], [2, 4])
    assert curve.statistic == "mean of 3 runs"
    (curve,) = curves({"g": read_runs([tmp_path])})
    assert (curve.centre.tolist(), curve.statistic) == ([1.5, 3], "IQM of 4 runs")


def test_smoothing_looks_back_only(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {10: 1.0, 20: 2.0, 30: 6.0, 40: 1.0})
    (curve,) = curves({"g": read_runs([tmp_path])}, smooth=3)
    assert curve.centre.tolist() == pytest.approx([1, 1.5, 3, 3])


def test_many_points_are_thinned(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {step: float(step) for step in range(1, 1001)})
    (curve,) = curves({"g": read_runs([tmp_path])})
    assert len(curve.x) == 200
    assert curve.centre == pytest.approx(curve.x)


def test_runs_without_a_common_stretch_are_one_point(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {10: 1.0, 20: 3.0})
    write_run(tmp_path / "b", {50: 5.0, 60: 7.0})
    (curve,) = curves({"g": read_runs([tmp_path])})
    assert (curve.x.tolist(), curve.centre.tolist()) == ([20], [4])


# ----------------------------------------------------------------------------------- command line


def test_the_command_draws_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for index in range(3):
        write_run(tmp_path / "runs" / str(index), {10: 1.0, 20: 10.0 * index})
    write_run(tmp_path / "runs" / "b", {10: 4.0}, env={"id": "B-v0"})
    write_run(tmp_path / "runs" / "running", {})
    out = tmp_path / "new" / "c.png"
    assert main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines() == [
        f"left out, without evaluation/return_mean: {tmp_path / 'runs' / 'running'}",
        "A-v0 (mean of 3 runs): 10 [0, 20] at 20 env steps",
        "B-v0 (one run): 4 at 10 env steps",
        f"curves are in {out}",
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["empty"], "error: empty: there is no run (metrics.jsonl) in it or below"),
        (["nowhere"], "error: nowhere: there is no such directory"),
        (["run", "--metric", "q/los"], "error: --metric q/los: no run has it; there are: "
         "evaluation/return_mean, q/loss, q/value"),
        (["run", "--by", "agent.steps"], "error: --by agent.steps: no run has this setting"),
        (["run", "--out", "c.xyz"], "error: --out c.xyz: Format 'xyz' is not supported"),
    ],
)  # fmt: skip
def test_what_cant_be_drawn_is_told_in_a_line(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "run", {10: 1.0})
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(told)
    assert err.count("\n") == 1


def test_matplotlib_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BadInput, match=r'pip install "actorlearner\[plot\]"'):
        plot.draw([], tmp_path / "c.png")
