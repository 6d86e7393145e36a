"""SIGINT and SIGTERM: the first is noted, a second acts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from actorlearner import interrupts
from actorlearner.interrupts import Interrupts

HANDLED = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _handlers_stay() -> object:
    before = [signal.getsignal(number) for number in HANDLED]
    yield
    assert [signal.getsignal(number) for number in HANDLED] == before


@contextmanager
def deferring() -> Iterator[Interrupts]:
    with Interrupts() as noted:
        noted.defer()
        yield noted


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_while_there_is_nothing_to_save_the_first_acts_at_once(
    number: signal.Signals, kind: type[BaseException]
) -> None:
    with Interrupts() as noted, pytest.raises(kind):
        signal.raise_signal(number)
    assert noted.signal == number
    assert not noted.insists


@pytest.mark.parametrize("number", HANDLED)
def test_the_first_is_only_noted(number: signal.Signals) -> None:
    with deferring() as noted:
        noted.raise_if_any()
        signal.raise_signal(number)
        assert noted.signal == number
        assert not noted.insists
        with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
            noted.raise_if_any()
    if number == signal.SIGINT:
        assert caught.type is KeyboardInterrupt
    else:
        assert isinstance(caught.value, SystemExit)
        assert caught.value.code == 143


def test_a_second_at_the_same_moment_is_the_same() -> None:
    """`timeout`, `uv run` and others signal both the process and its group."""
    with deferring() as noted:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert noted.signal == signal.SIGINT
        assert not noted.insists


@pytest.mark.parametrize(
    ("second", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_second_a_moment_later_acts_at_once(
    monkeypatch: pytest.MonkeyPatch, second: signal.Signals, kind: type[BaseException]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: clock[0])
    with deferring() as noted:
        signal.raise_signal(signal.SIGINT)
        clock[0] += 0.49
        signal.raise_signal(second)
        assert not noted.insists
        clock[0] += 0.02  # since the first: a stream of signals must not put it off for ever
        with pytest.raises(kind):
            signal.raise_signal(second)
        assert noted.insists


def test_a_new_one_knows_nothing_of_the_last() -> None:
    with deferring():
        signal.raise_signal(signal.SIGTERM)
    with deferring() as noted:
        assert noted.signal is None
        noted.raise_if_any()


def test_the_handlers_come_back_after_an_exception() -> None:
    with pytest.raises(RuntimeError, match="inside"), Interrupts():
        raise RuntimeError("inside")  # and see the fixture


def test_in_another_thread_it_does_nothing() -> None:
    seen = []

    def enter() -> None:
        with Interrupts() as noted:
            seen.append((signal.getsignal(signal.SIGINT), noted.signal))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(before, None)]
