"""Building blocks of networks; no algorithm has a name here.

Shape suffixes: B batch, A actions, N numbers of each action.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from actorlearner.contracts import Array, ArraySpec, Observation, UnsupportedSpace

Torso: TypeAlias = Literal["auto", "mlp", "nature", "minatar", "impala"]
"""What images go through first (`Encoder`)."""

Precision: TypeAlias = Literal["float32", "bfloat16"]
"""What layers compute in (`autocast`)."""

LinearLayer: TypeAlias = Callable[[int, int], nn.Module]
"""Makes a linear layer of so many inputs and outputs: `torch.nn.Linear`, `NoisyLinear`."""

CONVOLUTIONS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),  # Mnih et al. 2015
    "minatar": ((16, 3, 1),),  # Young & Tian 2019
}
"""``(channels, kernel, stride)`` of each layer, by the name of the torso; the largest first."""

IMPALA_CHANNELS = (16, 32, 32)
"""Of each section of the residual torso ``impala`` (Espeholt et al. 2018, figure 3, right)."""
IMPALA_SMALLEST_SIDE = 16
"""Pixels, of which its three poolings leave two."""


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Where layers compute in ``precision``, whatever their parameters are in."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def _layer_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What layers on ``device`` compute in here: that of `autocast`, and otherwise ``dtype``."""
    is_cast = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_cast else dtype


class Encoder(nn.Module):
    """Observations of any spec as one vector each: images through convolutions, the rest flat.

    An image is Box data of uint8 or bool with frames of two or three axes. ``auto`` gives each
    image the largest of `CONVOLUTIONS` that it is large enough for, if any; ``mlp`` takes images
    flat.

    Attributes:
        size: length of the vector.
    """

    def __init__(self, observation: Mapping[str, ArraySpec], torso: Torso = "auto") -> None:
        """Encode arrays of these specs.

        Args:
            observation: one spec per key.
            torso: of its images.

        Raises:
            UnsupportedSpace: there is no image for ``torso``, one is too small for it, or one is a
                stack of images.
        """
        super().__init__()
        if torso not in ("auto", "mlp") and not any(map(is_image, observation.values())):
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
        """``[B, size]`` from tensors ``[B, *stacked_shape]``, in the specs' order, in ``dtype``.

        Within `autocast` it may be in what layers compute in.
        """
        encoders = zip(self._keys, self.encoders, strict=True)
        parts = [encoder(observation[key], dtype) for key, encoder in encoders]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _encoder(key: str, spec: ArraySpec, torso: Torso) -> FlatEncoder | ImageEncoder:
    if torso != "mlp" and is_image(spec, axes=(4,)):
        raise UnsupportedSpace(
            f"{key} has frames of shape {spec.shape}, stacks of images; leave the stacking to "
            "env.frame_stack, which keeps each frame once, or take them flat: agent.torso=mlp"
        )
    if torso == "mlp" or not is_image(spec):
        return FlatEncoder(spec)
    side = min(image_shape(spec)[1:])
    if torso == "auto":
        fitting = [name for name in CONVOLUTIONS if side >= _smallest_side(name)]
        return ImageEncoder(spec, fitting[0]) if fitting else FlatEncoder(spec)
    if side < (smallest := _smallest_side(torso)):
        raise UnsupportedSpace(
            f"agent.torso={torso}: {key} has frames of shape {spec.shape}, and both sides must be "
            f"at least {smallest}; set agent.torso=auto"
        )
    return ImageEncoder(spec, torso)


def is_image(spec: ArraySpec, axes: Sequence[int] = (2, 3)) -> bool:
    """Whether frames are Box data of uint8 or bool with so many axes."""
    return not spec.categories and spec.dtype in ("uint8", "bool") and len(spec.shape) in axes


def channels_first(spec: ArraySpec) -> bool:
    """Whether a frame is ``[C, H, W]``: as in Stable-Baselines3 channels are the smaller axis.

    Of equals it is the last, as everywhere in Gymnasium (MinAtar's Seaquest is 10 x 10 x 10).
    """
    return spec.shape[0] < spec.shape[-1]


def image_shape(spec: ArraySpec) -> tuple[int, int, int]:
    """Channels, those of all stacked frames together, height and width."""
    sides = list(spec.shape)
    channels = 1 if len(sides) == 2 else sides.pop(0 if channels_first(spec) else -1)
    return spec.stack * channels, sides[0], sides[1]


