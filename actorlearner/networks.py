"""Building blocks of networks; no algorithm has a name here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from actorlearner.contracts import ArraySpec


class FlatEncoder(nn.Module):
    """Observations of any spec as one float vector each.

    Categorical entries become one-hot vectors, uint8 arrays are scaled to ``[0, 1]``, everything
    else is taken as it is; all keys are flattened and concatenated in order.

    Attributes:
        size: length of the vector.
    """

    def __init__(self, observation: Mapping[str, ArraySpec]) -> None:
        """Encode arrays of these specs.

        Args:
            observation: one spec per key.
        """
        super().__init__()
        self._specs = dict(observation)
        self.size = sum(
            sum(spec.categories) or int(torch.Size(spec.shape).numel())
            for spec in observation.values()
        )

    def forward(self, observation: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``[B, size]`` in ``dtype`` from tensors ``[B, ...]``."""
        parts = []
        for key, spec in self._specs.items():
            flat = observation[key].flatten(1) if spec.shape else observation[key].unsqueeze(1)
            if spec.categories:
                columns = zip(flat.long().unbind(1), spec.categories, strict=True)
                parts += [functional.one_hot(column, n).to(dtype) for column, n in columns]
            elif spec.dtype == "uint8":
                parts.append(flat.to(dtype) / 255)
            else:
                parts.append(flat.to(dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class MLP(nn.Sequential):
    """Linear layers, each followed by a ReLU.

    Attributes:
        size: width of the last layer.
    """

    def __init__(self, inputs: int, hidden: Sequence[int]) -> None:
        """Build the layers.

        Args:
            inputs: width of the input.
            hidden: width of each layer.
        """
        sizes = [inputs, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers)
        self.size = sizes[-1]


class DuelingHead(nn.Module):
    """Action values from a state value and mean-free advantages (Wang et al. 2016, equation 9)."""

    def __init__(self, inputs: int, num_actions: int) -> None:
        """Build both streams.

        Args:
            inputs: features ``[B, inputs]``.
            num_actions: ``A``.
        """
        super().__init__()
        self.value = nn.Linear(inputs, 1)
        self.advantage = nn.Linear(inputs, num_actions)

    def forward(self, features: Tensor) -> Tensor:
        """Action values ``[B, A]``; their mean over actions is the state value."""
        advantage_BA = self.advantage(features)
        value_B1: Tensor = self.value(features)
        centred: Tensor = value_B1 + advantage_BA - advantage_BA.mean(1, keepdim=True)
        return centred
