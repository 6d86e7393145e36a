"""Dreamer's steps by hand and against slow twins, and its policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor

from actorlearner.agents.dreamer import (
    Actions,
    Arrivals,
    Dreamer,
    DreamerSettings,
    Imagined,
    ReturnScale,
    latent_specs,
    packed,
    unpacked,
)
from actorlearner.agents.world_model import State
from actorlearner.contracts import (
    ArraySpec,
    BadInput,
    EnvSpec,
    RecurrentPolicy,
    RecurrentPolicyFactory,
    SequenceBatch,
    SettingError,
    UnsupportedSpace,
)
from actorlearner.distributions import TorchNoise, TwoHot
from actorlearner.inference import load_policy
from actorlearner.optim import LaProp
from actorlearner.replay import ReplayBuffer
from actorlearner.trainer import Trainer
from tests.test_trainer import Recorder, differences, everything, trainer_of
from tests.tiny import Guess

TINY: dict[str, Any] = {
    "units": 8, "deterministic": 16, "classes": 4, "latents": 4, "blocks": 4, "image_depth": 2,
    "batch_size": 3, "batch_length": 6, "imagination_length": 4, "warmup_updates": 0,
    "learning_rate": 1e-2,
}  # fmt: skip
VECTOR = {"observation": ArraySpec((3,), "float32")}
DISCRETE = ArraySpec((), "int64", (2,))
PARTS = ArraySpec((2,), "int64", (2, 3))
BOX = ArraySpec((2,), "float32", low=(-2.0, 0.0), high=(2.0, 1.0))
MIXED = {
    "vector": ArraySpec((3,), "float32"),
    "kind": ArraySpec((), "int64", (4,)),
    "planes": ArraySpec((10, 10, 2), "bool"),
    "pixels": ArraySpec((16, 16, 3), "uint8"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads wait for each other for minutes where another process wants the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(
    action: ArraySpec = DISCRETE,
    observation: Mapping[str, ArraySpec] = VECTOR,
    seed: int = 0,
    drawn: bool = True,
    **settings: Any,
) -> Dreamer:
    """A tiny one; ``drawn`` makes heads say something that begin with zero."""
    torch.manual_seed(seed)
    agent = Dreamer(**{**TINY, **settings})
    agent.build(EnvSpec("Tiny", dict(observation), action))
    if drawn:
        for head in (agent.world.reward, agent.critic, agent.slow_critic):
            torch.nn.init.normal_(head[-1].weight, std=0.1)
    return agent


def batch_for(agent: Dreamer, action: ArraySpec = DISCRETE, seed: int = 0) -> SequenceBatch:
    """Random rows, with an end in column 0 (row 2), a cut in column 1, a lost life in column 2."""
    g = np.random.default_rng(seed)
    s = agent.settings
    rows, columns = s.batch_length + 1, s.batch_size
    specs = agent.world.decoder._specs

    def draw(spec: ArraySpec, *leading: int) -> Tensor:
        shape = (*leading, *spec.stacked_shape)
        if spec.categories:
            highest = np.broadcast_to(np.reshape(spec.categories, spec.shape), shape)
            return torch.from_numpy(g.integers(0, highest))
        if spec.low:
            return torch.from_numpy(g.uniform(spec.low, spec.high, shape).astype(np.float32))
        if spec.dtype == "float32":
            return torch.from_numpy(g.normal(size=shape).astype(np.float32))
        high = {"bool": 2, "uint8": s.model_size.classes}.get(spec.dtype, 1)
        return torch.from_numpy(g.integers(0, high, shape).astype(spec.dtype))

    flags = {n: torch.zeros(rows, columns, dtype=torch.bool) for n in ("terminated", "truncated")}
    valid, first = torch.ones(rows, columns, dtype=torch.bool), flags["terminated"].clone()
    flags["terminated"][2, 0] = flags["truncated"][2, 1] = flags["terminated"][3, 2] = True
    valid[3, :2] = False
    first[4, :2] = True
    deterministic = g.uniform(-1, 1, (rows, columns, s.model_size.deterministic))
    noted = packed(State(torch.from_numpy(deterministic), torch.eye(4)))
    return SequenceBatch(
        observation={key: draw(spec, rows, columns) for key, spec in specs.items()},
        action=draw(action, rows, columns) * valid.reshape(rows, columns, *[1] * len(action.shape)),
        reward=torch.from_numpy(g.normal(size=(rows, columns)).astype(np.float32)) * valid,
        valid=valid,
        first=first,
        extras={
            "deterministic": noted["deterministic"],
            "stochastic": draw(latent_specs(s.model_size)["stochastic"], rows, columns),
        },
        keys=np.arange(rows * columns).reshape(rows, columns),
        **flags,
    )


def update(agent: Dreamer, optimizers: Any, batch: SequenceBatch, updates: int = 1) -> list[float]:
    """As the Trainer makes one."""
    carry: Any = batch
    losses = []
    for name, step in agent.training_steps().items():
        output = step(carry)
        optimizers[name].zero_grad()
        output.loss.backward()
        optimizers[name].step()
        losses.append(output.loss.item())
        carry = output.carry
    for name in agent.training_steps():
        agent.after_step(name, updates)
    return losses


def gradients(module: torch.nn.Module) -> list[bool]:
    return [p.grad is not None and bool(p.grad.any()) for p in module.parameters()]


# -------------------------------------------------------------------------------- settings


class TestSettings:
    def test_size_1m_has_640_867_parameters(self) -> None:
        """The public count for 24 observations and 6 continuous actions (A.1)."""
        agent = Dreamer(size="1M")
        bounds = {"low": (-1.0,) * 6, "high": (1.0,) * 6}
        action = ArraySpec((6,), "float32", **bounds)
        agent.build(EnvSpec("Walker", {"observation": ArraySpec((24,), "float32")}, action))
        assert sum(p.numel() for p in agent.parameters() if p.requires_grad) == 640_867

    def test_sizes_by_name(self) -> None:
        size = DreamerSettings(size="200M").model_size
        assert (size.units, size.deterministic, size.classes, size.latents) == (1024, 8192, 64, 32)
        size = DreamerSettings(size="12M", units=32).model_size
        assert (size.units, size.deterministic, size.classes, size.image_depth) == (
            32,
            2048,
            16,
            16,
        )

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"blocks": 3}, r"agent.blocks=3: must divide agent.deterministic, which is 512"),
            ({"blocks": 32}, r"agent.blocks=32: must divide 4 \* agent.image_depth, which is 16"),
            ({"deviations": (1.0, 0.1)}, r"agent.deviations=\[1.0, 0.1\]: the lower one"),
            ({"imagine_last": 65}, r"agent.imagine_last=65: must be at most agent.batch_length"),
            ({"size": "2M"}, "agent.size='2M': must be one of 1M, 12M"),
            ({"horizon": 1}, r"agent.horizon=1.0: must be greater than 1"),
        ],
    )
    def test_bad_ones_are_refused(self, settings: dict[str, Any], words: str) -> None:
        with pytest.raises(SettingError, match=words):
            Dreamer(**settings)

    def test_actions_without_bounds_are_refused(self) -> None:
        with pytest.raises(UnsupportedSpace, match="finite bounds; Tiny has"):
            make(ArraySpec((2,), "float32"))

    def test_unknown_extras_are_refused(self) -> None:
        assert set(make().policy_factory(["stochastic"]).extras_spec) == set(latent_specs_of())
        with pytest.raises(BadInput, match="action_value: a Dreamer policy notes only determ"):
            make().policy_factory(["action_value"])

    def test_live_ones_change(self) -> None:
        agent = make(warmup_updates=10)
        optimizers = agent.configure_optimizers()
        agent.change({"learning_rate": 0.5, "controller_learning_rate": 0.25})
        for name in optimizers:
            agent.after_step(name, 5)
        rates = {name: o.param_groups[0]["lr"] for name, o in optimizers.items()}
        assert rates == {"world": 0.25, "controller": 0.125}
        with pytest.raises(SettingError, match=r"agent\.horizon: can't change"):
            agent.change({"horizon": 100})


def latent_specs_of() -> dict[str, ArraySpec]:
    return latent_specs(DreamerSettings(**TINY).model_size)


def test_actions_as_vectors_and_back() -> None:
    settings = DreamerSettings(**TINY)
    cases: list[tuple[ArraySpec, Any, Any]] = [
        (DISCRETE, [0, 1], [[1, 0], [0, 1]]),
        (PARTS, [[1, 2], [0, 0]], [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]),
        (ArraySpec((2,), "int8", (2, 2)), [[1, 0]], [[0, 1, 1, 0]]),
        (BOX, [[-2, 0.5], [2, 1]], [[-1, 0], [1, 1]]),
    ]
    for spec, action, vector in cases:
        actions = Actions(EnvSpec("Tiny", VECTOR, spec), settings)
        given = torch.from_numpy(np.array(action, spec.dtype))
        assert actions.vector(given).tolist() == vector
        assert actions.size == len(vector[0])
        back = actions.native(np.array(vector, np.float32))
        assert back.dtype == spec.dtype
        assert back.tolist() == action
    outside = Actions(EnvSpec("Tiny", VECTOR, BOX), settings).native(np.float32([[-9, 9]]))
    assert outside.tolist() == [[-2, 1]]


def test_latents_are_packed_and_unpacked() -> None:
    state = State(torch.tensor([[0.5, -1.25], [1e-3, 0.3]]), torch.eye(3)[torch.tensor([[2], [0]])])
    latents = packed(state)
    assert latents["stochastic"].tolist() == [[2], [0]]
    back = unpacked(latents, 3, torch.float32)
    assert torch.equal(back.stochastic, state.stochastic)
    torch.testing.assert_close(back.deterministic, state.deterministic, rtol=2**-8, atol=0)
    assert torch.equal(back.deterministic[0], state.deterministic[0])


# ---------------------------------------------------------------------------- world model


def test_rows_become_arrivals() -> None:
    """A.5 items 6, 13 and 15: shifted by one; nothing at a start; a cut is no end."""
    agent = make()
    batch = batch_for(agent)
    arrived = Arrivals.of(batch, agent._actions)
    for t in range(1, 7):
        for b in range(3):
            starts = bool(batch.first[t, b])
            before = torch.eye(2)[batch.action[t - 1, b]]
            assert torch.equal(arrived.action[t - 1, b], before * (not starts))
            assert arrived.reward[t - 1, b] == (0 if starts else batch.reward[t - 1, b])
            assert arrived.terminal[t - 1, b] == (not starts and batch.terminated[t - 1, b])
            assert arrived.first[t - 1, b] == starts
            assert arrived.last[t - 1, b] == (not batch.valid[t, b])
    assert arrived.terminal.nonzero().tolist() == [[2, 0], [3, 2]]  # column 1 was truncated
    assert arrived.last.nonzero().tolist() == [[2, 0], [2, 1]]  # a lost life is no last row


def two_hot_loss(logits: Tensor, target: Tensor) -> Tensor:
    return TwoHot().loss(logits, target)  # has a slow twin in test_distributions


def test_the_world_loss_is_the_weighted_sum_of_means() -> None:
    """Each term from its definition, over rows 1 to L."""
    agent = make(free_nats=0.0, dynamics_scale=0.5, representation_scale=0.2)
    batch = batch_for(agent)
    world, s = agent.world, agent.settings
    torch.manual_seed(3)
    output = agent.world_training_step(batch)
    torch.manual_seed(3)
    arrived = Arrivals.of(batch, agent._actions)
    start = unpacked({k: v[0] for k, v in batch.extras.items()}, 4, torch.float32)
    seen = {"observation": batch.observation["observation"][1:]}
    states, posterior = world.unroll(
        start, arrived.action, seen, arrived.first, TorchNoise(torch.device("cpu"))
    )
    f = states.features
    decoded = world.decoder.vector(f)
    symlog = seen["observation"].sign() * seen["observation"].abs().log1p()
    reconstruction = (decoded - symlog).square().sum(-1).mean()
    reward = two_hot_loss(world.reward(f), arrived.reward).mean()
    p = world.continuation(f).squeeze(-1).sigmoid()
    y = torch.where(arrived.terminal, 0.0, 1 - 1 / 333)
    goes_on = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
    prior = world.predict(states)
    kl = (posterior.probs * (posterior.probs / prior.probs).log()).sum((-1, -2)).mean()
    m = output.metrics
    for name, expected in {
        "observation": reconstruction, "reward": reward, "continue": goes_on,
        "dynamics": 0.5 * kl, "representation": 0.2 * kl,
    }.items():  # fmt: skip
        torch.testing.assert_close(m[f"{name}_loss"], expected.detach(), rtol=1e-4, atol=1e-6)
    carry = output.carry
    critic = agent._critic_loss(agent.critic(carry.replayed.features), carry.replayed).detach()
    torch.testing.assert_close(m["replay_value_loss"], s.replay_value_scale * critic)
    total = sum(float(value) for name, value in m.items() if name.endswith("_loss"))
    assert output.loss.item() == pytest.approx(total, rel=1e-5)


def test_feedback_is_the_fresh_latents() -> None:
    agent = make()
    batch = batch_for(agent)
    feedback = agent.world_training_step(batch).feedback
    for name, spec in latent_specs_of().items():
        assert feedback[name].shape == (7, 3, *spec.shape)
        assert feedback[name].numpy().dtype == spec.dtype
        assert torch.equal(feedback[name][0], batch.extras[name][0])
        assert not torch.equal(feedback[name][1:], batch.extras[name][1:])


def test_only_the_context_latents_matter() -> None:
    agent, losses = make(), []
    for changed in (None, 3, 0):
        batch = batch_for(agent)
        if changed is not None:
            batch.extras["deterministic"][changed] = 0
        torch.manual_seed(0)
        losses.append(agent.world_training_step(batch).loss.item())
    assert losses[0] == losses[1] != losses[2]


def test_the_gradient_of_replayed_values_reaches_the_world_alone() -> None:
    """E.1 item 8: the critic's parameters are constants in the world's step."""
    batch = batch_for(make())
    found = []
    for scale in (0.3, 0.0):
        agent = make(replay_value_scale=scale)
        torch.manual_seed(0)
        agent.world_training_step(batch).loss.backward()
        assert not any(gradients(agent.critic) + gradients(agent.actor))
        found.append(agent.world.representation.core.hidden.weight.grad.clone())
    assert not torch.allclose(*found)


# ----------------------------------------------------------------------------- controller


def imagined(agent: Dreamer, seed: int = 0, **kwargs: Any) -> Imagined:
    torch.manual_seed(seed)
    carry: Imagined = agent.world_training_step(batch_for(agent, **kwargs)).carry
    return carry


def test_returns_and_weights_of_imagination_by_hand() -> None:
    """A.5 items 2 and 8: decoded rewards; continuations in returns and weights, the root's too."""
    agent = make()
    carry = imagined(agent)
    assert carry.dreamt.features.shape == (4, 18, 32)
    dist, heads = agent.two_hot, agent.world
    # The last imagined state is not handed on: imagine once more for it.
    seen: list[Tensor] = []
    original = heads.imagine
    heads.imagine = lambda *a: (seen.append(original(*a)), seen[-1])[1]  # type: ignore[method-assign]
    carry = imagined(agent)
    ((features, actions),) = seen
    assert torch.equal(carry.dreamt.features, features[:-1])
    assert torch.equal(carry.action, actions)
    with torch.no_grad():
        reward = dist.mean(heads.reward(features))
        value = dist.mean(agent.critic(features))
        goes_on = heads.continuation(features)[..., 0].sigmoid()
        slow = dist.mean(agent.slow_critic(features))
    lam = 0.95
    for n in range(0, 18, 5):
        following = value[4, n].item()
        for t in reversed(range(4)):
            mixed = (1 - lam) * value[t + 1, n].item() + lam * following
            following = reward[t + 1, n].item() + goes_on[t + 1, n].item() * mixed
            assert carry.dreamt.target[t, n].item() == pytest.approx(following, rel=1e-4)
            weight = math.prod(goes_on[: t + 1, n].tolist())
            assert carry.dreamt.weight[t, n].item() == pytest.approx(weight, rel=1e-4)
    torch.testing.assert_close(carry.value, value[:-1])
    torch.testing.assert_close(carry.dreamt.slow, slow[:-1])


