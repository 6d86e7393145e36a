"""DQN by hand, against a slow twin, and its policy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorlearner.agents import dqn
from actorlearner.agents.dqn import DQN, EpsilonGreedyPolicy, PolicyRecipe, epsilon_ladder
from actorlearner.contracts import (
    ArraySpec,
    BadInput,
    Batch,
    EnvSpec,
    SettingError,
    Snapshot,
    UnsupportedSpace,
)
from actorlearner.networks import NoisyLinear
from actorlearner.replay import ReplayBuffer
from actorlearner.trainer import Trainer
from tests.tiny import Guess, vector_spec
from tests.unit.test_returns import slow_projection, slow_quantile_huber


def make(num_actions: int = 3, size: int = 2, **settings: Any) -> DQN:
    agent = DQN(**{"hidden": (), "dueling": False, **settings})
    agent.build(vector_spec(size, num_actions))
    return agent


def set_values(network: torch.nn.Module, values: Any) -> None:
    """Make ``network`` (linear) give row ``i`` of ``values`` for the ``i``-th one-hot vector."""
    with torch.no_grad():
        network.head.weight.copy_(torch.tensor(values, dtype=torch.float32).T)
        network.head.bias.zero_()


def interval(trials: int, probability: float, coverage: float = 0.999) -> tuple[int, int]:
    """The central interval of a binomial count, from its exact distribution."""
    counts = range(trials + 1)
    log_choices = [-math.lgamma(k + 1) - math.lgamma(trials - k + 1) for k in counts]
    log_odds = math.log(probability / (1 - probability))
    logs = np.array(log_choices) + log_odds * np.arange(trials + 1)
    below = np.exp(logs - logs.max()).cumsum()
    low, high = np.searchsorted(below / below[-1], [(1 - coverage) / 2, (1 + coverage) / 2])
    return int(low), int(high)


def batch_of(size: int, num_actions: int, count: int, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return Batch(
        observation={"observation": torch.randn(count, size, generator=g)},
        next_observation={"observation": torch.randn(count, size, generator=g)},
        action=torch.randint(num_actions, (count,), generator=g),
        reward=torch.randn(count, generator=g),
        discount=torch.rand(count, generator=g) * torch.randint(2, (count,), generator=g),
        weight=torch.rand(count, generator=g) + 0.1,
        keys=np.arange(count),
    )


def draw_networks(agent: DQN, seed: int) -> None:
    """Give both networks weights of their own."""
    torch.manual_seed(seed)
    for parameter in [*agent.online.parameters(), *agent.target.parameters()]:
        torch.nn.init.normal_(parameter)


class TestLoss:
    @pytest.mark.parametrize("double", [True, False])
    def test_two_transitions_by_hand(self, double: bool) -> None:
        """P14: values of two states, three actions; the networks disagree on the best action."""
        agent = make(double=double)
        set_values(agent.online, [[1.0, 2.0, 3.0], [0.5, 4.0, 1.0]])
        set_values(agent.target, [[9.0, 1.0, 2.0], [8.0, 0.25, 6.0]])
        states = torch.eye(2)
        batch = Batch(
            observation={"observation": states},
            next_observation={"observation": states.flip(0)},
            action=torch.tensor([1, 2]),
            reward=torch.tensor([1.5, -0.5]),
            discount=torch.tensor([0.9, 0.0]),
            weight=torch.tensor([0.5, 1.0]),
            keys=np.arange(2),
        )
        output = agent.q_training_step(batch)
        # Row 0 goes to state 1: online chooses action 1, target values it 0.25 (its maximum is 8).
        # q = 2; y = 1.5 + 0.9 * 0.25 = 1.725, error 0.275, Huber 0.0378125; plain: y = 8.7,
        # error 6.7, Huber 6.2. Row 1 ended: q = 1; y = -0.5, error 1.5, Huber 1.
        errors = [0.275, 1.5] if double else [6.7, 1.5]
        loss = (0.5 * (0.0378125 if double else 6.2) + 1.0 * 1.0) / 2
        assert output.loss.item() == pytest.approx(loss, abs=1e-6)
        assert output.feedback["priority"].tolist() == pytest.approx(errors, abs=1e-6)
        assert {name: float(value) for name, value in output.metrics.items()} == pytest.approx(
            {
                "loss": loss,
                "td_error": sum(errors) / 2,
                "value": 1.5,
                "target": (1.725 if double else 8.7) / 2 - 0.25,
            },
            abs=1e-6,
        )

    @pytest.mark.parametrize("double", [True, False])
    @pytest.mark.parametrize("dueling", [True, False])
    def test_equals_its_slow_twin(self, double: bool, dueling: bool) -> None:
        """E.1 item 5: networks that disagree."""
        agent = make(4, 3, double=double, dueling=dueling, hidden=(6,))
        draw_networks(agent, seed=1)
        batch = batch_of(3, 4, count=50)
        output = agent.q_training_step(batch)

        def values(network: torch.nn.Module, observation: torch.Tensor) -> Any:
            with torch.no_grad():
                return network({"observation": observation.unsqueeze(0)})[0].tolist()

        errors, losses, disagreements = [], [], 0
        for i in range(50):
            following = batch.next_observation["observation"][i]
            by_target, by_online = values(agent.target, following), values(agent.online, following)
            chooser = by_online if double else by_target
            disagreements += by_target.index(max(by_target)) != by_online.index(max(by_online))
            bootstrap = by_target[chooser.index(max(chooser))]
            target = float(batch.reward[i]) + float(batch.discount[i]) * bootstrap
            q = values(agent.online, batch.observation["observation"][i])[int(batch.action[i])]
            error = abs(q - target)
            errors.append(error)
            huber = error**2 / 2 if error < 1 else error - 0.5
            losses.append(float(batch.weight[i]) * huber)
        assert disagreements > 10
        assert output.loss.item() == pytest.approx(sum(losses) / 50, rel=1e-5)
        np.testing.assert_allclose(
            output.feedback["priority"].numpy(), errors, rtol=1e-4, atol=1e-5
        )

    def test_where_it_ended_the_target_is_the_reward(self) -> None:
        agent = make()
        draw_networks(agent, seed=2)
        batch = batch_of(2, 3, count=20)
        batch.discount.zero_()
        values = agent.online(batch.observation).gather(1, batch.action.unsqueeze(1)).squeeze(1)
        priority = agent.q_training_step(batch).feedback["priority"]
        torch.testing.assert_close(priority, (values - batch.reward).abs().detach())

    def test_importance_weights_scale_the_loss_and_leave_the_priorities(self) -> None:
        agent = make()
        draw_networks(agent, seed=3)
        batch = batch_of(2, 3, count=20)
        before = agent.q_training_step(batch)
        batch.weight *= 3
        after = agent.q_training_step(batch)
        torch.testing.assert_close(after.loss, 3 * before.loss)
        torch.testing.assert_close(after.feedback["priority"], before.feedback["priority"])
        batch.weight[1:] = 0
        agent.online.zero_grad()
        agent.q_training_step(batch).loss.backward()
        only_first = agent.online.head.weight.grad
        assert torch.count_nonzero(only_first.abs().sum(1)) == 1

    def test_no_gradient_reaches_the_target(self) -> None:
        agent = make()
        agent.q_training_step(batch_of(2, 3, count=20)).loss.backward()
        assert all(p.grad is None and not p.requires_grad for p in agent.target.parameters())
        assert all(p.grad is not None for p in agent.online.parameters())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_other_precisions(self, dtype: torch.dtype) -> None:
        agent = make(dueling=True, hidden=(8,))
        expected = agent.q_training_step(batch_of(2, 3, count=20)).loss.item()
        agent.to(dtype=dtype)
        output = agent.q_training_step(batch_of(2, 3, count=20))
        output.loss.backward()
        assert output.loss.item() == pytest.approx(expected, rel=0.05)
        assert {p.grad.dtype for p in agent.online.parameters() if p.grad is not None} == {dtype}
        output.feedback["priority"].numpy()  # which NumPy must know

    def test_bfloat16_is_near_float32(self) -> None:
        """And tells actions apart whose values are large and nearly the same."""
        losses = {}
        for precision in ("float32", "bfloat16"):
            agent = make(3, 2, dueling=True, hidden=(16,), precision=precision)
            draw_networks(agent, seed=1)
            with torch.no_grad():
                agent.online.head.value[-1].bias.fill_(10_000)
                agent.target.head.value[-1].bias.fill_(10_000)
            output = agent.q_training_step(
                replace(batch_of(2, 3, count=20), discount=torch.ones(20))
            )
            losses[precision] = output.loss.item()
            output.loss.backward()
            assert {p.grad.dtype for p in agent.online.parameters()} == {torch.float32}
        assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
        assert losses["bfloat16"] != losses["float32"]


class TestDistributions:
    """The training step with heads other than the mean, row by row."""

    def agent(self, head: str, **settings: Any) -> DQN:
        small = {
            "num_atoms": 7, "value_range": (-3, 3), "num_quantiles": 5, "num_tau_samples": 4,
            "num_tau_prime_samples": 6, "num_quantile_samples": 3,
        }  # fmt: skip
        agent = make(4, 3, head=head, **{"dueling": True, "hidden": (6,), **small, **settings})
        draw_networks(agent, seed=1)
        return agent

    @pytest.mark.parametrize("double", [True, False])
    @pytest.mark.parametrize("head", ["c51", "quantile", "iqn"])
    def test_equals_its_slow_twin(self, head: str, double: bool) -> None:
        agent, batch = self.agent(head, double=double), batch_of(3, 4, count=30)
        torch.manual_seed(7)
        output = agent.q_training_step(batch)
        # IQN draws the levels of the online network, then those of the target network.
        torch.manual_seed(7)
        taken, following = (
            network.distribution(observation)
            for network, observation in (
                (agent.online, batch.observation),
                (agent.target, batch.next_observation),
            )
        )
        chooser = agent.online(batch.next_observation) if double else following.mean
        losses, errors = [], []
        for i in range(30):
            action, best = int(batch.action[i]), int(chooser[i].argmax())
            reward, discount = float(batch.reward[i]), float(batch.discount[i])
            if head == "c51":
                atoms = np.linspace(-3, 3, 7)
                online = taken.log_probability[i, action].exp().tolist()
                after = following.log_probability[i, best].exp().tolist()
                goal = slow_projection(after, reward, discount, -3, 3)
                losses.append(
                    sum(m * math.log(m / p) for m, p in zip(goal, online, strict=True) if m > 0)
                )
                errors.append(abs(atoms @ goal - atoms @ online))
            else:
                online = taken.value[i, action].tolist()
                goal = [reward + discount * z for z in following.value[i, best].tolist()]
                levels = taken.level.expand(30, -1)[i].tolist()
                assert (len(online), len(goal)) == ((4, 6) if head == "iqn" else (5, 5))
                losses.append(slow_quantile_huber(online, levels, goal, 1.0))
                errors.append(abs(np.mean(online) - np.mean(goal)))
        priority = output.feedback["priority"].numpy()
        np.testing.assert_allclose(priority, losses, rtol=1e-4, atol=1e-5)
        weighted = float(batch.weight.numpy() @ np.array(losses)) / 30
        assert output.loss.item() == pytest.approx(weighted, rel=1e-4)
        assert float(output.metrics["td_error"]) == pytest.approx(np.mean(errors), rel=1e-4)

    @pytest.mark.parametrize("head", ["c51", "quantile", "iqn"])
    def test_policies_act_by_means_and_note_them(self, head: str) -> None:
        agent = self.agent(head, epsilon=[(0, 0.0)])
        policy = agent.policy_factory(("action_value",))(vector_spec(3, 4), (0,), 1, False)
        policy.load(agent.snapshot(0))
        seen = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
        action, extras = policy.act({"observation": seen}, np.random.default_rng(0))
        with torch.no_grad():
            means = agent.online({"observation": torch.from_numpy(seen)})
        assert action.tolist() == means.argmax(1).tolist()
        np.testing.assert_allclose(extras["action_value"], means.max(1).values, rtol=1e-5)

    def test_a_pass_multiplies_levels_before_the_last_hidden_layer(self) -> None:
        """As in the paper, where they meet the features of the convolutions."""
        agent = self.agent("iqn", hidden=(6, 5), quantile_embedding_dim=9)
        embedding = agent.online.value_head.embedding
        assert (embedding.in_features, embedding.out_features) == (9, 6)
        assert [layer.out_features for layer in list(agent.online.hidden)[::2]] == [6]
        assert agent.online.head[0].in_features == 6

    def test_the_network_of_rainbow_has_its_size(self) -> None:
        """Convolutions, then two noisy streams of 512, each of 51 atoms (Hessel et al. 2018)."""
        agent = DQN(torso="nature", hidden=[], dueling_hidden=512, head="c51", noisy=True)
        frames = {"observation": ArraySpec((84, 84), "uint8", stack=4)}
        agent.build(EnvSpec("Breakout", frames, ArraySpec((), "int64", (4,))))
        convolutions = (4 * 64 + 1) * 32 + (32 * 16 + 1) * 64 + (64 * 9 + 1) * 64
        streams = 2 * (3136 + 1) * 512 + (512 + 1) * 51 * (1 + 4)
        count = sum(parameter.numel() for parameter in agent.online.parameters())
        assert count == convolutions + 2 * streams == 6_764_190


class TestNoise:
    def agent(self, **settings: Any) -> DQN:
        return make(noisy=True, dueling=True, hidden=(8,), epsilon=[(0, 0.0)], **settings)

    def values(self, agent: DQN, greedy: bool, seed: int = 0) -> Any:
        """What a policy thinks of the same state in eight streams, in each of two calls."""
        recipe = agent.policy_factory(("greedy_value",))
        policy = recipe(vector_spec(2, 3), tuple(range(8)), 8, greedy)
        policy.load(agent.snapshot(0))
        observation = {"observation": np.ones((8, 2), np.float32)}
        generator = np.random.default_rng(seed)
        return np.stack([policy.act(observation, generator)[1]["greedy_value"] for _ in range(2)])

    def test_every_layer_behind_the_encoder_is_noisy(self) -> None:
        linear = [m for m in self.agent().online.modules() if isinstance(m, torch.nn.Linear)]
        assert [type(layer) for layer in linear] == [NoisyLinear] * 3
        sigma = self.agent(noisy_sigma=0.25).online.hidden[0].weight_sigma
        torch.testing.assert_close(sigma, torch.full_like(sigma, 0.25 / 2**0.5))

    def test_a_policy_has_new_noise_for_every_call_from_its_generator(self) -> None:
        agent = self.agent()
        first, again, other = (self.values(agent, greedy=False, seed=s) for s in (0, 0, 1))
        assert np.array_equal(first, again)
        assert len({*first[:, 0], *other[:, 0]}) == 4
        assert (first == first[:, :1]).all()  # all streams share it

    def test_evaluations_use_the_mean_weights(self) -> None:
        agent = self.agent()
        values = self.values(agent, greedy=True)
        agent.eval()
        with torch.no_grad():
            means = agent.online({"observation": torch.ones(1, 2)}).max().item()
        np.testing.assert_allclose(values, means, rtol=1e-6)

    def test_networks_and_passes_draw_noise_of_their_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Online, online to choose, target; Rainbow draws for each of the three."""
        drawn: list[torch.Tensor] = []
        batch, randn = batch_of(2, 3, count=5), torch.randn

        def draw(*arguments: Any, **named: Any) -> torch.Tensor:
            drawn.append(randn(*arguments, **named))
            return drawn[-1]

        for double, passes in ((True, 3), (False, 2)):
            agent = self.agent(double=double)
            drawn.clear()
            with monkeypatch.context() as patch:
                patch.setattr(torch, "randn", draw)
                agent.q_training_step(batch)
            assert len(drawn) == 3 * passes
            assert len({float(noise[0]) for noise in drawn}) == len(drawn)

    def test_no_noise_is_in_a_snapshot(self) -> None:
        agent = self.agent()
        before = {name: array.copy() for name, array in agent.snapshot(0).arrays.items()}
        agent.q_training_step(batch_of(2, 3, count=5))
        after = agent.snapshot(0).arrays
        assert before.keys() == after.keys() == dict(agent.online.named_parameters()).keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)

    def test_lockstep_repeats_and_resumes_to_the_bit(self, tmp_path: Path) -> None:
        """Noise of the learner comes from torch's generator, which a checkpoint holds."""

        def run(total_steps: int, **more: Any) -> dict[str, torch.Tensor]:
            trainer = Trainer(
                workers=0, unroll_length=8, samples_per_insert=2.0, lockstep=True, device="cpu",
                console="off", evaluation={"episodes": 1}, total_steps=total_steps, **more,
            )  # fmt: skip
            model = DQN(
                hidden=(8,), batch_size=8, epsilon=[(0, 0.0)], noisy=True, head="iqn",
                num_tau_samples=2, num_tau_prime_samples=2,
            )  # fmt: skip
            store = ReplayBuffer(capacity=256, warmup_env_steps=16, beta_updates=100)
            trainer.fit(Guess, store, model)
            return dict(model.state_dict())

        whole, again = run(96), run(96)
        run(48, run_dir=tmp_path / "half")
        resumed = run(96, checkpoint=tmp_path / "half")
        for other in (again, resumed):
            assert all(torch.equal(whole[name], other[name]) for name in whole)


