"""DreamerV3 (Hafner et al. 2025, "Mastering diverse control tasks through world models").

A world model (`actorlearner.agents.world_model`) learns from sequences; actor and critic, the
*controller*, learn from what it imagines. Rows of the replay are departures; the model speaks of
arrivals: what a row is arrived at by, the reward for that, and whether the episode ended there.

Shape suffixes: L rows of a sequence, B columns, K rows imagined from, N = K * B starts, H imagined
steps, A entries of an action vector, F features.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from actorlearner.agents import open_loop
from actorlearner.agents.world_model import (
    Head,
    ModelSize,
    RepresentationModel,
    State,
    WorldModel,
    divergences,
)
from actorlearner.config import Settings, setting
from actorlearner.contracts import (
    Array,
    ArraySpec,
    BadInput,
    EnvSpec,
    Observation,
    Report,
    SequenceBatch,
    SequenceSpec,
    SettingError,
    Snapshot,
    StepOutput,
    UnsupportedSpace,
)
from actorlearner.distributions import (
    ActionDistribution,
    BoundedNormal,
    Categoricals,
    Noise,
    NumPyNoise,
    TorchNoise,
    TwoHot,
    in_full,
)
from actorlearner.networks import Precision, autocast
from actorlearner.optim import LaProp, linear_warmup
from actorlearner.returns import lambda_return

UNITS = {
    "1M": 64, "12M": 256, "25M": 384, "50M": 512, "100M": 768, "200M": 1024, "400M": 1536,
}  # fmt: skip
"""Width of the hidden layers by the name of the size; all other widths follow from it."""

ACTOR_LAYERS = CRITIC_LAYERS = 3


@dataclass(frozen=True, kw_only=True)
class DreamerSettings(Settings):
    """Settings of the agent; the defaults are those of the paper's code, but for the size."""

    group = "agent"

    size: Literal["1M", "12M", "25M", "50M", "100M", "200M", "400M"] = "1M"
    """About how many parameters; what follows is null to go by it."""
    units: int | None = setting(None, low=1)
    """Width of the hidden layers; 64 for 1M, 256 for 12M, ... 1536 for 400M."""
    deterministic: int | None = setting(None, low=1)
    """Width of the recurrent state; null for 8 times the units of the size."""
    classes: int | None = setting(None, low=2, high=256)
    """Of each latent; null for a sixteenth of the units of the size."""
    image_depth: int | None = setting(None, low=1)
    """Channels of convolutions are multiples of it; null for a sixteenth of the units of the
    size."""
    latents: int = setting(32, low=1)
    """Categorical latents of a state."""
    blocks: int = setting(8, low=1)
    """That the recurrent core is made of."""
    batch_size: int = setting(16, low=1)
    """Sequences per update."""
    batch_length: int = setting(64, low=2)
    """Rows of each that are learned from."""
    learning_rate: float = setting(4e-5, low=0, live=True)
    """Of both optimisers, once they are warm."""
    controller_learning_rate: float | None = setting(None, low=0, live=True)
    """Of the controller's; null for the same."""
    warmup_updates: int = setting(1_000, low=0)
    """Updates over which learning rates rise from 0."""
    gradient_clip: float | None = setting(0.3, above=0)
    """Largest norm of each parameter's gradient, relative to its own; null does not clip."""
    momentum_decay: float = setting(0.9, low=0, below=1)
    """Of LaProp."""
    square_decay: float = setting(0.999, low=0, below=1)
    """Of LaProp's mean square."""
    precision: Precision = "float32"
    """Of matrix products in learning; parameters, states and losses stay in float32."""
    uniform_share: float = setting(0.01, low=0, below=1)
    """Of the uniform distribution in every categorical: latents and actions."""
    free_nats: float = setting(1.0, low=0)
    """A divergence of posterior and prior below this is as good as none."""
    dynamics_scale: float = setting(1.0, low=0)
    """Of the divergence that moves the prior."""
    representation_scale: float = setting(0.1, low=0)
    """Of the divergence that moves the posterior."""
    horizon: float = setting(333.0, above=1)
    """Env steps that rewards count for: the discount is ``1 - 1 / horizon``."""
    imagination_length: int = setting(15, low=1)
    """Steps imagined."""
    imagine_last: int | None = setting(None, low=2)
    """Imagine from so many rows of each sequence, the last ones; null for all."""
    return_lambda: float = setting(0.95, low=0, high=1)
    """How much the steps after each count in a return, against the value."""
    entropy_scale: float = setting(3e-4, low=0, live=True)
    """Of the actor's entropy."""
    deviations: tuple[float, float] = setting((0.1, 1.0), above=0)
    """Of continuous actions, the lowest and the highest."""
    return_percentiles: tuple[float, float] = setting((0.05, 0.95), low=0, high=1)
    """Advantages are divided by the distance of these two of the returns ..."""
    return_scale_rate: float = setting(0.01, above=0, high=1)
    """... which moves this share of the way in every update ..."""
    smallest_return_scale: float = setting(1.0, above=0)
    """... and is at least this."""
    slow_critic_rate: float = setting(0.02, above=0, high=1)
    """The slow critic moves this share of the way to the critic after every update."""
    slow_critic_scale: float = setting(1.0, low=0)
    """Of the loss that holds the critic near the slow one."""
    replay_value_scale: float = setting(0.3, low=0)
    """Of the critic's loss on replayed rows."""
    open_loop_films: int = setting(3, low=0)
    """Sequences in the film of open-loop predictions that is made with every evaluation; 0 for no
    film."""

    def check(self) -> None:
        """Blocks must divide what they are made of; ranges are sorted; starts must be there."""
        size = self.model_size
        for name, width in (
            ("deterministic", size.deterministic),
            ("image_depth", 4 * size.image_depth),
        ):
            if width % self.blocks:
                raise SettingError(
                    f"{self.key('blocks')}={self.blocks}: must divide "
                    f"{'4 * ' * (name == 'image_depth')}{self.key(name)}, which is {width}"
                )
        for name in ("deviations", "return_percentiles"):
            low, high = getattr(self, name)
            if not low < high < math.inf:
                raise SettingError(
                    f"{self.key(name)}={[low, high]}: the lower one must come first, both finite"
                )
        if (self.imagine_last or 0) > self.batch_length:
            raise SettingError(
                f"{self.key('imagine_last')}={self.imagine_last}: must be at most "
                f"{self.key('batch_length')}, which is {self.batch_length}"
            )

    @property
    def model_size(self) -> ModelSize:
        """All widths."""
        units = UNITS[self.size]
        return ModelSize(
            deterministic=self.deterministic or 8 * units,
            units=self.units or units,
            latents=self.latents,
            classes=self.classes or units // 16,
            blocks=self.blocks,
            image_depth=self.image_depth or units // 16,
        )


