"""What every agent must do: `contracts.Agent`. A new agent adds a line to `AGENTS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from actorlearner import checkpoint
from actorlearner.agents.dqn import DQN
from actorlearner.agents.dreamer import Dreamer
from actorlearner.contracts import (
    Agent,
    ArraySpec,
    Batch,
    EnvSpec,
    Observation,
    RecurrentPolicy,
    ReportingAgent,
    SampleSpec,
    SequenceBatch,
    SequenceSpec,
    Snapshot,
)
from tests.tiny import Regressor

ENV_SPEC = EnvSpec(
    "Mixed",
    {
        "observation": ArraySpec((3,), "float32"),
        "kind": ArraySpec((), "int64", (4,)),
        "image": ArraySpec((5, 4), "uint8", stack=2),
    },
    ArraySpec((), "int64", (3,)),
)

AGENTS: dict[str, Callable[[], Agent]] = {
    "dqn": lambda: DQN(hidden=(32,), batch_size=16, learning_rate=0.01),
    "dqn_plain": lambda: DQN(
        hidden=(16, 16), batch_size=16, learning_rate=0.01, double=False, dueling=False, n_step=3
    ),
    "dqn_as_in_ape_x": lambda: DQN(
        hidden=(16,),
        batch_size=16,
        learning_rate=0.01,
        dueling_hidden=8,
        torso="mlp",
        target_tau=0.01,
        epsilon_base=0.4,
    ),
    "rainbow": lambda: DQN(
        hidden=(32,),
        batch_size=16,
        learning_rate=0.01,
        head="c51",
        value_range=(-3, 3),
        noisy=True,
        noisy_sigma=0.01,  # a network of more noise can't learn one batch by heart
        n_step=3,
    ),
    "dqn_quantile": lambda: DQN(
        hidden=(32,), batch_size=16, learning_rate=0.01, head="quantile", num_quantiles=8
    ),
    "dqn_iqn": lambda: DQN(hidden=(32,), batch_size=16, learning_rate=0.01, head="iqn"),
    "dreamer": lambda: Dreamer(
        units=16,
        deterministic=32,
        latents=4,
        classes=4,
        blocks=4,
        image_depth=4,
        batch_size=4,
        batch_length=3,
        imagination_length=2,
        learning_rate=0.01,
        warmup_updates=0,
    ),
}
DRAWING = ("rainbow", "dqn_iqn", "dreamer")
"""Those that draw noise, quantile levels or latents while they learn, from torch's generator."""
HEART = {"dreamer": (60, 0.1)}
"""Updates on one batch, and what is left of the loss then, where 0 can't be reached."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads wait for each other for minutes where another process wants the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=AGENTS)
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    def build(seed: int = 0) -> Any:
        torch.manual_seed(seed)
        agent = AGENTS[request.param]()
        agent.build(ENV_SPEC)
        agent.to("cpu", torch.float32)
        return agent

    return build


def batch_for(agent: Any, seed: int = 0) -> Batch | SequenceBatch:
    """Random transitions or sequences, as ``agent`` wants them."""
    spec: SampleSpec | SequenceSpec = agent.sample_spec
    g = torch.Generator().manual_seed(seed)
    is_sequence = isinstance(spec, SequenceSpec)
    leading = (spec.length + 1, spec.batch_size) if is_sequence else (spec.batch_size,)

    def observation() -> dict[str, torch.Tensor]:
        return {
            "observation": torch.randn(*leading, 3, generator=g),
            "kind": torch.randint(4, leading, generator=g),
            "image": torch.randint(256, (*leading, 2, 5, 4), generator=g, dtype=torch.uint8),
        }

    common: dict[str, Any] = {
        "observation": observation(),
        "action": torch.randint(3, leading, generator=g),
        "reward": torch.randn(leading, generator=g),
        "keys": np.arange(prod(leading)).reshape(leading),
    }
    if isinstance(spec, SampleSpec):
        return Batch(
            **common,
            next_observation=observation(),
            discount=torch.full(leading, spec.gamma),
            weight=torch.ones(leading),
        )
    never = torch.zeros(leading, dtype=torch.bool)
    latents = {k: torch.from_numpy(s.zeros(*leading)) for k, s in spec.latents.items()}
    return SequenceBatch(
        **common, terminated=never, truncated=never, valid=~never, first=never, extras=latents
    )


def seen(count: int) -> Observation:
    """What a policy gets for ``count`` streams."""
    ones = {
        key: np.ones((count, *s.stacked_shape), s.dtype) for key, s in ENV_SPEC.observation.items()
    }
    return ones | {"kind": np.arange(count)}


def begin(policy: Any, count: int) -> tuple[Any, dict[str, Any]]:
    """Actions and extras of the first observations of ``count`` episodes."""
    if isinstance(policy, RecurrentPolicy):
        policy.reset(np.ones(count, np.bool_))
    return policy.act(seen(count), np.random.default_rng(0))


def learn(agent: Any, optimizers: Any, batches: list[Any], first_update: int = 1) -> list[float]:
    """One update per batch, as the Trainer makes them; returns the loss of each."""
    losses = []
    for update, batch in enumerate(batches, first_update):
        carry, total = batch, 0.0
        for name, step in agent.training_steps().items():
            output = step(carry)
            optimizers[name].zero_grad()
            output.loss.backward()
            optimizers[name].step()
            total += output.loss.item()
            carry = output.carry or carry
        for name in agent.training_steps():
            agent.after_step(name, update)
        losses.append(total)
    return losses


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_contract_has_a_member_for_each_method(make: Callable[[], Any]) -> None:
    agent = make()
    members = [name for name in vars(Agent) if not name.startswith("_")]
    assert len(members) > 8
    assert all(hasattr(agent, name) for name in members)
    assert agent.configure_optimizers().keys() == agent.training_steps().keys()


def test_overfits_one_batch(make: Callable[[], Any], request: pytest.FixtureRequest) -> None:
    """E.1 item 12."""
    agent = make()
    updates, left = HEART.get(request.node.callspec.params["make"], (200, 0.02))
    losses = learn(agent, agent.configure_optimizers(), [batch_for(agent)] * updates)
    assert losses[0] > 0.05
    assert losses[-1] < left * losses[0]


def test_every_optimised_parameter_has_a_gradient(make: Callable[[], Any]) -> None:
    """E.1 item 12; after an update, because a last layer of zeros hands none back."""
    agent = make()
    optimizers = agent.configure_optimizers()
    learn(agent, optimizers, [batch_for(agent)] * 2)
    names = {id(p): name for name, p in agent.named_parameters()}
    for optimizer in optimizers.values():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            assert parameter.grad.norm() > 0, names[id(parameter)]


def test_metrics_are_single_numbers_and_a_loss_is_among_them(make: Callable[[], Any]) -> None:
    agent = make()
    carry: Any = batch_for(agent)
    keys = carry.keys
    for step in agent.training_steps().values():
        output = step(carry)
        carry = output.carry or carry
        assert "loss" in output.metrics
        for name, value in output.metrics.items():
            assert np.ndim(torch.as_tensor(value).detach().numpy()) == 0, name
        for value in output.feedback.values():
            assert value.shape[: keys.ndim] == keys.shape


def test_checkpoint_round_trip_is_bit_exact(make: Callable[[], Any], tmp_path: Path) -> None:
    first, second = make(seed=0), make(seed=1)
    optimizers = first.configure_optimizers()
    learn(first, optimizers, [batch_for(first, seed) for seed in range(5)])
    states = {
        "agent": dict(first.state_dict()),
        "optimizers": {name: o.state_dict() for name, o in optimizers.items()},
    }
    where = checkpoint.save(tmp_path, 5, states)
    loaded = checkpoint.load(where, ["agent", "optimizers"])
    assert not same(first.state_dict(), second.state_dict())
    second.load_state_dict(loaded["agent"])
    assert same(first.state_dict(), second.state_dict())

    others = second.configure_optimizers()
    for name, optimizer in others.items():
        optimizer.load_state_dict(loaded["optimizers"][name])
    more = [batch_for(first, seed) for seed in range(5, 10)]
    losses = []
    for agent, its_optimizers in ((first, optimizers), (second, others)):
        torch.manual_seed(9)  # which a checkpoint of a run holds
        losses.append(learn(agent, its_optimizers, more, 6))
    assert losses[0] == losses[1]
    assert same(first.state_dict(), second.state_dict())


def test_state_dict_shares_nothing_within_itself(make: Callable[[], Any]) -> None:
    """Two names of one memory would come back as two, and safetensors refuses them."""
    tensors = list(make().state_dict().values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_same_seed_same_weights(make: Callable[[], Any]) -> None:
    agents = [make(seed) for seed in (3, 3, 4)]
    for agent in agents:
        torch.manual_seed(5)
        learn(agent, agent.configure_optimizers(), [batch_for(agent, s) for s in range(10)])
    assert same(agents[0].state_dict(), agents[1].state_dict())
    assert not same(agents[0].state_dict(), agents[2].state_dict())


def test_learning_uses_no_global_generator(
    make: Callable[[], Any], request: pytest.FixtureRequest
) -> None:
    """But torch's, where learning is random; checkpoints hold that one."""
    agent = make()
    optimizers, batch = agent.configure_optimizers(), batch_for(agent)
    before = torch.get_rng_state(), np.random.get_state(legacy=True)[1]
    learn(agent, optimizers, [batch])
    draws = request.node.callspec.params["make"] in DRAWING
    assert torch.equal(before[0], torch.get_rng_state()) is not draws
    assert np.array_equal(before[1], np.random.get_state(legacy=True)[1])


