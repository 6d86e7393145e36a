"""Workers in the learner's own process: for debugging, tests, and ``workers=0``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from actorlearner.contracts import (
    EnvFactory,
    EnvSpec,
    EvaluationRequest,
    EvaluationResult,
    Failure,
    LauncherClosed,
    Snapshot,
    Unroll,
    WorkerSpec,
)
from actorlearner.launch import LauncherBase, raise_failures
from actorlearner.worker import EnvWorker, probe


class InlineLauncher(LauncherBase):
    """Runs every worker here, one after the other; always in lockstep."""

    def __init__(self, *, lockstep: bool = True) -> None:
        """Nothing is started yet.

        Args:
            lockstep: as of every launcher; here it is so anyway.
        """
        self.lockstep = True
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
        except (Exception, SystemExit) as error:  # an environment may raise anything
            failure = Failure.of(0, factory.name, "constructing the environment", error)
            raise_failures([failure], cause=error)

    def start(self, specs: Sequence[WorkerSpec], snapshot: Snapshot) -> None:
        """See `contracts.Launcher`."""
        self._workers = [EnvWorker(spec) for spec in specs]
        self._evaluator = EnvWorker(replace(specs[0], index=-1))
        self._snapshot = _copy(snapshot)
        for worker in self._workers:
            with _failures_of(worker):
                worker.open()
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
        for worker, unroll in zip(self._workers, self._unrolls, strict=True):
            with _failures_of(worker):
                worker.collect(snapshot, unroll)
            self.notes += worker.notes
            worker.notes = []
            yield unroll

    def request_evaluation(self, snapshot: Snapshot, request: EvaluationRequest) -> bool:
        """See `contracts.Launcher`; runs it now."""
        if self._evaluator is None:
            raise LauncherClosed("request_evaluation needs a launcher that is started")
        if self._result is not None:
            return False
        with _failures_of(self._evaluator):
            self._result = self._evaluator.evaluate(_copy(snapshot), request)
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


@contextmanager
def _failures_of(worker: EnvWorker) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:  # an environment may raise anything
        raise_failures([worker.failure(error)], cause=error)
