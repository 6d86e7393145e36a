"""What a run tells people and files: its directory, its metrics and where they go."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from torch import nn

from actorlearner.contracts import (
    BadInput,
    EvaluationResult,
    MetricSink,
    Report,
    RunStatus,
    Tracker,
    Unroll,
)
from actorlearner.cores import CoreMeter
from actorlearner.evaluate import films_of, forget_films, summarise, write_films
from actorlearner.metrics import (
    ConsoleMode,
    ConsoleSink,
    EpisodeWindow,
    JsonLinesSink,
    MetricWindow,
    TensorBoardSink,
    TimeSplit,
)
from actorlearner.verdict import Layout, TimeSpent, Verdict, diagnose, shares
from actorlearner.video import Film

logger = logging.getLogger(__name__)

_WAITS_FOR = "waits for"  # a word, which is for people alone

_ON_CONSOLE = {
    "train/return_mean": "return",
    "evaluation/return_mean": "eval",
    _WAITS_FOR: _WAITS_FOR,
    "*/loss": "loss",
    "speed/env_steps_per_s": "steps/s",
    "speed/updates_per_s": "updates/s",
}
"""What people see of the metrics, and what it is called there; the most important first."""

_REPORT_FPS = 10
_ALONE = Layout()


class RunLog:
    """Aggregates what happens between two lines of the log, and writes the lines.

    Attributes:
        split: where the learner's wall time goes.
        episodes: the last 100 training episodes, raw returns.
        lives: the last 100 lives, of environments that tell of lives.
        infos: numbers that the last 100 training episodes with such a number ended with, by name.
        means: metrics of the training steps.
        writer: TensorBoard's, or None.
        last_training: env steps of the last line of training metrics.
        last_evaluation: env steps of the last evaluation that was written.
        last_report: env steps of the last report that was written.
        failed: whether something could not be written.
    """

    def __init__(
        self,
        run_dir: Path | None,
        tensorboard: Any = None,
        sinks: Sequence[MetricSink] = (),
        layout: Layout = _ALONE,
    ) -> None:
        """Nothing is written yet.

        Args:
            run_dir: where files go; None for no files.
            tensorboard: a ``SummaryWriter`` or a directory; None takes ``run_dir``.
            sinks: further receivers, which stay their owner's to close.
            layout: of the run, for what it waits for.
        """
        self.split = TimeSplit()
        self.episodes = EpisodeWindow()
        self.lives = EpisodeWindow()
        self.infos: dict[str, deque[float]] = {}
        self.means = MetricWindow()
        self.writer: Any = None
        self.last_training = self.last_evaluation = self.last_report = -1
        self.failed = False
        self._run_dir = run_dir
        self._tensorboard = tensorboard
        self._guests = list(sinks)
        self._own: list[MetricSink] = []
        self._console: ConsoleSink | None = None
        self._tracker: Tracker | None = None
        self._lost: Tracker | None = None  # one that failed
        self._tracked = {"by": "", "id": ""}
        self._wall_before = 0.0  # seconds, of the runs that this one goes on from
        self._opened_at = self._lines_since = time.perf_counter()
        self._counts = (0, 0)
        self._lag_sum = self._lag_rows = self._lag_max = 0
        self._worker_seconds: dict[str, float] = {}
        self._first_step_at: float | None = None
        self._layout = layout
        self._spent = TimeSpent()
        self._cores = CoreMeter()
        self._ran_before = time.thread_time()
        self._rows = self._updates_before = 0
        self._has_learned = False

    def open(
        self,
        total: int,
        console: ConsoleMode,
        texts: Mapping[str, str],
        resumes_at: tuple[int, int] | None,
    ) -> None:
        """Make the run directory, open files and the progress bar.

        Args:
            total: env steps of the whole run.
            console: see `ConsoleSink`.
            texts: files for the run directory, by name.
            resumes_at: env steps and updates of the checkpoint that the run goes on from; what was
                logged later is cut. None for a new run.
        """
        env_steps, self._counts = 0, (0, 0)
        if resumes_at is not None:
            env_steps, self._counts = resumes_at[0], resumes_at
        resumes = resumes_at is not None
        if self._run_dir is not None:
            try:
                self._run_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadInput(f"run_dir={self._run_dir}: {error.strerror}") from error
            for name, text in texts.items():
                (self._run_dir / name).write_text(text)
            if resumes:
                forget_films(self._run_dir, env_steps)
            self._own.append(
                JsonLinesSink(self._run_dir / "metrics.jsonl", env_steps if resumes else None)
            )
        board_at = self._tensorboard if self._tensorboard is not None else self._run_dir
        if board_at is not None:
            board = TensorBoardSink(board_at, env_steps + 1 if resumes else None)
            self.writer = board.writer
            self._own.append(board)
        self._console = ConsoleSink(total, env_steps, console, _ON_CONSOLE)
        self._own.append(self._console)
        self._lines_since = time.perf_counter()

    def track(self, tracker: Tracker, config: Mapping[str, Any], goes_on_here: bool) -> None:
        """Send metrics to ``tracker``, too.

        Args:
            tracker: not started yet.
            config: the whole configuration, nested.
            goes_on_here: whether this goes on from a checkpoint of this run directory, and so in
                the run there that the checkpoint tells of; else two would be mixed in it.
        """
        by = type(tracker).__qualname__
        run_id = self._tracked["id"] if goes_on_here and self._tracked["by"] == by else None
        self._tracker = tracker
        started = self._try_tracker(tracker.start, config, self._run_dir, run_id)
        if self._tracker is not None:
            self._tracked = {"by": by, "id": started}

    def _try_tracker(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do ``work``; the tracker's failure ends no run, but it is told, and it is left alone."""
        try:
            return work(*arguments)
        except Exception as error:
            # Once is enough: trackers retry by themselves, for minutes, in which nobody learns.
            logger.error(
                "%s failed and gets no more metrics, training goes on: %s: %s",
                type(self._tracker).__name__, type(error).__name__, error,
            )  # fmt: skip
            self._tracker, self._lost, self.failed = None, self._tracker, True

    def note(self, unroll: Unroll, updates: int) -> None:
        """Take in what ``unroll`` tells; ``updates`` are those made when it arrived."""
        rows, lag = unroll.env_steps, updates - unroll.version
        self._lag_rows += rows
        self._lag_sum += lag * rows
        self._lag_max = max(self._lag_max, lag)
        if self._first_step_at is None or (updates and not self._has_learned):
            # Workers start, or nothing is learned yet: both tell little of the run that comes.
            self._take_time(updates)
            self._spent = TimeSpent()
        self._has_learned = updates > 0
        self._rows += rows
        for name, seconds in unroll.seconds.items():
            self._worker_seconds[name] = self._worker_seconds.get(name, 0.0) + seconds
        for episode in unroll.episodes:
            self.episodes.add(episode.ret, episode.length)
            for name, number in episode.info:
                self.infos.setdefault(name, deque(maxlen=100)).append(number)
        for life in unroll.lives:
            self.lives.add(life.ret, life.length)
        if self._first_step_at is None or unroll.sequence == 0:
            earlier = self._first_step_at or unroll.started_at
            self._first_step_at = min(earlier, unroll.started_at)

    def progress(self, env_steps: int) -> None:
        """Move the progress bar."""
        if self._console is not None:
            self._console.advance(env_steps)

    def write_training(self, env_steps: int, updates: int, more: Mapping[str, float]) -> None:
        """A line of training metrics, unless there is one at ``env_steps``.

        Args:
            env_steps: made so far.
            updates: made so far.
            more: further metrics, ``group/name``.
        """
        if env_steps <= self.last_training:
            return
        self.last_training = env_steps
        now = time.perf_counter()
        seconds = now - self._lines_since
        spent = self._take_time(updates)
        self._spent.add(spent)
        metrics = {
            **{f"train/{name}": float(np.mean(last)) for name, last in self.infos.items()},
            "speed/env_steps_per_s": (env_steps - self._counts[0]) / seconds,
            "speed/updates_per_s": (updates - self._counts[1]) / seconds,
            **self.means.flush(),
            **more,
            **{f"time/{name}": share for name, share in shares(spent.learner).items()},
            **{f"worker/{name}": share for name, share in shares(spent.workers).items()},
            "train/episodes": float(self.episodes.count),
        }
        if self.episodes.count:
            metrics["train/return_mean"] = self.episodes.mean_return
            metrics["train/length_mean"] = self.episodes.mean_length
        if self.lives.count:
            metrics["train/life_return_mean"] = self.lives.mean_return
            metrics["train/life_length_mean"] = self.lives.mean_length
        if self._lag_rows:
            metrics["policy/lag_mean"] = self._lag_sum / self._lag_rows
            metrics["policy/lag_max"] = float(self._lag_max)
        if spent.cores:
            metrics["speed/cores_busy"] = spent.busy_cores / spent.cores
        if self._first_step_at is not None:
            metrics["time/first_env_step_s"] = self._first_step_at - process_started_at()
        self._lines_since, self._counts = now, (env_steps, updates)
        self._lag_sum = self._lag_rows = self._lag_max = 0
        verdict = diagnose(spent, self._layout)
        self._write(env_steps, updates, metrics, None if verdict is None else verdict.part)

    def _take_time(self, updates: int) -> TimeSpent:
        """Where time went since this was last asked, before ``updates`` were made."""
        ran, cores = time.thread_time(), self._cores.flush()
        spent = TimeSpent(
            learner=self.split.flush(),
            workers=self._worker_seconds,
            learner_ran=ran - self._ran_before,
            busy_cores=cores.busy,
            cores=cores.total,
            env_steps=self._rows,
            updates=updates - self._updates_before,
        )
        self._ran_before, self._worker_seconds = ran, {}
        self._rows, self._updates_before = 0, updates
        return spent

    @property
    def verdict(self) -> Verdict | None:
        """What the run waited for since it learns, up to the last line of training metrics."""
        return diagnose(self._spent, self._layout)

    def write_evaluation(self, result: EvaluationResult) -> dict[str, float]:
        """A line and the films of ``result`` at its snapshot's env steps, unless there is one."""
        metrics = summarise(result)
        if result.env_steps > self.last_evaluation:
            self.last_evaluation = result.env_steps
            self._write(result.env_steps, result.version, metrics)
            self._write_films(result.env_steps, films_of(result))
        return metrics

    def write_report(self, env_steps: int, updates: int, report: Report) -> None:
        """A line and the films of ``report``, made at ``env_steps``, unless there is one."""
        if env_steps <= self.last_report:
            return
        self.last_report = env_steps
        self._write(env_steps, updates, report.metrics)
        if self._run_dir is not None or self.writer is not None:
            films = {name: _gif(pictures) for name, pictures in report.films.items()}
            self._write_films(env_steps, films)

    def _write_films(self, env_steps: int, films: Mapping[str, bytes]) -> None:
        if self._run_dir is not None:
            self._try(write_films, self._run_dir, env_steps, films)
        for board in (sink for sink in self._own if isinstance(sink, TensorBoardSink)):
            for name, film in films.items():
                self._try(board.write_film, env_steps, name, film)

    def _write(
        self,
        env_steps: int,
        updates: int,
        metrics: Mapping[str, float],
        waits_for: str | None = None,
    ) -> None:
        words = {} if waits_for is None else {_WAITS_FOR: waits_for}
        told: dict[type, Mapping[str, float | str]] = {
            JsonLinesSink: {"updates": updates, "wall_s": self.wall_s, **metrics},
            ConsoleSink: {**metrics, **words},
        }
        for sink in [*self._guests, *self._own]:
            self._try(sink.write, env_steps, told.get(type(sink), metrics))
        if self._tracker is not None:
            self._try_tracker(self._tracker.write, env_steps, metrics)

    def _try(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do ``work``; a full disk ends no run, but it is told once."""
        try:
            work(*arguments)
        except OSError as error:
            if not self.failed:
                logger.error("metrics can't be written, training goes on: %s", error)
            self.failed = True

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken, with the runs that it goes on from."""
        return self._wall_before + time.perf_counter() - self._opened_at

    def close(self, status: RunStatus = "finished") -> None:
        """Close what was opened here; the tracker is told ``status``. Idempotent."""
        for sink in self._own:
            self._try(sink.close)
        self._own, self._console = [], None
        if self._tracker is not None:
            self._try_tracker(self._tracker.close, status)
        elif self._lost is not None:
            with suppress(Exception):  # its failure was told
                self._lost.close(status)
        self._tracker = self._lost = None

    def state_dict(self) -> dict[str, Any]:
        """The episodes, and where the lines stand."""
        return {
            "episodes": self.episodes.state_dict(),
            "lives": self.lives.state_dict(),
            "infos": {name: np.array(last) for name, last in self.infos.items()},
            "last_training": self.last_training,
            "last_evaluation": self.last_evaluation,
            "last_report": self.last_report,
            "wall_s": self.wall_s,
            "tracked": dict(self._tracked),
        }

    def load_state_dict(self, state: Any) -> None:
        """Go back to ``state``."""
        self.episodes.load_state_dict(state["episodes"])
        self.lives.load_state_dict(state["lives"])
        saved = state.get("infos", {})  # there were none before version 0.4
        self.infos = {name: deque(last.tolist(), 100) for name, last in saved.items()}
        self.last_training = state["last_training"]
        self.last_evaluation = state["last_evaluation"]
        self.last_report = state.get("last_report", -1)  # older checkpoints have none
        self._wall_before = state["wall_s"]
        self._tracked = state.get("tracked", self._tracked)  # older checkpoints have none


def parameters_in_words(model: object) -> str:
    """How many numbers ``model`` learns, and how many of them each of its parts; "" for no module.

    Example: ``637,381 parameters: world 494,340, actor 62,147, critic 80,894``.
    """
    if not isinstance(model, nn.Module):
        return ""

    def count(part: nn.Module) -> int:
        return sum(p.numel() for p in part.parameters() if p.requires_grad)

    parts = {name: count(part) for name, part in model.named_children()}
    told = ", ".join(f"{name} {number:,}" for name, number in parts.items() if number)
    return f"{count(model):,} parameters: {told}" if told else f"{count(model):,} parameters"


def _gif(pictures: NDArray[np.uint8]) -> bytes:
    film = Film(_REPORT_FPS, len(pictures))
    for picture in pictures:
        film.add(picture)
    return film.gif()


@functools.cache
def process_started_at() -> float:
    """When this process was created, as `time.monotonic` seconds."""
    if sys.platform == "linux":
        # The kernel counts from boot, to 10 ms; psutil's wall clock has whole seconds of it.
        after_comm = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(after_comm[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    else:
        age = time.time() - psutil.Process().create_time()
    return time.monotonic() - age
