"""Tests of `actorlearner.returns`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorlearner.returns import n_step


def slow_n_step(rewards, terminated, inside, gamma):
    """The definition for one window, row by row."""
    total, steps, discount = 0.0, 0, 1.0
    for reward, ends, is_inside in zip(rewards, terminated, inside, strict=True):
        if not is_inside:
            break
        total += gamma**steps * reward
        steps += 1
        discount = gamma**steps
        if ends:
            discount = 0.0
            break
    return total, discount, steps


def one_window(rewards, terminated, inside):
    """`n_step` of a single window at gamma 0.5."""
    columns = np.float32(rewards), np.array(terminated, bool), np.array(inside, bool)
    return tuple(float(x[0]) for x in n_step(*(c[:, None] for c in columns), 0.5))


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
    returns, discounts, steps = n_step(reward, terminated, inside, gamma)
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
        windows = np.arange(length) + np.arange(n)[:, None]
        returns, discounts, steps = n_step(
            reward[windows], terminated[windows], inside[windows], gamma
        )
        for start in range(length):
            left = rewards[start : start + n]
            cut = ends_truly and start + n >= length
            expected = sum(gamma**i * float(r) for i, r in enumerate(left))
            assert steps[start] == len(left)
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


def test_dtypes_and_inputs_left_alone():
    """Float32 for the learner, an integer to index with, and no argument is written to."""
    reward, terminated = np.ones((3, 2), np.float32), np.zeros((3, 2), bool)
    terminated[0] = True
    inside = np.ones((3, 2), bool)
    returns, discounts, steps = n_step(reward, terminated, inside, 0.99)
    assert returns.dtype == discounts.dtype == np.float32
    assert np.issubdtype(steps.dtype, np.integer)
    assert inside.all()
    assert returns.shape == discounts.shape == steps.shape == (2,)