def _smallest_side(torso: str) -> int:
    """Pixels that ``torso`` needs: of `CONVOLUTIONS`, those that give the last layer one output."""
    if torso == "impala":
        return IMPALA_SMALLEST_SIDE
    side = 1
    for _, kernel, stride in reversed(CONVOLUTIONS[torso]):
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
    """Convolutions, the last followed by a ReLU, over the frames of one image key.

    Channels are those of all stacked frames. uint8 pixels are scaled to ``[0, 1]``.

    Attributes:
        size: length of the flattened features.
        inner_dtype: of the convolutions; None for that of the features.
    """

    def __init__(self, spec: ArraySpec, torso: str) -> None:
        """Build the layers.

        Args:
            spec: of the image, which must be large enough for ``torso``.
            torso: one of `CONVOLUTIONS`, or ``impala``.
        """
        super().__init__()
        self._moves_channels = len(spec.shape) == 3 and not channels_first(spec)
        self._shape = channels, height, width = image_shape(spec)
        convolution = PixelConvolution if spec.dtype == "uint8" else nn.Conv2d  # the first
        modules: list[nn.Module] = []
        for wider, kernel, stride in CONVOLUTIONS.get(torso, ()):
            modules += [convolution(channels, wider, kernel, stride), nn.ReLU()]
            channels, convolution = wider, nn.Conv2d
            height, width = ((side - kernel) // stride + 1 for side in (height, width))
        for wider in IMPALA_CHANNELS if torso == "impala" else ():
            modules += _impala_section(convolution(channels, wider, 3, padding=1))
            channels, convolution = wider, nn.Conv2d
            height, width = ((side + 1) // 2 for side in (height, width))
        if torso == "impala":
            modules.append(nn.ReLU())
        self.convolutions = nn.Sequential(*modules)
        self.inner_dtype: torch.dtype | None = None
        self.size = channels * height * width

    def forward(self, image: Tensor, dtype: torch.dtype) -> Tensor:
        """``[B, size]`` from ``[B, *stacked_shape]``, in ``dtype`` or that of `autocast`."""
        if self._moves_channels:
            image = image.movedim(-1, -3)
        image = image.reshape(-1, *self._shape)  # a length would be a constant in an export
        # Converted only here, so that bytes travel to the device. With a backward pass to come
        # convolutions are a third faster with channels innermost (oneDNN), without one a tenth
        # slower. The weights stay as they are, since a fused optimiser takes parameter and state
        # for laid out alike, which a checkpoint would not keep.
        outer = _layer_dtype(image.device, dtype)
        layout = torch.channels_last if torch.is_grad_enabled() else torch.contiguous_format
        # Laid out as bytes: to convert on the way takes twice as long in bfloat16.
        image = image.contiguous(memory_format=layout).to(self.inner_dtype or outer)
        features: Tensor = self.convolutions(image)
        return features.flatten(1).to(outer)

    def convolve_in(self, dtype: torch.dtype) -> None:
        """From now on compute the convolutions in ``dtype``, whatever is asked for."""
        self.inner_dtype = dtype
        self.convolutions.to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]


class PixelConvolution(nn.Conv2d):
    """A convolution over whole numbers to 255, as if they were scaled to ``[0, 1]``.

    It scales its weights, of which there are far fewer. bfloat16 has these numbers exactly.
    """

    def forward(self, image: Tensor) -> Tensor:
        """As `torch.nn.Conv2d`."""
        convolved: Tensor = self._conv_forward(image, self.weight / 255, self.bias)
        return convolved


class ResidualBlock(nn.Module):
    """Two convolutions, each behind a ReLU, added to their input (Espeholt et al. 2018)."""

    def __init__(self, channels: int) -> None:
        """As many ``channels`` go in as come out."""
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        """``[B, channels, H, W]`` from the same shape."""
        inner = self.first(functional.relu(image))
        outer: Tensor = image + self.second(functional.relu(inner))
        return outer


def _impala_section(convolution: nn.Conv2d) -> list[nn.Module]:
    """The convolution, a pooling that halves both sides, two residual blocks."""
    wider, pooling = convolution.out_channels, nn.MaxPool2d(3, stride=2, padding=1)
    return [convolution, pooling, ResidualBlock(wider), ResidualBlock(wider)]


class NoisyLinear(nn.Linear):
    """A linear layer with learned noise in its weights: exploration that is itself learned.

    ``(weight + weight_sigma * outer(f, g)) x + bias + bias_sigma * f``, where ``f`` and ``g`` are
    noise, one number for each output and each input (Fortunato et al. 2018, equations 9 to 11:
    factorised Gaussian noise). ``weight`` and ``bias``, the means, begin as those of a linear layer
    of torch, which is as in the paper.

    In training mode every pass draws new noise from torch's global generator. In evaluation mode it
    stays as it is, which is none (the mean weights) until `draw`. Noise is no parameter and no
    buffer, so that neither snapshots nor checkpoints hold any.
    """

    def __init__(self, inputs: int, outputs: int, sigma: float = 0.5) -> None:
        """Build the layer.

        Args:
            inputs: width of the input.
            outputs: width of the output.
            sigma: the noise begins at ``sigma / sqrt(inputs)`` for each weight.
        """
        super().__init__(inputs, outputs)
        initial = sigma / math.sqrt(inputs)
        self.weight_sigma = nn.Parameter(torch.full_like(self.weight, initial))
        self.bias_sigma = nn.Parameter(torch.full_like(self.bias, initial))
        self._noise: tuple[Tensor, Tensor] | None = None

    def draw(self, generator: np.random.Generator) -> None:
        """Act by new noise from ``generator`` from now on (in evaluation mode, on the CPU)."""
        sizes = self.in_features, self.out_features
        numbers = torch.from_numpy(generator.standard_normal(sum(sizes), np.float32))
        inputs, outputs = signed_sqrt(numbers).split(sizes)
        self._noise = inputs, outputs

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., outputs]`` from ``[..., inputs]``; all rows share the noise."""
        mean = super().forward(inputs)
        if self.training:
            sizes = self.in_features, self.out_features
            drawn = torch.randn(sum(sizes), dtype=inputs.dtype, device=inputs.device)
            input_noise, output_noise = signed_sqrt(drawn).split(sizes)
        elif self._noise is None:
            return mean
        else:
            input_noise, output_noise = self._noise
        spread = functional.linear(inputs * input_noise, self.weight_sigma, self.bias_sigma)
        noisy: Tensor = mean + output_noise * spread
        return noisy


def signed_sqrt(numbers: Tensor) -> Tensor:
    """``sign(x) * sqrt(|x|)``: what factorised noise is made of (Fortunato et al. 2018)."""
    return numbers.sign() * numbers.abs().sqrt()


class MLP(nn.Sequential):
    """Linear layers, each followed by a ReLU.

    Attributes:
        size: width of the last layer.
    """

    def __init__(self, inputs: int, hidden: Sequence[int], linear: LinearLayer = nn.Linear) -> None:
        """Build the layers.

        Args:
            inputs: width of the input.
            hidden: width of each layer.
            linear: makes each of them.
        """
        sizes = [inputs, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [linear(before, after), nn.ReLU()]
        super().__init__(*layers)
        self.size = sizes[-1]


class DuelingHead(nn.Module):
    """Action values from a state value and mean-free advantages (Wang et al. 2016, equation 9).

    Where an action has several numbers (atoms, quantiles), each is made so by itself, as in Rainbow
    (Hessel et al. 2018, section "The Integrated Agent").
    """

    def __init__(
        self,
        inputs: int,
        num_actions: int,
        hidden: Sequence[int] = (),
        linear: LinearLayer = nn.Linear,
        numbers: int = 1,
    ) -> None:
        """Build both streams.

        Args:
            inputs: features ``[..., inputs]``.
            num_actions: ``A``.
            hidden: width of each hidden layer of each stream.
            linear: makes each layer.
            numbers: ``N``.
        """
        super().__init__()
        self._numbers = numbers
        self.value = _stream(inputs, hidden, numbers, linear)
        self.advantage = _stream(inputs, hidden, num_actions * numbers, linear)

    def forward(self, features: Tensor) -> Tensor:
        """Numbers ``[..., A * N]``; their mean over actions is that of the state value."""
        value_N: Tensor = self.value(features)
        advantage_A: Tensor = self.advantage(features)
        if self._numbers == 1:
            return value_N + advantage_A - advantage_A.mean(-1, keepdim=True)
        advantage_AN = advantage_A.unflatten(-1, (-1, self._numbers))
        centred_AN = advantage_AN - advantage_AN.mean(-2, keepdim=True)
        values_AN: Tensor = value_N.unsqueeze(-2) + centred_AN
        return values_AN.flatten(-2)


def _stream(inputs: int, hidden: Sequence[int], outputs: int, linear: LinearLayer) -> nn.Sequential:
    mlp = MLP(inputs, hidden, linear)
    return nn.Sequential(*mlp, linear(mlp.size, outputs))


# ---------------------------------------------------------------------- layers with a norm


def truncated_normal_(weight: Tensor, fan_in: int, scale: float = 1.0) -> None:
    """Fill ``weight`` with a normal distribution cut at two deviations: variance ``1 / fan_in``.

    Args:
        weight: changed in place.
        fan_in: inputs of a unit.
        scale: of the result.
    """
    if scale == 0:
        nn.init.zeros_(weight)
        return
    deviation = 1.1368 / math.sqrt(fan_in)  # what is left of it after the cut is 1 / 1.1368
    nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    with torch.no_grad():
        weight.mul_(scale)


def scaled_linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    """A linear layer that begins as `truncated_normal_` says, with biases 0."""
    layer = nn.Linear(inputs, outputs)
    truncated_normal_(layer.weight, inputs, scale)
    nn.init.zeros_(layer.bias)
    return layer


def scaled_convolution(inputs: int, outputs: int, kernel: int) -> nn.Conv2d:
    """A convolution that keeps the sides, and begins as `truncated_normal_` says, biases 0."""
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
    truncated_normal_(layer.weight, inputs * kernel**2)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


class BlockLinear(nn.Module):
    """A linear layer of blocks: each slice of the input gives a slice of the output.

    Attributes:
        weight: ``[blocks, inputs / blocks, outputs / blocks]``.
        bias: ``[outputs]``.
    """

    def __init__(self, inputs: int, outputs: int, blocks: int) -> None:
        """Build the layer.

        Args:
            inputs: of all blocks together; weights begin as those of a layer of that many inputs.
            outputs: of all blocks together.
            blocks: divides both.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, inputs // blocks, outputs // blocks))
        self.bias = nn.Parameter(torch.zeros(outputs))
        truncated_normal_(self.weight, inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., outputs]`` from ``[..., inputs]``."""
        inputs_GI = inputs.unflatten(-1, (len(self.weight), -1))
        outputs: Tensor = torch.einsum("...gi,gio->...go", inputs_GI, self.weight).flatten(-2)
        return outputs + self.bias.to(outputs.dtype)


class RMSNorm(nn.Module):
    """Scaled to a mean square of 1 along one axis, times a learned weight (Zhang & Sennrich 2019).

    Computed in float32 at least. There is no shift.
    """

    def __init__(self, size: int, axis: int = -1, eps: float = 1e-4) -> None:
        """Build the layer.

        Args:
            size: of the axis.
            axis: which.
            eps: added to the mean square.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._axis, self._eps = axis, eps

    def forward(self, inputs: Tensor) -> Tensor:
        """The shape and the dtype stay."""
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32)).movedim(self._axis, -1)
        normed = functional.rms_norm(wide, self.weight.shape, self.weight, self._eps)
        return normed.movedim(-1, self._axis).to(inputs.dtype)


class NormedMLP(nn.Sequential):
    """Linear layers, each followed by an `RMSNorm` and a SiLU.

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
            layers += [scaled_linear(before, after), RMSNorm(after), nn.SiLU()]
        super().__init__(*layers)
        self.size = sizes[-1]


class EagerForward:
    """Runs a network by torch: what every `NetworkPolicy` begins with."""

    def __init__(self, network: nn.Module) -> None:
        """Run ``network``, on the CPU."""
        self._network = network

    def __call__(self, observation: Observation) -> Array:
        """See `NetworkPolicy.forward`."""
        with torch.inference_mode():
            numbers = self._network({k: torch.from_numpy(v) for k, v in observation.items()})
            array: Array = numbers.numpy()
            return array
