"""Sequences of `actorlearner.replay`, against the slow twin of `tests.unit.test_replay`."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actorlearner.contracts import (
    ArraySpec,
    CheckpointError,
    NonFiniteError,
    SequenceSpec,
    SettingError,
    StreamLayout,
)
from actorlearner.replay import ReplayBuffer
from actorlearner.ring import BlockRing
from tests.saved import saved
from tests.scripted import (
    ENV_SPEC,
    ScriptedWorker,
    scripted_action,
    scripted_latent,
    scripted_stack,
    stacked_spec,
)
from tests.test_trainer import differences
from tests.unit.test_replay import OPERATIONS, World, add_unrolls, make_buffer

FLAGS = ("valid", "first", "terminated", "truncated")


def wheres(batch, column):
    """Where the rows of sequence ``column`` were seen."""
    where = batch.observation["where"][:, column]
    return [tuple(w) for w in (where[:, -1] if where.ndim == 3 else where).tolist()]


def check_all_sequences(buffer, twin, stack=1):
    """Draw until everything has been seen; compare every row of every sequence with the twin's.

    Returns:
        Where each row is, by its key.
    """
    expected = {rows[i]["where"]: rows[i : i + twin.length + 1] for rows, i in twin.drawable()}
    assert buffer.metrics()["size"] == len(expected)
    assert buffer.ready() == bool(expected)
    if not expected:
        return {}
    batch = buffer.sample()
    count = batch.keys.shape[1]
    assert count >= 25 * len(expected)
    begins = [tuple(w) for w in _newest(batch.observation["where"])[0].tolist()]
    new = twin.take_windows(count)
    assert begins[: len(new)] == new
    assert set(begins) == set(expected)
    known = {}
    for column in {begin: column for column, begin in enumerate(begins)}.values():
        here, rows = wheres(batch, column), expected[begins[column]]
        assert here == [row["where"] for row in rows]
        for name in FLAGS:
            assert getattr(batch, name)[:, column].tolist() == [row[name] for row in rows], name
        actions = [scripted_action(*row["where"]) if row["valid"] else 0 for row in rows]
        assert batch.action[:, column].tolist() == actions
        np.testing.assert_allclose(batch.reward[:, column], [row["reward"] for row in rows])
        assert batch.extras["latent"][:, column].tolist() == [list(row["latent"]) for row in rows]
        for key, spec in stacked_spec(stack).observation.items():
            stacks = np.array([scripted_stack(where, spec.stack) for where in here])
            frames = stacks if key == "where" else stacks[..., 2]
            seen = batch.observation[key][:, column].numpy()
            assert np.array_equal(seen, frames.reshape(len(here), *spec.stacked_shape))
        # Independent of the twin: one stream, and one step or one reset from row to row.
        for (stream, episode, step), (stream_2, episode_2, step_2), valid in zip(
            here[:-1], here[1:], batch.valid[:-1, column].tolist(), strict=True
        ):
            goes_on = (stream, episode, step + 1) if valid else (stream, episode + 1, 0)
            assert goes_on == (stream_2, episode_2, step_2)
        known |= dict(zip(batch.keys[:, column].tolist(), here, strict=True))
    return known


def _newest(where):
    return where[:, :, -1] if where.ndim == 4 else where


@settings(max_examples=50, deadline=None)
@example(["add 01", "add 000", "learn", "restart 1", "add 11"], 0, 1, 0, 0, 1)
@example(["add 000000", "reload 1", "add 00"], 0, 3, 1, 2, 7)
@example(["add 01", "learn"] * 10, 0, 3, 0, 0, 5)  # frames go just as a sequence becomes whole
@example(["add 1", "restart 1", "add 111", "learn"], 0, 1, 2, 0, 2)  # windows count anew
@example(["add 01", "reload 0", "add 01", "learn"], 0, 1, 2, 0, 2)  # and these go on
@given(
    operations=st.lists(st.sampled_from(OPERATIONS), min_size=3, max_size=30),
    seed=st.integers(0, 1000),
    stack=st.integers(1, 4),
    extra_rows=st.integers(0, 4),
    extra_blocks=st.integers(0, 4),
    length=st.integers(1, 9),
)
def test_random_operations(operations, seed, stack, extra_rows, extra_blocks, length):
    """Whatever happens in whatever order, every sequence is right, new windows come first and once.

    Latents are those fed back last, or noted when acting; feedback for rows overwritten is stale.
    """
    unroll_length = max(1, stack - 1) + extra_rows
    num_blocks = 3 * (length // unroll_length + 2) + extra_blocks
    world = World(num_blocks, unroll_length, seed, stack, length=length)
    generator = np.random.default_rng(seed)
    known = {}
    for operation in [*operations, "learn"]:
        if operation != "learn":
            world.do(operation)
            world.buffer.check_valid()
            continue
        known |= check_all_sequences(world.buffer, world.twin, stack)
        if not known:
            continue
        keys = generator.choice(list(known), size=(length + 1, 5))
        latent = generator.integers(-99, 99, (*keys.shape, 2)).astype(np.int16)
        stored = world.twin.stored_rows()
        before = world.buffer.metrics()["stale_feedback"]
        world.buffer.feed_back(keys, {"latent": latent})
        stale = 0
        for key, values in zip(keys.ravel().tolist(), latent.reshape(-1, 2).tolist(), strict=True):
            if known[key] in stored:
                stored[known[key]]["latent"] = tuple(values)  # the last one counts
            else:
                stale += 1
        assert world.buffer.metrics()["stale_feedback"] - before == stale
        world.buffer.check_valid()


def test_new_windows_come_first_and_learn_each_row_once():
    """Of 41 rows, ten windows of 4 behind a row of context; then uniform draws."""
    buffer = make_buffer(1, 41, length=4, batch_size=4, capacity=200)
    worker = ScriptedWorker([0], 41, max_episode_length=5)
    add_unrolls(buffer, worker, 1)
    assert buffer.metrics()["new_sequences"] == 10
    learned = [buffer.sample().keys[1:].T.ravel() for _ in range(2)]
    assert np.concatenate(learned).tolist() == list(range(1, 33))
    last = buffer.sample().keys
    assert last[1:, :2].T.ravel().tolist() == list(range(33, 41))
    assert buffer.metrics()["new_sequences"] == 0
    add_unrolls(buffer, worker, 1)
    assert buffer.sample().keys[1:].T.ravel().tolist() == list(range(41, 57))


def test_windows_that_are_overwritten_are_left_out():
    """Row 3 is, by row 19, behind one that is not: a slow stream's window comes late."""
    buffer = make_buffer(1, 4, length=4, batch_size=3, capacity=16)
    add_unrolls(buffer, ScriptedWorker([0], 4), 6)
    buffer._ring.windows = deque([8, 3, 12])
    assert buffer.sample().keys[0, :2].tolist() == [8, 12]


