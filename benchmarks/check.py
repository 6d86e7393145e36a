"""Guards of speed: ratios to bare loops measured beside, which no machine's speed moves much.

    python benchmarks/check.py

Each guard runs a benchmark for some seconds and looks at one number of it. The bounds lie below
what is reached on a quiet machine, by what a few seconds can be off. Exit code 1 if one is passed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from common import ROOT, OtherWork, argument_parser, facts, report, run, say, table
from peers import last_json

from actorlearner.config import optional_library
from actorlearner.contracts import BadInput


class Guard(NamedTuple):
    """A number of a benchmark, and how low it may be.

    Attributes:
        name: for people.
        command: the script and its arguments.
        number: takes it out of what the script tells; the higher, the better.
        at_least: its bound.
        extra: of the package, which the benchmark needs; "" for none.
    """

    name: str
    command: tuple[str, ...]
    number: Callable[[dict[str, Any]], float]
    at_least: float
    extra: str = ""


def _of_take(result: dict[str, Any]) -> float:
    return next(
        float(row["batch_ratios"]["take"])
        for row in result["results"]
        if row["row"] == "atari" and row["prioritized"]
    )


_ACTING = ("--pairs=3", "--seconds=3", "--search-seconds=0.5", "--skip-start-up")
_UPDATES = ("device=cpu", "replay.capacity=20_000", "--threads=1")

GUARDS = (
    Guard("acting in CartPole, of its bare loop", ("env_steps.py", "workers=2", "--limit-envs=64",
          *_ACTING), lambda r: r["ratio"], 0.8),
    Guard("acting in ALE Breakout, of its bare loop", ("env_steps.py", "workers=2", "env=atari",
          "agent.hidden=[512]", "replay.capacity=20_000", "--limit-envs=8", *_ACTING),
          lambda r: r["ratio"], 0.85, "atari"),
    Guard("updates of DQN, of their arithmetic", ("learner.py", "experiment=breakout_dqn",
          *_UPDATES, "--pairs=5"), lambda r: 1 / (1 + r["overhead_cpu"]), 0.88, "atari"),
    Guard("updates of Dreamer, of their arithmetic", ("learner.py", "experiment=cartpole_dreamer",
          *_UPDATES, "--pairs=3", "--seconds=6"), lambda r: 1 / (1 + r["overhead_cpu"]), 0.9),
    Guard("a prioritised batch of frames, of one take of them", ("replay.py", "--capacity=20000",
          "--batch-sizes=32", "--pairs=5", "--seconds=0.2"), _of_take, 0.55),
)  # fmt: skip


def main() -> int:
    """Run every guard, and tell."""
    parser = argument_parser(__doc__, with_settings=False)
    args = parser.parse_args()
    machine, others = facts(), OtherWork()
    told: list[dict[str, Any]] = []
    for guard in GUARDS:
        try:
            if guard.extra:
                optional_library({"atari": "ale_py"}[guard.extra], guard.extra, guard.name)
        except BadInput as error:
            say(f"left out: {error}")
            continue
        script, *arguments = guard.command
        command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
        number = round(guard.number(last_json(command, ROOT)), 3)
        told.append({"guard": guard.name, "number": number, "at_least": guard.at_least})
        say(f"{number:.3f}, at least {guard.at_least}: {guard.name}")
    low = [row["guard"] for row in told if row["number"] < row["at_least"]]
    table(["guard", "number", "at least"], [list(row.values()) for row in told])
    cores = others.cores()
    say(f"too low: {'; '.join(low) or 'none'}; other work kept {cores} cores busy")
    report({"benchmark": "check", "guards": told, "low": low, "other_cores": cores, **machine},
           args.out)  # fmt: skip
    return 1 if low else 0


if __name__ == "__main__":
    run(main)
