"""A tree of sums: draws an index with a probability proportional to its priority."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from actorlearner.compiled import compiled

_FAN_OUT_BITS = 3
_FAN_OUT = 1 << _FAN_OUT_BITS
"""Children of a node: a cache line. A tree of a million leaves has 7 levels below its root."""


class SumTree:
    """Priorities of ``capacity`` leaves under sums of sums.

    Invariants: every parent is the sum of its children, computed from them and never by adding a
    difference, so that rounding errors don't pile up; a leaf without priority is never found.

    Schaul et al. (2016), arXiv:1511.05952, appendix B.2.1, with 8 children to a node.

    Attributes:
        capacity: number of leaves.
        leaves: their priorities, float64 ``[capacity]``, only to be read; `set` changes them.
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
        memory = np.zeros(ends[-1] + _FAN_OUT)
        begin = -memory.ctypes.data % (8 * _FAN_OUT) // 8  # where a cache line does
        self._nodes = memory[begin : begin + ends[-1]]
        parts = np.split(self._nodes, self._begins[1:])
        self._levels = [part.reshape(s) for part, s in zip(parts, shapes, strict=True)]
        self.leaves = self._nodes[:capacity]
        self.leaves.flags.writeable = False

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._nodes[-1])

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

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """One leaf of each of B equal parts of the total, each in proportion to its priority.

        Args:
            uniform: float64 ``[B]`` in [0, 1): where in its part each one is looked for. What is
                found is the leaf at which the running sum of priorities first exceeds that; beyond
                the total, the last leaf with a priority.

        Returns:
            int64 ``[B]``, leaves whose priority is above 0.

        Raises:
            ValueError: every priority is 0, or a number in ``uniform`` is negative or NaN.
        """
        if self.total <= 0:
            raise ValueError("there is no priority above 0 to find")
        drawn = np.empty(len(uniform), np.int64)
        if not _draw(self._nodes, self._begins, np.ascontiguousarray(uniform, np.float64), drawn):
            raise ValueError(f"uniform={uniform}: must not be negative or NaN")
        return drawn

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
    for level in range(1, len(begins)):
        newest = -1
        for i in range(len(indices)):
            parent = indices[i] >> level * _FAN_OUT_BITS  # a division takes longer than all else
            if parent == newest:  # of new rows, which come in thousands, most have the same
                continue
            newest = parent
            first = begins[level - 1] + parent * _FAN_OUT
            n = nodes[first : first + _FAN_OUT]
            # In the order of NumPy's `sum`.
            total = ((n[0] + n[1]) + (n[2] + n[3])) + ((n[4] + n[5]) + (n[6] + n[7]))
            nodes[begins[level] + parent] = total
    return -1


@compiled
def _draw(
    nodes: NDArray[np.float64],
    begins: NDArray[np.int64],
    uniform: NDArray[np.float64],
    drawn: NDArray[np.int64],
) -> bool:
    """See `SumTree.draw`; whether all of ``uniform`` could be used."""
    left, part = np.empty(len(uniform)), nodes[-1] / len(uniform)
    for i in range(len(uniform)):
        if not uniform[i] >= 0:
            return False
        left[i], drawn[i] = (i + uniform[i]) * part, 0
    # Level by level, so that the memory of several nodes is waited for at once.
    for level in range(len(begins) - 2, -1, -1):
        for i in range(len(drawn)):
            first = begins[level] + drawn[i] * _FAN_OUT
            child = _FAN_OUT
            while child == _FAN_OUT:
                child, before, after = 0, 0.0, 0.0
                for c in range(_FAN_OUT):  # to the end: a guess when to stop is often wrong
                    after += nodes[first + c]
                    if after <= left[i]:
                        child, before = c + 1, after
                if child == _FAN_OUT:
                    # A running sum and a parent may round differently. Held below the sum, what is
                    # left always meets a child at which the running sum grows: one with priority.
                    left[i] = np.nextafter(after, 0.0)
            left[i] -= before
            drawn[i] = drawn[i] * _FAN_OUT + child
    return True