def test_starts_are_uniform():
    """Each of the 36 rows that 4 more follow, as often as any other, in 4 streams of 13 rows."""
    buffer = make_buffer(4, 13, length=4, batch_size=18_000, capacity=4 * 26)
    add_unrolls(buffer, ScriptedWorker(range(4), 13), 1)
    buffer.sample()
    counts = np.unique(buffer.sample().keys[0], return_counts=True)[1]
    assert len(counts) == 36
    assert ((counts - 500) ** 2 / 500).sum() < 66.6  # chi-squared, 35 degrees, p = 0.001


def test_episodes_are_crossed_with_their_reset_rows():
    """What is at the borders of two episodes, by hand."""
    buffer = make_buffer(1, 8, length=7, batch_size=1, capacity=24)
    unroll = ScriptedWorker([0], 8, max_episode_length=1, life_loss=0.0).unroll()
    buffer.add(unroll)
    batch = buffer.sample()
    assert wheres(batch, 0)[:4] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert batch.valid[:4, 0].tolist() == [True, False, True, False]
    assert batch.first[:4, 0].tolist() == [True, False, True, False]
    assert (batch.action[~batch.valid] == 0).all()
    assert batch.action.dtype == torch.int64
    assert unroll.action[1, 0] != 0  # so it is the store that says so
    assert batch.extras["latent"][1, 0].tolist() == list(scripted_latent(0, 0, 1))
    assert batch.extras["latent"].dtype == torch.int16
    assert batch.to(torch.device("cpu")).keys is batch.keys


def test_a_context_row_does_not_overwrite_what_was_learned():
    """Row 5 is the context of one sequence and the last of another, in one batch."""
    buffer = make_buffer(1, 10, length=5, batch_size=2, capacity=30)
    add_unrolls(buffer, ScriptedWorker([0], 10), 2)
    keys = np.stack([np.arange(5, 11), np.arange(0, 6)], axis=1)
    latent = np.zeros((6, 2, 2), np.int16)
    latent[0], latent[1:] = -1, 1
    buffer.feed_back(keys, {"latent": latent})
    stored = {}
    for _ in range(40):
        batch = buffer.sample()
        latents = batch.extras["latent"][..., 0]
        stored |= dict(zip(batch.keys.ravel().tolist(), latents.ravel().tolist(), strict=True))
    assert [stored[key] for key in range(11)] == [-1] + [1] * 10


