"""Updates per second of an agent, as the Trainer makes them, and where their time goes.

    python benchmarks/learner.py experiment=cartpole_dqn device=cpu --threads 1
    python benchmarks/learner.py experiment=cartpole_dreamer agent.imagine_last=null --threads 1

An update is one batch drawn, moved to the device, through every training step and its optimiser,
and its feedback returned. The experience is noise in the environment's shapes; no worker runs.

The *bare loop* is the arithmetic of it and nothing else: training steps, gradients, clipping and
optimisers, on one batch that stays, without replay, feedback, metrics and the test for what is not
finite. Both are timed in turn, and the overhead is the median of the ratios of neighbours, by the
clock and by the time that the process was given, which other work disturbs less.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import wraps
from statistics import median
from typing import Any, NamedTuple

import torch
from common import (
    Parts,
    argument_parser,
    facts,
    rate,
    report,
    run,
    say,
    synthetic_unrolls,
    table,
)

from actorlearner.contracts import Batch, StreamLayout
from actorlearner.worker import probe


def build(parts: Parts, rows: int) -> None:
    """Bring Trainer, store and agent to where the first update would be made."""
    trainer, store, agent = parts.trainer, parts.store, parts.agent
    env_spec = probe(parts.factory)
    trainer._build(env_spec, store, agent)
    agent.train(True)
    options = trainer.settings
    layout = StreamLayout(options.num_streams, options.unroll_length)
    count = 2 + rows // (options.num_streams * options.unroll_length)
    noted = agent.policy_factory(store.extras).extras_spec
    for unroll in synthetic_unrolls(env_spec, layout, count, noted):
        store.add(unroll)


def bare_loop(parts: Parts) -> Callable[[], None]:
    """An update without all that the Trainer does around the arithmetic."""
    trainer, agent = parts.trainer, parts.agent
    batch = parts.store.sample().to(trainer.device)
    clip = trainer.settings.gradient_clip_val or float("inf")
    steps, optimizers = trainer._training_steps, trainer._optimizers
    parameters = {
        name: [p for group in optimizer.param_groups for p in group["params"]]
        for name, optimizer in optimizers.items()
    }

    updates = itertools.count(1)

    def update() -> None:
        carry: Any = batch
        with trainer._threads.update():
            for name, step in steps.items():
                output = step(carry)
                optimizers[name].zero_grad(set_to_none=True)
                output.loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters[name], clip)
                optimizers[name].step()
                carry = carry if output.carry is None else output.carry
        made = next(updates)
        for name in steps:
            agent.after_step(name, made)

    return update


class Overhead(NamedTuple):
    """What one job takes beyond another, as a share of the other.

    Attributes:
        wall: by the clock.
        cpu: by the time that this process was given.
        wall_s: seconds of the other, median.
    """

    wall: float
    cpu: float
    wall_s: float


def overhead(
    job: Callable[[], Any],
    bare: Callable[[], Any],
    pairs: int,
    seconds: float,
    wait: Callable[[], Any],
) -> Overhead:
    """Medians over ``pairs`` of neighbours, each of which runs for ``seconds`` at least."""

    def timed(function: Callable[[], Any]) -> tuple[float, float]:
        wait()
        count, began, given = 0, time.perf_counter(), time.process_time()
        while count == 0 or time.perf_counter() - began < seconds:
            function()
            count += 1
        wait()
        return (time.perf_counter() - began) / count, (time.process_time() - given) / count

    ratios: list[tuple[float, float]] = []
    walls: list[float] = []
    for pair in range(pairs):
        order = (job, bare) if pair % 2 else (bare, job)
        times = {function: timed(function) for function in order}
        ratios.append((times[job][0] / times[bare][0], times[job][1] / times[bare][1]))
        walls.append(times[bare][0])
    wall, cpu = (median(column) - 1 for column in zip(*ratios, strict=True))
    return Overhead(wall, cpu, median(walls))


class Clock:
    """Adds up the seconds of functions that it was put into, less those of others inside them.

    Attributes:
        seconds: by name.
    """

    def __init__(self, wait: Callable[[], Any]) -> None:
        """Nothing is watched yet.

        Args:
            wait: for what was left running (a GPU).
        """
        self.seconds: dict[str, float] = {}
        self._wait = wait

    def watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, watched."""

        @wraps(function)
        def watched(*arguments: Any, **named: Any) -> Any:
            self._wait()
            since = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self._wait()
                spent = time.perf_counter() - since
                self.seconds[name] = self.seconds.get(name, 0.0) + spent

        return watched

    def put_into(self, parts: Parts) -> None:
        """Watch the parts of `Trainer._update`."""
        trainer, store, agent = parts.trainer, parts.store, parts.agent
        store.sample = self.watch("sample", store.sample)
        store.feed_back = self.watch("feedback", store.feed_back)
        trainer._optimise = self.watch("optimise", trainer._optimise)  # type: ignore[method-assign]
        agent.after_step = self.watch("after_step", agent.after_step)
        steps = trainer._training_steps
        trainer._training_steps = {k: self.watch(f"{k}_step", step) for k, step in steps.items()}
        Batch.to = self.watch("to_device", Batch.to)  # type: ignore[method-assign]


