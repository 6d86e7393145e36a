"""The replay buffer: keeps the newest experience and makes batches of it.

Legend of the suffixes: T rows of an unroll, N rows of an n-step window, L rows of a sequence,
B columns of any of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from actorlearner.compiled import compiled
from actorlearner.config import Settings, setting
from actorlearner.contracts import (
    Array,
    ArraySpec,
    BadInput,
    Batch,
    EnvSpec,
    NonFiniteError,
    SampleSpec,
    SequenceBatch,
    SequenceSpec,
    SettingError,
    StorePlace,
    StreamLayout,
    Unroll,
)
from actorlearner.memory import free_disk, free_memory
from actorlearner.returns import n_step
from actorlearner.ring import BlockRing
from actorlearner.rows import clear_pages
from actorlearner.sum_tree import SumTree

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Settings):
    """How much is kept and how it is drawn.

    Attributes:
        capacity: rows kept; the oldest go first.
        warmup_env_steps: env steps before the first update.
        prioritized: draw by priority instead of uniformly.
        alpha: how much priorities matter; 0 draws uniformly, 1 in proportion.
        beta_start: exponent of the importance weights at the first batch; it goes linearly to 1.
        beta_updates: batches until it is 1; None for the updates that the run plans.
        priority_epsilon: added to every priority, so that each row can be drawn again.
        initial_priority: of new rows: the highest one seen (max), or that of the TD error by the
            values that the policy had when it acted (actor).
        storage: where observations are kept: in memory; or on disk, in files in the run directory,
            which checkpoints share. The rest of a row is in memory.
        save: put the contents into checkpoints.
    """

    group: ClassVar[str] = "replay"

    capacity: int = setting(50_000, low=1)
    warmup_env_steps: int = setting(1_000, low=0)
    prioritized: bool = True
    alpha: float = setting(0.6, low=0, high=1)
    beta_start: float = setting(0.4, low=0, high=1)
    beta_updates: int | None = setting(None, low=1)
    priority_epsilon: float = setting(1e-6, above=0)
    initial_priority: Literal["max", "actor"] = "max"
    storage: Literal["memory", "disk"] = "memory"
    save: bool = True


class ReplayBuffer:
    """A `Store` of transitions, drawn uniformly or by priority, or of sequences.

    Every valid row starts one transition, the newest ones included. It ends ``n_step`` rows on, or
    earlier: where the episode ends, and where the stored data of the stream do, which counts as a
    truncation. Rewards are kept raw; they are clipped and summed when a batch is made.

    Prioritised replay is that of Schaul et al. (2016), arXiv:1511.05952: proportional, stratified
    (appendix B.2.1: one draw from each of ``batch_size`` equal parts of the total), new rows at the
    highest priority seen so far (1 at first), importance weights ``(N * P(i)) ** -beta`` over the
    N rows that can be drawn. The weights are divided by their maximum *in the batch*, as in DQN
    Zoo, Acme and Dopamine; the paper leaves open over what the maximum is taken. With
    ``initial_priority="actor"`` new rows start at the actor's own n-step TD error instead, as in
    Ape-X (Horgan et al. 2018, arXiv:1803.00933); those whose window is not complete yet wait at
    the highest priority.

    Frame stacks are made when a batch is: every frame is stored once. A row whose older frames are
    overwritten is not drawn any more.

    *Sequences* are rows of one stream without a gap, over the ends of episodes, in the reset rows.
    Each new window of a stream (its next ``length`` rows, and the row before them) is drawn once,
    as soon as it is stored; what a batch still lacks is drawn uniformly from all rows that enough
    rows follow. That is the online queue of DreamerV3 (Hafner et al. 2025,
    doi:10.1038/s41586-025-08744-2). Latents are stored with the rows; `feed_back` replaces them.

    Example::

        buffer = ReplayBuffer(capacity=100_000, prioritized=False)
        buffer.seed(0)
        buffer.build(env_spec, agent.sample_spec, StreamLayout(8, 16), planned_updates=10_000)
        buffer.add(unroll)
        batch = buffer.sample()
        buffer.feed_back(batch.keys, {"priority": abs_td_error})
    """

    def __init__(self, **settings: Any) -> None:
        """A buffer that holds nothing until `build`.

        Args:
            **settings: see `ReplaySettings`.

        Raises:
            SettingError: an unknown setting or a value out of its bounds.
        """
        self.settings = ReplaySettings.make(settings)
        self._built_for: dict[str, Any] = {}
        self._built_ring: BlockRing | None = None
        self._tree: SumTree | None = None
        self._env_spec: EnvSpec
        self._sample_spec: SampleSpec | SequenceSpec
        self._beta_updates: int
        self._max_priority = 1.0
        self._num_batches = 0
        self._stale_feedback = 0
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Start the random generator anew from ``seed``."""
        self._generator = np.random.default_rng(seed)

    def build(
        self,
        env_spec: EnvSpec,
        sample_spec: SampleSpec | SequenceSpec,
        layout: StreamLayout,
        planned_updates: int,
        place: StorePlace | None = None,
    ) -> None:
        """Allocate; a second call with the same arguments keeps the contents.

        Args:
            env_spec: what the rows consist of.
            sample_spec: what a batch must be.
            layout: how experience arrives.
            planned_updates: updates over which beta goes to 1 unless the settings say otherwise.
            place: for files; None if there is no run directory.

        Raises:
            SettingError: the capacity can't hold two unrolls of every stream, or a sequence of
                each and an unroll more; the memory or the disk can't hold the capacity; there is
                no place for files that are asked for; or sequences shall be drawn by priority.
            BadInput: the buffer was built for something else.
        """
        asked = {
            "env_spec": env_spec,
            "sample_spec": sample_spec,
            "layout": layout,
            "planned_updates": planned_updates,
        }
        if self._built_for:
            self._refuse_other_than(asked)
            return
        if isinstance(sample_spec, SequenceSpec):
            extras, length = dict(sample_spec.latents), sample_spec.length
        else:
            extras, length = {name: ArraySpec((), "float32") for name in self.extras}, None
        self._check_capacity(env_spec, layout, length)
        directory = self._make_room(env_spec, extras, length, place)
        ring = BlockRing(env_spec, layout, self.settings.capacity, extras, length, directory)
        self._built_ring = ring
        self._tree = SumTree(ring.num_rows) if self.settings.prioritized else None
        self._env_spec, self._sample_spec = env_spec, sample_spec
        self._beta_updates = self.settings.beta_updates or max(1, planned_updates)
        self._built_for = asked

    def _refuse_other_than(self, asked: Mapping[str, Any]) -> None:
        changed = [name for name, value in asked.items() if value != self._built_for[name]]
        if changed:
            raise BadInput(
                f"this replay buffer was built with another {' and '.join(changed)}: "
                "make a new one for each run"
            )

    def _check_capacity(self, env_spec: EnvSpec, layout: StreamLayout, length: int | None) -> None:
        """Refuse what can't hold a stack, or a sequence of ``length``, of every stream."""
        stack = max(spec.stack for spec in env_spec.observation.values())
        if layout.unroll_length < stack - 1:
            raise SettingError(
                f"unroll_length={layout.unroll_length}: must be at least {stack - 1}, as many rows "
                f"as a stack of {stack} frames has besides the newest"
            )
        if length is not None and self.settings.prioritized:
            raise SettingError(
                "replay.prioritized=True: this agent learns from sequences, which are drawn "
                "uniformly: set replay.prioritized=false"
            )
        # Fewer, and a stream's own unroll could overwrite the one that it continues; of sequences
        # as many as `length` + 1 rows take, and one more: some stream always has a sequence.
        unrolls = 2 if length is None else length // layout.unroll_length + 2
        needed = unrolls * layout.num_streams * layout.unroll_length
        if self.settings.capacity < needed:
            raise SettingError(
                f"replay.capacity={self.settings.capacity}: must be at least {needed}, which is "
                f"{unrolls} unrolls of {layout.unroll_length} rows for each of "
                f"{layout.num_streams} streams"
            )

    def _make_room(
        self,
        env_spec: EnvSpec,
        extras: Mapping[str, ArraySpec],
        length: int | None,
        place: StorePlace | None,
    ) -> Path | None:
        """State the memory and the disk that it takes; the directory for files, if there are any.

        Raises:
            SettingError: there is less, or no place for files.
        """
        in_memory = BlockRing.bytes_per_row(env_spec, extras, length is not None)
        if self.settings.prioritized:
            in_memory += 10  # a leaf, and its share of the sums above
        in_files, directory = 0, None
        if place is not None:
            clear_pages(place.directory)
        if self.settings.storage == "disk":
            in_files = sum(spec.zeros().nbytes for spec in env_spec.observation.values())
            in_memory -= in_files
            directory = _made(place)
        self._state_memory(in_memory)
        if place is not None:
            self._state_disk(place, in_memory, in_files)
        return directory

    @property
    def warmup_env_steps(self) -> int:
        """Env steps before the first update."""
        return self.settings.warmup_env_steps

    @property
    def save(self) -> bool:
        """Whether checkpoints hold the experience."""
        return self.settings.save

    @property
    def extras(self) -> tuple[str, ...]:
        """What it needs to have noted of every row: values, for the actor's TD error."""
        by_actor = self.settings.prioritized and self.settings.initial_priority == "actor"
        return ("action_value", "greedy_value") if by_actor else ()

    @property
    def beta(self) -> float:
        """Exponent of the importance weights of the next batch."""
        fraction = min(1.0, self._num_batches / self._beta_updates)
        return self.settings.beta_start + (1.0 - self.settings.beta_start) * fraction

    def add(self, unroll: Unroll) -> None:
        """Copy ``unroll`` in, over the oldest rows."""
        begin = self._ring.head
        given_up = self._ring.append(unroll)
        self._prioritise_since(begin)
        if self._tree is not None:
            self._tree.set(given_up, np.zeros(len(given_up)))
            if self.extras and isinstance(self._sample_spec, SampleSpec):
                self._prioritise_by_actor(self._tree, begin, self._sample_spec)

    def ready(self) -> bool:
        """Whether there is a row to draw. Warm-up is not the store's business."""
        return self._ring.num_drawable > 0

    def sample(self) -> Batch | SequenceBatch:
        """The batch for one update, drawn with replacement (but each new window of a stream once).

        Raises:
            RuntimeError: the buffer is not `ready`.
        """
        if not self.ready():
            raise RuntimeError("the replay buffer holds no row to sample: ask ready() first")
        spec = self._sample_spec
        return self._sequences(spec) if isinstance(spec, SequenceSpec) else self._transitions(spec)

    def peek(self) -> Batch | SequenceBatch:
        """The batch that `sample` would give now; the next one is as if nobody had looked.

        Raises:
            RuntimeError: the buffer is not `ready`.
        """
        generator, windows = self._generator.bit_generator.state, self._ring.windows.copy()
        num_batches = self._num_batches
        try:
            return self.sample()
        finally:
            self._generator.bit_generator.state, self._ring.windows = generator, windows
            self._num_batches = num_batches

    def _transitions(self, spec: SampleSpec) -> Batch:
        ring = self._ring
        if self._tree is None:
            start_B = self._draw_uniformly(spec.batch_size)
            weight_B = np.ones(spec.batch_size, np.float32)
        else:
            start_B, weight_B = self._draw_by_priority(self._tree, spec.batch_size)
        self._num_batches += 1
        return_B, discount_B, end_B = self._windows(start_B, spec)
        observation, next_observation = {}, {}
        for key, both in ring.observed(np.array((start_B, end_B))).items():
            observation[key], next_observation[key] = both.unbind()
        return Batch(
            observation=observation,
            next_observation=next_observation,
            action=self._actions(start_B),
            reward=torch.from_numpy(return_B),
            discount=torch.from_numpy(discount_B),
            weight=torch.from_numpy(weight_B),
            keys=ring.keys(start_B),
        )

    def _sequences(self, spec: SequenceSpec) -> SequenceBatch:
        ring = self._ring
        new_B = ring.take_windows(spec.batch_size)
        start_B = np.append(new_B, self._draw_uniformly(spec.batch_size - len(new_B)))
        row_LB = ring.walk(start_B, spec.length)  # L + 1 rows: the first is context
        action_LB = self._actions(row_LB)
        action_LB[torch.from_numpy(~ring.valid[row_LB])] = 0
        return SequenceBatch(
            observation=ring.observed(row_LB),
            action=action_LB,
            reward=torch.from_numpy(ring.reward[row_LB]),
            terminated=torch.from_numpy(ring.terminated[row_LB]),
            truncated=torch.from_numpy(ring.truncated[row_LB]),
            valid=torch.from_numpy(ring.valid[row_LB]),
            first=torch.from_numpy(ring.first[row_LB]),
            extras={name: torch.from_numpy(a[row_LB]) for name, a in ring.extras.items()},
            keys=ring.keys(row_LB),
        )

    def _actions(self, addresses: NDArray[np.int64]) -> torch.Tensor:
        """The actions at ``addresses``, copied; int64 for discrete spaces."""
        action = self._ring.action[addresses]
        if self._env_spec.action.categories:
            action = action.astype(np.int64, copy=False)
        return torch.from_numpy(action)

    def _windows(
        self, start_B: NDArray[np.int64], spec: SampleSpec
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
        """Return, discount and end of the windows that start at addresses ``start_B``."""
        ring = self._ring
        return n_step(
            start_B,
            spec.n_step,
            ring.following,
            ring.reward,
            ring.terminated,
            ring.valid,
            spec.gamma,
            spec.reward_clip,
        )

    def feed_back(self, keys: NDArray[np.int64], feedback: Mapping[str, Array]) -> None:
        """Set priorities or latents of the rows ``keys``; those overwritten are counted only.

        Where a key occurs twice, what comes last (in C order) wins: of two sequences that overlap,
        what was learned of a row counts, not what it was as context. A buffer that draws uniformly
        has no use for priorities and ignores them.

        Args:
            keys: int64 ``[B]`` of transitions, ``[L + 1, B]`` of sequences, from a batch of this
                buffer.
            feedback: ``{"priority": float [B]}`` (absolute TD errors, before any weighting); of
                sequences latents by name, ``[L + 1, B, ...]`` each.

        Raises:
            NonFiniteError: a latent, or the priority of a row still there, is NaN or infinite.
            ValueError: such a priority is negative, there isn't one value per key, a latent has
                another shape or dtype than its spec, or ``feedback`` has something else.
        """
        spec = self._sample_spec
        known = spec.latents.keys() if isinstance(spec, SequenceSpec) else {"priority"}
        if unknown := feedback.keys() - known:
            raise ValueError(
                f"feedback {', '.join(sorted(unknown))}: "
                f"this replay buffer only takes {', '.join(known)}"
            )
        if isinstance(spec, SequenceSpec):
            self._replace_latents(keys, feedback, spec)
        elif self._tree is not None and "priority" in feedback:
            self._replace_priorities(self._tree, keys, feedback)

    def _replace_latents(
        self, keys: NDArray[np.int64], latents: Mapping[str, Array], spec: SequenceSpec
    ) -> None:
        for name, array in latents.items():
            shape, dtype = (*keys.shape, *spec.latents[name].shape), spec.latents[name].dtype
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"feedback {name} is {array.dtype} {array.shape}; needed: {dtype} {shape}"
                )
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise NonFiniteError(f"feedback {name} is not finite")
        fresh = self._ring.is_stored(keys)
        if latents:
            self._stale_feedback += int(np.count_nonzero(~fresh))
        addresses = self._ring.address(keys[fresh])
        for name, array in latents.items():
            self._ring.extras[name][addresses] = array[fresh]

    def _replace_priorities(
        self, tree: SumTree, keys: NDArray[np.int64], feedback: Mapping[str, Array]
    ) -> None:
        error = np.asarray(feedback["priority"], np.float64, order="C")
        if error.shape != keys.shape:
            raise ValueError(f"priority has shape {error.shape}, the keys have {keys.shape}")
        places, addresses = self._ring.drawable_at(keys)
        fresh = error if len(places) == len(keys) else error[places]
        tree.set(addresses, self._priorities(fresh))
        self._stale_feedback += len(keys) - len(places)

    def metrics(self) -> dict[str, float]:
        """Scalars to log: what can be drawn, rows that fit, stale feedback, queue, priorities."""
        metrics: dict[str, float] = {
            "size": self._ring.num_drawable,
            "capacity": self._ring.num_rows,
            "stale_feedback": self._stale_feedback,
        }
        if self._ring.sequence_length is not None:
            metrics["new_sequences"] = len(self._ring.windows)
        if self._tree is not None:
            metrics |= {"beta": self.beta, "max_priority": self._max_priority}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs: nested dicts of arrays and scalars.

        The arrays are views of the filled part of the buffer, because a copy could need as much
        memory again as there is: write or copy them before the next `add` or `feed_back`.
        """
        priorities = {}
        if self._tree is not None:
            leaves = self._tree.leaves[: self._ring.num_stored]
            priorities = {"alpha": self.settings.alpha, "leaves": leaves}
        return {
            "ring": self._ring.state_dict(),
            "priorities": priorities,
            "max_priority": self._max_priority,
            "num_batches": self._num_batches,
            "stale_feedback": self._stale_feedback,
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: Any) -> None:
        """Replace the contents by ``state``, of `state_dict`; needs `build`.

        With as many streams as before, later batches are bit-identical. With another number, the
        stored streams end where they stand. Priorities made with another alpha, or missing, start
        anew at the highest one seen.

        Raises:
            CheckpointError: the state is of another capacity, unroll length or environment, which
                changes nothing; or a file of it is damaged.
            OSError: there is no room for its files.
        """
        ring, priorities = self._ring, state["priorities"]
        first_new = ring.load_state_dict(state["ring"])
        self._max_priority = float(state["max_priority"])
        self._num_batches = int(state["num_batches"])
        self._stale_feedback = int(state["stale_feedback"])
        self._generator.bit_generator.state = state["generator"]
        if self._tree is None:
            return
        self._tree = SumTree(ring.num_rows)
        if priorities and priorities["alpha"] == self.settings.alpha:
            leaves = priorities["leaves"]
            still_valid = ring.valid[: len(leaves)]
            self._tree.set(np.arange(len(leaves)), np.where(still_valid, leaves, 0.0))
            self._prioritise_since(first_new)
        else:
            self._prioritise_since(max(0, ring.head - ring.num_rows))

    def check_valid(self) -> None:
        """Check every invariant, slowly (for tests).

        Raises:
            AssertionError: one doesn't hold.
        """
        self._ring.check_valid()
        if self._tree is not None:
            self._tree.check_valid()
            leaves = self._tree.leaves
            assert np.array_equal(leaves > 0, self._ring.valid[: self._ring.num_rows])
            assert leaves.max() <= self._max_priority**self.settings.alpha * (1 + 1e-12)

    @property
    def _ring(self) -> BlockRing:
        if self._built_ring is None:
            raise RuntimeError("the replay buffer has no arrays yet: call build() first")
        return self._built_ring

    def _prioritise_since(self, key: int) -> None:
        """Give the rows from ``key`` on the priority of new ones."""
        if self._tree is not None:
            priority = self._max_priority**self.settings.alpha
            for rows in self._ring.since(key):
                addresses = np.arange(rows.start, rows.stop)
                self._tree.set(addresses, np.where(self._ring.valid[rows], priority, 0.0))

    def _prioritise_by_actor(self, tree: SumTree, key: int, spec: SampleSpec) -> None:
        """Give rows from ``key`` on, and older ones whose windows they complete, the actor's error.

        The value that a window ends with was noted in the row of its last observation: that row
        may be a reset row, but it must have come.
        """
        ring = self._ring
        newest = ring.address(np.arange(key, ring.head))
        starts = [newest]
        oldest = newest[:: ring.layout.unroll_length]
        for _ in range(spec.n_step):
            older = ring.before(oldest)
            # Behind a termination or a reset row windows were complete before.
            is_open = ring.valid[older] & ~ring.terminated[older]
            oldest = older[(ring.following[older] == oldest) & is_open]
            starts.append(oldest)
        start_B = np.concatenate(starts)
        start_B = start_B[ring.valid[start_B]]
        return_B, discount_B, end_B = self._windows(start_B, spec)
        has_come_B = ring.following[end_B] != end_B  # a tail or a stub follows itself
        known_B = (discount_B == 0) | has_come_B
        bootstrap_B = np.where(has_come_B, ring.extras["greedy_value"][end_B], 0.0)
        target_B = return_B + discount_B * bootstrap_B
        error_B = np.abs(target_B - ring.extras["action_value"][start_B])[known_B]
        if not np.isfinite(error_B).all():
            raise NonFiniteError("the acting policy's values are not finite: its TD error is NaN")
        tree.set(start_B[known_B], self._priorities(error_B.astype(np.float64)))

    def _priorities(self, error: NDArray[np.float64]) -> NDArray[np.float64]:
        """Those of absolute TD errors ``error``, to the power of alpha; the highest is noted.

        Raises:
            NonFiniteError: an error is NaN or infinite.
            ValueError: an error is negative.
        """
        s, priority = self.settings, np.empty(len(error))
        refused, highest = _prioritise(error, s.priority_epsilon, s.alpha, priority)
        if refused >= 0:
            kind = ValueError if np.isfinite(error[refused]) else NonFiniteError
            raise kind(f"priority={error[refused]}: must be finite and not negative")
        self._max_priority = max(self._max_priority, highest)
        return priority

    def _state_memory(self, bytes_per_row: int) -> None:
        """Say what the buffer will take; refuse what there is not.

        Raises:
            SettingError: there is less.
        """
        capacity, free = self.settings.capacity, free_memory()
        needed = capacity * bytes_per_row
        logger.info(
            "The replay takes %s of memory for %s rows; %s are free.",
            _size(needed), f"{capacity:,}", _size(free),
        )  # fmt: skip
        if needed > free:
            raise SettingError(
                f"replay.capacity={capacity}: needs {_size(needed)}, {_size(free)} are free; "
                f"at most {free // bytes_per_row} fit"
            )

    def _state_disk(self, place: StorePlace, in_memory: int, in_files: int) -> None:
        """Say what files will take, given bytes per row; refuse what there is not.

        Checkpoints hold copies of what is in memory, and share files; those of rows that were
        overwritten since then stay for them.

        Raises:
            SettingError: the files of the replay do not fit.
        """
        capacity, kept = self.settings.capacity, place.num_checkpoints
        shared = (capacity + kept * min(place.rows_between, capacity)) * in_files
        copied = (kept + 1) * capacity * in_memory if self.settings.save else 0
        run_dir = place.directory.parent
        # What this run's own checkpoints hold is given back in the course of it.
        names = ("checkpoints/step_*[0-9]/*.page", "checkpoints/step_*[0-9]/replay.safetensors")
        held = {s.st_ino: s.st_size for n in names for s in map(os.stat, run_dir.glob(n))}
        free = free_disk(run_dir) + sum(held.values())
        needs = f"needs up to {_size(shared + copied)} of disk with its checkpoints; "
        needs += f"{_size(free)} are free for {run_dir}"
        logger.info("The replay %s.", needs)
        if shared + copied > free:
            advice = "take a smaller trainer.keep_last or replay.capacity, or another run_dir"
            if in_files:
                raise SettingError(f"replay.capacity={capacity}: {needs}: {advice}")
            logger.warning("the disk may become too small for checkpoints: %s", advice)

    def _draw_uniformly(self, count: int) -> NDArray[np.int64]:
        """Addresses ``[count]`` of rows to begin at, each as likely as any other."""
        ring = self._ring
        drawn = np.empty(0, np.int64)
        while len(drawn) < count:
            candidates = self._generator.integers(ring.num_stored, size=2 * count)
            drawn = np.concatenate([drawn, candidates[ring.drawable[candidates]]])
        return drawn[:count]

    def _draw_by_priority(
        self, tree: SumTree, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Addresses ``[count]`` of valid rows and their importance weights."""
        addresses = tree.draw(self._generator.random(count))
        weight = np.empty(count, np.float32)
        _weigh(addresses, tree.leaves, self.beta, weight)
        return addresses, weight


