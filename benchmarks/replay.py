"""Speed and size of the replay buffer: rows added, batches drawn and priorities given back.

    python benchmarks/replay.py --capacity 100000

For rows of a small vector (CartPole's) and of Atari (84 x 84 bytes, in stacks of 4), drawn
uniformly and by priority, in batches of several sizes. The buffer is full before anything is
measured. Beside each batch stands the least that it can take: one `take` of the same frames, out of
one array into another that is there already. With ``--peers DIR`` other libraries do the same, each
by the Python of its own virtual environment ``DIR/NAME`` (cpprb, tianshou). All take turns, and
ratios are medians over the turns, of CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    OtherWork,
    argument_parser,
    facts,
    positive_numbers,
    report,
    run,
    say,
    synthetic_unrolls,
    table,
)
from replay_peers import PEERS

from actorlearner.contracts import ArraySpec, EnvSpec, SampleSpec, StreamLayout
from actorlearner.replay import ReplayBuffer

_VECTOR = {"observation": ArraySpec((4,), "float32")}
_ATARI = {"observation": ArraySpec((84, 84), "uint8", stack=4)}
ROWS = {
    "vector": EnvSpec("vector", _VECTOR, ArraySpec((), "int64", (2,))),
    "atari": EnvSpec("atari", _ATARI, ArraySpec((), "int64", (4,))),
}
Job = Callable[[], Any]
Clock = Callable[[], float]
"""Does something for a while and tells the CPU seconds that one of it took."""


def clock(job: Job, seconds: float) -> Clock:
    """A clock of ``job`` in this process."""

    def measure() -> float:
        times, begin, begin_cpu = 0, time.perf_counter(), time.process_time()
        while times == 0 or time.perf_counter() - begin < seconds:
            job()
            times += 1
        return (time.process_time() - begin_cpu) / times

    return measure


def take_turns(clocks: Mapping[str, Clock], pairs: int) -> dict[str, list[float]]:
    """``pairs`` measurements of each, one after the other; who goes first changes."""
    taken: dict[str, list[float]] = {name: [] for name in clocks}
    for turn in range(pairs):
        for name in list(clocks)[:: 1 if turn % 2 == 0 else -1]:
            taken[name].append(clocks[name]())
    return taken


def summary(taken: Mapping[str, list[float]]) -> tuple[float, dict[str, float]]:
    """Of ``ours`` the rate per CPU second; and by name how many times as long others took."""
    ours = taken["ours"]
    ratios = {
        name: round(statistics.median(a / b for a, b in zip(others, ours, strict=True)), 3)
        for name, others in taken.items()
        if name != "ours"
    }
    return round(1 / statistics.median(ours), 1), ratios


@contextmanager
def peer(name: str, args: argparse.Namespace) -> Iterator[Callable[[str, int], Clock]]:
    """The library ``name`` in a process of its own, full; gives clocks of its jobs by their size.

    Raises:
        RuntimeError: it ended.
    """
    script = Path(__file__).with_name("replay_peers.py")
    command = [args.peers / name / "bin" / "python", script, name]
    command += ["--capacity", str(args.capacity), "--seconds", str(args.seconds)]
    with subprocess.Popen(
        [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def ask(job: str, size: int) -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{job} {size}\n")
            process.stdin.flush()
            if answer := process.stdout.readline():
                return float(answer)
            raise RuntimeError(f"{name} ended: its own message stands above")

        yield lambda job, size: lambda: ask(job, size)


def same_frames(keys: Any, num_rows: int, stack: int) -> Any:
    """Where the frames of a batch stand, ``[2, B, stack]``, in an array of as many rows.

    As if every stream lay there in one piece: the buffer's own lie in pieces of an unroll.
    """
    newest = keys % num_rows + np.arange(2)[:, None]
    return (newest[..., None] + np.arange(1 - stack, 1)).clip(0, num_rows - 1)


def measure(
    kind: str, prioritized: bool, batch_size: int, args: argparse.Namespace
) -> dict[str, Any]:
    """What a buffer of one kind of row does per CPU second, and takes."""
    env_spec, layout = ROWS[kind], StreamLayout(args.envs, args.unroll_length)
    buffer = ReplayBuffer(capacity=args.capacity, prioritized=prioritized)
    tracemalloc.start()
    buffer.build(env_spec, SampleSpec(batch_size, args.n_step), layout, planned_updates=10_000)
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
    priorities = cycle(generator.random((64, batch_size)))

    def draw() -> None:
        batch = buffer.sample()
        buffer.feed_back(batch.keys, {"priority": next(priorities)})

    num_rows = int(buffer.metrics()["capacity"])
    spec = env_spec.observation["observation"]
    frames = spec.zeros(num_rows)
    frames.fill(1)  # touches the memory
    indices = [same_frames(buffer.sample().keys, num_rows, spec.stack) for _ in range(64)]
    into = np.empty((*indices[0].shape, *spec.shape), spec.dtype)
    index = cycle(indices)

    def take() -> None:
        frames.take(next(index), axis=0, out=into, mode="clip")

    batches = {"ours": clock(draw, args.seconds), "take": clock(take, args.seconds)}
    adds = {"ours": clock(add, args.seconds)}
    with ExitStack() as running:
        if args.peers is not None and kind == "atari" and prioritized:
            for name in PEERS:
                of_peer = running.enter_context(peer(name, args))
                batches[name] = of_peer("batch", batch_size)
                adds[name] = of_peer("add", 32)
        batches_per_s, batch_ratios = summary(take_turns(batches, args.pairs))
        taken = take_turns(adds, args.pairs)
    per_row = {
        name: [seconds / (rows_per_add if name == "ours" else 32) for seconds in of_one]
        for name, of_one in taken.items()
    }
    rows_per_s, add_ratios = summary(per_row)
    return {
        "row": kind,
        "prioritized": prioritized,
        "batch_size": batch_size,
        "batches_per_s": batches_per_s,
        "batch_ratios": batch_ratios,
        "rows_added_per_s": rows_per_s,
        "add_ratios": add_ratios,
        "bytes_per_row": round(num_bytes / num_rows, 1),
    }


def main() -> None:
    """Measure every kind of row, and tell."""
    parser = argument_parser(__doc__, with_settings=False)
    parser.add_argument("--capacity", type=int, default=50_000, help="rows")
    parser.add_argument(
        "--batch-sizes", type=positive_numbers, default=[32, 256], help="transitions"
    )
    parser.add_argument("--n-step", type=int, default=1, help="rewards summed")
    parser.add_argument("--envs", type=int, default=2, help="columns of the unrolls added")
    parser.add_argument("--unroll-length", type=int, default=16, help="rows of them")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each turn")
    parser.add_argument("--pairs", type=int, default=7, help="turns of each")
    parser.add_argument("--peers", type=Path, help="directory of other libraries' environments")
    args = parser.parse_args()
    for name in PEERS if args.peers is not None else ():
        if not (args.peers / name / "bin" / "python").exists():
            parser.error(f"--peers {args.peers}: has no {name}/bin/python")
    torch.set_num_threads(1)
    machine, other_work = facts(), OtherWork()
    results = [
        measure(kind, prioritized, batch_size, args)
        for kind in ROWS
        for prioritized in (False, True)
        for batch_size in args.batch_sizes
    ]
    names = ["take", *(PEERS if args.peers is not None else ())]
    head = ["row", "drawn", "batch", "batches/s", *(f"{name}: time" for name in names)]
    head += ["rows added/s", *(f"{name}: time" for name in names[1:]), "bytes/row"]
    rows = [
        [
            r["row"],
            "by priority" if r["prioritized"] else "uniformly",
            r["batch_size"],
            r["batches_per_s"],
            *(r["batch_ratios"].get(name) for name in names),
            r["rows_added_per_s"],
            *(r["add_ratios"].get(name) for name in names[1:]),
            r["bytes_per_row"],
        ]
        for r in results
    ]
    say(
        f"capacity {args.capacity:,} rows, n_step {args.n_step}, {args.envs * args.unroll_length} "
        "rows an add; rates per CPU second; times as multiples of ours"
    )
    table(head, rows)
    options = {k: v for k, v in vars(args).items() if k not in ("out", "peers")}
    result = {"benchmark": "replay", "results": results, **options, **machine}
    report({**result, "other_cores": other_work.cores()}, args.out)


if __name__ == "__main__":
    run(main)
