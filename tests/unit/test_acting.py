"""Backends: they give torch's numbers, by the newest weights, and the faster one is chosen."""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorlearner import acting
from actorlearner.acting import ActingSettings, OnnxForward, choose, equip, onnx_acting
from actorlearner.agents.dqn import DQN, EpsilonGreedyPolicy
from actorlearner.contracts import (
    Acting,
    ArraySpec,
    BadInput,
    EnvSpec,
    NetworkPolicy,
    SettingError,
    Snapshot,
)
from actorlearner.networks import EagerForward, Encoder
from actorlearner.onnx_export import random_observation
from tests.environments import PlacesPolicy

MIXED = EnvSpec(
    "Mixed",
    {
        "image": ArraySpec((10, 10, 2), "uint8", stack=2),
        "kind": ArraySpec((), "int64", (5,)),
        "half": ArraySpec((2,), "float16"),
    },
    ArraySpec((), "int64", (3,)),
)
ONNX = ActingSettings(backend="onnx")
AUTO = ActingSettings(backend="auto")


def policy_of(
    seed: int = 0, hidden: tuple[int, ...] = (16,), **settings: Any
) -> tuple[EpsilonGreedyPolicy, Snapshot]:
    """A policy for `MIXED`, and a snapshot of other weights."""
    torch.manual_seed(seed)
    agent = DQN(hidden=hidden, **settings)
    agent.build(MIXED)
    return agent.policy_factory()(MIXED, (0, 1), 2, False), agent.snapshot(1)


def observation(size: int) -> dict[str, Any]:
    return random_observation(MIXED.observation, size, np.random.default_rng(size))


@pytest.fixture(scope="module")
def graph() -> Acting:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    return onnx_acting(policy_of()[0].network, MIXED, 3)


@pytest.mark.parametrize("size", [1, 5])
def test_onnxruntime_acts_by_the_newest_weights(graph: Acting, size: int) -> None:
    """Of convolutions, which are constants to it, and of all other layers."""
    policy, snapshot = policy_of(1)
    adopt = equip(policy, graph)
    assert isinstance(policy.forward, OnnxForward)
    for seed in (2, 3):
        twin, snapshot = policy_of(seed)
        for one in (policy, twin):
            one.load(snapshot)
        adopt()
        wanted = twin.forward(observation(size))
        np.testing.assert_allclose(policy.forward(observation(size)), wanted, atol=1e-5)
        action, _ = policy.act(observation(size), None)
        assert np.array_equal(action, twin.act(observation(size), None)[0])


def test_a_graph_holds_no_weights(graph: Acting) -> None:
    network = policy_of()[0].network
    convolutions = {name for name in network.state_dict() if "convolutions" in name}
    assert set(graph.constants) == convolutions
    for tensor in network.state_dict().values():
        assert tensor.numpy().tobytes() not in graph.graph
    policy, _ = policy_of(5)
    forward = OnnxForward(graph, policy.network)
    before = forward(observation(2))
    with torch.no_grad():
        for name, tensor in policy.network.state_dict().items():
            tensor.mul_(1.0 if name in convolutions else 0.0)
    assert not forward(observation(2)).any(), "all but convolutions share the network's memory"
    assert before.any()


