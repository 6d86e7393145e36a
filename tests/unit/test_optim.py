"""LaProp and adaptive clipping against NumPy loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actorlearner.optim import LaProp, clip_adaptively, linear_warmup


def slow_clip(gradient: np.ndarray, parameter: np.ndarray, clip: float) -> np.ndarray:
    limit = clip * max(1e-3, np.sqrt((parameter**2).sum()))
    norm = np.sqrt((gradient**2).sum())
    return gradient * min(1.0, limit / norm) if norm else gradient


@pytest.mark.parametrize("clip", [0.3, None])
def test_steps_equal_the_slow_twin(clip: float | None) -> None:
    """E.1 item 8: clip each tensor, divide by the root mean square, then take the momentum."""
    generator = np.random.default_rng(0)
    shapes = [(4, 3), (5,), (2, 2, 2)]
    slow = [
        generator.normal(size=shape) * scale
        for shape, scale in zip(shapes, (1, 0, 10), strict=True)
    ]
    fast = [torch.nn.Parameter(torch.from_numpy(p.copy())) for p in slow]
    optimizer = LaProp(fast, lr=0.01, betas=(0.9, 0.99), eps=1e-20, clip=clip)
    means, squares = [np.zeros(s) for s in shapes], [np.zeros(s) for s in shapes]
    for t in range(1, 6):
        for i, (parameter, shape) in enumerate(zip(fast, shapes, strict=True)):
            gradient = generator.normal(size=shape) * 10.0 ** generator.integers(-2, 3)
            parameter.grad = torch.from_numpy(gradient.copy())
            if clip is not None:
                gradient = slow_clip(gradient, slow[i], clip)
            squares[i] = 0.99 * squares[i] + 0.01 * gradient**2
            scaled = gradient / (np.sqrt(squares[i] / (1 - 0.99**t)) + 1e-20)
            means[i] = 0.9 * means[i] + 0.1 * scaled
            slow[i] = slow[i] - 0.01 * means[i] / (1 - 0.9**t)
        optimizer.step()
    for parameter, expected in zip(fast, slow, strict=True):
        np.testing.assert_allclose(parameter.detach(), expected, rtol=1e-9, atol=1e-12)


def test_gradients_are_clipped_tensor_by_tensor() -> None:
    parameters = [torch.full((4,), 2.0), torch.zeros(4), torch.full((4,), 2.0)]
    gradients = [torch.full((4,), 5.0), torch.full((4,), 5.0), torch.full((4,), 0.1)]
    clipped = clip_adaptively(gradients, parameters, 0.3)
    norms = [c.norm().item() for c in clipped]
    assert norms == pytest.approx([0.3 * 4, 0.3 * 1e-3, 0.2])
    assert gradients[0].tolist() == [5.0] * 4  # not changed


def test_a_gradient_of_zero_moves_nothing() -> None:
    """With an epsilon of 1e-20 a division by the root of zero must not blow up."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = LaProp([parameter], lr=0.1)
    parameter.grad = torch.zeros(3)
    optimizer.step()
    assert parameter.tolist() == [1.0] * 3


def test_goes_on_from_its_state() -> None:
    """Bit for bit, the count of steps too."""
    gradients = torch.randn(6, 5)

    def run(breaks_at: int | None) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5))
        optimizer = LaProp([parameter], lr=0.1)
        for i, gradient in enumerate(gradients):
            if i == breaks_at:
                state = optimizer.state_dict()
                optimizer = LaProp([parameter], lr=0.7)
                optimizer.load_state_dict(state)
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach()

    assert torch.equal(run(None), run(3))


def test_warmup() -> None:
    """A.3: linear from 0; A.5 item 18: settable, or short runs learn nothing."""
    assert [linear_warmup(4.0, u, 4) for u in range(6)] == [0, 1, 2, 3, 4, 4]
    assert linear_warmup(4.0, 0, 0) == 4
