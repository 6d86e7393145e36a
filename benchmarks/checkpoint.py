"""What a checkpoint costs the training that goes on meanwhile: the time between two updates.

    python benchmarks/checkpoint.py --rows 100000

For CartPole with worker processes, and for Atari-sized rows (84 x 84 bytes, in stacks of 4) of
noise; each with the replay in memory and on disk. Of Atari rows the buffer is full from the first
update on. An interval counts as one of a checkpoint if any of that was going on in it: copying what
changes, writing, hashing, syncing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
from common import argument_parser, facts, report, run, say, table

from actorlearner.agents.dqn import DQN
from actorlearner.callbacks import Callback
from actorlearner.replay import ReplayBuffer
from actorlearner.trainer import Trainer


class Noise(gymnasium.Env[Any, Any]):
    """Frames of noise that cost next to nothing; episodes of 1000 steps."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self) -> None:
        """A few frames, shown again and again."""
        self._frames = np.random.default_rng(0).integers(0, 256, (64, 84, 84), np.uint8)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """The first frame."""
        super().reset(seed=seed)
        return self._frames[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The next frame."""
        self._steps += 1
        return self._frames[self._steps % 64], 0.0, False, self._steps % 1000 == 0, {}


class Clock(Callback):
    """Notes the time between updates, and whether a checkpoint was in it.

    Attributes:
        plain: seconds of intervals without one.
        during: of intervals with one.
        saves: how many were completed.
        resident: bytes of memory, files behind maps among them, at the last update.
    """

    def __init__(self) -> None:
        """Nothing is noted yet."""
        self.plain: list[float] = []
        self.during: list[float] = []
        self.saves = self.resident = 0
        self._last: tuple[float, bool, int] | None = None

    def after_update(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Note the interval that ends now."""
        now = time.perf_counter(), trainer.is_saving, self.saves
        if self._last is not None:
            then, was_saving, saves = self._last
            is_during = was_saving or now[1] or saves != now[2]
            (self.during if is_during else self.plain).append(now[0] - then)
        self._last = now
        self.resident = psutil.Process().memory_info().rss

    def at_save(self, trainer: Trainer, directory: Path) -> None:
        """Count it."""
        self.saves += 1


def measure(kind: str, storage: str, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The intervals of one run."""
    is_atari = kind == "atari"
    clock = Clock()
    begin = args.rows if is_atari else 1000
    run_dir = directory / f"{kind}_{storage}"

    def fit(total_steps: int, **more: Any) -> None:
        trainer = Trainer(
            total_steps=total_steps,
            workers=0 if is_atari else 1,
            envs_per_worker=4,
            run_dir=run_dir,
            evaluation={"episodes": 1, "step_limit": 10},
            keep_last=1,
            console="off",
            device="cpu",
            **more,
        )
        replay = ReplayBuffer(capacity=args.rows, warmup_env_steps=begin, storage=storage)
        trainer.fit(Noise if is_atari else "CartPole-v1", replay, DQN())

    fit(begin, checkpoint_every_env_steps=begin)  # so that the next isn't due at once
    end = begin + args.every * args.checkpoints + args.every // 2
    fit(end, checkpoint=run_dir, checkpoint_every_env_steps=args.every, callbacks=[clock])
    both = clock.plain, clock.during
    plain, during = (1000 * statistics.median(times) if times else None for times in both)
    longest = [round(1000 * max(times), 1) if times else None for times in both]
    return {
        "row": kind,
        "storage": storage,
        "intervals": [len(times) for times in both],
        "median_ms": [plain and round(plain, 2), during and round(during, 2)],
        "median_growth": round(during / plain - 1, 3) if plain and during else None,
        "longest_ms": longest,
        "resident_gib": round(clock.resident / 2**30, 2),
    }


def main() -> None:
    """Measure every case, and tell."""
    parser = argument_parser(__doc__, with_settings=False)
    parser.add_argument("--rows", type=int, default=100_000, help="that the replay holds")
    parser.add_argument("--every", type=int, default=2000, help="env steps between checkpoints")
    parser.add_argument("--checkpoints", type=int, default=3, help="in the time that counts")
    parser.add_argument("--only", choices=["cartpole", "atari"], help="one kind of row")
    parser.add_argument("--directory", type=Path, help="for the runs, which do not stay")
    args = parser.parse_args()
    machine = facts()
    kinds = [args.only] if args.only else ["cartpole", "atari"]
    results = []
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        for kind in kinds:
            for storage in ("memory", "disk"):
                results.append(measure(kind, storage, args, Path(directory)))
    head = ["replay", "median ms", "in a checkpoint", "longest ms", "in a checkpoint"]
    lines = [[f"{r['row']}, {r['storage']}", *r["median_ms"], *r["longest_ms"]] for r in results]
    say(f"{args.rows:,} rows, {args.checkpoints} checkpoints, {len(os.sched_getaffinity(0))} cores")
    table(head, lines)
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "out"}
    report({"benchmark": "checkpoint", "results": results, **options, **machine}, args.out)


if __name__ == "__main__":
    run(main)
