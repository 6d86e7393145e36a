"""A tree of sums: draws an index with a probability proportional to its priority."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from actorlearner.compiled import compiled

_FAN_OUT_BITS = 5
_FAN_OUT = 1 << _FAN_OUT_BITS
"""Children of a node: 4 cache lines. A tree of a million leaves has 4 levels below its root."""


class SumTree:
    """Priorities of ``capacity`` leaves under sums of sums.

    Invariants: every parent is the sum of its children, computed from them and never by adding a
    difference, so that rounding errors don't pile up; a leaf without priority is never found.

    Schaul et al. (2016), arXiv:1511.05952, appendix B.2.1, with 32 children to a node.
    """

    def __init__(self, capacity: int) -> None:
        """All priorities are 0.

        Args:
            capacity: number of leaves, any number from 1 up.

        Raises:
            ValueError: ``capacity`` is below 1.
        """
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: must be at least 1")
        self.capacity = capacity
        # Level 0 holds the leaves; entry i of a level is the sum of row i of the level below. The
        # last level is the root alone.
        shapes = [(-(-capacity // _FAN_OUT), _FAN_OUT)]
        while shapes[-1][0] > 1:
            shapes.append((-(-shapes[-1][0] // _FAN_OUT), _FAN_OUT))
        shapes.append((1, 1))
        ends = np.cumsum([rows * columns for rows, columns in shapes])
        self._begins = np.append(0, ends[:-1])
        self._nodes = np.zeros(ends[-1])
        parts = np.split(self._nodes, self._begins[1:])
        self._levels = [part.reshape(s) for part, s in zip(parts, shapes, strict=True)]

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._nodes[-1])

    def get(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Priorities, float64 ``[B]``, of leaves ``indices`` (int64 ``[B]``)."""
        return self._levels[0].reshape(-1)[indices]

    def set(self, indices: NDArray[np.int64], priorities: NDArray[np.floating]) -> None:
        """Give leaves ``indices`` (int64 ``[B]``) new ``priorities`` (float ``[B]``).

        Where an index occurs twice, its last priority wins.

        Raises:
            IndexError: an index is out of range; nothing was changed.
            ValueError: a priority is negative, NaN or infinite, or there isn't one for each index;
                nothing was changed.
        """
        if indices.shape != priorities.shape:
            raise ValueError(f"{priorities.shape} priorities for {indices.shape} indices")
        indices = np.ascontiguousarray(indices)
        values: NDArray[np.float64] = np.ascontiguousarray(priorities, np.float64)
        refused = _set(self._nodes, self._begins, self.capacity, indices, values)
        if refused < 0:
            return
        if 0 <= values[refused] < np.inf:
            raise IndexError(f"indices must be in [0, {self.capacity}), got {indices}")
        raise ValueError(f"priority={values[refused]}: must be finite and not negative")

    def find(self, prefix: NDArray[np.float64]) -> NDArray[np.int64]:
        """Leaves at which the running sum of priorities first exceeds ``prefix``.

        Args:
            prefix: float64 ``[B]``, not negative. Uniform draws below `total` find each leaf in
                proportion to its priority; `total` and above find the last leaf that has any.

        Returns:
            int64 ``[B]``, leaves whose priority is above 0.

        Raises:
            ValueError: every priority is 0, or a prefix is negative or NaN.
        """
        if self.total <= 0:
            raise ValueError("there is no priority above 0 to find")
        prefix = np.ascontiguousarray(prefix, np.float64)
        found = np.empty(len(prefix), np.int64)
        if not _find(self._nodes, self._begins, prefix, found):
            raise ValueError(f"prefix={prefix}: must not be negative or NaN")
        return found

    def check_valid(self) -> None:
        """Check every invariant, slowly (for tests).

        Raises:
            AssertionError: one doesn't hold.
        """
        leaves = self._levels[0].reshape(-1)
        assert np.isfinite(leaves).all()
        assert (leaves >= 0).all()
        assert not leaves[self.capacity :].any()
        for below, level in pairwise(self._levels):
            sums = level.reshape(-1)
            assert np.array_equal(sums[: len(below)], below.sum(axis=1))
            assert not sums[len(below) :].any()


@compiled
def _set(
    nodes: NDArray[np.float64],
    begins: NDArray[np.int64],
    capacity: int,
    indices: NDArray[np.int64],
    priorities: NDArray[np.float64],
) -> int:
    """See `SumTree.set`; gives the place of what it refuses, or -1."""
    for i in range(len(indices)):
        if not (0 <= priorities[i] < np.inf and 0 <= indices[i] < capacity):
            return i
    for i in range(len(indices)):
        nodes[indices[i]] = priorities[i]
    sums = np.empty(8)
    for level in range(1, len(begins)):
        newest = -1
        for i in range(len(indices)):
            parent = indices[i] >> level * _FAN_OUT_BITS  # a division takes longer than all else
            if parent == newest:  # of new rows, which come in thousands, most have the same
                continue
            newest = parent
            first = begins[level - 1] + parent * _FAN_OUT
            # In the order of NumPy's `sum`, which keeps several sums at once.
            for lane in range(8):
                sums[lane] = nodes[first + lane]
            for begin in range(first + 8, first + _FAN_OUT, 8):
                for lane in range(8):
                    sums[lane] += nodes[begin + lane]
            nodes[begins[level] + parent] = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + (
                (sums[4] + sums[5]) + (sums[6] + sums[7])
            )
    return -1


@compiled
def _find(
    nodes: NDArray[np.float64],
    begins: NDArray[np.int64],
    prefix: NDArray[np.float64],
    found: NDArray[np.int64],
) -> bool:
    """See `SumTree.find`; whether every prefix was one."""
    for i in range(len(prefix)):
        if not prefix[i] >= 0:
            return False
    left = prefix.copy()
    found[:] = 0
    # Level by level, so that the memory of several nodes is waited for at once.
    for level in range(len(begins) - 2, -1, -1):
        for i in range(len(prefix)):
            first = begins[level] + found[i] * _FAN_OUT
            child, before, after = -1, 0.0, 0.0
            while child < 0:
                for c in range(_FAN_OUT):
                    before, after = after, after + nodes[first + c]
                    if after > left[i]:
                        child = c
                        break
                else:
                    # A running sum and a parent may round differently. Held below the sum, the
                    # prefix always meets a child at which the running sum grows: one with priority.
                    left[i], before, after = np.nextafter(after, 0.0), 0.0, 0.0
            left[i] -= before
            found[i] = found[i] * _FAN_OUT + child
    return True
