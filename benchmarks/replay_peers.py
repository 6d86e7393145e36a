"""Another library's prioritised replay at the work of `replay.py`, which starts this.

    PEERS/cpprb/bin/python benchmarks/replay_peers.py cpprb --capacity 50000

It needs nothing of this project. For each line ``batch 32`` or ``add 32`` of the standard input it
does that for a while and answers with the CPU seconds that one took. A batch is drawn by priority,
with its weights, and gets new priorities; the frames of a row are 84 x 84 bytes in stacks of 4,
each stored once where the library can do that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np

_NUM_ROWS = 256
_generator = np.random.default_rng(0)


def _stacks() -> Any:
    """The observations of successive rows, one more than there are, ``[rows, 4, 84, 84]``."""
    frames = _generator.integers(0, 255, (_NUM_ROWS + 4, 84, 84), np.uint8)
    return np.stack([frames[i : i + 4] for i in range(_NUM_ROWS + 1)])


class Cpprb:
    """Its frames are compressed: ``stack_compress`` and ``next_of``."""

    def __init__(self, capacity: int) -> None:
        """Allocate."""
        import cpprb  # type: ignore[import-not-found]

        self._stacks = np.moveaxis(_stacks(), 1, -1)  # a stack is the last axis for it
        fields = {"obs": {"shape": (84, 84, 4), "dtype": np.uint8}, "act": {"dtype": np.int32}}
        self._buffer = cpprb.PrioritizedReplayBuffer(
            capacity, {**fields, "rew": {}, "done": {}}, alpha=0.6, next_of="obs",
            stack_compress="obs",
        )  # fmt: skip

    def add(self, begin: int, count: int) -> None:
        """Successive rows of one stream."""
        zeros = np.zeros(count, np.float32)
        self._buffer.add(
            obs=self._stacks[begin : begin + count],
            next_obs=self._stacks[begin + 1 : begin + count + 1],
            act=np.ones(count, np.int32), rew=zeros, done=zeros,
        )  # fmt: skip

    def batch(self, size: int) -> None:
        """Draw one, and feed back."""
        drawn = self._buffer.sample(size, 0.4)
        self._buffer.update_priorities(drawn["indexes"], _generator.random(size) + 1e-6)


class Tianshou:
    """Its buffer for many streams, which makes stacks of single frames when it samples."""

    def __init__(self, capacity: int) -> None:
        """Allocate."""
        from tianshou.data import (  # type: ignore[import-not-found]
            Batch,
            PrioritizedVectorReplayBuffer,
        )

        self._stacks, self._batch = _stacks(), Batch
        self._buffer = PrioritizedVectorReplayBuffer(
            capacity, 32, alpha=0.6, beta=0.4, stack_num=4, ignore_obs_next=True,
            save_only_last_obs=True,
        )  # fmt: skip

    def add(self, begin: int, count: int) -> None:
        """One row of each stream."""
        no = np.zeros(count, np.bool_)
        row = self._batch(
            obs=self._stacks[begin : begin + count],
            obs_next=self._stacks[begin + 1 : begin + count + 1],
            act=np.ones(count, np.int64), rew=np.zeros(count), terminated=no, truncated=no,
            info=self._batch(),
        )  # fmt: skip
        self._buffer.add(row, buffer_ids=np.arange(count))

    def batch(self, size: int) -> None:
        """Draw one, and feed back."""
        _, indices = self._buffer.sample(size)
        self._buffer.update_weight(indices, _generator.random(size) + 1e-6)


PEERS: dict[str, Callable[[int], Any]] = {"cpprb": Cpprb, "tianshou": Tianshou}


def main() -> None:
    """Answer until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--capacity", type=int, required=True, help="rows")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each answer")
    args = parser.parse_args()
    peer = PEERS[args.peer](args.capacity)
    begins = cycle(range(0, _NUM_ROWS - 32, 32))
    for _ in range(args.capacity // 32 + 1):
        peer.add(next(begins), 32)
    for line in sys.stdin:
        job, size = line.split()
        count, begin, begin_cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - begin < args.seconds:
            if job == "add":
                peer.add(next(begins), int(size))
            else:
                peer.batch(int(size))
            count += 1
        sys.stdout.write(f"{(time.process_time() - begin_cpu) / count}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
