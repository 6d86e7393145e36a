"""Tests of `actorlearner.replay`."""

from __future__ import annotations

import logging
import re
import tracemalloc
from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actorlearner.contracts import (
    ArraySpec,
    BadInput,
    CheckpointError,
    EnvSpec,
    NonFiniteError,
    SampleSpec,
    SequenceSpec,
    SettingError,
    StreamLayout,
    Unroll,
)
from actorlearner.replay import ReplayBuffer
from tests.saved import saved
from tests.scripted import (
    ENV_SPEC,
    EXTRAS,
    LATENTS,
    ScriptedWorker,
    scripted_action,
    scripted_reward,
    scripted_stack,
    stacked_spec,
)
from tests.unit.test_sum_tree import CHI_SQUARED_255

GAMMA = 0.9


def make_buffer(
    num_streams=2,
    unroll_length=4,
    *,
    n_step=3,
    batch_size=64,
    reward_clip=None,
    planned=100,
    stack=1,
    length=None,
    **more,
):
    """A built buffer of the scripted environment; uniform, 20 unrolls of each stream.

    Of sequences of ``length``, if there is one.
    """
    more = {"prioritized": False, "capacity": 20 * num_streams * unroll_length} | more
    buffer = ReplayBuffer(**more)
    spec = SampleSpec(batch_size, n_step=n_step, gamma=GAMMA, reward_clip=reward_clip)
    if length is not None:
        spec = SequenceSpec(batch_size, length, LATENTS)
    buffer.build(stacked_spec(stack), spec, StreamLayout(num_streams, unroll_length), planned)
    return buffer


def add_unrolls(buffer, worker, count):
    """Let ``worker`` make ``count`` unrolls and store them."""
    for _ in range(count):
        buffer.add(worker.unroll())


def places(observation, rows=slice(None)):
    """Where ``rows`` of a batch were seen: ``(stream, episode, step)``, of stacks the newest."""
    where = observation["where"][rows]
    return [tuple(w) for w in (where[:, -1] if where.ndim == 3 else where).tolist()]


def starts(batch):
    """Where each transition starts."""
    return places(batch.observation)


# ------------------------------------------------------------------------ the slow obvious twin


class Transition(NamedTuple):
    """What a transition should be."""

    action: int
    reward: float
    discount: float
    end: tuple[int, int, int]


class SlowReplay:
    """The store as lists: chains of rows, and a queue of the blocks that are still there.

    Attributes:
        blocks: ``(rows of the chain, begin, end)``; no rows for the observation behind a chain.
        chains: the newest of each stream.
        highest: the highest priority seen.
        windows: new sequences, each as its chain and its position there.
    """

    def __init__(self, num_blocks: int, stack: int = 1, length: int | None = None) -> None:
        """Room for ``num_blocks`` columns of unrolls.

        Stacks of ``stack`` are drawn of them, or sequences of ``length`` rows behind their first.
        """
        self.length = length
        self.windows: deque[tuple[list, int]] = deque()
        self.blocks: deque[tuple[list, int, int]] = deque(maxlen=num_blocks)
        self.chains: dict[int, dict] = {}
        self.highest = 1.0
        self._stack = stack

    def add(self, unroll: Unroll) -> None:
        """Copy ``unroll`` to the end of its streams' chains, or to new ones after a gap."""
        streams = unroll.streams.tolist()
        chains = [self.chains.get(stream) for stream in streams]
        self._end([chain for chain in chains if chain and chain["next"] != unroll.sequence])
        windows = []
        for column, stream in enumerate(streams):
            chain = self.chains.get(stream)
            if not chain or chain["next"] != unroll.sequence:
                chain = self.chains[stream] = {"rows": [], "end": []}
            begin = len(chain["rows"])
            for row in range(unroll.num_rows):
                extras = {name: float(unroll.extras[name][row, column]) for name in EXTRAS}
                chain["rows"].append(
                    {
                        "where": tuple(unroll.observation["where"][row, column].tolist()),
                        "reward": float(unroll.reward[row, column]),
                        "terminated": bool(unroll.terminated[row, column]),
                        "valid": bool(unroll.valid[row, column]),
                        "truncated": bool(unroll.truncated[row, column]),
                        "first": bool(unroll.first[row, column]),
                        "latent": tuple(unroll.extras["latent"][row, column].tolist()),
                        "end": chain["end"],
                        "priority": self.highest,
                        "waits": True,
                        **extras,
                    }
                )
            chain["end"][:] = [tuple(unroll.observation["where"][-1, column].tolist())]
            chain["next"] = unroll.sequence + 1
            self.blocks.append((chain["rows"], begin, len(chain["rows"])))
            if self.length is not None:
                ends = range(self.length, len(chain["rows"]), self.length)
                windows += [(end - begin, column, end) for end in ends if end >= begin]
        for _, column, end in sorted(windows):
            self.windows.append((self.chains[streams[column]]["rows"], end - self.length))

    def end_all(self) -> None:
        """No stream goes on."""
        self._end([self.chains[stream] for stream in sorted(self.chains)])
        self.chains.clear()

    def _end(self, chains: list[dict]) -> None:
        """The last observation of each of ``chains`` takes a block, if its last row is stored."""
        stored = self._stored()
        self.blocks.extend(([], 0, 0) for c in chains if id(c["rows"][-1]) in stored)

    def _stored(self) -> set[int]:
        """Names of the rows that are there."""
        return {id(row) for rows, begin, end in self.blocks for row in rows[begin:end]}

    def drawable(self) -> list[tuple[list, int]]:
        """Each row that can be drawn, as its chain and its position there.

        A valid one, of whose stack every frame is there.
        """
        stored, found = self._stored(), []
        for rows, begin, end in self.blocks:
            for start in range(begin, end):
                older = range(start - min(rows[start]["where"][2], self._stack - 1), start)
                whole = all(i >= 0 and id(rows[i]) in stored for i in older)
                begins = rows[start]["valid"]
                if self.length is not None:
                    begins = start + self.length < len(rows)
                if begins and whole:
                    found.append((rows, start))
        return found

    def take_windows(self, count: int) -> list[tuple[int, int, int]]:
        """Where the oldest windows begin, up to ``count``, without those that are there no more."""
        drawable = {id(rows[start]) for rows, start in self.drawable()}
        taken = []
        while self.windows and len(taken) < count:
            rows, start = self.windows.popleft()
            if id(rows[start]) in drawable:
                taken.append(rows[start]["where"])
        return taken

    def stored_rows(self) -> dict[tuple[int, int, int], dict]:
        """The rows that are there, by where they are."""
        return {row["where"]: row for rows, b, e in self.blocks for row in rows[b:e]}

    def transitions(self, n: int) -> dict[tuple[int, int, int], Transition]:
        """All that can be drawn, by where they start."""
        found = {}
        for rows, start in self.drawable():
            assert rows[start]["where"] not in found
            found[rows[start]["where"]] = self._transition(rows, start, n)
        return found

    @staticmethod
    def _transition(rows, start: int, n: int) -> Transition:
        reward, discount, position = 0.0, 1.0, start
        while position < min(start + n, len(rows)) and rows[position]["valid"]:
            reward += discount * rows[position]["reward"]
            discount *= GAMMA
            position += 1
            if rows[position - 1]["terminated"]:
                discount = 0.0
                break
        end = rows[position]["where"] if position < len(rows) else rows[start]["end"][0]
        return Transition(scripted_action(*rows[start]["where"]), reward, discount, end)

    def prioritise_by_actor(self, n: int, clip: float | None) -> None:
        """Give each row whose window is complete by now, for the first time, the actor's error."""
        for rows, start in self.drawable():
            error = self._actor_error(rows, start, n, clip)
            if rows[start]["waits"] and error is not None:
                rows[start]["waits"] = False
                self.set_priority(rows[start], error)

    def set_priority(self, row: dict, error: float) -> None:
        """Of an absolute TD error."""
        row["priority"] = error + 1e-6
        self.highest = max(self.highest, row["priority"])

    @staticmethod
    def _actor_error(rows, start: int, n: int, clip: float | None) -> float | None:
        target, discount, position = 0.0, 1.0, start
        while position < start + n and rows[position]["valid"]:
            reward = rows[position]["reward"]
            target += discount * (reward if clip is None else max(-clip, min(clip, reward)))
            discount *= GAMMA
            if rows[position]["terminated"]:
                return abs(target - rows[start]["action_value"])
            position += 1
            if position == len(rows):
                return None  # nobody has said what the next observation is worth
        target += discount * rows[position]["greedy_value"]
        return abs(target - rows[start]["action_value"])


