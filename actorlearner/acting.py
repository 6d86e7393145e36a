"""How workers run the network of a policy: by torch or onnxruntime, in float32 or bfloat16.

The learner makes up its mind once (`choose`) and tells its workers (`contracts.Acting`), which
`equip` their policies. An algorithm knows nothing of it: its policy is a `NetworkPolicy`.
"""

from __future__ import annotations

import copy
import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from actorlearner.config import Settings, optional_library
from actorlearner.contracts import (
    Acting,
    Array,
    BadInput,
    EnvSpec,
    NetworkPolicy,
    Observation,
    Policy,
    SettingError,
)
from actorlearner.networks import EagerForward, ImageEncoder
from actorlearner.onnx_export import random_observation, traced

logger = logging.getLogger(__name__)

_OUTPUT = "numbers"
_TRIAL_S = 0.05  # of each measurement
_TRIALS = 5


@dataclass(frozen=True, kw_only=True)
class ActingSettings(Settings):
    """Settings of how workers run their policies; evaluations are in float32, by torch."""

    group = "acting"

    backend: Literal["eager", "onnx", "auto"] = "eager"
    """What runs the network: eager (torch), onnx (onnxruntime, which takes seconds to begin), or
    auto for the faster of both, as measured when the run begins."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the convolutions; bfloat16 is faster on processors that know it, and rounds."""

    def check(self) -> None:
        """The lower precision is torch's."""
        if self.precision == "bfloat16" and self.backend == "onnx":
            raise SettingError(
                f"{self.key('precision')}=bfloat16: onnxruntime computes in float32 on a CPU; set "
                f"{self.key('backend')}=eager"
            )


class OnnxForward:
    """Runs a network by onnxruntime, on the weights that the network has.

    Weights of convolutions are constants to onnxruntime, which lays them out anew, and so a session
    is made for each snapshot; without that convolutions are slower than torch's. All other weights,
    most of them, are inputs that share the memory of the network's own.
    """

    def __init__(self, acting: Acting, network: nn.Module) -> None:
        """Run the graph of ``acting``.

        Args:
            acting: of `choose`.
            network: on the CPU; its weights may change in place, which `adopt` is told.

        Raises:
            BadInput: onnxruntime is missing.
        """
        self._onnxruntime = optional_library("onnxruntime", "onnx", "acting.backend=onnx")
        self._acting = acting
        as_value = self._onnxruntime.OrtValue.ortvalue_from_numpy  # shares memory
        weights = network.state_dict(keep_vars=True).items()
        self._values = {name: as_value(weight.detach().numpy()) for name, weight in weights}
        self._start_session()

    def adopt(self) -> None:
        """The network's weights have changed."""
        if self._acting.constants:
            self._start_session()

    def _start_session(self) -> None:
        runtime = self._onnxruntime
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        constants = self._acting.constants
        if constants:
            values = [self._values[name] for name in constants]
            options.add_external_initializers(list(constants), values)
        session = runtime.InferenceSession(
            self._acting.graph, options, providers=["CPUExecutionProvider"]
        )
        self._binding = session.io_binding()
        for given in session.get_inputs():
            if given.name in self._values:
                self._binding.bind_ortvalue_input(given.name, self._values[given.name])
        self._binding.bind_output(_OUTPUT)
        self._session = session

    def __call__(self, observation: Observation) -> Array:
        """See `NetworkPolicy.forward`."""
        for key, array in observation.items():
            self._binding.bind_cpu_input(key, np.ascontiguousarray(array))
        self._session.run_with_iobinding(self._binding)
        numbers: Array = self._binding.copy_outputs_to_cpu()[0]
        return numbers


def onnx_acting(network: nn.Module, env_spec: EnvSpec, batch_size: int) -> Acting:
    """``network`` as a graph without weights, for `OnnxForward`.

    Args:
        network: see `NetworkPolicy`; it is not changed.
        env_spec: its observation is what goes in.
        batch_size: to look at the result with.

    Raises:
        BadInput: a package is missing, or onnxruntime does not get the same numbers of other
            weights, because it can't do with this network.
    """
    for library in ("onnx", "onnxscript", "onnxruntime"):
        optional_library(library, "onnx", "acting.backend=onnx")
    import onnx

    generator = np.random.default_rng(0)
    copied = copy.deepcopy(network).to("cpu", torch.float32).requires_grad_(False).eval()
    example = random_observation(env_spec.observation, 2, generator)
    by_key = _ByKey(copied, list(example))
    model = traced(by_key, example, [_OUTPUT], folds=False).model_proto
    weights = {f"network.{name}": name for name in copied.state_dict()}
    for node in model.graph.node:
        node.input[:] = [weights.get(name, name) for name in node.input]
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    constants = _before(model, [name for node in convolutions for name in node.input[1:]])
    initializers = list(model.graph.initializer)
    del model.graph.initializer[:]
    for tensor in initializers:
        if tensor.name not in weights:
            model.graph.initializer.append(tensor)
            continue
        name = weights[tensor.name]
        if name in constants:
            empty = onnx.TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims)
            empty.data_location = onnx.TensorProto.EXTERNAL
            empty.external_data.add(key="location", value=name)
            model.graph.initializer.append(empty)
        else:
            given = onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
            model.graph.input.append(given)
    named = {weights[tensor.name] for tensor in initializers if tensor.name in weights}
    acting = Acting(graph=model.SerializeToString(), constants=tuple(sorted(constants & named)))
    _compare(acting, copied, random_observation(env_spec.observation, batch_size, generator))
    return acting


def _before(model: Any, names: Sequence[str]) -> set[str]:
    """``names``, and those of everything in the graph that they are computed from."""
    inputs = {output: node.input for node in model.graph.node for output in node.output}
    found, left = set[str](), list(names)
    while left:
        found.add(name := left.pop())
        left += inputs.get(name, [])
    return found


