"""Environments and policies for tests: some say in every number where it came from, some misbehave.

The observations of `Places` tell the seed, the episode, the step and the action that led to them;
reward and end follow. So `RowChecker` can tell of any row what it should have been.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from actorlearner.adapter import EnvAdapter
from actorlearner.contracts import EnvSpec, Snapshot, Unroll, WorkerSpec
from actorlearner.envs import GymEnvFactory
from actorlearner.streams import assign_streams, stream_seed

NUM_ACTIONS = 1_000_000
ENDS = ("terminated", "truncated", "both")


def plan(seed: int, episode: int) -> tuple[int, str]:
    """Length and end of an episode of `Places`."""
    return 1 + (seed // 2 + 5 * episode) % 7, ENDS[(seed // 2 + episode) % 3]


def pay(episode: int, step: int) -> float:
    """The reward of a step."""
    return (5 * episode + 3 * step) % 11 - 4.75


class Places(gymnasium.Env):
    """Observes ``(last seed given to reset, resets since, step, action that led here)``."""

    observation_space = spaces.Box(-1, 2**31 - 1, (4,), np.int64)
    action_space = spaces.Discrete(NUM_ACTIONS)

    def __init__(self) -> None:
        self.place = np.zeros(4, np.int64)  # one array for all time, as careless environments do

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        tag, episode = (self.place[0], self.place[1] + 1) if seed is None else (seed, 0)
        self.place[:] = tag, episode, 0, -1
        return self.place, {}

    def step(self, action: Any) -> Any:
        tag, episode, step = map(int, self.place[:3])
        length, end = plan(tag, episode)
        assert step < length, "stepped after the end"
        self.place[2:] = step + 1, action
        is_end = step + 1 == length
        terminated, truncated = is_end and end != "truncated", is_end and end != "terminated"
        return self.place, pay(episode, step), terminated, truncated, {}


class Pictured(Places):
    """Shows the step it is at, as a gray."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 5}
    made: ClassVar[list[str | None]] = []

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode
        self.made.append(render_mode)

    def render(self) -> Any:
        if self.render_mode is None:
            return None
        return np.full((4, 4, 3), 20 * self.place[2], np.uint8)


class RowChecker:
    """Checks every number of unrolls of `Places`, and how they follow each other.

    Attributes:
        rows: how many were checked.
        gaps: how often a worker had begun again, if that may be.
    """

    def __init__(self, seed: int, seed_every_episode: bool, gaps: bool = False) -> None:
        self.rows = 0
        self.gaps = 0
        self._may_begin_again = gaps
        self._seed = seed
        self._seed_every_episode = seed_every_episode
        self._base: dict[int, int] = {}
        self._sequence: dict[int, int] = {}
        self._episode: dict[int, int] = {}
        self._last: dict[int, list[int]] = {}
        self._return: dict[int, float] = {}

    def _tag(self, stream: int, episode: int) -> tuple[int, int]:
        if self._seed_every_episode:
            return stream_seed(self._seed, stream, episode), 0
        base = self._base.get(stream, 0)
        return stream_seed(self._seed, stream, base), episode - base

    def check(self, unroll: Unroll) -> None:
        skipped = unroll.sequence - self._sequence.get(unroll.worker, -1) - 1
        assert skipped == 0 or (skipped > 0 and self._may_begin_again)
        self.gaps += skipped > 0
        for stream in map(int, unroll.streams if skipped else ()):
            self._base[stream] = self._episode[stream] = self._episode.get(stream, 0) + skipped
            for known in (self._last, self._return):
                known.pop(stream, None)
        self._sequence[unroll.worker] = unroll.sequence
        ended = []
        for column, stream in enumerate(map(int, unroll.streams)):
            ended += self._check_column(unroll, column, stream)
        assert sorted(unroll.episodes) == sorted(ended)
        self.rows += unroll.num_rows * len(unroll.streams)

    def _check_column(self, unroll: Unroll, column: int, stream: int) -> list[Any]:
        places = unroll.observation["observation"][:, column].tolist()
        episode = self._episode.setdefault(stream, 0)
        assert places[0] == self._last.get(stream, [*self._tag(stream, episode), 0, -1])
        ended = []
        for row, (here, there) in enumerate(pairwise(places)):
            tag = self._tag(stream, episode)
            length, end = plan(*tag)
            assert tuple(here[:2]) == tag
            step, is_end = here[2], here[2] + 1 == length
            if step == length:
                episode += 1
                expected = (0, 0.0, False, False, False, False)
                assert there == [*self._tag(stream, episode), 0, -1]
            else:
                action = int(unroll.action[row, column])
                assert action // 100 == unroll.version
                reward = pay(tag[1], step)
                terminated = is_end and end != "truncated"
                expected = (
                    action, reward, terminated, is_end and not terminated, True, step == 0
                )  # fmt: skip
                assert there == [*tag, step + 1, action]
                self._return[stream] = self._return.get(stream, 0.0) + reward
                if is_end:
                    ended.append((stream, row, self._return.pop(stream), length, ()))
            fields = ("action", "reward", "terminated", "truncated", "valid", "first")
            assert tuple(getattr(unroll, name)[row, column] for name in fields) == expected
        self._last[stream], self._episode[stream] = places[-1], episode
        return ended


