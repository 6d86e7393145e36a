"""The numbers of joint actions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actorlearner.contracts import ArraySpec
from actorlearner.joint_actions import JointActions


@settings(max_examples=50, deadline=None)
@given(categories=st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple))
def test_they_count_all_combinations_in_order(categories: tuple[int, ...]) -> None:
    """The slow twin: a list of all combinations, the last part fastest."""
    actions = JointActions(ArraySpec((len(categories),), "int64", categories))
    twin = list(itertools.product(*map(range, categories)))
    assert actions.count == len(twin) == math.prod(categories)
    vectors = actions.action(np.arange(actions.count))
    assert vectors.dtype == np.int64
    assert list(map(tuple, vectors.tolist())) == twin
    numbers = actions.number(torch.from_numpy(vectors))
    assert numbers.dtype == torch.int64
    assert numbers.tolist() == list(range(actions.count))


@pytest.mark.parametrize(
    "spec",
    [
        ArraySpec((10,), "int8", (2,) * 10),  # MultiBinary(10)
        ArraySpec((2, 2), "int64", (2, 3, 4, 5)),  # MultiDiscrete of a matrix
        ArraySpec((1,), "int32", (7,)),
        ArraySpec((), "int64", (7,)),  # Discrete
    ],
    ids=str,
)
def test_actions_are_as_the_spec_says(spec: ArraySpec) -> None:
    actions = JointActions(spec)
    number = np.random.default_rng(0).integers(actions.count, size=50)
    vectors = actions.action(number)
    assert (vectors.shape, vectors.dtype) == ((50, *spec.shape), np.dtype(spec.dtype))
    back = actions.number(torch.from_numpy(vectors))
    assert back.tolist() == number.tolist()


def test_a_discrete_action_is_its_own_number() -> None:
    actions = JointActions(ArraySpec((), "int64", (7,)))
    tensor, array = torch.arange(7), np.arange(7)
    assert actions.number(tensor) is tensor
    assert actions.action(array) is array
