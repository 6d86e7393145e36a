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
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any, Literal

import cloudpickle

from actorlearner.config import Settings, setting
from actorlearner.contracts import (
    EnvFactory,
    EnvSpec,
    EvaluationRequest,
    EvaluationResult,
    Failure,
    LauncherClosed,
    SettingError,
    Snapshot,
    Unroll,
    WorkerSpec,
)
from actorlearner.launch import LauncherBase, raise_failures
from actorlearner.launch._child import (
    Commit,
    Slot,
    SnapshotBuffer,
    run_child,
    slots_layout,
    worker_slots,
)
from actorlearner.shared_memory import SharedArrays

logger = logging.getLogger(__name__)

_GRACE_S = 0.2  # for the other workers to tell their failures too
_ONE_THREAD = [  # read when a library is loaded, so too late for the child to set
    f"{library}_NUM_THREADS" for library in ("OMP", "OPENBLAS", "MKL", "VECLIB_MAXIMUM", "NUMEXPR")
]
_CLOSE_S = 2.0  # for workers to close their environments before they are killed


@dataclass(frozen=True, kw_only=True)
class LaunchSettings(Settings):
    """Settings of the local launcher."""

    group = "launch"

    start_method: Literal["auto", "forkserver", "spawn"] = "auto"
    """How processes start; auto takes forkserver on Linux and spawn elsewhere."""
    start_timeout_s: float = setting(120.0, above=0)
    """Seconds within which a worker must have constructed its environments."""
    slots: int = setting(2, low=1)
    """Unrolls that a worker may be ahead; 2 keep it busy while one is copied."""
    pin_cores: bool = False
    """Keep each worker on one core (Linux). Steadies measurements; other runs may want the core."""

    def check(self) -> None:
        """Pinning is the system's to offer."""
        if self.pin_cores and not hasattr(os, "sched_setaffinity"):
            raise SettingError(f"{self.key('pin_cores')}=True: this system can't; leave it False")


