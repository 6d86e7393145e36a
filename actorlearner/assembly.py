"""From the Trainer's settings to the parts of a run: threads, launcher, workers, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from actorlearner.callbacks import Callback
from actorlearner.config import make
from actorlearner.contracts import (
    Acting,
    Agent,
    BadInput,
    EnvFactory,
    EnvSpec,
    Launcher,
    PolicyFactory,
    StepOutput,
    Store,
    Tracker,
    WorkerSpec,
)
from actorlearner.memory import core_count
from actorlearner.streams import StreamLedger, assign_streams
from actorlearner.threads import UpdateThreads
from actorlearner.trainersettings import CompileMode, TrainerSettings

_INLINE = "actorlearner.launch.inline:InlineLauncher"
_OF_INLINE = ("max_restarts", "on_env_error")
_LOCAL = "actorlearner.launch.local:LocalLauncher"
_STORE = "actorlearner.replay:ReplayBuffer"
_AGENT = "actorlearner.agents.dqn:DQN"


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's, for all but updates: workers have the other cores, and small networks lose by more.

    In lockstep for updates too, since sums keep their order.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def update_threads(settings: TrainerSettings, device: torch.device) -> UpdateThreads:
    """The torch threads of updates on ``device``: those that were asked for, or what is fastest."""
    if settings.threads is not None:
        return UpdateThreads([settings.threads])
    if settings.lockstep or device.type != "cpu":
        return UpdateThreads([1])
    cores = core_count()
    free = max(1, cores - settings.workers)
    # What is compiled is so for one number, and would be compiled again for another.
    return UpdateThreads([free] if settings.compile is not None else [1, free, cores])


def compiled(
    steps: Mapping[str, Callable[[Any], StepOutput]],
    mode: CompileMode | None,
    device: torch.device,
) -> Mapping[str, Callable[[Any], StepOutput]]:
    """Training ``steps`` that compile themselves when first called; None leaves them be.

    Raises:
        BadInput: there is no C++ compiler, which code for the CPU needs.
    """
    if mode is None:
        return steps
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second

        try:
            get_cpp_compiler()
        except RuntimeError as error:
            raise BadInput(
                f"trainer.compile={mode}: there is no C++ compiler ({error}); install g++ or "
                "clang, name another in the environment variable CXX, or set trainer.compile=null"
            ) from error
    return {name: torch.compile(step, mode=mode, dynamic=False) for name, step in steps.items()}


def make_launcher(settings: TrainerSettings, launcher: Launcher | str | None) -> Launcher:
    """The launcher that was asked for.

    Args:
        settings: ``workers=0`` runs inline, whatever ``launch`` says.
        launcher: an instance, taken as it is; a target; or None for that of ``launch``.
    """
    if launcher is not None and not isinstance(launcher, str):
        if settings.lockstep and not launcher.lockstep:
            raise BadInput(f"launcher={launcher}: must be made with lockstep=True, as the Trainer")
        return launcher
    if settings.workers == 0 and launcher is None:
        # Of the settings of processes only those count that this one can keep.
        kept = {name: settings.launch[name] for name in _OF_INLINE if name in settings.launch}
        inline: Launcher = make({"target": _INLINE, **kept}, "launch", "gather")
        return inline
    node = {"target": _LOCAL, **settings.launch}
    if launcher is not None:
        node["target"] = launcher
    made: Launcher = make(node, "launch", "gather", settings.trust, lockstep=settings.lockstep)
    return made


def default_store() -> Store:
    """The replay buffer that the command line takes by default."""
    store: Store = make({"target": _STORE}, "replay", "sample")
    return store


def default_agent() -> Agent:
    """The agent that the command line takes by default."""
    agent: Agent = make({"target": _AGENT}, "agent", "training_steps")
    return agent


def make_callbacks(settings: TrainerSettings) -> list[Callback]:
    """The callbacks that ``trainer.callbacks`` names."""
    key = settings.key("callbacks")
    return [
        make(node, f"{key}[{index}]", "after_update", settings.trust)
        for index, node in enumerate(settings.callbacks)
    ]


def make_tracker(settings: TrainerSettings) -> Tracker | None:
    """The experiment tracker that ``tracking`` names, if any.

    Raises:
        BadInput: its library is missing.
    """
    if not settings.tracking:
        return None
    tracker: Tracker = make(settings.tracking, "tracking", "start", settings.trust)
    return tracker


def worker_specs(
    settings: TrainerSettings,
    ledger: StreamLedger,
    factory: EnvFactory,
    env_spec: EnvSpec,
    policy_factory: PolicyFactory,
    acting: Acting = Acting(),  # noqa: B008 (it is frozen)
) -> list[WorkerSpec]:
    """What each worker is, and where its streams go on."""
    specs = []
    workers = max(1, settings.workers)
    for index, streams in enumerate(assign_streams(workers, settings.envs_per_worker)):
        spec = WorkerSpec(
            index=index,
            streams=streams,
            num_streams=settings.num_streams,
            seed=settings.seed,
            unroll_length=settings.unroll_length,
            env_factory=factory,
            policy_factory=policy_factory,
            env_spec=env_spec,
            seed_every_episode=settings.lockstep,
            acting=acting,
        )
        specs.append(going_on(spec, ledger))
    return specs


def going_on(spec: WorkerSpec, ledger: StreamLedger, attempt: int = 0) -> WorkerSpec:
    """``spec``, going on where ``ledger`` says that its streams stand; see `contracts.GoOn`."""
    sequence, states = ledger.going_on(spec.streams, attempt)
    return replace(spec, first_sequence=sequence, stream_states=states)
