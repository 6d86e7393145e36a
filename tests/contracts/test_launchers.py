"""What every launcher keeps: order, alignment, bounds, failures that arrive, and nothing left."""

from __future__ import annotations

import copy
import gc
import multiprocessing.connection
import multiprocessing.process
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium import spaces

from actorlearner.adapter import EnvAdapter
from actorlearner.assembly import going_on
from actorlearner.contracts import (
    BadInput,
    EvaluationRequest,
    EvaluationResult,
    Launcher,
    LauncherClosed,
    StreamState,
    Unroll,
    WorkerError,
)
from actorlearner.envs import GymEnvFactory
from actorlearner.launch.inline import InlineLauncher
from actorlearner.launch.local import LocalLauncher
from actorlearner.launch.processes import start_processes
from actorlearner.streams import StreamLedger, stream_seed
from actorlearner.worker import EnvWorker
from tests.environments import (
    Misbehaves,
    Pictured,
    Places,
    RowChecker,
    Takes,
    Threads,
    plan,
    snapshot,
    worker_specs,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

KINDS = ("inline", "forkserver", "spawn")
PROCESSES = ("forkserver", "spawn")
# Where what only spawn can break is covered by another test already: each start takes seconds.
SLOW_SPAWN = pytest.param("spawn", marks=pytest.mark.slow)
PLACES = GymEnvFactory.of(Places)
REQUEST = EvaluationRequest(episodes=5, step_limit=3, seed=9, env_steps=40)
PATIENCE_S = 30.0


def launcher_of(kind: str, *, lockstep: bool = False, **settings: Any) -> Launcher:
    if kind == "inline":
        return InlineLauncher()
    return LocalLauncher(lockstep=lockstep, start_method=kind, **settings)


def misbehaves(where: str = "", **kwargs: Any) -> GymEnvFactory:
    return GymEnvFactory.of(Misbehaves, {"where": where, **kwargs})


def always() -> bool:
    return True


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
    return result


def descendants() -> set[psutil.Process]:
    return {p for p in psutil.Process().children(recursive=True) if is_alive(p)}


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """No process, no descriptor, nothing in /dev/shm: whatever a test did to its launcher."""
    start_processes("forkserver")
    resource_tracker.ensure_running()  # comes with the first process, and stays
    before = descendants(), descriptors(), set(os.listdir("/dev/shm"))
    yield
    assert descendants() <= before[0]
    assert descriptors() <= before[1]
    assert set(os.listdir("/dev/shm")) <= before[2]


def gathered(
    launcher: Launcher, enough: Callable[[list[Unroll]], bool], publish: bool = False
) -> list[Unroll]:
    """Copies of unrolls, until there are enough."""
    unrolls: list[Unroll] = []
    deadline = time.monotonic() + PATIENCE_S
    while not enough(unrolls):
        assert time.monotonic() < deadline, "no more unrolls"
        for unroll in launcher.gather(0.1, always):
            unrolls.append(copy.deepcopy(unroll))
        if publish:
            launcher.publish(snapshot(len(unrolls)))
    return unrolls


def all_have(count: int, workers: int = 2) -> Callable[[list[Unroll]], bool]:
    return lambda unrolls: all(
        sum(unroll.worker == worker for unroll in unrolls) >= count for worker in range(workers)
    )


# ------------------------------------------------------------------------------------- order


def lockstep_run(kind: str) -> list[Unroll | EvaluationResult]:
    """Two workers with two environments, several snapshots, an evaluation in between."""
    made: list[Unroll | EvaluationResult] = []
    with launcher_of(kind, lockstep=True) as launcher:
        launcher.start(worker_specs(PLACES, PLACES, seed_every_episode=True), snapshot(0))
        for version in (0, 0, 1, 2, 2, 5, 6):
            launcher.publish(snapshot(version))
            before = len(made)
            made += [copy.deepcopy(unroll) for unroll in launcher.gather(1.0, always)]
            assert [u.worker for u in made[before:]] == [0, 1]
            assert all(u.version == version for u in made[before:])
            if version == 1:
                assert list(launcher.gather(0.0, lambda: False)) == []
                made.append(launcher.evaluate(snapshot(4), REQUEST))
    return made


@pytest.fixture(scope="module")
def inline_run() -> list[Unroll | EvaluationResult]:
    return lockstep_run("inline")


@pytest.mark.parametrize("kind", KINDS)
def test_lockstep_is_bit_equal(kind, inline_run):
    checker = RowChecker(3, seed_every_episode=True)
    made = lockstep_run(kind)
    for one, other in zip(made, inline_run, strict=True):
        if isinstance(one, EvaluationResult):
            assert one == other
            continue
        checker.check(one)
        for item in fields(Unroll):
            value, wanted = getattr(one, item.name), getattr(other, item.name)
            if item.name not in ("seconds", "started_at"):
                np.testing.assert_equal(value, wanted, item.name, strict=True)
    assert checker.rows == 7 * 2 * 5 * 2


@pytest.mark.parametrize("kind", ["forkserver", SLOW_SPAWN])
def test_everything_arrives_in_sequence(kind):
    """Each worker's unrolls without a gap, each of one version, the newest before long."""
    checker = RowChecker(3, seed_every_episode=False)
    with launcher_of(kind) as launcher:
        launcher.start(worker_specs(PLACES, PLACES), snapshot(0))
        unrolls = gathered(launcher, all_have(20), publish=True)
        for unroll in unrolls:
            checker.check(unroll)
        for worker in (0, 1):
            versions = [unroll.version for unroll in unrolls if unroll.worker == worker]
            assert versions == sorted(versions)
            assert versions[-1] > 1
        assert all(set(u.seconds) == {"env", "policy", "slots", "limiter"} for u in unrolls)
        assert all(0 <= time.monotonic() - u.started_at < PATIENCE_S for u in unrolls)
        launcher.publish(snapshot(9999))
        gathered(launcher, lambda us: {u.worker for u in us if u.version == 9999} == {0, 1})


def test_more_slots_and_unrolls_of_one_row():
    checker = RowChecker(3, seed_every_episode=False)
    with launcher_of("forkserver", slots=5) as launcher:
        launcher.start(worker_specs(PLACES, PLACES, unroll_length=1), snapshot(0))
        for unroll in gathered(launcher, all_have(100)):
            checker.check(unroll)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_credits_bound_what_workers_do(slots):
    """A worker stops when its slots are full and nobody may insert, and goes on later."""
    checker = RowChecker(3, seed_every_episode=False)
    with launcher_of("forkserver", slots=slots) as launcher:
        launcher.start(worker_specs(PLACES, PLACES), snapshot(0))
        unrolls = []
        deadline = time.monotonic() + PATIENCE_S
        while len(unrolls) < 2 * slots and time.monotonic() < deadline:
            unrolls += [copy.deepcopy(u) for u in launcher.gather(0.1, lambda: False)]
        for _ in range(3):
            assert list(launcher.gather(0.1, lambda: False)) == []
        unrolls += gathered(launcher, all_have(2 * slots + 1))
        for unroll in unrolls:
            checker.check(unroll)
        for worker in (0, 1):
            waits = [u.seconds["limiter"] for u in unrolls if u.worker == worker]
            assert waits[:slots] == [0.0] * slots
            assert 0.3 < waits[slots] < PATIENCE_S, "three times 0.1 s"
            assert max(waits[slots + 1 : 2 * slots], default=0.0) < 0.1, "it did not wait again"


def test_workers_that_wait_for_a_learner_that_is_elsewhere_wait_for_slots():
    with launcher_of("forkserver", slots=1) as launcher:
        launcher.start(worker_specs(PLACES), snapshot(0))
        gathered(launcher, all_have(1, workers=1))
        time.sleep(0.2)
        unrolls = gathered(launcher, all_have(2, workers=1))
        assert max(unroll.seconds["slots"] for unroll in unrolls) > 0.15
        assert not any(unroll.seconds["limiter"] for unroll in unrolls)


@pytest.mark.parametrize(("takes", "cores"), [({"computes_s": 0.01}, 1), ({"waits_s": 0.03}, 0)])
def test_cores_that_workers_keep_busy(takes, cores):
    """Those that compute do, not those that wait for their environments or for a credit."""
    factory = GymEnvFactory.of(Takes, takes)
    with launcher_of("forkserver", slots=1) as launcher:
        assert launcher.busy_cores() == 0
        launcher.start(worker_specs(factory, factory), snapshot(0))
        assert launcher.busy_cores() == 2, "they start"

        def at_work() -> bool:  # again, if something else had their cores
            gathered(launcher, all_have(1))
            return launcher.busy_cores() == 2 * cores

        wait_for(at_work)
        held: set[int] = set()
        while held != {0, 1}:
            held |= {unroll.worker for unroll in launcher.gather(0.1, lambda: False)}
        assert launcher.busy_cores() == 0
        launcher.request_evaluation(snapshot(0), REQUEST)
        assert launcher.busy_cores() == 1
        assert wait_for(launcher.poll_evaluation)
        assert launcher.busy_cores() == 0


def test_credits_of_a_gather_that_was_left():
    """Whoever leaves the loop early loses no slot."""
    checker = RowChecker(3, seed_every_episode=False)
    with launcher_of("forkserver", slots=1) as launcher:
        launcher.start(worker_specs(PLACES), snapshot(0))
        count, deadline = 0, time.monotonic() + 10
        while count < 4:
            assert time.monotonic() < deadline, "no more unrolls"
            for unroll in launcher.gather(0.1, always):
                checker.check(unroll)
                count += 1
                break


def test_one_gather_gives_no_more_than_the_slots_of_a_worker():
    """Else a worker that is faster than the learner would keep it there."""
    counts = []
    with launcher_of("forkserver", slots=3) as launcher:
        launcher.start(worker_specs(PLACES, PLACES, unroll_length=1), snapshot(0))
        while counts.count({0: 3, 1: 3}) < 2:
            workers = []
            for unroll in launcher.gather(0.1, always):
                workers.append(unroll.worker)
                assert workers.count(unroll.worker) <= 3
                time.sleep(0.01)
            counts.append({worker: workers.count(worker) for worker in sorted(set(workers))})
            assert len(counts) < 50


def test_pipes_carry_little(monkeypatch):
    """Less than 1 kB per unroll, however large the observations, however many the episodes."""

    class Large(Places):
        observation_space = spaces.Box(0, 255, (100, 100), np.uint8)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros((100, 100), np.uint8), super().reset(seed=seed)[1]

        def step(self, action: Any) -> Any:
            return np.zeros((100, 100), np.uint8), *super().step(action)[1:]

    received = []
    recv_bytes = multiprocessing.connection.Connection._recv_bytes

    def counted(connection: Any, *args: Any) -> Any:
        buffer = recv_bytes(connection, *args)
        received.append(len(buffer.getbuffer()))
        return buffer

    factory = GymEnvFactory.of(Large)
    with launcher_of("forkserver") as launcher:
        many = {"unroll_length": 60, "envs_per_worker": 8}
        specs = worker_specs(factory, env_spec=EnvAdapter(Large(), "Large").spec, **many)
        launcher.start(specs, snapshot(0))
        monkeypatch.setattr(multiprocessing.connection.Connection, "_recv_bytes", counted)
        unrolls = gathered(launcher, all_have(10, workers=1))
        monkeypatch.undo()
    assert min(len(unroll.episodes) for unroll in unrolls) > 60
    assert len(received) >= len(unrolls)
    assert max(received) < 1000


@pytest.mark.parametrize("kind", ["inline", "forkserver"])
def test_notes_are_told_once(kind):
    lost = StreamState(0, np.zeros(1, np.int64), {"observation": np.full(4, -1)})
    specs = worker_specs(PLACES, PLACES, seed_every_episode=True, stream_states=(lost, lost))
    with launcher_of(kind, lockstep=True) as launcher:
        launcher.start(specs, snapshot(0))
        for _ in range(3):
            list(launcher.gather(1.0, always))
        ends = [note.rpartition("; ")[2] for note in launcher.notes]
    wanted = "the episodes of streams {} were started anew"
    assert sorted(ends) == [wanted.format(streams) for streams in ([0, 1], [2, 3])]


class PlacesTell(Places):
    """Tell their state, slowly if asked to: there is time to lose them meanwhile."""

    sleeps_s = 0.0

    def get_state(self) -> Any:
        time.sleep(self.sleeps_s)
        return self.place

    def set_state(self, state: Any) -> None:
        self.place[:] = state


@pytest.mark.parametrize("kind", ["inline", "forkserver"])
def test_where_streams_stand(kind):
    specs = worker_specs(*[GymEnvFactory.of(PlacesTell)] * 2, seed_every_episode=True)
    with launcher_of(kind, lockstep=True) as launcher:
        launcher.start(specs, snapshot(0))
        assert launcher.env_states() == {}
        for sequence in range(3):
            unrolls = list(launcher.gather(1.0, always))
            states = launcher.env_states()
            assert sorted(states) == [0, 1, 2, 3]
            for unroll in unrolls:
                for column, stream in enumerate(map(int, unroll.streams)):
                    number, state = states[stream]
                    assert number == sequence
                    place = unroll.observation["observation"][-1, column]
                    np.testing.assert_array_equal(state["env"]["layers"][0], place)
        assert launcher.notes == []


def test_a_worker_that_is_lost_while_it_tells_where_it_stands():
    """It is asked again when it has begun again; nothing else is different."""

    class Slow(PlacesTell):
        sleeps_s = 0.3

    ledger = StreamLedger(2, record_actions=True)
    (spec,) = worker_specs(GymEnvFactory.of(Slow), seed_every_episode=True)
    with launcher_of("forkserver", lockstep=True) as launcher:
        launcher.start([spec], snapshot(0), lambda spec, attempt: going_on(spec, ledger, attempt))
        checker = RowChecker(3, seed_every_episode=True)
        for number in range(3):
            if number:
                pid = launcher._seats[0].process.pid
                killer = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
                killer.start()
                ledger.note_env_states(launcher.env_states())
                killer.join()
            for unroll in launcher.gather(1.0, always):
                checker.check(unroll)
                ledger.note(unroll)
        assert sum("SIGKILL" in note for note in launcher.notes) == 2


def test_eight_workers_first_step():
    with launcher_of("forkserver") as launcher:
        launcher.start(worker_specs(*[PLACES] * 8), snapshot(0))
        since = time.monotonic()
        gathered(launcher, all_have(1, workers=8))
        assert time.monotonic() - since < 20
        names = {Path(f"/proc/{p.pid}/comm").read_text().strip() for p in descendants()}
        assert {f"al-worker-{index}" for index in range(8)} <= names


@pytest.mark.parametrize("kind", PROCESSES)
def test_threads_and_global_generators(kind):
    """One thread per worker, and generators of its own for who uses global ones."""

    def first_looks() -> Any:
        factory = GymEnvFactory.of(Threads)
        specs = worker_specs(
            factory, factory, envs_per_worker=1, env_spec=EnvAdapter(Threads(), "Threads").spec
        )
        with launcher_of(kind, lockstep=True) as launcher:
            launcher.start(specs, snapshot(0))
            unrolls = [copy.deepcopy(unroll) for unroll in launcher.gather(1.0, always)]
        return np.array([unroll.observation["observation"][0, 0] for unroll in unrolls])

    looks = first_looks()
    assert (looks[:, 0] == 1).all()
    assert (looks[:, 1] == 1).all()
    assert (looks[0, 2:] != looks[1, 2:]).all()  # NumPy's, Python's and torch's
    if kind == "forkserver":
        assert (first_looks() == looks).all()  # of the run's seed


class Cores(Threads):
    """Tells the core that it is kept on, in the first number."""

    def reset(self, **arguments: Any) -> Any:
        observation, info = super().reset(**arguments)
        cores = os.sched_getaffinity(0)
        observation[0] = min(cores) if len(cores) == 1 else -1
        return observation, info


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_workers_are_pinned_if_asked():
    factory = GymEnvFactory.of(Cores)
    cores = sorted(os.sched_getaffinity(0))
    spec = EnvAdapter(Cores(), "Cores").spec
    for pin_cores in (True, False):
        with launcher_of("forkserver", lockstep=True, pin_cores=pin_cores) as launcher:
            specs = worker_specs(*[factory] * 3, envs_per_worker=1, env_spec=spec)
            launcher.start(specs, snapshot(0))
            unrolls = [copy.deepcopy(unroll) for unroll in launcher.gather(1.0, always)]
        kept_on = [unroll.observation["observation"][0, 0, 0] for unroll in unrolls]
        pinned = [cores[index % len(cores)] for index in range(3)]
        assert kept_on == (pinned if pin_cores or len(cores) == 1 else [-1] * 3)
    assert sorted(os.sched_getaffinity(0)) == cores


# -------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("kind", ["inline", "forkserver", SLOW_SPAWN])
def test_evaluation(kind):
    """With a frozen copy of the snapshot, one at a time, each result once."""
    specs = worker_specs(GymEnvFactory.of(Pictured))
    wanted = EnvWorker(specs[0]).evaluate(snapshot(4), REQUEST)
    with launcher_of(kind) as launcher:
        launcher.start(specs, snapshot(0))
        assert launcher.poll_evaluation() is None
        for _ in range(2):
            given = snapshot(4)
            assert launcher.request_evaluation(given, REQUEST)
            for array in given.arrays.values():
                array[...] = 8
            launcher.publish(snapshot(7))
            assert not launcher.request_evaluation(snapshot(5), REQUEST)
            assert wait_for(launcher.poll_evaluation) == wanted
            assert launcher.poll_evaluation() is None
        other = REQUEST._replace(seed=10, env_steps=41, step_limit=None, films=2, film_frames=9)
        assert launcher.request_evaluation(snapshot(4), REQUEST)
        result = launcher.evaluate(snapshot(6), other)  # waits for the one before
        assert result == EnvWorker(specs[0]).evaluate(snapshot(6), other)
        assert len(result.films) == 2


@pytest.mark.parametrize(("where", "at"), [("constructor", 0), ("reset", 4), ("step", 6)])
@pytest.mark.parametrize("kind", ["inline", "forkserver"])
def test_failing_evaluation(kind, where, at, tmp_path):
    """One unroll of training does not get as far as the failure."""

    class Env(Misbehaves):
        def __init__(self) -> None:
            is_training = len(list(tmp_path.glob("built-*"))) < 2
            bad = "" if where == "constructor" and is_training else where
            super().__init__(bad, at, directory=tmp_path)

    with launcher_of(kind, lockstep=True) as launcher:
        launcher.start(worker_specs(GymEnvFactory.of(Env)), snapshot(0))
        list(launcher.gather(1.0, always))
        with pytest.raises(WorkerError) as caught:
            launcher.evaluate(snapshot(0), REQUEST._replace(episodes=60, step_limit=None))
    phase = PHASES[where] if where == "constructor" else f"{where} of an evaluation episode"
    assert str(caught.value).startswith(
        f"the evaluation worker (Env) failed in {phase}: ZeroDivisionError: boom\nTraceback"
    )
    assert_all_closed(tmp_path, constructor_failed=where == "constructor")


@pytest.mark.parametrize("how", ["SIGKILL", "exit"])
def test_killed_evaluation(how):
    end = "exited with code 3" if how == "exit" else "was killed by SIGKILL"
    with launcher_of("forkserver", lockstep=True) as launcher:
        launcher.start(worker_specs(misbehaves("step", how=how)), snapshot(0))
        words = rf"^the evaluation worker \(Misbehaves\) failed in an evaluation: process \d+ {end}"
        with pytest.raises(WorkerError, match=words):
            launcher.evaluate(snapshot(0), REQUEST)


# ---------------------------------------------------------------------------------- life cycle


@pytest.mark.parametrize("kind", ["inline", "forkserver"])
def test_use_before_start_and_after_close(kind):
    launcher = launcher_of(kind)
    uses = [
        lambda: launcher.publish(snapshot(0)),
        lambda: list(launcher.gather(0.0, always)),
        lambda: launcher.request_evaluation(snapshot(0), REQUEST),
        lambda: launcher.evaluate(snapshot(0), REQUEST),
    ]
    for use in uses:
        with pytest.raises(LauncherClosed):
            use()
    assert launcher.poll_evaluation() is None
    launcher.close()
    launcher.start(worker_specs(PLACES), snapshot(0))
    assert gathered(launcher, all_have(1, workers=1))
    assert launcher.request_evaluation(snapshot(0), REQUEST)
    launcher.close()
    launcher.close()
    for use in uses:
        with pytest.raises(LauncherClosed):
            use()
    assert launcher.poll_evaluation() is None
    launcher.start(worker_specs(PLACES), snapshot(0))  # and again
    assert gathered(launcher, all_have(1, workers=1))
    assert launcher.poll_evaluation() is None
    launcher.close()


def test_closing_is_quick():
    with launcher_of("forkserver") as launcher:
        launcher.start(worker_specs(PLACES, PLACES), snapshot(0))
        gathered(launcher, all_have(1))
        since = time.monotonic()
    assert time.monotonic() - since < 1.9  # else one was killed


@pytest.mark.parametrize("kind", ["inline", "forkserver", SLOW_SPAWN])
def test_probe(kind):
    launcher = launcher_of(kind)
    assert launcher.probe(PLACES) == EnvAdapter(Places(), "Places").spec
    with pytest.raises(WorkerError) as caught:
        launcher.probe(misbehaves("constructor"))
    assert "constructing the environment: ZeroDivisionError: boom\nTraceback" in str(caught.value)
    if kind != "spawn":
        with pytest.raises(BadInput, match=r"^env factory nothing returned None, not a gymnasium"):
            launcher.probe(GymEnvFactory.of(nothing))
        with pytest.raises(BadInput, match=r"^Places: evaluation.video=true: can't be filmed"):
            launcher.probe(PLACES, "rgb_array")
    if kind == "forkserver":
        with pytest.raises(WorkerError, match=r"constructing .*: process \d+ exited with code 3"):
            launcher.probe(misbehaves("constructor", how="exit"))
    launcher.close()


def nothing() -> None:
    return None


# ----------------------------------------------------------------------------------- failures


def failure_of(launcher: Launcher, *factories: GymEnvFactory, **changes: Any) -> WorkerError:
    """What comes out, within seconds, of a run with workers that fail."""
    since = time.monotonic()

    def run() -> None:
        with launcher:
            launcher.start(worker_specs(*factories, **changes), snapshot(0))
            gathered(launcher, lambda unrolls: False)

    with pytest.raises(WorkerError) as caught:
        run()
    assert time.monotonic() - since < 10
    return caught.value


def assert_all_closed(directory: Path, constructor_failed: bool = False) -> None:
    built = {path.name.partition("-")[2] for path in directory.glob("built-*")}
    closed = {path.name.partition("-")[2] for path in directory.glob("closed-*")}
    assert closed <= built
    assert len(built - closed) == constructor_failed  # the one that never was
    assert built


FAILURES = {"constructor": 0, "reset": 1, "step": 7}
"""Where, and in which call."""
PHASES = {"constructor": "constructing the environment", "reset": "reset", "step": "step"}


@pytest.mark.parametrize("how", ["raise", "SystemExit"])
@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize(
    ("kind", "lockstep"), [("inline", True), ("forkserver", False), ("forkserver", True)]
)
def test_exceptions_arrive(kind, lockstep, where, how, tmp_path):
    factories = (
        misbehaves(directory=tmp_path),
        misbehaves(where, at=FAILURES[where], how=how, directory=tmp_path),
    )
    error = failure_of(launcher_of(kind, lockstep=lockstep), *factories)
    (failure,) = error.failures
    assert (failure.worker, failure.env, failure.phase) == (1, "Misbehaves", PHASES[where])
    line = "ZeroDivisionError: boom" if how == "raise" else "SystemExit: 4"
    assert str(error).startswith(f"worker 1 (Misbehaves) failed in {PHASES[where]}: {line}\nTrace")
    assert re.search(r'environments\.py", line \d+, in _misbehave', str(error))
    assert_all_closed(tmp_path, constructor_failed=where == "constructor")


def test_exceptions_arrive_under_spawn(tmp_path):
    error = failure_of(launcher_of("spawn"), misbehaves("step", at=7, directory=tmp_path))
    assert str(error).startswith("worker 0 (Misbehaves) failed in step: ZeroDivisionError: boom\n")
    assert len(error.failures) == 1
    assert_all_closed(tmp_path)


@pytest.mark.parametrize("lockstep", [False, True])
def test_two_that_fail_in_the_same_step(lockstep, tmp_path):
    """Both originals, the first cause first, and nothing on top."""

    class Together(Misbehaves):
        def _misbehave(self) -> None:
            self._mark("there")
            while len(list(tmp_path.glob("there-*"))) < 2:
                time.sleep(0.001)
            time.sleep(0.05 if self._text == "second" else 0)
            super()._misbehave()

    bad = {"where": "step", "at": 2, "directory": tmp_path}
    factories = [GymEnvFactory.of(Together, {**bad, "text": text}) for text in ("second", "first")]
    launcher = launcher_of("forkserver", lockstep=lockstep)
    error = failure_of(launcher, *factories, PLACES, unroll_length=9)
    wanted = ["ZeroDivisionError: first", "ZeroDivisionError: second"]
    assert [failure.error for failure in error.failures] == wanted
    assert not re.search("EOFError|BrokenPipe|During handling|direct cause", str(error))


def test_a_failure_is_not_kept_waiting_by_a_hung_worker():
    """In lockstep, where worker 0 is waited for first."""
    hung = misbehaves("step", at=1, how="sleep")
    error = failure_of(launcher_of("forkserver", lockstep=True), hung, misbehaves("step", at=3))
    assert [failure.worker for failure in error.failures] == [1]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "exit"])
