"""Distributions that networks predict, and numbers as networks like them (symlog, two-hot).

Shape suffixes: C classes of a category, N bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


def symlog(number: Tensor) -> Tensor:
    """``sign(x) log(|x| + 1)`` (Hafner et al. 2025, equation 9)."""
    return number.sign() * number.abs().log1p()


def symexp(number: Tensor) -> Tensor:
    """``sign(x) (exp(|x|) - 1)``, the inverse of `symlog`."""
    return number.sign() * number.abs().expm1()


def in_full(tensor: Tensor) -> Tensor:
    """``tensor`` in float32, or as it is if that is wider: for sums, logarithms and losses."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# -------------------------------------------------------------------------------------- noise


class Noise(Protocol):
    """Where samples get their randomness from."""

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Independent numbers of ``[0, 1)``."""
        ...

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Independent standard normal numbers."""
        ...


class TorchNoise:
    """Noise of a torch generator."""

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        """Draw on ``device``, from its global generator if there is no other."""
        self._device, self._generator = device, generator

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """See `Noise`."""
        return torch.rand(*shape, generator=self._generator, device=self._device)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """See `Noise`."""
        return torch.randn(*shape, generator=self._generator, device=self._device)


class NumPyNoise:
    """Noise of a NumPy generator, on the CPU."""

    def __init__(self, generator: np.random.Generator) -> None:
        """Draw from ``generator``."""
        self._generator = generator

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """See `Noise`."""
        return torch.from_numpy(self._generator.random(shape, np.float32))

    def normal(self, shape: Sequence[int]) -> Tensor:
        """See `Noise`."""
        return torch.from_numpy(self._generator.standard_normal(shape, np.float32))


# ------------------------------------------------------------------------------ distributions


class ActionDistribution(Protocol):
    """What an actor predicts: of vectors ``[..., A]``."""

    def sample(self, noise: Noise | None) -> Tensor:
        """One ``[..., A]`` without a gradient; the mode if there is no noise."""
        ...

    def log_prob(self, action: Tensor) -> Tensor:
        """``[...]`` of ``[..., A]``."""
        ...

    def entropy(self) -> Tensor:
        """``[...]`` in nats."""
        ...


class Categorical:
    """One-hot vectors; a share of the probability is spread evenly over all classes.

    "Unimix" of Hafner et al. (2025): no class is ever without probability, so that neither
    Kullback-Leibler divergences nor log-probabilities run away.

    Attributes:
        probs: ``[..., C]``, the mixture.
        log_probs: of it.
    """

    def __init__(self, logits: Tensor, uniform_share: float = 0.0) -> None:
        """Mix.

        Args:
            logits: ``[..., C]``.
            uniform_share: of the uniform distribution in the mixture.
        """
        logits = in_full(logits)
        if uniform_share:
            probs = _softmax(logits)
            self.probs = (1 - uniform_share) * probs + uniform_share / logits.shape[-1]
            self.log_probs = self.probs.log()
        else:
            self.log_probs = functional.log_softmax(logits, -1)
            self.probs = self.log_probs.exp()

    def detach(self) -> Categorical:
        """The same without a gradient."""
        return self._of(self.probs.detach(), self.log_probs.detach())

    @classmethod
    def stack(cls, rows: Sequence[Categorical]) -> Categorical:
        """One of ``[L, ...]`` from ``L`` of them."""
        probs, log_probs = [row.probs for row in rows], [row.log_probs for row in rows]
        return cls._of(torch.stack(probs), torch.stack(log_probs))

    @classmethod
    def _of(cls, probs: Tensor, log_probs: Tensor) -> Categorical:
        made = cls.__new__(cls)
        made.probs, made.log_probs = probs, log_probs
        return made

    def sample(self, noise: Noise | None) -> Tensor:
        """One-hot ``[..., C]`` without a gradient; the mode if there is no noise."""
        probs = self.probs.detach()
        if noise is None:
            index = probs.argmax(-1)
        else:
            drawn = noise.uniform(probs.shape[:-1]).unsqueeze(-1)
            # Rounding may leave the last sum below 1, and below what was drawn.
            index = (probs.cumsum(-1) < drawn).sum(-1).clamp(max=probs.shape[-1] - 1)
        return torch.zeros_like(probs).scatter_(-1, index.unsqueeze(-1), 1)

    def straight_through_sample(self, noise: Noise | None) -> Tensor:
        """As `sample`, with the gradient of the probabilities (Bengio et al. 2013)."""
        return self.sample(noise) + (self.probs - self.probs.detach())

    def log_prob(self, one_hot: Tensor) -> Tensor:
        """``[...]`` of ``[..., C]``."""
        return (one_hot * self.log_probs).sum(-1)

    def entropy(self) -> Tensor:
        """``[...]`` in nats."""
        return -(self.probs * self.log_probs).sum(-1)

    def divergence(self, other: Categorical) -> Tensor:
        """Kullback-Leibler divergence of this from ``other``, ``[...]`` in nats."""
        return (self.probs * (self.log_probs - other.log_probs)).sum(-1)


def _softmax(logits: Tensor) -> Tensor:
    """Over the last axis."""
    if logits.ndim > 1 and logits.shape[-1] < 16:
        # Along so short an axis torch's loop for the CPU is up to 20 times slower than across.
        return functional.softmax(logits.transpose(-1, -2), -2).transpose(-1, -2)
    return functional.softmax(logits, -1)


