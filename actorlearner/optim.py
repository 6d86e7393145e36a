"""Optimisers that torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor


def linear_warmup(rate: float, updates: int, over: int) -> float:
    """The rate for the update after ``updates`` made ones: linear from 0, ``rate`` after ``over``.

    The very first update has rate 0, if ``over`` is not 0.
    """
    return rate if updates >= over else rate * updates / over


def clip_adaptively(
    gradients: Sequence[Tensor], parameters: Sequence[Tensor], clip: float, floor: float = 1e-3
) -> list[Tensor]:
    """Gradients whose norm is at most ``clip`` times that of their parameter, each by itself.

    Adaptive gradient clipping (Brock et al. 2021, equation 3), for whole tensors instead of units,
    as Hafner et al. (2025) use it.

    Args:
        gradients: not changed.
        parameters: one for each.
        clip: the largest norm, relative to that of the parameter.
        floor: norm that every parameter has at least.
    """
    gradients, parameters = list(gradients), list(parameters)
    gradient_norms = torch._foreach_norm(gradients)
    limits = torch._foreach_norm(parameters)
    torch._foreach_clamp_min_(limits, floor)
    torch._foreach_mul_(limits, clip)
    torch._foreach_div_(gradient_norms, limits)
    torch._foreach_clamp_min_(gradient_norms, 1.0)
    return list(torch._foreach_div(gradients, gradient_norms))


class LaProp(torch.optim.Optimizer):
    """Adam with the momentum taken after the scaling (Ziyin et al. 2020), and clipping before it.

    Of each gradient, in this order: `clip_adaptively`; divided by the root of its mean square, a
    moving average with ``betas[1]``; averaged with ``betas[0]``; taken off, times ``lr``. Both
    averages are corrected for their start at zero.

    All parameters of a group must have a gradient in every step, or never: one count of steps
    serves them all.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-20,
        clip: float | None = 0.3,
    ) -> None:
        """Optimise ``parameters``.

        Args:
            parameters: of one group.
            lr: learning rate.
            betas: of the momentum, and of the mean square.
            eps: added to the root of the mean square.
            clip: see `clip_adaptively`; None does not clip.
        """
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "clip": clip})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        for parameter in parameters:
            if not (state := self.state[parameter]):
                state["momentum"] = torch.zeros_like(parameter)
                state["mean_square"] = torch.zeros_like(parameter)
                state["steps"] = 0  # not of the group, whose options a resumed run sets anew
        states = [self.state[parameter] for parameter in parameters]
        for state in states:
            state["steps"] += 1
        momentums = [state["momentum"] for state in states]
        mean_squares = [state["mean_square"] for state in states]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if group["clip"] is not None:
            gradients = clip_adaptively(gradients, parameters, group["clip"])
        beta1, beta2 = group["betas"]
        corrections = [1 - beta ** states[0]["steps"] for beta in (beta1, beta2)]
        torch._foreach_mul_(mean_squares, beta2)
        torch._foreach_addcmul_(mean_squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_div(mean_squares, corrections[1])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        scaled = torch._foreach_div(gradients, roots)
        torch._foreach_lerp_(momentums, scaled, 1 - beta1)
        torch._foreach_add_(parameters, momentums, alpha=-group["lr"] / corrections[0])
