"""Feedback comes to the store at once, or an update later; that of a step not made never."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from actorlearner import feedback
from actorlearner.feedback import FeedbackLine


class Shelf:
    """A store that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[list[int], dict[str, list[float]]]] = []

    def feed_back(self, keys: Any, arrays: Any) -> None:
        assert all(isinstance(array, np.ndarray) for array in arrays.values())
        self.told.append((keys.tolist(), {name: a.tolist() for name, a in arrays.items()}))


class Event:
    """Of a device: what was copied before it can be read once it was waited for."""

    log: list[str]

    def __init__(self, device: torch.device) -> None:
        Event.log.append(f"event on {device.type}")

    def record(self) -> None:
        Event.log.append("recorded")

    def synchronize(self) -> None:
        Event.log.append("waited")


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.log = []
    monkeypatch.setattr(torch, "Event", Event)


def send(line: FeedbackLine, key: int, is_made: Any) -> None:
    priority = torch.tensor([key / 2], requires_grad=True)
    line.send(np.array([key]), {"priority": priority}, is_made)


def told(*keys: int) -> list[Any]:
    return [([key], {"priority": [key / 2]}) for key in keys]


def test_from_the_cpu_at_once() -> None:
    shelf = Shelf()
    line = FeedbackLine(shelf, True, nullcontext())  # type: ignore[arg-type]
    send(line, 1, True)
    assert shelf.told == told(1)
    send(line, 2, False)
    line.send(np.array([3]), {}, True)
    line.flush()
    assert shelf.told == told(1)
    assert Event.log == []


def test_from_a_device_an_update_later() -> None:
    """Two training steps of an update send some; no wait before the next update is made."""
    shelf = Shelf()
    line = FeedbackLine(shelf, False, nullcontext())  # type: ignore[arg-type]
    yes, no = torch.tensor(True), torch.tensor(False)
    send(line, 1, yes)
    send(line, 2, no)
    line.deliver()
    assert shelf.told == []
    assert Event.log == ["event on cpu", "recorded"] * 2
    send(line, 3, True)  # a step that the host did wait for
    send(line, 4, False)
    line.send(np.array([5]), {}, yes)
    line.deliver()
    assert shelf.told == told(1)
    line.deliver()
    assert shelf.told == told(1, 3)
    assert Event.log[4:] == ["event on cpu", "recorded", "waited", "waited", "waited"]


def test_all_of_it_before_a_checkpoint() -> None:
    shelf = Shelf()
    line = FeedbackLine(shelf, False, nullcontext())  # type: ignore[arg-type]
    send(line, 1, torch.tensor(True))
    line.deliver()
    send(line, 2, torch.tensor(True))
    line.flush()
    assert shelf.told == told(1, 2)
    line.flush()
    assert shelf.told == told(1, 2)


def test_copies_do_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *a, **more: asked.append((a, more)) or self.clone()
    )
    assert feedback._copied(torch.tensor([1.0])).tolist() == [1.0]
    assert asked == [(("cpu",), {"non_blocking": True})]


@pytest.mark.parametrize("is_at_once", [True, False])
def test_the_time_that_the_store_takes_is_its_own(is_at_once: bool) -> None:
    """And not the time in which a device is waited for."""

    class Timed(Shelf):
        def feed_back(self, keys: Any, arrays: Any) -> None:
            Event.log.append("the store")

    class Span:
        def __enter__(self) -> None:
            Event.log.append("begin")

        def __exit__(self, *_: Any) -> None:
            Event.log.append("end")

    line = FeedbackLine(Timed(), is_at_once, Span())  # type: ignore[arg-type]
    send(line, 1, True)
    line.flush()
    send(line, 2, True)
    line.flush()
    on_its_way = [] if is_at_once else ["event on cpu", "recorded", "waited"]
    assert Event.log == [*on_its_way, "begin", "the store", "end"] * 2
