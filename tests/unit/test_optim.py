"""LaProp and adaptive clipping against NumPy loops; steps that are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from actorlearner.optim import FiniteSteps, LaProp, LeftOut, clip_adaptively, linear_warmup


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


# ------------------------------------------------------------------------------- finite steps

OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "laprop": lambda parameters: LaProp(parameters, lr=0.1),
    "laprop of momentum 0": lambda parameters: LaProp(parameters, lr=0.1, betas=(0.0, 0.9)),
    "fused adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True),
    "fused momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, fused=True
    ),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "no state": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}
HEEDING = ["laprop", "laprop of momentum 0", "fused adam", "fused momentum"]


class TestFiniteSteps:
    """A step whose gradient is not finite leaves everything as it is, read or not."""

    def run(
        self, name: str, gradients: Sequence[torch.Tensor], reads_at_once: bool
    ) -> tuple[torch.optim.Optimizer, FiniteSteps]:
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5))
        optimizer, steps = OPTIMIZERS[name]([parameter]), FiniteSteps(reads_at_once)
        for update, gradient in enumerate(gradients, 1):
            parameter.grad = gradient.clone()
            is_finite = gradient.isfinite().all()
            assert bool(steps.step("q", optimizer, is_finite, update)) == bool(is_finite)
        return optimizer, steps

    @pytest.mark.parametrize("reads_at_once", [True, False])
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_the_bad_ones_might_as_well_not_have_come(self, name: str, reads_at_once: bool) -> None:
        torch.manual_seed(0)
        good = list(torch.randn(5, 5))
        nan, inf = (torch.tensor([1.0, bad, 1.0, 1.0, 1.0]) for bad in (np.nan, np.inf))
        # The very first, before the optimiser has a state; two in a row; the last.
        mixed = [nan, good[0], good[1], inf, nan, *good[2:], inf]
        (clean, none), (dirty, some) = (
            self.run(name, gradients, reads_at_once) for gradients in (good, mixed)
        )
        (expected,), (parameter,) = (o.param_groups[0]["params"] for o in (clean, dirty))
        assert torch.equal(parameter, expected)
        assert not hasattr(dirty, "found_inf")
        for key, value in clean.state[expected].items():
            assert torch.equal(torch.as_tensor(dirty.state[parameter][key]), torch.as_tensor(value))
        assert none.flush() == {}
        assert some.flush() == {"q": LeftOut(updates=4, first=1)}
        assert some.flush() == {}

    def test_laprop_heeds_it_from_the_first_step(self) -> None:
        """Where its averages are all zero, and no step counts."""
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer: torch.optim.Optimizer = LaProp([parameter], lr=0.1)
        parameter.grad = torch.full((3,), np.nan)
        optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
        optimizer.step()
        assert parameter.tolist() == [1.0] * 3
        assert {k: v.sum().item() for k, v in optimizer.state[parameter].items()} == {
            "momentum": 0, "mean_square": 0, "step": 0,
        }  # fmt: skip

    @pytest.mark.parametrize("name", HEEDING)
    def test_the_first_of_a_period(self, name: str) -> None:
        good, bad = torch.ones(5), torch.full((5,), np.nan)
        _, steps = self.run(name, [good, good, bad, good, bad], reads_at_once=False)
        assert steps.flush() == {"q": LeftOut(updates=2, first=3)}

    def test_nobody_waits_for_a_device(self) -> None:
        """A tensor of the meta device has no value: reading it is an error."""
        parameter = torch.nn.Parameter(torch.ones(5, device="meta"))
        optimizer, steps = LaProp([parameter], lr=0.1), FiniteSteps(reads_at_once=False)
        steps._begun.add("q")
        is_finite = torch.ones((), dtype=torch.bool, device="meta")
        for update in (1, 2):
            parameter.grad = torch.ones(5, device="meta")
            assert steps.step("q", optimizer, is_finite, update) is is_finite
        with pytest.raises(RuntimeError, match="meta"):
            steps.flush()
