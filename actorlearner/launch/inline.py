"""Workers in the learner's own process: for debugging, tests, and ``workers=0``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from actorlearner.contracts import (
    EnvFactory,
    EnvSpec,
    EnvStates,
    EvaluationRequest,
    EvaluationResult,
    Failure,
    GoOn,
    LauncherClosed,
    Snapshot,
    Unroll,
    WorkerSpec,
)
from actorlearner.interrupts import Terminated
from actorlearner.launch import LauncherBase, raise_failures
from actorlearner.launch.restarts import Restarts, RestartSettings
from actorlearner.worker import EnvWorker, probe

T = TypeVar("T")


class InlineLauncher(LauncherBase):
    """Runs every worker here, one after the other; always in lockstep."""

    def __init__(self, *, lockstep: bool = True, **settings: Any) -> None:
        """Nothing is started yet.

        Args:
            lockstep: as of every launcher; here it is so anyway.
            settings: see `RestartSettings`; an environment that takes its process down or hangs is
                beyond help here.
        """
        self.lockstep = True
        self.settings = RestartSettings.make(settings)
        self._restarts = Restarts(self.settings)
        self._go_on: GoOn | None = None
        self._workers: list[EnvWorker] = []
        self._unrolls: list[Unroll] = []
        self._evaluator: EnvWorker | None = None
        self._snapshot: Snapshot | None = None
        self._result: EvaluationResult | None = None
        self.notes: list[str] = []

    def probe(self, factory: EnvFactory, render_mode: str | None = None) -> EnvSpec:
        """See `contracts.Launcher`."""
        try:
            return probe(factory, render_mode)
        except Terminated:
            raise  # it came from outside
        except (Exception, SystemExit) as error:  # an environment may raise anything
            failure = Failure.of(0, factory.name, "constructing the environment", error)
            raise_failures([failure], cause=error)

    def start(
        self, specs: Sequence[WorkerSpec], snapshot: Snapshot, go_on: GoOn | None = None
    ) -> None:
        """See `contracts.Launcher`."""
        self._go_on = go_on
        self._restarts = Restarts(self.settings)
        self._workers = [EnvWorker(spec) for spec in specs]
        self._evaluator = EnvWorker(replace(specs[0], index=-1))
        self._snapshot = _copy(snapshot)
        for index, worker in enumerate(self._workers):
            self._workers[index], _ = self._persist(worker, EnvWorker.open, is_open=True)
        self._unrolls = [_new_unroll(spec) for spec in specs]

    def publish(self, snapshot: Snapshot) -> None:
        """See `contracts.Launcher`."""
        if self._snapshot is None:
            raise LauncherClosed("publish needs a launcher that is started")
        self._snapshot = _copy(snapshot)

    def gather(self, timeout: float, may_insert: Callable[[], bool]) -> Iterator[Unroll]:
        """See `contracts.Launcher`; ``timeout`` has nothing to wait for."""
        if self._snapshot is None:
            raise LauncherClosed("gather needs a launcher that is started")
        if not may_insert():
            return
        snapshot = self._snapshot
        for index, unroll in enumerate(self._unrolls):
            collect = partial(EnvWorker.collect, snapshot=snapshot, into=unroll)
            worker, _ = self._persist(self._workers[index], collect)
            self._workers[index] = worker
            self.notes += worker.notes
            worker.notes = []
            yield unroll

    def _persist(
        self, worker: EnvWorker, work: Callable[[EnvWorker], T], is_open: bool = False
    ) -> tuple[EnvWorker, T]:
        """Do ``work``, by as many workers in the place of ``worker`` as it takes.

        Args:
            worker: who begins.
            work: what to do; what it raises replaces the worker, if that may be.
            is_open: whether ``work`` itself opens the worker.

        Returns:
            The last of the workers, and what its work gave.
        """
        spec, attempt = worker.spec, 0
        while True:
            rows = int(worker.pulse.counts[0])
            try:
                if attempt and not is_open and spec.index >= 0:
                    worker.open()
                return worker, work(worker)
            except Terminated:
                raise  # it came from outside
            except (Exception, SystemExit) as error:  # an environment may raise anything
                failure = worker.failure(error)
                failures = [failure] if self._go_on is None else self._restarts.refuse(failure)
                if self._go_on is None or failures is not None:
                    raise_failures(failures or [failure], cause=error)
                rows = (int(worker.pulse.counts[0]) - rows) * len(spec.streams)
                self.notes.append(self._restarts.note(failure, rows))
                worker.close()
                attempt += 1
                worker = EnvWorker(self._go_on(spec, attempt) if spec.index >= 0 else spec)

    def env_states(self) -> EnvStates:
        """See `contracts.Launcher`."""
        states: EnvStates = {}
        for worker in self._workers:
            states |= worker.env_states()
            self.notes += worker.notes
            worker.notes = []
        return states

    def busy_cores(self) -> int:
        """See `contracts.Launcher`; whoever asks has this process to itself."""
        return 0

    def metrics(self) -> dict[str, float]:
        """See `contracts.Launcher`."""
        return self._restarts.metrics()

    def request_evaluation(self, snapshot: Snapshot, request: EvaluationRequest) -> bool:
        """See `contracts.Launcher`; runs it now."""
        if self._evaluator is None:
            raise LauncherClosed("request_evaluation needs a launcher that is started")
        if self._result is not None:
            return False
        evaluate = partial(EnvWorker.evaluate, snapshot=_copy(snapshot), request=request)
        self._evaluator, self._result = self._persist(self._evaluator, evaluate)
        return True

    def poll_evaluation(self, timeout: float = 0.0) -> EvaluationResult | None:
        """See `contracts.Launcher`; there is nothing to wait for."""
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        """See `contracts.Launcher`."""
        workers = [*self._workers, *([self._evaluator] if self._evaluator else [])]
        self._workers, self._unrolls, self._evaluator = [], [], None
        self._snapshot = self._result = None
        for worker in workers:
            worker.close()


def _copy(snapshot: Snapshot) -> Snapshot:
    """A snapshot that later updates do not change."""
    return replace(snapshot, arrays={k: np.array(v) for k, v in snapshot.arrays.items()})


def _new_unroll(spec: WorkerSpec) -> Unroll:
    arrays = {name: array.zeros() for name, array in spec.unroll_layout.items()}
    return Unroll.from_arrays(spec.index, spec.streams, arrays)
