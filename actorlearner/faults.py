"""Faults on purpose: ``faults=chaos``, so that people can rehearse with their own environment.

They are the real ones: signals to worker processes, exceptions and sleeps inside env steps, bytes
changed in files, the system's limit on the size of files. When they come is left to chance, and
follows from no seed.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium
import psutil

from actorlearner.callbacks import Callback
from actorlearner.config import Settings, setting
from actorlearner.contracts import EnvFactory, SettingError
from actorlearner.envs import GymEnvFactory, Wrapping

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    from actorlearner.trainer import Trainer

    P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FaultSettings(Settings):
    """Settings of faults; None makes none of a kind. Intervals are averages."""

    group = "faults"

    kill_worker_every_s: float | None = setting(None, above=0)
    """Seconds between kills of a random worker process (SIGKILL)."""
    stop_worker_every_s: float | None = setting(None, above=0)
    """Seconds between stops of a random worker process (SIGSTOP): it hangs."""
    raise_every_env_steps: float | None = setting(None, low=1)
    """Env steps of one environment between exceptions."""
    hang_every_env_steps: float | None = setting(None, low=1)
    """Env steps of one environment between steps that hang."""
    hang_s: float = setting(3600.0, above=0)
    """How long such a step takes, in seconds."""
    slow_every_env_steps: float | None = setting(None, low=1)
    """Env steps of one environment between slow ones."""
    slow_s: float = setting(1.0, above=0)
    """How much longer such a step takes, in seconds."""
    damage_checkpoint_every: int | None = setting(None, low=1)
    """Every so many checkpoints one gets a wrong byte in one of its files."""
    file_limit_bytes: int | None = setting(None, low=1)
    """Checkpoints with a larger file can't be written, as on a full disk (POSIX)."""

    def check(self) -> None:
        """Limits and signals are the system's to offer."""
        for name in ("kill_worker_every_s", "stop_worker_every_s", "file_limit_bytes"):
            if getattr(self, name) is not None and os.name != "posix":
                raise SettingError(f"{self.key(name)}: this system can't; leave it null")

    @property
    def any(self) -> bool:
        """Whether there is a fault at all."""
        return self != type(self)()

    @property
    def of_env(self) -> dict[str, float]:
        """Arguments of a `FaultyEnv`; empty if it has nothing to do."""
        every = {
            name: getattr(self, f"{name}_every_env_steps") for name in ("raise", "hang", "slow")
        }
        chances = {f"{name}_chance": 1 / steps for name, steps in every.items() if steps}
        return {**chances, "hang_s": self.hang_s, "slow_s": self.slow_s} if chances else {}


class FaultyError(Exception):
    """What an environment raises on purpose."""


class FaultyEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Raises, hangs or dawdles in some of its steps."""

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        raise_chance: float = 0.0,
        hang_chance: float = 0.0,
        slow_chance: float = 0.0,
        hang_s: float = 3600.0,
        slow_s: float = 1.0,
    ) -> None:
        """Wrap ``env``.

        Args:
            env: that steps otherwise.
            raise_chance: probability of an exception in a step.
            hang_chance: of a step that takes ``hang_s``.
            slow_chance: of one that takes ``slow_s`` longer.
            hang_s: seconds.
            slow_s: seconds.
        """
        super().__init__(env)
        self._chances = raise_chance, hang_chance, slow_chance
        self._hang_s, self._slow_s = hang_s, slow_s
        self._random = random.SystemRandom()  # no environment's generator is disturbed

    def step(self, action: Any) -> Any:
        """One step, or what goes wrong in it."""
        raises, hangs, is_slow = (self._random.random() < chance for chance in self._chances)
        if raises:
            raise FaultyError("on purpose: faults.raise_every_env_steps")
        if hangs or is_slow:
            time.sleep(self._hang_s if hangs else self._slow_s)
        return self.env.step(action)


class Faults(Callback):
    """Makes them happen while a Trainer runs."""

    def __init__(self, settings: FaultSettings) -> None:
        """Nothing happens yet."""
        self.settings = settings
        self._random = random.SystemRandom()
        self._saves = 0
        every = {"SIGKILL": settings.kill_worker_every_s, "SIGSTOP": settings.stop_worker_every_s}
        self._every = {getattr(signal, name): seconds for name, seconds in every.items() if seconds}
        self._due = {number: self._next(seconds) for number, seconds in self._every.items()}

    def _next(self, every_s: float) -> float:
        return time.monotonic() + self._random.expovariate(1 / every_s)

    def put_into(self, factory: EnvFactory) -> EnvFactory:
        """``factory``, its environments faulty.

        Raises:
            SettingError: it makes others than Gymnasium's.
        """
        arguments = self.settings.of_env
        if not arguments:
            return factory
        if not isinstance(factory, GymEnvFactory):
            raise SettingError(f"faults: {factory.name} can't be wrapped; it needs a GymEnvFactory")
        wrapping = Wrapping("faults", FaultyEnv, dict(arguments))
        return replace(factory, wrappings=(*factory.wrappings, wrapping))

    def limited(self, write: Callable[P, T]) -> Callable[P, T]:
        """``write``, in the course of which this process can't make large files."""
        limit = self.settings.file_limit_bytes
        if limit is None:
            return write
        import resource  # not everywhere

        def limited(*arguments: P.args, **named: P.kwargs) -> T:
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            try:
                return write(*arguments, **named)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        return limited

    def after_update(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Send the signals that are due."""
        now = time.monotonic()
        for number, due in self._due.items():
            if now >= due:
                self._due[number] = self._next(self._every[number])
                workers = [p for p in psutil.Process().children(recursive=True) if _is_worker(p)]
                if workers:
                    victim = self._random.choice(workers)
                    logger.info("faults: %s to process %d", number.name, victim.pid)
                    with suppress(psutil.Error):  # it ended by itself meanwhile
                        victim.send_signal(number)

    def at_save(self, trainer: Trainer, directory: Path) -> None:
        """Damage the checkpoint, if it is its turn."""
        self._saves += 1
        every = self.settings.damage_checkpoint_every
        if every is not None and self._saves % every == 0:
            file = self._random.choice(
                sorted(path for path in directory.iterdir() if path.is_file())
            )
            content = bytearray(file.read_bytes())
            place = self._random.randrange(len(content))
            content[place] ^= 0x55
            # Under its name only: the file may have others, in older checkpoints and in the replay.
            damaged = file.with_name("damaged.tmp")
            damaged.write_bytes(content)
            damaged.replace(file)
            logger.info("faults: byte %d of %s is wrong now", place, file)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return process.name().startswith(("al-worker", "al-evaluate"))
    except psutil.Error:
        return False
