"""Threads of updates: tried in turns, and the fastest number stays."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import pytest
import torch

from actorlearner import threads
from actorlearner.threads import UpdateThreads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def updates(
    tried: UpdateThreads, seconds: Mapping[int, float], count: int, patch: pytest.MonkeyPatch
) -> list[int]:
    """Threads that each of ``count`` updates had, which takes ``seconds`` by their number."""
    now, seen = 0.0, []
    patch.setattr(threads.time, "perf_counter", lambda: now)
    for _ in range(count):
        with tried.update():
            seen.append(torch.get_num_threads())
            now += seconds[seen[-1]]
        assert torch.get_num_threads() == 1
    return seen


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 0.025, 2: 0.018}, 2),
        ({1: 0.025, 2: 0.024}, 1),  # not worth a core
        ({1: 0.025, 2: 0.3}, 1),
        ({1: 0.03, 3: 0.02, 4: 0.019}, 3),
        ({1: 0.03, 3: 0.029, 4: 0.012}, 4),
        ({2: 0.004, 3: 0.002}, 3),
    ],
)
def test_the_fastest_stays(seconds, best, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    tried = UpdateThreads(list(seconds))
    seen = updates(tried, seconds, 2000, monkeypatch)
    assert set(seen[:400]) >= set(seconds)
    assert set(seen[1000:]) == {best}
    (message,) = caplog.messages
    assert message.startswith(f"Updates run with {best} torch thread")
    assert f"{1e3 * seconds[best]:.1f} ms with {best}" in message


def test_they_take_turns(monkeypatch):
    """A stretch in which the machine is busy meets all of them."""
    seen = updates(UpdateThreads([1, 2]), {1: 0.0625, 2: 0.0625}, 50, monkeypatch)
    assert seen[:10] == [1] * 10  # the warm-up
    assert seen[10:34] == [*[1] * 4, *[2] * 4] * 3


def test_a_short_disturbance_does_not_decide(monkeypatch):
    """Right after the warm-up workers may fill all cores for a moment, to which a turn is long."""
    now, tried = 0.0, UpdateThreads([1, 2])
    monkeypatch.setattr(threads.time, "perf_counter", lambda: now)
    while tried.chosen is None:
        with tried.update():
            busy = now < 0.9
            now += {1: 0.016, 2: 0.05 if busy else 0.011}[torch.get_num_threads()]
    assert tried.chosen == 2


def test_short_updates_keep_the_smallest_number(monkeypatch):
    """Threads that wait for each other on a busy machine would cost them more than they can win."""
    seen = updates(UpdateThreads([1, 2]), {1: 0.001, 2: 0.0001}, 200, monkeypatch)
    assert set(seen) == {1}


def test_one_number_is_not_tried(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    assert set(updates(UpdateThreads([3]), {3: 0.01}, 200, monkeypatch)) == {3}
    assert not caplog.messages


@pytest.mark.parametrize(
    ("busy_cores", "numbers"), [(0, {4}), (1, {3}), (2, {2}), (3, {1}), (4, {1}), (9, {1})]
)
def test_others_that_compute_are_left_their_cores(busy_cores, numbers, monkeypatch):
    tried, seconds = UpdateThreads([1, 4]), {1: 0.04, 2: 0.03, 3: 0.02, 4: 0.01}
    updates(tried, seconds, 500, monkeypatch)
    assert tried.chosen == 4
    tried.busy_cores = busy_cores
    assert set(updates(tried, seconds, 20, monkeypatch)) == numbers


def test_what_updates_take_with_fewer_threads_does_not_count(monkeypatch):
    tried, seconds = UpdateThreads([1, 2, 3]), {1: 0.025, 2: 0.018, 3: 0.012}
    tried.busy_cores = 1
    assert set(updates(tried, seconds, 1000, monkeypatch)) == {1, 2}
    assert set(updates(tried, seconds, 1000, monkeypatch)) == {1}, "it is the turn of 3"
    assert tried.chosen is None
    tried.busy_cores = 0
    updates(tried, seconds, 500, monkeypatch)
    assert tried.chosen == 3


def test_a_number_that_was_asked_for_is_kept_beside_others(monkeypatch):
    tried = UpdateThreads([3])
    tried.busy_cores = 2
    assert set(updates(tried, {3: 0.01}, 20, monkeypatch)) == {3}


def test_an_update_that_fails_leaves_one_thread():
    with pytest.raises(ZeroDivisionError), UpdateThreads([2]).update():
        raise ZeroDivisionError
    assert torch.get_num_threads() == 1
