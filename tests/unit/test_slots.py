"""What ended in an unroll, as a worker writes it to its slot and the learner reads it."""

from __future__ import annotations

import pytest

from actorlearner.contracts import Episode, Episodes
from actorlearner.envs import GymEnvFactory
from actorlearner.launch._child import Slot
from tests.environments import Places, worker_specs

PLAIN = [Episode(3, 0, 1.5, 4), Episode(1, 7, -2.0, 9)]
TOLD = (("success", 1.0), ("is_success", 0.0))


@pytest.mark.parametrize(
    ("episodes", "lives"),
    [
        ([], []),
        (PLAIN, []),
        (PLAIN, [Episode(2, 5, 0.25, 1)]),
        ([Episode(0, 1, 2.0, 3, TOLD), *PLAIN, Episode(4, 6, 0.0, 1, TOLD[1:])], PLAIN),
    ],
)
def test_what_ended_comes_out_as_it_went_in(episodes, lives):
    spec = worker_specs(GymEnvFactory.of(Places), envs_per_worker=5)[0]
    assert spec.env_factory.info_metrics == tuple(name for name, _ in TOLD)
    slot = Slot(spec, {name: array.zeros() for name, array in Slot.layout(spec).items()})
    names = spec.env_factory.info_metrics
    slot.unroll.episodes = Episodes.of(episodes, names)
    slot.unroll.lives = Episodes.of(lives, names)
    unroll = slot.view(slot.commit(0, cores=0.5))
    assert unroll.episodes == episodes
    assert unroll.lives == lives
    assert all(type(e.stream) is type(e.length) is int for e in unroll.episodes)
