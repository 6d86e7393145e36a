"""Building blocks of networks; no algorithm has a name here.

Shape suffixes: B batch, A actions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from actorlearner.contracts import ArraySpec, UnsupportedSpace

Torso: TypeAlias = Literal["auto", "mlp", "nature", "minatar"]
"""What images go through first (`Encoder`)."""

CONVOLUTIONS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),  # Mnih et al. 2015
    "minatar": ((16, 3, 1),),  # Young & Tian 2019
}
"""``(channels, kernel, stride)`` of each layer, by the name of the torso; the largest first."""


class Encoder(nn.Module):
    """Observations of any spec as one vector each: images through convolutions, the rest flat.

    An image is Box data of uint8 or bool with frames of two or three axes. ``auto`` gives each
    image the largest torso that it is large enough for, if any; ``mlp`` takes images flat.

    Attributes:
        size: length of the vector.
    """

    def __init__(self, observation: Mapping[str, ArraySpec], torso: Torso = "auto") -> None:
        """Encode arrays of these specs.

        Args:
            observation: one spec per key.
            torso: of its images.

        Raises:
            UnsupportedSpace: there is no image for ``torso``, or one is too small for it.
        """
        super().__init__()
        if torso in CONVOLUTIONS and not any(map(_is_image, observation.values())):
            shapes = ", ".join(f"{k} {s.dtype} {s.shape}" for k, s in observation.items())
            raise UnsupportedSpace(
                f"agent.torso={torso}: there is no image (uint8 or bool, two or three axes) among "
                f"{shapes}; set agent.torso=auto"
            )
        self._keys = list(observation)
        encoders = [_encoder(key, spec, torso) for key, spec in observation.items()]
        self.encoders = nn.ModuleList(encoders)
        self.size = sum(encoder.size for encoder in encoders)

    def forward(self, observation: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """``[B, size]`` in ``dtype`` from tensors ``[B, *stacked_shape]``, in the specs' order."""
        encoders = zip(self._keys, self.encoders, strict=True)
        return torch.cat([encoder(observation[key], dtype) for key, encoder in encoders], 1)


def _encoder(key: str, spec: ArraySpec, torso: Torso) -> FlatEncoder | ImageEncoder:
    if torso == "mlp" or not _is_image(spec):
        return FlatEncoder(spec)
    side = min(_image_shape(spec)[1:])
    if torso == "auto":
        fitting = [layers for layers in CONVOLUTIONS.values() if side >= _smallest_side(layers)]
        return ImageEncoder(spec, fitting[0]) if fitting else FlatEncoder(spec)
    if side < (smallest := _smallest_side(CONVOLUTIONS[torso])):
        raise UnsupportedSpace(
            f"agent.torso={torso}: {key} has frames of shape {spec.shape}, and both sides must be "
            f"at least {smallest}; set agent.torso=auto"
        )
    return ImageEncoder(spec, CONVOLUTIONS[torso])


def _is_image(spec: ArraySpec) -> bool:
    return not spec.categories and spec.dtype in ("uint8", "bool") and len(spec.shape) in (2, 3)


def _channels_first(spec: ArraySpec) -> bool:
    """Whether a frame is ``[C, H, W]``: as in Stable-Baselines3 channels are the smaller axis.

    Of equals it is the last, as everywhere in Gymnasium (MinAtar's Seaquest is 10 x 10 x 10).
    """
    return spec.shape[0] < spec.shape[-1]


def _image_shape(spec: ArraySpec) -> tuple[int, int, int]:
    """Channels, those of all stacked frames together, height and width."""
    sides = list(spec.shape)
    channels = 1 if len(sides) == 2 else sides.pop(0 if _channels_first(spec) else -1)
    return spec.stack * channels, sides[0], sides[1]


def _smallest_side(layers: Sequence[tuple[int, int, int]]) -> int:
    """Pixels that give the last of ``layers`` one output."""
    side = 1
    for _, kernel, stride in reversed(layers):
        side = (side - 1) * stride + kernel
    return side