@pytest.mark.parametrize("where", ["constructor", "step"])
def test_deaths_are_named(how, where, tmp_path):
    bad = misbehaves(where, at=FAILURES[where], how=how)
    error = failure_of(launcher_of("forkserver"), misbehaves(directory=tmp_path), bad)
    end = "exited with code 3" if how == "exit" else rf"was killed by {how}( \(out of memory\?\))?"
    phase = PHASES["constructor"] if where == "constructor" else "an unroll"
    assert re.fullmatch(
        rf"worker 1 \(Misbehaves\) failed in {phase}: process \d+ {end}", str(error)
    )
    assert_all_closed(tmp_path)


@pytest.mark.slow
def test_killed_under_spawn():
    error = failure_of(launcher_of("spawn"), misbehaves("step", at=7, how="SIGKILL"))
    assert re.search(r"process \d+ was killed by SIGKILL", str(error))


def test_the_first_step_fails_twenty_times_of_twenty():
    for _ in range(20):
        error = failure_of(launcher_of("forkserver"), misbehaves("step"))
        assert "ZeroDivisionError: boom" in str(error)


def test_start_timeout():
    """Also while another worker has a lot to say."""
    launcher = launcher_of("forkserver", start_timeout_s=2.5)
    error = failure_of(launcher, PLACES, misbehaves("constructor", how="sleep"))
    assert str(error).startswith("worker 1 (Misbehaves) failed in constructing the environment: ")
    assert "launch.start_timeout_s=2.5" in str(error)


