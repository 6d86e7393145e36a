"""Where streams stand, and whether they go on from there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from actorlearner.adapter import EnvAdapter
from actorlearner.contracts import Unroll, WorkerSpec
from actorlearner.envs import GymEnvFactory
from actorlearner.streams import StreamLedger, assign_streams, stream_seed
from actorlearner.worker import EnvWorker
from tests.environments import Places, RowChecker, snapshot, worker_specs

PLACES = GymEnvFactory.of(Places)


def test_assign_streams():
    assert assign_streams(3, 2) == [(0, 1), (2, 3), (4, 5)]
    assert assign_streams(1, 1) == [(0,)]


def test_seeds_of_training_and_evaluation_are_apart():
    keys = [(seed, s, e) for seed in (0, 1, 2**31) for s in range(20) for e in range(20)]
    training = [stream_seed(*key) for key in keys]
    evaluation = [stream_seed(*key, evaluation=True) for key in keys]
    assert len(set(training)) == len(keys)
    assert not set(training) & set(evaluation)
    assert all(0 <= seed < 2**31 for seed in training + evaluation)
    assert training == [stream_seed(*key) for key in keys]


# ------------------------------------------------------------------ going on where it stopped


class Walk(gymnasium.Env):
    """A random walk whose steps and end depend on its seed, its actions and nothing else."""

    observation_space = spaces.Dict(
        at=spaces.Box(-np.inf, np.inf, (2,), np.float64), luck=spaces.Discrete(5, start=-2)
    )

    def __init__(self, action_space: Any) -> None:
        self.action_space = action_space
        self.at = np.zeros(2)

    def _observe(self) -> Any:
        return {"at": self.at, "luck": int(self.np_random.integers(-2, 3))}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at[:] = self.np_random.random(2)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert self.at[0] < 3, "stepped after the end"
        self.at += [self.np_random.random(), np.sum(action) + 0.5]
        return self._observe(), 1.0, bool(self.at[0] >= 3), False, {}


class Forgets(Walk):
    """Ignores its seed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=None)


class RandomPolicy:
    """Draws actions of any kind."""

    extras_spec: ClassVar = {}

    def __init__(self, env_spec: Any, streams: Any, num_streams: int, greedy: bool) -> None:
        self._spec = env_spec.action

    def load(self, snapshot: Any) -> None:
        pass

    def act(self, observation: Any, generator: np.random.Generator) -> Any:
        count = len(observation["at"])
        high = np.reshape(self._spec.categories, self._spec.shape) if self._spec.categories else 2
        draws = generator.random((count, *self._spec.shape)) * high
        return draws.astype(self._spec.dtype), {}


def lockstep(*factories: GymEnvFactory, **changes: Any) -> list[WorkerSpec]:
    """Specs as the Trainer makes them in lockstep."""
    spec = EnvAdapter(factories[0](), "env").spec
    return worker_specs(
        *factories, policy_factory=RandomPolicy, env_spec=spec, seed_every_episode=True, **changes
    )


def opened(spec: WorkerSpec, **changes: Any) -> EnvWorker:
    worker = EnvWorker(replace(spec, **changes))
    worker.open()
    return worker


def collected(worker: EnvWorker) -> Unroll:
    spec = worker.spec
    arrays = {name: array.zeros() for name, array in spec.unroll_layout.items()}
    unroll = Unroll.from_arrays(spec.index, spec.streams, arrays)
    worker.collect(snapshot(0), unroll)
    return unroll


def assert_equal(one: Unroll, other: Unroll) -> None:
    for key, array in one.observation.items():
        np.testing.assert_array_equal(array, other.observation[key], strict=True)
    for name in ("action", "reward", "terminated", "truncated", "valid", "first"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)
    for name in ("worker", "sequence", "version", "episodes"):
        assert getattr(one, name) == getattr(other, name)


def saved_and_loaded(ledger: StreamLedger, num_streams: int) -> StreamLedger:
    other = StreamLedger(num_streams, record_actions=True)
    other.load_state_dict(ledger.state_dict())
    return other


ACTION_SPACES = [
    spaces.Discrete(3),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([3, 2]),
    spaces.MultiBinary(2),
    spaces.Box(-1, 1, (2,), np.float32),
]


