"""A tree of sums: draws an index with a probability proportional to its priority."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_FAN_OUT = 32
"""Children of a node. A wide node is one vectorised sum, so few levels make few NumPy calls."""


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
        # Level 0 holds the leaves; entry i of a level is the sum of row i of the level below.
        self._levels: list[NDArray[np.float64]] = []
        num_rows = capacity
        while num_rows > 1 or not self._levels:
            num_rows = -(-num_rows // _FAN_OUT)
            self._levels.append(np.zeros((num_rows, _FAN_OUT)))

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._levels[-1].sum())

    def get(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Priorities, float64 ``[B]``, of leaves ``indices`` (int64 ``[B]``)."""
        return self._levels[0].reshape(-1)[indices]

    def set(self, indices: NDArray[np.int64], priorities: NDArray[np.floating]) -> None:
        """Give leaves ``indices`` (int64 ``[B]``) new ``priorities`` (float ``[B]``).

        Where an index occurs twice, its last priority wins.

        Raises:
            IndexError: an index is out of range; nothing was changed.
            ValueError: a priority is negative, NaN or infinite; nothing was changed.
        """
        refused = ~((priorities >= 0) & (priorities < np.inf))  # NaN fails every comparison
        if refused.any():
            value = priorities[refused][0]
            raise ValueError(f"priority={value}: must be finite and not negative")
        if indices.size == 0:
            return
        if indices.min() < 0 or indices.max() >= self.capacity:
            raise IndexError(f"indices must be in [0, {self.capacity}), got {indices}")
        if (indices[1:] > indices[:-1]).all():  # as of new rows, which come in thousands
            nodes, leaves = indices, priorities
        else:  # NumPy doesn't promise which of several writes to one place comes last
            nodes, from_end = np.unique(indices[::-1], return_index=True)
            leaves = priorities[::-1][from_end]
        self._levels[0].reshape(-1)[nodes] = leaves
        for below, level in pairwise(self._levels):
            parents = nodes // _FAN_OUT  # sorted, as `nodes` are
            nodes = parents[np.flatnonzero(np.diff(parents, prepend=-1))]
            level.reshape(-1)[nodes] = below[nodes].sum(axis=1)

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
        if not (prefix >= 0).all():
            raise ValueError(f"prefix={prefix}: must not be negative or NaN")
        columns = np.arange(len(prefix))
        node = np.zeros(len(prefix), np.int64)
        before = np.zeros((len(prefix), _FAN_OUT + 1))
        for level in reversed(self._levels):
            np.cumsum(level[node], axis=1, out=before[:, 1:])
            # A running sum and a parent may round differently. Held below the sum, the prefix
            # always meets a child at which the running sum grows: one with priority.
            prefix = np.minimum(prefix, np.nextafter(before[:, -1], 0))
            child = (before[:, 1:] > prefix[:, None]).argmax(axis=1)
            prefix = prefix - before[columns, child]
            node = node * _FAN_OUT + child
        return node

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
