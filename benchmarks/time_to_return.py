"""Seconds from the start of a process to a return in CartPole-v1, ours beside SB3's DQN.

    python benchmarks/time_to_return.py --sb3 PYTHON --seeds 0,1,2,3,4 agent.n_step=3

Every run is a process of its own, from its imports on; ours and SB3's alternate. Both evaluate the
greedy policy over the same number of episodes every so many env steps, ours beside training. The
first evaluation that reaches the return ends the run. ``PYTHON`` is an interpreter with
stable-baselines3, whose settings are those of its zoo.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENV = "CartPole-v1"
REACHED = "reached "
ZOO: dict[str, Any] = {
    "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1_000,
    "gamma": 0.99, "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128,
    "exploration_fraction": 0.16, "exploration_final_eps": 0.04,
    "policy_kwargs": {"net_arch": [256, 256]},
}  # fmt: skip
"""Of DQN on CartPole-v1 in the RL Baselines3 Zoo, for 50,000 env steps."""
ZOO_STEPS = 50_000


def sb3(args: argparse.Namespace) -> None:
    """The child that runs Stable-Baselines3."""
    import gymnasium
    import torch
    from stable_baselines3 import DQN  # type: ignore[import-not-found]
    from stable_baselines3.common.callbacks import BaseCallback  # type: ignore[import-not-found]
    from stable_baselines3.common.evaluation import (  # type: ignore[import-not-found]
        evaluate_policy,
    )
    from stable_baselines3.common.monitor import Monitor  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    watched = Monitor(gymnasium.make(ENV))
    watched.reset(seed=args.seed + 1_000)

    class Evaluate(BaseCallback):  # type: ignore[misc]
        def _on_step(self) -> bool:
            if self.num_timesteps % args.every:
                return True
            mean, _ = evaluate_policy(self.model, watched, args.episodes)
            return not reached(args, self.num_timesteps, float(mean))

    model = DQN("MlpPolicy", gymnasium.make(ENV), seed=args.seed, device="cpu", **ZOO)
    model.learn(ZOO_STEPS, callback=Evaluate())


def ours(args: argparse.Namespace) -> None:
    """The child that runs this package."""
    from common import Parts

    from actorlearner.callbacks import Callback
    from actorlearner.trainer import Trainer

    class Evaluate(Callback):
        def after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
            if reached(args, trainer.env_steps, metrics["evaluation/return_mean"]):
                trainer.stop()

    given = (
        f"env.id={ENV}", f"seed={args.seed}", f"evaluation.episodes={args.episodes}",
        f"trainer.evaluate_every_env_steps={args.every}", "trainer.console=off", "run_dir=null",
        "device=cpu",
    )  # fmt: skip
    parts = Parts.of([*args.settings, *given])
    parts.trainer._callbacks.append(Evaluate())
    parts.trainer.fit(parts.factory, parts.store, parts.agent)


def reached(args: argparse.Namespace, env_steps: int, mean: float) -> bool:
    """Whether ``mean`` is high enough; tells the parent."""
    is_reached: bool = mean >= args.target
    sys.stdout.write(f"{REACHED if is_reached else ''}{env_steps} {mean}\n")
    sys.stdout.flush()
    return is_reached


def seconds_to(command: list[str]) -> tuple[float, int]:
    """Seconds from the start of ``command`` until it tells that it is there, and its env steps.

    Infinite, and the last env steps told, if it ends without.

    Raises:
        RuntimeError: it failed.
    """
    since, env_steps, seconds = time.perf_counter(), 0, math.inf
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            env_steps = int(line.removeprefix(REACHED).split()[0])
            if line.startswith(REACHED):
                seconds = time.perf_counter() - since
                break
        process.stdout.read()  # it ends by itself
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed; what it said stands above")
    return seconds, env_steps


def main() -> None:
    """Measure what the command line says, and tell."""
    from common import OtherWork, argument_parser, facts, positive_numbers, report, say, table

    parser = argument_parser(__doc__)
    parser.add_argument("--sb3", type=Path, metavar="PYTHON", help="None runs ours alone")
    parser.add_argument("--seeds", type=positive_numbers, default=[1, 2, 3, 4, 5])
    parser.add_argument("--target", type=float, default=475.0, help="return to reach")
    parser.add_argument("--episodes", type=int, default=20, help="of an evaluation")
    parser.add_argument("--every", type=int, default=2_000, help="env steps between evaluations")
    args = parser.parse_intermixed_args()
    machine = facts()
    runs = []
    for number, seed in enumerate(args.seeds):
        others, told = OtherWork(), {}
        interpreters = {"ours": sys.executable, "sb3": args.sb3}
        sides = [side for side in interpreters if interpreters[side] is not None]
        options = {"seed": seed, "settings": args.settings, "target": args.target,
                   "episodes": args.episodes, "every": args.every}  # fmt: skip
        for side in sides if number % 2 == 0 else sides[::-1]:
            child = [__file__, "--child", side, json.dumps(options)]
            told[side] = seconds_to([str(interpreters[side]), *child])
        row = {f"{side}_{what}": value for side in sides
               for what, value in zip(("s", "env_steps"), told[side], strict=True)}  # fmt: skip
        if len(sides) == 2:
            row["ratio"] = told["sb3"][0] / told["ours"][0]
        runs.append(
            {key: round(value, 3) for key, value in (row | {"others": others.cores()}).items()}
        )
    median = {key: statistics.median(row[key] for row in runs) for key in runs[0]}
    say(f"{ENV}: seconds to a return of {args.target:g}")
    rows = [[str(seed), *row.values()] for seed, row in zip(args.seeds, runs, strict=True)]
    table(["seed", *runs[0]], [*rows, ["median", *median.values()]])
    result = {"benchmark": "time_to_return", **median, "seeds": args.seeds, "runs": runs,
              "target": args.target, "settings": args.settings, **machine}  # fmt: skip
    report(result, args.out)


if __name__ == "__main__":
    if "--child" in sys.argv:  # where this package need not be installed
        {"sb3": sb3, "ours": ours}[sys.argv[-2]](argparse.Namespace(**json.loads(sys.argv[-1])))
    else:
        from common import run

        run(main)
