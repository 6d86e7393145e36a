"""``python -m actorlearner.plot RUN_DIR...``: curves of runs, with intervals over seeds.

    python -m actorlearner.plot runs/cartpole_dqn
    python -m actorlearner.plot runs/a runs/b --metric train/return_mean --smooth 10 --out b.png
    python -m actorlearner.plot runs/sweep --by agent.n_step --x wall_s

A directory is a run or holds runs, however deep, as those of a multirun do. Runs of one experiment
and environment, or of one value of the settings that ``--by`` names, are one curve: the
interquartile mean (the mean, of fewer than four runs), with a 95 % bootstrap interval from three
runs on. Runs that are still going on are drawn as far as they are; a curve goes as far as all of
its runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from omegaconf import OmegaConf

from actorlearner.config import optional_library, told_plainly
from actorlearner.contracts import BadInput

METRIC = "evaluation/return_mean"
"""What is drawn if nothing else is asked for."""
BY = ("experiment", "env.id")
"""Settings that runs of one curve share, if nothing else is asked for."""
X_AXES = {"env_steps": "env steps", "updates": "updates", "wall_s": "seconds"}
"""What may be on the horizontal axis, and what it is called."""

_POINTS = 200
"""Of a curve at most."""


# ------------------------------------------------------------------------------------- statistics


def iqm(values: ArrayLike) -> NDArray[np.float64]:
    """Interquartile mean over the last axis: a quarter, rounded down, is cut off at either end.

    Agarwal et al. (2021), arXiv:2108.13264. Of fewer than four values it is the mean.
    """
    ordered = np.sort(np.asarray(values, np.float64))
    count = ordered.shape[-1]
    cut = count // 4
    return np.asarray(ordered[..., cut : count - cut].mean(-1))


def bootstrap_interval(
    values: ArrayLike, resamples: int = 50_000, seed: int = 0, level: float = 0.95
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Percentile bootstrap interval of the IQM over the last axis; too narrow for few values.

    Args:
        values: ``[..., n]``.
        resamples: draws of ``n`` values with replacement, the same for all other axes.
        seed: of the draws.
        level: share of the resamples inside.

    Returns:
        Its lower and its upper end, each ``[...]``.
    """
    array = np.asarray(values, np.float64)
    count = array.shape[-1]
    drawn = np.random.default_rng(seed).integers(count, size=(resamples, count))
    shares = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(iqm(array[..., drawn]), shares, axis=-1)
    return low, high


# ------------------------------------------------------------------------------------------- runs