@compiled
def _weigh(
    addresses: NDArray[np.int64],
    leaves: NDArray[np.float64],
    beta: float,
    weight: NDArray[np.float32],
) -> None:
    """Importance weights of ``addresses``, the largest 1: then N and the total cancel out."""
    lowest = np.inf
    for i in range(len(addresses)):
        lowest = min(lowest, leaves[addresses[i]])
    for i in range(len(addresses)):
        weight[i] = (lowest / leaves[addresses[i]]) ** beta


@compiled
def _prioritise(
    error: NDArray[np.float64], epsilon: float, alpha: float, priority: NDArray[np.float64]
) -> tuple[int, float]:
    """See `ReplayBuffer._priorities`.

    Returns:
        The place of an error that is negative or not finite, or -1; the highest priority before
        it is raised to the power of ``alpha``.
    """
    highest = 0.0
    for i in range(len(error)):
        if not 0 <= error[i] < np.inf:  # NaN neither
            return i, 0.0
        highest = max(highest, error[i] + epsilon)
        priority[i] = (error[i] + epsilon) ** alpha
    return -1, highest


def _made(place: StorePlace | None) -> Path:
    """The directory of ``place``, where there can be files that have several names.

    Raises:
        SettingError: it can't be.
    """
    if place is None:
        raise SettingError("replay.storage=disk: needs a run directory: set run_dir=...")
    directory = place.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe, link = directory / "probe", directory / "link"
        probe.touch()
        os.link(probe, link)
        probe.unlink()
        link.unlink()
    except OSError as error:
        raise SettingError(
            f"replay.storage=disk: {directory} can't have files with hard links: "
            f"{error.strerror}; use another run_dir, or replay.storage=memory"
        ) from error
    return directory


def _size(num_bytes: float) -> str:
    """``num_bytes`` as people read it."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
