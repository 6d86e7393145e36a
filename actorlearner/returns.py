"""Returns: pure functions of rewards and flags (NumPy), of distributions of returns (torch).

Legend of the suffixes: N rows of a window, atoms or quantiles; M other quantiles; B windows;
T rows of a sequence.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional


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


def categorical_projection(
    probability_BN: Tensor,
    reward_B: Tensor,
    discount_B: Tensor,
    value_range: tuple[float, float],
) -> Tensor:
    """The distribution of ``reward + discount * return``, put back onto the atoms of the return.

    Atoms are evenly spaced over ``value_range``, both ends included. Each one moves to
    ``reward + discount * atom``, is clipped to the range, and leaves its probability to its two
    neighbours there, more to the nearer one (Bellemare et al. 2017, algorithm 1).

    Args:
        probability_BN: float ``[B, N]`` of each atom; rows add up to 1.
        reward_B: float ``[B]``: n-step returns.
        discount_B: float ``[B]``, 0 where the episode terminated.
        value_range: the lowest and the highest atom.

    Returns:
        Probabilities of the same atoms, ``[B, N]``, in the wider of the dtypes.
    """
    low, high = value_range
    last = probability_BN.shape[1] - 1
    dtype = torch.promote_types(probability_BN.dtype, reward_B.dtype)
    atom_N = torch.linspace(low, high, last + 1, dtype=dtype, device=reward_B.device)
    moved_BN = reward_B.unsqueeze(1) + discount_B.unsqueeze(1) * atom_N
    # Clipped as places, not as values: rounding must not leave any beyond the last atom.
    place_BN = ((moved_BN - low) * (last / (high - low))).clamp(0, last)
    # Counted so that the one above is always there: who lies on an atom, gives that one nothing.
    below_BN = place_BN.floor().clamp(0, last - 1)
    above_share_BN = place_BN - below_BN
    below_BN = below_BN.long()
    probability_BN = probability_BN.to(dtype)
    projected_BN = torch.zeros_like(probability_BN)
    projected_BN.scatter_add_(1, below_BN, probability_BN * (1 - above_share_BN))
    projected_BN.scatter_add_(1, below_BN + 1, probability_BN * above_share_BN)
    return projected_BN


def lambda_return(
    reward_TB: Tensor, discount_TB: Tensor, value_TB: Tensor, lambda_TB: Tensor | float
) -> Tensor:
    """Returns of sequences, each a mixture of all n-step returns (Sutton & Barto 2018, eq. 12.3).

    What one arrives with stands in row ``t``; the return in row ``t`` is that of the state left to
    get there: ``G[t] = reward[t] + discount[t] * ((1 - lambda[t]) * value[t] + lambda[t] *
    G[t + 1])``, and behind the last row ``G`` is its value.

    Args:
        reward_TB: float ``[T, B]`` of arriving in each row.
        discount_TB: float ``[T, B]``: of what follows each row, 0 if the episode terminated there.
        value_TB: float ``[T, B]``: what follows is worth that.
        lambda_TB: how much the rows after each count, 0 where they are of another episode.

    Returns:
        ``[T, B]``.
    """
    lambda_TB = torch.as_tensor(lambda_TB, device=reward_TB.device).expand_as(reward_TB)
    kept_TB = discount_TB * lambda_TB
    fixed_TB = reward_TB + (discount_TB - kept_TB) * value_TB
    return_B = value_TB[-1]
    returns = []
    for fixed_B, kept_B in zip(fixed_TB.flip(0), kept_TB.flip(0), strict=True):
        return_B = fixed_B + kept_B * return_B
        returns.append(return_B)
    return torch.stack(returns[::-1])


def quantile_huber_loss(
    quantile_BN: Tensor, level_BN: Tensor, target_BM: Tensor, kappa: float = 1.0
) -> Tensor:
    """How far quantiles are from those of a target distribution, of which samples are given.

    The Huber quantile regression loss of every error ``target - quantile``, averaged over targets
    and summed over quantiles (Dabney et al. 2018b, equations 3 and 4; for ``kappa`` 1 the same as
    Dabney et al. 2018a, equations 9 and 10).

    Args:
        quantile_BN: float ``[B, N]``, with a graph.
        level_BN: float ``[B, N]`` or ``[N]``: the share of the distribution below each quantile.
        target_BM: float ``[B, M]``.
        kappa: errors up to this size count squared, larger ones linearly.

    Returns:
        Float ``[B]``.
    """
    quantile_BNM, target_BNM = torch.broadcast_tensors(
        quantile_BN.unsqueeze(-1), target_BM.unsqueeze(-2)
    )
    huber_BNM = functional.smooth_l1_loss(quantile_BNM, target_BNM, reduction="none", beta=kappa)
    level_BN1 = level_BN.unsqueeze(-1)
    weight_BNM = torch.where(target_BNM < quantile_BNM, 1 - level_BN1, level_BN1)
    return (weight_BNM * huber_BNM).mean(-1).sum(-1)
