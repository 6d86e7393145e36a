"""What the benchmarks share: settings, facts of the machine, rates, synthetic unrolls, output."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import psutil
import torch
from omegaconf import OmegaConf

import actorlearner
from actorlearner.config import make, told_plainly
from actorlearner.contracts import Array, ArraySpec, EnvSpec, StreamLayout, Unroll
from actorlearner.run import compose
from actorlearner.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("actorlearner", "torch", "numpy", "gymnasium", "ale-py")
"""Those whose versions are told."""


# -------------------------------------------------------------------------------- command line


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def argument_parser(text: str | None, with_settings: bool = True) -> argparse.ArgumentParser:
    """A parser with ``--out``.

    Args:
        text: says what the benchmark does.
        with_settings: whether it takes settings, as the package's command does; then use
            `parse_intermixed_args`.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=_Help)
    if with_settings:
        parser.add_argument(
            "settings", nargs="*", metavar="key=value", help="as of python -m actorlearner.run"
        )
    parser.add_argument("--out", type=Path, help="a file that the JSON line is appended to")
    return parser


def positive_numbers(text: str) -> list[int]:
    """``"4,8"`` as integers above 0."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text}: every number must be at least 1")
    return found


def run(main: Callable[[], int | None]) -> None:
    """Run a benchmark, and exit with its code: 2 for settings that can't be, 130, 143 for signals.

    SIGTERM is raised as Ctrl-C is, so that whoever started processes ends them.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(told_plainly(lambda: main() or 0))


@contextmanager
def started(command: Sequence[str], output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is told to end, and waited for, if it runs on."""
    process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # for it to end its own processes, and save
        process.wait()


@dataclass
class Parts:
    """The parts of a run that a command line stands for; nothing is built, and nothing runs.

    Attributes:
        trainer: with all its settings.
        factory: of environments.
        store: the replay buffer.
        agent: what learns.
    """

    trainer: Trainer
    factory: Any
    store: Any
    agent: Any

    @classmethod
    def of(cls, settings: Sequence[str]) -> Parts:
        """Composed as by ``python -m actorlearner.run``."""
        config = compose(settings)
        trainer = Trainer.from_config(config)
        trust = trainer.settings.trust
        tree: Any = OmegaConf.to_container(config, resolve=True)
        return cls(
            trainer,
            make(tree["env"], "env", "factory", trust).factory(tuple(tree["imports"]), trust),
            make(tree["replay"], "replay", "sample", trust),
            make(tree["agent"], "agent", "training_steps", trust),
        )


# --------------------------------------------------------------------------------- the machine


def facts() -> dict[str, Any]:
    """What measured where: time, code, machine, versions, and how busy the machine was before."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "source": _source(),
        "cpu": _cpu_model(),
        "cores": len(cores()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def cores() -> list[int]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pin(rank: int) -> None:
    """Keep this process, and the threads that it starts from now on, on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores()[rank % len(cores())]})


def _commit() -> str | None:
    """The commit that is checked out; it says nothing of changes since."""
    git = ROOT / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        branch = head.removeprefix("ref: ")
        if branch == head:
            return head
        if (git / branch).exists():
            return (git / branch).read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {branch}")), None)
    except OSError:
        return None


def _source() -> str:
    """A digest of the package's modules, since a commit need not be what ran."""
    package = Path(actorlearner.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


# --------------------------------------------------------------------------------------- rates


class Rate(NamedTuple):
    """How fast something went.

    Attributes:
        per_s: by the clock.
        per_core_s: by the time that its processes were given; other work does not slow this down.
    """

    per_s: float
    per_core_s: float


def rate(job: Callable[[], Any], seconds: float, wait: Callable[[], Any] = lambda: None) -> float:
    """How often per second ``job`` runs.

    Args:
        job: what to do again and again, at least once.
        seconds: for how long.
        wait: for what ``job`` leaves running (a GPU).
    """
    wait()
    count, begin = 0, time.perf_counter()
    while count == 0 or time.perf_counter() - begin < seconds:
        job()
        count += 1
    wait()
    return count / (time.perf_counter() - begin)


class OtherWork:
    """How many cores other work kept busy: that of processes neither this one nor below it."""

    def __init__(self) -> None:
        """Begin now."""
        self._since = self._now()

    def cores(self) -> float:
        """Mean since the beginning; own processes that ended meanwhile count as others."""
        wall_s, busy_s, own_s = (
            now - then for now, then in zip(self._now(), self._since, strict=True)
        )
        return round(max(0.0, (busy_s - own_s) / wall_s), 2)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = psutil.cpu_times()._asdict()
        idle = ("idle", "iowait", "guest", "guest_nice")  # guests are in user, too
        busy = sum(seconds for name, seconds in times.items() if name not in idle)
        me = psutil.Process()
        own = sum(cpu_seconds(process) for process in (me, *me.children(recursive=True)))
        return time.perf_counter(), busy, own


def cpu_seconds(process: psutil.Process) -> float:
    """What ``process`` has used so far; 0 if it is gone."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


# --------------------------------------------------------------------------- synthetic unrolls


def synthetic_unrolls(
    env_spec: EnvSpec,
    layout: StreamLayout,
    count: int,
    extras: Mapping[str, ArraySpec] | None = None,
) -> list[Unroll]:
    """Unrolls of noise, of all streams, that follow each other, the first the last one too.

    Episodes end at random, every hundred rows or so. What a policy notes (``extras``, see
    `PolicyFactory.extras_spec`) is zeros.
    """
    generator = np.random.default_rng(0)
    shapes = Unroll.layout(env_spec, layout.unroll_length, layout.num_streams, extras or {})
    unrolls = []
    for sequence in range(count):
        arrays = {name: spec.zeros() for name, spec in shapes.items()}
        unroll = Unroll.from_arrays(0, range(layout.num_streams), arrays)
        unroll.sequence = sequence
        for key, array in unroll.observation.items():
            array[...] = _noise(generator, env_spec.observation[key], array.shape)
        unroll.action[...] = _noise(generator, env_spec.action, unroll.action.shape)
        unroll.reward[...] = generator.normal(size=unroll.reward.shape)
        ends = generator.random(unroll.reward.shape) < 0.01
        ends[-2:] = False  # the reset row and the first of an episode come in the same unroll
        ends[1:] &= ~ends[:-1]
        unroll.terminated[...] = ends
        unroll.valid[...] = True
        unroll.valid[1:] = ~ends[:-1]
        unroll.first[2:] = ends[:-2]
        unroll.terminated &= unroll.valid
        unroll.reward *= unroll.valid
        unrolls.append(unroll)
    return unrolls


def _noise(generator: np.random.Generator, spec: ArraySpec, shape: tuple[int, ...]) -> Array:
    if spec.categories:
        return generator.integers(np.reshape(spec.categories, spec.shape), size=shape)
    if spec.dtype.startswith(("int", "uint")):
        return generator.integers(256 if spec.dtype == "uint8" else 2, size=shape)
    return generator.normal(size=shape) if "float" in spec.dtype else generator.random(shape) < 0.5


# -------------------------------------------------------------------------------------- output


def say(text: str) -> None:
    """A line for people, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Say ``rows`` in columns, names to the left and numbers to the right."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        padded = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        say("  ".join([first.ljust(widths[0]), *padded]))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "-" if value is None else str(value)


def report(result: dict[str, Any], out: Path | None) -> None:
    """Say ``result`` as one line of JSON, and append it to ``out``."""
    line = json.dumps(result)
    say(line)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")