@dataclass
class Run:
    """What a run directory tells.

    Attributes:
        path: of it.
        config: of the run, resolved.
        lines: of its metrics: ``env_steps``, ``updates``, ``wall_s`` and ``group/name``.
    """

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Run:
        """The run in ``path``, however far it came; lines that a crash has torn are left out."""
        found = cls(path)
        metrics, config = path / "metrics.jsonl", path / "config.yaml"
        if not (metrics.exists() and config.exists()):
            return found
        tree: Any = OmegaConf.to_container(OmegaConf.load(config))
        found.config = tree
        for text in metrics.read_text(errors="replace").splitlines(keepends=True):
            try:
                line = json.loads(text) if text.endswith("\n") else None
            except ValueError:
                continue
            if isinstance(line, dict):
                found.lines.append(line)
        return found

    def setting(self, key: str) -> Any:
        """The value at dotted ``key`` of its configuration; None if it has none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @property
    def last(self) -> dict[str, Any]:
        """The newest value of everything."""
        return {name: value for line in self.lines for name, value in line.items()}

    def points(
        self, metric: str = METRIC, x: str = "env_steps"
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``metric`` over ``x``, each float64 ``[n]``, in the order of ``x``."""
        found = [
            (line[x], line[metric])
            for line in self.lines
            if line.get(metric) is not None and line.get(x) is not None
        ]
        points = np.array(sorted(found, key=lambda point: point[0]), np.float64).reshape(-1, 2)
        return points[:, 0], points[:, 1]


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in ``paths`` and below.

    Raises:
        BadInput: there is none in one of them.
    """
    found: dict[Path, Run] = {}
    for path in map(Path, paths):
        inside = sorted(metrics.parent for metrics in path.rglob("metrics.jsonl"))
        if not inside:
            missing = "" if path.is_dir() else ": there is no such directory"
            raise BadInput(f"{path}{missing or ': there is no run (metrics.jsonl) in it or below'}")
        for run_dir in inside:
            found.setdefault(run_dir.resolve(), Run.read(run_dir))
    return list(found.values())


def group_runs(runs: Sequence[Run], by: Sequence[str] = BY) -> dict[str, list[Run]]:
    """``runs`` by the values of settings, each group called by what tells it from the others.

    Args:
        runs: to be grouped.
        by: dotted keys; runs of Python scripts, which have none of them, go by their directory,
            or by that above if theirs is called as a seed: ``3``, ``seed_3`` or ``seed=3``.

    Raises:
        BadInput: no run has one of the settings.
    """
    for key in by:
        if key not in BY and all(run.setting(key) is None for run in runs):
            raise BadInput(f"--by {key}: no run has this setting, as in their config.yaml")

    def is_unnamed(run: Run) -> bool:
        return all(run.setting(key) is None for key in by)

    places = {run.path: _without_seed(run.path) for run in runs if is_unnamed(run)}
    above = Path(os.path.commonpath([place.parent for place in places.values()] or [Path()]))

    def values(run: Run) -> tuple[str, ...]:
        if run.path in places:
            return (str(places[run.path].relative_to(above)), *("" for _ in by[1:]))
        return tuple(str(run.setting(key)) for key in by)

    def label(group: tuple[str, ...]) -> str:
        parts = [
            value if key in BY else f"{key.rpartition('.')[2]}={value}"
            for key, value, differs in zip(by, group, differ, strict=True)
            if differs and value
        ]
        return ", ".join(parts)

    grouped: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        grouped.setdefault(values(run), []).append(run)
    differ = [len(set(column)) > 1 for column in zip(*grouped, strict=True)]
    differ[0] |= not any(differ)
    return {label(group): members for group, members in sorted(grouped.items())}


def _without_seed(path: Path) -> Path:
    """The absolute ``path`` of a run, without a last part that only tells the seed."""
    path = path.resolve()
    return path.parent if re.fullmatch(r"(seed[_=])?\d+", path.name) else path


# ----------------------------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Curve:
    """A metric over several runs.

    Attributes:
        label: of the group.
        runs: ``(x, value)`` of each run that has the metric.
        x: float64 ``[n]``, as far as all runs came.
        centre: float64 ``[n]``, the interquartile mean of the runs.
        interval: its 95 % bootstrap interval, from three runs on.
    """

    label: str
    runs: list[tuple[NDArray[np.float64], NDArray[np.float64]]]
    x: NDArray[np.float64]
    centre: NDArray[np.float64]
    interval: tuple[NDArray[np.float64], NDArray[np.float64]] | None

    @property
    def statistic(self) -> str:
        """What `centre` is of, in words."""
        count = len(self.runs)
        return f"{'IQM' if count >= 4 else 'mean'} of {count} runs" if count > 1 else "one run"


def curves(
    groups: Mapping[str, Sequence[Run]],
    metric: str = METRIC,
    x: str = "env_steps",
    smooth: int = 1,
) -> list[Curve]:
    """One curve for each group in which a run has ``metric``.

    Args:
        groups: runs by label.
        metric: as in ``metrics.jsonl``.
        x: one of `X_AXES`.
        smooth: points of a run that each of its values is the mean of, the last ones.

    Raises:
        BadInput: no run has the metric.
    """
    drawn = []
    for label, runs in groups.items():
        found = [points for points in (run.points(metric, x) for run in runs) if len(points[0])]
        if not found:
            continue
        smoothed = [(at, _trailing_mean(values, smooth)) for at, values in found]
        grid = _common(at for at, _ in smoothed)
        values = np.stack([np.interp(grid, at, values) for at, values in smoothed], -1)
        interval = bootstrap_interval(values, resamples=2_000) if len(found) >= 3 else None
        drawn.append(Curve(label, smoothed, grid, iqm(values), interval))
    if not drawn:
        names = {name for runs in groups.values() for run in runs for name in run.last}
        known = ", ".join(sorted(names - set(X_AXES))) or "none yet"
        raise BadInput(f"--metric {metric}: no run has it; there are: {known}")
    return drawn


def _trailing_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """The mean of each value and of those before it, ``window`` at most."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def _common(runs: Any) -> NDArray[np.float64]:
    """Where a curve over runs with points at these places has its own."""
    places = list(runs)
    first, last = max(at[0] for at in places), min(at[-1] for at in places)
    if first > last:  # one run ended before another began to tell
        return np.array([last])
    grid = np.unique(np.concatenate(places))
    grid = grid[(grid >= first) & (grid <= last)]
    return grid if len(grid) <= _POINTS else np.linspace(first, last, _POINTS)


