"""Tests of `actorlearner.sum_tree`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorlearner.sum_tree import SumTree

CHI_SQUARED_255 = 330.5
"""Upper 1e-3 point of the chi-squared distribution with 255 degrees of freedom."""


def slow_find(priorities, prefix):
    """The first index at which the running sum exceeds ``prefix``, else the last with priority."""
    total = 0.0
    for index, priority in enumerate(priorities):
        total += priority
        if total > prefix:
            return index
    return max(index for index, priority in enumerate(priorities) if priority > 0)


def prefixes(tree, uniform):
    """What the running sums of priorities have to exceed."""
    return (np.arange(len(uniform)) + uniform) * (tree.total / len(uniform))


def find(tree, prefix):
    """The leaf at which the running sum exceeds each of ``prefix``, by itself."""
    return np.concatenate([tree.draw(np.array([p / tree.total])) for p in prefix])


def filled(priorities):
    """A tree of ``priorities``."""
    tree = SumTree(len(priorities))
    tree.set(np.arange(len(priorities)), np.asarray(priorities, float))
    return tree


@settings(max_examples=100, deadline=None)
@given(
    # Around one node, around one level, and beyond.
    capacity=st.sampled_from([1, 2, 7, 8, 9, 63, 64, 65, 511, 512, 513, 1100]),
    seed=st.integers(0, 2**32 - 1),
    rounds=st.integers(1, 4),
)
def test_equals_a_list(capacity, seed, rounds):
    """Sets with duplicates, then draws, against a plain list. Integers, so that sums are exact."""
    generator = np.random.default_rng(seed)
    tree, reference = SumTree(capacity), [0] * capacity
    for _ in range(rounds):
        indices = generator.integers(capacity, size=20)
        priorities = generator.integers(0, 5, size=20).astype(float)
        tree.set(indices, priorities)
        for index, priority in zip(indices, priorities, strict=True):
            reference[index] = priority
        tree.check_valid()
        assert tree.leaves.tolist() == reference
        assert tree.total == sum(reference)
        if tree.total > 0:
            uniform = generator.random(30)
            uniform[-1] = 1.5  # beyond the total
            expected = [slow_find(reference, p) for p in prefixes(tree, uniform)]
            assert tree.draw(uniform).tolist() == expected
            # Between two leaves, or next to that by rounding.
            for border in range(int(tree.total) + 1):
                alone = np.array([border / tree.total])
                expected = [slow_find(reference, p) for p in prefixes(tree, alone)]
                assert tree.draw(alone).tolist() == expected


def test_last_of_duplicates_wins():
    """One `set` may name a leaf many times."""
    tree = SumTree(50)
    tree.set(np.array([7, 3, 7, 7, 3]), np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert tree.leaves[[3, 7]].tolist() == [5.0, 4.0]
    assert tree.total == 9.0
    tree.check_valid()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_frequencies(alpha):
    """Chi-squared over 256 leaves: each is found as often as its priority says."""
    generator, draws = np.random.default_rng(3), 200_000
    tree = filled(generator.uniform(0.1, 2.0, size=256) ** alpha)
    expected = tree.leaves / tree.total * draws
    counts = np.zeros(256)
    for _ in range(draws // 40):  # parts end within leaves
        counts += np.bincount(tree.draw(generator.random(40)), minlength=256)
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARED_255


@pytest.mark.parametrize(("capacity", "used"), [(4096, 4096), (5000, 2500)])
def test_leaf_without_priority_is_never_found(capacity, used):
    """A million draws, full and half full, with priorities over nine orders of magnitude."""
    generator = np.random.default_rng(4)
    priorities = np.zeros(capacity)
    priorities[:used] = 10 ** generator.uniform(-6, 3, size=used)
    priorities[generator.random(capacity) < 0.3] = 0
    tree = filled(priorities)
    for _ in range(10):
        assert (priorities[tree.draw(generator.random(100_000))] > 0).all()
        # Next to and above the borders, where rounding could step over.
        prefix = generator.choice(np.cumsum(priorities), 10_000)
        prefix[:4] = 0.0, np.nextafter(tree.total, 0), tree.total, np.nextafter(tree.total, np.inf)
        assert (priorities[find(tree, prefix)] > 0).all()


def test_at_or_above_the_total_stands_the_last_leaf_with_priority():
    """The last leaf of the tree and of its node may both be empty."""
    tree = SumTree(100)
    tree.set(np.array([3, 40]), np.array([0.1, 0.2]))
    assert [int(tree.draw(np.array([u]))[0]) for u in (1.0, np.inf, 0.0)] == [40, 40, 3]


def test_no_drift():
    """After 100,000 sets, a third of them to nothing, the total is still the sum of the leaves."""
    generator = np.random.default_rng(5)
    tree = SumTree(5000)
    for _ in range(2_000):
        priorities = 10 ** generator.uniform(-6, 3, size=50) * (generator.random(50) > 1 / 3)
        tree.set(generator.integers(5000, size=50), priorities)
    exact = np.sum(tree.leaves, dtype=np.longdouble)
    assert abs(tree.total - exact) / exact < 1e-9
    tree.check_valid()


def test_every_leaf_gets_its_share():
    """Four equal leaves, a quarter each: the newest one, too."""
    generator = np.random.default_rng(6)
    tree = filled([1, 1, 1, 1])
    counts = np.bincount([int(tree.draw(u)[0]) for u in generator.random((20_000, 1))])
    assert np.all(np.abs(counts / 20_000 - 0.25) < 0.02)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_refuses_a_bad_priority(bad):
    """Named in the error, and nothing has changed."""
    tree = filled([1, 2, 3])
    with pytest.raises(ValueError, match=f"priority={bad}"):
        tree.set(np.array([0, 1]), np.array([5.0, bad]))
    assert tree.leaves.tolist() == [1, 2, 3]
    tree.check_valid()


@pytest.mark.parametrize("bad", [-1, 3, 31])
def test_refuses_an_index_out_of_range(bad):
    """Also one that the padding up to a full node would take, and a negative one."""
    tree = filled([1, 2, 3])
    with pytest.raises(IndexError, match="3"):
        tree.set(np.array([0, bad]), np.array([5.0, 5.0]))
    assert tree.total == 6.0


def test_refuses_another_number_of_priorities_than_of_indices():
    """Or compiled code would read what lies behind them."""
    tree = filled([1, 2, 3])
    with pytest.raises(ValueError, match=r"\(1,\) priorities for \(2,\) indices"):
        tree.set(np.array([0, 1]), np.array([5.0]))
    assert tree.total == 6.0


def test_refuses_what_cannot_be_found():
    """An empty tree, and what is no number from 0 up."""
    with pytest.raises(ValueError, match="no priority above 0"):
        SumTree(3).draw(np.array([0.0]))
    for bad in (-0.1, np.nan):
        with pytest.raises(ValueError, match="uniform"):
            filled([1, 2]).draw(np.array([bad]))


def test_refuses_no_capacity():
    """A tree has a leaf."""
    with pytest.raises(ValueError, match="capacity=0"):
        SumTree(0)


def test_setting_nothing_changes_nothing():
    """Feedback may be all stale."""
    tree = filled([1, 2])
    tree.set(np.empty(0, np.int64), np.empty(0))
    assert tree.total == 3.0


def test_check_valid_notices_a_wrong_parent():
    """The check that other tests lean on can fail."""
    tree = filled(np.ones(100))
    tree._levels[0][1, 1] = 2.0
    with pytest.raises(AssertionError):
        tree.check_valid()
