"""Returns: pure functions of rewards and flags (NumPy), of distributions of returns (torch).

Legend of the suffixes: N rows of a window, atoms or quantiles; M other quantiles; B windows;
T rows of a sequence.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from actorlearner.compiled import compiled


def n_step(
    start_B: NDArray[np.int64],
    num_steps: int,
    following: NDArray[np.int64],
    reward: NDArray[np.float32],
    terminated: NDArray[np.bool_],
    inside: NDArray[np.bool_],
    gamma: float,
    reward_clip: float | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Returns of windows of up to N rows, and the discounts of the values that complete them.

    A row *counts* if it and every row before it in the window lie inside, and no row before it
    terminated. The target is ``return + discount * value(observation of the row behind)``, the
    n-step return of Sutton & Barto (2018), eq. 7.1; near the end of an episode it shortens to the
    rows that are left, each with its own power of gamma.

    Args:
        start_B: int64 ``[B]``, the first row of each window.
        num_steps: N.
        following: int64 ``[rows]``, the row after each.
        reward: float32 ``[rows]``.
        terminated: bool ``[rows]``, whether the value after the row is zero by definition.
        inside: bool ``[rows]``, False where a window leaves its episode or the stored data.
        gamma: discount per row.
        reward_clip: rewards count as no larger than this, of either sign; None leaves them.

    Returns:
        The discounted sums of rewards (float32 ``[B]``); ``gamma ** steps``, or 0 where a row that
        counts terminated (float32 ``[B]``); and the row behind the last that counts (int64
        ``[B]``, the start itself only where that is outside).
    """
    powers_N = _powers(gamma, num_steps)
    clip = np.float32(np.inf if reward_clip is None else reward_clip)
    return_B = np.empty(len(start_B), np.float32)
    discount_B = np.empty(len(start_B), np.float32)
    end_B = np.empty(len(start_B), np.int64)
    _n_step(
        start_B, following, reward, terminated, inside, powers_N, clip, return_B, discount_B, end_B
    )
    return return_B, discount_B, end_B


@lru_cache
def _powers(gamma: float, highest: int) -> NDArray[np.float64]:
    return gamma ** np.arange(highest + 1, dtype=np.float64)


@compiled
def _n_step(
    start_B: NDArray[np.int64],
    following: NDArray[np.int64],
    reward: NDArray[np.float32],
    terminated: NDArray[np.bool_],
    inside: NDArray[np.bool_],
    powers_N: NDArray[np.float64],
    clip: np.float32,
    return_B: NDArray[np.float32],
    discount_B: NDArray[np.float32],
    end_B: NDArray[np.int64],
) -> None:
    for window in range(len(start_B)):
        row, steps, total, terminates = start_B[window], 0, 0.0, False
        while steps < len(powers_N) - 1 and inside[row] and not terminates:
            total += powers_N[steps] * min(max(reward[row], -clip), clip)
            terminates = terminated[row]
            row = following[row]
            steps += 1
        return_B[window] = total
        discount_B[window] = 0.0 if terminates else powers_N[steps]
        end_B[window] = row


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
