"""How far a run is and what is due: everything that counts, in one Stateful."""

from __future__ import annotations

from typing import Any

from actorlearner.contracts import Stateful, Unroll
from actorlearner.randomness import random_states, restore_random_states
from actorlearner.schedules import Every, SamplesPerInsert
from actorlearner.streams import StreamLedger


class Progress:
    """The counters and clocks of a run, with the random generators of the learner.

    Attributes:
        env_steps: decisions made so far, by all workers.
        updates: batches learned from so far.
        limiter: holds samples per insert.
        ledger: where each stream stands.
        log_clock: strikes when a line of metrics is due; counts env steps, as do the others.
        evaluation_clock: strikes when an evaluation is due.
        checkpoint_clock: strikes when a checkpoint is due.
        before_evaluation: the state of its clock before the evaluation that is running, so that
            what is saved meanwhile makes it up; None while none is.
    """

    def __init__(
        self,
        limiter: SamplesPerInsert,
        ledger: StreamLedger,
        log_every: int,
        evaluate_every: int,
        checkpoint_every: int,
    ) -> None:
        """The beginning of a run.

        Args:
            limiter: not yet used.
            ledger: not yet used.
            log_every: env steps, 0 for never, as the others.
            evaluate_every: likewise.
            checkpoint_every: likewise.
        """
        self.env_steps = 0
        self.updates = 0
        self.limiter = limiter
        self.ledger = ledger
        self.log_clock = Every(log_every)
        self.evaluation_clock = Every(evaluate_every)
        self.checkpoint_clock = Every(checkpoint_every)
        self.before_evaluation: dict[str, Any] | None = None

    def insert(self, unroll: Unroll) -> None:
        """Count an unroll that went into the store."""
        env_steps = unroll.env_steps
        self.env_steps += env_steps
        self.limiter.insert(env_steps)
        self.ledger.note(unroll)

    def state_dict(self) -> dict[str, Any]:
        """All counters, clocks and generators."""
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        if self.before_evaluation is not None:
            parts["evaluation_clock"] = self.before_evaluation
        return {
            "env_steps": self.env_steps,
            "updates": self.updates,
            "parts": parts,
            "random": random_states(),
        }

    def load_state_dict(self, state: Any) -> None:
        """Go back to ``state``."""
        self.env_steps, self.updates = state["env_steps"], state["updates"]
        for name, part in self._parts().items():
            part.load_state_dict(state["parts"][name])
        restore_random_states(state["random"])

    def _parts(self) -> dict[str, Stateful]:
        return {
            "limiter": self.limiter,
            "ledger": self.ledger,
            "log_clock": self.log_clock,
            "evaluation_clock": self.evaluation_clock,
            "checkpoint_clock": self.checkpoint_clock,
        }
