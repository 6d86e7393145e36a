"""Every YAML file: the fields of its settings, values that they take, and a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from actorlearner.acting import ActingSettings
from actorlearner.agents.dqn import DQNSettings
from actorlearner.agents.dreamer import DreamerSettings
from actorlearner.config import Settings, config_dir, resolve
from actorlearner.crafter import CrafterSettings
from actorlearner.dmc import DMCSettings
from actorlearner.envs import EnvSettings
from actorlearner.evaluate import EvaluationSettings
from actorlearner.faults import FaultSettings
from actorlearner.launch.local import LaunchSettings
from actorlearner.replay import ReplaySettings
from actorlearner.run import CommandSettings, main
from actorlearner.suites import AtariSettings, MinAtarSettings
from actorlearner.tracking import MlflowSettings, WandbSettings
from actorlearner.trainersettings import TrainerSettings
from tests.command import metrics

CONFIGS = config_dir()

SETTINGS: dict[str, type[Settings]] = {
    "acting/default": ActingSettings,
    "agent/dqn": DQNSettings,
    "agent/dreamer": DreamerSettings,
    "agent/rainbow": DQNSettings,
    "env/atari": AtariSettings,
    "env/crafter": CrafterSettings,
    "env/dmc": DMCSettings,
    "env/gym": EnvSettings,
    "env/minatar": MinAtarSettings,
    "evaluation/default": EvaluationSettings,
    "faults/chaos": FaultSettings,
    "faults/none": FaultSettings,
    "launch/local": LaunchSettings,
    "replay/prioritized": ReplaySettings,
    "replay/uniform": ReplaySettings,
    "tracking/mlflow": MlflowSettings,
    "tracking/wandb": WandbSettings,
    "trainer/default": TrainerSettings,
}
"""The settings that each file of a group fills."""

UNLIKE_DEFAULTS: dict[str, dict[str, Any]] = {
    "agent/rainbow": {
        "learning_rate": 6.25e-5,
        "adam_epsilon": 1.5e-4,
        "batch_size": 32,
        "n_step": 3,
        "head": "c51",
        "noisy": True,
        "target_every_updates": 2_000,
        "epsilon": ((0.0, 0.0),),
    },
    "faults/chaos": {
        "kill_worker_every_s": 10,
        "stop_worker_every_s": 30,
        "raise_every_env_steps": 20_000,
        "hang_every_env_steps": 50_000,
        "slow_every_env_steps": 5_000,
        "slow_s": 0.2,
    },
    "replay/uniform": {"prioritized": False},
    "trainer/default": {"evaluate_every_env_steps": 10_000, "checkpoint_every_env_steps": 10_000},
}
"""Where a file says something else than the dataclass, on purpose."""

EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


def read(name: str) -> dict[str, Any]:
    tree = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    assert isinstance(tree, dict)
    return cast(dict[str, Any], tree)


def field_names(settings: type[Settings]) -> set[str]:
    names = {item.name for item in dataclasses.fields(cast(Any, settings))}
    return names - set(TrainerSettings.root) if settings is TrainerSettings else names


def values(settings: Settings) -> dict[str, Any]:
    names = field_names(type(settings))
    return {name: getattr(settings, name) for name in names}


def test_every_file_is_tested() -> None:
    files = {str(p.relative_to(CONFIGS).with_suffix("")) for p in CONFIGS.rglob("*.yaml")}
    experiments = {f"experiment/{name}" for name in EXPERIMENTS}
    assert files - experiments - {"config", "hydra/help/actorlearner"} == set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_file_has_exactly_the_fields_of_its_settings(name: str) -> None:
    tree = read(name)
    assert tree.keys() - {"target"} == field_names(SETTINGS[name])
    groups_with_target = {"agent", "env", "launch", "replay", "tracking"}
    assert ("target" in tree) == (name.partition("/")[0] in groups_with_target)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_file_has_the_values_of_its_settings(name: str) -> None:
    tree = {k: v for k, v in read(name).items() if k != "target"}
    expected = values(SETTINGS[name]()) | UNLIKE_DEFAULTS.get(name, {})
    assert values(SETTINGS[name].make(tree)) == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_fields_stand_in_the_order_of_the_settings(name: str) -> None:
    order = [item.name for item in dataclasses.fields(cast(Any, SETTINGS[name]))]
    names = [n for n in read(name) if n != "target"]
    assert names == [n for n in order if n in names]


def test_the_root_has_exactly_its_fields() -> None:
    tree = read("config")
    groups = {group for entry in tree["defaults"] if isinstance(entry, dict) for group in entry}
    assert {g for g in groups if " " not in g} == {n.partition("/")[0] for n in SETTINGS} | {
        "experiment"
    }
    expected = (set(TrainerSettings.root) | field_names(CommandSettings)) - groups
    assert tree.keys() - {"defaults", "hydra"} == expected


def test_the_root_has_the_values_of_its_settings() -> None:
    tree = read("config")
    both: Mapping[type[Settings], set[str]] = {
        TrainerSettings: set(TrainerSettings.root)
        - {"acting", "evaluation", "faults", "launch", "tracking"},
        CommandSettings: field_names(CommandSettings) - {"experiment"},
    }
    for settings, names in both.items():
        given = settings.make({name: tree[name] for name in names})
        assert {n: getattr(given, n) for n in names} == {n: getattr(settings(), n) for n in names}


@pytest.mark.parametrize("name", [name for name in SETTINGS if "target" in read(name)])
def test_a_target_resolves(name: str) -> None:
    assert isinstance(resolve(read(name)["target"]), type)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_named_as_its_file(name: str) -> None:
    assert read(f"experiment/{name}")["experiment"] == name
    text = (CONFIGS / "experiment" / f"{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes_and_runs(name: str, tmp_path: Path) -> None:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("config", [f"experiment={name}"])
    assert config.experiment == name
    warmup = "replay.warmup_env_steps=32"
    short = ["total_steps=64", "evaluation.episodes=1", "evaluation.step_limit=10", warmup]
    if config.agent.target.endswith(":Dreamer"):
        short.append("agent.size=1M")
    if config.env.target.endswith(":DMCSettings"):
        pytest.importorskip("dm_control")
    assert main([f"experiment={name}", "workers=0", *short, f"run_dir={tmp_path / 'run'}"]) == 0
    assert metrics(tmp_path / "run")[-1]["env_steps"] >= 64
