"""The world model of DreamerV3 (Hafner et al. 2025): what was, is, and might come.

A *state* has a deterministic part, which a recurrent core carries on, and a stochastic one: a few
categorical *latents*. The *posterior* knows the observation of the state, the *prior* does not.

Shape suffixes: L rows of a sequence, B columns, N states, H imagined steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from actorlearner.contracts import ArraySpec
from actorlearner.distributions import Categorical, Noise, in_full, symlog
from actorlearner.networks import (
    BlockLinear,
    NormedMLP,
    RMSNorm,
    channels_first,
    image_shape,
    is_image,
    scaled_convolution,
    scaled_linear,
)

IMAGE_KERNEL = 5
IMAGE_CHANNELS = (2, 3, 4, 4)
"""Of each convolution, in multiples of ``image_depth``; an image of fewer has the last ones."""
SMALLEST_IMAGE_SIDE = 5
"""Pixels; a smaller image is taken as a vector."""
SMALLEST_HALVED_SIDE = 16
"""Pixels; a smaller image keeps its sides: in a small grid every place counts."""
SMALLEST_GRID_SIDE = 4
VECTOR_LAYERS = 3
PRIOR_LAYERS = 2


@dataclass(frozen=True, slots=True)
class ModelSize:
    """How large it all is.

    Attributes:
        deterministic: width of the deterministic part of a state.
        units: width of every hidden layer.
        latents: of a state.
        classes: of a latent.
        blocks: that the core is made of; it divides ``deterministic`` and ``4 * image_depth``.
        image_depth: channels of images are multiples of it.
    """

    deterministic: int
    units: int
    latents: int
    classes: int
    blocks: int
    image_depth: int

    @property
    def stochastic(self) -> int:
        """Width of the stochastic part of a state."""
        return self.latents * self.classes

    @property
    def features(self) -> int:
        """Width of a state as one vector."""
        return self.deterministic + self.stochastic


class State(NamedTuple):
    """One state or many.

    Attributes:
        deterministic: ``[..., deterministic]``.
        stochastic: one-hot ``[..., latents, classes]``.
    """

    deterministic: Tensor
    stochastic: Tensor

    @property
    def features(self) -> Tensor:
        """Both as one vector, ``[..., features]``."""
        return torch.cat([self.deterministic, self.stochastic.flatten(-2)], -1)

    def detach(self) -> State:
        """Without a gradient."""
        return State(self.deterministic.detach(), self.stochastic.detach())


class Head(nn.Sequential):
    """An MLP with a linear layer at its end, whose weights begin ``scale`` times the usual."""

    def __init__(
        self, inputs: int, layers: int, units: int, outputs: int, scale: float = 1.0
    ) -> None:
        mlp = NormedMLP(inputs, [units] * layers)
        super().__init__(*mlp, scaled_linear(mlp.size, outputs, scale))


# ------------------------------------------------------------------------------- observations


def sees_images(spec: ArraySpec) -> bool:
    """Whether ``spec`` goes through convolutions."""
    return is_image(spec) and min(image_shape(spec)[1:]) >= SMALLEST_IMAGE_SIDE


def _vector(spec: ArraySpec, observation: Tensor) -> Tensor:
    """``[N, size]`` of ``[N, *stacked_shape]``: one-hot categories, or symlog of numbers."""
    flat = observation.reshape(len(observation), -1)
    if not spec.categories:
        return symlog(in_full(flat))
    parts = zip(flat.long().unbind(1), spec.stack * spec.categories, strict=True)
    return torch.cat([functional.one_hot(part, count) for part, count in parts], 1).float()


def _vector_size(spec: ArraySpec) -> int:
    return sum(spec.stack * spec.categories) or math.prod(spec.stacked_shape)


def _pixels(spec: ArraySpec, image: Tensor) -> Tensor:
    """``[N, C, H, W]`` within ``[0, 1]`` of ``[N, *stacked_shape]``."""
    if len(spec.shape) == 3 and not channels_first(spec):
        image = image.movedim(-1, -3)
    pixels = image.reshape(-1, *image_shape(spec)).float()
    return pixels / 255 if spec.dtype == "uint8" else pixels


class ImagePlan(NamedTuple):
    """What becomes of an image, and in reverse order how it comes back.

    Attributes:
        channels: of each convolution.
        sides: ``(height, width)`` at first, and behind each convolution.
    """

    channels: tuple[int, ...]
    sides: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, spec: ArraySpec, depth: int) -> ImagePlan:
        """Halve the sides up to four times, but not below `SMALLEST_GRID_SIDE`."""
        sides = [image_shape(spec)[1:]]
        while min(sides[0]) >= SMALLEST_HALVED_SIDE and len(sides) <= len(IMAGE_CHANNELS):
            height, width = ((side + 1) // 2 for side in sides[-1])
            if min(height, width) < SMALLEST_GRID_SIDE:
                break
            sides.append((height, width))
        if len(sides) == 1:
            sides *= 2
        channels = tuple(depth * multiple for multiple in IMAGE_CHANNELS[1 - len(sides) :])
        return cls(channels, tuple(sides))


class ImageEncoder(nn.Module):
    """Convolutions, each halving the sides by a maximum, over one image key.

    Attributes:
        size: length of the flattened features.
    """

    def __init__(self, spec: ArraySpec, depth: int) -> None:
        """Encode images of ``spec``; channels are multiples of ``depth``."""
        super().__init__()
        self._spec = spec
        plan = ImagePlan.of(spec, depth)
        before = image_shape(spec)[0]
        layers: list[nn.Module] = []
        for channels, old, new in zip(plan.channels, plan.sides, plan.sides[1:], strict=False):
            layers.append(scaled_convolution(before, channels, IMAGE_KERNEL))
            if new != old:
                layers.append(nn.MaxPool2d(2, ceil_mode=True))
            layers += [RMSNorm(channels, axis=1), nn.SiLU()]
            before = channels
        self.layers = nn.Sequential(*layers)
        self.size = before * math.prod(plan.sides[-1])

    def forward(self, image: Tensor) -> Tensor:
        """``[N, size]`` of ``[N, *stacked_shape]``."""
        features: Tensor = self.layers(_pixels(self._spec, image) - 0.5)
        return features.flatten(1)


class ImageDecoder(nn.Module):
    """A grid of features from a state; it is doubled by repetition, each time with a convolution.

    The grid comes from the deterministic part by blocks and from the stochastic part by a small
    MLP, so that large states cost no huge layer.
    """

    def __init__(self, spec: ArraySpec, size: ModelSize) -> None:
        """Decode images of ``spec``."""
        super().__init__()
        self._plan = plan = ImagePlan.of(spec, size.image_depth)
        channels = plan.channels[-1]
        grid = channels * math.prod(plan.sides[-1])
        self.deterministic = BlockLinear(size.deterministic, grid, size.blocks)
        self.stochastic = Head(size.stochastic, 1, 2 * size.units, grid)
        self.norm = RMSNorm(channels, axis=1)
        after = [*plan.channels[-2::-1], image_shape(spec)[0]]
        self.convolutions = nn.ModuleList()
        self.norms = nn.ModuleList()
        for following in after:
            self.convolutions.append(scaled_convolution(channels, following, IMAGE_KERNEL))
            channels = following
        self.norms.extend(RMSNorm(channels, axis=1) for channels in after[:-1])

    def forward(self, state: State) -> Tensor:
        """Logits ``[N, C, H, W]`` of pixels within ``[0, 1]``."""
        sides = self._plan.sides
        grid = self.deterministic(state.deterministic) + self.stochastic(
            state.stochastic.flatten(-2)
        )
        image = functional.silu(self.norm(grid.unflatten(-1, (-1, *sides[-1]))))
        for layer, convolution in enumerate(self.convolutions):
            height, width = sides[-2 - layer]
            if (height, width) != sides[-1 - layer]:
                image = image.repeat_interleave(2, -1).repeat_interleave(2, -2)
                image = image[..., :height, :width]
            image = convolution(image)
            if layer < len(self.norms):
                image = functional.silu(self.norms[layer](image))
        return image


class ObservationEncoder(nn.Module):
    """Observations of any spec as one vector each: vectors through an MLP, images through theirs.

    Attributes:
        size: length of the vector.
    """

    def __init__(self, observation: Mapping[str, ArraySpec], size: ModelSize) -> None:
        """Encode arrays of these specs."""
        super().__init__()
        self._vectors = {k: spec for k, spec in observation.items() if not sees_images(spec)}
        self._images = [key for key, spec in observation.items() if sees_images(spec)]
        inputs = sum(map(_vector_size, self._vectors.values()))
        self.vector = NormedMLP(inputs, [size.units] * VECTOR_LAYERS) if self._vectors else None
        encoders = [ImageEncoder(observation[key], size.image_depth) for key in self._images]
        self.images = nn.ModuleList(encoders)
        self.size = (size.units if self._vectors else 0) + sum(e.size for e in encoders)

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        """``[N, size]`` of tensors ``[N, *stacked_shape]``."""
        encoded: list[Tensor] = []
        if self.vector is not None:
            vectors = [_vector(spec, observation[key]) for key, spec in self._vectors.items()]
            dtype = next(self.parameters()).dtype
            encoded.append(self.vector(torch.cat(vectors, 1).to(dtype)))
        for key, encoder in zip(self._images, self.images, strict=True):
            encoded.append(encoder(observation[key]))
        return torch.cat(encoded, 1)


class ObservationDecoder(nn.Module):
    """What a state looks like, and how far off that is."""

    def __init__(self, observation: Mapping[str, ArraySpec], size: ModelSize) -> None:
        """Decode to arrays of these specs."""
        super().__init__()
        self._specs = dict(observation)
        self._vectors = {k: spec for k, spec in observation.items() if not sees_images(spec)}
        self._images = [key for key, spec in observation.items() if sees_images(spec)]
        outputs = sum(map(_vector_size, self._vectors.values()))
        self.vector = Head(size.features, VECTOR_LAYERS, size.units, outputs) if outputs else None
        self.images = nn.ModuleList(ImageDecoder(observation[key], size) for key in self._images)

    def forward(self, state: State) -> dict[str, Tensor]:
        """Of each key: logits of pixels ``[N, C, H, W]``, or ``[N, size]``: logits or symlogs."""
        decoded: dict[str, Tensor] = {}
        if self.vector is not None:
            sizes = list(map(_vector_size, self._vectors.values()))
            parts = self.vector(state.features).split(sizes, -1)
            decoded.update(zip(self._vectors, parts, strict=True))
        for key, decoder in zip(self._images, self.images, strict=True):
            decoded[key] = decoder(state)
        return decoded

    def losses(self, state: State, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """How far each key is off, ``[N]``: summed over its entries, not averaged.

        Squared errors of symlog numbers and of uint8 pixels within ``[0, 1]``; cross-entropies of
        categories and of bool pixels.
        """
        return {
            key: self._loss(self._specs[key], in_full(decoded), observation[key])
            for key, decoded in self(state).items()
        }

    def compared(
        self, state: State, observation: Mapping[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """What is decoded beside what was, for people.

        Args:
            state: ``N`` of them.
            observation: each ``[N, *stacked_shape]``.

        Returns:
            Of each key both in the same numbers: pixels ``[N, C, H, W]`` within ``[0, 1]``, of a
            stack those of the newest frame, or ``[N, size]``: symlogs or probabilities.
        """
        shown: dict[str, tuple[Tensor, Tensor]] = {}
        for key, decoded in self(state).items():
            spec, numbers = self._specs[key], in_full(decoded)
            if sees_images(spec):
                newest = slice(-(image_shape(spec)[0] // spec.stack), None)
                truth = _pixels(spec, observation[key])[:, newest]
                shown[key] = numbers.sigmoid()[:, newest], truth
            else:
                if spec.categories:
                    parts = numbers.split(spec.stack * spec.categories, 1)
                    numbers = torch.cat([part.softmax(1) for part in parts], 1)
                shown[key] = numbers, _vector(spec, observation[key])
        return shown

    @staticmethod
    def _loss(spec: ArraySpec, decoded: Tensor, observation: Tensor) -> Tensor:
        if sees_images(spec):
            pixels = _pixels(spec, observation)
            if spec.dtype == "bool":
                error = functional.binary_cross_entropy_with_logits(
                    decoded, pixels, reduction="none"
                )
            else:
                error = (decoded.sigmoid() - pixels).square()
            return error.flatten(1).sum(1)
        target = _vector(spec, observation)
        if not spec.categories:
            return (decoded - target).square().sum(1)
        sizes = spec.stack * spec.categories
        parts = zip(decoded.split(sizes, 1), target.split(sizes, 1), strict=True)
        return torch.stack([-Categorical(part).log_prob(one_hot) for part, one_hot in parts]).sum(0)


# ---------------------------------------------------------------------------------- the model


class RecurrentCore(nn.Module):
    """Carries the deterministic part on: a gated recurrent unit whose large layers are of blocks.

    State and action are embedded by themselves; every block gets all three embeddings beside its
    own slice of the deterministic part.
    """

    def __init__(self, size: ModelSize, actions: int) -> None:
        """Build the layers; action vectors have ``actions`` entries."""
        super().__init__()
        units, wide, blocks = size.units, size.deterministic, size.blocks
        self._blocks = blocks
        self.embed_deterministic = NormedMLP(wide, [units])
        self.embed_stochastic = NormedMLP(size.stochastic, [units])
        self.embed_action = NormedMLP(actions, [units])
        self.hidden = BlockLinear(wide + 3 * units * blocks, wide, blocks)
        self.norm = RMSNorm(wide)
        self.gates = BlockLinear(wide, 3 * wide, blocks)

    def forward(self, state: State, action: Tensor) -> Tensor:
        """The next deterministic part, ``[..., deterministic]``, after ``action [..., A]``."""
        before = state.deterministic
        action = action / action.detach().abs().clamp(min=1)
        embedded = torch.cat(
            [
                self.embed_deterministic(before),
                self.embed_stochastic(state.stochastic.flatten(-2)),
                self.embed_action(action),
            ],
            -1,
        )
        shared = embedded.unsqueeze(-2).expand(*embedded.shape[:-1], self._blocks, -1)
        own = before.unflatten(-1, (self._blocks, -1))
        hidden = self.hidden(torch.cat([own, shared], -1).flatten(-2))
        gates = self.gates(functional.silu(self.norm(hidden)))
        reset, candidate, update = (
            gate.flatten(-2) for gate in gates.unflatten(-1, (self._blocks, 3, -1)).unbind(-2)
        )
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        update = torch.sigmoid(update - 1)  # the state is rather kept
        following: Tensor = update * candidate + (1 - update) * before
        return following


class RepresentationModel(nn.Module):
    """The part that follows an episode: from state, action and new observation to the new state.

    Acting needs no more of the world model than this.
    """

    def __init__(
        self,
        observation: Mapping[str, ArraySpec],
        actions: int,
        size: ModelSize,
        uniform_share: float,
    ) -> None:
        """Build the layers.

        Args:
            observation: one spec per key.
            actions: entries of an action vector.
            size: of everything.
            uniform_share: see `Categorical`.
        """
        super().__init__()
        self.size, self._uniform_share = size, uniform_share
        self.encoder = ObservationEncoder(observation, size)
        self.core = RecurrentCore(size, actions)
        inputs = size.deterministic + self.encoder.size
        self.posterior = Head(inputs, 1, size.units, size.stochastic)

    def latents(self, logits: Tensor) -> Categorical:
        """Logits ``[..., latents * classes]`` as a distribution of the stochastic part."""
        split = logits.unflatten(-1, (self.size.latents, self.size.classes))
        return Categorical(split, self._uniform_share)

    def initial(self, *columns: int) -> State:
        """Zeros: the state before an episode."""
        like, size = next(self.parameters()), self.size
        return State(
            like.new_zeros(*columns, size.deterministic),
            like.new_zeros(*columns, size.latents, size.classes),
        )

    def observe(
        self, state: State, action: Tensor, tokens: Tensor, noise: Noise | None
    ) -> tuple[State, Categorical]:
        """One step.

        Args:
            state: before it, each ``[B, ...]``; zeros where an episode begins.
            action: ``[B, A]`` that was taken there; zeros where an episode begins.
            tokens: ``[B, E]``, the encoded observation that came of it.
            noise: to sample latents by; None for the most probable.

        Returns:
            The state that knows the observation, and the posterior that it was sampled from.
        """
        deterministic = self.core(state, action)
        posterior = self.latents(self.posterior(torch.cat([deterministic, tokens], -1)))
        stochastic = posterior.straight_through_sample(noise).to(deterministic.dtype)
        return State(deterministic, stochastic), posterior


class WorldModel(nn.Module):
    """Predicts the next state, and of a state the observation, the reward and whether it goes on.

    Reward and continuation are those of arriving in a state.
    """

    def __init__(
        self,
        observation: Mapping[str, ArraySpec],
        actions: int,
        size: ModelSize,
        uniform_share: float,
        reward_outputs: int,
    ) -> None:
        """Build the networks.

        Args:
            observation: one spec per key.
            actions: entries of an action vector.
            size: of everything.
            uniform_share: see `Categorical`.
            reward_outputs: numbers that a reward is read from; their weights begin as zeros.
        """
        super().__init__()
        self.representation = RepresentationModel(observation, actions, size, uniform_share)
        self.prior = Head(size.deterministic, PRIOR_LAYERS, size.units, size.stochastic)
        self.decoder = ObservationDecoder(observation, size)
        self.reward = Head(size.features, 1, size.units, reward_outputs, scale=0)
        self.continuation = Head(size.features, 1, size.units, 1)

    def unroll(
        self,
        state: State,
        action_LBA: Tensor,
        observation: Mapping[str, Tensor],
        first_LB: Tensor,
        noise: Noise,
    ) -> tuple[State, Categorical]:
        """Follow sequences, over the ends of episodes.

        Args:
            state: before the first row, each ``[B, ...]``.
            action_LBA: that each row was arrived by.
            observation: each ``[L, B, *stacked_shape]``.
            first_LB: bool: where an episode begins; what was before counts as zeros there.
            noise: to sample latents by.

        Returns:
            States and posteriors, each ``[L, B, ...]``.
        """
        model = self.representation
        tokens = model.encoder({key: array.flatten(0, 1) for key, array in observation.items()})
        tokens_LBE = tokens.unflatten(0, first_LB.shape)
        keep_LB1 = (~first_LB).to(action_LBA.dtype).unsqueeze(-1)
        states: list[State] = []
        posteriors: list[Categorical] = []
        for tokens_BE, action_BA, keep_B1 in zip(
            tokens_LBE, action_LBA * keep_LB1, keep_LB1, strict=True
        ):
            state = _forget(state, keep_B1)
            state, posterior = model.observe(state, action_BA, tokens_BE, noise)
            states.append(state)
            posteriors.append(posterior)
        stacked = State(*(torch.stack(part) for part in zip(*states, strict=True)))
        return stacked, Categorical.stack(posteriors)

    def predict(self, state: State) -> Categorical:
        """The prior of states with these deterministic parts."""
        return self.representation.latents(self.prior(state.deterministic))

    def imagine(
        self, state: State, act: Callable[[Tensor], Tensor], horizon: int, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        """Go on without observations.

        Args:
            state: to start from, each ``[N, ...]``.
            act: actions ``[N, A]`` of features ``[N, F]``.
            horizon: ``H``.
            noise: to sample latents by.

        Returns:
            Features ``[H + 1, N, F]``, those of ``state`` first, and the actions taken in all but
            the last, ``[H, N, A]``.
        """
        features, actions = [state.features], []
        for _ in range(horizon):
            actions.append(act(features[-1]))
            state = self._go_on(state, actions[-1], noise)
            features.append(state.features)
        return torch.stack(features), torch.stack(actions)

    def predict_open_loop(
        self,
        state: State,
        action_LBA: Tensor,
        observation: Mapping[str, Tensor],
        first_LB: Tensor,
        context: int,
        noise: Noise,
    ) -> State:
        """Follow sequences, but see only the first rows of them; the rest is told by actions.

        Args:
            state: as in `unroll`.
            action_LBA: as in `unroll`.
            observation: as in `unroll`.
            first_LB: as in `unroll`; that an episode begins is told, with what is not.
            context: rows whose observations are seen, at least 1.
            noise: to sample latents by.

        Returns:
            States, each ``[L, B, ...]``.
        """
        seen = {key: array[:context] for key, array in observation.items()}
        known, _ = self.unroll(state, action_LBA[:context], seen, first_LB[:context], noise)
        states = [State(*(part[row] for part in known)) for row in range(context)]
        for action_BA, first_B in zip(action_LBA[context:], first_LB[context:], strict=True):
            keep_B1 = (~first_B).to(action_BA.dtype).unsqueeze(-1)
            states.append(self._go_on(_forget(states[-1], keep_B1), action_BA * keep_B1, noise))
        return State(*(torch.stack(part) for part in zip(*states, strict=True)))

    def _go_on(self, state: State, action: Tensor, noise: Noise) -> State:
        """The next state ``[N, ...]``, drawn from the prior."""
        deterministic = self.representation.core(state, action)
        prior = self.representation.latents(self.prior(deterministic))
        return State(deterministic, prior.sample(noise).to(deterministic.dtype))


def _forget(state: State, keep_B1: Tensor) -> State:
    """``state`` with zeros where ``keep_B1`` is 0."""
    return State(state.deterministic * keep_B1, state.stochastic * keep_B1.unsqueeze(-1))


def divergences(posterior: Categorical, prior: Categorical, free_nats: float) -> dict[str, Tensor]:
    """How far posterior and prior are apart, ``[...]`` of latents ``[..., latents, classes]``.

    The Kullback-Leibler divergence, summed over the latents, then at least ``free_nats``: below
    that there is no gradient (Hafner et al. 2025, equations 5 and 6).

    Returns:
        ``dynamics``, whose gradient moves the prior, and ``representation``, whose gradient moves
        the posterior; their values are the same.
    """
    return {
        "dynamics": posterior.detach().divergence(prior).sum(-1).clamp(min=free_nats),
        "representation": posterior.divergence(prior.detach()).sum(-1).clamp(min=free_nats),
    }
