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
from actorlearner.networks import MLP, DuelingHead, Encoder, Torso
from actorlearner.schedules import check_knots, piecewise

Schedule: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class DQNSettings(Settings):
    """Settings of the agent; the defaults suit small vector observations."""

    group = "agent"

    learning_rate: float | Schedule = setting(1e-3, low=0, live=True)
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
    torso: Torso = "auto"
    """Of images: auto, mlp, nature, minatar; auto goes by their size."""
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
        """Knots must be sorted, probabilities at most 1, and something must be learned."""
        if self.dueling_hidden is not None and not self.dueling:
            raise SettingError(f"{self.key('dueling_hidden')}={self.dueling_hidden}: needs dueling")
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
    """Action values of an observation."""

    def __init__(self, env_spec: EnvSpec, settings: DQNSettings) -> None:
        """Build the network.

        Args:
            env_spec: fixes inputs and the number of actions.
            settings: ``torso``, ``hidden``, ``dueling`` and ``dueling_hidden``.

        Raises:
            UnsupportedSpace: the observation does not suit ``torso``.
        """
        super().__init__()
        num_actions = env_spec.action.categories[0]
        self.encoder = Encoder(env_spec.observation, settings.torso)
        self.hidden = MLP(self.encoder.size, settings.hidden)
        self.head: nn.Module
        if settings.dueling:
            stream = () if settings.dueling_hidden is None else (settings.dueling_hidden,)
            self.head = DuelingHead(self.hidden.size, num_actions, stream)
        else:
            self.head = nn.Linear(self.hidden.size, num_actions)

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        """``[B, A]`` from tensors ``[B, *stacked_shape]``."""
        dtype = next(self.parameters()).dtype
        values: Tensor = self.head(self.hidden(self.encoder(observation, dtype)))
        return values


class EpsilonGreedyPolicy:
    """The best action by a copy of the online network; a random one with probability epsilon."""

    EXTRAS = ("action_value", "greedy_value")
    """What it can note of each row: the value of the action taken, and the highest of any."""

    def __init__(
        self,
        network: QNetwork,
        num_actions: int,
        epsilon: float | Array | None,
        extras: Sequence[str] = (),
    ) -> None:
        """Act with ``network`` once `load` has filled it.

        Args:
            network: on the CPU.
            num_actions: ``A``.
            epsilon: of all streams, or of each (``[B]``); None takes that of each snapshot.
            extras: those of `EXTRAS` that are asked for.
        """
        self._network = network.requires_grad_(False)
        self._parameters = dict(network.state_dict(keep_vars=True))
        self._num_actions = num_actions
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
        self, observation: Observation, generator: np.random.Generator
    ) -> tuple[Array, dict[str, Array]]:
        """See `contracts.Policy`; an independent coin for each stream."""
        with torch.inference_mode():
            values = self._network({k: torch.from_numpy(v) for k, v in observation.items()})
            values_BA: Array = values.numpy()
        action_B: Array = values_BA.argmax(1)
        if np.any(self._epsilon):
            explores_B = generator.random(len(action_B)) < self._epsilon
            random_B = generator.integers(self._num_actions, size=len(action_B))
            action_B = np.where(explores_B, random_B, action_B)
        if not self._extras:
            return action_B, {}
        noted = {
            "action_value": np.take_along_axis(values_BA, action_B[:, None], 1)[:, 0],
            "greedy_value": values_BA.max(1),
        }
        return action_B, {name: noted[name] for name in self._extras}


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
        return EpsilonGreedyPolicy(network, env_spec.action.categories[0], epsilon, self.extras)


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