def main() -> None:
    """Measure what the command line says, and tell."""
    parser = argument_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in updates")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--pairs", type=int, default=7, help="of updates and bare loops in turn")
    parser.add_argument("--rows", type=int, default=5_000, help="in the replay buffer")
    args = parser.parse_intermixed_args()
    machine = facts()
    parts = Parts.of([*args.settings, f"trainer.threads={args.threads}"])
    build(parts, args.rows)
    trainer, device = parts.trainer, parts.trainer.device
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def update() -> None:
        trainer._update(parts.store, parts.agent)

    rate(update, min(1.0, args.seconds), wait)  # warms up caches and allocators
    updates_per_s = rate(update, args.seconds, wait)
    beyond = overhead(update, bare_loop(parts), args.pairs, args.seconds / args.pairs, wait)
    clock = Clock(wait)
    clock.put_into(parts)
    before = trainer.updates
    clock.watch("whole", lambda: rate(update, args.seconds, wait))()
    count = trainer.updates - before
    whole_ms = 1e3 * clock.seconds.pop("whole") / count
    parts_ms = {name: 1e3 * seconds / count for name, seconds in clock.seconds.items()}
    parts_ms["other"] = whole_ms - sum(parts_ms.values())

    batch_size = parts.agent.sample_spec.batch_size
    title = f"{type(parts.agent).__name__} on {parts.factory.name}"
    say(f"{title}: batches of {batch_size} on {device}, {args.threads} threads")
    say(f"{updates_per_s:,.1f} updates/s, {1e3 / updates_per_s:.3f} ms each; with a clock inside:")
    say(
        f"{beyond.wall:+.1%} over a bare loop of the same arithmetic by the clock, "
        f"{beyond.cpu:+.1%} by CPU time (medians of {args.pairs} ratios)"
    )
    table(["part", "ms", "share"], [[k, v, f"{v / whole_ms:.0%}"] for k, v in parts_ms.items()])
    parameters = sum(p.numel() for p in parts.agent.parameters() if p.requires_grad)
    result = {
        "benchmark": "learner",
        "agent": type(parts.agent).__name__,
        "env": parts.factory.name,
        "updates_per_s": round(updates_per_s, 2),
        "samples_per_s": round(updates_per_s * batch_size, 1),
        "overhead": round(beyond.wall, 4),
        "overhead_cpu": round(beyond.cpu, 4),
        "bare_ms": round(1e3 * beyond.wall_s, 4),
        "pairs": args.pairs,
        "parts_ms": {name: round(ms, 4) for name, ms in parts_ms.items()},
        "batch_size": batch_size,
        "parameters": parameters,
        "device": str(device),
        "threads": args.threads,
        "settings": args.settings,
        **machine,
    }
    report(result, args.out)


if __name__ == "__main__":
    run(main)