class TestActionsOfSeveralParts:
    SPEC = EnvSpec(
        "Parts", {"observation": ArraySpec((2,), "float32")}, ArraySpec((2,), "int64", (2, 3))
    )

    def agent(self, **settings: Any) -> DQN:
        agent = DQN(**{"hidden": (4,), "dueling": False, **settings})
        agent.build(self.SPEC)
        return agent

    def test_the_training_step_is_that_of_joint_actions(self) -> None:
        joint, parts = make(6, hidden=(4,)), self.agent()
        draw_networks(joint, seed=1)
        parts.load_state_dict(joint.state_dict())
        batch = batch_of(2, 6, count=20)
        expected = joint.q_training_step(batch)
        batch.action = torch.stack([batch.action // 3, batch.action % 3], 1)
        found = parts.q_training_step(batch)
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(found.feedback["priority"], expected.feedback["priority"])

    @pytest.mark.parametrize("epsilon", [0.0, 1.0])
    def test_a_policy_acts_in_parts(self, epsilon: float) -> None:
        agent = self.agent(hidden=(), epsilon=[(0, epsilon)])
        set_values(agent.online, [[0.0, 0, 0, 0, 0, 9], [0, 7.0, 0, 0, 0, 0]])
        policy = agent.policy_factory(("action_value",))(self.SPEC, (0,), 1, False)
        policy.load(agent.snapshot(0))
        observation = {"observation": np.tile(np.eye(2, dtype=np.float32), (500, 1))}
        action, extras = policy.act(observation, np.random.default_rng(0))
        assert (action.shape, action.dtype) == ((1_000, 2), np.dtype("int64"))
        if epsilon:
            assert sorted(set(map(tuple, action.tolist()))) == list(np.ndindex(2, 3))
        else:
            assert action[:2].tolist() == [[1, 2], [0, 1]]
            assert extras["action_value"][:2].tolist() == [9, 7]


class TestTarget:
    def test_starts_as_a_copy_and_stays_apart(self) -> None:
        agent = make(hidden=(4,))
        online, target = agent.online.state_dict(), agent.target.state_dict()
        assert all(torch.equal(online[name], target[name]) for name in online)
        assert not {t.data_ptr() for t in online.values()} & {t.data_ptr() for t in target.values()}

    def test_copied_exactly_every_n_updates(self) -> None:
        """P15."""
        agent = make(target_every_updates=3)
        copied = []
        for update in range(1, 10):
            with torch.no_grad():
                agent.online.head.weight.add_(1.0)
            agent.after_step("q", update)
            if torch.equal(agent.online.head.weight, agent.target.head.weight):
                copied.append(update)
        assert copied == [3, 6, 9]

    @pytest.mark.parametrize("tau", [0.25, 1.0])
    def test_moves_by_tau_after_every_update(self, tau: float) -> None:
        agent = make(target_tau=tau, hidden=(4,), target_every_updates=2)
        generator = np.random.default_rng(0)
        expected = {n: t.double().numpy() for n, t in agent.target.state_dict().items()}
        for update in range(1, 6):
            with torch.no_grad():
                for name, parameter in agent.online.named_parameters():
                    new = generator.normal(size=parameter.shape)
                    parameter.copy_(torch.from_numpy(new))
                    expected[name] = tau * new + (1 - tau) * expected[name]
            agent.after_step("q", update)
            for name, tensor in agent.target.state_dict().items():
                np.testing.assert_allclose(tensor, expected[name], atol=1e-6)
        assert not any(parameter.requires_grad for parameter in agent.target.parameters())

    @pytest.mark.parametrize("tau", [0.25, None])
    def test_buffers_are_copied(self, tau: float | None) -> None:
        agent = make(target_tau=tau, target_every_updates=1)
        for network in (agent.online, agent.target):
            network.register_buffer("count", torch.zeros((), dtype=torch.int64))
        agent.online.count += 7
        agent.after_step("q", 1)
        agent.online.count += 1
        assert agent.target.count == 7

    def test_build_twice_keeps_the_weights(self) -> None:
        agent = make()
        before = agent.online.head.weight
        agent.build(vector_spec(2, 3))
        assert agent.online.head.weight is before


class TestEpsilon:
    @pytest.mark.parametrize(
        ("step", "epsilon"),
        [(0, 1.0), (511, 0.981604), (25_000, 0.1), (12_500, 0.55), (500_000, 0.01), (10**6, 0.01)],
    )
    def test_follows_its_knots(self, step: int, epsilon: float) -> None:
        """P5."""
        agent = make(epsilon=((0, 1.0), (25_000, 0.1), (500_000, 0.01)))
        agent.current_step = step
        assert agent.scalars["epsilon"] == pytest.approx(epsilon, abs=1e-6)
        assert agent.snapshot(0).scalars == agent.scalars

    @pytest.mark.parametrize(
        ("knots", "message"),
        [
            ([], "at least one"),
            ([(0, 1), (0, 0.5)], "greater than the one before"),
            ([(5, 1), (0, 0.5)], "greater than the one before"),
            ([(0, 1.5)], "a probability is at most 1"),
            ([(0, -0.5)], "must be at least 0"),
            ([(0, math.nan)], "must be at least 0"),
            ([(math.inf, 0.1)], "finite"),
        ],
    )
    def test_refuses_bad_knots(self, knots: Any, message: str) -> None:
        with pytest.raises(SettingError, match=rf"^agent.epsilon=.*{message}"):
            DQN(epsilon=knots)


class TestEpsilonOfEachStream:
    @pytest.mark.parametrize(
        ("num_streams", "exponents"),
        [
            (1, [4.5]),
            (2, [1, 8]),
            (8, [1, 2, 3, 4, 5, 6, 7, 8]),
            (360, [1 + 7 * i / 359 for i in range(360)]),
        ],
    )
    def test_exact_values(self, num_streams: int, exponents: list[float]) -> None:
        """E.1 item 7: Horgan et al. 2018."""
        expected = [0.4**exponent for exponent in exponents]
        assert epsilon_ladder(0.4, 7, num_streams).tolist() == pytest.approx(expected, rel=1e-12)

    def test_each_explores_at_its_own_rate(self) -> None:
        """E.1 item 7: 20,000 steps of each stream, in the 99.9 % binomial interval.

        The worker has streams 2 to 6 of 8, each of them 20,000 times.
        """
        count, base, alpha = 20_000, 0.5, 3
        agent = make(epsilon_base=base, epsilon_alpha=alpha)
        set_values(agent.online, [[1.0, 2.0, 0.0], [0.0, 5.0, 0.0]])
        streams = tuple(range(2, 7)) * count
        policy = agent.policy_factory()(vector_spec(2, 3), streams, 8, False)
        agent.current_step = 10**9
        policy.load(agent.snapshot(0))
        observation = {"observation": np.tile(np.eye(2, dtype=np.float32), (len(streams) // 2, 1))}
        action, _ = policy.act(observation, np.random.default_rng(0))
        for stream, actions in zip(range(2, 7), action.reshape(count, 5).T, strict=True):
            epsilon = base ** (1 + alpha * stream / 7)
            low, high = interval(count, epsilon * 2 / 3)
            assert low <= np.count_nonzero(actions != 1) <= high, stream

    def test_a_greedy_policy_knows_none(self) -> None:
        agent = make(epsilon_base=1.0, epsilon_alpha=0)
        set_values(agent.online, [[1.0, 2.0, 0.0], [0.0, 5.0, 0.0]])
        policy = agent.policy_factory()(vector_spec(2, 3), (0,) * 100, 1, True)
        policy.load(agent.snapshot(0))
        observation = {"observation": np.tile(np.eye(2, dtype=np.float32), (50, 1))}
        assert (policy.act(observation, np.random.default_rng(0))[0] == 1).all()

    def test_snapshots_carry_no_epsilon(self) -> None:
        agent = make(epsilon_base=0.4)
        assert agent.scalars == {}
        assert agent.snapshot(0).scalars == {}


class TestLearningRate:
    def test_follows_its_knots(self) -> None:
        """P6: it is that of the env steps so far from the first update on."""
        agent = make(learning_rate=[[0, 0.5], [100, 0.1]])
        (group,) = agent.configure_optimizers()["q"].param_groups
        assert group["lr"] == 0.5
        for step, rate in ((50, 0.3), (100, 0.1), (1_000, 0.1)):
            agent.current_step = step
            agent.after_step("q", 1)
            assert group["lr"] == pytest.approx(rate)

    @pytest.mark.parametrize(
        ("rate", "message"),
        [
            ([], "at least one"),
            ([(5, 1), (0, 0.5)], "greater than the one before"),
            ([(0, 0.0), (9, 0)], "must be greater than 0"),
            (0, "must be greater than 0"),
            (-1, "must be at least 0"),
            (math.inf, "finite"),
            (math.nan, "must be at least 0"),
            ("fast", "needed"),
        ],
    )
    def test_refuses(self, rate: Any, message: str) -> None:
        with pytest.raises(SettingError, match=rf"^agent.learning_rate=.*{message}"):
            DQN(learning_rate=rate)


class TestSettings:
    def test_what_it_wants_of_a_batch(self) -> None:
        spec = DQN(batch_size=7, n_step=3, gamma=0.5, reward_clip=2).sample_spec
        assert (spec.batch_size, spec.n_step, spec.gamma, spec.reward_clip) == (7, 3, 0.5, 2.0)

    def test_the_optimizer_gets_them(self) -> None:
        agent = make(learning_rate=0.125, adam_epsilon=0.5)
        (group,) = agent.configure_optimizers()["q"].param_groups
        assert (group["lr"], group["eps"], group["fused"]) == (0.125, 0.5, True)
        assert {id(p) for p in group["params"]} == {id(p) for p in agent.online.parameters()}

    @pytest.mark.parametrize(
        "settings",
        [
            {"gamma": 1.01},
            {"learning_rate": 0},
            {"hidden": (0,)},
            {"n_step": 0},
            {"torso": "resnet"},
            {"dueling_hidden": 0},
            {"dueling_hidden": 8, "dueling": False},
            {"target_tau": 0.0},
            {"target_tau": 1.01},
            {"epsilon_base": 1.01},
            {"epsilon_alpha": -1},
            {"head": "rainbow"},
            {"num_atoms": 1},
            {"value_range": (1, 1)},
            {"value_range": (0, math.inf)},
            {"value_range": (0, math.nan)},
            {"value_range": (0, 1, 2)},
            {"num_quantiles": 0},
            {"num_tau_samples": 0},
            {"num_tau_prime_samples": 0},
            {"num_quantile_samples": 0},
            {"quantile_embedding_dim": 0},
            {"noisy": 1},
            {"noisy_sigma": 0},
        ],
    )
    def test_out_of_bounds(self, settings: dict[str, Any]) -> None:
        with pytest.raises(SettingError, match=f"^agent.{next(iter(settings))}="):
            DQN(**settings)

    @pytest.mark.parametrize(
        ("spec", "space", "message"),
        [
            (
                ArraySpec((2,), "float32"),
                "Box(-1.0, 1.0, (2,), float32)",
                "DQN needs a Discrete, MultiDiscrete or MultiBinary action space; Robot-v0 has "
                "Box(-1.0, 1.0, (2,), float32). A wrapper can make it one: "
                "gymnasium.wrappers.DiscretizeAction (Gymnasium >= 1.2.1)",
            ),
            (
                ArraySpec((3,), "int64", (41, 5, 5)),
                "MultiDiscrete([41  5  5])",
                "DQN learns a value for each joint action, of which there may be 1,024; Robot-v0 "
                "has MultiDiscrete([41  5  5]), 1,025 of them. A wrapper can leave some out",
            ),
            (
                ArraySpec((64,), "int8", (2,) * 64),
                "MultiBinary(64)",
                "DQN learns a value for each joint action, of which there may be 1,024; Robot-v0 "
                "has MultiBinary(64), 18,446,744,073,709,551,616 of them. A wrapper can leave some "
                "out",
            ),
        ],
    )
    def test_names_an_action_space_that_it_cannot_use(
        self, spec: ArraySpec, space: str, message: str
    ) -> None:
        env = EnvSpec("Robot-v0", {"observation": ArraySpec((3,), "float32")}, spec, "", space)
        with pytest.raises(UnsupportedSpace) as caught:
            DQN().build(env)
        assert str(caught.value) == message

    def test_1024_joint_actions_are_not_too_many(self) -> None:
        action = ArraySpec((10,), "int8", (2,) * 10)
        agent = DQN(hidden=())
        agent.build(EnvSpec("Robot-v0", {"observation": ArraySpec((3,), "float32")}, action))
        values = agent.online({"observation": torch.zeros(2, 3)})
        assert values.shape == (2, 1_024) == (2, dqn.MAX_ACTIONS)


class TestNetwork:
    def test_the_network_of_the_annotated_page_has_its_size(self) -> None:
        """The spec's seed: labml's dueling network of Atari."""
        agent = DQN(torso="nature", hidden=[512], dueling_hidden=256)
        frames = {"observation": ArraySpec((84, 84), "uint8", stack=4)}
        agent.build(EnvSpec("Breakout", frames, ArraySpec((), "int64", (4,))))
        assert sum(parameter.numel() for parameter in agent.online.parameters()) == 1_948_069

    def test_the_torso_is_that_of_the_settings(self) -> None:
        frames = {"observation": ArraySpec((40, 40), "uint8")}
        sizes = {}
        for torso in ("auto", "nature", "minatar", "mlp"):
            agent = DQN(torso=torso)
            agent.build(EnvSpec("Images", frames, ArraySpec((), "int64", (4,))))
            sizes[torso] = agent.online.encoder.size
        assert sizes == {"auto": 64, "nature": 64, "minatar": 16 * 38 * 38, "mlp": 1600}


class TestPolicy:
    def policy(self, agent: DQN, greedy: bool = False, num_actions: int = 3) -> EpsilonGreedyPolicy:
        return agent.policy_factory()(vector_spec(2, num_actions), (0,), 1, greedy)

    def acts(self, agent: DQN, epsilon: float, greedy: bool = False, count: int = 20_000) -> Any:
        """Actions of ``count`` streams where action 1 is the best, and then all of them again."""
        set_values(agent.online, [[1.0, 2.0, 0.0], [0.0, 5.0, 0.0]])
        policy = self.policy(agent, greedy)
        policy.load(Snapshot(0, agent.snapshot(0).arrays, {"epsilon": epsilon}))
        observation = {"observation": np.tile(np.eye(2, dtype=np.float32), (count // 2, 1))}
        generator = np.random.default_rng(0)
        return np.stack([policy.act(observation, generator)[0] for _ in range(2)])

    def test_without_epsilon_it_takes_the_best(self) -> None:
        assert (self.acts(make(), epsilon=0.0) == 1).all()

    def test_greedy_knows_no_epsilon(self) -> None:
        assert (self.acts(make(), epsilon=1.0, greedy=True) == 1).all()

    def test_greedy_explores_as_asked(self) -> None:
        actions = self.acts(make(evaluation_epsilon=0.3), epsilon=1.0, greedy=True)
        assert (actions != 1).mean() == pytest.approx(0.3 * 2 / 3, abs=0.02)

    @pytest.mark.parametrize("epsilon", [1.0, 0.3, 0.01])
    def test_explores_at_the_rate_of_epsilon(self, epsilon: float) -> None:
        """P9, E.1 item 7: each action inside the 99.9 % binomial interval, a coin per stream."""
        actions = self.acts(make(), epsilon)
        for action, other in ((0, 1), (1, 0), (2, 1)):
            p = epsilon / 3 + (1 - epsilon) * (action == 1)
            sd = math.sqrt(p * (1 - p) / actions.size)
            assert abs((actions == action).mean() - p) < 3.3 * sd, (action, other)
        assert 0 < np.count_nonzero(actions[0] != actions[1]) < actions[0].size

    def test_everything_random_comes_from_the_generator(self) -> None:
        policy = self.policy(make())
        policy.load(Snapshot(0, make().snapshot(0).arrays, {"epsilon": 0.5}))
        observation = {"observation": np.zeros((50, 2), np.float32)}
        before = torch.get_rng_state(), np.random.get_state(legacy=True)[1]
        first, again = (policy.act(observation, np.random.default_rng(7))[0] for _ in range(2))
        assert np.array_equal(first, again)
        assert torch.equal(before[0], torch.get_rng_state())
        assert np.array_equal(before[1], np.random.get_state(legacy=True)[1])

    def test_actions_have_the_dtype_of_the_spec(self) -> None:
        for epsilon in (0.0, 1.0):
            assert self.acts(make(), epsilon, count=4).dtype == np.dtype("int64")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
    def test_the_snapshot_is_float32_and_loads_exactly(self, dtype: torch.dtype) -> None:
        agent = make(dueling=True, hidden=(8,))
        draw_networks(agent, seed=4)
        agent.to(dtype=dtype)
        snapshot = agent.snapshot(5)
        assert snapshot.version == 5
        assert {array.dtype for array in snapshot.arrays.values()} == {np.dtype("float32")}
        policy = self.policy(agent, greedy=True)
        policy.load(snapshot)
        loaded = policy.network.state_dict()
        assert loaded.keys() == agent.online.state_dict().keys()
        for name, tensor in agent.online.state_dict().items():
            assert torch.equal(loaded[name], tensor.to(torch.float32)), name

    def test_it_copies_the_snapshot(self) -> None:
        agent = make()
        set_values(agent.online, [[1.0, 2.0, 0.0], [0.0, 5.0, 0.0]])
        policy = self.policy(agent, greedy=True)
        policy.load(agent.snapshot(0))
        set_values(agent.online, [[9.0, 2.0, 0.0], [9.0, 5.0, 0.0]])
        observation = {"observation": np.eye(2, dtype=np.float32)}
        assert policy.act(observation, np.random.default_rng(0))[0].tolist() == [1, 1]


class TestExtras:
    def act(self, extras: tuple[str, ...]) -> tuple[PolicyRecipe, Any, dict[str, Any]]:
        """What a policy does and notes in 50 pairs of states; half of the actions are random."""
        agent = make(epsilon=[(0, 0.5)])
        set_values(agent.online, [[1.0, 2.0, 0.0], [0.25, 5.0, 0.5]])
        recipe = agent.policy_factory(extras)
        policy = recipe(vector_spec(2, 3), (0,) * 100, 1, False)
        policy.load(agent.snapshot(0))
        observation = {"observation": np.tile(np.eye(2, dtype=np.float32), (50, 1))}
        return recipe, *policy.act(observation, np.random.default_rng(0))

    def test_values_of_the_action_taken_and_of_the_best(self) -> None:
        _, action, extras = self.act(("action_value", "greedy_value"))
        values = [[1.0, 2.0, 0.0], [0.25, 5.0, 0.5]] * 50
        assert set(action) == {0, 1, 2}
        assert extras["action_value"].tolist() == [
            v[a] for v, a in zip(values, action, strict=True)
        ]
        assert extras["greedy_value"].tolist() == [max(v) for v in values]

    @pytest.mark.parametrize(
        "names", [(), ("greedy_value",), ("greedy_value", "action_value")], ids=str
    )
    def test_only_what_is_asked_for_as_the_spec_says(self, names: tuple[str, ...]) -> None:
        recipe, action, extras = self.act(names)
        assert tuple(extras) == names
        assert recipe.extras_spec == {name: ArraySpec((), "float32") for name in names}
        assert all(a.dtype == np.float32 and a.shape == (100,) for a in extras.values())
        assert np.array_equal(action, self.act(())[1])

    def test_names_those_that_it_knows(self) -> None:
        with pytest.raises(BadInput) as caught:
            DQN().policy_factory(("action_value", "entropy"))
        assert (
            str(caught.value)
            == "extras=entropy: a DQN policy notes only action_value, greedy_value"
        )
