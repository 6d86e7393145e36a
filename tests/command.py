"""The command in a process of its own: run it, watch it, signal it, and see what it leaves.

Each `Command` marks its processes by a variable of their environment, so that children are found
whoever their parent has become, and has a directory for temporary files of its own.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
GONE_S = 5.0
"""Within this time after its end a command must have left no process."""

SMALL = (
    "total_steps=400",
    "replay.warmup_env_steps=100",
    "agent.hidden=[16]",
    "agent.batch_size=16",
    "agent.learning_rate=1e-3",
    "samples_per_insert=8",
    "evaluation.episodes=2",
    "evaluation.step_limit=50",
    "trainer.log_every_env_steps=100",
    "trainer.checkpoint_every_env_steps=150",
    "device=cpu",
)
"""Settings of a run that takes a second."""


class Command:
    """A running command.

    Attributes:
        code: its exit code, once `wait` has returned.
        out: what it wrote to standard output, likewise.
        err: and to standard error.
    """

    def __init__(
        self, arguments: Sequence[str], cwd: Path, script: Path | None = None, **variables: str
    ) -> None:
        """Start it.

        Args:
            arguments: of ``python -m actorlearner.run``, or of ``script``.
            cwd: where it runs.
            script: a Python file to run instead.
            variables: further ones of its environment.
        """
        self._cwd = cwd
        self._mark = uuid.uuid4().hex
        # Short, since the fork server's socket has its place there and at most 107 characters.
        self._temporary = Path(tempfile.mkdtemp(prefix="al"))
        self._streams = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 (see __exit__)
        self._shared_before = _shared_memory_files()
        what = ["-m", "actorlearner.run"] if script is None else [str(script)]
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", *what, *arguments],
            cwd=cwd,
            env={
                **os.environ,
                "ACTORLEARNER_TEST": self._mark,
                "TMPDIR": str(self._temporary),
                "PYTHONPATH": str(ROOT),
                **variables,
            },
            stdin=subprocess.DEVNULL,
            stdout=self._streams[0],
            stderr=self._streams[1],
            start_new_session=True,
        )
        self.code: int | None = None
        self.out = self.err = ""

    def __enter__(self) -> Command:
        """The command itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End what is left, whatever the test found."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        for stream in self._streams:
            stream.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def pid(self) -> int:
        """Of the learner."""
        return self._process.pid

    def wait(self, timeout: float = 45) -> Command:
        """Wait for its end, and read what it wrote."""
        self.code = self._process.wait(timeout)
        for stream in self._streams:
            stream.seek(0)
        self.out, self.err = (stream.read().decode() for stream in self._streams)
        return self

    def wait_until(self, condition: Callable[[], Any], timeout: float = 30) -> Any:
        """The first true value of ``condition``, asked often; it must come while this runs."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if value := condition():
                return value
            if self._process.poll() is not None:
                break
            time.sleep(0.005)
        raise AssertionError(f"ended or too slow: exit code {self._process.poll()}\n{self._told()}")

    def wait_for_env_steps(self, run_dir: Path, env_steps: int) -> None:
        """Wait until the metrics of ``run_dir`` tell of ``env_steps``."""
        self.wait_until(lambda: any(line["env_steps"] >= env_steps for line in metrics(run_dir)))

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send ``number`` to the learner, or to its process group as a terminal does."""
        (os.killpg if group else os.kill)(self.pid, number)

    def processes(self) -> list[psutil.Process]:
        """The learner and all that descend from it, those that outlived their parent too."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                marked = process.environ().get("ACTORLEARNER_TEST") == self._mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def worker(self, index: int) -> psutil.Process | None:
        """The process of worker ``index``, if it has started."""
        return next((p for p in self.processes() if _name(p) == f"al-worker-{index}"), None)

    def leaves_nothing(self, *, temporary_files: bool = True) -> bool:
        """Assert that no process is left `GONE_S` after the end, no shared memory and no file.

        Args:
            temporary_files: look for these too; a killed learner can't remove its own.
        """
        deadline = time.monotonic() + GONE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, [(p.pid, _name(p)) for p in left]
        while (files := _shared_memory_files() - self._shared_before) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)  # another test's, perhaps
        assert not files
        if temporary_files:
            # An empty directory of that name is torch's.
            left_files = {path.name for path in self._temporary.iterdir()}
            assert left_files <= {f"torchinductor_{getpass.getuser()}"}
        return True

    def _told(self) -> str:
        self._streams[1].seek(0)
        return self._streams[1].read().decode()


def _name(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def _shared_memory_files() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` that are complete."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def tree(directory: Path) -> dict[str, bytes | None]:
    """Every file below ``directory`` with its content, and every directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }
