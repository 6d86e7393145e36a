"""The records, protocols and errors that every other module speaks in: read this first.

One unroll goes ``env -> worker -> launcher -> store -> sample -> training step``. Arrays are
time-major: ``T`` rows (one per decision), ``B`` columns (one per *stream*: one environment slot of
one worker). A row is a *departure*: what was seen, what was done, and what came of it.

===========================  =================================================================
``observation[t]``           what the policy saw; row ``T`` is what it sees next
``action[t]``                what it did (an index for discrete spaces)
``reward[t]``                what the environment paid for it, raw
``terminated[t]``            the episode truly ended here: do not bootstrap
``truncated[t]``             the episode was cut here: bootstrap from ``observation[t + 1]``
``valid[t]``                 False on a *reset row*, which is no decision at all
``first[t]``                 ``observation[t]`` is the first of its episode
===========================  =================================================================

The observation after a valid row is always its true successor. An episode ends exactly where the
next row is a reset row: its observation is the true final one, its action is ignored, its flags are
False and its reward 0; the row after it is ``first``. A reset row is never an env step. A life lost
is a row that is ``terminated`` without a reset row behind it: the episode goes on.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    overload,
    runtime_checkable,
)

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import gymnasium
    import torch
    from torch import Tensor

Array: TypeAlias = NDArray[Any]
Observation: TypeAlias = dict[str, Array]
"""Flat mapping from key to array, each in its own dtype. A plain space uses `OBSERVATION`."""

InfoMetrics: TypeAlias = tuple[tuple[str, float], ...]
"""Finite numbers by name, out of the ``info`` with which an episode ended."""

OBSERVATION = "observation"
"""The key of an observation space that is not a Dict or a Tuple."""


# ------------------------------------------------------------------------------------- errors


class ActorLearnerError(Exception):
    """Base of every error that this package raises on purpose."""


class BadInput(ActorLearnerError, ValueError):
    """The user asked for something that can't be: one line says what, where, and what to do."""


class SettingError(BadInput):
    """A setting has an unknown key, a wrong type, or a value out of its bounds."""


class UnsupportedSpace(BadInput):
    """An observation or action space that the environment adapter or the agent can't use."""


class CheckpointError(BadInput):
    """A checkpoint is missing, damaged, or of another agent or environment."""


class NonFiniteError(ActorLearnerError):
    """A NaN or infinity turned up in an observation, a reward, a loss or a gradient."""


class LauncherClosed(ActorLearnerError, RuntimeError):
    """A launcher was used before `start` or after `close`."""


