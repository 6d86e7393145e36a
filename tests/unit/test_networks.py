"""Building blocks of networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from actorlearner.contracts import ArraySpec, UnsupportedSpace
from actorlearner.networks import CONVOLUTIONS, MLP, DuelingHead, Encoder, ImageEncoder

LEAVES: dict[str, tuple[ArraySpec, Any]] = {
    "vector": (ArraySpec((3,), "float32"), lambda g: g.normal(size=(4, 3))),
    "matrix": (ArraySpec((2, 3), "float64"), lambda g: g.normal(size=(4, 2, 3))),
    "scalar": (ArraySpec((), "float32"), lambda g: g.normal(size=4)),
    "integers": (ArraySpec((2,), "int16"), lambda g: g.integers(-300, 300, (4, 2))),
    "pixels": (ArraySpec((2, 2, 1), "uint8"), lambda g: g.integers(0, 256, (4, 2, 2, 1))),
    "byte": (ArraySpec((), "uint8"), lambda g: g.integers(0, 256, 4)),
    "wide": (ArraySpec((2,), "uint16"), lambda g: g.integers(0, 60_000, (4, 2))),
    "flags": (ArraySpec((3,), "bool"), lambda g: g.integers(0, 2, (4, 3))),
    "discrete": (ArraySpec((), "int64", (5,)), lambda g: g.integers(0, 5, 4)),
    "multi_discrete": (ArraySpec((2,), "int64", (3, 4)), lambda g: g.integers(0, 3, (4, 2))),
    "grid": (ArraySpec((2, 2), "int64", (2, 3, 4, 5)), lambda g: g.integers(0, 2, (4, 2, 2))),
    "binary": (ArraySpec((3,), "int8", (2, 2, 2)), lambda g: g.integers(0, 2, (4, 3))),
    "stacked": (ArraySpec((3,), "uint8", stack=2), lambda g: g.integers(0, 256, (4, 2, 3))),
    "last": (ArraySpec((), "int64", (3,), stack=2), lambda g: g.integers(0, 3, (4, 2))),
}


def encode_slowly(spec: ArraySpec, value: Any) -> list[float]:
    """One observation, number by number."""
    numbers = np.asarray(value).reshape(-1)
    if spec.categories:
        categories = spec.categories * spec.stack
        return [float(n == c) for n, k in zip(numbers, categories, strict=True) for c in range(k)]
    return [float(n) / 255 if spec.dtype == "uint8" else float(n) for n in numbers]


class TestFlatKeys:
    @pytest.mark.parametrize("keys", [[key] for key in LEAVES] + [list(LEAVES)], ids=" ".join)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_equal_their_slow_twin(self, keys: list[str], dtype: torch.dtype) -> None:
        generator = np.random.default_rng(0)
        specs = {key: LEAVES[key][0] for key in keys}
        arrays = {key: LEAVES[key][1](generator).astype(specs[key].dtype) for key in keys}
        expected = [
            [n for key in keys for n in encode_slowly(specs[key], arrays[key][row])]
            for row in range(4)
        ]
        encoder = Encoder(specs)
        # Backwards: the order of the specs decides, not that of the observation.
        tensors = {key: torch.from_numpy(arrays[key]) for key in reversed(keys)}
        encoded = encoder(tensors, dtype)
        assert encoded.dtype == dtype
        assert encoded.shape == (4, encoder.size)
        torch.testing.assert_close(encoded, torch.tensor(expected, dtype=dtype))

    def test_low_precision(self) -> None:
        encoder = Encoder({"o": ArraySpec((), "int64", (3,)), "p": ArraySpec((1,), "uint8")})
        observation = {"o": torch.tensor([2]), "p": torch.tensor([[51]], dtype=torch.uint8)}
        encoded = encoder(observation, torch.bfloat16)
        assert encoded.dtype == torch.bfloat16
        assert encoded.tolist() == [pytest.approx([0, 0, 1, 0.2], abs=2e-3)]


# ------------------------------------------------------------------------------------- images


def pixel(image: Any, spec: ArraySpec, channel: int, row: int, column: int) -> float:
    """One pixel between 0 and 1 of ``image``, stacked as policies get it; frames come in order."""
    channels = {2: 1, 3: min(spec.shape[0], spec.shape[-1])}[len(spec.shape)]
    frame = image[channel // channels] if spec.stack > 1 else image
    if len(spec.shape) == 2:
        value = frame[row, column]
    elif spec.shape[0] < spec.shape[-1]:
        value = frame[channel % channels, row, column]
    else:
        value = frame[row, column, channel % channels]
    return float(value) / (255 if spec.dtype == "uint8" else 1)


def convolve_slowly(planes: Any, weight: Any, bias: Any, stride: int) -> Any:
    """ReLU of a convolution of ``planes`` ``[C, H, W]``, output by output."""
    side = weight.shape[-1]
    height, width = ((size - side) // stride + 1 for size in planes.shape[1:])
    out = np.zeros((len(weight), height, width))
    for o, i, j in np.ndindex(out.shape):
        y, x = i * stride, j * stride
        out[o, i, j] = max(0, (planes[:, y : y + side, x : x + side] * weight[o]).sum() + bias[o])
    return out


IMAGES = {
    "rows, columns, channels": (ArraySpec((5, 6, 2), "bool"), (2, 5, 6)),
    "channels, rows, columns": (ArraySpec((2, 5, 6), "uint8"), (2, 5, 6)),
    "equal axes": (ArraySpec((5, 5, 5), "bool"), (5, 5, 5)),
    "one frame": (ArraySpec((5, 6), "uint8"), (1, 5, 6)),
    "stacked frames": (ArraySpec((5, 6), "uint8", stack=3), (3, 5, 6)),
    "stacked, channels last": (ArraySpec((5, 6, 2), "uint8", stack=3), (6, 5, 6)),
    "stacked, channels first": (ArraySpec((2, 5, 6), "bool", stack=3), (6, 5, 6)),
    "nature": (ArraySpec((40, 36), "uint8", stack=2), (2, 40, 36)),
}


class TestImages:
    @pytest.mark.parametrize("name", IMAGES)
    def test_equal_their_slow_twin(self, name: str) -> None:
        spec, planes_shape = IMAGES[name]
        generator = np.random.default_rng(0)
        images = generator.integers(
            0, 256 if spec.dtype == "uint8" else 2, (2, *spec.stacked_shape)
        )
        images = images.astype(spec.dtype)
        encoder = Encoder({"o": spec}).double()
        layers = [m for m in encoder.modules() if isinstance(m, torch.nn.Conv2d)]
        strides = [s for _, _, s in CONVOLUTIONS["nature" if name == "nature" else "minatar"]]
        expected = []
        for image in images:
            planes = np.zeros(planes_shape)
            for channel, row, column in np.ndindex(planes_shape):
                planes[channel, row, column] = pixel(image, spec, channel, row, column)
            for layer, stride in zip(layers, strides, strict=True):
                weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
                planes = convolve_slowly(planes, weight, bias, stride)
            expected.append(planes.reshape(-1))
        with torch.no_grad():
            encoded = encoder({"o": torch.from_numpy(images)}, torch.float64)
        assert encoded.shape == (2, encoder.size)
        np.testing.assert_allclose(encoded.numpy(), expected, atol=1e-12)

    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            (ArraySpec((84, 84), "uint8", stack=4), "nature"),
            (ArraySpec((36, 36, 3), "uint8"), "nature"),
            (ArraySpec((35, 84), "uint8", stack=4), "minatar"),
            (ArraySpec((3, 84, 35), "bool"), "minatar"),
            (ArraySpec((10, 10, 4), "bool"), "minatar"),
            (ArraySpec((3, 3), "uint8"), "minatar"),
            (ArraySpec((2, 10), "uint8"), "mlp"),
            (ArraySpec((128,), "uint8", stack=4), "mlp"),
            (ArraySpec((4, 40, 40, 3), "uint8"), "mlp"),
            (ArraySpec((84, 84, 3), "float32"), "mlp"),
            (ArraySpec((10, 10), "int8", (2,) * 100), "mlp"),
        ],
    )
    def test_auto_goes_by_the_size(self, spec: ArraySpec, expected: str) -> None:
        encoder = Encoder({"o": spec})
        convolutions = [m for m in encoder.modules() if isinstance(m, torch.nn.Conv2d)]
        found = tuple((m.out_channels, m.kernel_size[0], m.stride[0]) for m in convolutions)
        assert found == CONVOLUTIONS.get(expected, ())

    def test_mlp_takes_images_flat(self) -> None:
        encoder = Encoder({"o": ArraySpec((40, 40), "uint8", stack=2)}, "mlp")
        assert encoder.size == 2 * 40 * 40
        assert not list(encoder.parameters())

    def test_other_keys_stand_beside_them(self) -> None:
        specs = {
            "camera": ArraySpec((10, 10, 4), "bool"),
            "map": ArraySpec((36, 36), "uint8"),
            "speed": ArraySpec((2,), "float32"),
        }
        encoder = Encoder(specs)
        observation = {
            "camera": torch.ones(3, 10, 10, 4, dtype=torch.bool),
            "map": torch.ones(3, 36, 36, dtype=torch.uint8),
            "speed": torch.tensor([[1.5, -2.5]] * 3),
        }
        encoded = encoder(observation, torch.float32)
        assert encoder.size == 16 * 8 * 8 + 64 + 2
        assert encoded.shape == (3, encoder.size)
        assert encoded[:, -2:].tolist() == [[1.5, -2.5]] * 3

    @pytest.mark.parametrize(
        ("torso", "spec", "message"),
        [
            (
                "nature",
                ArraySpec((10, 84, 4), "bool"),
                "agent.torso=nature: camera has frames of shape (10, 84, 4), and both sides must "
                "be at least 36; set agent.torso=auto",
            ),
            (
                "minatar",
                ArraySpec((2, 10), "uint8"),
                "agent.torso=minatar: camera has frames of shape (2, 10), and both sides must be "
                "at least 3; set agent.torso=auto",
            ),
            (
                "nature",
                ArraySpec((84, 84, 3), "float32"),
                "agent.torso=nature: there is no image (uint8 or bool, two or three axes) among "
                "camera float32 (84, 84, 3); set agent.torso=auto",
            ),
        ],
    )
    def test_a_torso_that_cannot_fit(self, torso: Any, spec: ArraySpec, message: str) -> None:
        with pytest.raises(UnsupportedSpace) as caught:
            Encoder({"camera": spec}, torso)
        assert str(caught.value) == message

    @pytest.mark.parametrize("name", IMAGES)
    def test_channels_are_innermost_in_the_convolutions_and_not_in_the_weights(
        self, name: str
    ) -> None:
        spec, shape = IMAGES[name]
        encoder = Encoder({"o": spec})
        (images,) = (m for m in encoder.modules() if isinstance(m, ImageEncoder))
        seen: list[torch.Tensor] = []
        images.convolutions.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
        zeros = torch.from_numpy(np.zeros((2, *spec.stacked_shape), spec.dtype))
        encoder({"o": zeros}, torch.float32)
        assert seen[0].shape == (2, *shape)
        assert seen[0].is_contiguous(memory_format=torch.channels_last)
        assert all(parameter.is_contiguous() for parameter in encoder.parameters())


class TestMLP:
    def test_sizes_and_layers(self) -> None:
        mlp = MLP(3, (5, 2))
        assert mlp.size == 2
        assert mlp(torch.randn(7, 3)).shape == (7, 2)
        assert (mlp(torch.randn(100, 3)) >= 0).all()

    def test_no_hidden_layer_passes_on_its_input(self) -> None:
        mlp = MLP(3, ())
        x = torch.randn(2, 3)
        assert mlp.size == 3
        assert mlp(x) is x


@pytest.mark.parametrize("hidden", [(), (5,)])
class TestDuelingHead:
    def test_the_mean_over_actions_is_the_state_value(self, hidden: tuple[int, ...]) -> None:
        """P14, E.1 item 5: mean_a Q == V."""
        head, features = DuelingHead(6, 4, hidden), torch.randn(9, 6)
        values = head(features)
        assert values.shape == (9, 4)
        torch.testing.assert_close(values.mean(1, keepdim=True), head.value(features))

    def test_differences_between_actions_are_those_of_the_advantages(
        self, hidden: tuple[int, ...]
    ) -> None:
        head, features = DuelingHead(6, 4, hidden), torch.randn(9, 6)
        values, advantages = head(features), head.advantage(features)
        torch.testing.assert_close(values - values[:, :1], advantages - advantages[:, :1])

    def test_hidden_layers_are_those_of_each_stream(self, hidden: tuple[int, ...]) -> None:
        head = DuelingHead(6, 4, hidden)
        for stream, outputs in ((head.value, 1), (head.advantage, 4)):
            layers = [type(layer) for layer in stream]
            assert layers == [torch.nn.Linear, torch.nn.ReLU] * len(hidden) + [torch.nn.Linear]
            widths = [layer.out_features for layer in stream if isinstance(layer, torch.nn.Linear)]
            assert widths == [*hidden, outputs]
