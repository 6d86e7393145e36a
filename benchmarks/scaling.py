"""Env steps per second over numbers of workers and of environments in each, as a table and a plot.

    python benchmarks/scaling.py env.id=CartPole-v1 --workers 1,2,4 --envs 1,4,16,64 --plot a.png

Each point is a started launcher, as in `env_steps.py`: the policy in the loop, every row copied
into the store, no learning. Points are measured in several rounds, each in another order, and the
median counts, so that a slow stretch of the machine does not fall on one of them alone.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import OtherWork, argument_parser, facts, positive_numbers, report, run, say, table
from env_steps import Ours

from actorlearner.config import optional_library


def measure(settings: list[str], workers: int, envs: int, args: Any) -> float:
    """Env steps per second of ``workers`` with ``envs`` each."""
    settings = [*settings, f"workers={workers}", f"envs_per_worker={envs}"]
    with Ours(settings, snapshots_per_s=5.0) as ours:
        ours.start()
        return ours.measure(args.seconds, args.warmup).per_s


def plot(rates: Mapping[int, Mapping[int, float]], title: str, path: Path) -> None:
    """Draw one line for each number of workers over their environments."""
    optional_library("matplotlib", "plot", "--plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for workers, by_envs in rates.items():
        label = f"{workers} worker{'s' * (workers > 1)}"
        axes.plot(list(by_envs), list(by_envs.values()), marker="o", label=label)
    axes.set_xscale("log", base=2)
    envs = sorted({count for by_envs in rates.values() for count in by_envs})
    axes.set_xticks(envs, [str(count) for count in envs])
    axes.set(xlabel="environments in each worker", ylabel="env steps per second", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure what the command line says, and tell."""
    parser = argument_parser(__doc__)
    parser.add_argument("--workers", type=positive_numbers, default=[1, 2, 4], metavar="N,N,...")
    parser.add_argument("--envs", type=positive_numbers, default=[1, 4, 16, 64], metavar="N,N,...")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each point")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--warmup", type=float, default=0.5, help="seconds before each")
    parser.add_argument("--plot", type=Path, help="a PNG to draw")
    args = parser.parse_intermixed_args()
    machine, others = facts(), OtherWork()
    points = [(workers, envs) for workers in args.workers for envs in args.envs]
    measured: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    order = random.Random(0)
    for _ in range(args.rounds):
        for point in order.sample(points, len(points)):
            measured[point].append(measure(args.settings, *point, args))
    rates = {
        workers: {envs: round(statistics.median(measured[workers, envs]), 1) for envs in args.envs}
        for workers in args.workers
    }
    with Ours(args.settings, snapshots_per_s=5.0) as ours:
        env = ours.recipe.env_spec.name
    say(f"{env}: env steps per second, medians of {args.rounds}")
    table(["workers", *(f"{envs} envs" for envs in args.envs)],
          [[str(workers), *by_envs.values()] for workers, by_envs in rates.items()])  # fmt: skip
    if args.plot is not None:
        plot(rates, env, args.plot)
    result = {
        "benchmark": "scaling",
        "env": env,
        "env_steps_per_s": rates,
        "rounds": args.rounds,
        "other_cores": others.cores(),
        "settings": args.settings,
        **machine,
    }
    report(result, args.out)


if __name__ == "__main__":
    run(main)
