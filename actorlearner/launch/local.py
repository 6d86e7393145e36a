"""Workers as processes of this machine: the default.

Bulk data lie in anonymous shared memory; pipes carry *credits* down (you may fill slot 1) and
*commits* up (slot 1 is full), a few hundred bytes per unroll. Credits are the flow control: a
worker without one waits. An unroll that was not committed does not exist, so a worker that is
killed loses only that.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any, Literal, NoReturn

import cloudpickle

from actorlearner.config import setting
from actorlearner.contracts import (
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
    SnapshotBuffer,
    run_child,
    slots_layout,
    worker_slots,
)
from actorlearner.launch.processes import bound_receiving, start_processes, surroundings
from actorlearner.launch.restarts import Restarts, RestartSettings, back_off_s
from actorlearner.launch.seat import CLOSE_S, Credit, Seat, close
from actorlearner.pulse import Pulse
from actorlearner.shared_memory import SharedArrays

logger = logging.getLogger(__name__)

_GRACE_S = 0.2  # for the other workers to tell their failures too
_LOOK_S = 0.2  # how long to listen to one before looking after the others
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
        self._seats: list[Seat] = []
        self._evaluator: Seat | None = None
        self._snapshots: SnapshotBuffer | None = None
        self._pulses: SharedArrays | None = None
        self._go_on: GoOn | None = None
        self._restarts = Restarts(self.settings)
        self._credits: deque[Credit] = deque()  # not given back yet
        self._result: EvaluationResult | None = None
        self._context = start_processes(self.settings.start_method)
        self.notes: list[str] = []

    def probe(self, factory: EnvFactory, render_mode: str | None = None) -> EnvSpec:
        """See `contracts.Launcher`."""
        seat = Seat("probe", 0, factory.name)
        self._begin(seat, (factory, render_mode))
        try:
            spec: EnvSpec = self._expect(seat)
            return spec
        finally:
            close([seat])

    def start(
        self, specs: Sequence[WorkerSpec], snapshot: Snapshot, go_on: GoOn | None = None
    ) -> None:
        """See `contracts.Launcher`. Does not wait: the first failure shows in `gather`."""
        atexit.register(self.close)  # before multiprocessing waits for seats at exit
        self._go_on = go_on
        self._restarts = Restarts(self.settings)
        self._snapshots = SnapshotBuffer(snapshot)
        self._snapshots.publish(snapshot)
        indices = [*(spec.index for spec in specs), _EVALUATOR]
        self._pulses = SharedArrays({str(index): Pulse.SPEC for index in indices})
        for spec in specs:
            slots = SharedArrays(slots_layout(spec, self.settings.slots))
            seat = Seat("collect", spec.index, spec.env_factory.name)
            seat.spec, seat.slots, seat.owned = spec, worker_slots(spec, slots), slots
            self._begin(seat)
            self._seats.append(seat)
            if not self.lockstep:
                for slot in range(self.settings.slots):
                    seat.order(slot)

    def publish(self, snapshot: Snapshot) -> None:
        """See `contracts.Launcher`."""
        if self._snapshots is None:
            raise LauncherClosed("publish needs a launcher that is started")
        self._snapshots.publish(snapshot)

    def gather(self, timeout: float, may_insert: Callable[[], bool]) -> Iterator[Unroll]:
        """See `contracts.Launcher`."""
        if not self._seats:
            raise LauncherClosed("gather needs a launcher that is started")
        if self.lockstep:
            yield from self._gather_in_order(may_insert)
            return
        self._replace_lost(self._seats)
        self._give_back_credits(may_insert)
        for seat in self._wait(self._seats, timeout):
            for _ in range(self.settings.slots):  # no more, though credits go back meanwhile
                if not seat.has_message():
                    break
                commit: Commit | None = self._receive(seat)
                if commit is not None:
                    self._credits.append(Credit(seat, commit.slot))  # lasts if the caller leaves
                    yield seat.view(commit)
                    self._give_back_credits(may_insert)

    def _gather_in_order(self, may_insert: Callable[[], bool]) -> Iterator[Unroll]:
        if not may_insert():
            return
        # Only here, and of those below that owe an unroll: the streams of the others have gone on
        # since the caller took in what they did.
        self._replace_lost(self._seats)
        for seat in self._seats:
            seat.order(0)
        for seat in self._seats:
            yield seat.view(self._expect(seat))

    def _give_back_credits(self, may_insert: Callable[[], bool]) -> None:
        while self._credits and may_insert():
            self._credits.popleft().give_back()
        if self._credits:
            self._credits[-1].hold()  # those before it are held already

    def env_states(self) -> EnvStates:
        """See `contracts.Launcher`."""
        asked = [seat for seat in self._seats if seat.has_done and not seat.is_lost]
        for seat in asked:
            seat.order(TELL_STATES)
        states: EnvStates = {}
        for seat in asked:
            states |= self._expect(seat)
        return states

    def busy_cores(self) -> int:
        """See `contracts.Launcher`."""
        return sum(seat.busy_cores for seat in (*self._seats, self._evaluator) if seat is not None)

    def metrics(self) -> dict[str, float]:
        """See `contracts.Launcher`."""
        return self._restarts.metrics()

    def request_evaluation(self, snapshot: Snapshot, request: EvaluationRequest) -> bool:
        """See `contracts.Launcher`. The evaluation worker starts with the first request."""
        if self._snapshots is None:
            raise LauncherClosed("request_evaluation needs a launcher that is started")
        evaluator = self._evaluator
        if evaluator is None:
            spec = self._seats[0].spec
            assert spec is not None
            evaluator = Seat("evaluate", _EVALUATOR, spec.env_factory.name)
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
        seats = [*self._seats, *([self._evaluator] if self._evaluator else [])]
        self._seats, self._evaluator, self._result = [], None, None
        self._credits.clear()
        close(seats)
        if self._snapshots is not None:
            self._snapshots.close()
            self._snapshots = None
            atexit.unregister(self.close)
        if self._pulses is not None:
            self._pulses.close()
            self._pulses = None

    # ------------------------------------------------------------------------ seats

    def _begin(self, seat: Seat, subject: Any = None) -> None:
        """Start the process of ``seat``, which does its ``spec`` (a probe: ``subject``)."""
        memory: dict[str, Any] = {}
        if self._pulses is not None and seat.role != "probe":
            seat.pulse = self._pulses.arrays[str(seat.index)]
            seat.pulse[:] = 0
            is_evaluator = seat.role == "evaluate"
            memory = {
                "snapshots": seat.owned if is_evaluator else self._snapshots,
                "slots": None if is_evaluator else seat.owned,
                "pulses": self._pulses,
            }
        ours, theirs = self._context.Pipe()
        payload = cloudpickle.dumps(seat.spec if subject is None else subject)
        process = self._context.Process(  # type: ignore[attr-defined]
            target=run_child,
            args=(seat.role, seat.index, seat.env, payload, theirs, memory),
            name=f"actorlearner-{seat.role}-{seat.index}",
        )
        try:
            with surroundings():
                process.start()
        except (Exception, KeyboardInterrupt, SystemExit):  # a signal that waited comes here
            if process.pid is not None:
                process.kill()
                process.join()
            raise
        theirs.close()
        bound_receiving(ours, self.settings.env_timeout_s)
        seat.begun(process, ours)
        if self.settings.pin_cores and seat.role == "collect":
            cores = sorted(os.sched_getaffinity(0))
            with suppress(ProcessLookupError):  # it has ended, as will be seen
                os.sched_setaffinity(process.pid, {cores[seat.index % len(cores)]})

    def _wait(self, seats: Sequence[Seat], timeout: float) -> list[Seat]:
        """Those that have something to say; those that were lost are dealt with."""
        by_handle: dict[Any, Seat] = {}
        for seat in seats:
            if not seat.is_lost:
                by_handle[seat.connection] = by_handle[seat.process.sentinel] = seat
        heard = {id(by_handle[handle]): by_handle[handle] for handle in wait(by_handle, timeout)}
        for seat in list(heard.values()):
            if not seat.has_message():  # ended, and said nothing
                del heard[id(seat)]
                self._lose(seat, seat.death())
        for seat in seats:
            if not seat.is_lost and id(seat) not in heard:
                self._check_signs_of_life(seat)
        return list(heard.values())

    def _check_signs_of_life(self, seat: Seat) -> None:
        s = self.settings
        silence_s = seat.silence_s()
        if not seat.is_ready:
            if silence_s > s.start_timeout_s:
                text = (
                    f"not done after launch.start_timeout_s={s.start_timeout_s:g}; raise it if the "
                    "environment takes that long to construct"
                )
                self._lose(seat, seat.failure("constructing the environment", text))
        elif silence_s > s.env_timeout_s and not seat.has_message():
            if seat.role == "evaluate" and not seat.has_done and silence_s <= s.start_timeout_s:
                return  # it constructs its environments in its first evaluation
            text = (
                f"no step and no reset was done within launch.env_timeout_s={s.env_timeout_s:g}; "
                "raise it if the environment takes that long"
            )
            self._lose(seat, seat.failure(seat.phase, text))

    def _receive(self, seat: Seat) -> Any:
        """The next commit or result; None for a message that needs no further care."""
        try:
            kind, payload = seat.connection.recv()
        except BlockingIOError:
            text = f"it stopped in the middle of a message for {self.settings.env_timeout_s:g} s"
            self._lose(seat, seat.failure(seat.phase, text))
            return None
        except (EOFError, OSError):
            self._lose(seat, seat.death())
            return None
        seat.spoke()
        if kind == "failure":
            self._lose(seat, payload)
            return None
        if kind in ("ready", "notes"):
            self.notes += payload or []
            return None
        if kind == "states":
            seat.done(TELL_STATES)
        elif seat.role == "collect":
            seat.done(payload.slot)
            assert seat.spec is not None
            seat.rows_done += seat.spec.unroll_length
        elif seat.role == "evaluate":
            seat.done(*seat.owes)
            self._result = payload
        return payload

    def _expect(self, seat: Seat) -> Any:
        """The next payload of ``seat``, however long it takes; listens to the others too."""
        others = self._seats if seat in self._seats else []
        while not seat.inbox:
            self._replace_lost([other for other in others if other.owes])
            for heard in self._wait([seat, *(o for o in others if o is not seat)], _LOOK_S):
                payload = self._receive(heard)
                if payload is not None:
                    heard.inbox.append(payload)
        return seat.inbox.popleft()

    # ------------------------------------------------------------------------ losing them

    def _lose(self, seat: Seat, failure: Failure) -> None:
        """``seat`` ended or hangs; replace it in a while, or raise if that is not to be."""
        if self._go_on is None or seat.role == "probe":
            self._fail([failure])
        if (failures := self._restarts.refuse(failure)) is not None:
            self._fail(failures)
        if failure.error:
            seat.errors += 1
            seat.process.join(CLOSE_S)  # it closes its environments
        seat.end()
        seat.attempt += 1
        seat.due_at = time.monotonic() + back_off_s(seat.attempt)
        self.notes.append(self._restarts.note(failure, seat.rows_dropped))

    def _replace_lost(self, seats: Sequence[Seat]) -> None:
        """Begin again those that were lost, and have them do what they owe."""
        for seat in seats:
            if seat.is_lost and time.monotonic() >= seat.due_at:
                assert self._go_on is not None
                if seat.role == "collect":
                    assert seat.spec is not None
                    # In lockstep a lost process changes nothing, but an error would come again.
                    attempt = seat.errors if self.lockstep else seat.attempt
                    seat.spec = self._go_on(seat.spec, attempt)
                self._begin(seat)
                for message in seat.owes:
                    seat.send(message)

    def _fail(self, failures: list[Failure]) -> NoReturn:
        """Raise the first cause, after the others had a moment to tell theirs."""
        known = {failure.worker for failure in failures}
        deadline = time.monotonic() + _GRACE_S
        others = [c for c in self._seats if c.index not in known and not c.is_lost]
        while others and (left := deadline - time.monotonic()) > 0:
            for connection in wait([c.connection for c in others], left):
                seat = next(c for c in others if c.connection is connection)
                try:
                    kind, payload = seat.connection.recv()
                except (EOFError, OSError):
                    kind, payload = "failure", seat.death()
                if kind == "failure":
                    failures.append(payload)
                    others.remove(seat)
        raise_failures(failures)