def test_imagining_from_an_end_counts_for_nothing() -> None:
    agent = make()
    bias = agent.world.continuation[-1].bias
    torch.nn.init.constant_(bias, -30.0)
    assert imagined(agent).dreamt.weight.max() < 1e-6


@pytest.mark.parametrize("last", [None, 4])
def test_replayed_returns_by_hand(last: int | None) -> None:
    """Along real rewards, bootstrapped by imagined returns; nothing is said of an end."""
    agent = make(imagine_last=last)
    batch = batch_for(agent)
    carry = imagined(agent)
    count, lam, gamma = last or 6, 0.95, 1 - 1 / 333
    arrived = Arrivals.of(batch, agent._actions)
    boot = carry.dreamt.target[0].reshape(count, 3)
    assert carry.replayed.target.shape == (count - 1, 3)
    offset = 6 - count
    for b in range(3):
        following = boot[-1, b].item()
        for k in reversed(range(count - 1)):
            row = offset + k + 1  # arrived at
            goes_on = gamma * (not arrived.terminal[row, b])
            kept = lam * (not arrived.last[row, b])
            mixed = (1 - kept) * boot[k + 1, b].item() + kept * following
            following = arrived.reward[row, b].item() + goes_on * mixed
            assert carry.replayed.target[k, b].item() == pytest.approx(following, rel=1e-4)
            expected = not arrived.last[offset + k, b]
            assert carry.replayed.weight[k, b].item() == expected


