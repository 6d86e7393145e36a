"""What a run waits for: from where its time went to one sentence with the setting to change.

Learner and workers work at the same time, so the side that hardly waits is the slow one, and what
it spends most of its time on is what the run waits for:

- The learner waits for rows: the workers are slow, by their *environments* or their *policy*.
- The workers wait for the learner: it is slow, by its *updates*, its *replay*, its *checkpoints*
  and so on; or, where it makes more than one update per env step, by what the *limiter* asks for.
- Both wait, in turns: there are too few *slots* for unrolls to let them work at the same time.
- Neither waits: both are as fast as the other, and the largest part of all their time counts.

Time is wall time. Where processes outnumber the cores all of them take longer alike, so which part
is slow stays true; but more processes would only share the same cores, and a learner that has work
and no core to do it on is helped by whoever leaves it one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Part: TypeAlias = Literal[
    "env",
    "policy",
    "slots",
    "limiter",
    "replay",
    "update",
    "publish",
    "evaluate",
    "checkpoint",
    "other",
]
"""What a run can wait for."""

_NOTABLE = 0.2  # of a side's time: to save less makes no run a quarter faster
_BUSY = 0.85  # of the cores' time: a machine is never wholly busy

_OF_LEARNER: Mapping[Part, tuple[str, ...]] = {
    "replay": ("add", "sample", "feedback"),
    "update": ("update",),
    "publish": ("publish",),
    "evaluate": ("evaluate",),
    "checkpoint": ("checkpoint",),
    "other": ("other",),
}
"""What the Trainer's names for its time belong to; ``gather`` is waiting."""

_COMPUTES: tuple[Part, ...] = ("update", "replay", "limiter")
"""What needs nothing but a core; the others may wait for a disk or another process."""

_WHAT: Mapping[Part, str] = {
    "env": "Environments",
    "policy": "The policy",
    "replay": "The replay",
    "update": "Updates",
    "publish": "Snapshots for the workers",
    "evaluate": "Evaluations",
    "checkpoint": "Checkpoints",
    "other": "Callbacks, the log and the like",
}

_FEWER_SAMPLES = "fewer samples per insert (samples_per_insert=)"
_SHARED_PASS = "more environments that share a forward pass (envs_per_worker=)"

_HELPS_LEARNER: Mapping[Part, str] = {
    "replay": f"{_FEWER_SAMPLES} or longer unrolls (unroll_length=) would help",
    "publish": "fewer of them (trainer.publish_every_updates=) would help",
    "evaluate": "fewer (trainer.evaluate_every_env_steps=) or shorter ones (evaluation.episodes=) "
    "would help",
    "checkpoint": "fewer of them (trainer.checkpoint_every_env_steps=) or replay.storage=disk "
    "would help",
    "other": "quicker callbacks or fewer lines of the log (trainer.log_every_env_steps=) would "
    "help",
}


@dataclass(slots=True)
class TimeSpent:
    """Where the time of a stretch of a run went.

    Attributes:
        learner: seconds of its wall time, by the Trainer's names; ``gather`` is waiting for rows,
            or with no worker process all that the worker does.
        workers: seconds of their wall time, summed over workers: ``env``, ``policy``, and of
            processes ``slots`` and ``limiter``, in which they wait for either.
        learner_ran: seconds in which the learner's thread had a core.
        busy_cores: seconds in which cores were busy, summed over those that may be used.
        cores: all seconds of these.
        env_steps: made.
        updates: made.
    """

    learner: dict[str, float] = field(default_factory=dict)
    workers: dict[str, float] = field(default_factory=dict)
    learner_ran: float = 0.0
    busy_cores: float = 0.0
    cores: float = 0.0
    env_steps: int = 0
    updates: int = 0

    def add(self, other: TimeSpent) -> None:
        """Go on by the stretch ``other``."""
        for mine, others in ((self.learner, other.learner), (self.workers, other.workers)):
            for name, seconds in others.items():
                mine[name] = mine.get(name, 0.0) + seconds
        self.learner_ran += other.learner_ran
        self.busy_cores += other.busy_cores
        self.cores += other.cores
        self.env_steps += other.env_steps
        self.updates += other.updates


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run is laid out.

    Attributes:
        workers: processes; 0 for one worker in the learner's.
        takes_turns: whether learner and workers wait for each other on purpose (lockstep).
        cores: that may be used.
        on_cpu: whether the learner computes there.
    """

    workers: int = 0
    takes_turns: bool = False
    cores: int = 1
    on_cpu: bool = True


class Verdict(NamedTuple):
    """What a run waits for.

    Attributes:
        part: the one that is slow.
        sentence: with numbers, and the setting to change.
    """

    part: Part
    sentence: str


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each of ``seconds`` as a share of their sum; of no time all are 0."""
    total = sum(seconds.values())
    return {name: spent / total if total else 0.0 for name, spent in seconds.items()}


