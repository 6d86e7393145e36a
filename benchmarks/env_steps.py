"""Env steps per second, beside what the machine can do.

    python benchmarks/env_steps.py workers=2 env.id=CartPole-v1 --limit-envs 16,64,256

Ours is a started launcher with real workers, the policy in the loop, every row copied into the
store, and no learning. The limit is as many independent processes (`limit.py`) with their best
number of environments. Both take turns, and the ratio is the median of the pairwise ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import psutil
from common import (
    OtherWork,
    Parts,
    Rate,
    argument_parser,
    cpu_seconds,
    facts,
    positive_numbers,
    report,
    run,
    say,
    started,
    table,
)
from limit import Limit, Recipe

from actorlearner.acting import choose
from actorlearner.assembly import make_launcher, worker_specs
from actorlearner.contracts import StreamLayout, Unroll
from actorlearner.launch._child import Commit
from actorlearner.streams import StreamLedger


class Ours:
    """A launcher with its workers, and the store that their rows go to.

    Attributes:
        options: of the Trainer.
        recipe: of a limit with the same environments, policy and settings.
        commit_bytes: of commit messages, as pickled for the pipe.
    """

    def __init__(self, settings: Sequence[str], snapshots_per_s: float) -> None:
        """Build everything; no worker runs before `start`.

        Args:
            settings: as on the command line.
            snapshots_per_s: that are published.
        """
        self._snapshots_per_s = snapshots_per_s
        parts = Parts.of(settings)
        self.options = options = parts.trainer.settings
        self.commit_bytes: list[int] = []
        self._launcher, self._store = make_launcher(options, None), parts.store
        env_spec, agent = self._launcher.probe(parts.factory), parts.agent
        agent.build(env_spec)
        agent.current_step = options.total_steps  # explores as at the end of a run
        layout = StreamLayout(options.num_streams, options.unroll_length)
        parts.store.build(env_spec, agent.sample_spec, layout, planned_updates=1)
        ledger = StreamLedger(options.num_streams, record_actions=False)
        policy = agent.policy_factory(parts.store.extras)
        columns = options.envs_per_worker
        acting = choose(
            options.acting,
            policy(env_spec, range(columns), options.num_streams, False),
            env_spec,
            columns,
            options.unroll_length,
            cache=None,
        )
        self._specs = worker_specs(options, ledger, parts.factory, env_spec, policy, acting)
        self.recipe = Recipe(
            parts.factory,
            env_spec,
            agent.policy_factory(),
            agent.snapshot(0),
            columns,
            len(self._specs),
            acting,
        )

    def start(self) -> None:
        """Start the workers, and wait for the first unroll."""
        self._launcher.start(self._specs, self.recipe.snapshot)
        while next(iter(self._launcher.gather(0.1, lambda: True)), None) is None:
            pass
        self._processes = [psutil.Process()]
        for process in psutil.Process().children(recursive=True):
            if process.name().startswith("al-worker-"):
                self._processes.append(process)

    def measure(self, seconds: float, warmup: float) -> Rate:
        """Env steps that reach the store; afterwards the workers stand still.

        Meanwhile snapshots are published as by a learner, for the workers to adopt.
        """
        published = 0.0
        recent: deque[Unroll] = deque(maxlen=100)
        num_unrolls = env_steps = 0
        since, begin, now, cpu_s = time.perf_counter(), 0.0, 0.0, 0.0
        while not begin or now - begin < seconds:
            for unroll in self._launcher.gather(0.1, lambda: True):
                self._store.add(unroll)
                now = time.perf_counter()
                if now - published >= 1 / self._snapshots_per_s:
                    self.recipe.snapshot.version += 1
                    self._launcher.publish(self.recipe.snapshot)
                    published = now
                if not begin:  # from one arrival to another, so that no unroll counts in part
                    if now - since >= warmup:
                        cpu_s, begin = self._cpu_s(), time.perf_counter()
                    continue
                num_unrolls += 1
                env_steps += unroll.env_steps
                recent.append(unroll)
                if now - begin >= seconds:
                    break
        cpu_s = self._cpu_s() - cpu_s
        self.commit_bytes += map(commit_bytes, recent)
        per_worker_s = (now - begin) / num_unrolls * len(self._specs)
        while any(True for _ in self._launcher.gather(0.1 + 3 * per_worker_s, lambda: False)):
            pass  # without credits they fill the slots that they have, and wait
        return Rate(env_steps / (now - begin), env_steps / cpu_s)

    def _cpu_s(self) -> float:
        return sum(map(cpu_seconds, self._processes))

    def __enter__(self) -> Ours:
        """The object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers."""
        self._launcher.close()


def commit_bytes(unroll: Unroll) -> int:
    """Length of the commit message of ``unroll`` on the pipe."""
    values: dict[str, Any] = {"num_episodes": len(unroll.episodes), "num_lives": len(unroll.lives)}
    values |= {name: getattr(unroll, name) for name in Commit._fields[1:3] + Commit._fields[5:7]}
    return len(ForkingPickler.dumps(("commit", Commit(slot=0, cores=0.7, **values))))


def search(recipe: Recipe, counts: Sequence[int], args: argparse.Namespace) -> dict[int, float]:
    """Env steps per second of the limit with each number of environments."""
    found = {}
    for count in counts:
        with Limit(replace(recipe, num_envs=count)) as limit:
            found[count] = round(limit.measure(args.search_seconds, args.warmup).per_s, 1)
        say(f"limit with {count} envs per process: {found[count]:,.0f} env steps/s")
    return found


def first_env_step_s(settings: Sequence[str]) -> float:
    """Seconds from the creation of the command's process to the first env step of any worker."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir, log = Path(directory, "run"), Path(directory, "log")
        short = ("total_steps=1", "evaluation.episodes=1", "evaluation.step_limit=1")
        more = (*short, f"run_dir={run_dir}", "trainer.console=off")
        command = [sys.executable, "-m", "actorlearner.run", *settings, *more]
        with log.open("wb") as output, started(command, output) as process:
            code = process.wait()
        if code:
            raise RuntimeError(f"{' '.join(command)} failed:\n{log.read_text()}")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        told = [json.loads(line).get("time/first_env_step_s") for line in lines]
        return next(float(seconds) for seconds in told if seconds is not None)


def measure_in_turns(ours: Ours, limit: Limit, args: argparse.Namespace) -> list[dict[str, float]]:
    """What each pair of measurements gave; who goes first alternates."""
    measured = []
    for index in range(args.pairs):
        others, rates = OtherWork(), {}
        sides: list[Any] = [ours, limit] if index % 2 == 0 else [limit, ours]
        for side in sides:
            rates[side] = side.measure(args.seconds, args.warmup)
        pair = {
            "env_steps_per_s": rates[ours].per_s,
            "limit_per_s": rates[limit].per_s,
            "ratio": rates[ours].per_s / rates[limit].per_s,
            "ratio_per_core_s": rates[ours].per_core_s / rates[limit].per_core_s,
            "other_cores": others.cores(),
        }
        measured.append({name: round(value, 4) for name, value in pair.items()})
    return measured


def is_given(key: str, settings: Sequence[str]) -> bool:
    """Whether ``settings`` say what ``key`` is."""
    return any(text.partition("=")[0] == key for text in settings)


def main() -> None:
    """Measure what the command line says, and tell."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--warmup", type=float, default=1.0, help="seconds before each")
    parser.add_argument("--pairs", type=int, default=5, help="of ours and the limit")
    parser.add_argument(
        "--limit-envs", type=positive_numbers, default=[4, 8, 16, 32, 64], metavar="N,N,...",
        help="environments per process that the limit tries; its best counts, and ours takes it "
        "too unless envs_per_worker is given",
    )  # fmt: skip
    parser.add_argument("--search-seconds", type=float, default=2.0, help="of each try")
    parser.add_argument(
        "--snapshots-per-s", type=float, default=5.0, help="that ours publishes and adopts"
    )
    parser.add_argument(
        "--skip-start-up", action="store_true", help="don't time the first env step of the command"
    )
    args = parser.parse_intermixed_args()
    machine, settings = facts(), list(args.settings)
    if hasattr(os, "sched_setaffinity") and not is_given("launch.pin_cores", settings):
        settings.append("launch.pin_cores=true")  # as the limit
    with ExitStack() as stack:
        ours = stack.enter_context(Ours(settings, args.snapshots_per_s))
        found = search(ours.recipe, args.limit_envs, args)
        best = max(found, key=lambda count: found[count])
        if not is_given("envs_per_worker", settings):
            settings.append(f"envs_per_worker={best}")
            ours = stack.enter_context(Ours(settings, args.snapshots_per_s))
        start_up_s = None if args.skip_start_up else first_env_step_s(settings)
        ours.start()
        limit = stack.enter_context(Limit(replace(ours.recipe, num_envs=best)))
        pairs = measure_in_turns(ours, limit, args)

    options, env = ours.options, ours.recipe.env_spec.name
    median = {name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]}
    mean_bytes = statistics.mean(ours.commit_bytes)
    say(
        f"\n{env}: {options.workers} workers of {options.envs_per_worker} envs, "
        f"limit {ours.recipe.processes} x {limit.env_class} of {best}"
    )
    head = ["pair", "ours/s", "limit/s", "ratio", "ratio per core-second", "cores of others"]
    rows = [[str(number), *pair.values()] for number, pair in enumerate(pairs, 1)]
    table(head, [*rows, ["median", *median.values()]])
    say(f"bytes through the pipe per unroll: {mean_bytes:,.0f}, at most {max(ours.commit_bytes):,}")
    if start_up_s is not None:
        say(f"first env step of python -m actorlearner.run: after {start_up_s:.2f} s")
    result = {
        "benchmark": "env_steps",
        "env": env,
        "env_class": limit.env_class,
        **median,
        "ratios": [pair["ratio"] for pair in pairs],
        "pairs": pairs,
        "workers": options.workers,
        "envs_per_worker": options.envs_per_worker,
        "unroll_length": options.unroll_length,
        "backend": "onnx" if ours.recipe.acting.graph else "eager",
        "precision": ours.recipe.acting.precision,
        "snapshots_per_s": args.snapshots_per_s,
        "limit_envs_per_process": best,
        "limit_search": found,
        "scalars": ours.recipe.snapshot.scalars,
        "bytes_per_unroll": round(mean_bytes, 1),
        "bytes_per_unroll_max": max(ours.commit_bytes),
        "first_env_step_s": start_up_s,
        "seconds": args.seconds,
        "settings": settings,
        **machine,
    }
    report(result, args.out)


if __name__ == "__main__":
    run(main)
