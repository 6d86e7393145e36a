"""The life of a child process: probe an environment, collect unrolls, or evaluate.

A child says ``(kind, payload)`` over its pipe: ``ready``, ``notes`` (for the user), ``commit``
(which slot is full), ``states`` (see `Launcher.env_states`), ``result`` (of a probe or an
evaluation) or ``failure``. It is told what to do next by a slot number, `TELL_STATES` or an
evaluation, and to end by None or the end of the pipe.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import numpy as np

from actorlearner.contracts import (
    Array,
    ArraySpec,
    Episodes,
    EvaluationRequest,
    Failure,
    Snapshot,
    Unroll,
    WorkerSpec,
)
from actorlearner.pulse import Pulse
from actorlearner.shared_memory import DoubleBuffer, SharedArrays
from actorlearner.streams import stream_seed

if TYPE_CHECKING:
    from actorlearner.worker import EnvWorker

TELL_STATES = -1
"""Where a slot number could stand."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class Commit(NamedTuple):
    """An unroll slot is full.

    Attributes:
        slot: which one.
        sequence: see `Unroll`, as are the rest.
        version: of the snapshot that acted.
        num_episodes: how many ended; they stand in the slot.
        num_lives: likewise.
        seconds: where the time went: ``env``, ``policy``, and ``wait``, for the credit.
        started_at: of the first env step.
        cores: that its process kept busy meanwhile: computing, not waiting.
    """

    slot: int
    sequence: int
    version: int
    num_episodes: int
    num_lives: int
    seconds: dict[str, float]
    started_at: float
    cores: float


class Slot:
    """Room for one unroll in shared memory: its arrays, and what ended in it.

    A hundred short episodes may end in an unroll, too many for a small message.

    Attributes:
        unroll: views of the arrays; what else it holds is the worker's alone.
    """

    _ENDED = "ended"

    def __init__(self, spec: WorkerSpec, arrays: Mapping[str, Array]) -> None:
        """A slot over ``arrays``, laid out by `layout`."""
        rest = {name: array for name, array in arrays.items() if name != self._ENDED}
        self.unroll = Unroll.from_arrays(spec.index, spec.streams, rest)
        self._ended = arrays[self._ENDED]
        self._names = spec.env_factory.info_metrics

    @classmethod
    def layout(cls, spec: WorkerSpec) -> dict[str, ArraySpec]:
        """The arrays of one slot."""
        rows = spec.unroll_length * len(spec.streams)
        columns = Episodes.width(spec.env_factory.info_metrics)
        ended = ArraySpec((2 * rows, columns), "float64")  # episodes, then lives
        return {**spec.unroll_layout, cls._ENDED: ended}

    def commit(self, index: int, cores: float) -> Commit:
        """Complete the slot, number ``index`` of its worker, and tell of it; see `Commit`."""
        unroll = self.unroll
        begin = 0
        for ended in (unroll.episodes, unroll.lives):
            if len(ended):
                assert isinstance(ended, Episodes)
                self._ended[begin : begin + len(ended)] = ended.lines
            begin += len(ended)
        return Commit(
            index,
            unroll.sequence,
            unroll.version,
            len(unroll.episodes),
            len(unroll.lives),
            unroll.seconds,
            unroll.started_at,
            cores,
        )

    def view(self, commit: Commit) -> Unroll:
        """The unroll that ``commit`` tells of."""
        lines = self._ended[: commit.num_episodes + commit.num_lives]
        return replace(
            self.unroll,
            sequence=commit.sequence,
            version=commit.version,
            episodes=Episodes(lines[: commit.num_episodes], self._names),
            lives=Episodes(lines[commit.num_episodes :], self._names),
            seconds=commit.seconds,
            started_at=commit.started_at,
        )


