"""A script without a ``__main__`` guard, with an environment of its own, under both start methods.

`SCRIPT` is the README's own text.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import Command, metrics

README = Path(__file__).parent.parent / "README.md"
SCRIPT = README.read_text().partition("```python\n")[2].partition("```")[0]

REGISTERING = """\
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

from actorlearner import DQN, ReplayBuffer, Trainer


class ShortPole(CartPoleEnv):
    def __init__(self):
        super().__init__()
        self.length = 0.25


gymnasium.register("ShortPole-v0", ShortPole, max_episode_steps=50)
trainer = Trainer(total_steps=300, workers=2, run_dir="run", evaluation={"episodes": 2})
trainer.fit("ShortPole-v0", ReplayBuffer(warmup_env_steps=100), DQN())
print(trainer.env_steps)
"""


def run_script(text: str, start_method: str, directory: Path) -> Command:
    """Run ``text``, which must leave nothing behind, say nothing bad, and start once only."""
    launch = f'workers=2, launch={{"start_method": "{start_method}"}}'
    script = directory / "script.py"
    mark = 'with open("started", "a") as file:\n    file.write("x")\n'
    script.write_text(mark + text.replace("workers=2", launch))
    with Command([], directory, script) as command:
        command.wait()
        assert command.leaves_nothing()
    assert command.code == 0, command.err
    assert (directory / "started").read_text() == "x", "no child runs the script again"
    for word in ("Traceback", "Error", "error", "Warning"):
        assert word not in command.err
    return command


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_script_trains_evaluates_saves_and_loads(start_method: str, tmp_path: Path) -> None:
    command = run_script(SCRIPT, start_method, tmp_path)
    assert float(command.out.splitlines()[-1]) > 9, "by chance it would be 5"
    run_dir = tmp_path / "runs" / "coins"
    assert metrics(run_dir)[-1]["evaluation/return_mean"] > 9
    assert (run_dir / "checkpoints" / "latest").exists()


@pytest.mark.parametrize(
    "start_method", [pytest.param("forkserver", marks=pytest.mark.slow), "spawn"]
)
def test_a_script_registers_an_id_of_its_own(start_method: str, tmp_path: Path) -> None:
    command = run_script(REGISTERING, start_method, tmp_path)
    assert int(command.out) >= 300
    lengths = [line["train/length_mean"] for line in metrics(tmp_path / "run")[:-1]]
    assert all(length <= 50 for length in lengths)
