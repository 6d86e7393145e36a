"""Distributions of returns and the heads that give them, against slow twins."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actorlearner.networks import DuelingHead
from actorlearner.value_heads import (
    Categorical,
    CategoricalHead,
    Expected,
    ExpectedHead,
    ImplicitQuantileHead,
    QuantileHead,
    Quantiles,
    ValueHead,
)
from tests.unit.test_returns import slow_projection, slow_quantile_huber

F, A = 5, 3
"""Features and actions."""

HEADS: dict[str, Any] = {
    "expected": ExpectedHead,
    "c51": lambda: CategoricalHead(7, (-2.0, 4.0)),
    "quantile": lambda: QuantileHead(6),
    "iqn": lambda: ImplicitQuantileHead(F, samples=6, acting_samples=4, embedding=8),
}


def layers_of(head: ValueHead, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    head.to(dtype)
    return DuelingHead(F, A, (), numbers=head.numbers).to(dtype)


def features(rows: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, F, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("name", HEADS)
class TestEveryHead:
    def test_means_and_choice(self, name: str) -> None:
        """`values` are the means, for IQN those of other levels; `of` picks an action's."""
        head = HEADS[name]()
        layers, x = layers_of(head), features()
        distribution = head(x, layers)
        assert head.values(x, layers).shape == distribution.mean.shape == (4, A)
        if name != "iqn":
            assert torch.equal(head.values(x, layers), distribution.mean)
        action = torch.tensor([2, 0, 1, 2])
        picked = distribution.mean[torch.arange(4), action]
        torch.testing.assert_close(distribution.of(action).mean, picked)

    def test_backing_up_moves_the_mean(self, name: str) -> None:
        """Of atoms too, as long as none moves out of their range."""
        head = HEADS[name]()
        layers, x = layers_of(head), features()
        before = head(x, layers).of(torch.tensor([0, 1, 2, 0]))
        reward, discount = torch.tensor([0.5, -0.25, 1.0, 0.0]), torch.tensor([0.0, 0.5, 0.25, 0.0])
        after = before.backup(reward, discount)
        torch.testing.assert_close(after.mean, reward + discount * before.mean)

    def test_nothing_random_is_in_the_values(self, name: str) -> None:
        head = HEADS[name]()
        layers, x = layers_of(head), features()
        before = torch.get_rng_state()
        head.values(x, layers)
        assert torch.equal(before, torch.get_rng_state())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sums_are_not_made_in_low_precision(self, name: str, dtype: torch.dtype) -> None:
        head = HEADS[name]()
        layers = layers_of(head, dtype)
        torch.manual_seed(2)
        taken = head(features(dtype=dtype), layers).of(torch.zeros(4, dtype=torch.long))
        target = taken.backup(torch.ones(4), torch.full((4,), 0.5))
        assert target.mean.dtype == torch.float32
        loss = taken.loss(target)
        assert loss.dtype == torch.float32
        loss.sum().backward()
        assert {p.grad.dtype for p in layers.parameters() if p.grad is not None} == {dtype}


class TestExpected:
    def test_huber_loss(self) -> None:
        loss = Expected(torch.tensor([1.0, 2.0])).loss(Expected(torch.tensor([1.5, 5.0])))
        assert loss.tolist() == [0.125, 2.5]


class TestCategorical:
    def test_means_equal_their_slow_twin(self) -> None:
        head = HEADS["c51"]()
        layers, x = layers_of(head), features()
        logits = layers(x).reshape(4, A, 7).tolist()
        for row, action in np.ndindex(4, A):
            weights = [math.exp(number) for number in logits[row][action]]
            mean = sum(w * (-2 + i) for i, w in enumerate(weights)) / sum(weights)
            assert head.values(x, layers)[row, action].item() == pytest.approx(mean)

    def test_loss_equals_its_slow_twin(self) -> None:
        """Cross-entropy with the projected target, less the target's entropy."""
        generator = torch.Generator().manual_seed(3)
        taken, following = (
            Categorical(torch.randn(9, 7, generator=generator).double().log_softmax(1), (-2.0, 4.0))
            for _ in range(2)
        )
        reward = torch.randn(9, generator=generator) * 3
        discount = torch.tensor([0.0, 0.9, 0.99] * 3)
        losses = taken.loss(following.backup(reward, discount)).tolist()
        for row in range(9):
            p = taken.log_probability[row].exp().tolist()
            after = following.log_probability[row].exp().tolist()
            m = slow_projection(after, reward[row].item(), discount[row].item(), -2.0, 4.0)
            assert sum(m) == pytest.approx(1)
            divergence = sum(t * math.log(t / o) for t, o in zip(m, p, strict=True) if t > 0)
            assert losses[row] == pytest.approx(divergence, rel=1e-5)

    def test_its_gradient_is_that_of_the_cross_entropy(self) -> None:
        """With respect to logits: the probability less that of the target."""
        logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
        target = torch.randn(4, 7, dtype=torch.float64).softmax(1)
        taken = Categorical(logits.log_softmax(1), (0.0, 1.0))
        (gradient,) = torch.autograd.grad(
            taken.loss(Categorical(target.log(), (0.0, 1.0))).sum(), logits
        )
        torch.testing.assert_close(gradient, logits.detach().softmax(1) - target)

    def test_certain_returns_are_no_trouble(self) -> None:
        """Targets of one atom, as where an episode ended; a network that is sure, and wrong."""
        logits = torch.full((3, 5), -200.0)
        logits[torch.arange(3), torch.tensor([0, 2, 4])] = 200.0
        logits.requires_grad_()
        taken = Categorical(logits.log_softmax(1), (0.0, 4.0))
        target = taken.backup(torch.tensor([0.0, 2.0, 1.0]), torch.zeros(3))
        loss = taken.loss(target)
        loss.sum().backward()
        assert loss.tolist() == pytest.approx([0, 0, 400], abs=1e-5)
        assert logits.grad is not None
        assert torch.isfinite(logits.grad).all()
        assert target.mean.tolist() == pytest.approx([0, 2, 1])

    def test_no_loss_is_negative(self) -> None:
        """It is a priority."""
        log_probability = torch.randn(1_000, 51).log_softmax(1)
        taken = Categorical(log_probability, (-10.0, 10.0))
        assert (taken.loss(Categorical(log_probability - 1e-5, (-10.0, 10.0))) >= 0).all()