def test_start_timeout_of_a_probe():
    launcher = launcher_of("forkserver", start_timeout_s=0.5)
    with pytest.raises(WorkerError, match=r"not done after launch\.start_timeout_s=0\.5; raise"):
        launcher.probe(misbehaves("constructor", how="sleep"))


def test_a_learner_that_is_busy_for_long_is_no_start_timeout():
    with launcher_of("forkserver", start_timeout_s=0.8) as launcher:
        launcher.start(worker_specs(PLACES, PLACES), snapshot(0))
        wait_for(lambda: all(child.connection.poll() for child in launcher._seats))
        time.sleep(0.8)
        gathered(launcher, all_have(3))


def test_an_episode_that_takes_long_to_repeat_is_no_start_timeout():
    """Only constructors count."""

    class Slow(Places):
        left = 3

        def step(self, action: Any) -> Any:
            self.left -= 1
            time.sleep(0.5 * (self.left >= 0))
            return super().step(action)

    seeds = {episode: stream_seed(3, 0, episode) for episode in range(20)}
    episode = next(e for e, seed in seeds.items() if plan(seed, 0)[0] > 3)
    stood = np.array([seeds[episode], 0, 3, 7])
    state = StreamState(episode, np.array([5, 6, 7]), {"observation": stood})
    changes = {"envs_per_worker": 1, "seed_every_episode": True, "stream_states": (state,)}
    with launcher_of("forkserver", lockstep=True, start_timeout_s=1.0) as launcher:
        launcher.start(worker_specs(GymEnvFactory.of(Slow), **changes), snapshot(0))
        (unroll,) = launcher.gather(1.0, always)
        assert (unroll.observation["observation"][0, 0] == stood).all()
        assert launcher.notes == []


