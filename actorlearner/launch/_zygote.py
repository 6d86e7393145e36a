"""What the fork server imports before it forks workers, and what a spawned worker imports first.

The order matters: a process that is not armed yet would outlive its parent. Never import this in
the learner.
"""

# ruff: noqa: E402 - the imports come last on purpose
from actorlearner.launch._child import die_with_parent, leave_signals_to_the_learner

leave_signals_to_the_learner()
die_with_parent()

import gymnasium
import torch

import actorlearner.worker

torch.set_num_threads(1)

__all__ = ["actorlearner", "gymnasium", "torch"]
