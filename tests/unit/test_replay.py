"""Tests of `actorlearner.replay`."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actorlearner.contracts import (
    ArraySpec,
    BadInput,
    CheckpointError,
    NonFiniteError,
    SampleSpec,
    SettingError,
    StreamLayout,
    Unroll,
)
from actorlearner.replay import ReplayBuffer
from tests.scripted import ENV_SPEC, ScriptedWorker, scripted_action, scripted_reward
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
    **more,
):
    """A built buffer of the scripted environment; uniform, 20 unrolls of each stream."""
    more = {"prioritized": False, "capacity": 20 * num_streams * unroll_length} | more
    buffer = ReplayBuffer(**more)
    spec = SampleSpec(batch_size, n_step=n_step, gamma=GAMMA, reward_clip=reward_clip)
    buffer.build(ENV_SPEC, spec, StreamLayout(num_streams, unroll_length), planned)
    return buffer


def add_unrolls(buffer, worker, count):
    """Let ``worker`` make ``count`` unrolls and store them."""
    for _ in range(count):
        buffer.add(worker.unroll())


def starts(batch):
    """Where each transition starts: a list of ``(stream, episode, step)``."""
    return [tuple(where) for where in batch.observation["where"].tolist()]


# ------------------------------------------------------------------------ the slow obvious twin


class Transition(NamedTuple):
    """What a transition should be."""

    action: int
    reward: float
    discount: float
    end: tuple[int, int, int]


class SlowReplay:
    """The store as lists: chains of rows, and a queue of the blocks that are still there."""

    def __init__(self, num_blocks: int) -> None:
        """Room for ``num_blocks`` columns of unrolls."""
        self.blocks: deque[tuple[list, int, int]] = deque(maxlen=num_blocks)
        self.chains: dict[int, dict] = {}

    def add(self, unroll: Unroll) -> None:
        """Copy ``unroll`` to the end of its streams' chains, or to new ones after a gap."""
        streams = unroll.streams.tolist()
        for stream in streams:
            chain = self.chains.get(stream)
            if chain and chain["sequence"] == unroll.sequence - 1:
                continue
            if chain and any(rows is chain["rows"] and last for rows, _, last in self._marked()):
                self.blocks.append(([], 0, 0))  # the last observation takes a block
            self.chains[stream] = {"rows": [], "end": []}
        for column, stream in enumerate(streams):
            chain = self.chains[stream]
            begin = len(chain["rows"])
            for row in range(unroll.num_rows):
                chain["rows"].append(
                    {
                        "where": tuple(unroll.observation["where"][row, column].tolist()),
                        "reward": float(unroll.reward[row, column]),
                        "terminated": bool(unroll.terminated[row, column]),
                        "valid": bool(unroll.valid[row, column]),
                        "end": chain["end"],
                    }
                )
            chain["end"][:] = [tuple(unroll.observation["where"][-1, column].tolist())]
            chain["sequence"] = unroll.sequence
            self.blocks.append((chain["rows"], begin, len(chain["rows"])))

    def _marked(self):
        """Every block, with whether it is the newest of its chain."""
        return [(rows, begin, rows and end == len(rows)) for rows, begin, end in self.blocks]

    def transitions(self, n: int) -> dict[tuple[int, int, int], Transition]:
        """All that can be drawn, by where they start."""
        found = {}
        for rows, begin, end in self.blocks:
            for start in range(begin, end):
                if rows[start]["valid"]:
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


def check_all_transitions(buffer: ReplayBuffer, twin: SlowReplay, n: int) -> None:
    """Draw until everything has been seen; compare every transition with the twin's."""
    expected = twin.transitions(n)
    assert buffer.metrics()["size"] == len(expected)
    if not expected:
        assert not buffer.ready()
        return
    batch = buffer.sample()
    # Missing one of k rows in so many draws has a chance of about k * exp(-batch / k).
    assert len(batch.keys) >= 25 * len(expected)
    seen, first = np.unique(batch.keys, return_index=True)
    assert len(seen) == len(expected)
    for i in first:
        where = tuple(batch.observation["where"][i].tolist())
        end = tuple(batch.next_observation["where"][i].tolist())
        transition = expected[where]
        assert end == transition.end
        assert int(batch.action[i]) == transition.action
        assert float(batch.reward[i]) == pytest.approx(transition.reward, rel=1e-5, abs=1e-5)
        assert float(batch.discount[i]) == pytest.approx(transition.discount, rel=1e-6)
        assert int(batch.observation["step"][i]) == where[2]
        assert int(batch.next_observation["step"][i]) == end[2]
        # Independent of the twin: one stream, one episode, and 1 to n steps on.
        assert end[:2] == where[:2]
        assert 1 <= end[2] - where[2] <= n


