"""A small agent that learns from sequences, and policies that remember.

Worker processes import this module, so it imports nothing that is slow to load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from actorlearner.contracts import (
    Array,
    ArraySpec,
    EnvSpec,
    Observation,
    SequenceBatch,
    SequenceSpec,
    Snapshot,
    StepOutput,
)

HIDDEN = 4
LATENTS = {"hidden": ArraySpec((HIDDEN,), "float32"), "coin": ArraySpec((), "uint8")}
"""What is drawn with the hidden state decides how it goes on: it can't be worked out again."""


class Dreamlet(nn.Module):
    """Predicts rewards by a recurrent state (step ``world``), then acts on it (``controller``).

    Two training steps with an optimizer each: the first hands over features without their graph,
    and feeds back latents.
    """

    def __init__(
        self, world_lr: float = 0.05, controller_lr: float = 0.05, length: int = 6
    ) -> None:
        super().__init__()
        self.learning_rates = {"world": world_lr, "controller": controller_lr}
        self.length = length

    def build(self, env_spec: EnvSpec) -> None:
        if not hasattr(self, "world"):
            (observation,) = env_spec.observation.values()
            self.num_actions = env_spec.action.categories[0]
            size = observation.shape[0] + HIDDEN + 1 + self.num_actions
            self.world = nn.ModuleDict(
                {"cell": nn.Linear(size, HIDDEN), "coin": nn.Linear(HIDDEN, 1),
                 "reward": nn.Linear(HIDDEN, 1)}
            )  # fmt: skip
            self.controller = nn.Linear(HIDDEN + 1, self.num_actions)

    @property
    def sample_spec(self) -> SequenceSpec:
        return SequenceSpec(batch_size=4, length=self.length, latents=LATENTS)

    def policy_factory(self, extras: Sequence[str] = ()) -> DreamletPolicyFactory:
        assert not extras
        return DreamletPolicyFactory()

    @property
    def scalars(self) -> dict[str, float]:
        return {}

    def snapshot(self, version: int) -> Snapshot:
        arrays = {k: v.detach().numpy() for k, v in self.state_dict().items()}
        return Snapshot(version, arrays)

    def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {
            name: torch.optim.SGD(getattr(self, name).parameters(), lr=rate, momentum=0.9)
            for name, rate in self.learning_rates.items()
        }

    def training_steps(self) -> dict[str, Callable[[Any], StepOutput]]:
        return {"world": self.world_step, "controller": self.controller_step}

    def world_step(self, batch: SequenceBatch) -> StepOutput:
        hidden, coin = batch.extras["hidden"][0], batch.extras["coin"][0].float()
        hiddens, coins = [hidden], [coin]
        one_hot = nn.functional.one_hot(batch.action, self.num_actions).float()
        for t in range(1, self.length + 1):
            keeps = (~batch.first[t]).float()[:, None]
            inputs = [
                batch.observation["observation"][t],
                hidden * keeps,
                coin[:, None] * keeps,
                one_hot[t - 1] * keeps,
            ]
            hidden = torch.tanh(self.world["cell"](torch.cat(inputs, 1)))
            head = torch.sigmoid(self.world["coin"](hidden.detach())[:, 0])
            coin = (torch.rand(head.shape) < head).float()
            hiddens.append(hidden)
            coins.append(coin)
        all_hidden, all_coins = torch.stack(hiddens), torch.stack(coins)
        arrived = torch.where(batch.first[1:], 0.0, batch.reward[:-1])
        loss = (self.world["reward"](all_hidden[1:])[..., 0] - arrived).square().mean()
        features = torch.cat([all_hidden, all_coins[..., None]], -1)[1:].detach()
        return StepOutput(
            loss,
            {"loss": loss},
            {"hidden": all_hidden, "coin": all_coins.to(torch.uint8)},
            carry=(features, batch),
        )

    def controller_step(self, carry: tuple[Tensor, SequenceBatch]) -> StepOutput:
        features, batch = carry
        assert not features.requires_grad
        log_probs = self.controller(features).log_softmax(-1)
        taken = log_probs.gather(-1, batch.action[1:, :, None])[..., 0]
        loss = -(taken * (batch.reward[1:] - 0.5) * batch.valid[1:]).mean()
        return StepOutput(loss, {"loss": loss})

    def after_step(self, name: str, updates: int) -> None:
        pass


