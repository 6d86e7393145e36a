"""Sinks and windows."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import math
import os
import re
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from actorlearner.contracts import MetricSink
from actorlearner.metrics import (
    ConsoleSink,
    EpisodeWindow,
    JsonLinesSink,
    MetricWindow,
    TensorBoardSink,
    TimeSplit,
)

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


class TestJsonLinesSink:
    def test_one_object_a_line_as_soon_as_written(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "metrics.jsonl"
        sink: MetricSink = JsonLinesSink(path)
        sink.write(100, {"updates": 3, "dqn/loss": 0.5})
        assert path.read_text() == '{"env_steps": 100, "updates": 3, "dqn/loss": 0.5}\n'
        sink.write(200, {"updates": 6})
        assert [line["env_steps"] for line in read(path)] == [100, 200]
        sink.close()
        sink.close()

    def test_always_valid_json(self, tmp_path: Path) -> None:
        sink = JsonLinesSink(tmp_path / "m.jsonl")
        values = [math.nan, math.inf, -math.inf, np.float32(0.5), np.float64("nan"), np.int64(3)]
        sink.write(1, {f"a/{i}": value for i, value in enumerate(values)})
        sink.close()
        assert list(read(tmp_path / "m.jsonl")[0].values()) == [1, None, None, None, 0.5, None, 3.0]

    def test_resume_cuts_later_and_torn_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        with path.open("w") as file:
            for step in (100, 200, 300, 250):  # 250: an evaluation's result came late
                file.write(f'{{"env_steps": {step}, "a/b": {step}}}\n')
            file.write('{"a/b": 7}\nnull\n{"env_steps": 1')
        sink = JsonLinesSink(path, resume_at=200)
        sink.write(210, {"a/b": 210})
        sink.close()
        assert [line["env_steps"] for line in read(path)] == [100, 200, 210]
        assert list(tmp_path.iterdir()) == [path]

    def test_resume_keeps_a_whole_line_but_not_one_without_its_end(self, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        path.write_text('{"env_steps": 1}\n{"env_steps": 2}')
        JsonLinesSink(path, resume_at=9).close()
        assert path.read_text() == '{"env_steps": 1}\n'

    def test_a_fresh_run_begins_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        path.write_text('{"env_steps": 1}\n')
        JsonLinesSink(path).close()
        assert path.read_text() == ""
        JsonLinesSink(tmp_path / "none.jsonl", resume_at=5).close()


def accumulate(log_dir: Path) -> EventAccumulator:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(log_dir))
    events.Reload()
    return events


def points(log_dir: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in accumulate(log_dir).Scalars(tag)]


class TestTensorBoardSink:
    def test_tags_steps_and_values(self, tmp_path: Path) -> None:
        sink: MetricSink = TensorBoardSink(tmp_path)
        for step in (10, 20):
            sink.write(step, {"world/loss": step / 4, "evaluation/return_mean": -1.0})
        assert points(tmp_path, "world/loss") == [(10, 2.5), (20, 5.0)], "flushed by write"
        sink.close()
        sink.close()
        assert accumulate(tmp_path).Tags()["scalars"] == ["world/loss", "evaluation/return_mean"]

    @pytest.mark.parametrize(("purge_step", "kept"), [(100, [50]), (101, [50, 100])])
    def test_purge_step_hides_itself_too(
        self, tmp_path: Path, purge_step: int, kept: list[int]
    ) -> None:
        """So a run that goes on from step 100 must give 101."""
        first = TensorBoardSink(tmp_path)
        for step in (50, 100, 150, 200):
            first.write(step, {"a/b": 0.0, "c/d": 0.0})
        first.close()
        second = TensorBoardSink(tmp_path, purge_step=purge_step)
        second.write(125, {"a/b": 1.0})
        second.close()
        assert points(tmp_path, "a/b") == [*((step, 0.0) for step in kept), (125, 1.0)]
        assert points(tmp_path, "c/d") == [(step, 0.0) for step in kept]

    def test_a_writer_of_the_caller_stays_open(self, tmp_path: Path) -> None:
        owner = TensorBoardSink(tmp_path)
        sink = TensorBoardSink(owner.writer)
        sink.write(1, {"a/b": 1.0})
        sink.close()
        owner.write(2, {"a/b": 2.0})
        owner.close()
        assert len(list(tmp_path.iterdir())) == 1, "a closed writer begins a second file"
        assert points(tmp_path, "a/b") == [(1, 1.0), (2, 2.0)]

    def test_tensorboard_is_imported_late(self) -> None:
        code = "import sys, actorlearner.metrics; sys.exit('tensorboard' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def all_of(leader: int) -> str:
    """What was written to a terminal whose other side is closed."""
    text = b""
    with suppress(OSError):
        while chunk := os.read(leader, 1 << 16):
            text += chunk
    os.close(leader)
    return text.decode()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestConsoleSink:
    def test_plain_lines_where_there_is_no_terminal(self) -> None:
        stream = io.StringIO()
        show = {"episode/return_mean": "return", "*/loss": "loss", "speed/*": "steps/s"}
        show["waits for"] = "waits for"
        sink: MetricSink = ConsoleSink(2_000, show=show, stream=stream)
        sink.write(500, {"dqn/loss": 0.123456, "episode/return_mean": 20.0, "time/env": 0.5})
        sink.write(1_000, {"world/loss": 2, "speed/env_steps_per_s": 12_345.6, "actor/loss": 1})
        sink.write(1_500, {"waits for": "env", "dqn/loss": 0.5})
        sink.write(2_000, {"time/env": 0.5})
        sink.close()
        sink.close()
        assert stream.getvalue().splitlines() == [
            "500 of 2,000 env steps (25%): return 20, loss 0.123",
            "1,000 of 2,000 env steps (50%): world loss 2, actor loss 1, steps/s 12,346",
            "1,500 of 2,000 env steps (75%): loss 0.5, waits for env",
            "2,000 of 2,000 env steps (100%)",
        ]
        assert all(char.isprintable() or char == "\n" for char in stream.getvalue())

    @pytest.mark.parametrize("initial", [0, 600])
    def test_the_bar_ends_at_the_total(self, initial: int) -> None:
        stream = Terminal()
        sink = ConsoleSink(1_000, initial, stream=stream)
        assert sink._bar is not None
        assert sink._bar.n == initial
        sink.advance(700)
        sink.write(650, {"world/loss": 1.0})
        assert sink._bar.n == 700, "a late result does not move it back"
        sink.write(1_013, {"world/loss": 2.5, "other/name": 7.0})
        assert sink._bar.n == sink._bar.total == 1_000
        sink.close()
        sink.close()
        last = stream.getvalue().rstrip("\n").rpartition("\r")[2]
        assert "100%" in last
        assert "1.00k/1.00k" in last
        assert last.endswith(", loss 2.5")
        assert "other/name" not in last

    def test_log_lines_do_not_break_the_bar(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        handler = logging.StreamHandler(stream)
        logger = logging.getLogger("test_metrics.own_handler")
        monkeypatch.setattr(logger, "propagate", False)
        logger.addHandler(handler)
        try:
            sink = ConsoleSink(1_000)
            sink.write(100, {"world/loss": 2.5})
            logger.warning("a worker sneezed")
            sink.close()
            assert logger.handlers == [handler]
        finally:
            logger.removeHandler(handler)
        lines = [line.rpartition("\r")[2] for line in stream.getvalue().split("\n")]
        assert "a worker sneezed" in [line.strip() for line in lines]

    @pytest.mark.parametrize(("rows", "columns"), [(30, 60), (0, 0), (0, 60), (30, 0)])
    def test_a_real_terminal_also_one_without_a_size(self, rows: int, columns: int) -> None:
        leader, follower = os.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        with os.fdopen(follower, "w") as stream:
            sink = ConsoleSink(1_000, stream=stream)
            sink.write(1_000, {"dqn/loss": 0.25})
            sink.close()
        text = all_of(leader)
        assert "1.00k/1.00k" in text
        assert ", loss 0.25" in text
        assert max(map(len, re.split(r"[\r\n]", text))) <= (columns if rows and columns else 80)

    @pytest.mark.parametrize(
        ("rows", "columns", "wanted"),
        [
            (30, 200, "return 3, loss 0.25, steps/s 1,000,000"),
            (30, 61, "return 3, loss 0.25"),
            (30, 51, "return 3"),
            (
                0,
                200,
                "return 3, loss 0.25, steps/s 1,000,000",
            ),  # tqdm would draw nothing; it is told 80
        ],
    )
    def test_the_bar_shows_what_it_has_room_for(self, rows: int, columns: int, wanted: str) -> None:
        leader, follower = os.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        show = {"train/return": "return", "*/loss": "loss", "speed/steps": "steps/s"}
        with os.fdopen(follower, "w") as stream:
            sink = ConsoleSink(150_000, show=show, stream=stream)
            sink.write(131_000, {"speed/steps": 1e6, "q/loss": 0.25})
            sink.write(131_000, {"train/return": 3.0})
            sink.close()
        text = all_of(leader)
        last = re.split(r"[\r\n]+", text.rstrip())[-1]
        assert last.endswith(f"], {wanted}")
        assert len(last) <= columns

    @pytest.mark.parametrize("mode", ["off", "plain", "bar"])
    def test_the_mode_beats_the_terminal(self, mode: Any) -> None:
        stream = Terminal() if mode != "bar" else io.StringIO()
        sink = ConsoleSink(10, console=mode, stream=stream)
        sink.advance(5)
        sink.write(10, {})
        sink.close()
        sink.write(10, {})
        text = stream.getvalue()
        assert (text != "", "\r" in text) == (mode != "off", mode == "bar")


class TestMetricWindow:
    def test_means_since_the_last_flush(self) -> None:
        window = MetricWindow()
        window.add("dqn", {"loss": torch.tensor(1.0), "lr": 0.1})
        window.add("dqn", {"loss": torch.tensor(3.0, dtype=torch.bfloat16)})
        window.add("world", {"loss": torch.tensor(7), "mixed": 1})
        window.add("world", {"mixed": torch.tensor(2.0, dtype=torch.float64)})
        flushed = window.flush()
        expected = {"dqn/loss": 2.0, "dqn/lr": 0.1, "world/loss": 7.0, "world/mixed": 1.5}
        assert flushed == expected
        assert all(type(value) is float for value in flushed.values())
        assert window.flush() == {}

    def test_bfloat16_is_summed_in_float32(self) -> None:
        window = MetricWindow()
        for _ in range(1_000):
            window.add("a", {"b": torch.tensor(1.0, dtype=torch.bfloat16)})
        assert window.flush() == {"a/b": 1.0}

    def test_holds_no_graph_and_no_alias(self) -> None:
        parameter = torch.nn.Parameter(torch.tensor(1.0))
        window = MetricWindow()
        window.add("a", {"b": parameter, "c": parameter * 2})
        with torch.no_grad():
            parameter.fill_(99.0)
        held = [value for value in window._sums.values() if isinstance(value, torch.Tensor)]
        assert [value.requires_grad for value in held] == [False, False]
        assert window.flush() == {"a/b": 1.0, "a/c": 2.0}

    def test_adding_does_not_read_the_tensor(self) -> None:
        class Unreadable(torch.Tensor):
            @classmethod
            def __torch_function__(
                cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                name = func.__name__
                if name in ("item", "tolist", "numpy", "cpu", "__float__", "__bool__"):
                    raise AssertionError(f"{name} waits for the device")
                return super().__torch_function__(func, types, args, kwargs or {})

        value = torch.tensor(2.0).as_subclass(Unreadable)
        with pytest.raises(AssertionError, match="waits"):
            float(value)
        window = MetricWindow()
        window.add("a", {"b": value})
        window.add("a", {"b": value})

    def test_refuses_a_tensor_with_axes(self) -> None:
        with pytest.raises(ValueError, match=r"a/b: .* not a tensor of \(3,\)"):
            MetricWindow().add("a", {"b": torch.zeros(3)})


class TestEpisodeWindow:
    def test_means_over_the_last(self) -> None:
        window = EpisodeWindow(3)
        assert math.isnan(window.mean_return)
        assert math.isnan(window.mean_length)
        for ret, length in [(100.0, 50), (1.0, 10), (2.0, 20), (6.0, 30)]:
            window.add(ret, length)
        assert (window.mean_return, window.mean_length, window.count) == (3.0, 20.0, 4)

    def test_goes_on_where_it_was(self) -> None:
        window, resumed, smaller = EpisodeWindow(3), EpisodeWindow(3), EpisodeWindow(1)
        for ret in (1.0, 2.0, 3.0, 4.0):
            window.add(ret, int(ret))
        resumed.load_state_dict(window.state_dict())
        smaller.load_state_dict(window.state_dict())
        for each in (window, resumed, smaller):
            each.add(8.0, 8)
        assert (resumed.mean_return, resumed.mean_length) == (5.0, 5.0)
        assert resumed.mean_return == window.mean_return
        assert resumed.count == window.count == 5
        assert smaller.mean_return == 8.0

    def test_refuses_an_empty_window(self) -> None:
        with pytest.raises(ValueError, match="size=0"):
            EpisodeWindow(0)


class FakeTime:
    """Stands in for the module `time`, and passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class TestTimeSplit:
    def test_seconds_of_nested_and_unnamed_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = FakeTime()
        monkeypatch.setattr("actorlearner.metrics.time", clock)
        split = TimeSplit()
        clock.now += 1
        with split("learn"):
            clock.now += 2
            with split("sample"):
                clock.now += 4
            clock.now += 1
        with split("learn"), split("learn"):
            clock.now += 2
        assert split.flush() == {"other": 1.0, "learn": 5.0, "sample": 4.0}
        clock.now += 3
        with split("sample"):
            clock.now += 1
            assert split.flush() == {"other": 3.0, "learn": 0.0, "sample": 1.0}
            clock.now += 1
        assert split.flush() == {"other": 0.0, "learn": 0.0, "sample": 1.0}

    def test_an_exception_ends_the_span(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = FakeTime()
        monkeypatch.setattr("actorlearner.metrics.time", clock)
        split = TimeSplit()
        with pytest.raises(KeyError), split("learn"):
            raise KeyError
        clock.now += 1
        assert split.flush() == {"other": 1.0, "learn": 0.0}

    def test_no_time_at_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("actorlearner.metrics.time", FakeTime())
        assert TimeSplit().flush() == {"other": 0.0}

    def test_costs_less_than_two_microseconds(self) -> None:
        split = TimeSplit()

        def cost(uses: int = 5_000) -> float:
            start = time.perf_counter()
            for _ in range(uses):
                with split("sample"):
                    pass
            return (time.perf_counter() - start) / uses

        assert min(cost() for _ in range(10)) < 2e-6
