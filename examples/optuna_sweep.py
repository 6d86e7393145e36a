"""Searches settings of any experiment with Optuna, and stops trials that fall behind.

    pip install "actorlearner[sweep]"
    python examples/optuna_sweep.py --trials 20 workers=2
    python examples/optuna_sweep.py experiment=minatar_dqn total_steps=200_000

Each trial is a run in ``--out-dir``, where Optuna's SQLite file lies beside them: the same command
goes on with the search, and started twice, both share it. The curves:
``python -m actorlearner.plot runs/optuna --by agent.learning_rate``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from omegaconf import OmegaConf

from actorlearner import Callback, Trainer
from actorlearner.config import make
from actorlearner.run import compose


class Pruning(Callback):
    """Reports evaluations to ``trial``, and stops the run if others did better by then."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial, self.evaluations, self.pruned = trial, 0, False

    def after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        if self.pruned:  # the evaluation at the end of the stopped run
            return
        # Counted, for the env steps of two trials are never quite the same.
        self.trial.report(metrics["evaluation/return_mean"], self.evaluations)
        self.evaluations += 1
        if self.trial.should_prune():
            self.pruned = True
            trainer.stop()


def objective(trial: optuna.Trial, settings: Sequence[str], out_dir: Path) -> float:
    """The return of one run with the settings of ``trial``."""
    learning_rate = trial.suggest_float("agent.learning_rate", 1e-4, 3e-3, log=True)
    n_step = trial.suggest_int("agent.n_step", 1, 5)
    own = [f"agent.learning_rate={learning_rate}", f"agent.n_step={n_step}"]
    run_dir = out_dir / f"trial_{trial.number:04d}"
    config = compose([*settings, *own, f"run_dir={run_dir}"])
    tree: Any = OmegaConf.to_container(config, resolve=True)
    pruning = Pruning(trial)
    trainer = Trainer.from_config(config, callbacks=[pruning])
    trust = trainer.settings.trust
    metrics = trainer.fit(
        make(tree["env"], "env", "factory", trust).factory(tuple(tree["imports"]), trust),
        make(tree["replay"], "replay", "sample", trust),
        make(tree["agent"], "agent", "training_steps", trust),
    )
    if pruning.pruned:
        raise optuna.TrialPruned
    return metrics["evaluation/return_mean"]


def main(arguments: Sequence[str] | None = None) -> optuna.Study:
    """Search, and tell the best."""
    parser = argparse.ArgumentParser(description="Search settings with Optuna.")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of every trial")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--out-dir", type=Path, default=Path("runs/optuna"))
    args = parser.parse_intermixed_args(arguments)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="actorlearner",
        storage=f"sqlite:///{args.out_dir / 'optuna.db'}",
        load_if_exists=True,
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1),
    )
    study.optimize(lambda trial: objective(trial, args.settings, args.out_dir), args.trials)
    print(f"best: trial {study.best_trial.number}, {study.best_value:.1f}, {study.best_params}")
    return study


if __name__ == "__main__":
    main()