def draw(drawn: Sequence[Curve], path: Path, metric: str = METRIC, x: str = "env_steps") -> None:
    """Draw curves into a file: every run thinly, the centre thickly, the interval as a band.

    Raises:
        BadInput: matplotlib is missing, or can't write such a file there.
    """
    matplotlib = optional_library("matplotlib.figure", "plot", "plots")
    figure = matplotlib.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for index, curve in enumerate(drawn):
        color = f"C{index % 10}"
        for at, values in curve.runs if curve.runs[1:] else ():
            axes.plot(at, values, color=color, alpha=0.3, linewidth=0.8)
        if curve.interval is not None:
            axes.fill_between(curve.x, *curve.interval, color=color, alpha=0.2, linewidth=0)
        name = f"{curve.label} ({curve.statistic})"
        marker = "o" if len(curve.x) == 1 else ""
        axes.plot(curve.x, curve.centre, color=color, marker=marker, linewidth=2.2, label=name)
    axes.set_xlabel(X_AXES[x])
    axes.set_ylabel(metric)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    if drawn:
        axes.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise BadInput(f"--out {path}: {error}") from error


# ----------------------------------------------------------------------------------- command line


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what the command line asks for; returns the exit code, 2 for what can't be."""
    parser = argparse.ArgumentParser(
        "python -m actorlearner.plot", description=__doc__, formatter_class=_Help
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="a run, or a directory of runs")
    parser.add_argument("--metric", default=METRIC, help="as in metrics.jsonl and docs/metrics.md")
    parser.add_argument("--x", choices=X_AXES, default="env_steps", help="the horizontal axis")
    parser.add_argument("--smooth", type=_whole, default=1, metavar="N", help="points to average")
    parser.add_argument("--by", default=",".join(BY), metavar="KEY,KEY", help="settings of a curve")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help=".png, .svg or .pdf")
    return told_plainly(lambda: _plot(parser.parse_args(arguments)))


def _plot(args: argparse.Namespace) -> int:
    runs = read_runs(args.runs)
    drawn = curves(group_runs(runs, args.by.split(",")), args.metric, args.x, args.smooth)
    draw(drawn, args.out, args.metric, args.x)
    for run in runs:
        if not len(run.points(args.metric, args.x)[0]):
            sys.stdout.write(f"left out, without {args.metric}: {run.path}\n")
    for curve in drawn:
        text = f"{curve.label} ({curve.statistic}): {curve.centre[-1]:.4g}"
        if curve.interval is not None:
            text += " [{:.4g}, {:.4g}]".format(*(end[-1] for end in curve.interval))
        sys.stdout.write(f"{text} at {curve.x[-1]:,.0f} {X_AXES[args.x]}\n")
    sys.stdout.write(f"curves are in {args.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