class Actions(nn.Module):
    """Actions of a spec as vectors: one-hot categories, or numbers within ±1.

    Attributes:
        size: ``A``.
        outputs: numbers that an actor gives for a distribution of them.
    """

    low: Tensor
    high: Tensor

    def __init__(self, env_spec: EnvSpec, settings: DreamerSettings) -> None:
        """Look at the action of ``env_spec``.

        Raises:
            UnsupportedSpace: it is a Box without finite bounds.
        """
        super().__init__()
        self._spec = spec = env_spec.action
        self._settings = settings
        is_bounded = bool(spec.low) and all(map(math.isfinite, (*spec.low, *spec.high)))
        if not (spec.categories or is_bounded):
            raise UnsupportedSpace(
                f"Dreamer needs actions with finite bounds; {env_spec.name} has "
                f"{env_spec.action_space or spec}. A wrapper can give them: "
                "gymnasium.wrappers.RescaleAction"
            )
        self.register_buffer("low", torch.tensor(spec.low), persistent=False)
        self.register_buffer("high", torch.tensor(spec.high), persistent=False)
        self.size = sum(spec.categories) or math.prod(spec.shape)
        self.outputs = self.size if spec.categories else 2 * self.size

    def vector(self, action: Tensor) -> Tensor:
        """``[..., A]`` of actions ``[..., *shape]``, as stored."""
        spec = self._spec
        flat = action.flatten(-len(spec.shape)) if spec.shape else action.unsqueeze(-1)
        if spec.categories:
            parts = zip(flat.long().unbind(-1), spec.categories, strict=True)
            return torch.cat([functional.one_hot(part, count) for part, count in parts], -1).float()
        # An entry that has no choice is of no account.
        return 2 * (flat.float() - self.low) / (self.high - self.low).clamp(min=1e-6) - 1

    def native(self, vector: NDArray[np.float32]) -> Array:
        """Actions ``[B, *shape]`` in the dtype of the spec, of vectors ``[B, A]``."""
        spec = self._spec
        if spec.categories:
            ends = np.cumsum(spec.categories)[:-1]
            parts = [part.argmax(1) for part in np.split(vector, ends, 1)]
            return np.stack(parts, 1).reshape(len(vector), *spec.shape).astype(spec.dtype)
        low, high = self.low.numpy(), self.high.numpy()
        scaled: Array = (low + (vector.clip(-1, 1) + 1) / 2 * (high - low)).clip(low, high)
        if np.dtype(spec.dtype).kind != "f":
            scaled = scaled.round()
        return scaled.reshape(len(vector), *spec.shape).astype(spec.dtype)

    def distribution(self, outputs: Tensor) -> ActionDistribution:
        """Of vectors, from the actor's outputs ``[..., outputs]``."""
        s = self._settings
        if self._spec.categories:
            return Categoricals(outputs, self._spec.categories, s.uniform_share)
        return BoundedNormal(outputs, s.deviations)