class Categoricals:
    """Independent `Categorical` parts, their one-hot vectors one behind the other."""

    def __init__(self, logits: Tensor, sizes: Sequence[int], uniform_share: float) -> None:
        """Split.

        Args:
            logits: ``[..., sum(sizes)]``.
            sizes: classes of each part.
            uniform_share: see `Categorical`.
        """
        self._sizes = list(sizes)
        self._parts = [Categorical(part, uniform_share) for part in logits.split(self._sizes, -1)]

    def sample(self, noise: Noise | None) -> Tensor:
        """See `ActionDistribution`."""
        return torch.cat([part.sample(noise) for part in self._parts], -1)

    def log_prob(self, action: Tensor) -> Tensor:
        """See `ActionDistribution`."""
        parts = zip(self._parts, action.split(self._sizes, -1), strict=True)
        return torch.stack([part.log_prob(one_hot) for part, one_hot in parts]).sum(0)

    def entropy(self) -> Tensor:
        """See `ActionDistribution`."""
        return torch.stack([part.entropy() for part in self._parts]).sum(0)


class BoundedNormal:
    """Independent normal numbers, the means within ±1, the deviations within a range.

    Samples may leave ±1: what acts clips them.

    Attributes:
        mean: ``[..., A]``.
        deviation: ``[..., A]``.
    """

    def __init__(self, outputs: Tensor, deviations: tuple[float, float]) -> None:
        """Squash.

        Args:
            outputs: ``[..., 2 A]`` of a network: for the means, then for the deviations.
            deviations: the lowest and the highest; an output of 0 gives ``sigmoid(2)`` of the way
                between them.
        """
        mean, deviation = in_full(outputs).chunk(2, -1)
        low, high = deviations
        self.mean = mean.tanh()
        self.deviation = low + (high - low) * torch.sigmoid(deviation + 2)

    def sample(self, noise: Noise | None) -> Tensor:
        """See `ActionDistribution`."""
        mean = self.mean.detach()
        return mean if noise is None else mean + self.deviation.detach() * noise.normal(mean.shape)

    def log_prob(self, action: Tensor) -> Tensor:
        """See `ActionDistribution`."""
        off = (action - self.mean) / self.deviation
        return -(off.square() / 2 + self.deviation.log() + math.log(2 * math.pi) / 2).sum(-1)

    def entropy(self) -> Tensor:
        """See `ActionDistribution`."""
        return (self.deviation.log() + math.log(2 * math.pi * math.e) / 2).sum(-1)


class TwoHot(nn.Module):
    """A number as a categorical distribution over bins that lie ever further apart.

    The bins are at ``symexp`` of evenly spaced places, symmetric about 0; a target gives weight to
    the two bins next to it, more to the nearer one, measured between the bins themselves (Hafner et
    al. 2025, equations 10 and 11). So the size of the gradient does not grow with that of the
    target.
    """

    bins: Tensor

    def __init__(self, num_bins: int = 255, limit: float = 20.0) -> None:
        """Place the bins.

        Args:
            num_bins: odd, so that one is at 0.
            limit: ``symexp(limit)`` is the last bin.
        """
        super().__init__()
        negative = symexp(torch.linspace(-limit, 0, num_bins // 2 + 1, dtype=torch.float64))
        bins = torch.cat([negative, -negative[:-1].flip(0)])
        self.register_buffer("bins", bins.float(), persistent=False)

    @property
    def num_bins(self) -> int:
        """``N``."""
        return len(self.bins)

    def mean(self, logits: Tensor) -> Tensor:
        """The expected number, ``[...]`` of ``[..., N]``; exactly 0 where all logits are equal.

        Summed from the centre outwards in pairs: the outer bins are so large that in any other
        order rounding would leave much of them.
        """
        weighted = functional.softmax(in_full(logits), -1) * in_full(self.bins)
        half = self.num_bins // 2
        pairs = weighted[..., :half].flip(-1) + weighted[..., half + 1 :]
        mean: Tensor = weighted[..., half] + pairs.sum(-1)
        return mean

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy ``[...]`` of logits ``[..., N]`` with the two-hot code of targets.

        Args:
            logits: with a graph.
            target: ``[...]``; beyond the last bin it counts as that.
        """
        return self.losses(logits, target.unsqueeze(-1)).squeeze(-1)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """As `loss`, ``[..., K]`` of logits ``[..., N]`` with several targets ``[..., K]`` each."""
        bins = in_full(self.bins)
        targets = targets.to(bins.dtype)
        above = torch.bucketize(targets.contiguous(), bins).clamp(1, len(bins) - 1)
        low, high = bins[above - 1], bins[above]
        share = ((targets - low) / (high - low)).clamp(0, 1)
        log_probs = functional.log_softmax(in_full(logits), -1)
        # One `gather` for all: the gradient of each is as large as the logits.
        picked = log_probs.gather(-1, torch.cat([above - 1, above], -1))
        weighted = torch.cat([1 - share, share], -1) * picked
        losses: Tensor = -weighted.unflatten(-1, (2, -1)).sum(-2)
        return losses
