"""Building blocks of networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from actorlearner.contracts import ArraySpec, UnsupportedSpace
from actorlearner.networks import (
    CONVOLUTIONS,
    MLP,
    BlockLinear,
    DuelingHead,
    Encoder,
    ImageEncoder,
    NoisyLinear,
    NormedMLP,
    ResidualBlock,
    RMSNorm,
    autocast,
    scaled_convolution,
    scaled_linear,
    signed_sqrt,
)

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

    def test_in_bfloat16_other_keys_stay_as_they_are(self) -> None:
        """Only what went through convolutions is rounded."""
        specs = {"map": ArraySpec((36, 36), "uint8"), "speed": ArraySpec((2,), "float32")}
        encoder = Encoder(specs)
        observation = {
            "map": torch.arange(3 * 36 * 36).reshape(3, 36, 36).to(torch.uint8),
            "speed": torch.tensor([[1 / 3, -1 / 7]] * 3),
        }
        exact = encoder(observation, torch.float32)
        with autocast("bfloat16", torch.device("cpu")):
            rounded = encoder(observation, torch.float32)
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded[:, -2:], exact[:, -2:], rtol=0, atol=0)
        torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.01)
        assert not torch.equal(rounded, exact)

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
                "impala",
                ArraySpec((15, 84, 3), "uint8"),
                "agent.torso=impala: camera has frames of shape (15, 84, 3), and both sides must "
                "be at least 16; set agent.torso=auto",
            ),
            (
                "impala",
                ArraySpec((4,), "float32"),
                "agent.torso=impala: there is no image (uint8 or bool, two or three axes) among "
                "camera float32 (4,); set agent.torso=auto",
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


class TestImpala:
    """Espeholt et al. 2018, figure 3, right."""

    @pytest.mark.parametrize(
        ("spec", "features"),
        [
            (ArraySpec((84, 84), "uint8", stack=4), 32 * 11 * 11),
            (ArraySpec((72, 96, 3), "uint8"), 32 * 9 * 12),
            (ArraySpec((16, 17), "bool"), 32 * 2 * 3),
        ],
    )
    def test_sizes(self, spec: ArraySpec, features: int) -> None:
        encoder = Encoder({"o": spec}, "impala")
        images = torch.from_numpy(np.ones((2, *spec.stacked_shape), spec.dtype))
        encoded = encoder({"o": images}, torch.float32)
        assert encoder.size == features
        assert encoded.shape == (2, features)
        assert (encoded >= 0).all()

    def test_it_has_15_convolutions_of_its_size(self) -> None:
        """A section is a convolution and two blocks of two; the paper counts the same."""
        encoder = Encoder({"o": ArraySpec((84, 84), "uint8", stack=4)}, "impala")
        convolutions = [m for m in encoder.modules() if isinstance(m, torch.nn.Conv2d)]
        assert len(convolutions) == 15

        def convolution(inputs: int, outputs: int) -> int:
            return inputs * outputs * 9 + outputs

        expected = sum(
            convolution(before, after) + 4 * convolution(after, after)
            for before, after in [(4, 16), (16, 32), (32, 32)]
        )
        assert sum(p.numel() for p in encoder.parameters()) == expected == 97_744

    def test_a_block_adds_to_its_input(self) -> None:
        block, image = ResidualBlock(3), torch.randn(2, 3, 5, 4)
        first, second = block.first, block.second
        inside = second(first(image.clamp_min(0)).clamp_min(0))
        torch.testing.assert_close(block(image), image + inside)
        with torch.no_grad():
            second.weight.zero_()
            assert second.bias is not None
            second.bias.zero_()
        assert torch.equal(block(image), image)

    def test_auto_never_takes_it(self) -> None:
        encoder = Encoder({"o": ArraySpec((84, 84), "uint8")}, "auto")
        assert not [m for m in encoder.modules() if isinstance(m, ResidualBlock)]


class TestNoisyLinear:
    def test_equals_its_slow_twin(self) -> None:
        """Fortunato et al. 2018, equations 9 to 11, weight by weight."""
        layer = NoisyLinear(3, 2, sigma=0.7)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        drawn = np.random.default_rng(5).standard_normal(5, np.float32)
        noise = [np.sign(x) * abs(x) ** 0.5 for x in drawn.astype(float)]
        of_inputs, of_outputs = noise[:3], noise[3:]
        x = torch.randn(4, 3)
        layer.eval().draw(np.random.default_rng(5))
        values = layer(x).tolist()
        for row in range(4):
            for o in range(2):
                total = layer.bias[o].item() + layer.bias_sigma[o].item() * of_outputs[o]
                for i in range(3):
                    weight = layer.weight[o, i] + (
                        layer.weight_sigma[o, i] * of_inputs[i] * of_outputs[o]
                    )
                    total += weight.item() * x[row, i].item()
                assert values[row][o] == pytest.approx(total, rel=1e-5, abs=1e-5)

    def test_the_mean_weights_act_where_none_was_drawn(self) -> None:
        layer, x = NoisyLinear(6, 4).eval(), torch.randn(3, 6)
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))

    def test_it_begins_as_in_the_paper(self) -> None:
        """Means uniform within 1 / sqrt(p), sigmas 0.5 / sqrt(p)."""
        layer = NoisyLinear(400, 300, sigma=0.5)
        for mean in (layer.weight, layer.bias):
            assert mean.abs().max() <= 1 / 20
            assert mean.std().item() == pytest.approx(1 / 20 / 3**0.5, rel=0.1)
        for sigma in (layer.weight_sigma, layer.bias_sigma):
            torch.testing.assert_close(sigma, torch.full_like(sigma, 0.5 / 20))

    def test_statistics_of_the_noise(self) -> None:
        """signed_sqrt(x): mean 0 and variance E|x| = sqrt(2 / pi); an output is a sum of those."""
        torch.manual_seed(0)
        f = signed_sqrt(torch.randn(200_000))
        variance = (2 / np.pi) ** 0.5
        assert f.mean().item() == pytest.approx(0, abs=0.01)
        assert f.var().item() == pytest.approx(variance, rel=0.01)
        layer, x = NoisyLinear(10, 1, sigma=1.0), torch.randn(1, 10)
        with torch.no_grad():
            layer.bias_sigma.zero_()
            outputs = torch.stack([layer(x) for _ in range(5_000)])
            mean = torch.nn.functional.linear(x, layer.weight, layer.bias)
        expected = variance**2 * (x**2).sum().item() / 10
        assert outputs.mean().item() == pytest.approx(
            mean.item(), abs=4 * (expected / 5_000) ** 0.5
        )
        assert outputs.var().item() == pytest.approx(expected, rel=0.15)

    def test_every_pass_of_training_draws_anew_from_torch(self) -> None:
        layer, x = NoisyLinear(6, 4), torch.randn(3, 6)
        torch.manual_seed(1)
        first, second = layer(x), layer(x)
        torch.manual_seed(1)
        assert torch.equal(first, layer(x))
        assert not torch.equal(first, second)
        # A row more is the same row again: the batch shares the noise.
        torch.manual_seed(1)
        torch.testing.assert_close(layer(torch.cat([x, x]))[3:], first)

    def test_gradients_reach_means_and_sigmas(self) -> None:
        layer = NoisyLinear(6, 4)
        first, second = layer(torch.randn(3, 6)), layer(torch.randn(3, 6))
        (first.square().sum() + second.square().sum()).backward()  # noise of both is still there
        assert len(list(layer.parameters())) == 4
        for parameter in layer.parameters():
            assert parameter.grad is not None
            assert torch.count_nonzero(parameter.grad) == parameter.numel()

    def test_noise_is_in_no_state(self) -> None:
        layer = NoisyLinear(6, 4).eval()
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        layer.draw(np.random.default_rng(0))
        layer(torch.randn(2, 6))
        after = layer.state_dict()
        assert list(after) == ["weight", "bias", "weight_sigma", "bias_sigma"]
        assert all(torch.equal(after[name], before[name]) for name in before)


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

    @pytest.mark.parametrize("numbers", [1, 3])
    def test_each_atom_is_made_by_itself(self, hidden: tuple[int, ...], numbers: int) -> None:
        """Hessel et al. 2018; features of more axes (IQN's levels) go through alike."""
        head, features = DuelingHead(6, 4, hidden, numbers=numbers), torch.randn(2, 5, 6)
        values = head(features).reshape(2, 5, 4, numbers)
        advantages = head.advantage(features).reshape(2, 5, 4, numbers)
        for n in range(numbers):
            of_the_state = head.value(features)[..., n : n + 1]
            torch.testing.assert_close(values[..., n].mean(-1, keepdim=True), of_the_state)
            for action in range(4):
                difference = values[..., action, n] - values[..., 0, n]
                expected = advantages[..., action, n] - advantages[..., 0, n]
                torch.testing.assert_close(difference, expected)

    def test_every_layer_is_of_the_kind_asked_for(self, hidden: tuple[int, ...]) -> None:
        head = DuelingHead(6, 4, hidden, NoisyLinear)
        layers = [layer for layer in head.modules() if isinstance(layer, torch.nn.Linear)]
        assert len(layers) == 2 + 2 * len(hidden)
        assert {type(layer) for layer in layers} == {NoisyLinear}


class TestNormedLayers:
    def test_block_linear_is_a_layer_with_blocks_on_its_diagonal(self) -> None:
        layer = BlockLinear(6, 9, 3)
        torch.nn.init.normal_(layer.bias)
        dense = torch.zeros(6, 9)
        for block, weight in enumerate(layer.weight):
            dense[2 * block : 2 * block + 2, 3 * block : 3 * block + 3] = weight
        inputs = torch.randn(2, 5, 6)
        torch.testing.assert_close(layer(inputs), inputs @ dense + layer.bias)

    @pytest.mark.parametrize(
        ("make", "fan_in"),
        [
            (lambda: BlockLinear(512, 1024, 8), 512),  # not 64: A.5 item 7
            (lambda: scaled_linear(400, 500), 400),
            (lambda: scaled_convolution(16, 128, 5), 16 * 25),
        ],
    )
    def test_weights_begin_by_the_inputs_of_the_whole_layer(self, make: Any, fan_in: int) -> None:
        torch.manual_seed(0)
        layer = make()
        assert layer.weight.std().item() == pytest.approx(fan_in**-0.5, rel=0.02)
        assert layer.weight.abs().max().item() <= 2 * 1.1368 * fan_in**-0.5
        assert not layer.bias.any()

    def test_weights_of_scale_zero_are_zero(self) -> None:
        assert not scaled_linear(4, 5, scale=0).weight.any()
        torch.manual_seed(0)
        small = scaled_linear(400, 500, scale=0.01).weight
        assert small.std().item() == pytest.approx(0.01 / 20, rel=0.02)

    def test_rms_norm_by_hand_without_a_shift(self) -> None:
        norm = RMSNorm(4)
        assert list(norm.state_dict()) == ["weight"]  # A.5 item 7
        torch.nn.init.normal_(norm.weight)
        inputs = torch.randn(3, 4)
        mean_square = (inputs**2).mean(-1, keepdim=True)
        expected = inputs / (mean_square + 1e-4).sqrt() * norm.weight
        torch.testing.assert_close(norm(inputs), expected)
        of_channels = RMSNorm(4, axis=1)
        of_channels.load_state_dict(norm.state_dict())
        image = inputs.T.reshape(1, 4, 3, 1)
        torch.testing.assert_close(of_channels(image), expected.T.reshape(1, 4, 3, 1))

    def test_rms_norm_of_small_numbers_in_half_precision(self) -> None:
        inputs = torch.full((2, 8), 1e-3, dtype=torch.bfloat16)
        normed = RMSNorm(8)(inputs)
        assert normed.dtype == torch.bfloat16
        torch.testing.assert_close(normed.float(), torch.full((2, 8), 0.0995), rtol=0.02, atol=0)

    def test_layers_norm_then_squash(self) -> None:
        mlp = NormedMLP(3, [4])
        inputs = torch.randn(2, 3)
        normed = RMSNorm(4)(inputs @ mlp[0].weight.T)
        torch.testing.assert_close(mlp(inputs), normed * torch.sigmoid(normed))
        assert (mlp.size, NormedMLP(3, []).size) == (4, 3)
