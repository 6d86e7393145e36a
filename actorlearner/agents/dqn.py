"""DQN (Mnih et al. 2015), double (van Hasselt et al. 2016) and dueling (Wang et al. 2016).

Shape suffixes: B batch, A actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from actorlearner.config import Settings, setting
from actorlearner.contracts import (
    Array,
    Batch,
    EnvSpec,
    Observation,
    SampleSpec,
    SettingError,
    Snapshot,
    StepOutput,
    UnsupportedSpace,
)
from actorlearner.networks import MLP, DuelingHead, FlatEncoder
from actorlearner.schedules import check_knots, piecewise

Schedule: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class DQNSettings(Settings):
    """Settings of the agent; the defaults suit small vector observations."""

    group = "agent"

    learning_rate: float | Schedule = setting(1e-3, low=0)
    """Of Adam: a number, or knots (env steps, rate), linear between, constant after."""
    adam_epsilon: float = setting(1e-8, above=0)
    """Of Adam."""
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
    hidden: tuple[int, ...] = setting((128, 128), low=1)
    """Width of each hidden layer."""
    target_every_updates: int = setting(250, low=1)
    """Updates between copies of the online into the target network."""
    epsilon: Schedule = setting(((0, 1.0), (10_000, 0.05)), low=0)
    """Knots (env steps, probability of a random action), linear between, constant after."""

    def check(self) -> None:
        """Knots must be sorted, probabilities at most 1, and something must be learned."""
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


class QNetwork(nn.Module):
    """Action values of an observation."""

    def __init__(self, env_spec: EnvSpec, settings: DQNSettings) -> None:
        """Build the network.

        Args:
            env_spec: fixes inputs and the number of actions.
            settings: ``hidden`` and ``dueling``.
        """
        super().__init__()
        num_actions = env_spec.action.categories[0]
        self.encoder = FlatEncoder(env_spec.observation)
        self.torso = MLP(self.encoder.size, settings.hidden)
        head = DuelingHead if settings.dueling else nn.Linear
        self.head = head(self.torso.size, num_actions)

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        """``[B, A]`` from tensors ``[B, ...]``."""
        dtype = next(self.parameters()).dtype
        values: Tensor = self.head(self.torso(self.encoder(observation, dtype)))
        return values


class EpsilonGreedyPolicy:
    """The best action by a copy of the online network; a random one with probability epsilon."""

    def __init__(self, network: QNetwork, num_actions: int, greedy: bool) -> None:
        """Act with ``network`` once `load` has filled it.

        Args:
            network: on the CPU.
            num_actions: ``A``.
            greedy: never act at random.
        """
        self._network = network.requires_grad_(False)
        self._parameters = dict(network.state_dict(keep_vars=True))
        self._num_actions = num_actions
        self._greedy = greedy
        self._epsilon = 0.0

    def load(self, snapshot: Snapshot) -> None:
        """See `contracts.Policy`."""
        for name, parameter in self._parameters.items():
            parameter.copy_(torch.from_numpy(snapshot.arrays[name]))
        self._epsilon = 0.0 if self._greedy else snapshot.scalars["epsilon"]

    def act(self, observation: Observation, generator: np.random.Generator) -> Array:
        """See `contracts.Policy`; an independent coin for each stream."""
        with torch.inference_mode():
            values = self._network({k: torch.from_numpy(v) for k, v in observation.items()})
            action_B: Array = values.argmax(1).numpy()
        if self._epsilon > 0:
            explores_B = generator.random(len(action_B)) < self._epsilon
            random_B = generator.integers(self._num_actions, size=len(action_B))
            action_B = np.where(explores_B, random_B, action_B)
        return action_B


@dataclass(frozen=True)
class PolicyRecipe:
    """Makes an `EpsilonGreedyPolicy`; it travels to workers."""

    settings: DQNSettings

    def __call__(
        self, env_spec: EnvSpec, streams: Sequence[int], num_streams: int, greedy: bool
    ) -> EpsilonGreedyPolicy:
        """See `contracts.PolicyFactory`."""
        network = QNetwork(env_spec, self.settings)
        return EpsilonGreedyPolicy(network, env_spec.action.categories[0], greedy)


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
        if not env_spec.action.is_discrete:
            raise UnsupportedSpace(
                f"DQN needs a Discrete action space; {env_spec.name} has {env_spec.action_space}"
            )
        if not hasattr(self, "online"):
            self.online = QNetwork(env_spec, self.settings)
            self.target = QNetwork(env_spec, self.settings).requires_grad_(False)
            self.target.load_state_dict(self.online.state_dict())

    @property
    def sample_spec(self) -> SampleSpec:
        """See `contracts.Agent`."""
        s = self.settings
        return SampleSpec(s.batch_size, s.n_step, s.gamma, s.reward_clip)

    @property
    def scalars(self) -> dict[str, float]:
        """See `contracts.Agent`: the probability of a random action."""
        return {"epsilon": piecewise(self.settings.epsilon, self.current_step)}

    @property
    def learning_rate(self) -> float:
        """Of the optimiser now."""
        rate = self.settings.learning_rate
        return piecewise(rate, self.current_step) if isinstance(rate, tuple) else rate

    def policy_factory(self) -> PolicyRecipe:
        """See `contracts.Agent`."""
        return PolicyRecipe(self.settings)

    def snapshot(self, version: int) -> Snapshot:
        """See `contracts.Agent`."""
        arrays = {
            name: tensor.detach().to("cpu", torch.float32).numpy()
            for name, tensor in self.online.state_dict().items()
        }
        return Snapshot(version, arrays, self.scalars)

    def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """See `contracts.Agent`."""
        self._optimizer = torch.optim.Adam(
            self.online.parameters(), lr=self.learning_rate, eps=self.settings.adam_epsilon
        )
        return {"q": self._optimizer}

    def training_steps(self) -> dict[str, Callable[[Batch], StepOutput]]:
        """See `contracts.Agent`."""
        return {"q": self.q_training_step}

    def q_training_step(self, batch: Batch) -> StepOutput:
        """Huber loss of the temporal-difference error, weighted by importance.

        The target is ``r + discount * Q_target(s', argmax_a Q_online(s', a))`` (van Hasselt et al.
        2016, equation 4), or the maximum of ``Q_target`` where ``double`` is off.
        """
        q_B = self.online(batch.observation).gather(1, batch.action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_BA = self.target(batch.next_observation)
            chooser_BA = self.online(batch.next_observation) if self.settings.double else next_BA
            next_B = next_BA.gather(1, chooser_BA.argmax(1, keepdim=True)).squeeze(1)
            target_B = batch.reward + batch.discount * next_B
            error_B = (q_B - target_B).abs()
        loss_B = functional.smooth_l1_loss(q_B, target_B.to(q_B.dtype), reduction="none")
        loss = (batch.weight * loss_B).mean()
        metrics = {
            "loss": loss.detach(),
            "td_error": error_B.mean(),
            "value": q_B.detach().mean(),
            "target": target_B.mean(),
        }
        return StepOutput(loss, metrics, feedback={"priority": error_B})

    def after_step(self, name: str, updates: int) -> None:
        """See `contracts.Agent`."""
        for group in self._optimizer.param_groups if self._optimizer else []:
            group["lr"] = self.learning_rate
        if updates % self.settings.target_every_updates == 0:
            self.target.load_state_dict(self.online.state_dict())
