"""Optimisers that torch does not have, and steps that are left out where they would do harm."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, overload

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
    serves them all. Like torch's fused optimisers it heeds ``found_inf`` (see `FiniteSteps`).
    """

    _step_supports_amp_scaling = True  # where torch's optimisers say that they heed it

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
        options = {"lr": lr, "betas": betas, "eps": eps, "clip": clip}
        # "capturable" has torch load counts of steps as float32 to where the parameters are.
        super().__init__(parameters, {**options, "capturable": True})

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
            self._step(group, getattr(self, "found_inf", None))
        return loss

    def _step(self, group: dict[str, Any], found_inf: Tensor | None) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        for parameter in parameters:
            if not (state := self.state[parameter]):
                state["momentum"] = torch.zeros_like(parameter)
                state["mean_square"] = torch.zeros_like(parameter)
                # Not of the group, whose options a resumed run sets anew.
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        states = [self.state[parameter] for parameter in parameters]
        momentums = [state["momentum"] for state in states]
        mean_squares = [state["mean_square"] for state in states]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        betas = beta1, beta2 = group["betas"]
        made: Tensor | float = 1.0
        if found_inf is not None:
            made = 1 - found_inf
            # With gradients of zero, and averages that keep all they have, nothing changes.
            gradients = [gradient.where(found_inf == 0, 0) for gradient in gradients]
            betas = beta1**made, beta2**made
        step = states[0]["step"]
        step += made
        for state in states:
            state["step"] = step  # one for all, of which a checkpoint makes many
        if group["clip"] is not None:
            gradients = clip_adaptively(gradients, parameters, group["clip"])
        corrections = [_share_seen(beta, step, parameters[0].dtype) for beta in (beta1, beta2)]
        torch._foreach_mul_(mean_squares, betas[1])
        torch._foreach_addcmul_(mean_squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_div(mean_squares, corrections[1])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        scaled = torch._foreach_div(gradients, roots)
        torch._foreach_mul_(momentums, betas[0])
        torch._foreach_add_(momentums, scaled, alpha=1 - beta1)
        rate = -group["lr"] * made / corrections[0]
        torch._foreach_add_(parameters, torch._foreach_mul(momentums, rate))


def _share_seen(beta: float, step: Tensor, dtype: torch.dtype) -> Tensor:
    """``1 - beta ** step``, but without its rounding; of no step as of one."""
    exact = step.clamp(min=1).to(torch.promote_types(dtype, torch.float32))
    return -torch.expm1(exact * math.log(max(beta, sys.float_info.min)))


# ------------------------------------------------------------------------------- finite steps


class LeftOut(NamedTuple):
    """Steps that were not made.

    Attributes:
        updates: how many updates left theirs out.
        first: the number of the first of them.
    """

    updates: int
    first: int


class FiniteSteps:
    """Makes the steps of optimisers, except where the loss or its gradient is not finite.

    On the CPU it reads whether they are before each step. On an accelerator the host would have to
    wait for the device to read it, in every update; there the device itself leaves the step out:
    neither parameters nor the optimiser's state change, and the host reads at `flush` how many
    there were. This needs an optimiser that heeds ``found_inf``, as `torch.amp.GradScaler` sets it:
    `LaProp`, and torch's own with ``fused=True``. For any other, and in the first step of each,
    which may make its state, the host reads at once.
    """

    def __init__(self, reads_at_once: bool) -> None:
        """Nothing was left out yet.

        Args:
            reads_at_once: whether reading costs nothing, as on the CPU.
        """
        self._reads_at_once = reads_at_once
        self._begun: set[str] = set()
        self._counts: dict[str, Tensor] = {}
        self._firsts: dict[str, Tensor] = {}

    def step(
        self, name: str, optimizer: torch.optim.Optimizer, is_finite: Tensor, update: int
    ) -> Tensor | bool:
        """One step, or none.

        Args:
            name: of the training step.
            optimizer: whose parameters have their gradients.
            is_finite: bool, a scalar.
            update: its number.

        Returns:
            Whether the step was made: ``is_finite``, as a bool if it was read.
        """
        heeds = getattr(optimizer, "_step_supports_amp_scaling", False)
        if self._reads_at_once or not heeds or name not in self._begun:
            if made := bool(is_finite):
                optimizer.step()
                self._begun.add(name)
            else:
                self._note(name, torch.ones((), device=is_finite.device), update)
            return made
        missed = (~is_finite).float()
        optimizer.found_inf = missed  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]
        self._note(name, missed, update)
        return is_finite

    def _note(self, name: str, missed: Tensor, update: int) -> None:
        first = update / missed  # infinite if it was made
        if name in self._counts:
            self._counts[name] += missed
            self._firsts[name] = torch.minimum(self._firsts[name], first)
        else:
            self._counts[name], self._firsts[name] = missed, first

    def flush(self) -> dict[str, LeftOut]:
        """By name, what was left out since the last flush; read in one transfer."""
        names, counts, firsts = list(self._counts), self._counts.values(), self._firsts.values()
        read = torch.stack([*counts, *firsts]).tolist() if names else []
        self._counts, self._firsts = {}, {}
        pairs = zip(names, read[: len(names)], read[len(names) :], strict=True)
        return {name: LeftOut(int(count), int(first)) for name, count, first in pairs if count}
