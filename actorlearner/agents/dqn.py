"""DQN (Mnih et al. 2015), and what Rainbow (Hessel et al. 2018) and others have made of it.

Double (van Hasselt et al. 2016), dueling (Wang et al. 2016), noisy (Fortunato et al. 2018), of the
mean return or of its distribution (`actorlearner.value_heads`).

Shape suffixes: B batch, A actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from actorlearner.config import Settings, setting
from actorlearner.contracts import (
    Array,
    ArraySpec,
    BadInput,
    Batch,
    EnvSpec,
    Observation,
    SampleSpec,
    SettingError,
    Snapshot,
    StepOutput,
    UnsupportedSpace,
)
from actorlearner.joint_actions import JointActions
from actorlearner.networks import (
    MLP,
    DuelingHead,
    EagerForward,
    Encoder,
    LinearLayer,
    NoisyLinear,
    Precision,
    Torso,
    autocast,
)
from actorlearner.onnx_export import export_action_values
from actorlearner.schedules import check_knots, piecewise
from actorlearner.value_heads import (
    CategoricalHead,
    Distribution,
    ExpectedHead,
    Head,
    ImplicitQuantileHead,
    QuantileHead,
    ValueHead,
)

Schedule: TypeAlias = tuple[tuple[float, float], ...]

MAX_ACTIONS = 1_024
"""Combinations of the parts of an action, each of which has a value of its own."""


@dataclass(frozen=True, kw_only=True)
class DQNSettings(Settings):
    """Settings of the agent; the defaults suit small vector observations."""

    group = "agent"

    learning_rate: float | Schedule = setting(1e-3, low=0, live=True)
    """Of Adam: a number, or knots (env steps, rate), linear between, constant after."""
    adam_epsilon: float = setting(1e-8, above=0)
    """Of Adam."""
    precision: Precision = "float32"
    """Of encoder and hidden layers in learning; parameters, heads and losses stay in float32."""
    batch_size: int = setting(64, low=1)
    """Transitions per update."""
    gamma: float = setting(0.99, low=0, high=1)
    """Discount per env step."""
    n_step: int = setting(1, low=1)
    """Rewards summed before bootstrapping."""
    reward_clip: float | None = setting(None, above=0)
    """Rewards are learned from clipped to this size; null leaves them as they are."""
    double: bool = True
    """Choose the bootstrap action by the online network, value it by the target network."""
    dueling: bool = True
    """Split action values into a state value and advantages."""
    head: Head = "expected"
    """What is learned of a return: expected (its mean), c51, quantile or iqn (its distribution)."""
    num_atoms: int = setting(51, low=2)
    """c51: atoms, evenly spaced over ``value_range``."""
    value_range: tuple[float, float] = (-10.0, 10.0)
    """c51: the lowest and the highest return that it can tell; those beyond count as these."""
    num_quantiles: int = setting(200, low=1)
    """quantile: quantiles of each action."""
    num_tau_samples: int = setting(64, low=1)
    """iqn: quantile levels drawn for each transition (N in the paper)."""
    num_tau_prime_samples: int = setting(64, low=1)
    """iqn: levels drawn for its target (N')."""
    num_quantile_samples: int = setting(32, low=1)
    """iqn: levels averaged to choose an action (K)."""
    quantile_embedding_dim: int = setting(64, low=1)
    """iqn: cosines that embed a level."""
    noisy: bool = False
    """Learned noise in the weights behind the encoder explores; ``epsilon`` is for the rest."""
    noisy_sigma: float = setting(0.5, above=0)
    """Its standard deviation at first is this over the square root of a layer's inputs."""
    torso: Torso = "auto"
    """Of images: auto, mlp, nature, minatar, impala; auto goes by their size (never impala)."""
    hidden: tuple[int, ...] = setting((128, 128), low=1)
    """Width of each hidden layer."""
    dueling_hidden: int | None = setting(None, low=1)
    """Width of a hidden layer in each dueling stream; null for none."""
    target_every_updates: int = setting(250, low=1)
    """Updates between copies of the online into the target network."""
    target_tau: float | None = setting(None, above=0, high=1)
    """The target network moves this share of the way after every update; null makes copies."""
    epsilon: Schedule = setting(((0, 1.0), (10_000, 0.05)), low=0)
    """Knots (env steps, probability of a random action), linear between, constant after."""
    epsilon_base: float | None = setting(None, low=0, high=1)
    """Each stream keeps an epsilon of its own, from this one down; null follows ``epsilon``."""
    epsilon_alpha: float = setting(7, low=0)
    """The last stream has ``epsilon_base ** (1 + epsilon_alpha)``."""
    evaluation_epsilon: float = setting(0.0, low=0, high=1)
    """Probability of a random action in evaluations; a few percent free who is stuck."""

    def check(self) -> None:
        """Knots and ranges must be sorted, probabilities at most 1, something must be learned."""
        if self.dueling_hidden is not None and not self.dueling:
            raise SettingError(f"{self.key('dueling_hidden')}={self.dueling_hidden}: needs dueling")
        if not -math.inf < self.value_range[0] < self.value_range[1] < math.inf:
            raise SettingError(
                f"{self.key('value_range')}={list(self.value_range)}: two finite numbers are "
                "needed, the lower one first"
            )
        if max(probability for _, probability in self._knots("epsilon")) > 1:
            raise SettingError(f"{self.key('epsilon')}={self.epsilon}: a probability is at most 1")
        if max(rate for _, rate in self._knots("learning_rate")) <= 0:
            raise SettingError(
                f"{self.key('learning_rate')}={self.learning_rate}: must be greater than 0"
            )

    def _knots(self, name: str) -> Schedule:
        value = getattr(self, name)
        knots: Schedule = value if isinstance(value, tuple) else ((0.0, value),)
        try:
            check_knots(knots)
        except ValueError as error:
            raise SettingError(f"{self.key(name)}={value}: {error}") from error
        return knots


def epsilon_ladder(base: float, alpha: float, num_streams: int) -> Array:
    """A fixed epsilon for each stream: ``[num_streams]``, ``base ** (1 + alpha * i / (N - 1))``.

    Horgan et al. 2018, section 4.1. One stream alone gets the geometric middle.
    """
    place_N = np.linspace(0, 1, num_streams) if num_streams > 1 else np.array([0.5])
    epsilon_N: Array = base ** (1 + alpha * place_N)
    return epsilon_N


class QNetwork(nn.Module):
    """The returns of each action, given an observation."""

    def __init__(self, env_spec: EnvSpec, settings: DQNSettings) -> None:
        """Build the network.

        Args:
            env_spec: fixes inputs and the number of actions.
            settings: those of the network: from ``dueling`` to ``dueling_hidden``.

        Raises:
            UnsupportedSpace: the observation does not suit ``torso``.
        """
        super().__init__()
        s = settings
        linear: LinearLayer = partial(NoisyLinear, sigma=s.noisy_sigma) if s.noisy else nn.Linear
        num_actions = JointActions(env_spec.action).count
        self.encoder = Encoder(env_spec.observation, s.torso)
        # The last hidden layer comes behind IQN's embedding of levels, as in the paper.
        widths, after = (s.hidden[:-1], s.hidden[-1:]) if s.head == "iqn" else (s.hidden, ())
        self.hidden = MLP(self.encoder.size, widths, linear)
        self.value_head = _value_head(s, self.hidden.size)
        last = MLP(self.hidden.size, after, linear)
        numbers = self.value_head.numbers
        self.head: nn.Module
        if s.dueling:
            stream = () if s.dueling_hidden is None else (s.dueling_hidden,)
            self.head = DuelingHead(last.size, num_actions, stream, linear, numbers)
        else:
            self.head = linear(last.size, num_actions * numbers)
        if after:
            self.head = nn.Sequential(*last, self.head)

    def forward(
        self, observation: Mapping[str, Tensor], precision: Precision = "float32"
    ) -> Tensor:
        """Expected returns ``[B, A]`` from tensors ``[B, *stacked_shape]``."""
        return self.value_head.values(self._features(observation, precision), self.head)

    def distribution(
        self, observation: Mapping[str, Tensor], precision: Precision = "float32"
    ) -> Distribution:
        """Returns of every action, to learn from, from tensors ``[B, *stacked_shape]``."""
        returns: Distribution = self.value_head(self._features(observation, precision), self.head)
        return returns

    def _features(self, observation: Mapping[str, Tensor], precision: Precision) -> Tensor:
        parameter = next(self.head.parameters())  # convolutions may have a dtype of their own
        with autocast(precision, parameter.device):
            features: Tensor = self.hidden(self.encoder(observation, parameter.dtype))
        # The head goes without: what tells actions apart is small beside what they are worth.
        return features.to(parameter.dtype)


def _value_head(settings: DQNSettings, features: int) -> ValueHead:
    s = settings
    if s.head == "c51":
        return CategoricalHead(s.num_atoms, s.value_range)
    if s.head == "quantile":
        return QuantileHead(s.num_quantiles)
    if s.head == "iqn":
        samples, acting = s.num_tau_samples, s.num_quantile_samples
        return ImplicitQuantileHead(features, samples, acting, s.quantile_embedding_dim)
    return ExpectedHead()


class EpsilonGreedyPolicy:
    """The best action by a copy of the online network; a random one with probability epsilon.

    A noisy network has new noise for every call, which all streams share; a greedy one has none.
    """

    EXTRAS = ("action_value", "greedy_value")
    """What it can note of each row: the value of the action taken, and the highest of any."""

    def __init__(
        self,
        network: QNetwork,
        actions: JointActions,
        epsilon: float | Array | None,
        greedy: bool,
        extras: Sequence[str] = (),
    ) -> None:
        """Act with ``network`` once `load` has filled it.

        Args:
            network: on the CPU.
            actions: what its numbers stand for.
            epsilon: of all streams, or of each (``[B]``); None takes that of each snapshot.
            greedy: leave out the noise of noisy layers.
            extras: those of `EXTRAS` that are asked for.
        """
        self.network = network.requires_grad_(False).eval()
        self.forward: Callable[[Observation], Array] = EagerForward(self.network)
        self._parameters = dict(network.state_dict(keep_vars=True))
        noisy = () if greedy else network.modules()
        self._noisy_layers = [layer for layer in noisy if isinstance(layer, NoisyLinear)]
        self.has_noise = bool(self._noisy_layers)
        self._actions = actions
        self._fixed_epsilon = epsilon
        self._epsilon: float | Array = 0.0
        self._extras = tuple(extras)

    def load(self, snapshot: Snapshot) -> None:
        """See `contracts.Policy`."""
        for name, parameter in self._parameters.items():
            parameter.copy_(torch.from_numpy(snapshot.arrays[name]))
        fixed = self._fixed_epsilon
        self._epsilon = snapshot.scalars["epsilon"] if fixed is None else fixed

    def act(
        self, observation: Observation, generator: np.random.Generator | None
    ) -> tuple[Array, dict[str, Array]]:
        """See `contracts.Policy`; an independent coin for each stream."""
        if generator is not None:
            for layer in self._noisy_layers:
                layer.draw(generator)
        values_BA = self.forward(observation)
        action_B: Array = values_BA.argmax(1)
        if generator is not None and np.any(self._epsilon):
            explores_B = generator.random(len(action_B)) < self._epsilon
            random_B = generator.integers(self._actions.count, size=len(action_B))
            action_B = np.where(explores_B, random_B, action_B)
        taken = self._actions.action(action_B)
        if not self._extras:
            return taken, {}
        noted = {
            "action_value": np.take_along_axis(values_BA, action_B[:, None], 1)[:, 0],
            "greedy_value": values_BA.max(1),
        }
        return taken, {name: noted[name] for name in self._extras}


@dataclass(frozen=True)
class PolicyRecipe:
    """Makes an `EpsilonGreedyPolicy`; it travels to workers."""

    settings: DQNSettings
    extras: tuple[str, ...] = ()

    @property
    def extras_spec(self) -> dict[str, ArraySpec]:
        """See `contracts.PolicyFactory`."""
        return {name: ArraySpec((), "float32") for name in self.extras}

    def __call__(
        self, env_spec: EnvSpec, streams: Sequence[int], num_streams: int, greedy: bool
    ) -> EpsilonGreedyPolicy:
        """See `contracts.PolicyFactory`."""
        s = self.settings
        network = QNetwork(env_spec, s)
        epsilon: float | Array | None = None
        if greedy:
            epsilon = s.evaluation_epsilon
        elif s.epsilon_base is not None:
            ladder_N = epsilon_ladder(s.epsilon_base, s.epsilon_alpha, num_streams)
            epsilon = ladder_N[list(streams)]
        actions = JointActions(env_spec.action)
        return EpsilonGreedyPolicy(network, actions, epsilon, greedy, self.extras)


class DQN(nn.Module):
    """Learns action values from transitions.

    Attributes:
        settings: see `DQNSettings`.
        current_step: env steps so far; set by the Trainer.
        online: the network that acts and learns.
        target: an older copy of it that values bootstrap actions.
    """

    def __init__(self, **settings: Any) -> None:
        """Networks come with `build`.

        Args:
            settings: see `DQNSettings`.
        """
        super().__init__()
        self.settings = DQNSettings.make(settings)
        self.current_step = 0
        self._optimizer: torch.optim.Optimizer | None = None

    def build(self, env_spec: EnvSpec) -> None:
        """See `contracts.Agent`."""
        what = f"{env_spec.name} has {env_spec.action_space}"
        if not env_spec.action.categories:
            raise UnsupportedSpace(
                f"DQN needs a Discrete, MultiDiscrete or MultiBinary action space; {what}. A "
                "wrapper can make it one: gymnasium.wrappers.DiscretizeAction (Gymnasium >= 1.2.1)"
            )
        self._env_spec, self._actions = env_spec, JointActions(env_spec.action)
        if self._actions.count > MAX_ACTIONS:
            raise UnsupportedSpace(
                f"DQN learns a value for each joint action, of which there may be {MAX_ACTIONS:,}; "
                f"{what}, {self._actions.count:,} of them. A wrapper can leave some out"
            )
        if not hasattr(self, "online"):
            s = self.settings
            self.online = QNetwork(env_spec, s)
            levels = replace(s, num_tau_samples=s.num_tau_prime_samples)
            self.target = QNetwork(env_spec, levels).requires_grad_(False)
            self.target.load_state_dict(self.online.state_dict())

    @property
    def sample_spec(self) -> SampleSpec:
        """See `contracts.Agent`."""
        s = self.settings
        return SampleSpec(s.batch_size, s.n_step, s.gamma, s.reward_clip)

    @property
    def scalars(self) -> dict[str, float]:
        """See `contracts.Agent`: the probability of a random action, if all streams share one."""
        if self.settings.epsilon_base is not None:
            return {}
        return {"epsilon": piecewise(self.settings.epsilon, self.current_step)}

    @property
    def learning_rate(self) -> float:
        """Of the optimiser now."""
        rate = self.settings.learning_rate
        return piecewise(rate, self.current_step) if isinstance(rate, tuple) else rate

    def policy_factory(self, extras: Sequence[str] = ()) -> PolicyRecipe:
        """See `contracts.Agent`."""
        for name in extras:
            if name not in EpsilonGreedyPolicy.EXTRAS:
                known = ", ".join(EpsilonGreedyPolicy.EXTRAS)
                raise BadInput(f"extras={name}: a DQN policy notes only {known}")
        return PolicyRecipe(self.settings, tuple(extras))

    def snapshot(self, version: int) -> Snapshot:
        """See `contracts.Agent`."""
        arrays = {
            name: tensor.detach().to("cpu", torch.float32).numpy()
            for name, tensor in self.online.state_dict().items()
        }
        return Snapshot(version, arrays, self.scalars)

    def export(self, path: str | Path) -> Path:
        """Write an ONNX file of the values and the greedy action; see `export_action_values`."""
        return export_action_values(self.online, self._env_spec, path)

    def change(self, values: Mapping[str, Any]) -> None:
        """See `contracts.Agent`."""
        self.settings = self.settings.changed(values)

    def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """See `contracts.Agent`."""
        parameters = list(self.online.parameters())
        self._optimizer = torch.optim.Adam(
            parameters,
            lr=self.learning_rate,
            eps=self.settings.adam_epsilon,
            fused=parameters[0].device.type in ("cpu", "cuda"),  # not on every device
        )
        return {"q": self._optimizer}

    def training_steps(self) -> dict[str, Callable[[Batch], StepOutput]]:
        """See `contracts.Agent`."""
        return {"q": self.q_training_step}

    def q_training_step(self, batch: Batch) -> StepOutput:
        """Move the return of the action taken towards its target, weighted by importance.

        The target is ``r + discount * Z_target(s', argmax_a Q_online(s', a))`` (van Hasselt et al.
        2016, equation 4), or the maximum of ``Q_target`` where ``double`` is off. ``Z`` is the
        distribution of the return, ``Q`` its mean; with ``head=expected`` both are the same.
        """
        s, observation, following = self.settings, batch.observation, batch.next_observation
        taken = self.online.distribution(observation, s.precision).of(
            self._actions.number(batch.action)
        )
        with torch.no_grad():
            returns = self.target.distribution(following, s.precision)
            chooser_BA = self.online(following, s.precision) if s.double else returns.mean
            target = returns.of(chooser_BA.argmax(1)).backup(batch.reward, batch.discount)
        loss_B = taken.loss(target)
        loss = (batch.weight * loss_B).mean()
        value_B, target_B = taken.mean.detach(), target.mean
        error_B = (value_B - target_B).abs()
        priority_B = loss_B.detach() if taken.loss_is_priority else error_B
        metrics = {
            "loss": loss.detach(),
            "td_error": error_B.mean(),
            "value": value_B.mean(),
            "target": target_B.mean(),
        }
        return StepOutput(loss, metrics, feedback={"priority": priority_B})

    def after_step(self, name: str, updates: int) -> None:
        """See `contracts.Agent`."""
        for group in self._optimizer.param_groups if self._optimizer else []:
            group["lr"] = self.learning_rate
        self._update_target(updates)

    @torch.no_grad()
    def _update_target(self, updates: int) -> None:
        tau = self.settings.target_tau
        if tau is None:
            if updates % self.settings.target_every_updates == 0:
                self.target.load_state_dict(self.online.state_dict())
            return
        for old, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
            old.lerp_(new, tau)
        for kept, fresh in zip(self.target.buffers(), self.online.buffers(), strict=True):
            kept.copy_(fresh)
