"""Workers as processes of this machine: the default.

Bulk data lie in anonymous shared memory; pipes carry *credits* down (you may fill slot 1) and
*commits* up (slot 1 is full), a few hundred bytes per unroll. Credits are the flow control: a
worker without one waits. An unroll that was not committed does not exist, so a worker that is
killed loses only that.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any, Literal, NoReturn

import cloudpickle

from actorlearner.config import setting
from actorlearner.contracts import (
    Array,
    EnvFactory,
    EnvSpec,
    EnvStates,
    EvaluationRequest,
    EvaluationResult,
    Failure,
    GoOn,
    LauncherClosed,
    SettingError,
    Snapshot,
    Unroll,
    WorkerSpec,
)
from actorlearner.launch import LauncherBase, raise_failures
from actorlearner.launch._child import (
    TELL_STATES,
    Commit,
    Slot,
    SnapshotBuffer,
    run_child,
    slots_layout,
    worker_slots,
)
from actorlearner.launch.restarts import Restarts, RestartSettings, back_off_s
from actorlearner.pulse import Pulse
from actorlearner.shared_memory import SharedArrays

logger = logging.getLogger(__name__)

_GRACE_S = 0.2  # for the other workers to tell their failures too
_ONE_THREAD = [  # read when a library is loaded, so too late for the child to set
    f"{library}_NUM_THREADS" for library in ("OMP", "OPENBLAS", "MKL", "VECLIB_MAXIMUM", "NUMEXPR")
]
_CLOSE_S = 2.0  # for workers to close their environments before they are killed
_LOOK_S = 0.2  # how long to listen to one before looking after the others
_UNWATCHED_S = 5.0  # at most so much time between two looks counts as silence
_EVALUATOR = -1


@dataclass(frozen=True, kw_only=True)
class LaunchSettings(RestartSettings):
    """Settings of the local launcher."""

    start_method: Literal["auto", "forkserver", "spawn"] = "auto"
    """How processes start; auto takes forkserver on Linux and spawn elsewhere."""
    start_timeout_s: float = setting(120.0, above=0)
    """Seconds within which a worker must have constructed its environments."""
    env_timeout_s: float = setting(120.0, above=0)
    """Seconds without a sign of life after which a worker hangs; one step of all its environments
    is such a sign, and a reset of one."""
    slots: int = setting(2, low=1)
    """Unrolls that a worker may be ahead; 2 keep it busy while one is copied."""
    pin_cores: bool = False
    """Keep each worker on one core (Linux). Steadies measurements; other runs may want the core."""

    def check(self) -> None:
        """Pinning is the system's to offer."""
        if self.pin_cores and not hasattr(os, "sched_setaffinity"):
            raise SettingError(f"{self.key('pin_cores')}=True: this system can't; leave it False")


