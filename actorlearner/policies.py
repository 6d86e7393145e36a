"""How a worker makes its policy and asks it what to do."""

from __future__ import annotations

import numpy as np
import torch

from actorlearner.contracts import Array, BadInput, Observation, Policy, WorkerSpec
from actorlearner.frames import FrameStack


def make_policy(spec: WorkerSpec, greedy: bool) -> Policy:
    """A policy for the streams of ``spec``."""
    # A new network draws its initial weights from torch's global generator; that of whoever runs
    # this worker must not notice.
    with torch.random.fork_rng(devices=[]):
        return spec.policy_factory(spec.env_spec, spec.streams, spec.num_streams, greedy)


def act(
    policy: Policy,
    spec: WorkerSpec,
    observation: Observation,
    stack: FrameStack,
    generator: np.random.Generator,
) -> tuple[Array, dict[str, Array]]:
    """What ``policy`` does; where it can't, because the observation is at fault, that is told.

    Raises:
        BadInput: a categorical observation is none of its categories.
    """
    try:
        return policy.act(stack.over(observation), generator)
    except Exception:
        check_categories(spec, observation)
        raise


def check_categories(spec: WorkerSpec, observation: Observation) -> None:
    """Look at the categorical parts of one row (``[B, ...]``) or of several (``[T, B, ...]``).

    Raises:
        BadInput: one is none of its categories.
    """
    for key, array_spec in spec.env_spec.observation.items():
        if not array_spec.categories:
            continue
        array = observation[key]
        limits = np.array(array_spec.categories).reshape(array_spec.shape)
        if array.min(initial=0) < 0 or (array >= limits).any():
            index = tuple(np.argwhere((array < 0) | (array >= limits))[0])
            raise BadInput(
                f"{spec.env_factory.name}: observation {key!r} is out of its space: "
                f"counted from 0 it is {array[index]}, where the space has "
                f"{np.broadcast_to(limits, array.shape)[index]} values"
            )