def check_all_transitions(
    buffer: ReplayBuffer, twin: SlowReplay, n: int, stack: int = 1
) -> dict[int, tuple[int, int, int]]:
    """Draw until everything has been seen; compare every transition with the twin's.

    Returns:
        Where each row is, by its key.
    """
    expected = twin.transitions(n)
    assert buffer.metrics()["size"] == len(expected)
    if not expected:
        assert not buffer.ready()
        return {}
    batch = buffer.sample()
    # Missing one of k rows in so many draws has a chance of about k * exp(-batch / k).
    assert len(batch.keys) >= 25 * len(expected)
    seen, first = np.unique(batch.keys, return_index=True)
    assert len(seen) == len(expected)
    begins, ends = places(batch.observation, first), places(batch.next_observation, first)
    wanted = [expected[where] for where in begins]
    assert ends == [transition.end for transition in wanted]
    for name, tolerance in {"action": 0, "reward": 1e-5, "discount": 1e-6}.items():
        got = getattr(batch, name).numpy()[first]
        np.testing.assert_allclose(
            got, [getattr(transition, name) for transition in wanted], tolerance, tolerance, name
        )
    for observation, here in ((batch.observation, begins), (batch.next_observation, ends)):
        for key, spec in stacked_spec(stack).observation.items():
            stacks = np.array([scripted_stack(where, spec.stack) for where in here])
            frames = stacks if key == "where" else stacks[..., 2]
            seen_there = observation[key].numpy()[first]
            assert np.array_equal(seen_there, frames.reshape(len(here), *spec.stacked_shape))
    # Independent of the twin: one stream, one episode, and 1 to n steps on.
    for where, end in zip(begins, ends, strict=True):
        assert end[:2] == where[:2]
        assert 1 <= end[2] - where[2] <= n
    return dict(zip(seen.tolist(), begins, strict=True))


