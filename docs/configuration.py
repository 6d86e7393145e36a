"""Writes docs/configuration.md: every setting, from the dataclasses that declare them.

python docs/configuration.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from actorlearner.acting import ActingSettings
from actorlearner.agents.dqn import DQNSettings
from actorlearner.agents.dreamer import DreamerSettings
from actorlearner.config import Settings, config_dir
from actorlearner.crafter import CrafterSettings
from actorlearner.dmc import DMCSettings
from actorlearner.envs import EnvSettings
from actorlearner.evaluate import EvaluationSettings
from actorlearner.faults import FaultSettings
from actorlearner.launch.local import LaunchSettings
from actorlearner.replay import ReplaySettings
from actorlearner.run import CommandSettings
from actorlearner.suites import AtariSettings, MinAtarSettings
from actorlearner.tracking import MlflowSettings, WandbSettings
from actorlearner.trainersettings import TrainerSettings

PAGE = Path(__file__).with_suffix(".md")

INTRODUCTION = """\
# Configuration

Every setting, with its default and what it means. This page is written by `docs/configuration.py`
from the code.

On the command line a setting reads `key=value`, and `group=choice` takes another file of
`configs/`:

```bash
python -m actorlearner.run agent=rainbow env.id=Acrobot-v1 workers=4 agent.learning_rate=1e-4
```

In Python it is an argument of what it belongs to: `Trainer(workers=4)`, `DQN(learning_rate=1e-4)`,
`ReplayBuffer(capacity=50_000)`; `acting`, `evaluation`, `launch` and `tracking` are mappings, as in
`Trainer(evaluation={"episodes": 5})`. What is `null` on the command line is `None` in Python.

An experiment (`experiment=minatar_dqn`; the files of `configs/experiment/`) sets several at once.
Without one named, the command runs `cartpole_dqn`, or with another agent that agent's
(`agent=dreamer`: `cartpole_dreamer`), whose values stand above the defaults told here.
`--cfg job` prints what a command line comes to, and `--help` every setting:

```bash
python -m actorlearner.run experiment=minatar_dqn workers=4 --cfg job
```

Values are converted where nothing is lost (`1e6` to an integer) and refused otherwise, with one
line that names the key, the value and what is allowed. A setting marked *live* can be changed while
a run goes on, in `RUN_DIR/control.json`: `{"agent.learning_rate": 1e-4}`.
"""

SECTIONS: tuple[tuple[str, str, type[Settings], str], ...] = (
    ("Training", "The Trainer. Keys without a dot stand at the root of the configuration.",
     TrainerSettings, "trainer/default"),
    ("Command line", "Besides `run_dir`, `workers` and the other root keys above.",
     CommandSettings, "config"),
    ("env=gym", "Any Gymnasium environment.", EnvSettings, "env/gym"),
    ("env=atari", "Needs the extra `atari`.", AtariSettings, "env/atari"),
    ("env=minatar", "Needs the extra `minatar`.", MinAtarSettings, "env/minatar"),
    ("env=dmc", "Needs the extra `dmc`.", DMCSettings, "env/dmc"),
    ("env=crafter", "Needs the extra `crafter`.", CrafterSettings, "env/crafter"),
    ("agent=dqn, agent=rainbow", "See [DQN](agents/dqn.md) and [Rainbow](agents/rainbow.md). "
     "`agent=rainbow` is the same agent with other values.", DQNSettings, "agent/dqn"),
    ("agent=dreamer", "Needs `replay=uniform`; see [Dreamer](agents/dreamer.md).",
     DreamerSettings, "agent/dreamer"),
    ("replay=prioritized, replay=uniform", "", ReplaySettings, "replay/prioritized"),
    ("acting", "How workers run their policies; see [Architecture](architecture.md#acting).",
     ActingSettings, "acting/default"),
    ("evaluation", "", EvaluationSettings, "evaluation/default"),
    ("launch=local", "Workers as processes; in Python `Trainer(launch={...})`.",
     LaunchSettings, "launch/local"),
    ("faults=none, faults=chaos", "Faults on purpose; see [Reliability](reliability.md).",
     FaultSettings, "faults/none"),
    ("tracking=wandb", "Weights & Biases; needs the extra `wandb`.",
     WandbSettings, "tracking/wandb"),
    ("tracking=mlflow", "MLflow; needs the extra `mlflow`.", MlflowSettings, "tracking/mlflow"),
)  # fmt: skip
"""Title, what it is about, the settings, and the file that the command line takes them from."""

LIMITS = {"low": "at least", "above": "more than", "high": "at most", "below": "less than"}


def docstrings(settings: type[Settings]) -> dict[str, str]:
    """What each field means, in one line of Markdown: the text below it, or under Attributes."""
    found: dict[str, str] = {}
    for kind in settings.__mro__[:-1]:
        listed = inspect.getdoc(kind) or ""
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE):
            found.setdefault(name, text)
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            name = getattr(getattr(field, "target", None), "id", None)
            if name and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found.setdefault(name, str(below.value.value))
    return {
        name: re.sub(r"\s+", " ", text).strip().replace("``", "`").replace("|", "\\|")
        for name, text in found.items()
    }


def shown(value: Any) -> str:
    """A default as people type it."""
    if isinstance(value, tuple):
        value = json.loads(json.dumps(value))
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"`{value:_}`"
    if isinstance(value, str) and value:
        return f"`{value}`"
    return f"`{json.dumps(value, default=str)}`"


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a field; `dataclasses.MISSING` if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def rows(settings: type[Settings], file: str) -> list[str]:
    """One line of a table for each field."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / f"{file}.yaml"))
    root: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / "config.yaml"), resolve=False)
    told, lines = docstrings(settings), []
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        default = default_of(field)
        if isinstance(default, Settings) or field.name in ("launch", "tracking"):
            continue  # a section of its own
        cell = shown(default)
        on_command_line = {**root, **tree}.get(field.name, default)
        if json.loads(json.dumps(on_command_line)) != json.loads(json.dumps(default, default=str)):
            cell += f"; command line {shown(on_command_line)}"
        limits = [
            f"{LIMITS[name]} {bound:g}"
            for name, bound in field.metadata.items()
            if name in LIMITS and bound != float("inf")
        ]
        live = " *Live.*" if field.metadata.get("live") else ""
        lines.append(
            f"| `{settings.key(field.name)}` | {cell} | {', '.join(limits)} "
            f"| {_capital(told[field.name])}{live} |"
        )
    return lines


def _capital(text: str) -> str:
    """``text`` with a capital, unless it begins with the name of a choice ("c51: ...")."""
    return text if re.match(r"\w+:", text) else text[0].upper() + text[1:]


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for title, about, settings, file in SECTIONS:
        head = "| key | default | bounds | meaning |\n|---|---|---|---|"
        text = f"{about}\n\n" if about else ""
        parts.append(f"## {title}\n\n{text}{head}\n" + "\n".join(rows(settings, file)) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
