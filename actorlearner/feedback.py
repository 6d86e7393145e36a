"""The way of feedback from the training steps back to the store."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actorlearner.contracts import Store


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Feedback of one training step, on its way to the CPU.

    Attributes:
        keys: of the rows.
        tensors: on the CPU, valid once ``arrival`` is.
        is_made: whether the step was made, likewise.
        arrival: of the copies.
    """

    keys: NDArray[np.int64]
    tensors: dict[str, Tensor]
    is_made: Tensor
    arrival: torch.Event


class FeedbackLine:
    """Hands feedback to the store: from the CPU at once, from an accelerator an update later.

    There the copy is made beside the next update, so that the host need not wait for the device.
    Feedback of a step that was not made is thrown away: a loss that is not finite has priorities
    and latents that are not.
    """

    def __init__(self, store: Store, is_at_once: bool, span: AbstractContextManager[None]) -> None:
        """Nothing is on its way.

        Args:
            store: that takes the feedback.
            is_at_once: whether it lies on the CPU.
            span: entered while the store takes it, as often as that is.
        """
        self._store = store
        self._is_at_once = is_at_once
        self._span = span
        self._sent: list[_Parcel] = []
        self._due: list[_Parcel] = []

    def send(
        self, keys: NDArray[np.int64], feedback: Mapping[str, Tensor], is_made: Tensor | bool
    ) -> None:
        """Take what a training step said of the rows ``keys``.

        Args:
            keys: of the batch.
            feedback: see `StepOutput.feedback`; may be empty.
            is_made: whether the step was made (`FiniteSteps.step`).
        """
        if not feedback or is_made is False:
            return
        if self._is_at_once:
            self._hand_over(keys, {name: tensor.detach() for name, tensor in feedback.items()})
            return
        tensors = {name: _copied(tensor.detach()) for name, tensor in feedback.items()}
        made = torch.tensor(is_made) if isinstance(is_made, bool) else _copied(is_made)
        arrival = torch.Event(next(iter(feedback.values())).device)
        arrival.record()
        self._sent.append(_Parcel(keys, tensors, made, arrival))

    def deliver(self) -> None:
        """At the end of an update: hand over what was sent in the one before."""
        due, self._due, self._sent = self._due, self._sent, []
        for parcel in due:
            parcel.arrival.synchronize()
            if parcel.is_made:
                self._hand_over(parcel.keys, parcel.tensors)

    def _hand_over(self, keys: NDArray[np.int64], tensors: Mapping[str, Tensor]) -> None:
        with self._span:
            self._store.feed_back(keys, {name: tensor.numpy() for name, tensor in tensors.items()})

    def flush(self) -> None:
        """Hand over all that was sent: before the store is saved."""
        self.deliver()
        self.deliver()


def _copied(tensor: Tensor) -> Tensor:
    """On the CPU, some time later: torch takes pinned memory for a copy that does not block."""
    return tensor.to("cpu", non_blocking=True)
