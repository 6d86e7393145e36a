"""Signs of life, so that a worker that hangs can be told from one that is slow."""

from __future__ import annotations

from actorlearner.contracts import Array, ArraySpec


class Pulse:
    """Signs of life of a worker: counts that another process may watch.

    Attributes:
        counts: int64 ``[2]``: the rows of unrolls that were stepped, and whatever else was done by
            an environment.
        phase: what the worker is doing, in words, for error messages; known to its process only.
    """

    SPEC = ArraySpec((2,), "int64")

    def __init__(self, counts: Array | None = None) -> None:
        """Count in ``counts``, which may be shared memory; None: in memory of its own."""
        self.counts = self.SPEC.zeros() if counts is None else counts
        self.phase = "start-up"
        self._view = self.counts.data  # several times faster than the array

    def row(self) -> None:
        """A row was stepped."""
        self._view[0] += 1

    def beat(self) -> None:
        """Something else was done."""
        self._view[1] += 1