def test_huge_rewards_in_long_sequences_stay_finite() -> None:
    """Symlog, unimix and two-hot bins take them as they are (case 89 of users' reports)."""
    agent = make(batch_length=128)
    agent.configure_optimizers()
    batch = batch_for(agent)
    batch.reward.mul_(1e4)
    output = agent.world_training_step(batch)
    for step in (output, agent.controller_training_step(output.carry)):
        step.loss.backward()
        assert torch.isfinite(step.loss)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in agent.parameters())


def test_starts_are_the_last_rows() -> None:
    agent = make(imagine_last=2)
    every, few = imagined(make()), imagined(agent)
    assert few.dreamt.features.shape[1] == 2 * 3
    assert torch.equal(few.dreamt.features[0], every.dreamt.features[0][-6:])


@pytest.mark.parametrize("action", [DISCRETE, PARTS, BOX], ids=["discrete", "parts", "box"])
def test_the_controller_loss_by_hand(action: ArraySpec) -> None:
    """REINFORCE with the normalised advantage; means over the horizon (A.5 item 12)."""
    agent = make(action, entropy_scale=0.1)
    torch.nn.init.normal_(agent.actor[-1].weight)
    carry = imagined(agent, action=action)
    # Spread the returns, so that the scale matters.
    carry = replace(carry, dreamt=replace(carry.dreamt, target=carry.dreamt.target * 1e4))
    output = agent.controller_training_step(carry)
    d = carry.dreamt
    low, high = np.percentile(d.target.numpy(), [5, 95])
    scale = max(1.0, 0.01 * (high - low))
    assert scale > 1
    assert output.metrics["return_scale"].item() == pytest.approx(scale, rel=1e-4)
    outputs = agent.actor(d.features)
    if action.categories:
        log_prob, entropy = torch.zeros(4, 18), torch.zeros(4, 18)
        for logits, chosen in zip(
            outputs.split(list(action.categories), -1),
            carry.action.split(list(action.categories), -1),
            strict=True,
        ):
            probs = 0.99 * logits.softmax(-1) + 0.01 / logits.shape[-1]
            log_prob = log_prob + (chosen * probs.log()).sum(-1)
            entropy = entropy - (probs * probs.log()).sum(-1)
    else:
        mean, deviation = outputs[..., :2].tanh(), 0.9 * (outputs[..., 2:] + 2).sigmoid() + 0.1
        twin = torch.distributions.Normal(mean, deviation)
        log_prob, entropy = twin.log_prob(carry.action).sum(-1), twin.entropy().sum(-1)
    gain = log_prob * (d.target - carry.value) / scale + 0.1 * entropy
    actor_loss = -(d.weight * gain).sum() / (4 * 18)
    assert output.metrics["actor_loss"].item() == pytest.approx(actor_loss.item(), rel=1e-4)

    def critic(v: Any) -> float:
        logits, total = agent.critic(v.features), 0.0
        for t, n in np.ndindex(*v.target.shape):
            one = two_hot_loss(logits[t, n], v.target[t, n])
            other = two_hot_loss(logits[t, n], v.slow[t, n])
            total += (v.weight[t, n] * (one + other)).item()
        return total / v.target.numel()

    expected = actor_loss.item() + critic(d) + 0.3 * critic(carry.replayed)
    assert output.loss.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("action", [DISCRETE, BOX], ids=["discrete", "box"])