@pytest.mark.parametrize(("where", "how"), [("constructor", "exit"), ("step", "SIGSEGV")])
def test_a_worker_that_dies_leaves_no_process_of_its_environment(where, how, tmp_path):
    class Starts(Misbehaves):
        def _misbehave(self) -> None:
            sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
            (tmp_path / "started").write_text(str(sleeper.pid))
            super()._misbehave()

    factory = GymEnvFactory.of(Starts, {"where": where, "how": how})
    assert "process" in str(failure_of(launcher_of("forkserver"), factory))
    with suppress(psutil.NoSuchProcess):
        sleeper = psutil.Process(int((tmp_path / "started").read_text()))
        wait_for(lambda: not is_alive(sleeper), seconds=2)


SLEEP = "import time; time.sleep(60)"


def _sleep() -> None:
    time.sleep(60)


class Simulates(Places):
    """Has a process of its own, a lock and an open file, and ends the process as people do."""

    def __init__(self, directory: Path, forks: bool) -> None:
        super().__init__()
        self._lock, self._directory = threading.Lock(), directory
        self._file = (directory / f"log-{uuid.uuid4().hex}").open("w")
        if forks:
            self._process: Any = multiprocessing.get_context("fork").Process(target=_sleep)
            self._process.start()
        else:
            self._process = subprocess.Popen([sys.executable, "-S", "-c", SLEEP])

    def close(self) -> None:
        self._process.terminate()
        wait = self._process.join if hasattr(self._process, "join") else self._process.wait
        wait()
        self._file.write("closed")
        self._file.close()