def test_a_report_changes_nothing(make: Callable[[], Any]) -> None:
    """Where there is one; torch's generator, which checkpoints hold, is among what it leaves."""
    agent = make()
    if not isinstance(agent, ReportingAgent):
        return
    before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    generators = torch.get_rng_state(), np.random.get_state(legacy=True)[1]
    report = agent.report(batch_for(agent))
    assert report.metrics
    assert all(np.isfinite(value) for value in report.metrics.values())
    for film in report.films.values():
        assert (film.dtype, film.ndim, film.shape[3]) == (np.uint8, 4, 3)
    assert same(before, agent.state_dict())
    assert all(parameter.grad is None for parameter in agent.parameters())
    assert torch.equal(generators[0], torch.get_rng_state())
    assert np.array_equal(generators[1], np.random.get_state(legacy=True)[1])
    again = agent.report(batch_for(agent))
    assert report.metrics == again.metrics


def test_the_policy_travels_light_and_acts(make: Callable[[], Any]) -> None:
    agent = make()
    payload = cloudpickle.dumps(agent.policy_factory())
    assert len(payload) < 4_000  # a recipe, not the weights
    snapshot = agent.snapshot(7)
    assert isinstance(snapshot, Snapshot)
    assert snapshot.version == 7
    policy = cloudpickle.loads(payload)(ENV_SPEC, (4, 5), 8, False)
    policy.load(snapshot)
    action, extras = begin(policy, 2)
    assert action.shape == (2,)
    assert action.dtype == np.dtype(ENV_SPEC.action.dtype)
    assert all(0 <= a < 3 for a in action)
    assert {name: (array.shape, array.dtype.name) for name, array in extras.items()} == {
        name: ((2, *spec.shape), spec.dtype)
        for name, spec in agent.policy_factory().extras_spec.items()
    }


def test_the_policy_copies_the_snapshot(make: Callable[[], Any]) -> None:
    agent = make()
    snapshot = agent.snapshot(0)
    arrays = {name: array.copy() for name, array in snapshot.arrays.items()}
    policy = agent.policy_factory()(ENV_SPEC, (0,), 1, True)
    policy.load(Snapshot(0, arrays, snapshot.scalars))
    before, _ = begin(policy, 4)
    for array in arrays.values():
        array[...] = np.random.default_rng(1).normal(size=array.shape)
    assert np.array_equal(before, begin(policy, 4)[0])


def test_the_tests_own_agent_keeps_the_contract_too() -> None:
    """`tests.tiny.Regressor` stands for people's own; mypy checks the rest of the protocol."""
    agent: Agent = Regressor()
    assert agent.sample_spec.batch_size == 8