def test_the_actor_follows_the_advantage(action: ArraySpec) -> None:
    """A.5 item 9: what was better than expected becomes more probable, by more than entropy."""
    agent = make(action, entropy_scale=0.0)
    carry = imagined(agent, action=action)
    good = torch.zeros(4, 18).index_fill(1, torch.tensor([0]), 10.0)
    carry = replace(carry, dreamt=replace(carry.dreamt, target=carry.value + good))

    def log_prob() -> Tensor:
        return agent._actions.distribution(agent.actor(carry.dreamt.features)).log_prob(
            carry.action
        )

    before = log_prob().detach()
    agent.controller_training_step(carry).loss.backward()
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter.add_(parameter.grad, alpha=-0.1)
    assert (log_prob() - before)[:, 0].sum() > 0


def test_the_controller_step_leaves_the_world_alone() -> None:
    """E.1 item 8: no gradient of the policy loss in the world model."""
    agent = make()
    carry = imagined(agent)
    agent.zero_grad()
    agent.controller_training_step(carry).loss.backward()
    assert not any(gradients(agent.world) + gradients(agent.slow_critic))
    assert all(gradients(agent.actor) + gradients(agent.critic))


def test_the_return_scale_against_numpy() -> None:
    """A moving average of two percentiles, from 0; at least 1."""
    scale = ReturnScale(DreamerSettings(return_scale_rate=0.25))
    low = high = 0.0
    generator = np.random.default_rng(0)
    for size in (0.1, 50.0, 20.0, 3.0):
        returns = generator.normal(size=(7, 11)) * size
        fifth, last = np.percentile(returns, [5, 95])
        low, high = 0.75 * low + 0.25 * fifth, 0.75 * high + 0.25 * last
        found = scale(torch.from_numpy(returns)).item()
        assert found == pytest.approx(max(1.0, high - low), rel=1e-5)
    assert set(scale.state_dict()) == {"low", "high"}


