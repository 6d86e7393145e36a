"""Distributions by hand, and against slow twins."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from actorlearner.distributions import (
    BoundedNormal,
    Categorical,
    Categoricals,
    NumPyNoise,
    TorchNoise,
    TwoHot,
    symexp,
    symlog,
)


def slow_bins(count: int = 255, limit: float = 20.0) -> list[float]:
    places = [-limit + 2 * limit * i / (count - 1) for i in range(count)]
    return [math.copysign(math.exp(abs(x)) - 1, x) for x in places]


def slow_two_hot(target: float) -> list[float]:
    """Weights of the bins: those next to the target, by the distance in numbers, not in places."""
    bins = slow_bins()
    code = [0.0] * len(bins)
    target = min(max(target, bins[0]), bins[-1])
    for i in range(len(bins) - 1):
        if bins[i] <= target <= bins[i + 1]:
            share = (target - bins[i]) / (bins[i + 1] - bins[i])
            code[i], code[i + 1] = 1 - share, share
            break
    return code


def test_symexp_undoes_symlog() -> None:
    numbers = torch.logspace(-6, 6, 200, dtype=torch.float64)
    numbers = torch.cat([-numbers, torch.zeros(1, dtype=torch.float64), numbers])
    assert symlog(torch.tensor(math.e - 1)).item() == pytest.approx(1)
    torch.testing.assert_close(symexp(symlog(numbers)), numbers, rtol=1e-6, atol=0)


class TestTwoHot:
    def test_bins_are_far_apart_where_numbers_are_large(self) -> None:
        bins = TwoHot().bins
        np.testing.assert_allclose(bins, slow_bins(), rtol=1e-5, atol=1e-6)
        assert torch.equal(bins, -bins.flip(0))
        assert bins[127] == 0

    @pytest.mark.parametrize("value", [0.0, 1.0, -3.7])
    def test_equal_logits_mean_exactly_zero(self, value: float) -> None:
        """A.2: a head of zeros must not begin with large rewards and values."""
        assert TwoHot().mean(torch.full((2, 255), value)).tolist() == [0.0, 0.0]

    def test_loss_equals_the_slow_twin(self) -> None:
        """A.5 item 1: raw targets over bins at symexp places, not symlogs over even ones."""
        g = torch.Generator().manual_seed(0)
        targets = symexp(torch.linspace(-21, 21, 41))
        logits = torch.randn(41, 255, generator=g)
        log_probs = logits.double().log_softmax(-1).tolist()
        expected = [
            -sum(w * p for w, p in zip(slow_two_hot(float(y)), row, strict=True) if w)
            for y, row in zip(targets, log_probs, strict=True)
        ]
        np.testing.assert_allclose(TwoHot().loss(logits, targets), expected, rtol=1e-4)

    def test_what_is_learned_by_heart_is_read_back(self) -> None:
        targets = torch.tensor([0.0, 1.0, -0.37, 15.0, 1234.5, -5e5, 1e6])
        codes = torch.tensor([slow_two_hot(float(y)) for y in targets], dtype=torch.float64)
        mean = TwoHot().mean((codes + 1e-30).log())
        torch.testing.assert_close(mean, targets.double(), rtol=1e-4, atol=1e-5)

    def test_the_gradient_is_that_of_the_code(self) -> None:
        logits = torch.zeros(255, requires_grad=True)
        (gradient,) = torch.autograd.grad(TwoHot().loss(logits, torch.tensor(0.7)), logits)
        np.testing.assert_allclose(
            gradient, 1 / 255 - np.array(slow_two_hot(0.7)), rtol=1e-4, atol=1e-7
        )

    def test_beyond_the_last_bin_it_counts_as_that(self) -> None:
        two_hot, logits = TwoHot(), torch.randn(255)
        bins = two_hot.bins
        for far, end in ((1e12, bins[-1]), (-1e12, bins[0])):
            assert two_hot.loss(logits, torch.tensor(far)) == two_hot.loss(logits, end)


class TestCategorical:
    def test_a_share_is_spread_evenly(self) -> None:
        """A.5 item 4: also in what divergences and log-probabilities are made of."""
        dist = Categorical(torch.tensor([1000.0, 0.0, 0.0, 0.0]), 0.01)
        expected = torch.tensor([0.9925, 0.0025, 0.0025, 0.0025])
        torch.testing.assert_close(dist.probs, expected)
        torch.testing.assert_close(dist.log_probs, expected.log())

    def test_divergence_and_entropy_by_hand(self) -> None:
        p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.4, 0.5])
        one, other = Categorical(p.log()), Categorical(q.log())
        expected = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
        assert one.divergence(other).item() == pytest.approx(expected, rel=1e-5)
        assert one.divergence(one).item() == 0
        assert one.entropy().item() == pytest.approx(-sum(a * math.log(a) for a in p.tolist()))

    @pytest.mark.parametrize("kind", ["torch", "numpy"])
    def test_samples_are_as_frequent_as_probable(self, kind: str) -> None:
        torch.manual_seed(0)
        numpy_noise = NumPyNoise(np.random.default_rng(0))
        noise = TorchNoise(torch.device("cpu")) if kind == "torch" else numpy_noise
        dist = Categorical(torch.tensor([0.5, -1.0, 1.5, 0.0]).expand(40_000, 4), 0.01)
        sample = dist.sample(noise)
        assert torch.equal(sample.sum(-1), torch.ones(40_000))
        deviation = (dist.probs[0] * (1 - dist.probs[0]) / 40_000).sqrt()
        assert ((sample.mean(0) - dist.probs[0]).abs() < 4 * deviation).all()

    def test_without_noise_it_is_the_mode(self) -> None:
        dist = Categorical(torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]]))
        assert dist.sample(None).tolist() == [[0, 1, 0], [1, 0, 0]]

    def test_the_gradient_goes_straight_through(self) -> None:
        logits = torch.randn(5, 4, requires_grad=True)
        dist = Categorical(logits, 0.01)
        sample = dist.straight_through_sample(NumPyNoise(np.random.default_rng(0)))
        assert set(sample.flatten().tolist()) == {0.0, 1.0}  # exactly
        weight = torch.randn(5, 4)
        (gradient,) = torch.autograd.grad((sample * weight).sum(), logits, retain_graph=True)
        (expected,) = torch.autograd.grad((dist.probs * weight).sum(), logits)
        torch.testing.assert_close(gradient, expected)

    def test_a_sample_itself_has_no_gradient(self) -> None:
        """A.5 item 9: nothing must flow through an action."""
        noise = NumPyNoise(np.random.default_rng(0))
        outputs = torch.randn(3, 6, requires_grad=True)
        assert not Categorical(outputs).sample(noise).requires_grad
        assert not Categoricals(outputs, (2, 4), 0.01).sample(noise).requires_grad
        assert not BoundedNormal(outputs, (0.1, 1)).sample(noise).requires_grad


def test_parts_add_up() -> None:
    logits = torch.randn(6, 5, dtype=torch.float64)
    dist = Categoricals(logits, (2, 3), 0.0)
    twins = [torch.distributions.Categorical(logits=part) for part in logits.split((2, 3), 1)]
    action = dist.sample(NumPyNoise(np.random.default_rng(0)))
    chosen = [part.argmax(1) for part in action.split((2, 3), 1)]
    expected = sum(twin.log_prob(i) for twin, i in zip(twins, chosen, strict=True))
    torch.testing.assert_close(dist.log_prob(action), expected)
    torch.testing.assert_close(dist.entropy(), sum(twin.entropy() for twin in twins))


def test_bounded_normal() -> None:
    outputs = torch.randn(4, 6, dtype=torch.float64)
    dist = BoundedNormal(outputs, (0.1, 1.0))
    mean, deviation = outputs[:, :3].tanh(), 0.9 * torch.sigmoid(outputs[:, 3:] + 2) + 0.1
    twin = torch.distributions.Normal(mean, deviation)
    action = dist.sample(NumPyNoise(np.random.default_rng(0)))
    torch.testing.assert_close(dist.log_prob(action), twin.log_prob(action).sum(-1))
    torch.testing.assert_close(dist.entropy(), twin.entropy().sum(-1))
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 3), np.float32))
    torch.testing.assert_close(action, mean + deviation * noise)
    torch.testing.assert_close(dist.sample(None), mean)
