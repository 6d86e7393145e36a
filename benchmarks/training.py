"""Env steps and updates per second of training as a whole: workers, learner, and all between.

    python benchmarks/training.py experiment=breakout_dqn workers=2 envs_per_worker=8

A run of the Trainer is timed between two of its updates, after a warm-up; nothing is evaluated or
written meanwhile. The *bare loop* is the arithmetic of an update alone (`learner.py`), with the
same torch threads, which makes as many updates as the learner could if nothing else were to be
done. The *cost model* is what the cores could do if there were nothing but bare updates and bare
acting (`limit.py`). All take turns, and ratios are medians of pairwise ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import learner
import torch
from common import OtherWork, Parts, argument_parser, facts, rate, report, run, say, table
from env_steps import Ours
from limit import Limit

from actorlearner.callbacks import Callback
from actorlearner.cores import usable_cores
from actorlearner.trainer import Trainer

_FIND_S = 60.0  # no longer for the number of threads


class Meter(Callback):
    """Times a run between two of its updates, and stops it.

    Attributes:
        env_steps_per_s: of all workers.
        updates_per_s: of the learner.
        threads: of torch in updates.
    """

    env_steps_per_s = updates_per_s = 0.0
    threads = 1

    def __init__(self, seconds: float, warmup: float) -> None:
        """Time for ``seconds``, from ``warmup`` seconds after the first update on."""
        self._seconds, self._warmup = seconds, warmup
        self._first_update: float | None = None
        self._began: tuple[float, int, int] | None = None

    def after_update(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """See `Callback`."""
        now = time.perf_counter()
        if self._first_update is None:
            self._first_update = now
        elif self._began is None:
            # Which number of threads is best must have been found out, if workers leave the time.
            waited_s = now - self._first_update
            is_found = trainer._threads.chosen or waited_s >= _FIND_S
            if is_found and waited_s >= self._warmup:
                self._began = now, trainer.env_steps, trainer.updates
        elif (wall_s := now - self._began[0]) >= self._seconds:
            self.env_steps_per_s = (trainer.env_steps - self._began[1]) / wall_s
            self.updates_per_s = (trainer.updates - self._began[2]) / wall_s
            self.threads = trainer._threads.chosen or 1
            trainer.stop()


def train(settings: Sequence[str], seconds: float, warmup: float) -> Meter:
    """Run the Trainer until enough was measured."""
    more = ("evaluation.episodes=1", "evaluation.step_limit=1", "trainer.console=off")
    parts, meter = Parts.of([*settings, *more, "run_dir=null"]), Meter(seconds, warmup)
    parts.trainer._callbacks.append(meter)
    parts.trainer.fit(parts.factory, parts.store, parts.agent)
    if not meter.updates_per_s:
        raise RuntimeError("the run ended before enough was measured; raise total_steps")
    return meter


def bare_updates_per_s(settings: Sequence[str], seconds: float, threads: int) -> float:
    """What a loop of bare updates makes with so many torch threads."""
    parts = Parts.of([*settings, f"trainer.threads={threads}"])
    learner.build(parts, rows=5_000)
    bare = learner.bare_loop(parts)
    wait = torch.cuda.synchronize if parts.trainer.device.type == "cuda" else lambda: None
    rate(bare, min(1.0, seconds), wait)
    return rate(bare, seconds, wait)


def model_updates_per_s(
    update_s: float, threads: int, acting_s: float, processes: int, cores: int
) -> float:
    """Updates per second of the cost model: acting and updates share ``cores``, and overlap.

    Args:
        update_s: seconds of a bare update, which ``threads`` work on.
        threads: of torch.
        acting_s: seconds of acting for one update, by all ``processes`` together.
        processes: that act.
        cores: that there are.
    """
    core_s = threads * update_s + min(processes, cores) * acting_s
    return 1 / max(update_s, acting_s, core_s / cores)


def main() -> None:
    """Measure what the command line says, and tell."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--warmup", type=float, default=5.0, help="seconds before each")
    parser.add_argument("--pairs", type=int, default=5, help="turns of training and the bare loops")
    args = parser.parse_intermixed_args()
    machine = facts()
    defaults = ["replay.capacity=20_000", "replay.warmup_env_steps=2_000"]
    settings = [*defaults, *args.settings]
    options = Parts.of(settings).trainer.settings
    recipe = Ours(settings, snapshots_per_s=0).recipe
    pairs = []
    for _ in range(args.pairs):
        others = OtherWork()
        meter = train(settings, args.seconds, args.warmup)
        bare = bare_updates_per_s(settings, args.seconds / 4, meter.threads)
        with Limit(recipe) as limit:
            acting = limit.measure(args.seconds / 4, args.warmup / 5).per_s
        acting_s = meter.env_steps_per_s / meter.updates_per_s / acting
        model = model_updates_per_s(
            1 / bare, meter.threads, acting_s, recipe.processes, len(usable_cores())
        )
        pair = {
            "env_steps_per_s": meter.env_steps_per_s,
            "updates_per_s": meter.updates_per_s,
            "bare_updates_per_s": bare,
            "ratio": meter.updates_per_s / bare,
            "acting_limit_per_s": acting,
            "model_updates_per_s": model,
            "of_model": meter.updates_per_s / model,
            "threads": meter.threads,
            "other_cores": others.cores(),
        }
        pairs.append({name: round(value, 4) for name, value in pair.items()})
    median = {name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]}
    say(f"{options.workers} workers of {options.envs_per_worker} envs")
    head = [
        "pair",
        "env steps/s",
        "updates/s",
        "bare updates/s",
        "ratio",
        "bare acting/s",
        "cost model/s",
        "of model",
        "threads",
        "cores of others",
    ]
    rows = [[str(number), *pair.values()] for number, pair in enumerate(pairs, 1)]
    table(head, [*rows, ["median", *median.values()]])
    result = {
        "benchmark": "training",
        **median,
        "ratios": [pair["ratio"] for pair in pairs],
        "of_models": [pair["of_model"] for pair in pairs],
        "pairs": pairs,
        "workers": options.workers,
        "envs_per_worker": options.envs_per_worker,
        "seconds": args.seconds,
        "settings": args.settings,
        **machine,
    }
    report(result, args.out)


if __name__ == "__main__":
    run(main)