def test_numbers_that_differ_are_refused(graph: Acting, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of weights that an exporter has made part of the graph."""
    network = copy.deepcopy(policy_of()[0].network)
    acting._compare(graph, network, observation(4))
    monkeypatch.setattr(OnnxForward, "adopt", lambda self: None)
    with pytest.raises(BadInput, match=r"^acting.backend=onnx: onnxruntime's numbers differ from"):
        acting._compare(graph, network, observation(4))


def test_bfloat16_is_of_convolutions_alone() -> None:
    policy, snapshot = policy_of(1)
    twin, _ = policy_of(1)
    adopt = equip(policy, Acting(precision="bfloat16"))
    for one in (policy, twin):
        one.load(snapshot)
    adopt()
    for name, tensor in policy.network.state_dict().items():
        assert tensor.dtype == (torch.bfloat16 if "convolutions" in name else torch.float32), name
    got, wanted = policy.forward(observation(7)), twin.forward(observation(7))
    assert got.dtype == np.float32
    assert not np.array_equal(got, wanted)
    np.testing.assert_allclose(got, wanted, atol=0.01 * float(np.abs(wanted).max()))


def test_an_encoder_without_images_has_nothing_to_lower() -> None:
    encoder = Encoder({"x": ArraySpec((3,), "float32")})
    assert encoder({"x": torch.ones(2, 3)}, torch.float32).dtype == torch.float32


class Others:
    """What it does not matter to choose from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self.seconds = {"onnx": 1.0, "eager": 2.0, "adopt": 0.0}
        monkeypatch.setattr(acting, "onnx_acting", self._make)
        monkeypatch.setattr(acting, "OnnxForward", self._forward)
        self._asked: Iterator[str] = iter(())
        monkeypatch.setattr(acting, "_seconds", lambda work: self.seconds[next(self._asked)])

    def _make(self, *_: Any) -> Acting:
        self.made += 1
        self._asked = iter(("adopt", "eager", "onnx"))
        return Acting(graph=b"graph")

    def _forward(self, *_: Any) -> Any:
        class Forward:
            def adopt(self) -> None: ...

        return Forward()


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    return Others(monkeypatch)


def chosen(
    cache: Path | None, num_columns: int = 2, unroll_length: int = 4, **settings: Any
) -> str:
    policy, _ = policy_of(**settings)
    told = choose(AUTO, policy, MIXED, num_columns, unroll_length, cache)
    return "onnx" if told.graph else "eager"


def test_auto_takes_the_faster_one(others: Others, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert chosen(None) == "onnx"
    assert caplog.messages == [
        "Acting by onnx; a policy's step of 2 envs: eager 2,000,000 us, onnx 1,000,000 us."
    ]
    others.seconds["adopt"] = 3.9  # in each unroll of 4 rows
    assert chosen(None) == "onnx"
    others.seconds["adopt"] = 4.1
    assert chosen(None) == "eager"


def test_the_choice_is_kept(
    others: Others, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "acting.json"
    assert chosen(cache) == "onnx"
    assert json.loads(cache.read_text())["backend"] == "onnx"
    others.seconds["onnx"] = 9.0
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert chosen(cache) == "onnx"
    assert caplog.messages == ["Acting by onnx, as was measured before (acting.json)."]
    assert chosen(cache, num_columns=3) == "eager", "that is another case"
    assert others.made == 3
    assert chosen(cache, num_columns=3) == "eager"
    assert others.made == 3, "no graph is needed"
    assert chosen(cache, num_columns=3, hidden=(8,)) == "eager", "so is another width"
    assert others.made == 4
    cache.write_text("{")
    assert chosen(cache) == "eager"


def test_without_onnxruntime(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    hint = r"^acting.backend=onnx: onnxruntime can't be imported .*actorlearner\[onnx\]"
    with pytest.raises(BadInput, match=hint):
        choose(ONNX, policy_of()[0], MIXED, 2, 4, None)
    with caplog.at_level(logging.INFO):
        assert chosen(None) == "eager"
    assert caplog.messages[0].startswith("Acting by eager: acting.backend=onnx: onnxruntime can't")


def test_what_only_torch_can_run() -> None:
    noisy, _ = policy_of(noisy=True)
    assert isinstance(noisy, NetworkPolicy)
    assert choose(AUTO, noisy, MIXED, 2, 4, None) == Acting()
    assert choose(ActingSettings(precision="bfloat16"), noisy, MIXED, 2, 4, None).precision == (
        "bfloat16"
    )
    with pytest.raises(BadInput, match=r"^acting.backend=onnx: EpsilonGreedyPolicy has noise"):
        choose(ONNX, noisy, MIXED, 2, 4, None)
    other = PlacesPolicy(MIXED, (0,), 1, False)
    assert choose(AUTO, other, MIXED, 2, 4, None) == Acting()
    for settings, told in (
        (ONNX, "backend=onnx"),
        (ActingSettings(precision="bfloat16"), "precision=bfloat16"),
    ):
        with pytest.raises(BadInput, match=f"^acting.{told}: PlacesPolicy is no single network"):
            choose(settings, other, MIXED, 2, 4, None)
    equip(other, Acting(precision="bfloat16"))()


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(SettingError, match=r"^acting.precision=bfloat16: onnxruntime computes in"):
        ActingSettings(backend="onnx", precision="bfloat16")


def test_eager_is_the_network_itself() -> None:
    policy, snapshot = policy_of()
    policy.load(snapshot)
    assert isinstance(policy.forward, EagerForward)
    arrays = observation(3)
    with torch.inference_mode():
        wanted = policy.network({k: torch.from_numpy(v) for k, v in arrays.items()}).numpy()
    assert np.array_equal(policy.forward(arrays), wanted)
