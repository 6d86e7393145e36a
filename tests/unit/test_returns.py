"""Tests of `actorlearner.returns`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actorlearner.returns import (
    categorical_projection,
    lambda_return,
    n_step,
    quantile_huber_loss,
)


def slow_n_step(rewards, terminated, inside, gamma):
    """The definition for one window, row by row."""
    total, steps, discount = 0.0, 0, 1.0
    for reward, ends, is_inside in zip(rewards, terminated, inside, strict=True):
        if not is_inside:
            break
        total += gamma**steps * float(reward)
        steps += 1
        discount = gamma**steps
        if ends:
            discount = 0.0
            break
    return total, discount, steps


def n_step_of_columns(reward_NB, terminated_NB, inside_NB, gamma, clip=None):
    """`n_step` of windows that are given row by row, each with a place behind it; and its steps."""
    num_rows, num_windows = reward_NB.shape
    flat = [
        np.append(columns, np.full((1, num_windows), filler, columns.dtype), axis=0).T.ravel()
        for columns, filler in ((reward_NB, np.nan), (terminated_NB, True), (inside_NB, False))
    ]
    start_B = np.arange(num_windows) * (num_rows + 1)
    following = np.arange(1, len(flat[0]) + 1)
    following[num_rows :: num_rows + 1] -= 1  # as tails do
    return_B, discount_B, end_B = n_step(start_B, num_rows, following, *flat, gamma, clip)
    return return_B, discount_B, end_B - start_B


def one_window(rewards, terminated, inside, clip=None):
    """`n_step` of a single window at gamma 0.5."""
    columns = np.float32(rewards), np.array(terminated, bool), np.array(inside, bool)
    of_one = n_step_of_columns(*(c[:, None] for c in columns), 0.5, clip)
    return tuple(float(x[0]) for x in of_one)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 8),
    num_windows=st.integers(1, 6),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
def test_equals_the_slow_twin(seed, num_rows, num_windows, gamma):
    """Random rewards, ends and exits, in every combination."""
    generator = np.random.default_rng(seed)
    shape = num_rows, num_windows
    reward = generator.normal(size=shape).astype(np.float32)
    terminated = generator.random(shape) < 0.2
    inside = generator.random(shape) < 0.8
    returns, discounts, steps = n_step_of_columns(reward, terminated, inside, gamma)
    for i in range(num_windows):
        expected = slow_n_step(reward[:, i], terminated[:, i], inside[:, i], gamma)
        np.testing.assert_allclose((returns[i], discounts[i], steps[i]), expected, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 3, 5])
def test_one_transition_per_step_of_an_episode(n):
    """200 random episodes: each env step starts one window, and its tails shorten to one row."""
    generator, gamma = np.random.default_rng(1), 0.9
    for _ in range(200):
        length, ends_truly = int(generator.integers(1, 13)), bool(generator.integers(2))
        rewards = generator.normal(size=length).astype(np.float32)
        # Episode, then its reset row, then the next episode: whatever those hold must not matter.
        reward = np.concatenate([rewards, np.full(n + 1, np.nan, np.float32)])
        terminated = np.zeros(length + n + 1, bool)
        terminated[length - 1] = ends_truly
        inside = np.arange(length + n + 1) != length
        starts, following = np.arange(length), np.arange(1, length + n + 2)
        returns, discounts, ends = n_step(starts, n, following, reward, terminated, inside, gamma)
        for start in range(length):
            left = rewards[start : start + n]
            cut = ends_truly and start + n >= length
            expected = sum(gamma**i * float(r) for i, r in enumerate(left))
            assert ends[start] - start == len(left)
            assert returns[start] == pytest.approx(expected, rel=1e-5, abs=1e-6)
            assert discounts[start] == pytest.approx(0.0 if cut else gamma ** len(left), rel=1e-6)


def test_termination_inside_the_window_cuts_what_follows():
    """A life loss has no reset row behind it: the flag alone must cut."""
    assert one_window([1, 2, 4], [0, 1, 0], [1, 1, 1]) == (2.0, 0.0, 2)


def test_leaving_the_window_keeps_the_bootstrap():
    """A truncated window bootstraps with the power of the rows that count."""
    assert one_window([1, 2, 4], [0, 0, 0], [1, 1, 0]) == (2.0, 0.25, 2)


def test_termination_outside_the_window_is_no_end():
    """A flag on a row that does not count says nothing about the window."""
    assert one_window([1, 2], [0, 1], [1, 0]) == (1.0, 0.5, 1)


def test_rewards_are_clipped_before_they_are_summed():
    """Of either sign, and only where they are larger; here to what float32 has for 0.1."""
    assert one_window([3, -2, 0.25], [0, 0, 0], [1, 1, 1], clip=0.5) == (0.3125, 0.125, 3)
    assert one_window([7], [1], [1], clip=0.1) == (float(np.float32(0.1)), 0.0, 1)


def test_dtypes_and_inputs_left_alone():
    """Float32 for the learner, whole numbers to index with, and no argument is written to."""
    reward, terminated = np.ones((3, 2), np.float32), np.zeros((3, 2), bool)
    terminated[0] = True
    inside = np.ones((3, 2), bool)
    returns, discounts, steps = n_step_of_columns(reward, terminated, inside, 0.99)
    assert returns.dtype == discounts.dtype == np.float32
    assert np.issubdtype(steps.dtype, np.integer)
    assert inside.all()
    assert returns.shape == discounts.shape == steps.shape == (2,)


# ------------------------------------------------------------------ distributions of returns


def slow_projection(probabilities, reward, discount, low, high):
    """Bellemare et al. 2017, algorithm 1, for one row, with a case for who hits an atom."""
    last = len(probabilities) - 1
    width = (high - low) / last
    projected = [0.0] * (last + 1)
    for j, probability in enumerate(probabilities):
        moved = min(high, max(low, reward + discount * (low + j * width)))
        place = min(float(last), max(0.0, (moved - low) / width))
        below, above = math.floor(place), math.ceil(place)
        if below == above:
            projected[below] += probability
        else:
            projected[below] += probability * (above - place)
            projected[above] += probability * (place - below)
    return projected


def project(probability, reward, discount, value_range):
    """`categorical_projection` of one row, in float64."""
    rows = (torch.tensor([x], dtype=torch.float64) for x in (probability, reward, discount))
    return categorical_projection(*rows, value_range)[0].tolist()


@settings(max_examples=100, deadline=None)
@example(seed=0, count=11, low=0.0, width=78.91910110838555, n=1)  # rounds beyond the last atom
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(2, 60),
    low=st.floats(-100, 100),
    width=st.floats(0.1, 200),
    n=st.integers(1, 5),
)
def test_projection_equals_its_slow_twin(seed, count, low, width, n):
    """Rows that end and rows that do not, rewards inside the range and far outside."""
    generator, rows, high = np.random.default_rng(seed), 6, low + width
    probability = generator.dirichlet(np.full(count, 0.3), rows)
    reward = generator.normal(low, 2 * width, rows)
    discount = np.where(generator.random(rows) < 0.3, 0.0, 0.99**n)
    projected = categorical_projection(
        *map(torch.from_numpy, (probability, reward, discount)), (low, high)
    ).numpy()
    assert (projected >= 0).all()
    np.testing.assert_allclose(projected.sum(1), 1.0, atol=1e-12)
    for row, (p, r, d) in enumerate(zip(probability, reward, discount, strict=True)):
        expected = slow_projection(p.tolist(), float(r), float(d), low, high)
        np.testing.assert_allclose(projected[row], expected, atol=1e-9)
        # Where nothing is clipped, the mean is that of what was projected.
        atoms = np.linspace(low, high, count)
        if low <= min(r + d * low, r + d * high) and max(r + d * low, r + d * high) <= high:
            assert projected[row] @ atoms == pytest.approx(r + d * (p @ atoms), abs=1e-8)


@pytest.mark.parametrize(
    ("reward", "discount", "expected"),
    [
        (0.0, 1.0, [0.1, 0.2, 0.3, 0.4]),  # every atom on itself
        (1.0, 1.0, [0.0, 0.1, 0.2, 0.7]),  # one further; the last is clipped
        (-1.0, 1.0, [0.3, 0.3, 0.4, 0.0]),
        (2.0, 0.0, [0.0, 0.0, 1.0, 0.0]),  # ended on an atom
        (1.25, 0.0, [0.0, 0.75, 0.25, 0.0]),  # ended between two
        (0.0, 0.0, [1.0, 0.0, 0.0, 0.0]),
        (99.0, 0.0, [0.0, 0.0, 0.0, 1.0]),
        (-99.0, 0.0, [1.0, 0.0, 0.0, 0.0]),
        (99.0, 1.0, [0.0, 0.0, 0.0, 1.0]),
        (0.0, 0.5, [0.1 + 0.1, 0.1 + 0.3 + 0.2, 0.2, 0.0]),
    ],
)
def test_projection_by_hand(reward, discount, expected):
    """Atoms 0, 1, 2, 3."""
    assert project([0.1, 0.2, 0.3, 0.4], reward, discount, (0.0, 3.0)) == pytest.approx(expected)


@pytest.mark.parametrize("value_range", [(-10.0, 10.0), (0.0, 100.0), (-1.0, 1.0)])
def test_every_atom_of_51_in_float32_stays_where_it_is(value_range):
    """Rounding must neither lose mass beyond the last atom nor move any to a neighbour."""
    projected = categorical_projection(torch.eye(51), torch.zeros(51), torch.ones(51), value_range)
    torch.testing.assert_close(projected, torch.eye(51), atol=2e-5, rtol=0)
    at_the_end = categorical_projection(
        torch.eye(51), torch.full((51,), value_range[1]), torch.zeros(51), value_range
    )
    assert (at_the_end[:, -1] == 1).all()


def slow_quantile_huber(quantiles, levels, targets, kappa):
    """Dabney et al. 2018b, equations 3 and 4, for one row."""
    total = 0.0
    for quantile, level in zip(quantiles, levels, strict=True):
        for target in targets:
            error = target - quantile
            small = abs(error) <= kappa
            huber = error**2 / 2 if small else kappa * (abs(error) - kappa / 2)
            total += abs(level - float(error < 0)) * huber / kappa / len(targets)
    return total


@pytest.mark.parametrize("kappa", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("levels_of_each_row", [True, False])
def test_quantile_loss_equals_its_slow_twin(levels_of_each_row, kappa):
    generator = torch.Generator().manual_seed(0)
    quantile, target = (
        torch.randn(7, n, generator=generator, dtype=torch.float64) * 2 for n in (5, 3)
    )
    target[0, 0] = quantile[0, 0]  # no error
    level = torch.rand(7, 5, generator=generator, dtype=torch.float64)
    if not levels_of_each_row:
        level = level[0]
    loss = quantile_huber_loss(quantile, level, target, kappa)
    rows = level.expand(7, 5).tolist()
    expected = [
        slow_quantile_huber(*row, kappa)
        for row in zip(quantile.tolist(), rows, target.tolist(), strict=True)
    ]
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-12)


def test_the_quantiles_of_the_target_are_where_the_loss_is_least():
    """Errors of 10 are in the linear part: the slope is that of plain quantile regression."""
    target = torch.tensor([[0.0, 10.0, 20.0, 30.0]], dtype=torch.float64)
    level = torch.tensor([0.125, 0.375, 0.625, 0.875], dtype=torch.float64)
    quantile = target.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(quantile_huber_loss(quantile, level, target).sum(), quantile)
    assert gradient.abs().max() < 0.2
    for direction in (-5.0, 5.0):
        moved = quantile_huber_loss(target + direction, level, target)
        assert moved.item() > quantile_huber_loss(target, level, target).item() + 1


# ------------------------------------------------------------------------------ lambda-returns


def slow_lambda_return(reward, discount, value, lam, t=0):
    """All n-step returns of one column from row ``t`` on, mixed as their definition says."""
    total, weight, product, rewards = 0.0, 1.0, 1.0, 0.0
    for k in range(t, len(reward)):
        rewards += product * reward[k]
        product *= discount[k]
        stops = 1.0 if k == len(reward) - 1 else 1 - lam[k]
        total += weight * stops * (rewards + product * value[k])
        weight *= lam[k]
    return total


@pytest.mark.parametrize("seed", range(5))
def test_lambda_return_equals_the_slow_twin(seed):
    generator = np.random.default_rng(seed)
    shape = int(generator.integers(1, 9)), 3
    reward, value = generator.normal(size=shape), generator.normal(size=shape)
    discount = generator.choice([0.0, 0.9, 0.99], shape)
    lam = generator.choice([0.0, 0.5, 0.95, 1.0], shape)
    found = lambda_return(*map(torch.from_numpy, (reward, discount, value, lam)))
    for t, b in np.ndindex(shape):
        columns = (array[:, b] for array in (reward, discount, value, lam))
        assert found[t, b].item() == pytest.approx(slow_lambda_return(*columns, t), abs=1e-12)


def test_lambda_return_takes_one_lambda_for_all():
    reward, discount, value = torch.randn(3, 4, 2)
    every = lambda_return(reward, discount, value, torch.full((4, 2), 0.95))
    torch.testing.assert_close(lambda_return(reward, discount, value, 0.95), every)
    one_step = reward + discount * value
    torch.testing.assert_close(lambda_return(reward, discount, value, 0.0), one_step)