# ------------------------------------------------------------------------------- transitions


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("unroll_length", [1, 2, 4, 7])
def test_transitions_equal_the_twin(n, unroll_length, prioritized):
    """Borders of unrolls, wraps of the ring, truncations, terminations, life losses, gaps.

    Unrolls shorter and longer than n, and two workers, one of them slow: its newest block is
    overwritten before it goes on.
    """
    capacity = 4 * 3 * unroll_length + 1  # not a multiple of anything
    buffer = make_buffer(
        3, unroll_length, n_step=n, batch_size=4096, capacity=capacity, prioritized=prioritized
    )
    twin = SlowReplay(capacity // unroll_length)
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
        check_all_transitions(buffer, twin, n)


OPERATIONS = st.lists(
    st.sampled_from(["add 0", "add 1", "lose 0", "restart 1", "learn", "reload"]),
    min_size=3,
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(
    operations=OPERATIONS,
    seed=st.integers(0, 1000),
    unroll_length=st.integers(1, 5),
    extra_blocks=st.integers(0, 6),
    prioritized=st.booleans(),
)
def test_random_operations(operations, seed, unroll_length, extra_blocks, prioritized):
    """Whatever happens in whatever order, every invariant holds and every transition is right."""
    num_blocks = 6 + extra_blocks
    more = {"capacity": num_blocks * unroll_length, "prioritized": prioritized}
    buffer = make_buffer(3, unroll_length, batch_size=2048, **more)
    twin = SlowReplay(num_blocks)
    workers = [
        ScriptedWorker([0], unroll_length, seed=seed),
        ScriptedWorker([1, 2], unroll_length, seed=seed + 1, worker=1),
    ]
    generator = np.random.default_rng(seed)
    for operation in operations:
        verb, _, index = operation.partition(" ")
        if verb == "add":
            unroll = workers[int(index)].unroll()
            buffer.add(unroll)
            twin.add(unroll)
        elif verb == "lose":
            workers[int(index)].unroll()
        elif verb == "restart":
            workers[int(index)].restart()
        elif verb == "reload":
            state = copy.deepcopy(buffer.state_dict())
            buffer = make_buffer(3, unroll_length, batch_size=2048, **more)
            buffer.load_state_dict(state)
        elif buffer.ready():
            keys = buffer.sample().keys[:50]
            buffer.feed_back(keys, {"priority": generator.uniform(0.5, 2, size=len(keys))})
        buffer.check_valid()
    check_all_transitions(buffer, twin, 3)


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
    ends = [tuple(where) for where in batch.next_observation["where"].tolist()]
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
    state = buffer.state_dict()
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
    before = buffer.state_dict()["priorities"]["leaves"].copy()
    with pytest.raises(error, match=match):
        buffer.feed_back(keys[:2], {"priority": np.array(priority)})
    assert np.array_equal(buffer.state_dict()["priorities"]["leaves"], before)


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
    more = {"prioritized": prioritized, "capacity": 2 * 5 * 4}
    buffer = make_buffer(2, 4, **more)
    buffer.seed(3)
    worker = ScriptedWorker([0, 1], 4)
    add_unrolls(buffer, worker, num_unrolls)
    keys = buffer.sample().keys
    buffer.feed_back(keys, {"priority": np.linspace(0, 3, len(keys))})
    buffer.feed_back(np.array([-1]), {"priority": np.ones(1)})
    state = copy.deepcopy(buffer.state_dict())

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
    state = copy.deepcopy(buffer.state_dict())
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
        resumed.load_state_dict(copy.deepcopy(buffer.state_dict()))
        resumed.check_valid()
    twin.blocks.extend([([], 0, 0), ([], 0, 0)])
    check_all_transitions(resumed, twin, 3)

    # The numbers would continue the old worker's; nothing may be linked all the same.
    twin.chains.clear()
    newcomer = ScriptedWorker(range(num_streams), 4, seed=4, first_sequence=num_unrolls)
    for place in newcomer._places:
        place.episode = 1000
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
    resumed.load_state_dict(copy.deepcopy(buffer.state_dict()))
    resumed.check_valid()
    np.testing.assert_allclose(resumed.sample().weight.numpy(), 1.0)


def test_another_capacity_or_unroll_length_is_refused():
    """With both numbers, what to do, and the contents untouched."""
    buffer = make_buffer(1, 4, capacity=80)
    add_unrolls(buffer, ScriptedWorker([0], 4), 2)
    state = copy.deepcopy(buffer.state_dict())
    for other in (make_buffer(1, 4, capacity=160), make_buffer(1, 8, capacity=80)):
        with pytest.raises(CheckpointError, match=r"capacity=80 unroll_length=4.*resume with"):
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
