"""What a checkpoint of a run holds, and whether it fits the run that wants it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from actorlearner import checkpoint
from actorlearner.checkpoint import Pace
from actorlearner.config import Settings
from actorlearner.contracts import Agent, CheckpointError, EnvSpec, Store
from actorlearner.progress import Progress
from actorlearner.runlog import RunLog
from actorlearner.statetree import Packed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunState:
    """All that changes while a run goes on.

    Attributes:
        agent: its weights are the checkpoint's ``agent.safetensors``.
        env_spec: tells one environment from another.
        optimizers: by the name of the training step.
        progress: counters, clocks, generators.
        log: where the lines stand.
        replay_buffer: held if its ``save`` says so.
    """

    agent: Agent
    env_spec: EnvSpec
    optimizers: Mapping[str, torch.optim.Optimizer]
    progress: Progress
    log: RunLog
    replay_buffer: Store

    def capture(
        self, run_dir: Path, texts: Mapping[str, str], keep_last: int, lockstep: bool
    ) -> Callable[[Pace | None], Path]:
        """What writes a checkpoint of this moment, at any later one, and returns its directory.

        It is called with a `checkpoint.Pace`.

        Takes memory for a copy of all but what the store freezes (see `statetree`).

        Args:
            run_dir: below which it goes.
            texts: further files by name.
            keep_last: how many checkpoints stay.
            lockstep: for people: whether the run was deterministic.

        Raises:
            OSError: it can't be written; older ones stand. What is returned raises it too.
        """
        states: dict[str, Any] = {
            "agent": dict(self.agent.state_dict()),
            "optimizers": {name: o.state_dict() for name, o in self.optimizers.items()},
            "progress": self.progress.state_dict(),
            "log": self.log.state_dict(),
        }
        if self.replay_buffer.save:
            states["replay"] = self.replay_buffer.state_dict()
        own = {name: Packed.of(state, name).detached() for name, state in states.items()}
        info, env_steps = self._info(lockstep), self.progress.env_steps
        return lambda pace: checkpoint.save(
            run_dir, env_steps, own, info, texts, keep_last=keep_last, pace=pace
        )

    def capture_weights(
        self, run_dir: Path, texts: Mapping[str, str], keep_best: int, lockstep: bool
    ) -> Callable[[float, Pace | None], Path | None]:
        """What writes a checkpoint of the weights of this moment, given how good they are.

        It returns its directory, or None if ``keep_best`` others are better. Training can't go on
        from it. The arguments are otherwise those of `capture`.
        """
        counters = {"env_steps": self.progress.env_steps, "updates": self.progress.updates}
        states: dict[str, Any] = {"agent": dict(self.agent.state_dict()), "progress": counters}
        own = {name: Packed.of(state, name).detached() for name, state in states.items()}
        info, env_steps = self._info(lockstep), self.progress.env_steps
        return lambda score, pace: checkpoint.save_best(
            run_dir, env_steps, score, own, info, texts, keep_best=keep_best, pace=pace
        )

    def _info(self, lockstep: bool) -> dict[str, Any]:
        return {
            "agent": _target_of(self.agent),
            "agent_settings": settings_of(self.agent),
            "env": asdict(self.env_spec),
            "updates": self.progress.updates,
            "episodes": self.log.episodes.count,
            "lockstep": lockstep,
        }

    def load(self, source: str | Path) -> None:
        """Go back to the checkpoint that ``source`` means (see `checkpoint.find`).

        Raises:
            CheckpointError: missing, damaged, or of another agent or environment.
        """
        names = ["optimizers", "progress", "log", *(["replay"] if self.replay_buffer.save else [])]
        where = checkpoint.find(source)
        if "optimizers" not in checkpoint.read_manifest(where).states:
            raise CheckpointError(
                f"{where}: holds weights only, to be evaluated (--eval-only); to go on, "
                f"resume={where.parent.parent}"
            )
        states = read_weights(where, self.agent, self.env_spec, names, same_env=True)
        held, wanted = sorted(states["optimizers"]), sorted(self.optimizers)
        if held != wanted:
            raise CheckpointError(f"{source}: has optimizers {held}, not {wanted}")
        try:
            self._take(states)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            versions = checkpoint.read_manifest(where).versions
            raise CheckpointError(
                f"{source}: actorlearner {versions.get('actorlearner')} wrote its state in another "
                f"way ({type(error).__name__}: {error}); its weights can still be evaluated "
                "(--eval-only), but the run can't go on"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{source}: its replay can't be taken over: {error}") from error
        if "replay" not in states:
            logger.info("the checkpoint brings no replay: the warm-up begins anew")
            self.progress.limiter.restart_warmup()

    def _take(self, states: Mapping[str, Any]) -> None:
        for name, optimizer in self.optimizers.items():
            asked = [dict(group) for group in optimizer.param_groups]
            optimizer.load_state_dict(states["optimizers"][name])
            for group, options in zip(optimizer.param_groups, asked, strict=True):
                # A rate may be on a schedule, and is where that was; the rest is as asked for now.
                group.update({k: v for k, v in options.items() if k not in ("params", "lr")})
        self.progress.load_state_dict(states["progress"])
        self.log.load_state_dict(states["log"])
        if "replay" in states:
            self.replay_buffer.load_state_dict(states["replay"])


def read_weights(
    source: str | Path,
    agent: Agent,
    env_spec: EnvSpec,
    names: Sequence[str] = ("progress",),
    same_env: bool = False,
) -> dict[str, Any]:
    """Load the weights of a checkpoint into ``agent``.

    Args:
        source: see `checkpoint.find`.
        agent: built for ``env_spec``.
        env_spec: must have the same spaces.
        names: of other states to read.
        same_env: insist on the environment's name too.

    Returns:
        Those of the states ``names`` that the checkpoint holds.

    Raises:
        CheckpointError: missing, damaged, or of another agent or environment.
    """
    where = checkpoint.find(source, ["agent", *names])
    manifest = checkpoint.read_manifest(where)
    held, env = manifest.info.get("agent"), manifest.info.get("env", {})
    if held != _target_of(agent):
        raise CheckpointError(f"{where}: holds {held}, not {_target_of(agent)}")
    ours = json.loads(json.dumps(asdict(env_spec)))  # tuples become lists, as in there
    for part in ("name", "observation", "action") if same_env else ("observation", "action"):
        if _with_bounds(part, env.get(part)) != ours[part]:
            raise CheckpointError(
                f"{where}: was trained on {env.get('name')}, whose {part} is {env.get(part)}; "
                f"that of {ours['name']} is {ours[part]}. Start a new run for it"
            )
    try:
        agent.load_state_dict(checkpoint.load(where, ["agent"])["agent"])
    except RuntimeError as error:  # torch names the parameters that do not fit
        raise CheckpointError(f"{where}: other agent settings: {error}") from error
    return checkpoint.load(where, [name for name in names if name in manifest.states])


def _with_bounds(part: str, held: Any) -> Any:
    """``part`` of an `EnvSpec`, whose arrays may have been noted before they had bounds."""
    without: dict[str, Any] = {"low": [], "high": []}
    if part == "action" and isinstance(held, dict):
        return {**without, **held}
    if part == "observation" and isinstance(held, dict):
        return {key: {**without, **spec} for key, spec in held.items()}
    return held


def settings_of(agent: Agent) -> dict[str, Any] | None:
    """What makes another such agent; None if it does not tell, or not in JSON."""
    settings = getattr(agent, "settings", None)
    if not isinstance(settings, Settings):
        return None
    told: dict[str, Any] = asdict(cast(Any, settings))
    try:
        json.dumps(told, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return told


def _target_of(agent: Agent) -> str:
    return f"{type(agent).__module__}:{type(agent).__qualname__}"
