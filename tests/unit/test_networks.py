"""Building blocks of networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from actorlearner.contracts import ArraySpec
from actorlearner.networks import MLP, DuelingHead, FlatEncoder

LEAVES: dict[str, tuple[ArraySpec, Any]] = {
    "vector": (ArraySpec((3,), "float32"), lambda g: g.normal(size=(4, 3))),
    "matrix": (ArraySpec((2, 3), "float64"), lambda g: g.normal(size=(4, 2, 3))),
    "scalar": (ArraySpec((), "float32"), lambda g: g.normal(size=4)),
    "integers": (ArraySpec((2,), "int16"), lambda g: g.integers(-300, 300, (4, 2))),
    "pixels": (ArraySpec((2, 2, 1), "uint8"), lambda g: g.integers(0, 256, (4, 2, 2, 1))),
    "byte": (ArraySpec((), "uint8"), lambda g: g.integers(0, 256, 4)),
    "wide": (ArraySpec((2,), "uint16"), lambda g: g.integers(0, 60_000, (4, 2))),
    "discrete": (ArraySpec((), "int64", (5,)), lambda g: g.integers(0, 5, 4)),
    "multi_discrete": (ArraySpec((2,), "int64", (3, 4)), lambda g: g.integers(0, 3, (4, 2))),
    "grid": (ArraySpec((2, 2), "int64", (2, 3, 4, 5)), lambda g: g.integers(0, 2, (4, 2, 2))),
    "binary": (ArraySpec((3,), "int8", (2, 2, 2)), lambda g: g.integers(0, 2, (4, 3))),
}


def encode_slowly(spec: ArraySpec, value: Any) -> list[float]:
    """One observation, number by number."""
    numbers = np.asarray(value).reshape(-1)
    if spec.categories:
        return [
            float(n == c) for n, k in zip(numbers, spec.categories, strict=True) for c in range(k)
        ]
    return [float(n) / 255 if spec.dtype == "uint8" else float(n) for n in numbers]


class TestFlatEncoder:
    @pytest.mark.parametrize("keys", [[key] for key in LEAVES] + [list(LEAVES)], ids=" ".join)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_equals_its_slow_twin(self, keys: list[str], dtype: torch.dtype) -> None:
        generator = np.random.default_rng(0)
        specs = {key: LEAVES[key][0] for key in keys}
        arrays = {key: LEAVES[key][1](generator).astype(specs[key].dtype) for key in keys}
        expected = [
            [n for key in keys for n in encode_slowly(specs[key], arrays[key][row])]
            for row in range(4)
        ]
        encoder = FlatEncoder(specs)
        # Backwards: the order of the specs decides, not that of the observation.
        tensors = {key: torch.from_numpy(arrays[key]) for key in reversed(keys)}
        encoded = encoder(tensors, dtype)
        assert encoded.dtype == dtype
        assert encoded.shape == (4, encoder.size)
        torch.testing.assert_close(encoded, torch.tensor(expected, dtype=dtype))

    def test_pixels_end_between_0_and_1(self) -> None:
        encoder = FlatEncoder({"o": ArraySpec((2,), "uint8")})
        encoded = encoder({"o": torch.tensor([[0, 255]], dtype=torch.uint8)}, torch.float32)
        assert encoded.tolist() == [[0.0, 1.0]]

    def test_low_precision(self) -> None:
        encoder = FlatEncoder({"o": ArraySpec((), "int64", (3,)), "p": ArraySpec((1,), "uint8")})
        observation = {"o": torch.tensor([2]), "p": torch.tensor([[51]], dtype=torch.uint8)}
        encoded = encoder(observation, torch.bfloat16)
        assert encoded.dtype == torch.bfloat16
        assert encoded.tolist() == [pytest.approx([0, 0, 1, 0.2], abs=2e-3)]


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


class TestDuelingHead:
    def test_the_mean_over_actions_is_the_state_value(self) -> None:
        """P14: mean_a Q == V."""
        head, features = DuelingHead(6, 4), torch.randn(9, 6)
        values = head(features)
        assert values.shape == (9, 4)
        torch.testing.assert_close(values.mean(1, keepdim=True), head.value(features))

    def test_differences_between_actions_are_those_of_the_advantages(self) -> None:
        head, features = DuelingHead(6, 4), torch.randn(9, 6)
        values, advantages = head(features), head.advantage(features)
        torch.testing.assert_close(values - values[:, :1], advantages - advantages[:, :1])