class PlacesPolicy:
    """Its actions tell the version of its snapshot, of which all numbers must be the same."""

    extras_spec: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, env_spec: EnvSpec, streams: Sequence[int], num_streams: int, greedy: bool
    ) -> None:
        self.greedy = greedy
        self.version = -1

    def load(self, snapshot: Snapshot) -> None:
        for array in snapshot.arrays.values():
            assert (array == snapshot.version).all(), "torn snapshot"
        assert snapshot.scalars == {"epsilon": snapshot.version / 8}
        self.version = snapshot.version

    def act(self, observation: Any, generator: np.random.Generator) -> Any:
        count = len(observation["observation"])
        draws = np.zeros(count, np.int64) if self.greedy else generator.integers(100, size=count)
        return self.version * 100 + draws, {}


def snapshot(version: int) -> Snapshot:
    """A snapshot of `PlacesPolicy`."""
    arrays = {"weight": np.full((30, 50), version, "f4"), "count": np.full((), version, "i8")}
    return Snapshot(version, arrays, {"epsilon": version / 8})


def worker_specs(
    *factories: GymEnvFactory,
    envs_per_worker: int = 2,
    policy_factory: Any = PlacesPolicy,
    unroll_length: int = 5,
    **changes: Any,
) -> list[WorkerSpec]:
    """One worker per factory."""
    streams = assign_streams(len(factories), envs_per_worker)
    changes = {"seed": 3, "env_spec": EnvAdapter(Places(), "Places").spec, **changes}
    return [
        WorkerSpec(
            index=index,
            streams=streams[index],
            num_streams=len(factories) * envs_per_worker,
            unroll_length=unroll_length,
            env_factory=factory,
            policy_factory=policy_factory,
            **changes,
        )
        for index, factory in enumerate(factories)
    ]


class Misbehaves(Places):
    """Does something bad in one place.

    Args:
        where: ``constructor``, ``reset`` or ``step``; nowhere by default.
        at: in which call of it, from 0.
        how: what; see `_misbehave`.
        text: of the exception.
        directory: where to leave a file for every environment that is built, and closed.
    """

    def __init__(
        self,
        where: str = "",
        at: int = 0,
        how: str = "raise",
        text: str = "boom",
        directory: Path | None = None,
    ) -> None:
        super().__init__()
        self._bad = where, at
        self._how, self._text = how, text
        self._calls = {"constructor": 0, "reset": 0, "step": 0}
        self._directory, self._name = directory, uuid.uuid4().hex
        self._mark("built")
        self._call("constructor")

    def _mark(self, what: str) -> None:
        if self._directory is not None:
            (self._directory / f"{what}-{self._name}").touch()

    def _call(self, where: str) -> None:
        if self._bad == (where, self._calls[where]):
            self._misbehave()
        self._calls[where] += 1

    def _misbehave(self) -> None:
        if self._how == "raise":
            raise ZeroDivisionError(self._text)
        if self._how == "SystemExit":
            sys.exit(4)
        if self._how == "exit":
            os._exit(3)
        if self._how in ("SIGKILL", "SIGSEGV"):
            os.kill(os.getpid(), getattr(signal, self._how))
        if self._how == "subprocess":
            subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        self._mark("hung")
        time.sleep(60)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._call("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self._call("step")
        return super().step(action)

    def close(self) -> None:
        self._mark("closed")


class Takes(Places):
    """A step computes for so many seconds, and waits for so many."""

    def __init__(self, computes_s: float = 0.0, waits_s: float = 0.0) -> None:
        super().__init__()
        self._computes_s, self._waits_s = computes_s, waits_s

    def step(self, action: Any) -> Any:
        until = time.process_time() + self._computes_s
        while time.process_time() < until:
            pass
        time.sleep(self._waits_s)
        return super().step(action)


class Threads(Places):
    """Observes ``(torch's threads, threads of the process, first numbers of random generators)``.

    Linear algebra was used before, so that every pool of threads is up.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._look(), {}

    def step(self, action: Any) -> Any:
        return self._look(), 0.0, False, False, {}

    def _look(self) -> Any:
        import random  # as environments that know no better do

        big = np.ones((600, 600))
        torch.from_numpy(big @ big).exp().sum()
        return np.array(
            [
                torch.get_num_threads(),
                len(os.listdir("/proc/self/task")),
                np.random.rand(),
                random.random(),
                torch.rand(()).item(),
            ]
        )