@settings(max_examples=60, deadline=None)
@given(
    space=st.sampled_from(ACTION_SPACES),
    seed=st.integers(0, 2**16),
    unroll_length=st.integers(1, 9),
    cut=st.integers(1, 8),
    more=st.integers(1, 3),
)
def test_goes_on_bit_equal_from_every_cut(space, seed, unroll_length, cut, more):
    """Wherever the cut falls: inside an episode, at its end, at a reset."""
    factory = GymEnvFactory.of(Walk, {"action_space": space})
    (spec,) = lockstep(factory, seed=seed, unroll_length=unroll_length)
    whole = opened(spec)
    ledger = StreamLedger(2, record_actions=True)
    for _ in range(cut):
        ledger.note(collected(whole))
    for _ in range(2):  # a second resume stands on the first
        ledger = saved_and_loaded(ledger, 2)
        first_sequence, states = ledger.going_on(spec.streams)
        resumed = opened(spec, first_sequence=first_sequence, stream_states=states)
        assert resumed.notes == []
        for _ in range(more):
            unroll = collected(whole)
            assert_equal(unroll, collected(resumed))
            ledger.note(unroll)


@pytest.mark.parametrize("cut", range(1, 15))
def test_goes_on_at_every_row_of_an_episode(cut):
    """One row after the other, with an environment that checks its own record."""
    (spec,) = worker_specs(PLACES, unroll_length=1, seed_every_episode=True)
    worker, checker = opened(spec), RowChecker(3, seed_every_episode=True)
    ledger = StreamLedger(2, record_actions=True)
    for _ in range(cut):
        unroll = collected(worker)
        checker.check(unroll)
        ledger.note(unroll)
    first_sequence, states = ledger.going_on(spec.streams)
    resumed = opened(spec, first_sequence=first_sequence, stream_states=states)
    assert resumed.notes == []
    for _ in range(20):
        checker.check(collected(resumed))


class Tells(Forgets):
    """Can be had again only from what it tells: it draws from a generator that nobody seeds."""

    given: ClassVar[list[Any]] = []
    takes = True

    def get_state(self) -> Any:
        return {"at": self.at}

    def set_state(self, state: Any) -> None:
        self.given.append(state)
        if not self.takes:
            raise RuntimeError("not today")
        self.at = state["at"]