# ------------------------------------------------------------------------------- both steps


@pytest.mark.parametrize("still", ["world", "controller"])
def test_each_optimiser_moves_its_own(still: str) -> None:
    """I13: at learning rate 0 of one, only the other's parameters move."""
    rates = {"world": 1e-2, "controller": 1e-2, still: 0.0}
    both = {"learning_rate": rates["world"], "controller_learning_rate": rates["controller"]}
    agent = make(drawn=False, **both)
    optimizers = agent.configure_optimizers()
    assert all(isinstance(optimizer, LaProp) for optimizer in optimizers.values())
    before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    for i in range(3):
        update(agent, optimizers, batch_for(agent, seed=i), i + 1)
    moved = {name.partition(".")[0] for name, p in agent.named_parameters()
             if not torch.equal(p, before[name])}  # fmt: skip
    assert moved == ({"world"} if still == "controller" else {"actor", "critic", "slow_critic"})


def test_every_parameter_has_its_optimiser_and_a_gradient() -> None:
    agent = make(PARTS, MIXED)
    optimizers = agent.configure_optimizers()
    update(agent, optimizers, batch_for(agent, PARTS))
    names = {id(p): name for name, p in agent.named_parameters() if p.requires_grad}
    held = [p for o in optimizers.values() for group in o.param_groups for p in group["params"]]
    assert {id(p) for p in held} == set(names)
    for parameter in held:
        assert parameter.grad.any(), names[id(parameter)]