# ------------------------------------------------------------------------------- transitions


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize(
    ("unroll_length", "stack"), [(1, 1), (1, 2), (2, 1), (2, 3), (4, 1), (4, 3), (7, 1), (7, 8)]
)
def test_transitions_equal_the_twin(n, unroll_length, stack, prioritized):
    """Borders of unrolls, wraps of the ring, truncations, terminations, life losses, gaps.

    Unrolls shorter and longer than n, stacks as long as unrolls allow, and two workers, one of
    them slow: its newest block is overwritten before it goes on.
    """
    capacity = 4 * 3 * unroll_length + 1  # not a multiple of anything
    buffer = make_buffer(
        3,
        unroll_length,
        n_step=n,
        batch_size=4096,
        capacity=capacity,
        prioritized=prioritized,
        stack=stack,
    )
    twin = SlowReplay(capacity // unroll_length, stack)
    workers = [
        ScriptedWorker([2, 0], unroll_length, seed=1),
        ScriptedWorker([1], unroll_length, seed=2, worker=1),
    ]
    for turn in range(40):
        worker = workers[turn % 13 == 0]
        if turn % 9 == 4:
            worker.restart()
        if turn % 11 == 7:
            worker.unroll()  # lost
        unroll = worker.unroll()
        buffer.add(unroll)
        twin.add(unroll)
        buffer.check_valid()
        check_all_transitions(buffer, twin, n, stack)


class World:
    """A buffer, its twin and two workers, to which anything may happen.

    Worker 0 has stream 0, worker 1 the others.
    """

    def __init__(
        self, num_blocks: int, unroll_length: int, seed: int, stack: int = 1, **more
    ) -> None:
        """Three streams."""
        self._length, self._stack = unroll_length, stack
        self._more = {"batch_size": 4096, "capacity": num_blocks * unroll_length} | more
        self.twin = SlowReplay(num_blocks, stack, more.get("length"))
        self._seed, self._lives = seed, 0
        self._sequences = [0, 0]
        self._start(3)

    def _start(self, num_streams: int) -> None:
        self.num_streams = num_streams
        self.buffer = make_buffer(num_streams, self._length, stack=self._stack, **self._more)
        self._workers = [
            ScriptedWorker(
                streams,
                self._length,
                seed=self._seed + 10 * self._lives + worker,
                worker=worker,
                first_sequence=self._sequences[worker],
                first_episode=1000 * self._lives,
            )
            for worker, streams in enumerate(([0], range(1, num_streams)))
        ]
        self._lives += 1

    def do(self, operation: str) -> None:
        """Do it to the buffer and to the twin."""
        verb, _, index = operation.partition(" ")
        if verb == "reload":
            self._reload(int(index) or self.num_streams)
            return
        for worker in (self._workers[int(i)] for i in index):
            if verb == "restart":
                worker.restart()
            elif verb == "lose":
                worker.unroll()
            elif len(worker.streams):
                unroll = worker.unroll()
                self.buffer.add(unroll)
                self.twin.add(unroll)
                if self.buffer.extras:
                    self.twin.prioritise_by_actor(self._more["n_step"], self._more["reward_clip"])
                self.buffer.check_valid()

    def _reload(self, num_streams: int) -> None:
        """Go on in a new buffer; with the same number of streams nothing else has changed."""
        state = saved(self.buffer)
        if num_streams == self.num_streams:
            self.buffer = make_buffer(num_streams, self._length, stack=self._stack, **self._more)
        else:
            # The numbers go on like the old worker's: nothing may be linked all the same.
            self._sequences = [worker.sequence for worker in self._workers]
            self._start(num_streams)
            self.twin.end_all()
        self.buffer.load_state_dict(state)


OPERATIONS = [
    *("add 01", "add 000", "add 1", "add 111", "lose 0", "lose 1", "restart 1", "learn"),
    *("reload 0", "reload 1", "reload 2", "reload 3"),
]


@settings(max_examples=150, deadline=None)
@example(["add 01", "add 000", "reload 1"], 0, 1, 0, 0, False)  # the oldest block has no next
@example(["add 0000000", "add 1"], 0, 3, 0, 0, True)  # overwritten together with its next one
@given(
    operations=st.lists(
        st.sampled_from(OPERATIONS),
        min_size=3,
        max_size=40,
    ),
    seed=st.integers(0, 1000),
    stack=st.integers(1, 4),
    extra_rows=st.integers(0, 4),
    extra_blocks=st.integers(0, 6),
    prioritized=st.booleans(),
)
def test_random_operations(operations, seed, stack, extra_rows, extra_blocks, prioritized):
    """Whatever happens in whatever order, every invariant holds and every transition is right.

    Feedback for rows that are overwritten, or cut off from the frames of their stacks, is stale.
    """
    unroll_length = max(1, stack - 1) + extra_rows
    world = World(6 + extra_blocks, unroll_length, seed, stack, prioritized=prioritized)
    generator = np.random.default_rng(seed)
    known: dict[int, tuple[int, int, int]] = {}
    for operation in [*operations, "learn"]:
        if operation != "learn":
            world.do(operation)
            world.buffer.check_valid()
            continue
        known |= check_all_transitions(world.buffer, world.twin, 3, stack)
        keys = generator.permutation(list(known) or np.empty(0, np.int64))[:60]
        stale = [key for key in keys.tolist() if known[key] not in world.twin.transitions(3)]
        before = world.buffer.metrics()["stale_feedback"]
        world.buffer.feed_back(keys, {"priority": generator.uniform(0.5, 2, size=len(keys))})
        counted = world.buffer.metrics()["stale_feedback"] - before
        assert counted == (len(stale) if prioritized else 0)
        world.buffer.check_valid()


def test_rows_cut_off_from_their_frames():
    """Stacks of 3 in unrolls of 4: two rows of the block that has lost the one before it."""
    buffer = make_buffer(
        1, 4, capacity=8, stack=3, batch_size=200, prioritized=True, priority_epsilon=1e-9
    )
    worker = ScriptedWorker([0], 4, max_episode_length=200, life_loss=0.0, seed=5)
    add_unrolls(buffer, worker, 2)
    assert sorted({step for _, _, step in starts(buffer.sample())}) == list(range(8))
    add_unrolls(buffer, worker, 1)
    assert sorted({step for _, _, step in starts(buffer.sample())}) == list(range(6, 12))
    assert buffer.metrics()["size"] == 6
    buffer.feed_back(np.arange(3, 8), {"priority": np.full(5, 1e9)})
    assert buffer.metrics()["stale_feedback"] == 3
    assert sorted({step for _, _, step in starts(buffer.sample())}) == [6, 7]


def test_truncation_bootstraps_from_the_final_observation():
    """Every step of an episode of 7 that is cut; none leads into the next one (case 47)."""
    buffer = make_buffer(1, 3, n_step=1, batch_size=2048)
    worker = ScriptedWorker([0], 3, max_episode_length=7, life_loss=0.0)
    cut = []
    for _ in range(20):
        unroll = worker.unroll()
        buffer.add(unroll)
        rows = unroll.truncated & ~unroll.terminated
        cut += [tuple(where) for where in unroll.observation["where"][:-1][rows].tolist()]
    assert cut
    batch = buffer.sample()
    ends = places(batch.next_observation)
    seen = 0
    for where, end, discount in zip(starts(batch), ends, batch.discount.tolist(), strict=True):
        assert end == (*where[:2], where[2] + 1)
        if where in cut:
            seen += 1
            assert discount == pytest.approx(GAMMA)
    assert seen


def test_newest_row_is_drawn_and_reset_rows_are_not():
    """The row before the write position counts like any other (case 68)."""
    buffer = make_buffer(1, 4, batch_size=2000)
    worker = ScriptedWorker([0], 4, max_episode_length=2)
    valid = []
    for _ in range(6):
        unroll = worker.unroll()
        buffer.add(unroll)
        where = unroll.observation["where"][:-1][unroll.valid]
        valid += [tuple(w) for w in where.tolist()]
    assert buffer.metrics()["size"] == len(valid)
    assert set(starts(buffer.sample())) == set(valid)


def test_uniform_frequencies():
    """A full ring, wrapped: each row within 5 standard errors of its share."""
    buffer = make_buffer(1, 8, capacity=64, batch_size=100_000)
    add_unrolls(buffer, ScriptedWorker([0], 8), 13)
    _, counts = np.unique(buffer.sample().keys, return_counts=True)
    share = 100_000 / buffer.metrics()["size"]
    assert len(counts) == buffer.metrics()["size"]
    assert np.abs(counts - share).max() < 5 * share**0.5


def test_rewards_are_clipped_in_the_batch_only():
    """Each reward by itself, before the sum; the buffer keeps them raw."""
    worker = ScriptedWorker([0], 4, life_loss=0.0, max_episode_length=50)
    buffer = make_buffer(1, 4, n_step=2, reward_clip=1.0)
    add_unrolls(buffer, worker, 2)
    batch = buffer.sample()
    raw = [
        [np.clip(scripted_reward(s, e, t + i), -1, 1) for i in range(2)]
        for s, e, t in starts(batch)
    ]
    two_rows = batch.discount == np.float32(GAMMA**2)
    expected = torch.tensor([first + GAMMA * second for first, second in raw])
    assert two_rows.any()
    torch.testing.assert_close(
        batch.reward[two_rows], expected[two_rows].float(), rtol=1e-5, atol=1e-5
    )
    assert np.abs(buffer.state_dict()["ring"]["rows"]["reward"]).max() > 1


def test_batch_layout():
    """Shapes and dtypes: observations as stored, discrete actions as an index."""
    buffer = make_buffer(2, 4, batch_size=5)
    add_unrolls(buffer, ScriptedWorker([0, 1], 4), 2)
    batch = buffer.sample()
    layout = {
        "where": (batch.observation["where"], torch.int32, (5, 3)),
        "step": (batch.next_observation["step"], torch.uint8, (5,)),
        "action": (batch.action, torch.int64, (5,)),
        "reward": (batch.reward, torch.float32, (5,)),
        "discount": (batch.discount, torch.float32, (5,)),
        "weight": (batch.weight, torch.float32, (5,)),
    }
    for name, (tensor, dtype, shape) in layout.items():
        assert (tensor.dtype, tensor.shape) == (dtype, shape), name
    assert (batch.keys.dtype, batch.keys.shape) == (np.int64, (5,))
    assert batch.weight.tolist() == [1.0] * 5


def test_continuous_actions_keep_their_dtype():
    """A Box action is data, not an index."""
    spec = replace(ENV_SPEC, action=ArraySpec((2,), "float32"))
    buffer = ReplayBuffer(capacity=100)
    buffer.build(spec, SampleSpec(3), StreamLayout(1, 4), 10)
    unroll = ScriptedWorker([0], 4).unroll()
    unroll.action = np.arange(8, dtype=np.float32).reshape(4, 1, 2)
    buffer.add(unroll)
    action = buffer.sample().action
    assert (action.dtype, action.shape) == (torch.float32, (3, 2))


def test_unroll_and_batch_are_copies():
    """The worker overwrites its slot, the learner its batch; the buffer keeps what it got."""
    buffer = make_buffer(1, 4, batch_size=500)
    unroll = ScriptedWorker([0], 4).unroll()
    buffer.add(unroll)
    before = set(starts(buffer.sample()))
    for array in (*unroll.observation.values(), unroll.action, unroll.reward, unroll.valid):
        array[:] = 1
    for tensor in buffer.sample().observation.values():
        tensor.zero_()
    assert set(starts(buffer.sample())) == before


def test_interrupted_stream_ends_with_its_own_last_observation():
    """A lost unroll: the row before the gap leads to what really came next, then nothing."""
    worker = ScriptedWorker([0], 3, max_episode_length=100, life_loss=0.0, seed=5)
    buffer = make_buffer(1, 3, n_step=5, batch_size=500)
    add_unrolls(buffer, worker, 1)  # steps 0, 1, 2
    worker.unroll()  # steps 3, 4, 5, lost
    add_unrolls(buffer, worker, 1)  # steps 6, 7, 8
    batch = buffer.sample()
    ends = batch.next_observation["where"][:, 2].tolist()
    reached = {where[2]: end for where, end in zip(starts(batch), ends, strict=True)}
    assert reached == {0: 3, 1: 3, 2: 3, 6: 9, 7: 9, 8: 9}


# ------------------------------------------------------------------------------ prioritised


def prioritised_buffer(num_rows=256, **more):
    """A prioritised buffer of ``num_rows`` valid rows, all of one episode, and their keys."""
    more = {"capacity": num_rows, "prioritized": True} | more
    buffer = make_buffer(1, 16, **more)
    worker = ScriptedWorker([0], 16, max_episode_length=1, life_loss=0.0)
    for _ in range(num_rows // 16):
        unroll = worker.unroll()
        unroll.valid[:] = True
        buffer.add(unroll)
    return buffer, np.arange(num_rows)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_prioritised_frequencies(alpha):
    """200,000 draws of 256 rows: as often as priority ** alpha says (chi-squared, p > 1e-3)."""
    buffer, keys = prioritised_buffer(alpha=alpha, batch_size=32, priority_epsilon=1e-9)
    priority = np.random.default_rng(7).uniform(0.1, 2.0, size=256)
    buffer.feed_back(keys, {"priority": priority})
    drawn = np.concatenate([buffer.sample().keys for _ in range(6_250)])
    expected = priority**alpha / (priority**alpha).sum() * len(drawn)
    counts = np.bincount(drawn, minlength=256)
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARED_255


def test_importance_weights():
    """(N * P) ** -beta over the maximum of the batch, from the formula."""
    buffer, keys = prioritised_buffer(alpha=0.7, beta_start=0.3, batch_size=128)
    priority = np.random.default_rng(8).uniform(0.1, 2.0, size=256)
    buffer.feed_back(keys, {"priority": priority})
    batch = buffer.sample()
    probability = (priority + 1e-6) ** 0.7 / ((priority + 1e-6) ** 0.7).sum()
    weight = (1 / (256 * probability[batch.keys])) ** 0.3
    np.testing.assert_allclose(batch.weight.numpy(), weight / weight.max(), rtol=1e-5)


def test_importance_weights_are_one_for_equal_priorities():
    """Whatever N is (case 71); also when a part of the ring is empty."""
    buffer = make_buffer(1, 4, prioritized=True)
    add_unrolls(buffer, ScriptedWorker([0], 4), 3)
    np.testing.assert_allclose(buffer.sample().weight.numpy(), 1.0)


def test_importance_weights_undo_the_priorities():
    """At beta 1 the weighted mean over a batch is the uniform mean, within 4 standard errors."""
    draws = 50_000
    buffer, keys = prioritised_buffer(beta_start=1.0, batch_size=draws)
    values = np.random.default_rng(9).normal(size=256)
    buffer.feed_back(keys, {"priority": np.exp(values)})  # correlated with the values on purpose
    batch = buffer.sample()
    weight, value = batch.weight.numpy().astype(float), values[batch.keys]
    mean = (weight * value).sum() / weight.sum()
    error = np.sqrt((weight**2 * (value - mean) ** 2).sum()) / weight.sum()
    assert abs(mean - values.mean()) < 4 * error
    assert abs(value.mean() - values.mean()) > 20 * error  # unweighted, it would be far off


@pytest.mark.parametrize(("setting", "planned"), [(None, 10), (10, 99)])
def test_beta_schedule(setting, planned):
    """From its start to 1 over the planned updates or the set number, then constant."""
    buffer = make_buffer(
        1, 4, prioritized=True, beta_start=0.4, beta_updates=setting, planned=planned
    )
    add_unrolls(buffer, ScriptedWorker([0], 4), 1)
    betas = []
    for _ in range(12):
        betas.append(buffer.metrics()["beta"])
        buffer.sample()
    assert betas[0] == 0.4
    assert betas[5] == pytest.approx(0.7)
    assert betas[10:] == [1.0, 1.0]


def test_new_rows_get_the_highest_priority_seen():
    """Old ones at 50, and new ones are drawn no less (case 70)."""
    buffer, keys = prioritised_buffer(capacity=512, batch_size=20_000)
    buffer.feed_back(keys, {"priority": np.full(256, 50.0)})
    buffer.feed_back(keys[:128], {"priority": np.full(128, 20.0)})
    assert buffer.metrics()["max_priority"] == pytest.approx(50.0)
    worker = ScriptedWorker([0], 16, max_episode_length=100, first_sequence=16)
    unroll = worker.unroll()
    buffer.add(unroll)
    counts = np.bincount(buffer.sample().keys, minlength=272)
    new = counts[256:][unroll.valid[:, 0]]
    assert new.mean() == pytest.approx(counts[128:256].mean(), rel=0.1)
    assert counts[:128].mean() < 0.7 * new.mean()


def test_actions_without_numbers_are_stored():
    """A space of no dimensions at all: an agent of one's own may know what to do with it."""
    spec = EnvSpec("Idle", {"observation": ArraySpec((2,), "float32")}, ArraySpec((0,), "float32"))
    buffer = ReplayBuffer(capacity=40)
    buffer.build(spec, SampleSpec(batch_size=3), StreamLayout(2, 5), planned_updates=1)
    arrays = {name: array.zeros() for name, array in Unroll.layout(spec, 5, 2, {}).items()}
    unroll = Unroll.from_arrays(0, (0, 1), arrays)
    unroll.valid[:] = True
    buffer.add(unroll)
    assert buffer.sample().action.shape == (3, 0)


def test_stale_feedback_is_dropped_and_counted():
    """Once the ring has wrapped, an old key must not touch the row in its place (case 73)."""
    buffer, keys = prioritised_buffer(batch_size=10_000)
    worker = ScriptedWorker([0], 16, max_episode_length=1000, first_sequence=16)
    add_unrolls(buffer, worker, 1)  # over the first 16 rows
    before = buffer.state_dict()["priorities"]["leaves"].copy()
    buffer.feed_back(keys[:20], {"priority": np.full(20, 1e6)})
    after = buffer.state_dict()["priorities"]["leaves"]
    assert buffer.metrics()["stale_feedback"] == 16
    assert np.flatnonzero(after != before).tolist() == [16, 17, 18, 19]
    buffer.check_valid()


def test_feedback_finds_its_rows_after_a_wrap():
    """The keys of a batch name its own rows, wherever the ring has put them."""
    buffer, _ = prioritised_buffer(alpha=1.0, batch_size=8)
    add_unrolls(buffer, ScriptedWorker([0], 16, max_episode_length=1000, first_sequence=16), 3)
    batch = buffer.sample()
    buffer.feed_back(batch.keys, {"priority": np.full(8, 7.0)})
    state = saved(buffer)
    raised = state["priorities"]["leaves"] > 2
    where = state["ring"]["rows"]["observation/where"][raised]
    assert {tuple(w) for w in where.tolist()} == set(starts(batch))
    assert buffer.metrics()["stale_feedback"] == 0


def test_all_stale_feedback_changes_nothing():
    """Not even the highest priority seen."""
    buffer, _ = prioritised_buffer()
    buffer.feed_back(np.array([-1, 256, 10_000]), {"priority": np.full(3, 1e6)})
    assert buffer.metrics()["stale_feedback"] == 3
    assert buffer.metrics()["max_priority"] == 1.0
    buffer.check_valid()


def test_last_of_duplicate_priorities_wins():
    """A batch may hold a row twice."""
    buffer, _ = prioritised_buffer(alpha=1.0)
    buffer.feed_back(np.array([5, 6, 5]), {"priority": np.array([3.0, 4.0, 0.5])})
    leaves = buffer.state_dict()["priorities"]["leaves"]
    assert leaves[5:7] == pytest.approx([0.5, 4.0], rel=1e-5)


def test_zero_priority_can_still_be_drawn():
    """By the epsilon; else a row that was learnt once would be lost."""
    buffer, keys = prioritised_buffer(batch_size=5000)
    buffer.feed_back(keys, {"priority": np.zeros(256)})
    assert len(np.unique(buffer.sample().keys)) == 256


def assert_priorities_of_the_twin(buffer: ReplayBuffer, twin: SlowReplay) -> None:
    """The same rows can be drawn, with the same priorities."""
    state = saved(buffer)
    leaves = state["priorities"]["leaves"]
    where = state["ring"]["rows"]["observation/where"][leaves > 0].tolist()
    got = dict(zip(map(tuple, where), leaves[leaves > 0].tolist(), strict=True))
    wanted = {r[i]["where"]: r[i]["priority"] ** buffer.settings.alpha for r, i in twin.drawable()}
    assert got == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert buffer.metrics()["max_priority"] == pytest.approx(twin.highest)


@settings(max_examples=100, deadline=None)
@given(
    operations=st.lists(
        st.sampled_from([*OPERATIONS, "learn"]),
        min_size=3,
        max_size=30,
    ),
    seed=st.integers(0, 1000),
    unroll_length=st.integers(2, 5),
    stack=st.integers(1, 3),
    n=st.sampled_from([1, 3, 5]),
    clip=st.sampled_from([None, 1.0]),
)
def test_priorities_of_the_actor(operations, seed, unroll_length, stack, n, clip):
    """Its own error once a window is complete, the highest until then, then the learner's word."""
    world = World(
        8,
        unroll_length,
        seed,
        stack,
        prioritized=True,
        initial_priority="actor",
        n_step=n,
        reward_clip=clip,
    )
    generator = np.random.default_rng(seed)
    for operation in operations:
        if operation != "learn":
            world.do(operation)
        elif world.buffer.ready():
            batch = world.buffer.sample()
            chosen = generator.permutation(len(batch.keys))[:10]
            errors = generator.uniform(0, 4, size=10)
            world.buffer.feed_back(batch.keys[chosen], {"priority": errors})
            rows = {rows[i]["where"]: rows[i] for rows, i in world.twin.drawable()}
            for where, error in zip(places(batch.observation, chosen), errors, strict=True):
                world.twin.set_priority(rows[where], error)
        world.buffer.check_valid()
        assert_priorities_of_the_twin(world.buffer, world.twin)


@pytest.mark.parametrize(
    ("priority", "error", "match"),
    [
        ([1.0, np.nan], NonFiniteError, "priority=nan"),
        ([1.0, np.inf], NonFiniteError, "priority=inf"),
        ([1.0, -0.5], ValueError, "priority=-0.5"),
        ([[1.0], [2.0]], ValueError, r"\(2, 1\)"),
    ],
)
def test_bad_priorities_are_refused(priority, error, match):
    """Named, and without a trace in the buffer."""
    buffer, keys = prioritised_buffer()
    before, metrics = buffer.state_dict()["priorities"]["leaves"].copy(), buffer.metrics()
    for refused in (keys[:2], np.array([-1, keys[0]])):  # the last one has a stale one before it
        with pytest.raises(error, match=match):
            buffer.feed_back(refused, {"priority": np.array(priority)})
        assert np.array_equal(buffer.state_dict()["priorities"]["leaves"], before)
        assert buffer.metrics() == metrics


@pytest.mark.parametrize("name", ["action_value", "greedy_value"])
def test_bad_values_of_the_actor_are_refused(name):
    """They say whose they are, before they become priorities."""
    buffer = make_buffer(2, 4, prioritized=True, initial_priority="actor")
    unroll = ScriptedWorker([0, 1], 4).unroll()
    unroll.extras[name][:] = np.nan
    with pytest.raises(NonFiniteError, match="the acting policy's values"):
        buffer.add(unroll)


def test_unknown_feedback_is_refused():
    """A misspelt name would silently switch the priorities off."""
    for buffer in (make_buffer(), make_buffer(prioritized=True)):
        with pytest.raises(ValueError, match="feedback priorities"):
            buffer.feed_back(np.array([0]), {"priorities": np.array([1.0])})


def test_uniform_buffer_ignores_priorities():
    """The agent need not know which kind of replay it feeds."""
    buffer = make_buffer()
    add_unrolls(buffer, ScriptedWorker([0, 1], 4), 2)
    buffer.feed_back(buffer.sample().keys, {"priority": np.full(64, 9.0)})
    assert buffer.metrics().keys() == {"size", "capacity", "stale_feedback"}
    assert buffer.metrics()["stale_feedback"] == 0


# ----------------------------------------------------------------------------------- misuse


def test_too_small_a_capacity_is_refused():
    """The error names the setting and what is needed."""
    with pytest.raises(SettingError, match=r"replay\.capacity=63: must be at least 64"):
        make_buffer(4, 8, capacity=63)
    make_buffer(4, 8, capacity=64)


def test_unrolls_too_short_for_the_stacks_are_refused():
    """Else one block that goes could cut off rows two blocks on."""
    with pytest.raises(SettingError, match=r"unroll_length=3: must be at least 4.*stack of 5"):
        make_buffer(2, 3, stack=5)
    make_buffer(2, 4, stack=5)


ATARI = EnvSpec(
    "Atari",
    {"observation": ArraySpec((84, 84), "uint8", stack=4)},
    ArraySpec((), "int64", (4,)),
)


@pytest.mark.parametrize("initial_priority", ["max", "actor"])
def test_memory_of_an_atari_row(initial_priority, caplog):
    """At most 7,300 bytes, where two stacks would take 56,448; as much as was said before."""
    capacity = 10_000
    buffer = ReplayBuffer(capacity=capacity, initial_priority=initial_priority)
    tracemalloc.start()
    with caplog.at_level(logging.INFO, "actorlearner.replay"):
        buffer.build(ATARI, SampleSpec(32), StreamLayout(8, 20), 10)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / capacity <= 7_300
    said = re.search(r"takes ([\d.]+) MiB of memory for 10,000 rows", caplog.text)
    assert float(said[1]) * 2**20 == pytest.approx(taken, rel=0.02)


def test_more_than_the_memory_is_refused(monkeypatch):
    """Before anything is allocated; what fits is told, and does fit."""
    free = psutil.virtual_memory()._replace(available=100 * 2**20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    buffer = ReplayBuffer(capacity=10**6)
    tracemalloc.start()
    with pytest.raises(
        SettingError, match=r"replay\.capacity=1000000: needs 6\.\d\d GiB, 100\.0 MiB are free; at"
    ) as caught:
        buffer.build(ATARI, SampleSpec(32), StreamLayout(8, 20), 10)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    fits = int(re.search(r"at most (\d+) fit", str(caught.value))[1])
    assert 14_000 < fits < 15_000
    for capacity, is_fine in ((fits, True), (fits + 1, False)):
        with nullcontext() if is_fine else pytest.raises(SettingError):
            ReplayBuffer(capacity=capacity).build(ATARI, SampleSpec(32), StreamLayout(8, 20), 10)


@pytest.mark.parametrize(
    "bad",
    [{"capacity": 0}, {"alpha": -0.1}, {"beta_start": 1.1}, {"priority_epsilon": 0}, {"size": 9}],
)
def test_bad_settings_are_refused(bad):
    """By the dotted key."""
    with pytest.raises(SettingError, match=rf"replay\.{next(iter(bad))}"):
        ReplayBuffer(**bad)


def test_build_is_idempotent():
    """The same again keeps the contents; anything else is refused by name."""
    buffer = make_buffer(2, 4)
    add_unrolls(buffer, ScriptedWorker([0, 1], 4), 2)
    size, spec = buffer.metrics()["size"], SampleSpec(64, n_step=3, gamma=GAMMA)
    buffer.build(ENV_SPEC, spec, StreamLayout(2, 4), 100)
    assert buffer.metrics()["size"] == size
    with pytest.raises(BadInput, match="another layout and planned_updates"):
        buffer.build(ENV_SPEC, spec, StreamLayout(3, 4), 101)


def test_use_out_of_order():
    """Before `build`, and before there is a row."""
    buffer = ReplayBuffer()
    for use in (buffer.sample, buffer.ready, buffer.metrics, buffer.state_dict):
        with pytest.raises(RuntimeError, match=r"build\(\)"):
            use()
    buffer = make_buffer()
    assert not buffer.ready()
    with pytest.raises(RuntimeError, match="ready"):
        buffer.sample()


# ------------------------------------------------------------------------------- checkpoints


def assert_same_batches(one: ReplayBuffer, other: ReplayBuffer, count: int = 3) -> None:
    """Both go on in the same way, to the bit."""
    for _ in range(count):
        batch, twin = one.sample(), other.sample()
        for key in batch.observation:
            assert torch.equal(batch.observation[key], twin.observation[key])
            assert torch.equal(batch.next_observation[key], twin.next_observation[key])
        for name in ("action", "reward", "discount", "weight"):
            assert torch.equal(getattr(batch, name), getattr(twin, name)), name
        assert np.array_equal(batch.keys, twin.keys)
        priority = np.abs(np.sin(np.arange(len(batch.keys))))
        one.feed_back(batch.keys, {"priority": priority})
        other.feed_back(batch.keys, {"priority": priority})
    assert one.metrics() == other.metrics()


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("num_unrolls", [1, 3, 9])
def test_state_round_trip(prioritized, num_unrolls):
    """Part full, full and wrapped: what goes on after a resume is what would have gone on."""
    more = {"prioritized": prioritized, "capacity": 2 * 5 * 4, "stack": 3}
    buffer = make_buffer(2, 4, **more)
    buffer.seed(3)
    worker = ScriptedWorker([0, 1], 4)
    add_unrolls(buffer, worker, num_unrolls)
    keys = buffer.sample().keys
    buffer.feed_back(keys, {"priority": np.linspace(0, 3, len(keys))})
    buffer.feed_back(np.array([-1]), {"priority": np.ones(1)})
    state = saved(buffer)

    resumed = make_buffer(2, 4, **more)
    for _ in range(3):  # case 61
        resumed.load_state_dict(state)
        resumed.check_valid()
        assert resumed.metrics() == buffer.metrics()
    assert_same_batches(buffer, resumed)
    for _ in range(4):
        unroll = worker.unroll()
        buffer.add(unroll)
        resumed.add(unroll)
        resumed.check_valid()
        assert_same_batches(buffer, resumed)


@pytest.mark.parametrize("prioritized", [False, True])
def test_state_holds_only_what_is_filled(prioritized):
    """And loading it leaves nothing of what the buffer held before."""
    more = {"capacity": 4000, "batch_size": 500, "prioritized": prioritized}
    buffer = make_buffer(1, 4, **more)
    add_unrolls(buffer, ScriptedWorker([0], 4), 2)
    state = saved(buffer)
    assert all(len(array) == 8 for array in state["ring"]["rows"].values())
    fuller = make_buffer(1, 4, **more)
    add_unrolls(fuller, ScriptedWorker([0], 4, seed=9), 50)
    fuller.load_state_dict(state)
    fuller.check_valid()
    assert set(starts(fuller.sample())) == set(starts(buffer.sample()))


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("num_unrolls", [1, 9])
@pytest.mark.parametrize("num_streams", [1, 3])
def test_resume_with_another_number_of_streams(num_streams, num_unrolls, prioritized):
    """The old chains end with their own last observations; new workers start new ones."""
    num_blocks = 12
    more = {"prioritized": prioritized, "capacity": 4 * num_blocks, "batch_size": 4096}
    buffer, twin = make_buffer(2, 4, **more), SlowReplay(num_blocks)
    worker = ScriptedWorker([0, 1], 4)
    for _ in range(num_unrolls):
        unroll = worker.unroll()
        buffer.add(unroll)
        twin.add(unroll)
    resumed = make_buffer(num_streams, 4, **more)
    resumed.add(ScriptedWorker(range(num_streams), 4, first_sequence=num_unrolls - 1).unroll())
    for _ in range(3):
        resumed.load_state_dict(saved(buffer))
        resumed.check_valid()
    twin.blocks.extend([([], 0, 0), ([], 0, 0)])
    check_all_transitions(resumed, twin, 3)

    # The numbers would continue the old worker's; nothing may be linked all the same.
    twin.chains.clear()
    newcomer = ScriptedWorker(
        range(num_streams), 4, seed=4, first_sequence=num_unrolls, first_episode=1000
    )
    for _ in range(2):
        unroll = newcomer.unroll()
        resumed.add(unroll)
        twin.add(unroll)
        resumed.check_valid()
        check_all_transitions(resumed, twin, 3)


@pytest.mark.parametrize(("before", "after"), [(0.6, 0.3), (None, 0.6), (0.6, None)])
def test_resume_with_other_priorities(before, after):
    """Another alpha, or priorities switched on: all rows start anew at the highest seen."""

    def make(alpha):
        more = {} if alpha is None else {"alpha": alpha}
        return make_buffer(1, 4, prioritized=alpha is not None, **more)

    buffer, resumed = make(before), make(after)
    add_unrolls(buffer, ScriptedWorker([0], 4), 3)
    keys = buffer.sample().keys
    buffer.feed_back(keys, {"priority": np.linspace(0, 3, len(keys))})
    resumed.load_state_dict(saved(buffer))
    resumed.check_valid()
    np.testing.assert_allclose(resumed.sample().weight.numpy(), 1.0)


def test_another_capacity_unroll_length_or_stack_is_refused():
    """With all numbers, what to do, and the contents untouched."""
    buffer = make_buffer(1, 4, capacity=80, stack=2)
    add_unrolls(buffer, ScriptedWorker([0], 4), 2)
    state = saved(buffer)
    words = (
        r"capacity=80 unroll_length=4 frame_stack=2, this run has replay\.capacity=.*: resume with"
    )
    for changes in ({"capacity": 160}, {"unroll_length": 8}, {"stack": 4}, {"stack": 1}):
        other = make_buffer(**{"num_streams": 1, "capacity": 80, "stack": 2} | changes)
        with pytest.raises(CheckpointError, match=words):
            other.load_state_dict(state)
        assert not other.ready()


def test_rows_of_another_environment_are_refused():
    """NumPy would cast or broadcast some of them without a word."""
    buffer = make_buffer(1, 4)
    add_unrolls(buffer, ScriptedWorker([0], 4), 2)
    observation = {**ENV_SPEC.observation, "step": ArraySpec((), "float32")}
    other = ReplayBuffer(capacity=80, prioritized=False)
    spec = SampleSpec(64, n_step=3, gamma=GAMMA)
    other.build(replace(ENV_SPEC, observation=observation), spec, StreamLayout(1, 4), 100)
    with pytest.raises(CheckpointError, match="float32"):
        other.load_state_dict(buffer.state_dict())


def test_another_initial_priority_is_refused():
    """The values that the actor's error takes were not noted, or have no place."""
    buffers = [make_buffer(prioritized=True, initial_priority=name) for name in ("max", "actor")]
    for buffer, other in (buffers, reversed(buffers)):
        with pytest.raises(CheckpointError, match=r"resume with .*replay\.initial_priority"):
            other.load_state_dict(buffer.state_dict())


def test_seed_decides_the_draws():
    """The same seed, the same batches; another, others; the global generator plays no part."""
    batches = []
    for seed in (1, 1, 2):
        buffer = make_buffer(2, 4)
        buffer.seed(seed)
        np.random.seed(seed)
        add_unrolls(buffer, ScriptedWorker([0, 1], 4), 4)
        batches.append(buffer.sample().keys.tolist())
    assert batches[0] == batches[1] != batches[2]


def test_memory_of_a_batch_is_used_again_by_the_next():
    """Of each part of an observation, though all have one shape."""
    parts = {f"camera_{index}": ArraySpec((4, 4), "uint8") for index in range(6)}
    spec = EnvSpec("Cameras", parts, ArraySpec((), "int64", (2,)))
    buffer = ReplayBuffer(capacity=40)
    buffer.build(spec, SampleSpec(batch_size=3), StreamLayout(1, 5), planned_updates=1)
    arrays = {name: array.zeros() for name, array in Unroll.layout(spec, 5, 1, {}).items()}
    unroll = Unroll.from_arrays(0, (0,), arrays)
    unroll.valid[:] = True
    buffer.add(unroll)

    def places():
        return {key: tensor.data_ptr() for key, tensor in buffer.sample().observation.items()}

    before = places()
    taken = [np.empty((2, 3, 4, 4), np.uint8) for _ in parts]  # where they stood, if given back
    assert places() == before
    assert len(taken) == len(parts)
