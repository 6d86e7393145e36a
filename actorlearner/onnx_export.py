"""A network of action values as an ONNX file that other programs run without torch."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from actorlearner.config import optional_library
from actorlearner.contracts import ActorLearnerError, Array, ArraySpec, EnvSpec, Observation

_TRIALS = (1, 2, 32)
"""Batch sizes of the random observations that both versions are asked for."""


def export_action_values(network: nn.Module, env_spec: EnvSpec, path: str | Path) -> Path:
    """Write ``network`` and the choice of its best action, compare both versions, return the path.

    The file's inputs are the keys of ``env_spec.observation``: ``[B, *stacked_shape]`` for any
    ``B``, each in its own dtype (images as they come; categories count from 0). Its outputs are
    ``values``, float32 ``[B, A]``, and ``action``, ``[B, ...]`` as in the record: counted from 0.

    Args:
        network: gives action values ``[B, A]`` of a mapping of tensors; it is copied.
        env_spec: of the environment; its action has categories.
        path: of the file, which is replaced if there is one.

    Raises:
        BadInput: a package is missing.
        ActorLearnerError: the file gives other values or actions than ``network``; it was not
            kept.
        OSError: it can't be written.
    """
    for library in ("onnx", "onnxscript"):
        optional_library(library, "onnx", "export")
    path = Path(path)
    unchecked = path.with_name(f"{path.name}.tmp")
    copied = copy.deepcopy(network).to("cpu", torch.float32)
    greedy = _Greedy(copied, env_spec).eval().requires_grad_(False)
    generator = np.random.default_rng(0)
    trials = [random_observation(env_spec.observation, size, generator) for size in _TRIALS]
    try:
        _write(greedy, trials[1], unchecked)
        _compare(greedy, unchecked, trials)
        os.replace(unchecked, path)
    finally:
        unchecked.unlink(missing_ok=True)
    return path


class _Greedy(nn.Module):
    """Action values, and the best action."""

    def __init__(self, network: nn.Module, env_spec: EnvSpec) -> None:
        super().__init__()
        self.network = network
        self._keys = tuple(env_spec.observation)
        self._action = env_spec.action

    def forward(self, arrays: list[Tensor]) -> tuple[Tensor, Tensor]:
        values_BA: Tensor = self.network(dict(zip(self._keys, arrays, strict=True)))
        number_B = values_BA.argmax(1)
        if self._action.is_discrete:
            return values_BA, number_B
        parts = []
        for count in reversed(self._action.categories):  # the last part counts fastest
            parts.append(number_B % count)
            number_B = number_B // count
        stacked = torch.stack(parts[::-1], 1).to(getattr(torch, self._action.dtype))
        return values_BA, stacked.unflatten(1, self._action.shape)


def random_observation(
    specs: Mapping[str, ArraySpec], size: int, generator: np.random.Generator
) -> Observation:
    """Numbers that ``specs`` allow, ``[size, *stacked_shape]`` each."""
    observation = {}
    for key, spec in specs.items():
        shape, kind = (size, *spec.stacked_shape), np.dtype(spec.dtype).kind
        if spec.categories:
            highest = np.reshape(spec.categories, spec.shape)
            array: Array = generator.integers(highest, size=shape)
        elif kind == "f":
            array = generator.standard_normal(shape)
        else:
            array = generator.integers(2 if kind == "b" else 128, size=shape)
        observation[key] = array.astype(spec.dtype)
    return observation


def _tensors(observation: Observation) -> list[Tensor]:
    return [torch.from_numpy(array) for array in observation.values()]


def _write(greedy: nn.Module, example: Observation, path: Path) -> None:
    traced(greedy, example, ["values", "action"], path)


def traced(
    network: nn.Module,
    example: Observation,
    outputs: Sequence[str],
    path: Path | None = None,
    folds: bool = True,
) -> Any:
    """``network`` as torch's exporter gives it, a ``torch.onnx.ONNXProgram``.

    Args:
        network: of a list of tensors ``[B, ...]``, for any ``B``.
        example: what goes in, at least 2 of each; its keys become names of inputs.
        outputs: names.
        path: where it is written to; None for nowhere.
        folds: compute here what depends on nothing but weights.
    """
    batch = torch.export.Dim("batch")
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)  # it tells of every package that it could use and has not
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.onnx.export(
                network,
                (_tensors(example),),
                path,
                input_names=list(example),
                output_names=list(outputs),
                dynamic_shapes=([{0: batch} for _ in example],),
                dynamo=True,
                optimize=folds,
                external_data=False,
                verbose=False,
            )
    finally:
        exporter.setLevel(level)


def _compare(greedy: nn.Module, path: Path, trials: list[Observation]) -> None:
    """Ask both versions the same.

    Raises:
        ActorLearnerError: they answer differently.
    """
    onnxruntime = optional_library("onnxruntime", "onnx", "export")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for trial in trials:
        values, action = session.run(["values", "action"], trial)
        with torch.inference_mode():
            wanted_values, wanted_action = (output.numpy() for output in greedy(_tensors(trial)))
        scale = max(1.0, float(np.abs(wanted_values).max()))
        error = float(np.abs(values - wanted_values).max()) / scale
        # Sums in another order round differently, and so may choose another of equal actions.
        best = np.sort(wanted_values, 1)
        is_tie = best[:, -1] - best[:, -2:][:, 0] < 1e-3 * scale
        differs = (action != wanted_action).reshape(len(action), -1).any(1) & ~is_tie
        if not error < 1e-3 or differs.any():
            raise ActorLearnerError(
                f"{path.stem}: the ONNX version differs for {int(differs.sum())} of "
                f"{len(differs)} random observations, its values by {error:.1e} of the largest; "
                "it was not kept"
            )