class LocalLauncher(LauncherBase):
    """Runs every worker in a process of its own; replaces those that are lost."""

    def __init__(self, *, lockstep: bool = False, **settings: Any) -> None:
        """Nothing is started yet.

        Args:
            lockstep: gather exactly one unroll per worker, in order.
            settings: see `LaunchSettings`.
        """
        self.settings = LaunchSettings.make(settings)
        self.lockstep = lockstep
        self._children: list[_Child] = []
        self._evaluator: _Child | None = None
        self._snapshots: SnapshotBuffer | None = None
        self._pulses: SharedArrays | None = None
        self._go_on: GoOn | None = None
        self._restarts = Restarts(self.settings)
        self._credits: deque[_Credit] = deque()  # not given back yet
        self._result: EvaluationResult | None = None
        self._context = start_processes(self.settings.start_method)
        self.notes: list[str] = []

    def probe(self, factory: EnvFactory, render_mode: str | None = None) -> EnvSpec:
        """See `contracts.Launcher`."""
        child = _Child("probe", 0, factory.name)
        self._begin(child, (factory, render_mode))
        try:
            spec: EnvSpec = self._expect(child)
            return spec
        finally:
            _close([child])

    def start(
        self, specs: Sequence[WorkerSpec], snapshot: Snapshot, go_on: GoOn | None = None
    ) -> None:
        """See `contracts.Launcher`. Does not wait: the first failure shows in `gather`."""
        atexit.register(self.close)  # before multiprocessing waits for children at exit
        self._go_on = go_on
        self._restarts = Restarts(self.settings)
        self._snapshots = SnapshotBuffer(snapshot)
        self._snapshots.publish(snapshot)
        indices = [*(spec.index for spec in specs), _EVALUATOR]
        self._pulses = SharedArrays({str(index): Pulse.SPEC for index in indices})
        for spec in specs:
            slots = SharedArrays(slots_layout(spec, self.settings.slots))
            child = _Child("collect", spec.index, spec.env_factory.name)
            child.spec, child.slots, child.owned = spec, worker_slots(spec, slots), slots
            self._begin(child)
            self._children.append(child)
            if not self.lockstep:
                for slot in range(self.settings.slots):
                    child.order(slot)

    def publish(self, snapshot: Snapshot) -> None:
        """See `contracts.Launcher`."""
        if self._snapshots is None:
            raise LauncherClosed("publish needs a launcher that is started")
        self._snapshots.publish(snapshot)

    def gather(self, timeout: float, may_insert: Callable[[], bool]) -> Iterator[Unroll]:
        """See `contracts.Launcher`."""
        if not self._children:
            raise LauncherClosed("gather needs a launcher that is started")
        if self.lockstep:
            yield from self._gather_in_order(may_insert)
            return
        self._replace_lost(self._children)
        self._give_back_credits(may_insert)
        for child in self._wait(self._children, timeout):
            for _ in range(self.settings.slots):  # no more, though credits go back meanwhile
                if not child.has_message():
                    break
                commit: Commit | None = self._receive(child)
                if commit is not None:
                    self._credits.append(_Credit(child, commit.slot))  # lasts if the caller leaves
                    yield child.view(commit)
                    self._give_back_credits(may_insert)

    def _gather_in_order(self, may_insert: Callable[[], bool]) -> Iterator[Unroll]:
        if not may_insert():
            return
        # Only here, and of those below that owe an unroll: the streams of the others have gone on
        # since the caller took in what they did.
        self._replace_lost(self._children)
        for child in self._children:
            child.order(0)
        for child in self._children:
            yield child.view(self._expect(child))

    def _give_back_credits(self, may_insert: Callable[[], bool]) -> None:
        while self._credits and may_insert():
            self._credits.popleft().give_back()
        if self._credits:
            self._credits[-1].hold()  # those before it are held already

    def env_states(self) -> EnvStates:
        """See `contracts.Launcher`."""
        asked = [child for child in self._children if child.has_done and not child.is_lost]
        for child in asked:
            child.order(TELL_STATES)
        states: EnvStates = {}
        for child in asked:
            states |= self._expect(child)
        return states

    def metrics(self) -> dict[str, float]:
        """See `contracts.Launcher`."""
        return self._restarts.metrics()

    def request_evaluation(self, snapshot: Snapshot, request: EvaluationRequest) -> bool:
        """See `contracts.Launcher`. The evaluation worker starts with the first request."""
        if self._snapshots is None:
            raise LauncherClosed("request_evaluation needs a launcher that is started")
        evaluator = self._evaluator
        if evaluator is None:
            spec = self._children[0].spec
            assert spec is not None
            evaluator = _Child("evaluate", _EVALUATOR, spec.env_factory.name)
            evaluator.spec = replace(spec, index=_EVALUATOR)
            evaluator.owned = SnapshotBuffer(snapshot)  # of its own: training must not change it
            self._begin(evaluator)
            self._evaluator = evaluator
        elif evaluator.owes or self._result is not None:
            return False
        assert isinstance(evaluator.owned, SnapshotBuffer)
        evaluator.owned.publish(snapshot)
        evaluator.order(request)
        return True

    def poll_evaluation(self, timeout: float = 0.0) -> EvaluationResult | None:
        """See `contracts.Launcher`."""
        evaluator = self._evaluator
        if evaluator is not None:
            self._replace_lost([evaluator])
            while self._result is None and self._wait([evaluator], timeout):
                self._receive(evaluator)
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        """See `contracts.Launcher`."""
        children = [*self._children, *([self._evaluator] if self._evaluator else [])]
        self._children, self._evaluator, self._result = [], None, None
        self._credits.clear()
        _close(children)
        if self._snapshots is not None:
            self._snapshots.close()
            self._snapshots = None
            atexit.unregister(self.close)
        if self._pulses is not None:
            self._pulses.close()
            self._pulses = None

    # ------------------------------------------------------------------------ children

    def _begin(self, child: _Child, subject: Any = None) -> None:
        """Start the process of ``child``, which does its ``spec`` (a probe: ``subject``)."""
        memory: dict[str, Any] = {}
        if self._pulses is not None and child.role != "probe":
            child.pulse = self._pulses.arrays[str(child.index)]
            child.pulse[:] = 0
            is_evaluator = child.role == "evaluate"
            memory = {
                "snapshots": child.owned if is_evaluator else self._snapshots,
                "slots": None if is_evaluator else child.owned,
                "pulses": self._pulses,
            }
        ours, theirs = self._context.Pipe()
        payload = cloudpickle.dumps(child.spec if subject is None else subject)
        process = self._context.Process(  # type: ignore[attr-defined]
            target=run_child,
            args=(child.role, child.index, child.env, payload, theirs, memory),
            name=f"actorlearner-{child.role}-{child.index}",
        )
        try:
            with _surroundings():
                process.start()
        except (Exception, KeyboardInterrupt, SystemExit):  # a signal that waited comes here
            if process.pid is not None:
                process.kill()
                process.join()
            raise
        theirs.close()
        _bound_receiving(ours, self.settings.env_timeout_s)
        child.begun(process, ours)
        if self.settings.pin_cores and child.role == "collect":
            cores = sorted(os.sched_getaffinity(0))
            with suppress(ProcessLookupError):  # it has ended, as will be seen
                os.sched_setaffinity(process.pid, {cores[child.index % len(cores)]})

    def _wait(self, children: Sequence[_Child], timeout: float) -> list[_Child]:
        """Those that have something to say; those that were lost are dealt with."""
        by_handle: dict[Any, _Child] = {}
        for child in children:
            if not child.is_lost:
                by_handle[child.connection] = by_handle[child.process.sentinel] = child
        heard = {id(by_handle[handle]): by_handle[handle] for handle in wait(by_handle, timeout)}
        for child in list(heard.values()):
            if not child.has_message():  # ended, and said nothing
                del heard[id(child)]
                self._lose(child, child.death())
        for child in children:
            if not child.is_lost and id(child) not in heard:
                self._check_signs_of_life(child)
        return list(heard.values())

    def _check_signs_of_life(self, child: _Child) -> None:
        s = self.settings
        silence_s = child.silence_s()
        if not child.is_ready:
            if silence_s > s.start_timeout_s:
                text = (
                    f"not done after launch.start_timeout_s={s.start_timeout_s:g}; raise it if the "
                    "environment takes that long to construct"
                )
                self._lose(child, child.failure("constructing the environment", text))
        elif silence_s > s.env_timeout_s and not child.has_message():
            if child.role == "evaluate" and not child.has_done and silence_s <= s.start_timeout_s:
                return  # it constructs its environments in its first evaluation
            text = (
                f"no step and no reset was done within launch.env_timeout_s={s.env_timeout_s:g}; "
                "raise it if the environment takes that long"
            )
            self._lose(child, child.failure(child.phase, text))

    def _receive(self, child: _Child) -> Any:
        """The next commit or result; None for a message that needs no further care."""
        try:
            kind, payload = child.connection.recv()
        except BlockingIOError:
            text = f"it stopped in the middle of a message for {self.settings.env_timeout_s:g} s"
            self._lose(child, child.failure(child.phase, text))
            return None
        except (EOFError, OSError):
            self._lose(child, child.death())
            return None
        child.spoke()
        if kind == "failure":
            self._lose(child, payload)
            return None
        if kind in ("ready", "notes"):
            self.notes += payload or []
            return None
        if kind == "states":
            child.done(TELL_STATES)
        elif child.role == "collect":
            child.done(payload.slot)
            assert child.spec is not None
            child.rows_done += child.spec.unroll_length
        elif child.role == "evaluate":
            child.done(*child.owes)
            self._result = payload
        return payload

    def _expect(self, child: _Child) -> Any:
        """The next payload of ``child``, however long it takes; listens to the others too."""
        others = self._children if child in self._children else []
        while not child.inbox:
            self._replace_lost([other for other in others if other.owes])
            for heard in self._wait([child, *(o for o in others if o is not child)], _LOOK_S):
                payload = self._receive(heard)
                if payload is not None:
                    heard.inbox.append(payload)
        return child.inbox.popleft()

    # ------------------------------------------------------------------------ losing them

    def _lose(self, child: _Child, failure: Failure) -> None:
        """``child`` ended or hangs; replace it in a while, or raise if that is not to be."""
        if self._go_on is None or child.role == "probe":
            self._fail([failure])
        if (failures := self._restarts.refuse(failure)) is not None:
            self._fail(failures)
        if failure.error:
            child.errors += 1
            child.process.join(_CLOSE_S)  # it closes its environments
        child.end()
        child.attempt += 1
        child.due_at = time.monotonic() + back_off_s(child.attempt)
        self.notes.append(self._restarts.note(failure, child.rows_dropped))

    def _replace_lost(self, children: Sequence[_Child]) -> None:
        """Begin again those that were lost, and have them do what they owe."""
        for child in children:
            if child.is_lost and time.monotonic() >= child.due_at:
                assert self._go_on is not None
                if child.role == "collect":
                    assert child.spec is not None
                    # In lockstep a lost process changes nothing, but an error would come again.
                    attempt = child.errors if self.lockstep else child.attempt
                    child.spec = self._go_on(child.spec, attempt)
                self._begin(child)
                for message in child.owes:
                    child.send(message)

    def _fail(self, failures: list[Failure]) -> NoReturn:
        """Raise the first cause, after the others had a moment to tell theirs."""
        known = {failure.worker for failure in failures}
        deadline = time.monotonic() + _GRACE_S
        others = [c for c in self._children if c.index not in known and not c.is_lost]
        while others and (left := deadline - time.monotonic()) > 0:
            for connection in wait([c.connection for c in others], left):
                child = next(c for c in others if c.connection is connection)
                try:
                    kind, payload = child.connection.recv()
                except (EOFError, OSError):
                    kind, payload = "failure", child.death()
                if kind == "failure":
                    failures.append(payload)
                    others.remove(child)
        raise_failures(failures)


class _Child:
    """A worker as the learner's process sees it: one process after another, if they are lost.

    Attributes:
        role: see `run_child`.
        index: of the worker.
        env: name of the environment.
        spec: what its process does; None for a probe.
        slots: where it puts unrolls.
        owned: the memory that ends with it.
        pulse: `Pulse.counts` of its process.
        owes: what it was told to do and has not done yet, oldest first.
        inbox: payloads that came while another's were waited for.
        attempt: how often in a row its process was lost before it had done anything.
        due_at: when to replace one that is lost, `time.monotonic` seconds.
        errors: how many of these attempts ended with an exception.
        rows_done: that its process handed over.
        held_s: for how long the limiter held back the last credit for each slot, seconds.
    """

    process: Any
    connection: Connection

    def __init__(self, role: str, index: int, env: str) -> None:
        self.role = role
        self.index = index
        self.env = env
        self.spec: WorkerSpec | None = None
        self.slots: list[Slot] = []
        self.owned: SharedArrays | SnapshotBuffer | None = None
        self.pulse: Array = Pulse.SPEC.zeros()
        self.owes: list[Any] = []
        self.inbox: deque[Any] = deque()
        self.attempt = 0
        self.due_at = 0.0
        self.errors = 0
        self.held_s: dict[int, float] = {}
        self.is_lost = True

    def begun(self, process: Any, connection: Connection) -> None:
        """It has a new process."""
        self.process, self.connection = process, connection
        self.is_ready = self.is_lost = self.has_done = False
        self._looked_at = time.monotonic()
        self._silence_s = 0.0
        self._pulse_seen = self.pulse.tolist()
        self.rows_done = 0

    def send(self, message: Any) -> None:
        """Tell it; that it is gone will show when it is next listened to."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def order(self, message: Any) -> None:
        """Tell it what to do; one that is lost is told when it begins again."""
        if not self.owes:
            self._silence_s = 0.0
        self.owes.append(message)
        if not self.is_lost:
            self.send(message)

    def done(self, message: Any) -> None:
        """It has done what it owed."""
        self.owes.remove(message)
        self.has_done = True
        self.attempt = self.errors = 0

    def has_message(self) -> bool:
        """Whether it has said something, if only that it ended."""
        if self.is_lost:
            return False
        try:
            return self.connection.poll()
        except OSError:
            return True  # receiving tells

    def spoke(self) -> None:
        """It said something."""
        self.is_ready, self._silence_s = True, 0.0

    def silence_s(self) -> float:
        """Seconds for which it has owed something, or its start, without a sign of life.

        Only time that was watched counts: while all processes are paused, or the learner is busy,
        nobody is to blame.
        """
        now = time.monotonic()
        pulse = self.pulse.tolist()
        if pulse != self._pulse_seen or not (self.owes or not self.is_ready):
            self._pulse_seen, self._silence_s = pulse, 0.0
        else:
            self._silence_s += min(now - self._looked_at, _UNWATCHED_S)
        self._looked_at = now
        return self._silence_s

    @property
    def rows_dropped(self) -> int:
        """Rows that its process stepped and handed to nobody."""
        if self.spec is None or self.role != "collect":
            return 0
        return (int(self.pulse[0]) - self.rows_done) * len(self.spec.streams)

    @property
    def phase(self) -> str:
        """What it is at, in words."""
        if not self.is_ready:
            return "constructing the environment"
        return {"collect": "an unroll", "evaluate": "an evaluation"}.get(self.role, self.role)

    def view(self, commit: Commit) -> Unroll:
        """The unroll that ``commit`` says is full, with whom its worker waited for."""
        unroll = self.slots[commit.slot].view(commit)
        waited = unroll.seconds.pop("wait")
        for_limiter = min(waited, self.held_s.get(commit.slot, 0.0))
        unroll.seconds |= {"slots": waited - for_limiter, "limiter": for_limiter}
        return unroll

    def failure(self, phase: str, detail: str) -> Failure:
        """A failure that the child can't tell of itself."""
        return Failure(self.index, self.env, phase, detail, at=time.monotonic())

    def death(self) -> Failure:
        """How the process ended."""
        self.process.join(1.0)
        code = self.process.exitcode
        pid = f"process {self.process.pid}"
        if code is None:
            how = f"{pid} closed its pipe"
        elif code < 0:
            how = f"{pid} was killed by {_signal_name(-code)}"
            if -code == signal.SIGKILL:
                how += " (out of memory?)"
        else:
            how = f"{pid} exited with code {code}"
        return self.failure(self.phase, how)

    def kill(self) -> None:
        """End the process and what it started, now; its group outlives it."""
        with suppress(ProcessLookupError, PermissionError):  # it has no group of its own yet
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()

    def end(self) -> None:
        """End the process, now, and give its pipe back; its memory stays for the next one."""
        self.kill()
        self.process.join(_CLOSE_S)
        self.kill()  # what it started may have outlived it
        self.connection.close()
        self.is_lost = True
        if self.process.exitcode is None:
            # It sits in the kernel, in a device or a file system that does not answer, and will
            # run no further instruction of its own.
            logger.warning("process %d can't be killed; it is left behind", self.process.pid)
        else:
            self.process.close()


