"""ONNX files of DQN: they act as the policy does, for every kind of observation and head."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorlearner import onnx_export
from actorlearner.agents.dqn import DQN
from actorlearner.contracts import ActorLearnerError, ArraySpec, BadInput, EnvSpec, NativeSpec
from actorlearner.inference import LoadedPolicy
from actorlearner.onnx_export import random_observation
from tests.tiny import Regressor, vector_spec

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

MIXED = EnvSpec(
    "Mixed",
    {
        "image": ArraySpec((10, 10, 2), "uint8", stack=2),
        "inner.kind": ArraySpec((), "int64", (5,)),
        "flags": ArraySpec((3,), "int8", (2, 2, 2)),
        "half": ArraySpec((2,), "float16"),
        "double": ArraySpec((), "float64"),
    },
    ArraySpec((2,), "int64", (3, 4)),
)


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (MIXED, {"head": "iqn", "noisy": True}),
        pytest.param(MIXED, {"torso": "mlp"}, marks=pytest.mark.slow),
        pytest.param(vector_spec(3, 4), {"head": "c51"}, marks=pytest.mark.slow),
        pytest.param(vector_spec(3, 4), {"head": "quantile"}, marks=pytest.mark.slow),
        pytest.param(MIXED, {"head": "c51", "noisy": True}, marks=pytest.mark.slow),
    ],
)
def test_a_file_acts_as_the_policy(spec: EnvSpec, settings: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    agent = DQN(hidden=(16,), **settings)
    agent.build(spec)
    before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    assert agent.export(tmp_path / "agent.onnx") == tmp_path / "agent.onnx"
    assert [path.name for path in tmp_path.iterdir()] == ["agent.onnx"], "one file is all"
    session = onnxruntime.InferenceSession(tmp_path / "agent.onnx")
    inputs = {item.name: (item.shape[1:], item.type) for item in session.get_inputs()}
    kinds = {"half": "float16", "double": "double", "image": "uint8", "flags": "int8"}
    for key, array in spec.observation.items():
        dtype = kinds.get(key, "int64" if array.categories else "float")
        assert inputs[key] == (list(array.stacked_shape), f"tensor({dtype})")
    policy = agent.policy_factory(["greedy_value"])(spec, (0,), 1, True)
    policy.load(agent.snapshot(0))
    for size in (1, 9):
        observation = random_observation(spec.observation, size, np.random.default_rng(size))
        values, action = session.run(["values", "action"], observation)
        wanted, noted = policy.act(observation, None)
        assert values.shape == (size, np.prod(spec.action.categories))
        assert action.dtype == wanted.dtype
        assert np.array_equal(action, wanted)
        assert values.max(1) == pytest.approx(noted["greedy_value"], abs=1e-5)
    assert np.ptp(values.max(1)) > 1e-3, "or it would prove nothing"
    for name, tensor in agent.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert agent.online.training


def test_a_difference_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = onnx_export._write

    def write_another(greedy: Any, example: Any, path: Path) -> None:
        write(greedy, example, path)
        greedy.network.bias.data = greedy.network.bias.data.flip(0) + 0.1

    monkeypatch.setattr(onnx_export, "_write", write_another)
    (tmp_path / "old.onnx").write_text("old")

    class Values(torch.nn.Linear):
        def forward(self, observation: Any) -> torch.Tensor:
            return super().forward(observation["observation"])

    with pytest.raises(ActorLearnerError, match=r"differs for \d+ of \d+ random observations"):
        onnx_export.export_action_values(Values(2, 2), vector_spec(), tmp_path / "old.onnx")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_what_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    agent = DQN(hidden=(4,))
    agent.build(vector_spec())
    with pytest.raises(BadInput, match=r'export: onnxscript .*pip install "actorlearner\[onnx\]"'):
        agent.export(tmp_path / "x.onnx")


def test_a_loaded_policy_exports_what_its_agent_can(tmp_path: Path) -> None:
    spec = replace(vector_spec(), native_observation={}, native_action=NativeSpec("int64"))
    agent = Exports()
    agent.build(spec)
    path = tmp_path / "agent.onnx"
    assert LoadedPolicy(agent, spec, 0).export(path) == path
    other = Regressor()
    other.build(spec)
    with pytest.raises(BadInput, match=r"Regressor has no export\(\)"):
        LoadedPolicy(other, spec, 0).export(path)


class Exports(Regressor):
    def export(self, path: Path) -> Path:
        return path