class DreamletPolicyFactory:
    """Makes `DreamletPolicy`."""

    extras_spec: ClassVar[Mapping[str, ArraySpec]] = LATENTS
    state_spec: ClassVar[Mapping[str, ArraySpec]] = {**LATENTS, "action": ArraySpec((), "int64")}

    def __call__(
        self, env_spec: EnvSpec, streams: Sequence[int], num_streams: int, greedy: bool
    ) -> DreamletPolicy:
        return DreamletPolicy(env_spec.action.categories[0])


class DreamletPolicy:
    """Acts for `Dreamlet`, by chance."""

    def __init__(self, num_actions: int) -> None:
        self._num_actions = num_actions

    def load(self, snapshot: Snapshot) -> None:
        self._arrays = {name: array.copy() for name, array in snapshot.arrays.items()}

    def reset(self, first: Array) -> None:
        if first.all():
            specs = DreamletPolicyFactory.state_spec
            self._state = {name: spec.zeros(len(first)) for name, spec in specs.items()}
            self._begins = first.copy()
            return
        for array in self._state.values():
            array[first] = 0
        self._begins = self._begins | first

    def state(self) -> Mapping[str, Array]:
        return self._state

    def set_state(self, state: Mapping[str, Array]) -> None:
        self._state = {name: array.copy() for name, array in state.items()}
        self._begins = np.zeros(len(state["coin"]), np.bool_)

    def act(self, observation: Observation, generator: np.random.Generator | None) -> Any:
        state, count = self._state, len(observation["observation"])
        one_hot = np.eye(self._num_actions, dtype=np.float32)[state["action"]]
        one_hot[self._begins] = 0  # nothing has been done before
        inputs = [
            observation["observation"], state["hidden"], state["coin"][:, None], one_hot
        ]  # fmt: skip
        hidden = np.tanh(self._linear("world.cell", np.concatenate(inputs, 1)))
        heads = self._linear("world.coin", hidden)[:, 0] > self._draw(generator, count)
        coin = heads.astype(np.uint8)
        logits = self._linear("controller", np.concatenate([hidden, coin[:, None]], 1))
        gumbel = -np.log(-np.log(self._draw(generator, (count, self._num_actions))))
        action = (logits + gumbel).argmax(1)
        self._state = {"hidden": hidden.astype(np.float32), "coin": coin, "action": action}
        self._begins = np.zeros(count, np.bool_)
        return action, {"hidden": self._state["hidden"], "coin": coin}

    @staticmethod
    def _draw(generator: np.random.Generator | None, shape: Any) -> Array:
        return np.full(shape, 0.5) if generator is None else generator.random(shape)

    def _linear(self, name: str, inputs: Array) -> Array:
        return inputs @ self._arrays[f"{name}.weight"].T + self._arrays[f"{name}.bias"]


class CountingPolicy:
    """Acts by how many observations it has seen since it last forgot; notes that in an extra.

    A mixed-up column or a missing `reset` shows in every number that follows.
    """

    extras_spec: ClassVar[Mapping[str, ArraySpec]] = {"seen": ArraySpec((), "int16")}
    state_spec: ClassVar[Mapping[str, ArraySpec]] = {"seen": ArraySpec((), "int16")}

    def __init__(
        self,
        env_spec: EnvSpec | None = None,
        streams: Sequence[int] = (),
        num_streams: int = 0,
        greedy: bool = False,
    ) -> None:
        pass

    def load(self, snapshot: Snapshot) -> None:
        pass

    def reset(self, first: Array) -> None:
        if first.all():
            self._seen = np.zeros(len(first), np.int16)
        self._seen[first] = 0

    def state(self) -> Mapping[str, Array]:
        return {"seen": self._seen}

    def set_state(self, state: Mapping[str, Array]) -> None:
        self._seen = state["seen"].copy()

    def act(self, observation: Observation, generator: np.random.Generator | None) -> Any:
        self._seen = self._seen + np.int16(1)
        return self._seen.astype(np.int64), {"seen": self._seen}
