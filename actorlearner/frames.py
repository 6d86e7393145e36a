"""Frame stacks for acting; replay rebuilds the same stacks from single frames (`ring`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from actorlearner.contracts import Array, ArraySpec, Observation


class FrameStack:
    """The newest frames of each of ``B`` episodes, the newest last.

    Before an episode is as long as its stack, its first frame fills the places that are left (as
    Gymnasium's ``FrameStackObservation`` does with ``padding_type="reset"``).
    """

    def __init__(self, observation: Mapping[str, ArraySpec], num_columns: int) -> None:
        """No episode has begun.

        Args:
            observation: one spec per key; those without a stack pass through.
            num_columns: ``B``.
        """
        self._frames: dict[str, Array] = {
            key: np.zeros((num_columns, *spec.stacked_shape), spec.dtype)
            for key, spec in observation.items()
            if spec.stack > 1
        }

    def push(
        self,
        observation: Observation,
        first: NDArray[np.bool_],
        still: NDArray[np.bool_] | None = None,
    ) -> None:
        """Take in the next frames.

        Args:
            observation: ``[B, ...]`` without stacks.
            first: bool ``[B]``, where an episode begins.
            still: bool ``[B]``, columns without a new frame; None for no such.
        """
        for key, frames in self._frames.items():
            newest = observation[key]
            if still is None:
                frames[:, :-1] = frames[:, 1:]
                frames[:, -1] = newest
            else:
                moving = np.flatnonzero(~still)
                frames[moving, :-1] = frames[moving, 1:]
                frames[moving, -1] = newest[moving]
            if first.any():
                frames[first] = newest[first][:, None]

    def get_state(self, column: int) -> dict[str, Array]:
        """The frames of ``column``, copied."""
        return {key: frames[column].copy() for key, frames in self._frames.items()}

    def set_state(self, column: int, state: Mapping[str, Array]) -> None:
        """Make ``state`` the frames of ``column``."""
        for key, frames in self._frames.items():
            frames[column] = state[key]

    def over(self, observation: Observation) -> Observation:
        """``observation`` (``[B, ...]``) with the stacks instead of the frames pushed last.

        They are views that the next `push` changes.
        """
        return {**observation, **self._frames} if self._frames else observation
