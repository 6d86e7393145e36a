"""Ours beside other systems on the same work, in turns.

    python benchmarks/peers.py --peers DIR --work w1 --only sb3,torchrl --pairs 5

``DIR`` holds the peers' scripts: ``run_peers.py``, whose ``S`` lists by work the name of each, its
virtual environment and its command below ``runs/``, each of which ends with a line of JSON. The
virtual environments lie below ``$PEERS_DIR``. Works: w1 acts in ALE Breakout, w2 in CartPole, w3
acts and learns in ALE Breakout. Every measurement is a command of its own; ours and the peer
alternate, and the ratio is the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import ROOT, OtherWork, argument_parser, facts, report, run, say, table

_NATURE = ("env=atari", "agent.hidden=[512]", "replay.capacity=20_000")
OURS: dict[str, tuple[str, ...]] = {
    "w1": ("env_steps.py", "workers=2", *_NATURE, "--limit-envs=16", "--pairs=1",
           "--skip-start-up"),
    "w2": ("env_steps.py", "workers=2", "agent.hidden=[64,64]", "--limit-envs=64", "--pairs=1",
           "--skip-start-up"),
    "w3": ("training.py", "experiment=breakout_dqn", "workers=2", "envs_per_worker=8",
           "agent.double=false", "agent.n_step=1", "replay=uniform", "--pairs=1"),
}  # fmt: skip
"""Our command for each work; more settings may follow. w3 is what the peers learn: plain DQN."""


def last_json(command: Sequence[str], directory: Path) -> dict[str, Any]:
    """What a command tells in its last line of JSON.

    Raises:
        RuntimeError: it failed, or told nothing.
    """
    done = subprocess.run(command, check=False, cwd=directory, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} told nothing:\n{done.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(lines[-1])
    return told


def load_peers(directory: Path) -> tuple[dict[str, list[tuple[str, str, str]]], Path]:
    """By work the name, virtual environment and command of each peer; and where the former lie."""
    sys.path.insert(0, str(directory))
    module = importlib.import_module("run_peers")
    return module.S, Path(module.P)


def main() -> None:
    """Measure what the command line says, and tell."""
    parser = argument_parser(__doc__)
    parser.add_argument("--peers", type=Path, required=True, metavar="DIR", help="their scripts")
    parser.add_argument("--work", choices=sorted(OURS), required=True, help="what to do")
    parser.add_argument("--only", default="", metavar="NAME,...", help="of the peers")
    parser.add_argument("--pairs", type=int, default=5, help="of ours and each peer")
    parser.add_argument("--seconds", type=int, default=15, help="of each measurement")
    args = parser.parse_intermixed_args()
    machine = facts()
    script, *settings = OURS[args.work]
    settings += [f"--seconds={args.seconds}", *args.settings]
    ours = [sys.executable, str(ROOT / "benchmarks" / script), *settings]
    listed, venvs = load_peers(args.peers)
    wanted = args.only.split(",") if args.only else [name for name, *_ in listed[args.work]]
    peers = {name: (venv, command) for name, venv, command in listed[args.work] if name in wanted}
    if unknown := sorted(set(wanted) - set(peers)):
        raise argparse.ArgumentTypeError(f"--only: there is no {', '.join(unknown)}")
    for name, (venv, command) in peers.items():
        theirs = [str(venvs / venv / "bin" / "python"), *command.split(), "--work", args.work,
                  "--seconds", str(args.seconds)]  # fmt: skip
        pairs = []
        for number in range(args.pairs):
            others = OtherWork()
            sides = {"ours": (ours, ROOT), "theirs": (theirs, args.peers / "runs")}
            order = list(sides) if number % 2 == 0 else list(sides)[::-1]
            told = {side: last_json(*sides[side])["env_steps_per_s"] for side in order}
            pair = {**told, "ratio": told["ours"] / told["theirs"], "others": others.cores()}
            pairs.append({key: round(value, 3) for key, value in sorted(pair.items())})
        median = {key: statistics.median(pair[key] for pair in pairs) for key in pairs[0]}
        say(f"\n{args.work}, ours beside {name} ({command})")
        rows = [[str(number), *pair.values()] for number, pair in enumerate(pairs, 1)]
        table(["pair", *pairs[0]], [*rows, ["median", *median.values()]])
        result = {
            "benchmark": "peers",
            "work": args.work,
            "peer": name,
            "command": command,
            **median,
            "ratios": [pair["ratio"] for pair in pairs],
            "pairs": pairs,
            "settings": settings,
            **machine,
        }
        report(result, args.out)


if __name__ == "__main__":
    run(main)