def _actor(actions: Actions, size: ModelSize) -> Head:
    return Head(size.features, ACTOR_LAYERS, size.units, actions.outputs, scale=0.01)


# ------------------------------------------------------------------------------------ acting


def latent_specs(size: ModelSize) -> dict[str, ArraySpec]:
    """What is stored of a state: bfloat16 as the bits of int16, which NumPy knows, and classes."""
    return {
        "deterministic": ArraySpec((size.deterministic,), "int16"),
        "stochastic": ArraySpec((size.latents,), "uint8"),
    }


def packed(state: State) -> dict[str, Tensor]:
    """A state as in `latent_specs`."""
    return {
        "deterministic": state.deterministic.to(torch.bfloat16).view(torch.int16),
        "stochastic": state.stochastic.argmax(-1).to(torch.uint8),
    }


def unpacked(latents: Mapping[str, Tensor], classes: int, dtype: torch.dtype) -> State:
    """The state that `packed` made ``latents`` of, in ``dtype``."""
    return State(
        latents["deterministic"].view(torch.bfloat16).to(dtype),
        functional.one_hot(latents["stochastic"].long(), classes).to(dtype),
    )


class DreamerPolicy:
    """Follows the episodes of its columns by a copy of the representation model, and acts.

    It draws latents from the posterior, and actions from the actor. A greedy one takes the most
    probable action (of a continuous one the mean), and where it gets no generator also the most
    probable latents.
    """

    def __init__(
        self, representation: RepresentationModel, actor: Head, actions: Actions, greedy: bool
    ) -> None:
        """Act once `load` has filled the networks.

        Args:
            representation: on the CPU.
            actor: on the CPU.
            actions: what the actor's outputs stand for.
            greedy: take the most probable action.
        """
        self._networks = nn.ModuleDict({"representation": representation, "actor": actor})
        self._networks.requires_grad_(False)
        self._parameters = dict(self._networks.state_dict(keep_vars=True))
        self._representation, self._actor = representation, actor
        self._actions, self._greedy = actions, greedy
        self._begin(0)

    def _begin(self, columns: int) -> None:
        self._state = self._representation.initial(columns)
        self._action = torch.zeros(columns, self._actions.size)

    def load(self, snapshot: Snapshot) -> None:
        """See `contracts.Policy`."""
        for name, parameter in self._parameters.items():
            parameter.copy_(torch.from_numpy(snapshot.arrays[name]))

    def reset(self, first: NDArray[np.bool_]) -> None:
        """See `contracts.RecurrentPolicy`."""
        if len(first) != len(self._action):
            self._begin(len(first))
        elif first.any():
            mask = torch.from_numpy(first)
            for tensor in (*self._state, self._action):
                tensor[mask] = 0

    def state(self) -> dict[str, Array]:
        """See `contracts.RecurrentPolicy`: not rounded, unlike what is stored of every row."""
        return {
            "deterministic": self._state.deterministic.numpy(),
            "stochastic": self._state.stochastic.numpy(),
            "action": self._action.numpy(),
        }

    def set_state(self, state: Mapping[str, Array]) -> None:
        """See `contracts.RecurrentPolicy`."""
        copied = {name: torch.from_numpy(array.copy()) for name, array in state.items()}
        self._state = State(copied["deterministic"], copied["stochastic"])
        self._action = copied["action"]

    @torch.no_grad()
    def act(
        self, observation: Observation, generator: np.random.Generator | None
    ) -> tuple[Array, dict[str, Array]]:
        """See `contracts.Policy`; notes the new state, as stored."""
        noise = None if generator is None else NumPyNoise(generator)
        seen = {key: torch.from_numpy(array) for key, array in observation.items()}
        tokens = self._representation.encoder(seen)
        if len(tokens) != len(self._action):
            self._begin(len(tokens))
        self._state, _ = self._representation.observe(self._state, self._action, tokens, noise)
        distribution = self._actions.distribution(self._actor(self._state.features))
        self._action = distribution.sample(None if self._greedy else noise)
        noted = {name: tensor.numpy() for name, tensor in packed(self._state).items()}
        return self._actions.native(self._action.numpy()), noted