class FlatEncoder(nn.Module):
    """One observation as a float vector, entry by entry.

    Categorical entries become one-hot vectors, uint8 arrays are scaled to ``[0, 1]``, everything
    else is taken as it is.

    Attributes:
        size: length of the vector.
    """

    def __init__(self, spec: ArraySpec) -> None:
        """Encode arrays of ``spec``."""
        super().__init__()
        self._categories = spec.stack * spec.categories
        self._scales = spec.dtype == "uint8"
        self.size = sum(self._categories) or math.prod(spec.stacked_shape)

    def forward(self, observation: Tensor, dtype: torch.dtype) -> Tensor:
        """``[B, size]`` in ``dtype`` from ``[B, *stacked_shape]``."""
        flat = observation.flatten(1) if observation.dim() > 1 else observation.unsqueeze(1)
        if self._categories:
            columns = zip(flat.long().unbind(1), self._categories, strict=True)
            flat = torch.cat([functional.one_hot(column, n) for column, n in columns], 1)
        return flat.to(dtype) / 255 if self._scales else flat.to(dtype)


class ImageEncoder(nn.Module):
    """Convolutions, each followed by a ReLU, over the frames of one image key.

    Channels are those of all stacked frames. uint8 pixels are scaled to ``[0, 1]``.

    Attributes:
        size: length of the flattened features.
    """

    def __init__(self, spec: ArraySpec, layers: Sequence[tuple[int, int, int]]) -> None:
        """Build the layers.

        Args:
            spec: of the image, which must be large enough for ``layers``.
            layers: ``(channels, kernel, stride)`` of each.
        """
        super().__init__()
        self._moves_channels = len(spec.shape) == 3 and not _channels_first(spec)
        self._scales = spec.dtype == "uint8"
        self._shape = channels, height, width = _image_shape(spec)
        modules: list[nn.Module] = []
        for wider, kernel, stride in layers:
            modules += [nn.Conv2d(channels, wider, kernel, stride), nn.ReLU()]
            channels = wider
            height, width = ((side - kernel) // stride + 1 for side in (height, width))
        self.convolutions = nn.Sequential(*modules)
        self.size = channels * height * width

    def forward(self, image: Tensor, dtype: torch.dtype) -> Tensor:
        """``[B, size]`` in ``dtype`` from ``[B, *stacked_shape]``."""
        if self._moves_channels:
            image = image.movedim(-1, -3)
        image = image.reshape(len(image), *self._shape)
        # Converted only here, so that bytes travel to the device. With a backward pass to come
        # convolutions are a third faster with channels innermost (oneDNN), without one a tenth
        # slower. The weights stay as they are, since a fused optimiser takes parameter and state
        # for laid out alike, which a checkpoint would not keep.
        innermost = torch.is_grad_enabled()
        layout = torch.channels_last if innermost else torch.contiguous_format
        image = image.to(dtype, memory_format=layout)
        if self._scales:
            image = image.div_(255)  # a copy of the bytes, ours to change
        features: Tensor = self.convolutions(image)
        return features.flatten(1)


class MLP(nn.Sequential):
    """Linear layers, each followed by a ReLU.

    Attributes:
        size: width of the last layer.
    """

    def __init__(self, inputs: int, hidden: Sequence[int]) -> None:
        """Build the layers.

        Args:
            inputs: width of the input.
            hidden: width of each layer.
        """
        sizes = [inputs, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers)
        self.size = sizes[-1]


class DuelingHead(nn.Module):
    """Action values from a state value and mean-free advantages (Wang et al. 2016, equation 9)."""

    def __init__(self, inputs: int, num_actions: int, hidden: Sequence[int] = ()) -> None:
        """Build both streams.

        Args:
            inputs: features ``[B, inputs]``.
            num_actions: ``A``.
            hidden: width of each hidden layer of each stream.
        """
        super().__init__()
        self.value = _stream(inputs, hidden, 1)
        self.advantage = _stream(inputs, hidden, num_actions)

    def forward(self, features: Tensor) -> Tensor:
        """Action values ``[B, A]``; their mean over actions is the state value."""
        advantage_BA = self.advantage(features)
        value_B1: Tensor = self.value(features)
        centred: Tensor = value_B1 + advantage_BA - advantage_BA.mean(1, keepdim=True)
        return centred


def _stream(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    mlp = MLP(inputs, hidden)
    return nn.Sequential(*mlp, nn.Linear(mlp.size, outputs))