def diagnose(spent: TimeSpent, layout: Layout) -> Verdict | None:
    """What a run laid out as ``layout`` waits for, by where its time went; None if it had none."""
    total_s = sum(spent.learner.values())
    if not (total_s and spent.env_steps):
        return None
    of_workers: dict[Part, float] = {
        "env": spent.workers.get("env", 0.0),
        "policy": spent.workers.get("policy", 0.0),
    }
    of_learner = {
        part: sum(spent.learner.get(name, 0.0) for name in names)
        for part, names in _OF_LEARNER.items()
    }
    gather_s = spent.learner.get("gather", 0.0)
    if not layout.workers:
        of_learner["other"] += max(0.0, gather_s - sum(of_workers.values()))
        seconds = of_workers | of_learner
        part = _largest(seconds, spent)
        how = f"{_percent(seconds[part] / total_s)} of the time" if part in seconds else ""
        return Verdict(part, _sentence(part, how, "", spent, layout))

    waits = shares(spent.workers)
    for_slots, for_limiter = waits.get("slots", 0.0), waits.get("limiter", 0.0)
    workers_wait, learner_waits = for_slots + for_limiter, gather_s / total_s
    is_for_lack_of_slots = min(for_slots, learner_waits) >= _NOTABLE
    if is_for_lack_of_slots and not (layout.takes_turns or _is_crowded(spent, layout)):
        return Verdict(
            "slots",
            f"Workers waited for a free slot {_percent(for_slots)} of their time, and the learner "
            f"for rows {_percent(learner_waits)} of its own: more slots (launch.slots=) or longer "
            "unrolls (unroll_length=) would let both work at the same time.",
        )
    if max(learner_waits, workers_wait) < _NOTABLE:
        seconds, context = of_workers | of_learner, ", and neither side waited for the other"
    elif learner_waits >= workers_wait:
        seconds = of_workers
        context = f", and the learner waited for rows {_percent(learner_waits)} of its own"
    else:
        seconds = of_learner
        context = f", and the workers waited for it {_percent(workers_wait)} of theirs"
    part = _largest(seconds, spent)
    if part == "limiter":
        context = f" and held the workers back {_percent(for_limiter)} of their time"
    if part in of_workers:
        how = f"{_percent(waits[part])} of the workers' time"
    else:
        how = f"{_percent(of_learner.get(part, 0.0) / total_s)} of the learner's time"
    return Verdict(part, _sentence(part, how, context, spent, layout))


def _largest(seconds: Mapping[Part, float], spent: TimeSpent) -> Part:
    part = max(seconds, key=lambda part: seconds[part])
    # Where there are several of them for each env step, their number is what makes them slow.
    is_many = spent.updates > spent.env_steps
    return "limiter" if is_many and part in ("update", "replay") else part


def _is_busy(spent: TimeSpent) -> bool:
    """Whether all cores were, whoever kept them so."""
    return spent.busy_cores >= _BUSY * spent.cores > 0


def _is_crowded(spent: TimeSpent, layout: Layout) -> bool:
    """Whether the processes of this run that have work outnumber the cores."""
    total_s = sum(spent.learner.values())
    working_s = total_s - spent.learner.get("gather", 0.0)
    working_s += spent.workers.get("env", 0.0) + spent.workers.get("policy", 0.0)
    return _is_busy(spent) and working_s >= layout.cores * total_s


def _sentence(part: Part, how: str, context: str, spent: TimeSpent, layout: Layout) -> str:
    """What is slow, and what would help.

    Args:
        part: the one that is slow.
        how: how much of whose time it took.
        context: who waited for it.
        spent: as for `diagnose`.
        layout: likewise.
    """
    if part in ("env", "policy"):
        helps = _helps_workers(part, spent, layout)
    else:
        helps = f"{_helps_with_cores(part, spent, layout)}{_helps_learner(part, layout)}"
    if part == "limiter":
        number = spent.updates / spent.env_steps
        return f"samples_per_insert asked for {number:.1f} updates per env step{context}: {helps}."
    return f"{_WHAT[part]} took {how}{context}: {helps}."


def _helps_workers(part: Part, spent: TimeSpent, layout: Layout) -> str:
    workers = "more workers" if layout.workers else "worker processes"
    if _is_crowded(spent, layout):
        cores = "the core was" if layout.cores == 1 else f"all {layout.cores} cores were"
        faster = {
            "env": "a faster environment or its vector version (env.vector=true)",
            "policy": f"{_SHARED_PASS} or a smaller network",
        }[part]
        return f"{cores} busy, so {faster} would help, and {workers} hardly"
    helps = {
        "env": f"{workers} (workers=) would help",
        "policy": f"{_SHARED_PASS} or {workers} (workers=) would help",
    }[part]
    return f"{helps} if the cores were not busy already" if _is_busy(spent) else helps


def _helps_learner(part: Part, layout: Layout) -> str:
    if part == "limiter":
        return "a smaller samples_per_insert= would help, and each env step would be worth less"
    if part == "update":
        if layout.on_cpu:
            return f"{_FEWER_SAMPLES}, a smaller network, or a GPU for a large one would help"
        return f"{_FEWER_SAMPLES} or a smaller network would help"
    return _HELPS_LEARNER[part]


def _helps_with_cores(part: Part, spent: TimeSpent, layout: Layout) -> str:
    """What to do where the learner had work, but no core; "" where it had one."""
    if not (layout.workers > 1 and layout.on_cpu and part in _COMPUTES and _is_busy(spent)):
        return ""
    waits = ("gather", "evaluate", "checkpoint")
    working_s = sum(seconds for name, seconds in spent.learner.items() if name not in waits)
    lacked = 1 - spent.learner_ran / working_s if working_s else 0.0
    if lacked < _NOTABLE:
        return ""
    share = f"{_percent(lacked)} of the time; "
    if _is_crowded(spent, layout):
        return f"fewer workers (workers=) would leave the learner a core, which it lacked {share}"
    return f"all cores were busy, and the learner had none {share}"


def _percent(share: float) -> str:
    return f"{share:.0%}"
