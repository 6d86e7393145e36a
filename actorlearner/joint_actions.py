"""Actions of several parts as one choice among all their combinations.

Shape suffixes: B batch.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actorlearner.contracts import Array, ArraySpec


class JointActions:
    """Numbers the combinations of a Discrete, MultiDiscrete or MultiBinary action.

    The last part counts fastest (a mixed radix number, most significant digit first): of
    ``MultiDiscrete([2, 3])`` number 4 is ``[1, 1]``. A Discrete action is its own number.

    Attributes:
        count: of combinations, the product of the categories.
    """

    def __init__(self, action: ArraySpec) -> None:
        """Number the actions of a spec that has categories."""
        self._spec = action
        radices = action.categories
        self.count = math.prod(radices)
        self._places = [math.prod(radices[i + 1 :]) for i in range(len(radices))]

    def number(self, action: Tensor) -> Tensor:
        """Int64 ``[B]`` of actions ``[B, *shape]``."""
        if self._spec.is_discrete:
            return action
        # Place by place, as a tensor of the places would have to be sent to the device each time.
        parts = action.flatten(1).long().unbind(1)
        number_B = torch.zeros_like(parts[0])
        for part_B, place in zip(parts, self._places, strict=True):
            number_B += place * part_B
        return number_B

    def action(self, number_B: NDArray[np.int64]) -> Array:
        """Actions ``[B, *shape]`` of int64 ``[B]``, in the dtype of the spec."""
        spec = self._spec
        if spec.is_discrete:
            return number_B
        parts = np.stack(np.unravel_index(number_B, spec.categories), 1)
        return parts.reshape(len(number_B), *spec.shape).astype(spec.dtype)
