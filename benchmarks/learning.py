"""What runs have learned: the final return of each seed, their IQM with an interval, and curves.

    python benchmarks/learning.py experiment=cartpole_dqn workers=2 --seeds 0,1,2,3,4
    python benchmarks/learning.py --task "1 step=agent.n_step=1" --task "3 steps=agent.n_step=3"
    python benchmarks/learning.py --group "1 step=runs/a,runs/b" --group "3 steps=runs/c,runs/d"

Runs what is asked for, or only reads runs that are there, and writes ``report.json`` and
``curves.png`` into ``--out-dir``. A run without a final evaluation is not left out, as that would
flatter: there is no IQM then, unless --failed-return says what such a run counts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from common import argument_parser, facts, report, run, say, started, table

from actorlearner.contracts import BadInput
from actorlearner.plot import Run, bootstrap_interval, curves, draw, iqm

# ------------------------------------------------------------------------------------------- runs


def final_return(run: Run) -> float | None:
    """Of the evaluation at the end of ``run``; None if it did not come that far."""
    env_steps, returns = run.points()
    is_whole = len(returns) > 0 and env_steps[-1] >= run.config["total_steps"]
    return float(returns[-1]) if is_whole else None


def told(run: Run) -> dict[str, Any]:
    """What the report says of ``run``."""
    settings = ("experiment", "seed", "workers", "envs_per_worker", "unroll_length")
    metrics = (
        "env_steps",
        "updates",
        "wall_s",
        "evaluation/episodes",
        "replay/samples_per_insert",
        "policy/lag_mean",
        "speed/env_steps_per_s",
    )
    return {
        "path": str(run.path),
        "final_return": final_return(run),
        **{name: run.config.get(name) for name in settings},
        **{name: run.last.get(name) for name in metrics},
    }


def runs_below(path: Path) -> list[Path]:
    """``path`` itself if it is a run, else the runs in it."""
    inside = sorted(metrics.parent for metrics in path.glob("*/metrics.jsonl"))
    return inside if inside and not (path / "metrics.jsonl").exists() else [path]


def run_all(commands: Mapping[Path, Sequence[str]], jobs: int) -> None:
    """Run each command, up to ``jobs`` at once; what it says goes beside its run directory."""
    waiting, running = list(commands.items()), dict[Path, subprocess.Popen[bytes]]()
    with ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < jobs:
                path, command = waiting.pop(0)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.with_suffix(".log").open("wb") as log:
                    running[path] = stack.enter_context(started(command, log))
                say(f"started {shlex.join(command[1:])}")
            for path, process in list(running.items()):
                if process.poll() is not None:
                    del running[path]
                    say(f"ended with exit code {process.returncode}: {path}")
            time.sleep(0.05)


# ----------------------------------------------------------------------------------------- groups


def labelled(text: str) -> tuple[str, str]:
    """``"label=rest"`` in two."""
    label, _, rest = text.partition("=")
    if not label or not rest:
        raise argparse.ArgumentTypeError(f"{text}: must read LABEL=...")
    return label, rest


def seeds(text: str) -> list[int]:
    """``"0,1"`` as numbers."""
    return [int(part) for part in text.split(",")]


def find_runs(args: argparse.Namespace) -> dict[str, list[Run]]:
    """The runs of each group: read, or made first."""
    groups = {label: [Path(part) for part in text.split(",")] for label, text in args.group}
    if args.runs:
        groups["runs"] = args.runs
    if not groups:
        commands, tasks = {}, args.task or [("task", "")]
        for label, text in tasks:
            directory = args.out_dir / label.replace(" ", "_")
            groups[label] = [directory / f"seed_{seed}" for seed in args.seeds]
            for seed, path in zip(args.seeds, groups[label], strict=True):
                if path.exists():
                    raise BadInput(f"--out-dir {args.out_dir}: {path} is there; --group reads runs")
                own = (f"seed={seed}", f"run_dir={path}", "trainer.console=off")
                settings = (*args.settings, *shlex.split(text), *own)
                commands[path] = [sys.executable, "-m", "actorlearner.run", *settings]
        run_all(commands, args.jobs)
    return {
        label: [Run.read(path) for given in paths for path in runs_below(given)]
        for label, paths in groups.items()
    }


def summarise(runs: Sequence[Run], failed_return: float | None) -> dict[str, Any]:
    """Mean, IQM and interval of the final returns, None where one is missing; and each run."""
    finals = [final_return(run) for run in runs]
    scores = [failed_return if final is None else final for final in finals]
    whole = [score for score in scores if score is not None]
    is_whole = len(whole) == len(scores)
    return {
        "final_returns": scores,
        "mean": float(np.mean(whole)) if is_whole else None,
        "iqm": float(iqm(whole)) if is_whole else None,
        "interval": [float(end) for end in bootstrap_interval(whole)] if is_whole else None,
        "failed": finals.count(None),
        "runs": [told(run) for run in runs],
    }


def plot(groups: Mapping[str, Sequence[Run]], path: Path) -> bool:
    """Draw the evaluation returns of each group; without matplotlib or evaluations only tell."""
    try:
        draw(curves(groups), path)
    except BadInput as error:
        say(f"no curves: {error}")
        return False
    return True


def main() -> int:
    """Run or read what the command line says, and tell; 1 if a run has no final evaluation."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seeds", type=seeds, default=[0, 1, 2], metavar="N,N,...")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument(
        "--task", type=labelled, action="append", default=[], metavar="LABEL=KEY=VALUE ...",
        help="settings of a task, besides those of all",
    )  # fmt: skip
    parser.add_argument(
        "--group", type=labelled, action="append", default=[], metavar="LABEL=DIR,DIR,...",
        help="runs that are there, or directories of such; runs nothing",
    )  # fmt: skip
    parser.add_argument("--runs", type=Path, nargs="+", help="as a --group without a label")
    parser.add_argument("--failed-return", type=float, help="what a failed run counts")
    parser.add_argument("--out-dir", type=Path, default=Path("runs/learning"))
    args = parser.parse_intermixed_args()
    machine = facts()
    groups = find_runs(args)
    summaries = {label: summarise(runs, args.failed_return) for label, runs in groups.items()}
    rows = []
    for label, runs in groups.items():
        for found, score in zip(runs, summaries[label]["final_returns"], strict=True):
            steps, seconds = found.last.get("env_steps"), found.last.get("wall_s")
            rows.append([label, found.config.get("seed"), score, steps, seconds, str(found.path)])
    table(["group", "seed", "final return", "env steps", "seconds", "run"], rows)
    for label, summary in summaries.items():
        count, failed = len(summary["final_returns"]), summary["failed"]
        told = f"{label}: {count} seeds, {failed} without a final evaluation"
        if summary["iqm"] is not None:
            low, high = summary["interval"]
            told += (
                f", mean {summary['mean']:.1f}, IQM {summary['iqm']:.1f} [{low:.1f}, {high:.1f}]"
            )
            told += " (95 %, too narrow for so few seeds)" if count < 10 else " (95 %)"
        say(told)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    curves = args.out_dir / "curves.png"
    result = {
        "benchmark": "learning",
        "groups": summaries,
        "settings": args.settings,
        "tasks": dict(args.task),
        "curves": str(curves) if plot(groups, curves) else None,
        **machine,
    }
    (args.out_dir / "report.json").write_text(json.dumps(result, indent=1) + "\n")
    report(result, args.out)
    return int(any(summary["iqm"] is None for summary in summaries.values()))


if __name__ == "__main__":
    run(main)
