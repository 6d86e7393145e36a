"""Speed and size of the replay buffer: rows added, batches drawn, batches of priorities taken in.

    python benchmarks/replay.py --capacity 100000

For rows of a small vector (CartPole's) and of Atari (84 x 84 bytes, in stacks of 4), drawn
uniformly and by priority. The buffer is full before anything is measured.
"""

from __future__ import annotations

import argparse
import tracemalloc
from itertools import count, cycle
from typing import Any

import numpy as np
from common import argument_parser, facts, rate, report, run, say, synthetic_unrolls, table

from actorlearner.contracts import ArraySpec, EnvSpec, SampleSpec, StreamLayout
from actorlearner.replay import ReplayBuffer

_VECTOR = {"observation": ArraySpec((4,), "float32")}
_ATARI = {"observation": ArraySpec((84, 84), "uint8", stack=4)}
ROWS = {
    "vector": EnvSpec("vector", _VECTOR, ArraySpec((), "int64", (2,))),
    "atari": EnvSpec("atari", _ATARI, ArraySpec((), "int64", (4,))),
}


def measure(kind: str, prioritized: bool, args: argparse.Namespace) -> dict[str, Any]:
    """What a buffer of one kind of row does per second, and takes."""
    env_spec, layout = ROWS[kind], StreamLayout(args.envs, args.unroll_length)
    buffer = ReplayBuffer(capacity=args.capacity, prioritized=prioritized)
    tracemalloc.start()
    buffer.build(env_spec, SampleSpec(args.batch_size, args.n_step), layout, planned_updates=10_000)
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    unrolls = cycle(synthetic_unrolls(env_spec, layout, 8))
    sequence = count()

    def add() -> None:
        unroll = next(unrolls)
        unroll.sequence = next(sequence)  # they follow each other, whatever is repeated
        buffer.add(unroll)

    rows_per_add = args.envs * args.unroll_length
    for _ in range(args.capacity // rows_per_add + 1):
        add()
    generator = np.random.default_rng(0)
    batches = [buffer.sample() for _ in range(64)]
    fed = cycle((b.keys, {"priority": generator.random(args.batch_size)}) for b in batches)
    measured: dict[str, Any] = {"row": kind, "prioritized": prioritized}
    measured["samples_per_s"] = rate(buffer.sample, args.seconds)
    measured["feedbacks_per_s"] = (
        rate(lambda: buffer.feed_back(*next(fed)), args.seconds) if prioritized else None
    )
    measured["adds_per_s"] = rate(add, args.seconds) * rows_per_add
    measured["bytes_per_row"] = num_bytes / buffer.metrics()["capacity"]
    return {k: round(v, 1) if isinstance(v, float) else v for k, v in measured.items()}


def main() -> None:
    """Measure every kind of row, and tell."""
    parser = argument_parser(__doc__, with_settings=False)
    parser.add_argument("--capacity", type=int, default=50_000, help="rows")
    parser.add_argument("--batch-size", type=int, default=32, help="transitions")
    parser.add_argument("--n-step", type=int, default=1, help="rewards summed")
    parser.add_argument("--envs", type=int, default=8, help="columns of the unrolls added")
    parser.add_argument("--unroll-length", type=int, default=16, help="rows of them")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    args = parser.parse_args()
    machine = facts()
    kinds = [(kind, prioritized) for kind in ROWS for prioritized in (False, True)]
    results = [measure(*kind, args) for kind in kinds]
    head = ["row", "drawn", "rows added/s", "batches/s", "priority batches/s", "bytes/row"]
    rows = [
        [
            r["row"],
            "by priority" if r["prioritized"] else "uniformly",
            r["adds_per_s"],
            r["samples_per_s"],
            r["feedbacks_per_s"],
            r["bytes_per_row"],
        ]
        for r in results
    ]
    say(f"capacity {args.capacity:,} rows, batches of {args.batch_size}, n_step {args.n_step}")
    table(head, rows)
    options = {k: v for k, v in vars(args).items() if k != "out"}
    report({"benchmark": "replay", "results": results, **options, **machine}, args.out)


if __name__ == "__main__":
    run(main)
