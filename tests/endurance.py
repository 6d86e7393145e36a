"""Runs that take long, and what they leave: under faults, killed again and again, or just long.

    python tests/endurance.py chaos --minutes 15
    python tests/endurance.py kills --count 50 --preset cartpole
    python tests/endurance.py soak --minutes 30

Each prints one line of JSON and fails with an `AssertionError` if something is not as it should be.
`make test-slow` runs short ones.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
from gymnasium.envs.classic_control import CartPoleEnv

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actorlearner import checkpoint
from actorlearner.contracts import CheckpointError
from tests.command import Command, metrics

SAMPLE_S = 2.0
FLAT = {"descriptors": 4, "threads": 2, "rss": 0.06, "shm": 0}
"""How far the last third of a run may lie above the middle one: counts, and of RSS the share."""


class Counted(CartPoleEnv):
    """CartPole that counts its steps in a file, which outlives whatever happens to its process."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        is_worker = Path("/proc/self/comm").read_text().startswith("al-worker")
        self._count: Any = np.zeros(1, np.int64)
        if is_worker:
            name = Path(tempfile.mkstemp(dir=directory)[1])
            self._count = np.memmap(name, np.int64, "w+", shape=(1,))

    def step(self, action: Any) -> Any:
        step = super().step(action)
        self._count[0] += 1
        return step


gymnasium.register("Counted-v0", Counted, max_episode_steps=500)


def steps_counted(directory: Path) -> int:
    """By all environments that ever were."""
    return sum(int(np.fromfile(path, np.int64)[0]) for path in directory.iterdir())


def usage(pid: int) -> dict[str, float]:
    """Of the learner and its children together."""
    told = {"descriptors": 0.0, "threads": 0.0, "rss": 0.0}
    learner = psutil.Process(pid)
    told["descriptors"], told["threads"] = learner.num_fds(), learner.num_threads()
    for process in [learner, *learner.children(recursive=True)]:
        with suppress(psutil.Error):
            told["rss"] += process.memory_info().rss
    return {**told, "shm": len(list(Path("/dev/shm").iterdir()))}


def watch(command: Command, seconds: float) -> list[dict[str, float]]:
    """Samples of `usage` for ``seconds``, or until ``command`` has ended."""
    samples: list[dict[str, float]] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(psutil.Error):
            samples.append(usage(command.pid))
        with suppress(subprocess.TimeoutExpired):
            command.wait(SAMPLE_S)
            break
    return samples


