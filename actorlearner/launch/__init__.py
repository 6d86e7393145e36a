"""Launchers: where workers run. One contract (`contracts.Launcher`), bit-equal in lockstep."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from actorlearner.contracts import (
    BadInput,
    EvaluationRequest,
    EvaluationResult,
    Failure,
    Snapshot,
    WorkerError,
)

if TYPE_CHECKING:
    from typing_extensions import Self


class LauncherBase(abc.ABC):
    """What all launchers have in common."""

    @abc.abstractmethod
    def request_evaluation(self, snapshot: Snapshot, request: EvaluationRequest) -> bool:
        """See `contracts.Launcher`."""

    @abc.abstractmethod
    def poll_evaluation(self, timeout: float = 0.0) -> EvaluationResult | None:
        """See `contracts.Launcher`."""

    @abc.abstractmethod
    def close(self) -> None:
        """See `contracts.Launcher`."""

    def evaluate(self, snapshot: Snapshot, request: EvaluationRequest) -> EvaluationResult:
        """See `contracts.Launcher`. An evaluation that is running is waited for first."""
        while not self.request_evaluation(snapshot, request):
            self.poll_evaluation(1.0)
        while (result := self.poll_evaluation(1.0)) is None:
            pass
        return result

    def __enter__(self) -> Self:
        """The launcher itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """`close`."""
        self.close()


def raise_failures(failures: Sequence[Failure], cause: BaseException | None = None) -> NoReturn:
    """Raise what ``failures`` say, the first cause first.

    Raises:
        BadInput: the first cause is the user's input.
        WorkerError: otherwise.
    """
    failures = sorted(failures, key=lambda failure: failure.at)
    if failures[0].bad_input:
        raise BadInput(failures[0].error.partition(": ")[2]) from cause
    raise WorkerError(failures) from cause
