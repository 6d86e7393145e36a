"""Updates per second of an agent, as the Trainer makes them, and where their time goes.

    python benchmarks/learner.py experiment=cartpole_dqn device=cpu --threads 1

An update is one batch drawn, moved to the device, through every training step and its optimiser,
and its feedback returned. The experience is noise in the environment's shapes; no worker runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

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
    trainer.set_attributes_to_model(agent)
    agent.to(trainer.device, trainer.dtype)
    trainer._optimizers = agent.configure_optimizers()
    agent.train(True)
    options = trainer.settings
    layout = StreamLayout(options.num_streams, options.unroll_length)
    count = 2 + rows // (options.num_streams * options.unroll_length)
    for unroll in synthetic_unrolls(env_spec, layout, count, store.extras):
        store.add(unroll)


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
        steps = {k: self.watch(f"{k}_step", step) for k, step in agent.training_steps().items()}
        agent.training_steps = lambda: steps
        Batch.to = self.watch("to_device", Batch.to)  # type: ignore[method-assign]


def main() -> None:
    """Measure what the command line says, and tell."""
    parser = argument_parser(__doc__)
    parser.add_argument("--threads", type=int, help="torch threads; default: as torch has it")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rows", type=int, default=5_000, help="in the replay buffer")
    args = parser.parse_intermixed_args()
    machine = facts()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    parts = Parts.of(args.settings)
    build(parts, args.rows)
    trainer, device = parts.trainer, parts.trainer.device
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def update() -> None:
        trainer._update(parts.store, parts.agent)

    rate(update, min(1.0, args.seconds), wait)  # warms up caches and allocators
    updates_per_s = rate(update, args.seconds, wait)
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
    say(f"{title}: batches of {batch_size} on {device}, {torch.get_num_threads()} threads")
    say(f"{updates_per_s:,.1f} updates/s, {1e3 / updates_per_s:.3f} ms each; with a clock inside:")
    table(["part", "ms", "share"], [[k, v, f"{v / whole_ms:.0%}"] for k, v in parts_ms.items()])
    parameters = sum(p.numel() for p in parts.agent.parameters() if p.requires_grad)
    result = {
        "benchmark": "learner",
        "agent": type(parts.agent).__name__,
        "env": parts.factory.name,
        "updates_per_s": round(updates_per_s, 2),
        "samples_per_s": round(updates_per_s * batch_size, 1),
        "parts_ms": {name: round(ms, 4) for name, ms in parts_ms.items()},
        "batch_size": batch_size,
        "parameters": parameters,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "settings": args.settings,
        **machine,
    }
    report(result, args.out)


if __name__ == "__main__":
    run(main)