@pytest.mark.parametrize("forks", [False, True])
def test_an_environment_with_a_process_a_lock_and_a_file(forks, tmp_path):
    """It need not travel, and can end its own process: that does not ignore signals too."""
    factory = GymEnvFactory.of(Simulates, {"directory": tmp_path, "forks": forks})
    with launcher_of("forkserver") as launcher:
        assert launcher.probe(factory).name == "Simulates"
        launcher.start(worker_specs(factory, envs_per_worker=1), snapshot(0))
        gathered(launcher, all_have(2, workers=1))
        assert launcher.evaluate(snapshot(0), REQUEST).returns
        since = time.monotonic()
    assert time.monotonic() - since < 1.5
    logs = list(tmp_path.glob("log-*"))
    assert len(logs) == 1 + 1 + REQUEST.episodes
    assert all(log.read_text() == "closed" for log in logs)


def test_a_signal_waits_until_a_process_has_started(monkeypatch):
    """And then does not leave it behind, nor anything else of what only that should find."""
    start, has_started = multiprocessing.process.BaseProcess.start, []

    def start_interrupted(process: Any) -> None:
        start(process)
        signal.raise_signal(signal.SIGINT)
        has_started.append(True)

    before = sys.modules["__main__"], dict(os.environ)
    launcher = launcher_of("forkserver")
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.process.BaseProcess, "start", start_interrupted)
        with pytest.raises(KeyboardInterrupt):
            launcher.probe(misbehaves("constructor", how="sleep"))
    assert has_started
    assert (sys.modules["__main__"], dict(os.environ)) == before
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_hung_worker_is_killed_with_its_children(tmp_path):
    bad = misbehaves("step", at=3, how="subprocess", directory=tmp_path)
    with launcher_of("forkserver") as launcher:
        launcher.start(worker_specs(bad, PLACES), snapshot(0))
        wait_for(lambda: list(tmp_path.glob("hung-*")))
        assert any("sleep(60)" in " ".join(p.cmdline()) for p in descendants())
        others = {p for p in psutil.process_iter() if "time.sleep(60)" in " ".join(cmdline(p))}
        assert others
        since = time.monotonic()
    assert time.monotonic() - since < 4
    assert not any(is_alive(process) for process in others)


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_slots_hold_whole_unrolls_whoever_is_killed_when():
    """Every row that arrives is right, up to the death of one or all, at any moment."""
    generator = random.Random(0)
    rows = 0
    for trial in range(6):
        checker = RowChecker(3, seed_every_episode=False)
        with launcher_of("forkserver", slots=generator.choice([1, 2, 3])) as launcher:
            specs = worker_specs(PLACES, PLACES, PLACES, unroll_length=generator.choice([1, 7, 40]))
            launcher.start(specs, snapshot(0))
            pids = [child.process.pid for child in launcher._seats]
            if trial % 2:  # else perhaps before they are up
                for unroll in gathered(launcher, all_have(1, workers=3)):
                    checker.check(unroll)
            deadline = time.monotonic() + generator.uniform(0.0, 0.3)
            version = 0
            while time.monotonic() < deadline:
                for unroll in launcher.gather(0.05, always):
                    checker.check(unroll)
                launcher.publish(snapshot(version := version + 1))
            for pid in generator.sample(pids, generator.choice([1, 3])):
                os.kill(pid, signal.SIGKILL)
            since = time.monotonic()
            with pytest.raises(WorkerError, match="was killed by SIGKILL"):
                gathered_by(checker, launcher)
            assert time.monotonic() - since < 5
        rows += checker.rows
    assert rows > 1000


