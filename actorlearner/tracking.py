"""Experiment trackers, each an extra to install: Weights & Biases, MLflow.

A tracker is a `contracts.Tracker`: a sink of metrics that also takes the configuration, and whose
run goes on when the run goes on.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from actorlearner.config import Settings, dotted, optional_library
from actorlearner.contracts import RunStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WandbSettings(Settings):
    """Settings of ``tracking=wandb``; the library's own ``WANDB_...`` variables work, too."""

    group = "tracking"

    project: str = "actorlearner"
    """Where the run is filed."""
    name: str | None = None
    """Of the run; null for that of the run directory."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes below the run directory only, for ``wandb sync``."""


class WandbTracker:
    """Metrics to Weights & Biases, over env steps."""

    def __init__(self, **settings: Any) -> None:
        """Nothing is sent yet.

        Args:
            settings: see `WandbSettings`.

        Raises:
            BadInput: the library is missing.
        """
        self.settings = WandbSettings.make(settings)
        self._wandb = optional_library("wandb", "wandb", "tracking")
        self._run: Any = None

    def start(self, config: Mapping[str, Any], run_dir: Path | None, run_id: str | None) -> str:
        """See `contracts.Tracker`."""
        s = self.settings
        self._run = self._wandb.init(
            project=s.project,
            name=s.name or _name_of(run_dir),
            mode=s.mode,
            dir=run_dir,
            config=dict(config),
            id=run_id,
            resume="allow",
            settings=self._wandb.Settings(console="off"),  # run.log has it; a bar would fill pages
        )
        # Not W&B's own step, which can't go back: evaluations are late, and runs are resumed.
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")
        started: str = self._run.id
        return started

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `contracts.MetricSink`."""
        self._run.log({"env_steps": step, **metrics})

    def close(self, status: RunStatus = "finished") -> None:
        """See `contracts.Tracker`; for W&B, what was interrupted has failed."""
        if self._run is not None:
            self._run.finish(exit_code=int(status != "finished"))
        self._run = None


@dataclass(frozen=True, kw_only=True)
class MlflowSettings(Settings):
    """Settings of ``tracking=mlflow``; the library's own ``MLFLOW_...`` variables work, too."""

    group = "tracking"

    uri: str | None = None
    """Of the tracking server, or of a local store; null for MLflow's default."""
    experiment: str = "actorlearner"
    """Where the run is filed; made if there is none."""
    name: str | None = None
    """Of the run; null for that of the run directory."""


class MlflowTracker:
    """Metrics to MLflow, over env steps; the configuration as parameters."""

    _MOST_PARAMETERS = 100  # of one request
    _STATUS: ClassVar = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
    _LONGEST_VALUE = 500  # characters of a parameter that every store takes

    def __init__(self, **settings: Any) -> None:
        """Nothing is sent yet.

        Args:
            settings: see `MlflowSettings`.

        Raises:
            BadInput: the library is missing.
        """
        self.settings = MlflowSettings.make(settings)
        self._mlflow = optional_library("mlflow", "mlflow", "tracking")
        self._client: Any = None
        self._run_id = ""

    def start(self, config: Mapping[str, Any], run_dir: Path | None, run_id: str | None) -> str:
        """See `contracts.Tracker`."""
        s = self.settings
        self._client = self._mlflow.MlflowClient(s.uri)
        if run_id is not None and self._reopen(run_id):
            self._run_id = run_id
            return run_id
        found = self._client.get_experiment_by_name(s.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(s.experiment)
        run = self._client.create_run(experiment, run_name=s.name or _name_of(run_dir))
        self._run_id = run.info.run_id
        parameters = [
            self._mlflow.entities.Param(key, str(value)[: self._LONGEST_VALUE])
            for key, value in dotted(config).items()
        ]
        for begin in range(0, len(parameters), self._MOST_PARAMETERS):
            part = parameters[begin : begin + self._MOST_PARAMETERS]
            self._client.log_batch(self._run_id, params=part)
        return self._run_id

    def _reopen(self, run_id: str) -> bool:
        """Whether there is such a run, which now is going on."""
        try:
            self._client.update_run(run_id, status="RUNNING")
        except self._mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning("MLflow knows no run %s; a new one begins", run_id)
            return False
        return True

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `contracts.MetricSink`; characters that MLflow refuses in names become ``_``."""
        now_ms = int(time.time() * 1_000)
        self._client.log_batch(
            self._run_id,
            metrics=[
                self._mlflow.entities.Metric(re.sub(r"[^\w\-./ :]", "_", name), v, now_ms, step)
                for name, v in metrics.items()
            ],
        )

    def close(self, status: RunStatus = "finished") -> None:
        """See `contracts.Tracker`."""
        if self._client is not None and self._run_id:
            self._client.set_terminated(self._run_id, self._STATUS[status])
        self._client = None


def _name_of(run_dir: Path | None) -> str | None:
    return None if run_dir is None else "/".join(run_dir.parts[-2:])
