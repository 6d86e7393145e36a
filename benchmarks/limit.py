"""What this machine can do: independent processes that do nothing but act and step.

Each has environments of its own in one vector environment, and loops over one batched forward of
the agent's policy and one vector step, on one core. Nothing is stored, sent or learned.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import torch
from common import Rate, pin
from gymnasium.wrappers import FrameStackObservation

from actorlearner.acting import equip
from actorlearner.contracts import OBSERVATION, Acting, EnvSpec, Observation, Snapshot
from actorlearner.launch._child import die_with_parent, leave_signals_to_the_learner
from actorlearner.launch.processes import start_processes
from actorlearner.suites import AtariEnvFactory


@dataclass
class Recipe:
    """What the processes of the limit need.

    Attributes:
        factory: makes one environment.
        env_spec: of each.
        policy_factory: makes what acts.
        snapshot: what it acts by.
        num_envs: in each process.
        processes: how many.
        acting: how they run the policy's network.
    """

    factory: Any
    env_spec: EnvSpec
    policy_factory: Any
    snapshot: Snapshot
    num_envs: int
    processes: int
    acting: Acting


class Limit:
    """Processes that wait until they are asked to `measure`.

    Attributes:
        env_class: name of the vector environment.
    """

    def __init__(self, recipe: Recipe, start_method: str = "auto") -> None:
        """Start them; each stays on one core.

        Args:
            recipe: what they do.
            start_method: how they start, see `actorlearner.launch.processes`.
        """
        context = start_processes(start_method)
        payload = cloudpickle.dumps(recipe)
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        try:
            for rank in range(recipe.processes):
                ours, theirs = context.Pipe()
                self._connections.append(ours)
                arguments = (payload, rank, theirs)
                process = context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
                process.start()
                self._processes.append(process)
                theirs.close()
            self.env_class, *_ = (str(self._answer(c)) for c in self._connections)
        except BaseException:
            self.close()
            raise

    def measure(self, seconds: float, warmup: float) -> Rate:
        """Env steps of all processes together; the calls that only reset are none."""
        for connection in self._connections:
            connection.send((seconds, warmup))
        answers = [self._answer(connection) for connection in self._connections]
        env_steps, _, cpu_s = map(sum, zip(*answers, strict=True))
        return Rate(sum(steps / wall_s for steps, wall_s, _ in answers), env_steps / cpu_s)

    @staticmethod
    def _answer(connection: Connection) -> Any:
        try:
            return connection.recv()
        except EOFError:
            raise RuntimeError("a process of the limit died; what it said stands above") from None

    def close(self) -> None:
        """End the processes. Idempotent."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def __enter__(self) -> Limit:
        """The limit itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """`close`."""
        self.close()


def _serve(payload: bytes, rank: int, connection: Connection) -> None:
    """Main function of each process."""
    leave_signals_to_the_learner()
    die_with_parent()
    pin(rank)
    torch.set_num_threads(1)
    recipe: Recipe = cloudpickle.loads(payload)
    envs = vector_env(recipe)
    steps = _steps(recipe, rank, envs)
    with suppress(BrokenPipeError, ConnectionResetError, EOFError):  # who asked may be gone first
        connection.send(type(envs).__name__)
        while True:  # until it is killed
            seconds, warmup = connection.recv()
            _run(steps, warmup)
            connection.send(_run(steps, seconds))


def _run(steps: Iterator[int], seconds: float) -> tuple[int, float, float]:
    """Env steps over the next ``seconds``, the seconds that really went by, and those of CPU."""
    env_steps, begin, cpu_begin = next(steps), time.perf_counter(), time.process_time()
    env_steps = 0
    while (now := time.perf_counter()) - begin < seconds:
        env_steps += next(steps)
    return env_steps, now - begin, time.process_time() - cpu_begin


def _steps(recipe: Recipe, rank: int, envs: Any) -> Iterator[int]:
    """Act and step for ever; gives the env steps of each vector step."""
    count = recipe.num_envs
    streams = range(rank * count, (rank + 1) * count)
    policy = recipe.policy_factory(recipe.env_spec, streams, count * recipe.processes, False)
    adopt = equip(policy, recipe.acting)
    policy.load(recipe.snapshot)
    adopt()
    generator = np.random.default_rng(rank)
    first_action = getattr(envs.single_action_space, "start", 0)
    observation, _ = envs.reset(seed=rank * count)
    ended = np.zeros(count, bool)
    while True:
        action, _ = policy.act(_flat(observation), generator)
        observation, _, terminated, truncated, _ = envs.step(action + first_action)
        yield count - int(np.count_nonzero(ended))  # the call after an end only resets
        ended = terminated | truncated


def vector_env(recipe: Recipe) -> Any:
    """A vector environment in one process, with what the recipe's factory makes or its equal."""
    factory, stack = recipe.factory, recipe.factory.frame_stack
    if isinstance(factory, AtariEnvFactory):
        vector = factory.vector(recipe.num_envs, stack=stack)  # its own stacks, as users have them
        if vector is not None:
            return vector
    elif stack == 1:  # nothing in Gymnasium stacks what a native one observes
        vector = factory.vector(recipe.num_envs)
        if vector is not None:
            return vector

    def make() -> Any:
        env = factory()
        return env if stack == 1 else FrameStackObservation(env, stack)

    return gymnasium.vector.SyncVectorEnv([make] * recipe.num_envs, copy=False)


def _flat(observation: Any, prefix: str = "") -> Observation:
    """Nested observations by keys as in `EnvSpec`."""
    if isinstance(observation, np.ndarray):
        return {prefix or OBSERVATION: observation}
    parts = observation.items() if isinstance(observation, dict) else enumerate(observation)
    flat: Observation = {}
    for key, part in parts:
        flat |= _flat(part, f"{prefix}.{key}" if prefix else str(key))
    return flat