def test_the_slow_critic_follows() -> None:
    agent = make(slow_critic_rate=0.25)
    slow = [p.clone() for p in agent.slow_critic.parameters()]
    agent.after_step("world", 1)
    assert all(torch.equal(a, b) for a, b in zip(agent.slow_critic.parameters(), slow, strict=True))
    agent.after_step("controller", 1)
    parameters = zip(agent.slow_critic.parameters(), slow, agent.critic.parameters(), strict=True)
    for now, before, fast in parameters:
        torch.testing.assert_close(now, 0.75 * before + 0.25 * fast)
    assert any(name.startswith("slow_critic.") for name in agent.state_dict())


def test_a_fresh_one_expects_nothing() -> None:
    """Zero heads: rewards, values and returns are exactly 0; the actor is nearly uniform."""
    agent = make(drawn=False)
    carry = imagined(agent)
    assert not carry.value.any()
    assert not carry.dreamt.target.any()
    probs = agent._actions.distribution(agent.actor(carry.dreamt.features))._parts[0].probs
    torch.testing.assert_close(probs, torch.full_like(probs, 0.5), atol=0.02, rtol=0)


def test_bfloat16_is_near_float32() -> None:
    batch = batch_for(make())
    losses = []
    for precision in ("float32", "bfloat16"):
        agent = make(precision=precision)
        torch.manual_seed(0)
        output = agent.world_training_step(batch)
        assert output.loss.dtype == torch.float32
        agent.controller_training_step(output.carry).loss.backward()
        losses.append(output.loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[1] != losses[0]


def test_metrics_are_single_numbers_without_a_graph() -> None:
    agent = make()
    carry: Any = batch_for(agent)
    for step in agent.training_steps().values():
        output = step(carry)
        carry = output.carry
        for name, value in output.metrics.items():
            assert value.shape == (), name
            assert not value.requires_grad, name


# --------------------------------------------------------------------------------- the policy


def policy_of(agent: Dreamer, greedy: bool = False) -> Any:
    recipe = agent.policy_factory()
    payload = cloudpickle.dumps(recipe)
    assert len(payload) < 4_000
    spec = EnvSpec("Tiny", agent.world.decoder._specs, agent._actions._spec)
    policy = cloudpickle.loads(payload)(spec, (0, 1), 2, greedy)
    assert isinstance(recipe, RecurrentPolicyFactory)
    assert isinstance(policy, RecurrentPolicy)
    policy.load(agent.snapshot(0))
    return policy


def seen(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    g = np.random.default_rng(seed)
    return {"observation": g.normal(size=(count, 3)).astype(np.float32)}


@pytest.mark.parametrize("action", [DISCRETE, PARTS, BOX], ids=["discrete", "parts", "box"])
def test_acts_and_notes_latents(action: ArraySpec) -> None:
    agent = make(action)
    policy = policy_of(agent)
    policy.reset(np.ones(5, np.bool_))
    taken, noted = policy.act(seen(5), np.random.default_rng(0))
    assert taken.shape == (5, *action.shape)
    assert taken.dtype == action.dtype
    specs = agent.policy_factory().extras_spec
    assert {k: (v.shape[1:], v.dtype.name) for k, v in noted.items()} == {
        k: (s.shape, s.dtype) for k, s in specs.items()
    }
    assert all(len(array) == 5 for array in noted.values())


def test_acting_and_learning_see_the_same_states() -> None:
    """A.5 items 10 and 14, X10: what acting noted is what the world model finds."""
    agent = make(PARTS, MIXED, uniform_share=0.0)
    batch = batch_for(agent, PARTS)
    # So sure that chance has no say.
    torch.nn.init.normal_(agent.world.representation.posterior[-1].weight, std=300)
    policy = policy_of(agent)
    policy.set_state({
        "deterministic": np.zeros((3, 16), np.float32),
        "stochastic": np.zeros((3, 4, 4), np.float32),
        "action": np.zeros((3, 5), np.float32),
    })  # fmt: skip
    noted = []
    for t in range(7):
        policy.reset(batch.first[t].numpy())
        observation = {k: v[t].numpy() for k, v in batch.observation.items()}
        taken, extras = policy.act(observation, np.random.default_rng(t))
        noted.append({k: torch.from_numpy(v.copy()) for k, v in extras.items()})
        batch.action[t] = torch.from_numpy(taken)
    batch.extras = {k: torch.stack([row[k] for row in noted]) for k in noted[0]}
    feedback = agent.world_training_step(batch).feedback
    assert torch.equal(feedback["stochastic"], batch.extras["stochastic"])
    found, kept = (unpacked(x, 4, torch.float32).deterministic for x in (feedback, batch.extras))
    torch.testing.assert_close(found, kept, rtol=0.02, atol=0.02)
    assert kept.abs().max() > 0.1


def test_a_reset_forgets_a_column() -> None:
    """X10, A.5 item 6: state and previous action, there alone."""
    policy, fresh = policy_of(make(), greedy=True), policy_of(make(), greedy=True)
    policy.reset(np.ones(2, np.bool_))
    for i in range(3):
        policy.act(seen(2, i), None)
    state = {k: v.copy() for k, v in policy.state().items()}
    assert all(array.any(axis=tuple(range(1, array.ndim))).all() for array in state.values())
    policy.reset(np.array([True, False]))
    for name, array in policy.state().items():
        assert not array[0].any()
        assert np.array_equal(array[1], state[name][1])
    fresh.reset(np.ones(1, np.bool_))
    _, expected = fresh.act({k: v[:1] for k, v in seen(2, 9).items()}, None)
    _, found = policy.act(seen(2, 9), None)
    for name in expected:
        assert np.array_equal(found[name][:1], expected[name])


def test_goes_on_from_a_saved_state() -> None:
    agent = make(BOX)
    first, second = policy_of(agent), policy_of(agent)
    generators = [np.random.default_rng(0), np.random.default_rng(0)]
    first.reset(np.ones(2, np.bool_))
    first.act(seen(2), generators[0])
    state = first.state()
    specs = agent.policy_factory().state_spec
    assert {k: (v.shape[1:], v.dtype.name) for k, v in state.items()} == {
        k: (s.shape, s.dtype) for k, s in specs.items()
    }
    second.set_state(state)
    generators[1].bit_generator.state = generators[0].bit_generator.state
    for i in range(3):
        one, _ = first.act(seen(2, i), generators[0])
        other, _ = second.act(seen(2, i), generators[1])
        assert np.array_equal(one, other)


def test_a_greedy_one_takes_the_most_probable() -> None:
    agent = make()
    torch.nn.init.normal_(agent.actor[-1].weight, std=3)
    policy = policy_of(agent, greedy=True)
    policy.reset(np.ones(4, np.bool_))
    taken, _ = policy.act(seen(4), np.random.default_rng(0))
    outputs = agent.actor(policy._state.features)
    assert taken.tolist() == outputs.argmax(1).tolist()
    again = policy_of(agent, greedy=True)  # without a generator nothing is left to chance
    for _ in range(2):
        again.reset(np.ones(4, np.bool_))
        again.act(seen(4), None)
        probs = again._representation.latents(
            again._representation.posterior(
                torch.cat(
                    [again._state.deterministic, again._representation.encoder(
                        {"observation": torch.from_numpy(seen(4)["observation"])}
                    )], 1,
                )
            )
        ).probs  # fmt: skip
        assert torch.equal(again._state.stochastic.argmax(-1), probs.argmax(-1))


def test_acting_uses_no_global_generator() -> None:
    policy = policy_of(make(BOX))
    before = torch.get_rng_state(), np.random.get_state(legacy=True)[1]
    policy.act(seen(2), np.random.default_rng(0))
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state(legacy=True)[1])


def test_the_snapshot_holds_what_acting_needs() -> None:
    agent = make()
    arrays = agent.snapshot(7).arrays
    assert {name.partition(".")[0] for name in arrays} == {"representation", "actor"}
    assert all(array.dtype == np.float32 for array in arrays.values())
    policy = policy_of(agent)
    kept = {name: p.clone() for name, p in policy._parameters.items()}
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(1)
    assert all(torch.equal(kept[name], p) for name, p in policy._parameters.items())  # a copy
    policy.load(agent.snapshot(8))
    assert all(torch.equal(kept[name] + 1, p) for name, p in policy._parameters.items())


# -------------------------------------------------------------------------------- open loop


def test_the_report_is_the_loss_of_what_was_not_seen() -> None:
    """Rows of context do not count; latents, actions and resets are those of learning."""
    agent = make(PARTS, MIXED)
    batch = batch_for(agent, PARTS)
    batch.observation["vector"][1:4] = 0  # the context is easier than the rest
    report = agent.report(batch)
    arrived, world = Arrivals.of(batch, agent._actions), agent.world
    seen = {key: array[1:] for key, array in batch.observation.items()}
    start = unpacked({k: v[0] for k, v in batch.extras.items()}, 4, torch.float32)
    noise = TorchNoise(torch.device("cpu"), torch.Generator().manual_seed(0))
    states = world.predict_open_loop(start, arrived.action, seen, arrived.first, 3, noise)
    total = 0.0
    for t in range(3, 6):
        row = State(*(part[t] for part in states))
        losses = world.decoder.losses(row, {key: array[t] for key, array in seen.items()})
        total += sum(loss.sum().item() for loss in losses.values())
    assert report.metrics == {"world/open_loop_error": pytest.approx(total / 9, rel=1e-5)}
    assert {name: film.shape for name, film in report.films.items()} == {
        "world/open_loop_vector": (1, 3 * (1 + 3 * 2), 3 * 7, 3),
        "world/open_loop_kind": (1, 3 * (1 + 4), 3 * 7, 3),
        "world/open_loop_planes": (6, 3 * 11, 3 * 11, 3),
        "world/open_loop_pixels": (6, 3 * 17, 3 * 17, 3),
    }
    pixels = batch.observation["pixels"][1:, 1]
    film = report.films["world/open_loop_pixels"]
    assert np.array_equal(film[:, 1:17, 17:33], pixels.numpy())
    few = make(PARTS, MIXED, open_loop_films=1)
    assert few.report(batch).films["world/open_loop_pixels"].shape == (6, 51, 17, 3)
    none = make(PARTS, MIXED, open_loop_films=0).report(batch)
    assert none.metrics == report.metrics
    assert not none.films


def test_to_report_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run in lockstep, bit for bit: generators and queue included."""

    def fit(run_dir: Path | None = None, **changes: Any) -> tuple[dict[str, Any], Recorder]:
        store = ReplayBuffer(capacity=256, warmup_env_steps=16, prioritized=False)
        trainer = trainer_of(
            **{"total_steps": 64, **changes}, envs_per_worker=2, unroll_length=4,
            samples_per_insert=3.0, evaluate_every_env_steps=20, run_dir=run_dir,
            sinks=[recorder := Recorder()],
        )  # fmt: skip
        trainer.fit(Guess, store, agent := Dreamer(**TINY))
        return everything(trainer, agent), recorder

    asked, recorder = fit(tmp_path)
    _, overlapping = fit(lockstep=False)
    assert len(overlapping.steps("world/open_loop_error")) > 1
    _, empty = fit(total_steps=0)
    assert not empty.steps("world/open_loop_error")
    monkeypatch.delattr(Dreamer, "report")
    unasked, silent = fit()
    assert asked["progress"]["updates"] > 5
    assert differences(asked, unasked) == []
    assert not silent.steps("world/open_loop_error")
    steps = recorder.steps("world/open_loop_error")
    assert steps == recorder.steps("evaluation/return_mean")
    assert len(steps) == 4
    films = sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert films == [f"step_{step:012d}_open_loop_observation.gif" for step in steps]


# -------------------------------------------------------------------------------- in the Trainer


def test_a_run_in_parts_is_the_run_in_one(tmp_path: Path) -> None:
    """In lockstep, bit for bit: weights, both optimisers, latents, what the policy remembers."""

    def fit(run_dir: Path, total: int, source: Path | None) -> tuple[Trainer, Dreamer]:
        torch.manual_seed(12345)
        agent = Dreamer(**TINY)
        store = ReplayBuffer(capacity=256, warmup_env_steps=16, prioritized=False)
        trainer = trainer_of(
            run_dir=run_dir, total_steps=total, checkpoint=source, envs_per_worker=2,
            unroll_length=4, samples_per_insert=4.0,
        )  # fmt: skip
        trainer.fit(Guess, store, agent)
        return trainer, agent

    whole = fit(tmp_path / "whole", 96, None)
    fit(tmp_path / "parts", 48, None)
    part = fit(tmp_path / "parts", 96, tmp_path / "parts")
    assert whole[0].updates == part[0].updates > 5
    assert differences(everything(*whole), everything(*part)) == []
    policy = load_policy(tmp_path / "parts")
    assert policy.act(np.zeros(2, np.float32)) in (0, 1)