@dataclass(frozen=True)
class PolicyRecipe:
    """Makes a `DreamerPolicy`; it travels to workers."""

    settings: DreamerSettings
    num_actions: int

    @property
    def extras_spec(self) -> dict[str, ArraySpec]:
        """See `contracts.PolicyFactory`."""
        return latent_specs(self.settings.model_size)

    @property
    def state_spec(self) -> dict[str, ArraySpec]:
        """See `contracts.RecurrentPolicyFactory`."""
        size = self.settings.model_size
        return {
            "deterministic": ArraySpec((size.deterministic,), "float32"),
            "stochastic": ArraySpec((size.latents, size.classes), "float32"),
            "action": ArraySpec((self.num_actions,), "float32"),
        }

    def __call__(
        self, env_spec: EnvSpec, streams: Sequence[int], num_streams: int, greedy: bool
    ) -> DreamerPolicy:
        """See `contracts.PolicyFactory`."""
        s = self.settings
        actions, size = Actions(env_spec, s), s.model_size
        representation = RepresentationModel(
            env_spec.observation, actions.size, size, s.uniform_share
        )
        return DreamerPolicy(representation, _actor(actions, size), actions, greedy)


# ---------------------------------------------------------------------------------- learning


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What the rows that are learned from were arrived at with; nothing where an episode begins.

    Attributes:
        action: vectors ``[L, B, A]``.
        reward: ``[L, B]``.
        terminal: bool ``[L, B]``: the episode, or a life, truly ended there.
        first: bool ``[L, B]``: an episode begins there.
        last: bool ``[L, B]``: the next row is of another episode.
    """

    action: Tensor
    reward: Tensor
    terminal: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, batch: SequenceBatch, actions: Actions) -> Arrivals:
        """Shift departures by a row."""
        first = batch.first[1:]
        return cls(
            action=actions.vector(batch.action[:-1]) * ~first.unsqueeze(-1),
            reward=batch.reward[:-1] * ~first,
            terminal=batch.terminated[:-1] & ~first,
            first=first,
            last=~batch.valid[1:],
        )


@dataclass(frozen=True, slots=True)
class Valued:
    """States and what the critic should say of them; no gradient leads out.

    Attributes:
        features: ``[T, N, F]``.
        target: ``[T, N]``: returns.
        slow: ``[T, N]``: values of the slow critic.
        weight: ``[T, N]``: how much each counts.
    """

    features: Tensor
    target: Tensor
    slow: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True)
class Imagined:
    """What the controller learns from.

    Attributes:
        dreamt: imagined states, ``T`` is ``H``.
        action: ``[H, N, A]``, taken there.
        value: ``[H, N]`` of the critic, against which actions are judged.
        replayed: replayed states, ``T`` is ``K - 1``, ``N`` is ``B``.
    """

    dreamt: Valued
    action: Tensor
    value: Tensor
    replayed: Valued


class ReturnScale(nn.Module):
    """How far returns spread: a moving average of the distance of two percentiles.

    Hafner et al. 2025, equation 7. The averages start at 0; returns that are not finite leave them
    as they are.
    """

    low: Tensor
    high: Tensor

    def __init__(self, settings: DreamerSettings) -> None:
        """Start at 0."""
        super().__init__()
        self._settings = settings
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    def forward(self, returns: Tensor) -> Tensor:
        """Take in ``returns`` of any shape; the scale then, a scalar."""
        s = self._settings
        ordered = in_full(returns.detach()).flatten().sort().values
        for average, level in zip((self.low, self.high), s.return_percentiles, strict=True):
            place = level * (len(ordered) - 1)
            below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
            percentile = below.lerp(above, place % 1)
            moved = average.lerp(percentile.to(average.dtype), s.return_scale_rate)
            average.copy_(moved.where(moved.isfinite(), average))
        return (self.high - self.low).clamp(min=s.smallest_return_scale)


class Dreamer(nn.Module):
    """Learns a world model from sequences, and to act by imagining in it.

    Attributes:
        settings: see `DreamerSettings`.
        current_step: env steps so far; set by the Trainer.
        world: the world model.
        actor: what to do in a state.
        critic: what a state is worth, as logits of `TwoHot`.
        slow_critic: a moving average of it.
        return_scale: what advantages are divided by.
    """

    def __init__(self, **settings: Any) -> None:
        """Networks come with `build`.

        Args:
            settings: see `DreamerSettings`.
        """
        super().__init__()
        self.settings = DreamerSettings.make(settings)
        self.current_step = 0
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    def build(self, env_spec: EnvSpec) -> None:
        """See `contracts.Agent`."""
        if hasattr(self, "world"):
            return
        s, size = self.settings, self.settings.model_size
        self._actions = Actions(env_spec, s)
        self.two_hot = TwoHot()
        bins = self.two_hot.num_bins
        self.world = WorldModel(
            env_spec.observation, self._actions.size, size, s.uniform_share, bins
        )
        self.actor = _actor(self._actions, size)
        self.critic = Head(size.features, CRITIC_LAYERS, size.units, bins, scale=0)
        self.slow_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.return_scale = ReturnScale(s)

    @property
    def sample_spec(self) -> SequenceSpec:
        """See `contracts.Agent`."""
        s = self.settings
        return SequenceSpec(s.batch_size, s.batch_length, latent_specs(s.model_size))

    @property
    def scalars(self) -> dict[str, float]:
        """See `contracts.Agent`: none."""
        return {}

    def policy_factory(self, extras: Sequence[str] = ()) -> PolicyRecipe:
        """See `contracts.Agent`; its latents are always noted."""
        known = latent_specs(self.settings.model_size)
        for name in extras:
            if name not in known:
                raise BadInput(f"extras={name}: a Dreamer policy notes only {', '.join(known)}")
        return PolicyRecipe(self.settings, self._actions.size)

    def snapshot(self, version: int) -> Snapshot:
        """See `contracts.Agent`: what acting needs, without prior, decoder, heads and critic."""
        networks = {"representation": self.world.representation, "actor": self.actor}
        arrays = {
            f"{part}.{name}": tensor.detach().to("cpu", torch.float32).numpy()
            for part, network in networks.items()
            for name, tensor in network.state_dict().items()
        }
        return Snapshot(version, arrays)

    def change(self, values: Mapping[str, Any]) -> None:
        """See `contracts.Agent`."""
        self.settings = self.settings.changed(values)

    @torch.no_grad()
    def report(self, batch: SequenceBatch) -> Report:
        """See `contracts.ReportingAgent`: how well the model predicts without seeing.

        Of each sequence it sees the first rows, `open_loop.CONTEXT` or half of them if that is
        less; of the rest it knows only the actions, and where an episode begins.

        Returns:
            ``world/open_loop_error``, the loss of what is decoded then, as in
            ``world/observation_loss``, and a film of each key of the observation.
        """
        device, world, s = batch.reward.device, self.world, self.settings
        arrived = Arrivals.of(batch, self._actions)
        observation = {key: array[1:] for key, array in batch.observation.items()}
        latents = {name: array[0] for name, array in batch.extras.items()}
        dtype = next(world.parameters()).dtype
        context = min(open_loop.CONTEXT, s.batch_length // 2)
        states = world.predict_open_loop(
            unpacked(latents, s.model_size.classes, dtype),
            arrived.action.to(dtype),
            observation,
            arrived.first,
            context,
            TorchNoise(device, torch.Generator(device).manual_seed(0)),
        )
        unseen = State(*(part[context:].flatten(0, 1) for part in states))
        later = {key: array[context:].flatten(0, 1) for key, array in observation.items()}
        error = sum(float(loss.mean()) for loss in world.decoder.losses(unseen, later).values())
        films = {}
        if count := min(s.open_loop_films, s.batch_size):
            shown = State(*(part[:, :count].flatten(0, 1) for part in states))
            seen = {key: array[:, :count].flatten(0, 1) for key, array in observation.items()}
            for key, pair in world.decoder.compared(shown, seen).items():
                said, true = (part.unflatten(0, (-1, count)).cpu().numpy() for part in pair)
                films[f"world/open_loop_{key}"] = open_loop.film(true, said, context)
        return Report({"world/open_loop_error": error}, films)

    # ------------------------------------------------------------------------- optimisation

    def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """See `contracts.Agent`: one for the world model, one for actor and critic."""
        s = self.settings
        parameters = {
            "world": list(self.world.parameters()),
            "controller": [*self.actor.parameters(), *self.critic.parameters()],
        }
        self._optimizers = {
            name: LaProp(
                those,
                lr=self._learning_rate(name, 0),
                betas=(s.momentum_decay, s.square_decay),
                clip=s.gradient_clip,
            )
            for name, those in parameters.items()
        }
        return self._optimizers

    def _learning_rate(self, name: str, updates: int) -> float:
        """Of optimiser ``name`` for the update after so many."""
        s = self.settings
        rate = s.learning_rate
        if name == "controller" and s.controller_learning_rate is not None:
            rate = s.controller_learning_rate
        return linear_warmup(rate, updates, s.warmup_updates)

    def training_steps(self) -> dict[str, Callable[[Any], StepOutput]]:
        """See `contracts.Agent`."""
        return {
            "world": self.world_training_step,
            "controller": self.controller_training_step,
        }

    def after_step(self, name: str, updates: int) -> None:
        """See `contracts.Agent`: warm up, and move the slow critic."""
        if name in self._optimizers:
            for group in self._optimizers[name].param_groups:
                group["lr"] = self._learning_rate(name, updates)
        if name == "controller":
            with torch.no_grad():
                for slow, fast in zip(
                    self.slow_critic.parameters(), self.critic.parameters(), strict=True
                ):
                    slow.lerp_(fast, self.settings.slow_critic_rate)

    # ----------------------------------------------------------------------- training steps

    def world_training_step(self, batch: SequenceBatch) -> StepOutput:
        """Learn what comes next; then imagine, for the controller's step (`Imagined`).

        The loss is that of observation, reward and continuation (Hafner et al. 2025, equations 3
        and 4), of the `divergences`, and of the critic on replayed states, whose own parameters
        are taken as constants here. Imagination uses the parameters as they are before this update,
        as if both steps were one.
        """
        with autocast(self.settings.precision, batch.reward.device):
            return self._learn_world(batch)

    def _learn_world(self, batch: SequenceBatch) -> StepOutput:
        s, world = self.settings, self.world
        noise = TorchNoise(batch.reward.device)
        arrived = Arrivals.of(batch, self._actions)
        observation = {key: array[1:] for key, array in batch.observation.items()}
        context = {name: array[0] for name, array in batch.extras.items()}
        dtype = next(world.parameters()).dtype
        start = unpacked(context, s.model_size.classes, dtype)
        states, posterior = world.unroll(
            start, arrived.action.to(dtype), observation, arrived.first, noise
        )
        features_LBF = states.features
        prior = world.predict(states)
        losses = self._prediction_losses(states, features_LBF, observation, arrived)
        kept = divergences(posterior, prior, s.free_nats)
        with torch.no_grad():
            imagined = self._imagine(states, features_LBF, arrived, noise)
        constants = {name: value.detach() for name, value in self.critic.named_parameters()}
        rows = slice(-len(imagined.replayed.target) - 1, -1)
        logits = functional_call(self.critic, constants, (features_LBF[rows],))
        replay_value = self._critic_loss(logits, imagined.replayed)
        losses["dynamics"] = s.dynamics_scale * kept["dynamics"].mean()
        losses["representation"] = s.representation_scale * kept["representation"].mean()
        losses["replay_value"] = s.replay_value_scale * replay_value
        loss = torch.stack(list(losses.values())).sum()
        metrics = {
            "loss": loss.detach(),
            **{f"{name}_loss": value.detach() for name, value in losses.items()},
            "posterior_entropy": posterior.entropy().detach().sum(-1).mean(),
            "prior_entropy": prior.entropy().detach().sum(-1).mean(),
        }
        fresh = packed(states.detach())
        # The context row keeps what it came with.
        feedback = {name: torch.cat([context[name][None], fresh[name]]) for name in fresh}
        return StepOutput(loss, metrics, feedback, imagined)

    def _prediction_losses(
        self,
        states: State,
        features_LBF: Tensor,
        observation: Mapping[str, Tensor],
        arrived: Arrivals,
    ) -> dict[str, Tensor]:
        """Of observation, reward and continuation: scalars, means over rows."""
        world = self.world
        flat_state = State(*(part.flatten(0, 1) for part in states))
        flat_observation = {key: array.flatten(0, 1) for key, array in observation.items()}
        of_keys = world.decoder.losses(flat_state, flat_observation)
        goes_on = in_full(world.continuation(features_LBF)).squeeze(-1)
        # The discount is part of what is predicted, so that imagination needs no other.
        discount = (~arrived.terminal).to(goes_on.dtype) * (1 - 1 / self.settings.horizon)
        return {
            "observation": torch.stack([loss_N.mean() for loss_N in of_keys.values()]).sum(),
            "reward": self.two_hot.loss(world.reward(features_LBF), arrived.reward).mean(),
            "continue": functional.binary_cross_entropy_with_logits(goes_on, discount),
        }

    def _imagine(
        self, states: State, features_LBF: Tensor, arrived: Arrivals, noise: Noise
    ) -> Imagined:
        """Imagine from the last rows, and tell the critic's targets, imagined and replayed."""
        s, world = self.settings, self.world
        count = s.imagine_last or len(features_LBF)
        last = State(*(part[-count:].flatten(0, 1) for part in states))

        def act(features: Tensor) -> Tensor:
            return self._actions.distribution(self.actor(features)).sample(noise)

        features, action = world.imagine(last, act, s.imagination_length, noise)
        discount = in_full(world.continuation(features)).squeeze(-1).sigmoid()
        reward = self.two_hot.mean(world.reward(features))
        value = self.two_hot.mean(self.critic(features))
        target = lambda_return(reward[1:], discount[1:], value[1:], s.return_lambda)
        dreamt = Valued(
            features[:-1],
            target,
            self.two_hot.mean(self.slow_critic(features[:-1])),
            # A state counts as far as it is likely to be reached; the first one, if it is no end.
            discount.cumprod(0)[:-1],
        )
        # Replayed returns bootstrap from the return imagined in each state.
        bootstrap_KB = target[0].unflatten(0, (count, -1))
        rows = slice(-count, None)
        discount_KB = (~arrived.terminal[rows]).to(target.dtype) * (1 - 1 / s.horizon)
        lambda_KB = (~arrived.last[rows]).to(target.dtype) * s.return_lambda
        replayed_target = lambda_return(
            arrived.reward[rows][1:], discount_KB[1:], bootstrap_KB[1:], lambda_KB[1:]
        )
        replayed_features = features_LBF[rows][:-1].detach()
        replayed = Valued(
            replayed_features,
            replayed_target,
            self.two_hot.mean(self.slow_critic(replayed_features)),
            (~arrived.last[rows][:-1]).to(target.dtype),
        )
        return Imagined(dreamt, action, value[:-1], replayed)

    def _critic_loss(self, logits: Tensor, valued: Valued) -> Tensor:
        """Cross-entropy with returns and with the slow critic's values: a weighted mean."""
        s = self.settings
        targets = torch.stack([valued.target, valued.slow], -1)
        loss, near_slow = self.two_hot.losses(logits, targets).unbind(-1)
        return (valued.weight * (loss + s.slow_critic_scale * near_slow)).mean()

    def controller_training_step(self, carry: Imagined) -> StepOutput:
        """Learn to act, and what states are worth, from what was imagined and replayed.

        The actor follows the policy gradient of the advantage, the return against the critic's
        value, over the `ReturnScale` (Hafner et al. 2025, equation 6, for all kinds of actions).
        """
        with autocast(self.settings.precision, carry.value.device):
            return self._learn_controller(carry)

    def _learn_controller(self, carry: Imagined) -> StepOutput:
        s, dreamt = self.settings, carry.dreamt
        scale = self.return_scale(dreamt.target)
        advantage = (dreamt.target - carry.value) / scale
        distribution = self._actions.distribution(self.actor(dreamt.features))
        entropy = distribution.entropy()
        gain = distribution.log_prob(carry.action) * advantage + s.entropy_scale * entropy
        actor_loss = -(dreamt.weight * gain).mean()
        critic_loss = self._critic_loss(self.critic(dreamt.features), dreamt)
        replay_loss = self._critic_loss(self.critic(carry.replayed.features), carry.replayed)
        loss = actor_loss + critic_loss + s.replay_value_scale * replay_loss
        metrics = {
            "loss": loss.detach(),
            "actor_loss": actor_loss.detach(),
            "critic_loss": critic_loss.detach(),
            "replay_value_loss": s.replay_value_scale * replay_loss.detach(),
            "entropy": entropy.detach().mean(),
            "return": dreamt.target.mean(),
            "value": carry.value.mean(),
            "advantage": advantage.abs().mean(),
            "return_scale": scale.clone(),
            "weight": dreamt.weight.mean(),
        }
        return StepOutput(loss, metrics)
