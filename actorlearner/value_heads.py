"""What a Q-network says of the return of an action: its mean, or its whole distribution.

The last layers of a network (``layers`` here: linear, or `networks.DuelingHead`) give N numbers for
each action. A *value head* says what they mean: as a `Distribution` to learn from, and as mean
values to act by. It has no parameters that belong to an action.

Shape suffixes: B batch, A actions, N numbers of each action (1, atoms or quantiles), F features.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from actorlearner.returns import categorical_projection, quantile_huber_loss

Head: TypeAlias = Literal["expected", "c51", "quantile", "iqn"]
"""Which value head a network has."""

Layers: TypeAlias = Callable[[Tensor], Tensor]
"""Numbers ``[..., A * N]``, those of an action side by side, from features ``[..., F]``."""

DistributionT = TypeVar("DistributionT", bound="Distribution")

# -------------------------------------------------------------------------------- distributions


class Distribution(ABC):
    """Returns of every action (``[B, A]``), or of one action for each row (``[B]``, after `of`).

    Attributes:
        loss_is_priority: replay rows by `loss`; otherwise by the absolute error of `mean`.
    """

    loss_is_priority: ClassVar[bool] = True

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """Expected returns, ``[B, A]`` or ``[B]``."""

    @abstractmethod
    def of(self: DistributionT, action_B: Tensor) -> DistributionT:
        """Those of action ``action_B[b]`` in row ``b``, int64 ``[B]``."""

    @abstractmethod
    def backup(self: DistributionT, reward_B: Tensor, discount_B: Tensor) -> DistributionT:
        """Of ``reward + discount * return``, float32 ``[B]`` each; after `of`."""

    @abstractmethod
    def loss(self: DistributionT, target: DistributionT) -> Tensor:
        """How far this is from ``target``, ``[B]``, at least 0; after `of`."""


@dataclass(eq=False)
class Expected(Distribution):
    """Expected returns and nothing more.

    Attributes:
        value: ``[B, A]`` or ``[B]``.
    """

    value: Tensor
    loss_is_priority: ClassVar[bool] = False

    @property
    def mean(self) -> Tensor:
        """See `Distribution`."""
        return self.value

    def of(self, action_B: Tensor) -> Expected:
        """See `Distribution`."""
        return Expected(self.value.gather(1, action_B.unsqueeze(1)).squeeze(1))

    def backup(self, reward_B: Tensor, discount_B: Tensor) -> Expected:
        """See `Distribution`."""
        return Expected(reward_B + discount_B * self.value)

    def loss(self, target: Expected) -> Tensor:
        """Huber loss (Mnih et al. 2015: errors clipped at 1)."""
        return functional.smooth_l1_loss(self.value, target.value, reduction="none")


@dataclass(eq=False)
class Categorical(Distribution):
    """Probabilities of evenly spaced atoms.

    Attributes:
        log_probability: ``[B, A, N]`` or ``[B, N]``.
        value_range: the lowest and the highest atom.
    """

    log_probability: Tensor
    value_range: tuple[float, float]

    @property
    def mean(self) -> Tensor:
        """See `Distribution`."""
        probability = self.log_probability.exp()
        count = probability.shape[-1]
        # Not a buffer of the module: that would be rounded with its parameters.
        atom_N = torch.linspace(
            *self.value_range, count, dtype=probability.dtype, device=probability.device
        )
        return probability @ atom_N

    def of(self, action_B: Tensor) -> Categorical:
        """See `Distribution`."""
        return Categorical(_of(self.log_probability, action_B), self.value_range)

    def backup(self, reward_B: Tensor, discount_B: Tensor) -> Categorical:
        """See `Distribution`; projected onto the same atoms."""
        projected = categorical_projection(
            self.log_probability.exp(), reward_B, discount_B, self.value_range
        )
        # The smallest number instead of 0, whose logarithm times 0 is not 0 here.
        tiny = torch.finfo(projected.dtype).tiny
        return Categorical(projected.clamp_min(tiny).log(), self.value_range)

    def loss(self, target: Categorical) -> Tensor:
        """Divergence of ``target`` from this, ``KL(target || self)``.

        As in Rainbow (Hessel et al. 2018, equation 5). Its gradient is that of the cross-entropy of
        Bellemare et al. (2017), from which it differs by the entropy of the target.
        """
        loss_B = functional.kl_div(
            self.log_probability, target.log_probability, reduction="none", log_target=True
        ).sum(1)
        return loss_B.clamp_min(0)  # rounding


@dataclass(eq=False)
class Quantiles(Distribution):
    """Values below which given shares of the returns lie.

    Attributes:
        value: ``[B, A, N]`` or ``[B, N]``.
        level: the shares, ``[N]`` or ``[B, N]``.
    """

    value: Tensor
    level: Tensor

    @property
    def mean(self) -> Tensor:
        """See `Distribution`."""
        return self.value.mean(-1)

    def of(self, action_B: Tensor) -> Quantiles:
        """See `Distribution`."""
        return Quantiles(_of(self.value, action_B), self.level)

    def backup(self, reward_B: Tensor, discount_B: Tensor) -> Quantiles:
        """See `Distribution`."""
        return Quantiles(reward_B.unsqueeze(1) + discount_B.unsqueeze(1) * self.value, self.level)

    def loss(self, target: Quantiles) -> Tensor:
        """Quantile Huber loss (Dabney et al. 2018a, b)."""
        return quantile_huber_loss(self.value, self.level, target.value)


def _of(numbers_BAN: Tensor, action_B: Tensor) -> Tensor:
    index_B1N = action_B.view(-1, 1, 1).expand(-1, 1, numbers_BAN.shape[2])
    return numbers_BAN.gather(1, index_B1N).squeeze(1)


def _at_least_float32(numbers: Tensor) -> Tensor:
    """Sums over many atoms or quantiles are wrong in less."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


