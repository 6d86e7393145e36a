"""Returns: pure, time-major NumPy functions of rewards and flags.

Legend of the suffixes: N rows of a window, B windows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def n_step(
    reward_NB: NDArray[np.floating],
    terminated_NB: NDArray[np.bool_],
    inside_NB: NDArray[np.bool_],
    gamma: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Returns of windows of up to N rows, and the discounts of the values that complete them.

    A row *counts* if it and every row before it lie inside, and no row before it terminated. The
    target is ``return + discount * value(observation after the last row that counts)``, the n-step
    return of Sutton & Barto (2018), eq. 7.1; near the end of an episode it shortens to the rows
    that are left, each with its own power of gamma.

    Args:
        reward_NB: float ``[N, B]``; what stands beyond the rows that count is never looked at.
        terminated_NB: bool ``[N, B]``, whether the value after the row is zero by definition.
        inside_NB: bool ``[N, B]``, False where the window has left its episode or the stored data.
        gamma: discount per row.

    Returns:
        The discounted sums of rewards (float32 ``[B]``); ``gamma ** steps``, or 0 where a row that
        counts terminated (float32 ``[B]``); and steps, how many rows count (int64 ``[B]``, 0 only
        where row 0 is outside).
    """
    counts_NB = inside_NB.copy()
    counts_NB[1:] &= ~terminated_NB[:-1]
    np.logical_and.accumulate(counts_NB, axis=0, out=counts_NB)
    steps_B = np.count_nonzero(counts_NB, axis=0)
    powers_N = gamma ** np.arange(len(reward_NB), dtype=np.float64)
    return_B = powers_N @ np.where(counts_NB, reward_NB, 0.0)
    terminates_B = (counts_NB & terminated_NB).any(axis=0)
    discount_B = np.where(terminates_B, 0.0, gamma**steps_B)
    return return_B.astype(np.float32), discount_B.astype(np.float32), steps_B