def flat(samples: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Medians of the middle and of the last third; the latter must not be higher."""
    third = len(samples) // 3
    parts = samples[third : 2 * third], samples[2 * third : -1]
    told = {
        name: [statistics.median(sample[name] for sample in part) for part in parts]
        for name in FLAT
    }
    for name, (middle, last) in told.items():
        allowed = middle * FLAT["rss"] if name == "rss" else FLAT[name]
        assert last - middle <= allowed, f"{name} grows: {middle:g}, then {last:g}"
    return told


COMMON = ("device=cpu", "trainer.console=plain", "imports=[tests.endurance]", "trust=[tests]")


def chaos(directory: Path, minutes: float, env_steps_per_s: float = 3_000.0) -> dict[str, Any]:
    """CartPole with four workers that are killed, stopped and made to raise every few seconds."""
    counts = directory / "counts"
    counts.mkdir()
    total = int(minutes * 60 * env_steps_per_s)
    workers, unroll, slots = 4, 16, 2
    arguments = [
        *COMMON, f"run_dir={directory / 'run'}", f"workers={workers}", f"unroll_length={unroll}",
        f"total_steps={total}", "env.id=tests.endurance:Counted-v0",
        f"+env.kwargs.directory={counts}", f"launch.slots={slots}",
        "launch.on_env_error=restart", "launch.max_restarts=100_000", "launch.env_timeout_s=3",
        "faults=chaos", "faults.kill_worker_every_s=4", "faults.stop_worker_every_s=12",
        # Of its 10,000 env steps an evaluation must make all without one.
        "faults.raise_every_env_steps=40_000", "faults.hang_every_env_steps=400_000",
        "replay.capacity=10_000", "trainer.evaluate_every_env_steps=20_000",
        "trainer.checkpoint_every_env_steps=10_000", "trainer.keep_last=2",
    ]  # fmt: skip
    since = time.monotonic()
    with Command(arguments, directory) as command:
        samples = watch(command, minutes * 60 * 4 + 120)
        assert command.code is not None, "it does not end"
        assert command.leaves_nothing()
    assert command.code == 0, command.err[-4000:]
    lines = metrics(directory / "run")
    last = [line for line in lines if "workers/restarts" in line][-1]
    env_steps, dropped = last["env_steps"], last["workers/rows_dropped"]
    restarts = last["workers/restarts"]
    made = steps_counted(counts)
    # Neither stored nor dropped: what was under way at the end, and in each loss one row.
    under_way = workers * (slots + 1) * unroll + restarts
    assert 0 <= made - env_steps <= dropped + under_way, (made, env_steps, dropped, restarts)
    returns = [line["evaluation/return_mean"] for line in lines if "evaluation/return_mean" in line]
    return {
        "seconds": round(time.monotonic() - since), "env_steps": env_steps, "made": made,
        "restarts": restarts, "rows_dropped": dropped, "return": returns[-1], "best": max(returns),
        **flat(samples),
    }  # fmt: skip


def soak(directory: Path, minutes: float) -> dict[str, Any]:
    """Nothing goes wrong until it is interrupted: updates, evaluations, checkpoints in plenty."""
    arguments = [
        *COMMON, f"run_dir={directory / 'run'}", "workers=2", "total_steps=1e9",
        "samples_per_insert=4", "replay.capacity=5_000", "agent.hidden=[32]",
        "trainer.evaluate_every_env_steps=5_000", "trainer.checkpoint_every_env_steps=5_000",
        "trainer.log_every_env_steps=1_000", "trainer.keep_last=2", "evaluation.episodes=4",
    ]  # fmt: skip
    since = time.monotonic()
    with Command(arguments, directory) as command:
        samples = watch(command, minutes * 60)
        command.signal(signal.SIGINT)
        command.wait(60)
        assert command.leaves_nothing()
    assert command.code == 130, command.err[-4000:]
    env_steps = metrics(directory / "run")[-1]["env_steps"]
    return {"seconds": round(time.monotonic() - since), "env_steps": env_steps, **flat(samples)}


PRESETS: dict[str, list[str]] = {
    "cartpole": [
        "total_steps=6_000", "workers=2", "envs_per_worker=2", "replay.warmup_env_steps=300",
        "trainer.checkpoint_every_env_steps=100",
    ],
    "atari": [
        "experiment=breakout_dqn", "total_steps=1_500", "workers=2", "replay.capacity=2_000",
        "replay.warmup_env_steps=200", "trainer.checkpoint_every_env_steps=50",
        "evaluation.step_limit=40", "evaluation.episodes=2", "unroll_length=8",
        "agent.hidden=[32]", "samples_per_insert=2", "trainer.evaluate_every_env_steps=400",
    ],
    "dreamer": [
        "experiment=cartpole_dreamer", "total_steps=1_500", "workers=2", "unroll_length=8",
        "replay.warmup_env_steps=200", "replay.capacity=2_000", "agent.units=16",
        "agent.deterministic=32", "agent.blocks=4", "agent.latents=4", "agent.classes=4",
        "agent.batch_size=2", "agent.batch_length=8", "samples_per_insert=2",
        "trainer.checkpoint_every_env_steps=50", "trainer.evaluate_every_env_steps=500",
        "evaluation.step_limit=40", "evaluation.episodes=2",
    ],
}  # fmt: skip
"""Lockstep runs that are killed again and again."""


def kills(directory: Path, count: int, preset: str) -> dict[str, Any]:
    """``count`` times SIGKILL to the learner at a random moment, and ``resume=auto`` after each.

    In the end a run must be bit-equal to one that never stopped; then the next seed begins.
    """
    generator = random.Random(0)
    told = {"kills": 0, "went_on": 0, "afresh": 0, "bit_equal": 0}
    seed = 0
    while told["kills"] < count:
        _kill_until_it_ends(directory, count, [*PRESETS[preset], f"seed={seed}"], generator, told)
        seed += 1
    return {"preset": preset, **told}


def _kill_until_it_ends(
    directory: Path,
    count: int,
    preset: Sequence[str],
    generator: random.Random,
    told: dict[str, int],
) -> None:
    arguments = [*preset, "device=cpu", "lockstep=true", "trainer.console=plain"]
    run, whole = directory / f"killed_{preset[-1]}", directory / f"whole_{preset[-1]}"
    since = time.monotonic()
    _run(directory, [*arguments, f"run_dir={whole}"], None)
    whole_s = time.monotonic() - since
    total, before = _newest(whole), 0
    while before < total:
        # From its start on, which takes as long as most of such a run.
        after_s = generator.uniform(0.3, whole_s) if told["kills"] < count else None
        was_killed = _run(directory, [*arguments, f"run_dir={run}", "resume=auto"], after_s)
        after = _newest(run)
        assert after >= before, "a checkpoint was lost"
        told["kills"] += was_killed
        told["went_on" if before else "afresh"] += was_killed
        before = after
    compare(run, whole)
    told["bit_equal"] += 1


def _run(directory: Path, arguments: Sequence[str], kill_after_s: float | None) -> bool:
    """Run the command; whether it was killed before its end."""
    with Command(arguments, directory) as command:
        with suppress(subprocess.TimeoutExpired):
            command.wait(600 if kill_after_s is None else kill_after_s)
        was_killed = command.code is None
        if was_killed:
            assert kill_after_s is not None, "it does not end"
            command.signal(signal.SIGKILL)
            command.wait(10)
        else:
            assert command.code == 0, command.err[-4000:]
        assert command.leaves_nothing(temporary_files=not was_killed)
    return was_killed


def _newest(run_dir: Path) -> int:
    """Env steps of its newest whole checkpoint; 0 without one."""
    try:
        return checkpoint.read_manifest(checkpoint.find(run_dir)).env_steps
    except CheckpointError:
        return 0


def compare(one: Path, other: Path) -> None:
    """Assert that two runs ended alike: every state but the clock, and every evaluation."""
    directories = checkpoint.find(one), checkpoint.find(other)
    names = sorted(checkpoint.read_manifest(directories[1]).states)
    states = [checkpoint.load(directory, names) for directory in directories]
    for state in states:
        state["log"].pop("wall_s", None)
    for name in names:
        for (path, value), (wanted_path, wanted) in zip(
            _leaves(states[0][name], name), _leaves(states[1][name], name), strict=True
        ):
            assert path == wanted_path
            np.testing.assert_equal(np.asarray(value), np.asarray(wanted), path)
    returns = [
        [(line["env_steps"], line["evaluation/return_mean"]) for line in metrics(run_dir)
         if "evaluation/return_mean" in line]
        for run_dir in (one, other)
    ]  # fmt: skip
    assert returns[0] == returns[1]


def _leaves(tree: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [leaf for k in sorted(tree, key=repr) for leaf in _leaves(tree[k], f"{path}.{k}")]
    if isinstance(tree, list | tuple):
        return [leaf for i, item in enumerate(tree) for leaf in _leaves(item, f"{path}[{i}]")]
    return [(path, tree)]


def main() -> None:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["chaos", "kills", "soak"])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--preset", choices=PRESETS, default="cartpole")
    parser.add_argument("--directory", type=Path, help="to keep; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        if args.what == "kills":
            told = kills(directory, args.count, args.preset)
        else:
            told = {"chaos": chaos, "soak": soak}[args.what](directory, args.minutes)
    print(json.dumps({"what": args.what, **told}))  # noqa: T201


if __name__ == "__main__":
    main()