class TestQuantiles:
    def test_levels_are_the_middles(self) -> None:
        """Dabney et al. 2018a, lemma 2."""
        head = QuantileHead(4)
        level = head(features(), layers_of(head)).level
        assert level.tolist() == [0.125, 0.375, 0.625, 0.875]

    def test_numbers_of_an_action_lie_side_by_side(self) -> None:
        head = QuantileHead(2)
        quantiles = head(torch.zeros(1, F), lambda _: torch.tensor([[1.0, 3.0, 5.0, 8.0]]))
        assert quantiles.value.tolist() == [[[1, 3], [5, 8]]]
        assert quantiles.mean.tolist() == [[2, 6.5]]

    def test_loss_equals_its_slow_twin(self) -> None:
        generator = torch.Generator().manual_seed(3)
        level = torch.rand(9, 4, generator=generator, dtype=torch.float64)
        value, following = (
            torch.randn(9, n, generator=generator, dtype=torch.float64) for n in (4, 6)
        )
        reward = torch.randn(9, generator=generator)
        discount = torch.tensor([0.0, 0.9, 0.99] * 3)
        target = Quantiles(following, torch.rand(9, 6)).backup(reward, discount)
        losses = Quantiles(value, level).loss(target).tolist()
        for row in range(9):
            goals = [reward[row].item() + discount[row].item() * z for z in following[row].tolist()]
            expected = slow_quantile_huber(value[row].tolist(), level[row].tolist(), goals, 1.0)
            assert losses[row] == pytest.approx(expected, rel=1e-6)


class TestImplicitQuantiles:
    def test_equals_its_slow_twin(self) -> None:
        """Dabney et al. 2018b, equation 4, number by number."""
        head = HEADS["iqn"]()
        layers, x = layers_of(head), features()
        level = torch.tensor([[0.1, 0.7], [0.5, 0.2], [0.9, 0.3], [0.0, 1.0]])
        quantiles = head.at(level, x, layers)
        assert quantiles.level is level
        weight, bias = head.embedding.weight.tolist(), head.embedding.bias.tolist()
        for row, n in np.ndindex(4, 2):
            tau = level[row, n].item()
            cosines = [math.cos(math.pi * i * tau) for i in range(8)]
            embedded = [
                max(0.0, bias[j] + sum(w * c for w, c in zip(weight[j], cosines, strict=True)))
                for j in range(F)
            ]
            product = torch.tensor([embedded], dtype=torch.float64) * x[row]
            torch.testing.assert_close(
                quantiles.value[row, :, n], layers(product)[0], atol=1e-6, rtol=0
            )

    def test_values_are_means_over_the_middles(self) -> None:
        head = HEADS["iqn"]()
        layers, x = layers_of(head), features()
        middles = torch.tensor([[0.125, 0.375, 0.625, 0.875]] * 4)
        torch.testing.assert_close(
            head.values(x, layers), head.at(middles, x, layers).value.mean(2)
        )

    def test_levels_to_learn_from_are_drawn_for_each_row(self) -> None:
        head = ImplicitQuantileHead(F, samples=50, acting_samples=4, embedding=8)
        layers, x = layers_of(head), features(rows=200)
        torch.manual_seed(1)
        first, second = head(x, layers), head(x, layers)
        assert first.level.shape == (200, 50)
        assert first.value.shape == (200, A, 50)
        assert torch.equal(first.value, head.at(first.level, x, layers).value)
        torch.manual_seed(1)
        assert torch.equal(first.value, head(x, layers).value)
        assert len(set(first.level[:, 0].tolist())) > 190
        assert not torch.equal(first.level, second.level)
        shares, _ = np.histogram(first.level.numpy(), bins=4, range=(0, 1))
        assert shares / 10_000 == pytest.approx([0.25] * 4, abs=0.02)