class _Credit:
    """The right to fill ``slot`` of ``child``, while the learner has it."""

    def __init__(self, child: _Child, slot: int) -> None:
        self._child, self._slot = child, slot
        self._held_since: float | None = None

    def hold(self) -> None:
        """The limiter does not let it go, from now on."""
        if self._held_since is None:
            self._held_since = time.perf_counter()

    def give_back(self) -> None:
        """Let the worker fill the slot."""
        since = self._held_since
        self._child.held_s[self._slot] = 0.0 if since is None else time.perf_counter() - since
        self._child.order(self._slot)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of the real-time signals only two have names
        return f"signal {number}"


def _close(children: Sequence[_Child]) -> None:
    """End ``children`` and give their pipes and memory back, within a bounded time."""
    running = [child for child in children if not child.is_lost]
    for child in running:
        child.send(None)
    deadline = time.monotonic() + _CLOSE_S
    for child in running:
        child.process.join(max(0.0, deadline - time.monotonic()))
        child.end()
    for child in children:
        child.slots, child.pulse = [], Pulse.SPEC.zeros()
        if child.owned is not None:
            child.owned.close()


def _bound_receiving(connection: Connection, seconds: float) -> None:
    """Make it an error that the rest of a message does not come (where pipes are sockets)."""
    if os.name == "posix":
        with socket.socket(fileno=os.dup(connection.fileno())) as twin:
            whole, part = divmod(seconds, 1)
            limit = struct.pack("ll", int(whole), int(part * 1e6))
            twin.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


@contextmanager
def _surroundings() -> Iterator[None]:
    """What a new process finds: one thread for each library that asks, and no ``__main__``.

    It would import the user's script again, which may lack a ``__main__`` guard; all that it needs
    from there travels by value. SIGINT and SIGTERM are held back until it has learned to ignore
    them.
    """
    resource_tracker.ensure_running()  # it lets signals through again when it starts
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main, environment = sys.modules["__main__"], dict(os.environ)
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name in _ONE_THREAD:
            del os.environ[name]
            if name in environment:
                os.environ[name] = environment[name]
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # last: one that waited is raised here


def start_processes(start_method: str = "auto") -> BaseContext:
    """Make ready to start children, and return the context that does.

    On Linux this starts the fork server, which loads torch and Gymnasium while the caller goes on;
    so the earlier, the better. It dies with the thread that started it: use the main one.
    """
    if start_method == "auto":
        start_method = "forkserver" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        if threading.current_thread() is not threading.main_thread():
            logger.debug("the fork server starts from a thread and will end with it")
        context.set_forkserver_preload(["actorlearner.launch._zygote"])
        with _surroundings():
            forkserver.ensure_running()
    return context