class SnapshotBuffer:
    """Snapshots in shared memory: one process publishes, others read the newest."""

    def __init__(self, example: Snapshot) -> None:
        """Lay out the memory.

        Args:
            example: all later snapshots have its arrays and scalars.
        """
        self._scalars = list(example.scalars)
        specs = {
            f"arrays/{name}": ArraySpec(np.shape(array), np.asarray(array).dtype.name)
            for name, array in example.arrays.items()
        }
        specs["scalars"] = ArraySpec((len(self._scalars),), "float64")
        specs["version"] = ArraySpec((1,), "int64")
        self._specs = specs
        self._buffer = DoubleBuffer(specs)
        self._reset_reader()

    def _reset_reader(self) -> None:
        self._number = 0
        self._copy: dict[str, Any] = {}
        self._snapshot: Snapshot | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("_scalars", "_specs", "_buffer")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_reader()

    def publish(self, snapshot: Snapshot) -> None:
        """Make ``snapshot`` the newest."""
        values = {f"arrays/{name}": array for name, array in snapshot.arrays.items()}
        values["scalars"] = np.array([snapshot.scalars[name] for name in self._scalars], float)
        values["version"] = np.array([snapshot.version], np.int64)
        self._buffer.write(values)

    def read(self) -> Snapshot:
        """The newest snapshot, in memory of this process; the same object while none is newer."""
        if self._snapshot is None or self._buffer.writes != self._number:
            if not self._copy:
                self._copy = {name: spec.zeros() for name, spec in self._specs.items()}
            self._number = self._buffer.read(self._copy)
            prefix = "arrays/"
            self._snapshot = Snapshot(
                int(self._copy["version"][0]),
                {k[len(prefix) :]: v for k, v in self._copy.items() if k.startswith(prefix)},
                dict(zip(self._scalars, map(float, self._copy["scalars"]), strict=True)),
            )
        return self._snapshot

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._buffer.close()


_LEARNERS_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def leave_signals_to_the_learner() -> None:
    """Ctrl-C and SIGTERM reach the whole group; what they mean is for the learner to say.

    They are handled and not ignored: a process that an environment starts would inherit that it
    ignores them, and could not be terminated.
    """
    for number in _LEARNERS_SIGNALS:
        signal.signal(number, _do_nothing)
        if hasattr(signal, "siginterrupt"):
            signal.siginterrupt(number, False)  # native code may not expect to be interrupted
    if hasattr(signal, "pthread_sigmask"):  # the parent held them back until here
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEARNERS_SIGNALS)


def _do_nothing(*_: object) -> None:
    pass


class _ForkedProcesses(threading.local):
    """Processes that an environment forks hear signals: they are the environment's to signal.

    Signals are held back meanwhile, or one that comes before the child has its own handlers would
    be taken for one that the learner has to answer, and be lost.
    """

    _mask: set[int] | set[signal.Signals]

    def arm(self) -> None:
        """Do so in every process that this one forks from now on."""
        os.register_at_fork(
            before=self._hold_back, after_in_parent=self._let_go, after_in_child=self._hear
        )

    def _hold_back(self) -> None:
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _LEARNERS_SIGNALS)

    def _let_go(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _hear(self) -> None:
        for number in _LEARNERS_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        self._let_go()


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends, also inside a long step (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _arm(name: str) -> None:
    """Make sure of this process: its signals, its end, its process group, its name, its threads."""
    importlib.import_module("actorlearner.launch._zygote")  # done already under the fork server
    leave_signals_to_the_learner()
    die_with_parent()
    parent = parent_process()
    if parent is not None and wait([parent.sentinel], timeout=0):
        os._exit(1)  # it ended before the kernel was asked to tell
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])
    elif parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # so that a hung worker is killed with its own children
    if hasattr(os, "register_at_fork"):
        _ForkedProcesses().arm()
    importlib.import_module("torch").set_num_threads(1)


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def run_child(role: str, index: int, env: str, payload: bytes, connection: Connection,
              memory: Mapping[str, Any]) -> None:  # fmt: skip
    """Main function of every child.

    Args:
        role: ``probe``, ``collect`` or ``evaluate``.
        index: of the worker.
        env: name of the environment, for messages.
        payload: cloudpickled: what a probe takes, or a `WorkerSpec`.
        connection: this end of the pipe.
        memory: ``snapshots``, ``pulses`` and, to collect, ``slots``.
    """
    worker: EnvWorker | None = None
    try:
        _arm({"probe": "al-probe", "evaluate": "al-evaluate"}.get(role, f"al-worker-{index}"))
        subject = cloudpickle.loads(payload)
        from actorlearner.worker import EnvWorker, probe  # slow to load: after arming

        if role == "probe":
            connection.send(("result", probe(*subject)))
            return
        worker = EnvWorker(subject)
        worker.pulse = Pulse(memory["pulses"].arrays[str(index)])
        _seed_global_generators(subject, role)
        if role == "evaluate":
            _evaluate(worker, connection, memory["snapshots"])
        else:
            _collect(worker, connection, memory["snapshots"], memory["slots"])
    except (BrokenPipeError, EOFError, ConnectionResetError) as error:
        if connection.closed or _is_gone(connection):
            return  # the learner has left; nobody to tell
        _tell(connection, worker, index, env, error)
    except (Exception, SystemExit) as error:  # an environment may raise anything
        _tell(connection, worker, index, env, error)
    finally:
        if worker is not None:
            worker.close()