def gathered_by(checker: RowChecker, launcher: Launcher) -> None:
    while True:
        for unroll in launcher.gather(0.05, always):
            checker.check(unroll)


SCRIPT = """
import pathlib, sys
from actorlearner.launch.local import LocalLauncher
from tests.contracts.test_launchers import REQUEST, misbehaves
from tests.environments import snapshot, worker_specs

launcher = LocalLauncher(start_method=sys.argv[1])
directory = pathlib.Path(sys.argv[2])
hung = misbehaves("step", at=1, how="sleep", directory=directory)
launcher.start(worker_specs(hung, misbehaves(directory=directory)), snapshot(0))
launcher.request_evaluation(snapshot(0), REQUEST)
while True:
    for unroll in launcher.gather(0.1, lambda: True):
        pass
"""


@pytest.mark.parametrize("kind", PROCESSES)
def test_workers_end_with_a_learner_that_is_killed(kind, tmp_path):
    """Also inside a step that takes a minute."""
    script = [sys.executable, "-c", SCRIPT, kind, str(tmp_path)]
    learner = subprocess.Popen(script, cwd=Path(__file__).parents[2])
    try:
        wait_for(lambda: len(list(tmp_path.glob("hung-*"))) >= 2)  # a worker's, the evaluation's
        processes = psutil.Process(learner.pid).children(recursive=True)
        assert len(processes) >= 4  # with multiprocessing's tracker
    finally:
        learner.kill()
        learner.wait()
    wait_for(lambda: not any(is_alive(process) for process in processes), seconds=2)