# ---------------------------------------------------------------------------------------- heads


class ValueHead(nn.Module, ABC):
    """Says what the numbers of a network's last layers mean.

    Attributes:
        numbers: ``N``, of each action, that ``layers`` must give.
    """

    numbers: int

    @abstractmethod
    def forward(self, features_BF: Tensor, layers: Layers) -> Distribution:
        """The returns of every action."""

    def values(self, features_BF: Tensor, layers: Layers) -> Tensor:
        """Expected returns ``[B, A]``, to act by; nothing random is in them."""
        mean: Tensor = self(features_BF, layers).mean
        return mean


class ExpectedHead(ValueHead):
    """The numbers are expected returns."""

    numbers = 1

    def forward(self, features_BF: Tensor, layers: Layers) -> Expected:
        """See `ValueHead`."""
        return Expected(_at_least_float32(layers(features_BF)))


class CategoricalHead(ValueHead):
    """C51: the numbers are logits of atoms (Bellemare et al. 2017)."""

    def __init__(self, num_atoms: int, value_range: tuple[float, float]) -> None:
        """Space the atoms.

        Args:
            num_atoms: ``N``, at least 2.
            value_range: the lowest and the highest atom.
        """
        super().__init__()
        self.numbers = num_atoms
        self._value_range = value_range

    def forward(self, features_BF: Tensor, layers: Layers) -> Categorical:
        """See `ValueHead`."""
        logits_BAN = _at_least_float32(layers(features_BF)).unflatten(-1, (-1, self.numbers))
        return Categorical(logits_BAN.log_softmax(-1), self._value_range)


class QuantileHead(ValueHead):
    """QR-DQN: the numbers are quantiles, each in the middle of an equal share of the returns.

    Dabney et al. 2018a, equation 7 and lemma 2.
    """

    def __init__(self, num_quantiles: int) -> None:
        """Fix the levels.

        Args:
            num_quantiles: ``N``.
        """
        super().__init__()
        self.numbers = num_quantiles

    def forward(self, features_BF: Tensor, layers: Layers) -> Quantiles:
        """See `ValueHead`."""
        value_BAN = _at_least_float32(layers(features_BF)).unflatten(-1, (-1, self.numbers))
        return Quantiles(value_BAN, _middles(self.numbers, value_BAN))


class ImplicitQuantileHead(ValueHead):
    """IQN: the network gives the quantile of any level that it is asked for (Dabney et al. 2018b).

    Features are multiplied by an embedding of the level (equation 4), and ``layers`` make of them
    one number for each action: its quantile. To learn from, levels are drawn from torch's global
    generator, other ones for each row. To act by, they are the middles of equal shares, where the
    paper draws them too: evaluations can be repeated, and the mean is closer.
    """

    numbers = 1

    def __init__(self, features: int, samples: int, acting_samples: int, embedding: int) -> None:
        """Build the embedding.

        Args:
            features: ``F``.
            samples: levels drawn to learn from (``N`` of the paper, ``N'`` in a target network).
            acting_samples: levels averaged to act by (``K``).
            embedding: cosines of a level (``n``).
        """
        super().__init__()
        self._samples = samples
        self._acting_samples = acting_samples
        self._num_cosines = embedding
        self.embedding = nn.Linear(embedding, features)

    def forward(self, features_BF: Tensor, layers: Layers) -> Quantiles:
        """See `ValueHead`."""
        level_BN = torch.rand(len(features_BF), self._samples, device=features_BF.device)
        return self.at(level_BN, features_BF, layers)

    def values(self, features_BF: Tensor, layers: Layers) -> Tensor:
        """See `ValueHead`."""
        return self.at(_middles(self._acting_samples, features_BF), features_BF, layers).mean

    def at(self, level: Tensor, features_BF: Tensor, layers: Layers) -> Quantiles:
        """The quantiles of given levels, float32 ``[N]`` or ``[B, N]``."""
        place_n = torch.arange(self._num_cosines, device=level.device)
        cosines = (math.pi * place_n * level.unsqueeze(-1)).cos().to(features_BF.dtype)
        embedded_NF = functional.relu(self.embedding(cosines))
        value_BNA = layers(features_BF.unsqueeze(1) * embedded_NF)
        return Quantiles(_at_least_float32(value_BNA).movedim(1, 2), level)


def _middles(count: int, like: Tensor) -> Tensor:
    """The middle of each of ``count`` equal parts of [0, 1]."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return (torch.arange(count, dtype=dtype, device=like.device) + 0.5) / count
