"""Workers that are lost: which are replaced, how often, and what becomes of their rows."""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorlearner.assembly import going_on
from actorlearner.contracts import (
    BadInput,
    EvaluationRequest,
    Failure,
    Launcher,
    Unroll,
    WorkerError,
    WorkerSpec,
)
from actorlearner.envs import GymEnvFactory
from actorlearner.interrupts import Terminated
from actorlearner.launch.inline import InlineLauncher
from actorlearner.launch.local import LocalLauncher
from actorlearner.launch.processes import bound_receiving
from actorlearner.launch.restarts import Restarts, RestartSettings, back_off_s
from actorlearner.launch.seat import Seat
from actorlearner.streams import StreamLedger
from tests.environments import Misbehaves, Places, PlacesPolicy, RowChecker, snapshot, worker_specs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by signals")

PLACES = GymEnvFactory.of(Places)
REQUEST = EvaluationRequest(episodes=5, step_limit=3, seed=9, env_steps=40)
PATIENCE_S = 30.0


class Run:
    """A launcher, and a caller that takes in what it gathers, as the Trainer does.

    Attributes:
        notes: what was told.
        unrolls: copies of all that was gathered.
    """

    def __init__(
        self, launcher: Launcher, *factories: GymEnvFactory, lockstep: bool = False, **changes: Any
    ) -> None:
        self.launcher = launcher
        self.checker = RowChecker(3, seed_every_episode=lockstep, gaps=True)
        self.unrolls: list[Unroll] = []
        self.notes: list[str] = []
        self._specs = worker_specs(*factories, seed_every_episode=lockstep, **changes)
        self._ledger = StreamLedger(self._specs[0].num_streams, record_actions=lockstep)

    def __enter__(self) -> Run:
        self.launcher.__enter__()
        self.launcher.start(self._specs, snapshot(0), self._go_on)
        return self

    def __exit__(self, *error: Any) -> None:
        self.launcher.__exit__(*error)

    def _go_on(self, spec: WorkerSpec, attempt: int) -> WorkerSpec:
        return going_on(spec, self._ledger, attempt)

    def gather(self) -> None:
        for unroll in list(map(copy.deepcopy, self.launcher.gather(0.05, lambda: True))):
            self.checker.check(unroll)
            self._ledger.note(unroll)
            self.unrolls.append(unroll)
        self.notes += self.launcher.notes
        self.launcher.notes.clear()

    def gather_until(self, enough: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not enough():
            assert time.monotonic() < deadline, "waited too long"
            self.gather()

    def gather_more(self, count: int = 3) -> None:
        """``count`` more unrolls of every worker."""
        wanted = {spec.index: self.count(spec.index) + count for spec in self._specs}
        self.gather_until(lambda: all(self.count(i) >= n for i, n in wanted.items()))

    def count(self, worker: int) -> int:
        return sum(unroll.worker == worker for unroll in self.unrolls)

    def kill(self, worker: int, number: int = signal.SIGKILL) -> None:
        assert isinstance(self.launcher, LocalLauncher)
        child = self.launcher._seats[worker]
        if not child.is_lost:
            os.kill(child.process.pid, number)


def local(**settings: Any) -> LocalLauncher:
    return LocalLauncher(start_method="forkserver", **settings)


def once(tmp_path: Path, where: str, how: str = "raise", at: int = 0) -> GymEnvFactory:
    """Misbehaves once, in whichever process is first."""
    return GymEnvFactory.of(
        _Once, {"flag": tmp_path / "done", "where": where, "how": how, "at": at}
    )


class _Once(Misbehaves):
    def __init__(self, flag: Path, **how: Any) -> None:
        self._flag = flag
        super().__init__(**how)

    def _misbehave(self) -> None:
        if not self._flag.exists():
            self._flag.touch()
            super()._misbehave()


# ---------------------------------------------------------------------------------- processes


def test_killed_and_stopped_workers_are_replaced_and_every_row_is_right():
    """Also those that arrive afterwards; rows are stored or counted as dropped."""
    generator = random.Random(1)
    with Run(local(max_restarts=1000, env_timeout_s=0.3), PLACES, PLACES, PLACES) as run:
        run.gather_more(1)
        for _ in range(12):
            number = generator.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            run.kill(generator.randrange(3), number)
            until = time.monotonic() + generator.uniform(0.0, 0.2)
            run.gather_until(lambda until=until: time.monotonic() > until)
        run.gather_more()
        metrics = run.launcher.metrics()
    assert 5 <= metrics["restarts"] <= 12
    assert 0 <= metrics["rows_dropped"] <= 12 * 2 * 2 * 5
    assert 1 <= run.checker.gaps <= metrics["restarts"]
    assert len(run.notes) == metrics["restarts"]
    assert "was killed by SIGKILL" in "".join(run.notes)


@pytest.mark.parametrize("how", ["exit", "SIGSEGV"])
def test_a_process_that_ends_in_a_step_is_replaced(how, tmp_path):
    with Run(local(), once(tmp_path, "step", how, at=1), PLACES, unroll_length=7) as run:
        run.gather_more(4)
        metrics = run.launcher.metrics()
    assert metrics["restarts"] == 1
    # In the second step of its first environment, in which episodes of one step may have rested.
    assert metrics["rows_dropped"] in (2, 4)
    assert run.checker.gaps == 1


@pytest.mark.parametrize("where", ["constructor", "reset", "step"])
def test_what_hangs_is_replaced(where, tmp_path):
    limits = {"env_timeout_s": 1, "start_timeout_s": 3 if where == "constructor" else 60}
    with Run(local(**limits), once(tmp_path, where, "sleep"), PLACES) as run:
        run.gather_more()
        assert run.launcher.metrics()["restarts"] == 1
    key = "start_timeout_s=3" if where == "constructor" else "env_timeout_s=1"
    assert f"launch.{key}" in run.notes[0]


class _Slow(Places):
    def step(self, action: Any) -> Any:
        time.sleep(0.05)
        return super().step(action)


def test_slow_is_not_dead():
    """An unroll takes longer than a sign of life may, a step far less."""
    with Run(local(env_timeout_s=1), GymEnvFactory.of(_Slow), unroll_length=15) as run:
        run.gather_more(1)
        assert run.launcher.metrics()["restarts"] == 0


def test_what_nobody_watched_is_no_silence():
    """The learner was in a long update, or all processes were paused."""
    child = Seat("collect", 0, "Places")
    child.begun(None, None)
    child.is_ready = True
    child.order = child.owes.append
    child.order(0)
    child._looked_at -= 1000
    assert child.silence_s() <= 5
    child._looked_at -= 1
    assert 6 <= child.silence_s() <= 7
    child.pulse[1] += 1
    child._looked_at -= 1
    assert child.silence_s() == 0
    child.owes.clear()
    child._looked_at -= 1
    assert child.silence_s() == 0, "it has nothing to do"


def lockstep_unrolls(disturb: Callable[[Run, int], None]) -> list[Unroll]:
    with Run(local(lockstep=True), PLACES, PLACES, lockstep=True) as run:
        for number in range(8):
            run.launcher.publish(snapshot(number))
            disturb(run, number)
            run.gather()
        return run.unrolls


def test_in_lockstep_a_lost_worker_changes_nothing():
    """Whether it is lost between rounds, or in the middle of one; it goes on in its episode."""

    def disturb(run: Run, number: int) -> None:
        if number in (2, 5):
            run.kill(number % 2)
        elif number == 6:
            for worker in (0, 1):
                run.kill(worker, signal.SIGSTOP)
            order, run.launcher._seats[0].order = run.launcher._seats[0].order, None
            run.launcher._seats[0].order = lambda slot: (order(slot), run.kill(0), run.kill(1))

    for one, other in zip(
        lockstep_unrolls(disturb), lockstep_unrolls(lambda *_: None), strict=True
    ):
        for item in fields(Unroll):
            if item.name not in ("seconds", "started_at"):
                values = getattr(one, item.name), getattr(other, item.name)
                np.testing.assert_equal(*values, item.name, strict=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_evaluation_begins_again_and_gives_the_same(number):
    with Run(local(env_timeout_s=1), GymEnvFactory.of(_Slow)) as run:
        wanted = run.launcher.evaluate(snapshot(4), REQUEST)
        assert run.launcher.request_evaluation(snapshot(4), REQUEST)
        time.sleep(0.2)
        os.kill(run.launcher._evaluator.process.pid, number)
        run.launcher.publish(snapshot(5))
        deadline = time.monotonic() + PATIENCE_S
        while (result := run.launcher.poll_evaluation(0.1)) is None:
            assert time.monotonic() < deadline
        assert result == wanted
        assert run.launcher.metrics()["restarts"] == 1


class _SlowStart(Places):
    """Takes as long to be built and to begin as a sign of life may; with several, longer."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(0.25)

    def reset(self, **arguments: Any) -> Any:
        if self.place[2] == 0 and arguments.get("seed") is not None:
            time.sleep(0.25)
        return super().reset(**arguments)


def test_many_slow_beginnings_are_many_signs_of_life():
    """Of eight environments that an evaluation builds, and of four first resets."""
    with Run(local(env_timeout_s=0.7), GymEnvFactory.of(_SlowStart), envs_per_worker=4) as run:
        run.gather_more(1)
        assert run.launcher.evaluate(snapshot(0), REQUEST._replace(episodes=8)).returns
        assert run.launcher.metrics()["restarts"] == 0


def test_half_a_message_is_a_hang():
    """A worker that is stopped while it tells something long; others are listened to again."""
    with Run(local(env_timeout_s=1), PLACES, PLACES) as run:
        run.gather_more(1)
        child = run.launcher._seats[0]
        run.kill(0, signal.SIGSTOP)
        # What it would have sent: a header that promises more than comes.
        ours, theirs = run.launcher._context.Pipe()
        bound_receiving(ours, 1.0)
        os.write(theirs.fileno(), b"\0\0\1\0half")
        child.connection.close()
        child.connection = ours
        run.gather_more(3)
        theirs.close()
        assert run.launcher.metrics()["restarts"] == 1
    assert "it stopped in the middle of a message" in run.notes[0]


@pytest.mark.parametrize("number", [signal.SIGRTMIN + 6, signal.SIGKILL])
def test_every_signal_is_told(number):
    """Also those without a name."""
    with Run(local(), PLACES) as run:
        run.gather_more(1)
        run.kill(0, number)
        run.gather_until(lambda: run.notes)
    assert ("SIGKILL" if number == signal.SIGKILL else f"signal {int(number)}") in run.notes[0]


# -------------------------------------------------------------------------------------- errors

LAUNCHERS = {"inline": InlineLauncher, "processes": local}


@pytest.mark.parametrize("kind", LAUNCHERS)
@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_error_of_an_environment_replaces_its_worker_if_asked(kind, where, tmp_path):
    launcher = LAUNCHERS[kind](on_env_error="restart")
    with Run(launcher, once(tmp_path, where, at=3), PLACES) as run:
        run.gather_more(4)
        assert run.launcher.metrics()["restarts"] == 1
    assert run.checker.gaps == 1
    (note,) = run.notes
    head = f"worker 0 (_Once) failed in {where}: ZeroDivisionError: boom\nTraceback"
    assert note.startswith(head)
    assert "1 of at most 20 in an hour (launch.max_restarts)" in note


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_an_error_of_an_environment_ends_the_run_by_default(kind, tmp_path):
    with Run(LAUNCHERS[kind](), once(tmp_path, "step")) as run:
        with pytest.raises(WorkerError, match="ZeroDivisionError"):
            run.gather_more()
        assert run.launcher.metrics()["restarts"] == 0


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_an_evaluation_that_an_environment_ended_begins_again_if_asked(kind, tmp_path):
    with Run(LAUNCHERS[kind](on_env_error="restart"), PLACES) as run:
        wanted = run.launcher.evaluate(snapshot(4), REQUEST)
    flaky = GymEnvFactory.of(_OnceEvaluating, {"flag": tmp_path / "done"})
    with Run(LAUNCHERS[kind](on_env_error="restart"), flaky) as run:
        assert run.launcher.evaluate(snapshot(4), REQUEST) == wanted
        assert run.launcher.metrics()["restarts"] == 1


class _OnceEvaluating(_Once):
    """Raises once, in an evaluation, whose seeds are odd."""

    def __init__(self, flag: Path) -> None:
        super().__init__(flag, where="step")
        self._bad = "", 0

    def step(self, action: Any) -> Any:
        if self.place[0] % 2:
            self._misbehave()
        return super().step(action)


def test_what_ends_the_run_from_outside_is_no_error_of_an_environment():
    """SIGTERM raises in the process of the environment, if that is the learner's."""

    class Ends(Places):
        def step(self, action: Any) -> Any:
            raise Terminated(143)

    with (
        Run(InlineLauncher(on_env_error="restart"), GymEnvFactory.of(Ends)) as run,
        pytest.raises(Terminated),
    ):
        run.gather()


class _BadPolicy(PlacesPolicy):
    def act(self, observation: Any, generator: np.random.Generator) -> Any:
        raise ZeroDivisionError("of the policy")


class _BadWhenLoading(PlacesPolicy):
    def load(self, snapshot: Any) -> None:
        raise ZeroDivisionError("of the policy")


class _BadPlaces(Places):
    def step(self, action: Any) -> Any:
        raise BadInput("there is no such thing")


@pytest.mark.parametrize("kind", LAUNCHERS)
@pytest.mark.parametrize("blame", ["policy", "loading", "input"])
def test_errors_that_would_come_again_end_the_run(kind, blame):
    launcher = LAUNCHERS[kind](on_env_error="restart")
    is_policy = blame != "input"
    factory = PLACES if is_policy else GymEnvFactory.of(_BadPlaces)
    policies = {"policy": _BadPolicy, "loading": _BadWhenLoading}
    changes = {"policy_factory": policies[blame]} if is_policy else {}
    with Run(launcher, factory, **changes) as run:
        with pytest.raises(WorkerError if is_policy else BadInput):
            run.gather_more()
        assert run.launcher.metrics()["restarts"] == 0


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_a_run_ends_with_its_first_cause_when_too_many_were_lost(kind):
    bad = GymEnvFactory.of(Misbehaves, {"where": "step", "at": 3})
    launcher = LAUNCHERS[kind](on_env_error="restart", max_restarts=2)
    with Run(launcher, bad) as run:
        with pytest.raises(WorkerError) as caught:
            run.gather_more()
        assert run.launcher.metrics()["restarts"] == 2
    first, last = caught.value.failures
    assert first.at < last.at
    assert first.error == last.error == "ZeroDivisionError: boom"


def test_restarts_are_counted_by_the_hour():
    now = [0.0]
    restarts = Restarts(RestartSettings(max_restarts=2), clock=lambda: now[0])
    causes = [Failure(0, "Places", "an unroll", f"loss {i}", at=float(i)) for i in range(4)]
    for cause in causes[:2]:
        assert restarts.refuse(cause) is None
        restarts.note(cause, dropped=3)
        now[0] += 1000
    last, first = restarts.refuse(causes[2])
    assert first == causes[0]
    assert last.detail == (
        "loss 2\nlaunch.max_restarts=2 allows no further replacement within an hour"
    )
    now[0] = 3600.0
    assert restarts.refuse(causes[2]) is None
    assert restarts.metrics() == {"restarts": 2, "rows_dropped": 6}


def test_back_off_grows_to_a_bound():
    waits = [back_off_s(attempt) for attempt in range(1, 2000)]
    assert waits[:4] == [0.0, 0.5, 1.0, 2.0]
    assert waits == sorted(waits)
    assert waits[-1] == 30.0