class WorkerError(ActorLearnerError, RuntimeError):
    """One or more workers failed.

    Attributes:
        failures: what is known of each, the first cause first.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = tuple(failures)
        super().__init__("\n".join(failure.text() for failure in self.failures))


# ------------------------------------------------------------------------------- descriptions


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of one array, and how many values each entry can take.

    Attributes:
        shape: without time and batch axes.
        dtype: NumPy's name of it (``"uint8"``).
        categories: for discrete data the number of values of each entry, flattened (``(n,)`` for
            ``Discrete(n)``); empty for Box data. Categorical values count from 0.
        stack: frames that policies and agents see together, the newest last, along an axis in
            front of ``shape``; records and stores hold each frame once, without that axis.
        low: of a Box action the lowest value of each entry, flattened; empty for all other data,
            and where an entry has no finite bounds.
        high: likewise the highest.
    """

    shape: tuple[int, ...]
    dtype: str
    categories: tuple[int, ...] = ()
    stack: int = 1
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """What policies and agents get: ``shape``, behind an axis of frames if there are more."""
        return self.shape if self.stack == 1 else (self.stack, *self.shape)

    @property
    def is_discrete(self) -> bool:
        """Whether this is one choice among ``categories[0]`` values."""
        return self.shape == () and len(self.categories) == 1

    def zeros(self, *leading: int) -> Array:
        """An array of zeros with axes ``leading`` in front of `shape`."""
        return np.zeros((*leading, *self.shape), dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class NativeSpec:
    """How the environment itself holds what an `ArraySpec` describes.

    Attributes:
        dtype: NumPy's name of the space's own dtype.
        path: keys and indices that lead there through Dict and Tuple spaces.
        start: of categorical data the environment's value of each entry's category 0, flattened;
            empty where all count from 0.
    """

    dtype: str
    path: tuple[str | int, ...] = ()
    start: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What an agent and a store need to know of an environment.

    Attributes:
        name: the Gymnasium id, or the name of the class or callable.
        observation: one spec per key.
        action: the spec of one action.
        observation_space: the Gymnasium space in words, for error messages.
        action_space: likewise.
        native_observation: where each key comes from; empty if it isn't known.
        native_action: what the environment takes; None if it isn't known.
    """

    name: str
    observation: dict[str, ArraySpec]
    action: ArraySpec
    observation_space: str = ""
    action_space: str = ""
    native_observation: dict[str, NativeSpec] = field(default_factory=dict)
    native_action: NativeSpec | None = None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> EnvSpec:
        """The spec that `dataclasses.asdict` and JSON made ``fields`` of.

        Raises:
            TypeError: these are other fields.
            KeyError: likewise.
        """

        def of(kind: Any, values: Mapping[str, Any]) -> Any:
            return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

        known: dict[str, Any] = dict(fields)
        for name, kind in (("observation", ArraySpec), ("native_observation", NativeSpec)):
            known[name] = {key: of(kind, values) for key, values in known[name].items()}
        known["action"] = of(ArraySpec, known["action"])
        known["native_action"] = of(NativeSpec, known["native_action"])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """What an agent wants of one batch of transitions.

    Attributes:
        batch_size: transitions in a batch.
        n_step: rewards summed before bootstrapping.
        gamma: discount per env step.
        reward_clip: rewards are clipped to ``[-reward_clip, reward_clip]`` in the batch (the store
            keeps them raw); None leaves them as they are.
    """

    batch_size: int
    n_step: int = 1
    gamma: float = 0.99
    reward_clip: float | None = None

    @property
    def num_rows(self) -> int:
        """Rows that one batch is learned from."""
        return self.batch_size


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What an agent wants of one batch of sequences.

    Attributes:
        batch_size: sequences in a batch.
        length: rows of each that are learned from; one row of context more is in front of them.
        latents: extras that the store keeps, hands out and takes back as feedback, by name; the
            agent's policy notes them of every row.
    """

    batch_size: int
    length: int
    latents: Mapping[str, ArraySpec] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows that one batch is learned from."""
        return self.batch_size * self.length


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """How experience arrives.

    Attributes:
        num_streams: environment slots over all workers.
        unroll_length: rows in an unroll.
    """

    num_streams: int
    unroll_length: int


# ------------------------------------------------------------------------------------ records


class Episode(NamedTuple):
    """One finished training episode, or one life; it travels in the commit message of its unroll.

    Attributes:
        stream: which environment slot.
        row: the row of the unroll that ended it.
        ret: sum of its raw rewards.
        length: its env steps.
        info: those of `EnvFactory.info_metrics` that its last step had; none of a life.
    """

    stream: int
    row: int
    ret: float
    length: int
    info: InfoMetrics = ()


class Episodes(Sequence[Episode]):
    """Finished episodes, or lives, in one array: hundreds of short ones may end in an unroll.

    Attributes:
        lines: float64 ``[N, 4 + len(names)]``: stream, row, return and length, then a number of
            ``info`` for each of ``names``, NaN where it had none.
        names: those of `EnvFactory.info_metrics`.
    """

    def __init__(self, lines: NDArray[np.float64], names: Sequence[str]) -> None:
        self.lines = lines
        self.names = names

    @staticmethod
    def width(names: Sequence[str]) -> int:
        """Columns of `lines`."""
        return 4 + len(names)

    @classmethod
    def of(cls, episodes: Sequence[Episode], names: Sequence[str]) -> Episodes:
        """``episodes`` in an array of its own."""
        lines = np.full((len(episodes), cls.width(names)), np.nan)
        for line, episode in zip(lines, episodes, strict=True):
            line[:4] = episode[:4]
            for name, number in episode.info:
                line[4 + names.index(name)] = number
        return cls(lines, names)

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[Episode]:
        tells = not np.isnan(self.lines[:, 4:]).all()
        for stream, row, ret, length, *noted in self.lines.tolist():
            info = self._info(noted) if tells else ()
            yield Episode(int(stream), int(row), ret, int(length), info)

    def _info(self, noted: Sequence[float]) -> InfoMetrics:
        named = zip(self.names, noted, strict=True)
        return tuple((name, number) for name, number in named if not math.isnan(number))

    @overload
    def __getitem__(self, index: int) -> Episode: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Episode]: ...

    def __getitem__(self, index: int | slice) -> Episode | Sequence[Episode]:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class Unroll:
    """``T`` rows of every stream of one worker (alignment: see the module's docstring).

    Attributes:
        worker: index of the worker.
        streams: int ``[B]``, the streams in column order.
        sequence: counts the unrolls of this worker; a gap says that streams started anew.
        version: version of the snapshot that chose every action in it.
        observation: each ``[T + 1, B, ...]``.
        action: ``[T, B, ...]``.
        reward: float32 ``[T, B]``, raw.
        terminated: bool ``[T, B]``.
        truncated: bool ``[T, B]``.
        valid: bool ``[T, B]``.
        first: bool ``[T, B]``.
        extras: each ``[T, B, ...]``, what the policy noted of each row (`PolicyFactory`); of a
            reset row it is what the policy noted of the final observation.
        policy_state: each ``[B, ...]``, of a recurrent policy: the state in which row ``T`` of the
            observation will find it.
        episodes: those that ended in it.
        lives: those that ended in it, of environments that tell of lives lost.
        seconds: what the worker's time went to: ``env``, ``policy``, and of a process ``slots``
            and ``limiter``, in which it waited for a free slot and for the limiter to allow it.
        started_at: `time.monotonic` of its first env step, seconds.
    """

    worker: int
    streams: NDArray[np.int64]
    observation: Observation
    action: Array
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    first: NDArray[np.bool_]
    extras: dict[str, Array] = field(default_factory=dict)
    policy_state: dict[str, Array] = field(default_factory=dict)
    sequence: int = 0
    version: int = 0
    episodes: Sequence[Episode] = ()
    lives: Sequence[Episode] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    started_at: float = 0.0

    @staticmethod
    def layout(
        env_spec: EnvSpec,
        unroll_length: int,
        num_envs: int,
        extras: Mapping[str, ArraySpec],
        policy_state: Mapping[str, ArraySpec] | None = None,
    ) -> dict[str, ArraySpec]:
        """The arrays that hold one unroll, by the name `from_arrays` expects."""

        def rows(spec: ArraySpec, extra: int = 0) -> ArraySpec:
            return ArraySpec((unroll_length + extra, num_envs, *spec.shape), spec.dtype)

        flag = ArraySpec((), "bool")
        return {
            **{f"observation/{key}": rows(s, 1) for key, s in env_spec.observation.items()},
            "action": rows(env_spec.action),
            "reward": rows(ArraySpec((), "float32")),
            **{name: rows(flag) for name in ("terminated", "truncated", "valid", "first")},
            **{f"extras/{key}": rows(s) for key, s in extras.items()},
            **{
                f"policy_state/{key}": ArraySpec((num_envs, *s.shape), s.dtype)
                for key, s in (policy_state or {}).items()
            },
        }

    @classmethod
    def from_arrays(
        cls, worker: int, streams: Sequence[int], arrays: Mapping[str, Array]
    ) -> Unroll:
        """An unroll whose arrays are views of ``arrays`` (see `layout`)."""
        named: dict[str, Any] = {"observation": {}, "extras": {}, "policy_state": {}}
        for name, array in arrays.items():
            group, _, key = name.partition("/")
            if key:
                named[group][key] = array
            else:
                named[name] = array
        return cls(worker, np.asarray(streams, np.int64), **named)

    @property
    def num_rows(self) -> int:
        """``T``."""
        return len(self.reward)

    @property
    def env_steps(self) -> int:
        """Decisions made: valid rows over all columns."""
        return int(np.count_nonzero(self.valid))


@dataclass(slots=True)
class Snapshot:
    """What a policy needs in order to act, at one moment.

    Attributes:
        version: updates made when it was taken.
        arrays: parameters *and* buffers, by name.
        scalars: what else acting depends on (epsilon).
    """

    version: int
    arrays: dict[str, Array]
    scalars: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Batch:
    """Transitions for one update, as torch tensors.

    Attributes:
        observation: each ``[B, ...]``.
        next_observation: each ``[B, ...]``, where the n-step window ended.
        action: ``[B, ...]``; int64 for discrete spaces.
        reward: float32 ``[B]``: discounted sum over the window, clipped if asked.
        discount: float32 ``[B]``: ``gamma ** k`` of the bootstrap value, 0 if terminated.
        weight: float32 ``[B]``: importance weights (1 without priorities).
        keys: int64 ``[B]`` (NumPy): names of the rows, for `Store.feed_back`.
    """

    observation: dict[str, Tensor]
    next_observation: dict[str, Tensor]
    action: Tensor
    reward: Tensor
    discount: Tensor
    weight: Tensor
    keys: NDArray[np.int64]

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``; itself if it is there."""
        return _moved(self, device)


@dataclass(slots=True)
class SequenceBatch:
    """Sequences for one update, as torch tensors: rows as in an `Unroll`, reset rows included.

    Row 0 is context, whose latents are where the others start from; rows 1 to ``L`` are learned
    from. Rows are departures: what one *arrives* with at row ``t`` is the action, the reward and
    the termination of row ``t - 1``, and nothing where ``first[t]``.

    Attributes:
        observation: each ``[L + 1, B, ...]``, stacked as `ArraySpec.stacked_shape` says.
        action: ``[L + 1, B, ...]``, 0 on reset rows; int64 for discrete spaces.
        reward: float32 ``[L + 1, B]``, raw.
        terminated: bool ``[L + 1, B]``.
        truncated: bool ``[L + 1, B]``.
        valid: bool ``[L + 1, B]``, False on reset rows.
        first: bool ``[L + 1, B]``.
        extras: the latents, each ``[L + 1, B, ...]`` in its own dtype: as noted in acting, or as
            fed back since.
        keys: int64 ``[L + 1, B]`` (NumPy): names of the rows, for `Store.feed_back`.
    """

    observation: dict[str, Tensor]
    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    first: Tensor
    extras: dict[str, Tensor]
    keys: NDArray[np.int64]

    def to(self, device: torch.device) -> SequenceBatch:
        """The same batch on ``device``; itself if it is there."""
        return _moved(self, device)


AnyBatch = TypeVar("AnyBatch", Batch, SequenceBatch)


def _moved(batch: AnyBatch, device: torch.device) -> AnyBatch:
    if batch.reward.device == device:
        return batch
    moved: dict[str, Any] = {}
    for item in fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, dict):
            moved[item.name] = {k: _without_waiting(v, device) for k, v in value.items()}
        elif item.name != "keys":
            moved[item.name] = _without_waiting(value, device)
    return replace(batch, **moved)


def _without_waiting(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; CUDA copies only pinned memory while the host goes on."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


@dataclass(slots=True)
class StepOutput:
    """What one training step returns.

    Attributes:
        loss: scalar, with a graph.
        metrics: scalars to log under the step's name; tensors are read once per log period.
        feedback: for `Store.feed_back`, each with the leading axes of the batch's ``keys``:
            ``"priority"`` (non-negative) of transitions, latents by their names of sequences. From
            an accelerator it arrives an update later; that of a step that was not made never.
        carry: what the next training step gets; None passes on what this one got.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    feedback: Mapping[str, Tensor] = field(default_factory=dict)
    carry: Any = None


class Report(NamedTuple):
    """What an agent tells of what it has learned.

    Attributes:
        metrics: finite numbers, ``group/name``.
        films: uint8 ``[T, H, W, 3]`` each, by a name ``group/name``.
    """

    metrics: Mapping[str, float]
    films: Mapping[str, NDArray[np.uint8]]


class EvaluationRequest(NamedTuple):
    """Greedy episodes to run.

    Attributes:
        episodes: how many.
        step_limit: env steps after which an episode is cut, None for no limit.
        seed: of the whole evaluation; episode ``i`` starts from ``(seed, i)``.
        env_steps: where the training stood; comes back in the result.
        films: how many of them to film, the first ones.
        film_frames: pictures of a film at most; the episode goes on without.
    """

    episodes: int
    step_limit: int | None
    seed: int
    env_steps: int = 0
    films: int = 0
    film_frames: int = 0


class EvaluationResult(NamedTuple):
    """What the episodes gave, in episode order.

    Attributes:
        returns: sums of raw rewards.
        lengths: env steps.
        cut: how many hit the step limit.
        version: of the snapshot that acted.
        env_steps: as requested.
        infos: those of `EnvFactory.info_metrics` that the last step of each episode had.
        films: of the first episodes, GIFs of about a megabyte or less.
    """

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    cut: int
    version: int
    env_steps: int
    infos: tuple[InfoMetrics, ...] = ()
    films: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamState:
    """Where a stream stood, so that its episode can be rebuilt.

    Attributes:
        episode: index of the episode in the stream.
        actions: ``[k, ...]``, those taken in it so far; None to start the episode afresh.
        observation: the last one, to compare with after the actions were repeated.
        policy_state: each ``[...]``: that of the stream's column (`Unroll`).
        env_state: where its environment and its worker stood then, see `Launcher.env_states`; None
            if it is not known.
    """

    episode: int
    actions: Array | None = None
    observation: Observation | None = None
    policy_state: Mapping[str, Array] = field(default_factory=dict)
    env_state: Any = None


EnvStates: TypeAlias = dict[int, tuple[int, Any]]
"""By stream: the number of the last unroll, and data for `StreamState.env_state`."""


@dataclass(frozen=True, slots=True)
class Acting:
    """How workers run the network of a `NetworkPolicy`; see `actorlearner.acting`.

    Attributes:
        precision: of convolutions.
        graph: an ONNX model of the network, for onnxruntime; empty: torch runs it.
        constants: parameters that are constants of ``graph``; all others are inputs.
    """

    precision: Literal["float32", "bfloat16"] = "float32"
    graph: bytes = b""
    constants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The whole recipe of one worker; it travels by value.

    Attributes:
        index: of the worker; -1 for the evaluation worker.
        streams: global indices of its environment slots.
        num_streams: over all workers.
        seed: of the run.
        unroll_length: rows per unroll.
        env_factory: makes one environment.
        policy_factory: makes the policy.
        env_spec: what `Launcher.probe` found.
        seed_every_episode: start each episode from a seed of its own (lockstep); otherwise only
            the first of each stream.
        first_sequence: number of its first unroll.
        stream_states: where each of its streams goes on; empty for a fresh start.
        acting: how it runs the policy's network, but not in evaluations.
    """

    index: int
    streams: tuple[int, ...]
    num_streams: int
    seed: int
    unroll_length: int
    env_factory: EnvFactory
    policy_factory: PolicyFactory
    env_spec: EnvSpec
    seed_every_episode: bool = False
    first_sequence: int = 0
    stream_states: tuple[StreamState, ...] = ()
    acting: Acting = Acting()

    @property
    def unroll_layout(self) -> dict[str, ArraySpec]:
        """`Unroll.layout` of this worker."""
        factory = self.policy_factory
        return Unroll.layout(
            self.env_spec,
            self.unroll_length,
            len(self.streams),
            factory.extras_spec,
            factory.state_spec if isinstance(factory, RecurrentPolicyFactory) else None,
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """What is known of a worker's failure.

    Attributes:
        worker: its index, -1 for the evaluation worker.
        env: name of the environment.
        phase: what it was doing ("constructing the environment", "step", ...).
        detail: the traceback, or how the process ended.
        error: the exception in one line.
        bad_input: whether the user's input is to blame.
        at: `time.monotonic` seconds, so that the first cause can be told.
        of_env: whether the environment raised ``error``.
    """

    worker: int
    env: str
    phase: str
    detail: str
    error: str = ""
    bad_input: bool = False
    at: float = 0.0
    of_env: bool = False

    @classmethod
    def of(
        cls, worker: int, env: str, phase: str, error: BaseException, of_env: bool = True
    ) -> Failure:
        """What there is to tell of ``error``."""
        return cls(
            worker,
            env,
            phase,
            detail="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            error=f"{type(error).__name__}: {error}",
            bad_input=isinstance(error, BadInput),
            at=time.monotonic(),
            of_env=of_env and not isinstance(error, BadInput),
        )

    @property
    def worker_name(self) -> str:
        """How people call this worker."""
        return "the evaluation worker" if self.worker < 0 else f"worker {self.worker}"

    def headline(self) -> str:
        """The most telling line of it."""
        what = self.error or self.detail
        return f"{self.worker_name} ({self.env}) failed in {self.phase}: {what}"

    def text(self) -> str:
        """All of it, the most telling line first."""
        return f"{self.headline()}\n{self.detail.rstrip()}" if self.error else self.headline()


# ---------------------------------------------------------------------------------- protocols


@runtime_checkable
class EnvFactory(Protocol):
    """A picklable recipe of an environment.

    The same seed and the same actions must give the same episode. Example::

        factory = GymEnvFactory.of("CartPole-v1")
        env = factory()
        observation, info = env.reset(seed=1)
    """

    @property
    def name(self) -> str:
        """For people: the id, or the name of the class."""
        ...

    @property
    def frame_stack(self) -> int:
        """`ArraySpec.stack` of every observation."""
        ...

    @property
    def terminal_on_life_loss(self) -> bool:
        """Whether a row that loses a life is terminated (``info["lives"]`` counts lives)."""
        ...

    @property
    def info_metrics(self) -> tuple[str, ...]:
        """Names of numbers that are noted of an episode where its last ``info`` has them."""
        ...

    def __call__(self, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        """A new environment; Gymnasium's ``render_mode`` "rgb_array" makes one that is filmed."""
        ...

    def vector(
        self, num_envs: int, seed: int = 0
    ) -> gymnasium.vector.VectorEnv[Any, Any, Any] | None:
        """The same environment ``num_envs`` times, stepped natively; None if there is no such.

        Its autoreset mode is NEXT_STEP. It can't be told the seed of every episode; ``seed`` is for
        one that is told its seed when it is made, and heeds none when it is reset.
        """
        ...


class Policy(Protocol):
    """The acting side of an agent: no optimiser, no gradient, on the CPU.

    It keeps no random generator: what it draws, it draws from the one handed in, so that the
    randomness of an unroll follows from the run's seed, the stream and the unroll's number alone.
    """

    def load(self, snapshot: Snapshot) -> None:
        """Take over the arrays (copied) and scalars of ``snapshot``."""
        ...

    def act(
        self, observation: Observation, generator: np.random.Generator | None
    ) -> tuple[Array, dict[str, Array]]:
        """Actions ``[B, ...]`` for observations ``[B, ...]``, in the spec's dtype, and the extras.

        A greedy policy may get no generator: then it leaves nothing to chance.

        Stacked observations come as `ArraySpec.stacked_shape` says; extras are arrays
        ``[B, ...]`` as in `PolicyFactory.extras_spec`.
        """
        ...


@runtime_checkable
class NetworkPolicy(Policy, Protocol):
    """A policy that gets its numbers from one network, which others may run for it (`Acting`).

    Attributes:
        network: gives one tensor ``[B, ...]`` for a mapping of tensors ``[B, *stacked_shape]``, and
            depends on its parameters and buffers alone, which `load` fills in place.
        forward: runs it, on arrays; `act` takes its numbers from nowhere else.
        has_noise: whether the network depends on more: on noise that `act` draws.
    """

    network: torch.nn.Module
    has_noise: bool
    forward: Callable[[Observation], Array]


@runtime_checkable
class RecurrentPolicy(Policy, Protocol):
    """A policy that remembers: one state for each column, in the order of the columns.

    `act` takes in the new observation with the state, and leaves the state with which it will meet
    the next one. It is called for every column in every row; on a reset row the action is thrown
    away, and the next row is `reset`.
    """

    def reset(self, first: NDArray[np.bool_]) -> None:
        """Forget the columns ``first`` (bool ``[B]``), whose next observation begins an episode.

        Called before every `act` that such an observation goes to. The first call is true in
        every column and says how many there are: in evaluations they are others than the streams.
        """
        ...

    def state(self) -> Mapping[str, Array]:
        """All that it remembers, each ``[B, ...]`` as in `RecurrentPolicyFactory.state_spec`."""
        ...

    def set_state(self, state: Mapping[str, Array]) -> None:
        """Go on from ``state`` (copied) of as many columns; no `reset` need have come before."""
        ...


class PolicyFactory(Protocol):
    """A picklable recipe of a policy.

    ``streams`` are those that the policy acts for, out of ``num_streams``; ``greedy`` policies
    explore nothing (evaluation).
    """

    @property
    def extras_spec(self) -> Mapping[str, ArraySpec]:
        """What `Policy.act` notes of every row besides the action, by name."""
        ...

    def __call__(
        self, env_spec: EnvSpec, streams: Sequence[int], num_streams: int, greedy: bool
    ) -> Policy:
        """A new policy."""
        ...


@runtime_checkable
class RecurrentPolicyFactory(PolicyFactory, Protocol):
    """A recipe of a `RecurrentPolicy`."""

    @property
    def state_spec(self) -> Mapping[str, ArraySpec]:
        """What the policy remembers of each column, by name."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """Something that a checkpoint holds: nested dicts and lists of arrays, tensors and scalars.

    What is too large to be copied can be a leaf of `actorlearner.statetree`'s.
    """

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Go back to ``state``."""
        ...


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where a store may keep files.

    Attributes:
        directory: its own, maybe to be made; what is in there was left by a process that is gone.
        num_checkpoints: of its states that are kept.
        rows_between: about how many rows come between two of them.
    """

    directory: Path
    num_checkpoints: int
    rows_between: int


class Store(Stateful, Protocol):
    """Where unrolls go and batches come from."""

    def seed(self, seed: int) -> None:
        """Seed its generator; called before `build`."""
        ...

    def build(
        self,
        env_spec: EnvSpec,
        sample_spec: SampleSpec | SequenceSpec,
        layout: StreamLayout,
        planned_updates: int,
        place: StorePlace | None = None,
    ) -> None:
        """Allocate. Idempotent; raises `BadInput` for what can't be stored.

        Without ``place`` there is no run directory, and nothing is written.
        """
        ...

    @property
    def warmup_env_steps(self) -> int:
        """Env steps before the first update."""
        ...

    @property
    def save(self) -> bool:
        """Whether checkpoints hold the experience."""
        ...

    @property
    def extras(self) -> tuple[str, ...]:
        """What it needs to have noted of every row (`Agent.policy_factory`)."""
        ...

    def add(self, unroll: Unroll) -> None:
        """Copy the unroll in."""
        ...

    def ready(self) -> bool:
        """Whether `sample` can answer."""
        ...

    def sample(self) -> Batch | SequenceBatch:
        """The batch for one update.

        No transition starts at a reset row or is of two episodes; a sequence is of one stream, in
        which no row is missing, and goes on over the ends of episodes.
        """
        ...

    def peek(self) -> Batch | SequenceBatch:
        """The batch that `sample` would give now, to look at: nothing changes."""
        ...

    def feed_back(self, keys: NDArray[np.int64], feedback: Mapping[str, Array]) -> None:
        """Take the learner's word on rows it sampled; stale keys are ignored and counted."""
        ...

    def metrics(self) -> dict[str, float]:
        """Scalars to log."""
        ...


class Agent(Protocol):
    """The learning side: a torch module whose losses the Trainer minimises. No I/O inside.

    Example: what the Trainer does with one batch::

        carry = store.sample().to(device)
        for name, training_step in agent.training_steps().items():
            output = training_step(carry)
            optimise(name, output.loss)
            carry = carry if output.carry is None else output.carry
        updates += 1
        for name in agent.training_steps():
            agent.after_step(name, updates)

    Before `fit` the Trainer sets ``device``, ``dtype``, ``tensorboard`` (a writer or None),
    ``current_step`` (env steps), ``current_episode`` and ``log_every_env_steps`` on it, and keeps
    the two counters true.
    """

    def build(self, env_spec: EnvSpec) -> None:
        """Make the networks. Idempotent; raises `UnsupportedSpace`."""
        ...

    @property
    def sample_spec(self) -> SampleSpec | SequenceSpec:
        """What a batch must be."""
        ...

    def policy_factory(self, extras: Sequence[str] = ()) -> PolicyFactory:
        """The recipe of its policy, which notes ``extras`` of every row.

        Raises:
            BadInput: the policy does not know one of them.
        """
        ...

    @property
    def scalars(self) -> dict[str, float]:
        """What acting depends on now besides the arrays of `snapshot` (epsilon)."""
        ...

    def snapshot(self, version: int) -> Snapshot:
        """Its policy now; arrays may alias the parameters."""
        ...

    def change(self, values: Mapping[str, Any]) -> None:
        """Take over other values of its live settings, from the next update on.

        Raises:
            SettingError: a value is out of its bounds, or the setting is not live.
        """
        ...

    def configure_optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """One optimiser per training step, by the step's name.

        One that heeds ``found_inf`` (torch's with ``fused=True``) spares an accelerator a wait in
        every update; see `actorlearner.optim.FiniteSteps`.
        """
        ...

    def training_steps(self) -> Mapping[str, Callable[[Any], StepOutput]]:
        """The training steps of one update, in order; asked for once, when a run begins."""
        ...

    def after_step(self, name: str, updates: int) -> None:
        """After step ``name`` of update number ``updates`` (target copies, moving averages)."""
        ...

    def to(self, device: Any, dtype: Any) -> Any:
        """As of `torch.nn.Module`."""
        ...

    def train(self, mode: bool = True) -> Any:
        """As of `torch.nn.Module`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """As of `torch.nn.Module`."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """As of `torch.nn.Module`."""
        ...


class GoOn(Protocol):
    """Says how a lost worker begins again, from the unrolls that were taken in so far."""

    def __call__(self, spec: WorkerSpec, attempt: int) -> WorkerSpec:
        """The spec to begin again with.

        Args:
            spec: of the lost worker.
            attempt: 0 goes on exactly where the last unroll ended, as far as the environment can
                (lockstep); ``k`` skips so many episodes of each stream, so that no worker is lost
                to the same one for ever.
        """
        ...


@runtime_checkable
class ReportingAgent(Agent, Protocol):
    """An agent that can tell of what it has learned, besides how it acts."""

    def report(self, batch: Any) -> Report:
        """What it makes of ``batch``, which it does not learn from.

        Called with every evaluation. Nothing changes, torch's global generators included.
        """
        ...


class Launcher(Protocol):
    """Runs workers and moves what they make.

    Example::

        with launcher:
            launcher.start(specs, agent.snapshot(0))
            for unroll in launcher.gather(timeout=0.1, may_insert=limiter.may_insert):
                store.add(unroll)
            launcher.publish(agent.snapshot(updates))

    Attributes:
        lockstep: whether `gather` is deterministic.
        notes: what the user should know of how streams began, and of workers that were replaced;
            whoever tells it empties the list.
    """

    lockstep: bool
    notes: list[str]

    def probe(self, factory: EnvFactory, render_mode: str | None = None) -> EnvSpec:
        """What ``factory`` makes, found out where workers live.

        Raises:
            BadInput: nothing can be made of it; or it shall be filmed and shows no pictures.
        """
        ...

    def start(
        self, specs: Sequence[WorkerSpec], snapshot: Snapshot, go_on: GoOn | None = None
    ) -> None:
        """Start the workers; ``snapshot`` fixes the layout of all later ones.

        Args:
            specs: one for each worker.
            snapshot: what they act with at first.
            go_on: how a worker that is lost begins again; None: the first loss is an error.
        """
        ...

    def publish(self, snapshot: Snapshot) -> None:
        """Copy ``snapshot`` to where workers read it; never waits for a reader."""
        ...

    def gather(self, timeout: float, may_insert: Callable[[], bool]) -> Iterator[Unroll]:
        """Yield what is finished, waiting up to ``timeout`` seconds for the first.

        A view is valid until the next is asked for; the worker then gets its slot back if
        ``may_insert()``, else at a later `gather`. In lockstep: exactly one unroll per worker, by
        index, all valid until the next `gather`.

        Raises:
            WorkerError: a worker failed, and is not replaced.
        """
        ...

    def env_states(self) -> EnvStates:
        """Where the streams stand after the unrolls gathered last; in lockstep only.

        Streams whose environments can't tell are left out, as are those that nothing was gathered
        of yet.

        Raises:
            WorkerError: a worker failed, and is not replaced.
        """
        ...

    def busy_cores(self) -> int:
        """How many cores its processes compute on, as far as is known since the last `gather`.

        Those that wait, for a credit or for their environments, keep none busy.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Numbers for the log: ``restarts`` and ``rows_dropped`` so far."""
        ...

    def request_evaluation(self, snapshot: Snapshot, request: EvaluationRequest) -> bool:
        """Start an evaluation of a frozen copy of ``snapshot``; False while one is running."""
        ...

    def poll_evaluation(self, timeout: float = 0.0) -> EvaluationResult | None:
        """The result, once, when there is one; waits up to ``timeout`` seconds for it."""
        ...

    def evaluate(self, snapshot: Snapshot, request: EvaluationRequest) -> EvaluationResult:
        """Both of the above, waiting for the result."""
        ...

    def close(self) -> None:
        """End the workers. Idempotent, bounded in time; leaves no process and no shared memory."""
        ...

    def __enter__(self) -> Launcher:
        """The launcher itself."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """`close`."""
        ...


class MetricSink(Protocol):
    """Where metrics go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """``metrics`` (``group/name``) at ``step`` env steps."""
        ...

    def close(self) -> None:
        """Flush and close. Idempotent."""
        ...


RunStatus: TypeAlias = Literal["finished", "failed", "interrupted"]
"""How a run ended."""


class Tracker(MetricSink, Protocol):
    """An experiment tracker: a sink that also takes the configuration.

    Whatever it raises ends no run: it is told once, and the tracker is left alone from then on.
    """

    def start(self, config: Mapping[str, Any], run_dir: Path | None, run_id: str | None) -> str:
        """Begin a run there, or go on with one; called once, before any `write`.

        Args:
            config: the whole configuration, nested.
            run_dir: where the run's files are; None for no files.
            run_id: of the run to go on with; None for a new one.

        Returns:
            The id of the run.
        """
        ...

    def close(self, status: RunStatus = "finished") -> None:
        """Flush, tell how the run ended, and close. Idempotent; also after something failed."""
        ...


__all__ = [
    "OBSERVATION",
    "Acting",
    "ActorLearnerError",
    "Agent",
    "Array",
    "ArraySpec",
    "BadInput",
    "Batch",
    "CheckpointError",
    "EnvFactory",
    "EnvSpec",
    "EnvStates",
    "Episode",
    "Episodes",
    "EvaluationRequest",
    "EvaluationResult",
    "Failure",
    "InfoMetrics",
    "Launcher",
    "LauncherClosed",
    "MetricSink",
    "NativeSpec",
    "NetworkPolicy",
    "NonFiniteError",
    "Observation",
    "Policy",
    "PolicyFactory",
    "RecurrentPolicy",
    "RecurrentPolicyFactory",
    "Report",
    "ReportingAgent",
    "RunStatus",
    "SampleSpec",
    "SequenceBatch",
    "SequenceSpec",
    "SettingError",
    "Snapshot",
    "Stateful",
    "StepOutput",
    "Store",
    "StorePlace",
    "StreamLayout",
    "StreamState",
    "Tracker",
    "Unroll",
    "UnsupportedSpace",
    "WorkerError",
    "WorkerSpec",
]
