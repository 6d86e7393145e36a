"""Unrolls of random episodes in which every number says where it came from.

The observation is ``(stream, episode, step)``; action, reward, values and frame stack follow from
it. So a test can take any transition apart and tell what it should have been.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from actorlearner.contracts import ArraySpec, EnvSpec, Unroll

NUM_ACTIONS = 5

ENV_SPEC = EnvSpec(
    name="Scripted",
    observation={"where": ArraySpec((3,), "int32"), "step": ArraySpec((), "uint8")},
    action=ArraySpec((), "int32", (NUM_ACTIONS,)),
)
"""Observations of two keys and dtypes; ``step`` repeats ``where[2]``."""

EXTRAS = {name: ArraySpec((), "float32") for name in ("action_value", "greedy_value")}
"""What the policy notes of every row: see `scripted_values`."""

LATENTS = {"latent": ArraySpec((2,), "int16")}
"""What it notes besides: see `scripted_latent`."""


def stacked_spec(stack: int) -> EnvSpec:
    """`ENV_SPEC` with ``where`` in stacks of ``stack`` and ``step`` in smaller ones, if any."""
    stacks = {"where": stack, "step": max(1, stack - 1)}
    observation = {k: replace(s, stack=stacks[k]) for k, s in ENV_SPEC.observation.items()}
    return replace(ENV_SPEC, observation=observation)


def scripted_stack(where: Sequence[int], stack: int) -> list[tuple[int, ...]]:
    """The frames that a stack ends at ``where`` with, in the order in which they are seen."""
    stream, episode, step = where
    return [(stream, episode, max(0, step - back)) for back in reversed(range(stack))]


def scripted_action(stream: int, episode: int, step: int) -> int:
    """The action taken at an observation."""
    return (stream + 3 * episode + step) % NUM_ACTIONS


def scripted_reward(stream: int, episode: int, step: int) -> float:
    """The reward paid there: from -4.75 to 5.25, hardly ever twice the same in an episode."""
    return (7 * stream + 5 * episode + 3 * step) % 11 - 4.75


def scripted_values(stream: int, episode: int, step: int) -> tuple[float, float]:
    """What the policy thinks there of its action, and of the best one."""
    number = 5 * stream + 3 * episode + 7 * step
    return number % 13 / 4 - 1, number % 17 / 4 - 2


def scripted_latent(stream: int, episode: int, step: int) -> tuple[int, int]:
    """What the policy remembers there."""
    return 1000 * stream + episode, -step


@dataclass
class _Place:
    """Where one stream stands."""

    episode: int = 0
    step: int = 0
    length: int = 0
    at_end: bool = False


class ScriptedWorker:
    """A worker of streams whose episodes have random lengths and ends.

    An episode is terminated, truncated or both; some valid rows are terminated by a life loss,
    after which the episode goes on without a reset row.
    """

    def __init__(
        self,
        streams: Sequence[int],
        unroll_length: int,
        seed: int = 0,
        *,
        worker: int = 0,
        max_episode_length: int = 12,
        life_loss: float = 0.1,
        first_sequence: int = 0,
        first_episode: int = 0,
    ) -> None:
        """A worker at the start of an episode in each of ``streams``.

        Args:
            streams: global indices of its streams.
            unroll_length: rows in an unroll.
            seed: of the lengths and ends.
            worker: its index.
            max_episode_length: episodes have 1 to this many env steps.
            life_loss: probability of a life loss in a row.
            first_sequence: number of the first unroll.
            first_episode: number of the first episode of each stream.
        """
        self.worker = worker
        self.streams = np.asarray(streams, np.int64)
        self.unroll_length = unroll_length
        self.max_episode_length = max_episode_length
        self.life_loss = life_loss
        self.sequence = first_sequence
        self._generator = np.random.default_rng(seed)
        self._places = [_Place(first_episode, 0, self._draw_length()) for _ in self.streams]

    def unroll(self) -> Unroll:
        """The next unroll; one that isn't added to a store is a gap in its streams."""
        specs = Unroll.layout(ENV_SPEC, self.unroll_length, len(self.streams), EXTRAS | LATENTS)
        arrays = {name: spec.zeros() for name, spec in specs.items()}
        unroll = Unroll.from_arrays(self.worker, self.streams, arrays)
        for column, (stream, place) in enumerate(zip(self.streams, self._places, strict=True)):
            for row in range(self.unroll_length):
                self._fill_row(unroll, row, column, int(stream), place)
            self._observe(unroll, self.unroll_length, column, int(stream), place)
        unroll.sequence = self.sequence
        self.sequence += 1
        return unroll

    def restart(self) -> None:
        """Die and start anew: other episodes in every stream, and a gap in the sequence."""
        self.sequence += 1
        for place in self._places:
            self._start_episode(place)

    def _fill_row(self, unroll: Unroll, row: int, column: int, stream: int, place: _Place) -> None:
        self._observe(unroll, row, column, stream, place)
        values = scripted_values(stream, place.episode, place.step)
        for name, value in zip(EXTRAS, values, strict=True):
            unroll.extras[name][row, column] = value
        unroll.extras["latent"][row, column] = scripted_latent(stream, place.episode, place.step)
        if place.at_end:
            # An action that must be ignored, so that a test sees it if it isn't.
            unroll.action[row, column] = NUM_ACTIONS - 1
            self._start_episode(place)
            return
        where = stream, place.episode, place.step
        last = place.step + 1 == place.length
        end = self._generator.choice(["terminated", "truncated", "both"])
        lost_life = self._generator.random() < self.life_loss
        unroll.valid[row, column] = True
        unroll.first[row, column] = place.step == 0
        unroll.action[row, column] = scripted_action(*where)
        unroll.reward[row, column] = scripted_reward(*where)
        unroll.terminated[row, column] = end != "truncated" if last else lost_life
        unroll.truncated[row, column] = last and end != "terminated"
        place.step += 1
        place.at_end = last

    def _observe(self, unroll: Unroll, row: int, column: int, stream: int, place: _Place) -> None:
        unroll.observation["where"][row, column] = stream, place.episode, place.step
        unroll.observation["step"][row, column] = place.step

    def _start_episode(self, place: _Place) -> None:
        place.episode += 1
        place.step = 0
        place.length = self._draw_length()
        place.at_end = False

    def _draw_length(self) -> int:
        return int(self._generator.integers(1, self.max_episode_length + 1))