@pytest.fixture
def tells(monkeypatch: pytest.MonkeyPatch) -> type[Tells]:
    monkeypatch.setattr(Tells, "given", [])
    monkeypatch.setattr(Tells, "takes", True)
    return Tells


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), unroll_length=st.integers(1, 9), cut=st.integers(1, 8))
def test_goes_on_from_what_its_environments_tell(seed, unroll_length, cut):
    """Also where their episodes follow from no seed: scores, resets and all."""
    (spec,) = lockstep(
        GymEnvFactory.of(Tells, {"action_space": spaces.Discrete(3)}),
        seed=seed, unroll_length=unroll_length,
    )  # fmt: skip
    whole, ledger = opened(spec), StreamLedger(2, record_actions=True)
    for _ in range(cut):
        ledger.note(collected(whole))
    ledger.note_env_states(whole.env_states())
    first_sequence, states = saved_and_loaded(ledger, 2).going_on(spec.streams)
    resumed = opened(spec, first_sequence=first_sequence, stream_states=states)
    for _ in range(20 // unroll_length):
        one, other = collected(whole), collected(resumed)
        if not one.valid.all():  # the next episodes of the two have nothing in common
            break
        assert_equal(one, other)
    assert resumed.notes == []


def test_a_state_of_another_moment_is_not_taken(tells):
    """One from before the last unroll, or from after it."""
    (spec,) = lockstep(GymEnvFactory.of(tells, {"action_space": spaces.Discrete(3)}))
    worker, ledger = opened(spec), StreamLedger(2, record_actions=True)
    assert worker.env_states() == {}  # nothing has begun
    ledger.note(collected(worker))
    early = worker.env_states()
    ledger.note_env_states(early)
    assert all(state.env_state for state in ledger.going_on(spec.streams)[1])
    unroll = collected(worker)
    ledger.note_env_states(worker.env_states())  # it has gone on, and nobody took that in
    assert all(s.env_state == early[i][1] for i, s in enumerate(ledger.going_on(spec.streams)[1]))
    ledger.note(unroll)
    ledger.note_env_states(early)
    assert not any(state.env_state for state in ledger.going_on(spec.streams)[1])


@pytest.mark.parametrize("how", ["raises", "gives another"])
def test_an_environment_that_does_not_take_its_state_back(how, tells, monkeypatch):
    """Its episodes are rebuilt; that is told once."""

    class Follows(tells):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return Walk.reset(self, seed=seed)

    if how == "gives another":
        monkeypatch.setattr(Follows, "set_state", lambda self, state: None)
    factory = GymEnvFactory.of(Follows, {"action_space": spaces.Discrete(3)})
    (spec,) = lockstep(factory, unroll_length=2)  # no episode is as short
    worker, ledger = opened(spec), StreamLedger(2, record_actions=True)
    ledger.note(collected(worker))
    ledger.note_env_states(worker.env_states())
    Follows.takes = False
    first_sequence, states = ledger.going_on(spec.streams)
    resumed = opened(spec, first_sequence=first_sequence, stream_states=states)
    for _ in range(3):
        assert_equal(collected(worker), collected(resumed))
    (note,) = resumed.notes
    assert note.startswith("Follows did not take its state back (")
    assert ("RuntimeError: not today" in note) == (how == "raises")


@pytest.mark.parametrize("gives", [object(), ZeroDivisionError("no")])
def test_an_environment_whose_state_can_not_be_had(gives, tells):
    """That is told once, and ends nothing."""

    class Odd(tells):
        def get_state(self) -> Any:
            if isinstance(gives, Exception):
                raise gives
            return gives

    (spec,) = lockstep(GymEnvFactory.of(Odd, {"action_space": spaces.Discrete(3)}))
    worker = opened(spec)
    for _ in range(2):
        collected(worker)
        assert worker.env_states() == {}
    (note,) = worker.notes
    assert note.startswith("Odd does not tell its state (")
    assert "rebuilds episodes from their actions" in note


def test_a_fresh_start():
    assert StreamLedger(4, record_actions=True).going_on((2, 3)) == (0, ())


def test_episodes_that_can_not_be_rebuilt_start_anew():
    """Once, for all streams of the worker; what the ledger says then can be rebuilt again."""

    class ForgetsOnce(Walk):
        built = 0

        def __init__(self) -> None:
            super().__init__(spaces.Discrete(3))
            ForgetsOnce.built += 1
            self.forgets = ForgetsOnce.built == 1  # only in the first slot

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return super().reset(seed=None if self.forgets else seed)

    factory = GymEnvFactory.of(ForgetsOnce)
    (spec,) = lockstep(factory, unroll_length=4)
    ForgetsOnce.built = 0
    worker, ledger = opened(spec), StreamLedger(2, record_actions=True)
    for _ in range(2):
        ledger.note(collected(worker))
    episodes = [state.episode for state in ledger.going_on((0, 1))[1]]

    first_sequence, states = ledger.going_on((0, 1))
    ForgetsOnce.built = 0
    resumed = opened(spec, first_sequence=first_sequence, stream_states=states)
    unroll = collected(resumed)
    (note,) = resumed.notes
    assert note == (
        "ForgetsOnce gave other observations when streams [0] repeated the actions of their "
        "episodes; the episodes of streams [0, 1] were started anew"
    )
    assert unroll.sequence == first_sequence + 1  # the gap
    assert unroll.first[0].all()
    ledger.note(unroll)

    first_sequence, states = ledger.going_on((0, 1))
    assert first_sequence == unroll.sequence + 1
    ends = (~unroll.valid).sum(axis=0)
    assert [s.episode for s in states] == [e + 1 + n for e, n in zip(episodes, ends, strict=True)]
    ForgetsOnce.built = 1  # now neither slot forgets: the stream that did not must be rebuilt
    again = opened(spec, first_sequence=first_sequence, stream_states=states)
    collected(again)
    (note,) = again.notes
    assert "streams [0] repeated" in note  # what it was when it forgot can't be had again


def test_rebuilding_stops_where_the_episode_ends_early():
    """An environment that refuses to be stepped after its end gets a note, not an error."""
    (spec,) = lockstep(GymEnvFactory.of(Forgets, {"action_space": spaces.Discrete(3)}))
    ended_early = 0
    for seed in range(30):
        worker, ledger = opened(spec, seed=seed), StreamLedger(2, record_actions=True)
        for _ in range(1 + seed % 3):
            ledger.note(collected(worker))
        first_sequence, states = ledger.going_on((0, 1))
        resumed = opened(spec, seed=seed, first_sequence=first_sequence, stream_states=states)
        assert collected(resumed).sequence == first_sequence + 1
        ended_early += len(resumed.notes)
    assert ended_early >= 30


def test_without_actions_episodes_start_anew():
    """As outside lockstep: with a gap, and a seed that was not used before."""
    (spec,) = worker_specs(PLACES)
    worker, ledger = opened(spec), StreamLedger(2, record_actions=False)
    unroll = collected(worker)
    ledger.note(unroll)
    first_sequence, states = ledger.going_on((0, 1))
    assert first_sequence == unroll.sequence + 2
    assert [s.episode for s in states] == [1 + n for n in (~unroll.valid).sum(axis=0)]
    resumed = opened(spec, first_sequence=first_sequence, stream_states=states)
    unroll = collected(resumed)
    assert unroll.first[0].all()
    seeds = unroll.observation["observation"][0, :, 0].tolist()
    assert seeds == [stream_seed(3, s, states[s].episode) for s in (0, 1)]
    ledger.note(unroll)
    assert [s.episode for s in ledger.going_on((0, 1))[1]] == [
        states[s].episode + int((~unroll.valid[:, s]).sum()) + 1 for s in (0, 1)
    ]


def test_streams_that_changed_workers_start_anew():
    one, two = worker_specs(PLACES, PLACES, envs_per_worker=1, seed_every_episode=True)
    ledger = StreamLedger(2, record_actions=True)
    for spec, count in ((one, 1), (two, 3)):
        worker = opened(spec)
        for _ in range(count):
            ledger.note(collected(worker))
    first_sequence, states = ledger.going_on((0, 1))  # both to one worker
    assert first_sequence == 4  # a gap for both, whose next would have been 1 and 3
    assert all(state.actions is None for state in states)
    assert ledger.going_on((0,))[0] == 1  # alone, each goes on


def test_more_streams_than_were_saved():
    (spec,) = worker_specs(PLACES, envs_per_worker=1, seed_every_episode=True)
    ledger, worker = StreamLedger(1, record_actions=True), opened(spec)
    ledger.note(collected(worker))
    larger = saved_and_loaded(ledger, 3)
    assert larger.going_on((1, 2)) == (0, ())
    assert larger.going_on((0,))[0] == 1
    smaller = saved_and_loaded(larger, 1)
    assert smaller.going_on((0,))[0] == 1


def test_lockstep_after_a_run_without():
    """Nothing was recorded, so nothing can be rebuilt; a record of earlier must not be used."""
    (spec,) = worker_specs(PLACES, seed_every_episode=True)
    worker, recording = opened(spec), StreamLedger(2, record_actions=True)
    recording.note(collected(worker))
    plain = StreamLedger(2, record_actions=False)
    plain.load_state_dict(recording.state_dict())
    for _ in range(3):
        plain.note(collected(worker))
    first_sequence, states = saved_and_loaded(plain, 2).going_on((0, 1))
    assert first_sequence == 5  # 3 was the last
    assert all(state.actions is None for state in states)


def test_a_lost_unroll_starts_streams_anew():
    (spec,) = worker_specs(PLACES, seed_every_episode=True)
    worker, ledger = opened(spec), StreamLedger(2, record_actions=True)
    unrolls = [collected(worker) for _ in range(3)]
    ledger.note(unrolls[0])
    before = [state.episode for state in ledger.going_on((0, 1))[1]]
    ledger.note(unrolls[2])
    resets = (~unrolls[2].valid).sum(axis=0)
    after = [state.episode for state in ledger.going_on((0, 1))[1]]
    assert after == [b + 1 + n for b, n in zip(before, resets, strict=True)]
