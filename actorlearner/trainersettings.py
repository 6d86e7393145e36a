"""Settings of the Trainer: how a run is laid out, what it optimises, saves and logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from actorlearner.acting import ActingSettings
from actorlearner.config import Settings, setting
from actorlearner.contracts import SettingError
from actorlearner.evaluate import EvaluationSettings
from actorlearner.faults import FaultSettings
from actorlearner.memory import core_count
from actorlearner.metrics import ConsoleMode

_AUTO_ENVS = 16

CompileMode: TypeAlias = Literal["default", "reduce-overhead", "max-autotune"]
"""Those of `torch.compile`."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(Settings):
    """Settings of the loop, of the optimisation, and of what is saved and logged."""

    group = "trainer"
    root: ClassVar[tuple[str, ...]] = (
        "workers",
        "envs_per_worker",
        "unroll_length",
        "seed",
        "total_steps",
        "device",
        "lockstep",
        "samples_per_insert",
        "run_dir",
        "trust",
        "acting",
        "evaluation",
        "launch",
        "tracking",
        "faults",
    )
    """Those that stand at the root of the config tree."""

    workers: int = setting(8, low=0)
    """Worker processes; 0 runs one worker in the learner's process, and auto takes one for each
    core that the run may use."""
    envs_per_worker: int = setting(1, low=1)
    """Environments that each worker steps together; auto takes 16, beyond which a network gains
    little by a larger batch."""
    unroll_length: int = setting(16, low=1)
    """Rows that a worker hands over at once."""
    seed: int = setting(0, low=0)
    """Of everything random in the run."""
    total_steps: int = setting(100_000, low=0)
    """Env steps of the whole run."""
    device: str = "auto"
    """Of the learner: a torch device, or auto for a GPU if there is one."""
    lockstep: bool = False
    """Deterministic: one unroll from every worker, in order, then the updates owed."""
    samples_per_insert: float = setting(8.0, above=0, below=float("inf"))
    """Rows sampled for updates per row inserted, after the warm-up."""
    run_dir: Path | None = None
    """Where everything is written; None writes nothing."""
    trust: tuple[str, ...] = ()
    """Packages besides this one that targets may name."""
    acting: ActingSettings = field(default_factory=ActingSettings)
    """See `ActingSettings`."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """See `EvaluationSettings`."""
    launch: dict[str, Any] = setting({})
    """Settings of the launcher that ``workers`` > 0 starts, and its ``target``."""
    tracking: dict[str, Any] | None = None
    """Settings of an experiment tracker, and its ``target``; None for none."""
    faults: FaultSettings = field(default_factory=FaultSettings)
    """See `FaultSettings`."""

    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of the model's parameters."""
    gradient_clip_val: float | None = setting(10.0, above=0, live=True)
    """Largest global L2 norm of the gradients of a training step; None does not clip."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or a gradient that is not finite ends the run, or its step is left out and counted."""
    compile: CompileMode | None = None
    """Training steps through ``torch.compile``, in its mode default, reduce-overhead or
    max-autotune; null leaves them as they are."""
    threads: int | None = setting(None, low=1)
    """Torch threads of updates on the CPU; null tries some while it learns, keeps the number that
    is fastest, and leaves workers that compute their cores (in lockstep: one)."""
    publish_every_updates: int = setting(1, low=1)
    """Updates between snapshots for the workers (in lockstep: one before every gather)."""
    evaluate_every_env_steps: int = setting(0, low=0)
    """Env steps between evaluations; 0 evaluates at the end only. Step 0 does not count."""
    checkpoint_every_env_steps: int = setting(0, low=0)
    """Env steps between checkpoints; 0 saves at the end only. Step 0 does not count."""
    log_every_env_steps: int = setting(1_000, low=1)
    """Env steps between lines of metrics."""
    keep_last: int = setting(3, low=1)
    """Checkpoints that stay."""
    keep_best: int = setting(1, low=0)
    """Weights that stay because they were evaluated best, beside those checkpoints."""
    preempt_deadline_s: float | None = setting(None, above=0)
    """Seconds after SIGINT or SIGTERM in which to save; then the run ends unsaved. None waits. The
    update in hand, and in lockstep the round and an evaluation, are finished before that."""
    console: ConsoleMode = "auto"
    """Progress on standard error: auto, bar, plain or off."""
    callbacks: tuple[dict[str, Any], ...] = ()
    """Settings of each `Callback`, and its ``target``."""

    @classmethod
    def key(cls, name: str) -> str:
        """The dotted key of field ``name``."""
        return name if name in cls.root else f"{cls.group}.{name}"

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> TrainerSettings:
        """See `Settings.make`; auto becomes the number that it stands for here."""
        numbers = {"workers": core_count(), "envs_per_worker": _AUTO_ENVS}
        found = {name: n for name, n in numbers.items() if values.get(name) == "auto"}
        return super().make({**values, **found})

    @property
    def num_streams(self) -> int:
        """Environment slots over all workers."""
        return max(1, self.workers) * self.envs_per_worker

    def check(self) -> None:
        """The device must exist, lockstep be kept, and films have a place."""
        resolve_device(self.device, self.lockstep)
        if self.lockstep and self.dtype != "float32":
            raise SettingError(f"{self.key('dtype')}={self.dtype}: lockstep needs float32")
        if self.lockstep and self.compile is not None:
            raise SettingError(
                f"{self.key('compile')}={self.compile}: lockstep needs null, because another "
                "compiler sums in another order"
            )
        if self.lockstep and self.threads not in (None, 1):
            raise SettingError(
                f"{self.key('threads')}={self.threads}: lockstep needs 1 or null, because more "
                "threads sum in another order"
            )
        for name, value in asdict(self.acting).items():
            if self.lockstep and value not in ("eager", "float32"):
                raise SettingError(
                    f"{self.acting.key(name)}={value}: lockstep needs acting.backend=eager and "
                    "acting.precision=float32, which give the same numbers everywhere"
                )
        if self.evaluation.video and self.run_dir is None:
            raise SettingError("run_dir=None: evaluation.video=true needs a directory for films")


def resolve_device(device: str, lockstep: bool) -> torch.device:
    """The torch device that ``device`` names; auto takes a GPU if there is one.

    Raises:
        SettingError: no such device here, or not one for lockstep.
    """
    if device == "auto":
        use_gpu = torch.cuda.is_available() and not lockstep
        return torch.device("cuda" if use_gpu else "cpu")
    try:
        resolved = torch.device(device)
        torch.zeros(1, device=resolved).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise SettingError(f"device={device}: not to be had here: {reason}") from error
    if lockstep and resolved.type != "cpu":
        raise SettingError(f"device={device}: lockstep needs cpu, whose sums keep their order")
    return resolved