def _seed_global_generators(spec: WorkerSpec, role: str) -> None:
    """For environments that use them; without this all children of a fork server draw the same."""
    from actorlearner.randomness import seed_everything

    seed_everything(
        stream_seed(spec.seed, spec.streams[0], spec.first_sequence, role == "evaluate")
    )


def _is_gone(connection: Connection) -> bool:
    try:
        return connection.poll() and connection.recv() is None
    except (OSError, EOFError):
        return True


def _tell(
    connection: Connection, worker: EnvWorker | None, index: int, env: str, error: BaseException
) -> None:
    if worker is not None:
        failure = worker.failure(error)
    else:
        failure = Failure.of(index, env, "constructing the environment", error)
    with suppress(OSError):
        connection.send(("failure", failure))


def _collect(
    worker: EnvWorker, connection: Connection, snapshots: SnapshotBuffer, slots: SharedArrays
) -> None:
    worker.open()
    by_index = worker_slots(worker.spec, slots)
    connection.send(("ready", None))
    while True:
        since = time.perf_counter()
        index = connection.recv()
        if index is None:
            return
        if index == TELL_STATES:
            states = worker.env_states()
            _send_notes(worker, connection)
            connection.send(("states", states))
            continue
        began, computed = time.perf_counter(), time.process_time()
        slot = by_index[index]
        worker.collect(snapshots.read(), slot.unroll)
        slot.unroll.seconds["wait"] = began - since
        cores = (time.process_time() - computed) / (time.perf_counter() - began)
        _send_notes(worker, connection)
        connection.send(("commit", slot.commit(index, cores)))


def _send_notes(worker: EnvWorker, connection: Connection) -> None:
    if worker.notes:
        connection.send(("notes", worker.notes))
        worker.notes = []


def _evaluate(worker: EnvWorker, connection: Connection, snapshots: SnapshotBuffer) -> None:
    connection.send(("ready", None))
    while True:
        request: EvaluationRequest | None = connection.recv()
        if request is None:
            return
        connection.send(("result", worker.evaluate(snapshots.read(), request)))


def slots_layout(spec: WorkerSpec, num_slots: int) -> dict[str, ArraySpec]:
    """The arrays of all slots of one worker."""
    layout = Slot.layout(spec)
    return {f"{index}/{name}": a for index in range(num_slots) for name, a in layout.items()}


def worker_slots(spec: WorkerSpec, memory: SharedArrays) -> list[Slot]:
    """The slots of one worker, views of the shared memory."""
    by_index: dict[int, dict[str, Array]] = {}
    for key, array in memory.arrays.items():
        index, _, name = key.partition("/")
        by_index.setdefault(int(index), {})[name] = array
    return [Slot(spec, by_index[index]) for index in sorted(by_index)]