@pytest.mark.parametrize(
    ("feedback", "error", "message"),
    [
        ({"priority": np.zeros((5, 3))}, ValueError, "feedback priority: this .* takes latent"),
        (
            {"latent": np.zeros((5, 3, 2), np.float32)},
            ValueError,
            r"latent is float32 \(5, 3, 2\); needed: int16 \(5, 3, 2\)",
        ),
        ({"latent": np.zeros((4, 3, 2), np.int16)}, ValueError, r"needed: int16 \(5, 3, 2\)"),
    ],
)
def test_other_feedback_is_refused(feedback, error, message):
    """By what is wrong with it."""
    buffer = make_buffer(1, 10, length=4, batch_size=3, capacity=30)
    add_unrolls(buffer, ScriptedWorker([0], 10), 1)
    keys = buffer.sample().keys
    with pytest.raises(error, match=message):
        buffer.feed_back(keys, feedback)


def test_latents_that_are_not_finite_are_refused():
    """Of a floating dtype, where it can be told."""
    buffer = ReplayBuffer(capacity=30, prioritized=False)
    spec = SequenceSpec(3, 4, {"action_value": ArraySpec((), "float32")})
    buffer.build(ENV_SPEC, spec, StreamLayout(1, 10), 1)
    add_unrolls(buffer, ScriptedWorker([0], 10), 1)
    keys = buffer.sample().keys
    with pytest.raises(NonFiniteError, match="feedback action_value"):
        buffer.feed_back(keys, {"action_value": np.full(keys.shape, np.inf, np.float32)})


def test_priorities_and_too_little_room_are_refused():
    """A hang for want of a sequence is no way to find out."""
    with pytest.raises(SettingError, match=r"^replay.prioritized=True: .*prioritized=false"):
        make_buffer(2, 4, length=8, prioritized=True)
    message = r"^replay.capacity=31: must be at least 32, which is 4 unrolls of 4 rows for each"
    with pytest.raises(SettingError, match=message):
        make_buffer(2, 4, length=8, capacity=31)
    buffer = make_buffer(2, 4, length=8, capacity=32)
    workers = [ScriptedWorker([stream], 4, seed=stream, worker=stream) for stream in (0, 1)]
    for turn in range(30):
        buffer.add(workers[turn % 2].unroll())
        assert buffer.ready() == (turn >= 4)


def test_a_replay_of_other_sequences_is_refused():
    """Another length has other rows to begin at."""
    state = make_buffer(1, 4, length=4).state_dict()
    for length in (5, None):
        with pytest.raises(CheckpointError, match="sequences of 4 rows"):
            make_buffer(1, 4, length=length).load_state_dict(state)


def test_latents_and_bookkeeping_are_in_the_memory_estimate():
    """By the arrays that are made."""
    stacked = replace(ENV_SPEC, observation={"pixels": ArraySpec((7, 5), "uint8", stack=3)})
    latents = {"deter": ArraySpec((512,), "int16"), "stoch": ArraySpec((32,), "uint8")}
    ring = BlockRing(stacked, StreamLayout(1, 10), 1000, latents, sequence_length=64)
    arrays = {**ring._arrays(), **ring._large()}.values()
    per_row = sum(array.dtype.itemsize * math.prod(array.shape[1:]) for array in arrays)
    assert per_row == BlockRing.bytes_per_row(stacked, latents, has_sequences=True)
    assert per_row > 1024 + 32


@pytest.mark.parametrize("more", [{"length": 4}, {"prioritized": True}])
def test_to_peek_changes_nothing(more):
    """It is the batch that comes next: new windows, random draws, importance weights."""
    buffer = make_buffer(2, 4, **more)
    worker = ScriptedWorker([0, 1], 4)
    for _ in range(2):
        add_unrolls(buffer, worker, 5)
        buffer.sample()
    add_unrolls(buffer, worker, 5)
    before = saved(buffer) | {"metrics": buffer.metrics()}
    peeked = buffer.peek()
    assert differences(before, saved(buffer) | {"metrics": buffer.metrics()}) == []
    sampled = buffer.sample()
    assert differences(asdict(peeked), asdict(sampled)) == []
    assert not np.array_equal(sampled.keys, buffer.sample().keys)


def test_the_queue_is_bounded_by_what_is_stored():
    """Though nobody takes from it."""
    buffer = make_buffer(1, 4, length=4, capacity=16)
    add_unrolls(buffer, ScriptedWorker([0], 4), 50)
    assert buffer.metrics()["new_sequences"] == 3
