"""The scripts of ``examples/`` do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from omegaconf import OmegaConf

from actorlearner.contracts import BadInput
from tests.command import SMALL, metrics

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("sweep", ROOT / "examples" / "optuna_sweep.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_sweep_goes_on_where_it_was(
    sweep: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*SMALL, "workers=0", "total_steps=150", "trainer.evaluate_every_env_steps=60"]
    for number in (1, 2):
        study = sweep.main([*settings, "--trials", "1", "--out-dir", "sweep"])
        assert [trial.number for trial in study.trials] == list(range(number))
    assert capsys.readouterr().out.startswith("best: trial 0, ")
    for trial in study.trials:
        run_dir = Path("sweep") / f"trial_{trial.number:04d}"
        agent = OmegaConf.load(run_dir / "config.yaml").agent
        assert {f"agent.{n}": agent[n] for n in ("learning_rate", "n_step")} == trial.params
        returns = [line["evaluation/return_mean"] for line in metrics(run_dir)
                   if "evaluation/return_mean" in line]  # fmt: skip
        assert list(trial.intermediate_values.values()) == returns
        assert trial.value == returns[-1]
        assert len(returns) >= 2


def test_a_trial_imports_and_trusts_what_it_is_told_to(sweep: ModuleType) -> None:
    """``BrokenDQN`` fails at its first update, which this run is too short for."""
    settings = [*SMALL, "workers=0", "total_steps=32", "trust=[tests]", "--trials", "1",
                "agent.target=tests.faulty:BrokenDQN"]  # fmt: skip
    assert sweep.main(settings).trials[0].value is not None
    with pytest.raises(BadInput, match="imports=nowhere: can't be imported"):
        sweep.main([*settings, "imports=[nowhere]"])


def test_a_trial_that_falls_behind_is_stopped(sweep: ModuleType) -> None:
    reports, stops = [], []
    trial = SimpleNamespace(
        report=lambda value, step: reports.append((value, step)),
        should_prune=lambda: reports[-1][0] < 0,
    )
    trainer = SimpleNamespace(stop=lambda: stops.append(len(reports)))
    pruning = sweep.Pruning(trial)
    for value in (5.0, -1.0, 7.0):
        pruning.after_evaluation(trainer, {"evaluation/return_mean": value})
    assert reports == [(5.0, 0), (-1.0, 1)]
    assert stops == [2]
    assert pruning.pruned