class LocalLauncher(LauncherBase):
    """Runs every worker in a process of its own."""

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
        self._credits: deque[tuple[_Child, int]] = deque()  # not given back yet
        self._result: EvaluationResult | None = None
        self._context = start_processes(self.settings.start_method)
        self.notes: list[str] = []

    def probe(self, factory: EnvFactory, render_mode: str | None = None) -> EnvSpec:
        """See `contracts.Launcher`."""
        child = self._spawn("probe", 0, factory.name, cloudpickle.dumps((factory, render_mode)), {})
        try:
            spec: EnvSpec = self._expect(child)
            return spec
        finally:
            _close([child])

    def start(self, specs: Sequence[WorkerSpec], snapshot: Snapshot) -> None:
        """See `contracts.Launcher`. Does not wait: the first failure shows in `gather`."""
        atexit.register(self.close)  # before multiprocessing waits for children at exit
        self._specs = list(specs)
        self._snapshots = SnapshotBuffer(snapshot)
        self._snapshots.publish(snapshot)
        for spec in specs:
            slots = SharedArrays(slots_layout(spec, self.settings.slots))
            memory = {"snapshots": self._snapshots, "slots": slots}
            name = spec.env_factory.name
            child = self._spawn("collect", spec.index, name, cloudpickle.dumps(spec), memory)
            if self.settings.pin_cores:
                cores = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(child.process.pid, {cores[spec.index % len(cores)]})
            child.slots, child.owned = worker_slots(spec, slots), slots
            self._children.append(child)
            if not self.lockstep:
                for slot in range(self.settings.slots):
                    child.send(slot)

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
        self._give_back_credits(may_insert)
        for child in self._wait(self._children, timeout):
            for _ in range(self.settings.slots):  # no more, though credits go back meanwhile
                if not child.connection.poll():
                    break
                commit: Commit | None = self._receive(child)
                if commit is not None:
                    self._credits.append((child, commit.slot))  # lasts if the caller leaves here
                    yield child.view(commit)
                    self._give_back_credits(may_insert)

    def _gather_in_order(self, may_insert: Callable[[], bool]) -> Iterator[Unroll]:
        if not may_insert():
            return
        for child in self._children:
            child.send(0)
        for child in self._children:
            yield child.view(self._expect(child))

    def _give_back_credits(self, may_insert: Callable[[], bool]) -> None:
        while self._credits and may_insert():
            child, slot = self._credits.popleft()
            child.send(slot)

    def request_evaluation(self, snapshot: Snapshot, request: EvaluationRequest) -> bool:
        """See `contracts.Launcher`. The evaluation worker starts with the first request."""
        if self._snapshots is None:
            raise LauncherClosed("request_evaluation needs a launcher that is started")
        evaluator = self._evaluator
        if evaluator is None:
            frozen = SnapshotBuffer(snapshot)  # of its own: training must not change it
            spec = replace(self._specs[0], index=-1)
            name, payload = spec.env_factory.name, cloudpickle.dumps(spec)
            evaluator = self._spawn("evaluate", -1, name, payload, {"snapshots": frozen})
            evaluator.owned = frozen
            self._evaluator = evaluator
        elif evaluator.is_busy or self._result is not None:
            return False
        assert isinstance(evaluator.owned, SnapshotBuffer)
        evaluator.owned.publish(snapshot)
        evaluator.send(request)
        evaluator.is_busy = True
        return True

    def poll_evaluation(self, timeout: float = 0.0) -> EvaluationResult | None:
        """See `contracts.Launcher`."""
        evaluator = self._evaluator
        while self._result is None and evaluator is not None and self._wait([evaluator], timeout):
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

    # ------------------------------------------------------------------------ children

    def _spawn(
        self, role: str, index: int, env: str, payload: bytes, memory: Mapping[str, Any]
    ) -> _Child:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(  # type: ignore[attr-defined]
            target=run_child,
            args=(role, index, env, payload, theirs, memory),
            name=f"actorlearner-{role}-{index}",
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
        return _Child(process, ours, index, env, role)

    def _wait(self, children: Sequence[_Child], timeout: float) -> list[_Child]:
        """Those that have something to say, or have ended."""
        by_handle: dict[Any, _Child] = {}
        for child in children:
            by_handle[child.connection] = by_handle[child.process.sentinel] = child
        heard = {id(by_handle[handle]): by_handle[handle] for handle in wait(by_handle, timeout)}
        for child in heard.values():
            if not child.connection.poll():  # ended, and said nothing
                self._fail([child.death()])
        self._check_start_up([child for child in children if id(child) not in heard])
        return list(heard.values())

    def _check_start_up(self, children: Sequence[_Child]) -> None:
        limit = self.settings.start_timeout_s
        for child in children:
            if not child.is_ready and time.monotonic() - child.started_at > limit:
                text = (
                    f"not done after launch.start_timeout_s={limit:g}; raise it if the "
                    "environment takes that long to construct"
                )
                self._fail([child.failure("constructing the environment", text)])

    def _receive(self, child: _Child) -> Any:
        """The next commit or result; None for a message that needs no further care."""
        try:
            kind, payload = child.connection.recv()
        except (EOFError, OSError):
            self._fail([child.death()])
        child.is_ready = True
        if kind == "failure":
            self._fail([payload])
        if kind in ("ready", "notes"):
            self.notes += payload or []
            return None
        if child.role == "evaluate":
            child.is_busy = False
            self._result = payload
        return payload

    def _expect(self, child: _Child) -> Any:
        """The next payload of ``child``, however long it takes; listens to the others too."""
        others = self._children if child in self._children else []
        while not child.inbox:
            for heard in self._wait([child, *others], 1.0):
                payload = self._receive(heard)
                if payload is not None:
                    heard.inbox.append(payload)
        return child.inbox.popleft()

    def _fail(self, failures: list[Failure]) -> Any:
        """Raise the first cause, after the others had a moment to tell theirs."""
        known = {failure.worker for failure in failures}
        deadline = time.monotonic() + _GRACE_S
        others = [c for c in self._children if c.index not in known]
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
    """A child process as its parent sees it."""

    def __init__(
        self,
        process: Any,
        connection: Connection,
        index: int,
        env: str,
        role: str,
    ) -> None:
        self.process = process
        self.connection = connection
        self.index = index
        self.env = env
        self.role = role
        self.started_at = time.monotonic()
        self.is_ready = False
        self.is_busy = False
        self.inbox: deque[Any] = deque()  # payloads that came while another's were waited for
        self.slots: list[Slot] = []
        self.owned: SharedArrays | SnapshotBuffer | None = None

    def send(self, message: Any) -> None:
        """Tell it; that it is gone will show when it is next listened to."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def view(self, commit: Commit) -> Unroll:
        """The unroll that ``commit`` says is full."""
        return self.slots[commit.slot].view(commit)

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
            how = f"{pid} was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (out of memory?)"
        else:
            how = f"{pid} exited with code {code}"
        phase = {"collect": "an unroll", "evaluate": "an evaluation"}.get(self.role, self.role)
        if not self.is_ready:
            phase = "constructing the environment"
        return self.failure(phase, how)

    def kill(self) -> None:
        """End the process and what it started, now; its group outlives it."""
        with suppress(ProcessLookupError, PermissionError):  # it has no group of its own yet
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()


def _close(children: Sequence[_Child]) -> None:
    """End ``children`` and give their pipes and memory back, within a bounded time."""
    for child in children:
        child.send(None)
    deadline = time.monotonic() + _CLOSE_S
    for child in children:
        child.process.join(max(0.0, deadline - time.monotonic()))
        if child.process.exitcode is None:
            child.kill()
            child.process.join()
        child.kill()  # what it started may have outlived it
        child.connection.close()
        child.process.close()
        child.slots = []
        if child.owned is not None:
            child.owned.close()


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
