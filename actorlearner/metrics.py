"""Where numbers go (sinks) and how they are gathered in between (windows).

A metric is called ``group/name``; its step counts env steps. A sink takes what a log period gave,
any number of times, and may be closed twice.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO

import numpy as np
import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# ------------------------------------------------------------------------------------- sinks


class JsonLinesSink:
    """A file with one JSON object a line: ``env_steps``, then the metrics.

    What JSON can't say (NaN, infinities) is null.

    Args:
        path: of the file; a fresh run begins it anew.
        resume_at: env steps of the checkpoint that the run goes on from; later lines are cut.
    """

    def __init__(self, path: str | Path, resume_at: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_at is not None and self.path.exists():
            _cut(self.path, resume_at)
        self._file = self.path.open("w" if resume_at is None else "a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line."""
        line = {"env_steps": step, **{name: _json_number(v) for name, v in metrics.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _json_number(value: float) -> float | None:
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


def _cut(path: Path, last_step: int) -> None:
    """Drop the lines of ``path`` after ``last_step``, and torn ones."""
    shortened = path.with_name(path.name + ".tmp")
    with path.open("rb") as old, shortened.open("wb") as new:
        new.writelines(line for line in old if _step_of(line) <= last_step)
        new.flush()
        os.fsync(new.fileno())
    shortened.replace(path)


def _step_of(line: bytes) -> float:
    """The step of a line; infinite where a killed run left half a line."""
    try:
        return int(json.loads(line)["env_steps"]) if line.endswith(b"\n") else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


class TensorBoardSink:
    """Scalars in TensorBoard's event files.

    Args:
        log_dir: directory of the event files; or a writer, which stays its owner's to close.
        purge_step: TensorBoard hides what an earlier run wrote *at* this step and later. A run that
            goes on from step ``n`` gives ``n + 1``, for what was logged at ``n`` stands.

    Attributes:
        writer: for whatever else is to be logged.
    """

    def __init__(self, log_dir: str | Path | SummaryWriter, purge_step: int | None = None) -> None:
        self._closed = False
        self._is_owner = isinstance(log_dir, str | Path)
        self.writer: SummaryWriter
        if isinstance(log_dir, str | Path):
            from torch.utils.tensorboard import SummaryWriter  # takes 1.5 s

            self.writer = SummaryWriter(str(log_dir), purge_step=purge_step)
        else:
            self.writer = log_dir

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one scalar per metric (`add_scalars` would escape the purge)."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def write_film(self, step: int, name: str, gif: bytes) -> None:
        """Add a GIF, as an image that moves (`add_video` takes frames, and needs moviepy)."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        width, height = (int.from_bytes(gif[at : at + 2], "little") for at in (6, 8))
        image = Summary.Image(encoded_image_string=gif, width=width, height=height, colorspace=3)
        value = Summary.Value(tag=name, image=image)
        self.writer._get_file_writer().add_summary(Summary(value=[value]), step)
        self.writer.flush()

    def close(self) -> None:
        """Close the writer if it was made here."""
        if self._is_owner and not self._closed:
            self.writer.close()
        self._closed = True


_BAR = "{percentage:3.0f}%|{bar:5}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
_BAR_WIDTH = 40  # columns of it that are always there, at most
_SHOW = {"*/loss": "loss"}

ConsoleMode = Literal["auto", "bar", "plain", "off"]
"""``auto`` draws a bar on a terminal and writes plain lines elsewhere."""


class ConsoleSink:
    """Progress for people: a bar on a terminal, elsewhere one plain line per write.

    While the bar is up, log records for the console are written above it.

    Args:
        total: env steps of the whole run.
        initial: env steps made before, by the run that this one goes on from.
        console: what to draw.
        show: the metrics to show, patterns (as of `fnmatch`) with what to call them, the most
            important first: a narrow terminal cuts the rest.
        stream: standard error if None.
    """

    def __init__(
        self,
        total: int,
        initial: int = 0,
        console: ConsoleMode = "auto",
        show: Mapping[str, str] = _SHOW,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        if console == "auto":
            console = "bar" if self._stream.isatty() else "plain"
        self._total = total
        self._show = dict(show)
        self._is_plain = console == "plain"
        self._on_bar: dict[str, float | str] = {}
        self._cleanup = ExitStack()
        self._bar: tqdm[Any] | None = None
        if console == "bar":
            lacks_size = _lacks_size(self._stream)
            self._bar = self._cleanup.enter_context(
                tqdm(
                    total=total,
                    initial=initial,
                    file=self._stream,
                    unit_scale=True,
                    bar_format=_BAR,
                    ncols=80 if lacks_size else None,
                    nrows=24 if lacks_size else None,
                    dynamic_ncols=not lacks_size,
                )
            )
            self._cleanup.enter_context(logging_redirect_tqdm(_console_loggers()))

    def advance(self, step: int) -> None:
        """Move the bar to ``step``; cheap enough for every turn of the loop."""
        if self._bar is not None:
            # An evaluation reports at the step of its snapshot, and the last unroll may overshoot.
            self._bar.update(max(0, min(step, self._total) - self._bar.n))

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Show the chosen metrics, words too; the bar keeps those that a later write lacks."""
        chosen = self._labelled(metrics)
        if self._bar is not None:
            self.advance(step)
            known = self._on_bar | chosen
            self._on_bar = {label: known[label] for label in sorted(known, key=self._place)}
            room = _columns(self._stream) - _BAR_WIDTH
            self._bar.set_postfix_str(_text(self._on_bar, room), refresh=False)
            self._bar.refresh()
        elif self._is_plain:
            share = min(1.0, step / max(1, self._total))  # the last unroll may overshoot
            line = f"{step:,} of {self._total:,} env steps ({share:.0%})"
            self._stream.write(f"{line}: {_text(chosen)}\n" if chosen else f"{line}\n")
            self._stream.flush()

    def _labelled(self, metrics: Mapping[str, float | str]) -> dict[str, float | str]:
        """The chosen ones; where a pattern fits several, each with its group."""
        chosen: dict[str, float | str] = {}
        for pattern, label in self._show.items():
            names = [name for name in metrics if fnmatchcase(name, pattern)]
            for name in names:
                group = name.partition("/")[0]
                chosen[label if len(names) == 1 else f"{group} {label}"] = metrics[name]
        return chosen

    def _place(self, label: str) -> int:
        """Where ``label`` comes; one with a group, where it comes without."""
        labels = list(self._show.values())
        return labels.index(label if label in labels else label.partition(" ")[2])

    def close(self) -> None:
        """Leave the bar as it stands and give the console back to logging."""
        self._cleanup.close()
        self._bar = None
        self._is_plain = False


def _text(values: Mapping[str, float | str], room: float = math.inf) -> str:
    """As many of ``values`` as have ``room``, in characters."""
    text = ""
    for label, value in values.items():
        told = value if isinstance(value, str) else _number(value)
        longer = f"{text}, {label} {told}" if text else f"{label} {told}"
        if len(longer) > room:
            break
        text = longer
    return text


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1_000 <= abs(value) < 1e9 else f"{value:.3g}"


def _columns(stream: TextIO) -> int:
    """How wide the bar is: as the terminal now, or 80."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):  # not a terminal of the system
        return 80
    return 80 if 0 in size else size.columns


def _lacks_size(stream: TextIO) -> bool:
    """Whether this is a terminal without rows or columns, where tqdm would draw nothing."""
    try:
        return 0 in os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):  # not a terminal of the system
        return False


def _console_loggers() -> list[logging.Logger]:
    """The root logger and every other one with a handler for the console of its own."""
    console = (sys.stdout, sys.stderr)
    own = [
        logger
        for logger in logging.root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger)
        and any(getattr(handler, "stream", None) in console for handler in logger.handlers)
    ]
    return [logging.root, *own]


# ----------------------------------------------------------------------------------- windows


class MetricWindow:
    """Means over a log period, taken without waiting for the device.

    Tensors are summed where they are; only `flush` reads them, all in one transfer.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float | torch.Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, group: str, metrics: Mapping[str, float | torch.Tensor]) -> None:
        """Take one value per name.

        Args:
            group: what the names belong to (a training step).
            metrics: numbers, and tensors with one element and no axes.

        Raises:
            ValueError: a tensor has axes.
        """
        for name, value in metrics.items():
            key = f"{group}/{name}"
            if isinstance(value, torch.Tensor):
                if value.ndim:
                    shape = tuple(value.shape)
                    raise ValueError(f"{key}: a metric is one number, not a tensor of {shape}")
                value = value.detach()  # noqa: PLW2901
            if key not in self._sums:
                self._sums[key], self._counts[key] = _start_of_sum(value), 1
            else:
                self._sums[key] += value
                self._counts[key] += 1

    def flush(self) -> dict[str, float]:
        """The mean of each ``group/name`` since the last flush."""
        sums, counts = self._sums, self._counts
        self._sums, self._counts = {}, {}
        tensors = {key: s for key, s in sums.items() if isinstance(s, torch.Tensor)}
        if tensors:
            device = next(iter(tensors.values())).device
            read = torch.stack([tensor.to(device) for tensor in tensors.values()]).tolist()
            sums.update(zip(tensors, read, strict=True))
        return {key: float(total) / counts[key] for key, total in sums.items()}


def _start_of_sum(value: float | torch.Tensor) -> float | torch.Tensor:
    if isinstance(value, torch.Tensor):
        # A copy: it may be a parameter, or a view that would keep a whole batch alive.
        return value.to(torch.float32, copy=True)
    return float(value)


class EpisodeWindow:
    """Returns and lengths of the last episodes.

    Args:
        size: how many episodes the means are over.

    Attributes:
        count: episodes ever added.
    """

    def __init__(self, size: int = 100) -> None:
        if size < 1:
            raise ValueError(f"size={size}: must be at least 1")
        self.count = 0
        self._returns: deque[float] = deque(maxlen=size)
        self._lengths: deque[int] = deque(maxlen=size)

    def add(self, ret: float, length: int) -> None:
        """Take one finished episode: the sum of its raw rewards, and its env steps."""
        self.count += 1
        self._returns.append(float(ret))
        self._lengths.append(int(length))

    @property
    def mean_return(self) -> float:
        """Of the episodes in the window; NaN before the first."""
        return math.fsum(self._returns) / len(self._returns) if self._returns else math.nan

    @property
    def mean_length(self) -> float:
        """Env steps, of the episodes in the window; NaN before the first."""
        return sum(self._lengths) / len(self._lengths) if self._lengths else math.nan

    def state_dict(self) -> dict[str, Any]:
        """The episodes in the window, and the count."""
        return {
            "count": self.count,
            "returns": np.array(self._returns, np.float64),
            "lengths": np.array(self._lengths, np.int64),
        }

    def load_state_dict(self, state: Any) -> None:
        """Go back to ``state``; a smaller window keeps the newest episodes."""
        self.count = state["count"]
        self._returns = deque(state["returns"].tolist(), self._returns.maxlen)
        self._lengths = deque(state["lengths"].tolist(), self._lengths.maxlen)


class TimeSplit:
    """Wall time by what it went to; all that has no name is ``other``.

    At any moment time is charged to one name: that of the innermost ``with``. So nothing counts
    twice, nested or not. It serves one thread. Example::

        split = TimeSplit()
        with split("sample"):
            batch = store.sample()
        with split("learn"):
            learn(batch)
        split.flush()  # {"sample": 0.4, "learn": 3.4, "other": 0.2}
    """

    OTHER = "other"

    def __init__(self) -> None:
        self._seconds = {self.OTHER: 0.0}
        self._spans: dict[str, _Span] = {}
        self._current = self.OTHER
        self._outer: list[str] = []
        self._since = time.perf_counter()

    def __call__(self, name: str) -> _Span:
        """A context manager that charges its time to ``name``."""
        span = self._spans.get(name)
        if span is None:
            span = self._spans[name] = _Span(self, name)
            self._seconds.setdefault(name, 0.0)
        return span

    def push(self, name: str) -> None:
        """From now on charge ``name``."""
        self._charge()
        self._outer.append(self._current)
        self._current = name

    def pop(self) -> None:
        """From now on charge what was charged before the last `push`."""
        self._charge()
        self._current = self._outer.pop()

    def flush(self) -> dict[str, float]:
        """The seconds of each name since the last flush; every name ever used."""
        self._charge()
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds

    def _charge(self) -> None:
        now = time.perf_counter()
        self._seconds[self._current] += now - self._since
        self._since = now


class _Span:
    """``with`` for one name of a `TimeSplit`; it has no state, so one serves every use."""

    __slots__ = ("_name", "_split")

    def __init__(self, split: TimeSplit, name: str) -> None:
        self._split = split
        self._name = name

    def __enter__(self) -> None:
        self._split.push(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._split.pop()