class _ByKey(nn.Module):
    """A network of a mapping as one of a list, which an export can name the parts of."""

    def __init__(self, network: nn.Module, keys: Sequence[str]) -> None:
        super().__init__()
        self.network = network
        self._keys = keys

    def forward(self, arrays: list[Tensor]) -> Tensor:
        numbers: Tensor = self.network(dict(zip(self._keys, arrays, strict=True)))
        return numbers


def _compare(acting: Acting, network: nn.Module, trial: Observation) -> None:
    """Have both answer by weights that the graph was not made with."""
    forward = OnnxForward(acting, network)
    for parameter in network.parameters():
        parameter.mul_(0.9).add_(0.01)
    forward.adopt()
    wanted = EagerForward(network)(trial)
    scale = max(1.0, float(np.abs(wanted).max()))
    error = float(np.abs(forward(trial) - wanted).max()) / scale
    if not error < 1e-3:
        raise BadInput(
            f"acting.backend=onnx: onnxruntime's numbers differ from torch's by {error:.1e} of the "
            "largest, so it can't run this network; set acting.backend=eager"
        )


# --------------------------------------------------------------------------- learner and worker


def choose(
    settings: ActingSettings,
    policy: Policy,
    env_spec: EnvSpec,
    num_columns: int,
    unroll_length: int,
    cache: Path | None,
) -> Acting:
    """What workers shall be told.

    Args:
        settings: where they leave a choice, the time is taken of what there is.
        policy: as workers have it; it is not used any more.
        env_spec: of its observations.
        num_columns: of a worker.
        unroll_length: rows between two snapshots, each of which `OnnxForward.adopt` is told.
        cache: a file that keeps what was chosen; None for no such.

    Raises:
        BadInput: the policy can't be run as is asked for, or a package is missing.
    """
    key = f"{settings.key('backend')}={settings.backend}"
    if not isinstance(policy, NetworkPolicy):
        if settings.precision != "float32":
            key = f"{settings.key('precision')}={settings.precision}"
        elif settings.backend != "onnx":
            return Acting()
        raise BadInput(
            f"{key}: {type(policy).__name__} is no single network; only torch can run it, in "
            "float32: leave the settings of acting as they come"
        )
    if settings.precision != "float32" or settings.backend == "eager":
        return Acting(precision=settings.precision)
    if policy.has_noise:
        if settings.backend == "auto":
            return Acting()
        raise BadInput(
            f"{key}: {type(policy).__name__} has noise in its network, which only torch can run; "
            f"set {settings.key('backend')}=eager"
        )
    if settings.backend == "onnx":
        return onnx_acting(policy.network, env_spec, num_columns)
    return _faster(policy, env_spec, num_columns, unroll_length, cache)


def _faster(
    policy: NetworkPolicy,
    env_spec: EnvSpec,
    num_columns: int,
    unroll_length: int,
    cache: Path | None,
) -> Acting:
    case = [repr(policy.network), num_columns, unroll_length, platform.node()]
    if cache is not None and (known := _read(cache, case)) is not None:
        logger.info("Acting by %s, as was measured before (%s).", known, cache.name)
        return onnx_acting(policy.network, env_spec, num_columns) if known == "onnx" else Acting()
    try:
        acting = onnx_acting(policy.network, env_spec, num_columns)
    except BadInput as error:
        logger.info("Acting by eager: %s", error)
        return Acting()
    trial = random_observation(env_spec.observation, num_columns, np.random.default_rng(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in workers
    try:
        forward, eager = OnnxForward(acting, policy.network), EagerForward(policy.network)
        adopting_s = _seconds(forward.adopt)
        times = {
            "eager": _seconds(lambda: eager(trial)),
            "onnx": _seconds(lambda: forward(trial)) + adopting_s / unroll_length,
        }
    finally:
        torch.set_num_threads(threads)
    best = min(times, key=lambda name: times[name])
    told = ", ".join(f"{name} {1e6 * seconds:,.0f} us" for name, seconds in times.items())
    logger.info("Acting by %s; a policy's step of %d envs: %s.", best, num_columns, told)
    if cache is not None:
        cache.write_text(json.dumps({"case": case, "backend": best, "seconds": times}) + "\n")
    return acting if best == "onnx" else Acting()


def _read(cache: Path, case: list[Any]) -> str | None:
    """The backend that ``cache`` tells of for ``case``."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(cache.read_text())
        if told["case"] == case and told["backend"] in ("eager", "onnx"):
            return str(told["backend"])
    return None


def _seconds(work: Callable[[], object]) -> float:
    """CPU seconds that ``work`` takes, which other processes disturb the least."""
    work()
    taken = []
    for _ in range(_TRIALS):
        count, since = 0, time.process_time()
        while (now := time.process_time()) - since < _TRIAL_S:
            work()
            count += 1
        taken.append((now - since) / count)
    return min(taken)


def equip(policy: Policy, acting: Acting) -> Callable[[], None]:
    """Have ``policy`` run its network as ``acting`` says.

    Args:
        policy: a new one.
        acting: of `choose`.

    Returns:
        What to call after each `Policy.load`.
    """
    if isinstance(policy, NetworkPolicy):
        if acting.precision == "bfloat16":
            for module in policy.network.modules():
                if isinstance(module, ImageEncoder):
                    module.convolve_in(torch.bfloat16)
        if acting.graph:
            policy.forward = forward = OnnxForward(acting, policy.network)
            return forward.adopt
    return _nothing_to_do


def _nothing_to_do() -> None:
    """Torch takes a network's weights where they are."""
