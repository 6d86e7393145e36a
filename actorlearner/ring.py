"""The ring of blocks in which a replay buffer keeps rows, each stored once.

Legend of the suffixes: N rows of a walk, T rows of a block, B walks, or columns and their blocks,
K frames of a stack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actorlearner.compiled import compiled
from actorlearner.contracts import (
    Array,
    ArraySpec,
    CheckpointError,
    EnvSpec,
    Observation,
    StreamLayout,
    Unroll,
)
from actorlearner.rows import DiskRows, MemoryRows, ReusedMemory, saved_layout


class BlockRing:
    """The rows of the newest unrolls, each stored once, and what follows what.

    One column of an unroll becomes a *block* of ``T`` rows. Rows are numbered by *keys*, which
    count up for ever; row ``key`` stands at *address* ``key % num_rows``. The ring is overwritten
    in order, so a key is stored exactly while it is one of the newest ``num_rows`` keys.

    ``following[address]`` is the address of the next row in the stream. Inside a block that is the
    next address. At its end it is row 0 of the stream's next block; behind the stream's newest
    block, it is the stream's *tail*, a place beyond the ring that holds the observation after that
    block. Where a stream breaks off, its tail moves into a *stub*, row 0 of a block in which
    nothing is valid, for as long as the ring holds it. Tails and stubs are invalid and follow
    themselves, so that a walk stays there and a window ends there.

    A block is younger than the one that it follows and is overwritten later: what follows a stored
    row is always stored. What precedes it is not, so a row whose frame stack reaches back to one
    that is overwritten, or never came, can't be drawn any more and becomes invalid. Of windows it
    is no part: they start at older rows, which are gone.

    A transition can begin at any valid row. A sequence can begin at any row, a reset row too, that
    ``sequence_length`` rows have followed: then it goes on to be whole until the ring overwrites
    its first. Of every stream, each ``sequence_length`` rows make a new *window*, with the row
    before them as its first; windows wait in a queue for somebody to take them.

    Attributes:
        sequence_length: rows of a sequence behind its first; None if transitions are drawn.
        num_rows: rows that fit, a multiple of ``T``.
        head: key of the next row to be written, a multiple of ``T``.
        num_drawable: rows stored that can be drawn.
        observation: each ``[num_rows + num_streams, ...]``, the tails at the end, as below; in
            memory or on disk.
        action: ``[num_rows + num_streams, ...]``.
        reward: float32 ``[num_rows + num_streams]``.
        terminated: bool ``[num_rows + num_streams]``.
        valid: bool ``[num_rows + num_streams]``.
        truncated: bool ``[num_rows + num_streams]``; empty without sequences.
        first: bool ``[num_rows + num_streams]``; likewise.
        drawable: bool ``[num_rows + num_streams]``, where a batch's rows can begin; without
            sequences it is ``valid`` itself.
        following: int64 ``[num_rows + num_streams]``.
        age: uint8 ``[num_rows + num_streams]``, rows back to the first of the episode, at most
            ``stack - 1``: how many older frames the row's stack has.
        preceding: int64 ``[num_blocks + num_streams]``, the address of the row before row 0 of
            each block and before each tail; meaningless where no age reaches back to it.
        extras: each ``[num_rows + num_streams, ...]``.
        last_key: int64 ``[num_streams]``, the newest row of each stream, -1 for none.
        last_sequence: int64 ``[num_streams]``, the number of its newest unroll, -1 for none.
        chain_length: int64 ``[num_streams]``, rows of the stream since it last began or broke off,
            stored or not; only counted with sequences.
        windows: keys of the first rows of the windows that nobody has taken, the oldest first.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        layout: StreamLayout,
        capacity: int,
        extras: Mapping[str, ArraySpec] | None = None,
        sequence_length: int | None = None,
        directory: Path | None = None,
    ) -> None:
        """Nothing is stored.

        Args:
            env_spec: what rows consist of.
            layout: how they arrive.
            capacity: rows, at most.
            extras: what else of each row is stored.
            sequence_length: rows of a sequence behind its first; None if transitions are drawn.
            directory: where observations go to, which exists; None keeps them in memory.
        """
        self.layout = layout
        self.sequence_length = sequence_length
        self.num_rows = capacity // layout.unroll_length * layout.unroll_length
        num_places = self.num_rows + layout.num_streams
        self._stacks = {key: spec.stack for key, spec in env_spec.observation.items()}
        self._max_age = max(self._stacks.values()) - 1
        self.observation: dict[str, MemoryRows | DiskRows] = {}
        for index, (key, spec) in enumerate(env_spec.observation.items()):
            if directory is None:
                self.observation[key] = MemoryRows(spec, num_places)
            else:
                prefix = directory / f"observation_{index}"
                self.observation[key] = DiskRows(spec, self.num_rows, layout.num_streams, prefix)
        self._batches = {key: ReusedMemory() for key in env_spec.observation}
        self.action = env_spec.action.zeros(num_places)
        self.reward = np.zeros(num_places, np.float32)
        self.terminated = np.zeros(num_places, np.bool_)
        self.valid = np.zeros(num_places, np.bool_)
        has_sequences = sequence_length is not None
        self.truncated = np.zeros(num_places if has_sequences else 0, np.bool_)
        self.first = np.zeros_like(self.truncated)
        self.drawable = np.zeros_like(self.truncated) if has_sequences else self.valid
        self.following = np.arange(num_places, dtype=np.int64)
        self.age = np.zeros(num_places, np.uint8)
        num_blocks = self.num_rows // layout.unroll_length
        self.preceding = np.zeros(num_blocks + layout.num_streams, np.int64)
        self.extras = {k: MemoryRows(spec, num_places) for k, spec in (extras or {}).items()}
        self.head = 0
        self.num_drawable = 0
        self._given_up: list[NDArray[np.int64]] = []
        self.last_key = np.full(layout.num_streams, -1, np.int64)
        self.last_sequence = np.full(layout.num_streams, -1, np.int64)
        self.chain_length = np.zeros(layout.num_streams, np.int64)
        self.windows: deque[int] = deque()

    @classmethod
    def bytes_per_row(
        cls, env_spec: EnvSpec, extras: Mapping[str, ArraySpec], has_sequences: bool = False
    ) -> int:
        """What one row of capacity takes, in bytes."""
        bookkeeping = 4 + 1 + 1 + 8 + 1  # reward, terminated, valid, following, age
        if has_sequences:
            bookkeeping += 3  # truncated, first, drawable
        specs = [*env_spec.observation.values(), env_spec.action, *extras.values()]
        return bookkeeping + sum(spec.zeros().nbytes for spec in specs)

    @property
    def num_stored(self) -> int:
        """Rows stored, valid or not; they stand at addresses ``[0, num_stored)``."""
        return min(self.head, self.num_rows)

    def address(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the rows ``keys`` stand, or stood."""
        return keys % self.num_rows

    def since(self, key: int) -> list[slice]:
        """Where the rows from ``key``, first of a block, to the newest stand; at most two parts."""
        return [
            rows for _, rows in self._pieces(key, (self.head - key) // self.layout.unroll_length)
        ]

    def keys(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """The keys of the rows stored at ``addresses``."""
        keys = np.empty(addresses.shape, np.int64)
        _keys(addresses, self.head, self.num_rows, keys)
        return keys

    def drawable_at(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which of ``keys`` (int64 ``[B]``) can still be drawn, by their places, and where."""
        places, addresses = np.empty_like(keys), np.empty_like(keys)
        count = _drawable_at(
            np.ascontiguousarray(keys), self.head, self.num_rows, self.drawable, places, addresses
        )
        return places[:count], addresses[:count]

    def is_stored(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of ``keys`` has not been overwritten; False for -1."""
        return (keys >= self.head - self.num_stored) & (keys < self.head)

    def append(self, unroll: Unroll) -> NDArray[np.int64]:
        """Write ``unroll`` over the oldest rows and link it to what its streams did before.

        Returns:
            Addresses of older rows that can't be drawn any more though they are stored.
        """
        num_rows, streams = unroll.num_rows, unroll.streams
        assert num_rows == self.layout.unroll_length
        breaks = self.last_sequence[streams] != unroll.sequence - 1
        if breaks.any():
            broken = streams[breaks]
            tails = {k: a[self._tail(broken)] for k, a in self.observation.items()}
            self._end_chains(self.last_key[broken], tails)
            self.last_key[broken] = -1
            self.chain_length[broken] = 0

        begin = self.head
        first_B = self._allocate(len(streams))
        for columns, rows in self._pieces(begin, len(streams)):
            self._write(unroll, columns, rows)
        for key, array in unroll.observation.items():
            self.observation[key][self._tail(streams)] = array[-1]
        if self.sequence_length is None:
            self.num_drawable += unroll.env_steps

        self._link(self.last_key[streams], first_B)
        self.following[first_B + num_rows - 1] = self._tail(streams)
        self._note_ages(first_B, unroll)
        if self.sequence_length is not None:
            self._note_sequences(first_B, streams, self.sequence_length)
        self.last_key[streams] = np.arange(begin, self.head, num_rows) + num_rows - 1
        self.last_sequence[streams] = unroll.sequence
        given_up = np.concatenate([np.empty(0, np.int64), *self._given_up])
        self._given_up = []
        anew: NDArray[np.bool_] = self.drawable[given_up]  # written since
        return given_up[~anew]

    def _write(self, unroll: Unroll, columns: slice, rows: slice) -> None:
        """Write ``columns`` of ``unroll`` into ``rows``, one column after the other."""

        def put(into: Array, array_TB: Array) -> None:
            blocks = array_TB[:, columns].swapaxes(0, 1)
            into[rows].reshape(blocks.shape)[...] = blocks

        for key, array in unroll.observation.items():
            self.observation[key].write(rows, array[:-1, columns].swapaxes(0, 1))
        for name, extra in self.extras.items():
            extra.write(rows, unroll.extras[name][:, columns].swapaxes(0, 1))
        put(self.action, unroll.action)
        put(self.reward, unroll.reward)
        put(self.terminated, unroll.terminated)
        put(self.valid, unroll.valid)
        if self.sequence_length is not None:
            put(self.truncated, unroll.truncated)
            put(self.first, unroll.first)

    def take_windows(self, count: int) -> NDArray[np.int64]:
        """Addresses of the first rows of the oldest windows, up to ``count`` that are whole still.

        They are in the queue no more.
        """
        taken: list[int] = []
        while self.windows and len(taken) < count:
            key = self.windows.popleft()
            address = key % self.num_rows
            if key >= self.head - self.num_stored and self.drawable[address]:
                taken.append(address)
        return np.array(taken, np.int64)

    def walk(self, addresses: NDArray[np.int64], num_steps: int) -> NDArray[np.int64]:
        """The way from ``addresses`` (``[B]``) along their streams, ``[num_steps + 1, B]``."""
        path = np.empty((num_steps + 1, len(addresses)), np.int64)
        path[0] = addresses
        for step in range(num_steps):
            path[step + 1] = self.following[path[step]]
        return path

    def before(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows before ``addresses`` (int64 ``[B]``) in their streams.

        Only to be asked where there is one: of rows whose `age` says so, or which are known to be
        linked.
        """
        length, num_blocks = self.layout.unroll_length, self.num_rows // self.layout.unroll_length
        is_tail = addresses >= self.num_rows
        block = np.where(is_tail, num_blocks + addresses - self.num_rows, addresses // length)
        begins = is_tail | (addresses % length == 0)
        return np.where(begins, self.preceding[block], addresses - 1)

    def observed(self, addresses: NDArray[np.int64]) -> dict[str, Tensor]:
        """The observations at ``addresses`` (int64 ``[N, B]``), copied.

        An episode's first frame stands in for those before it, as in `frames.FrameStack`.

        Returns:
            Each ``[N, B, ...]``, stacked as `ArraySpec.stacked_shape` says.
        """
        places = self._stacks_at(addresses)
        observation = {}
        for key, rows in self.observation.items():
            stack, row_shape = self._stacks[key], rows.shape[1:]
            shape = addresses.shape + ((stack, *row_shape) if stack > 1 else row_shape)
            observation[key], array = self._batches[key].empty(shape, rows.dtype)
            rows.take(places[..., -stack:], array)
        return observation

    def _stacks_at(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the frames of the rows at ``addresses`` stand, ``[N, B, stack]``, oldest first."""
        if self._max_age == 0:
            return addresses[..., None]
        places = np.empty((*addresses.shape, self._max_age + 1), np.int64)
        length = self.layout.unroll_length
        _stack_places(addresses, self.age, self.preceding, self.num_rows, length, places)
        return places

    def state_dict(self) -> dict[str, Any]:
        """What is stored; the arrays are views, but for those that can be large."""
        tails = self._tail(np.arange(self.layout.num_streams))
        return {
            **self._shape(),
            "head": self.head,
            "rows": {
                **{name: a[: self.num_stored] for name, a in self._arrays().items()},
                **{name: rows.save(self.num_stored) for name, rows in self._large().items()},
            },
            "tails": {key: a[tails] for key, a in self.observation.items()},
            "tail_ages": self.age[tails],
            "preceding": self.preceding,
            "last_key": self.last_key,
            "last_sequence": self.last_sequence,
            "chain_length": self.chain_length,
            "windows": np.array(self.windows, np.int64),
        }

    def load_state_dict(self, state: Any) -> int:
        """Replace what is stored by ``state``.

        Returns:
            The key of the first row that was not in it: the streams of another number of streams
            end in stubs.

        Raises:
            CheckpointError: see `ReplayBuffer.load_state_dict`.
        """
        arrays, large = self._arrays(), self._large()
        self._refuse_misfit(state, {**arrays, **large})
        self.head = int(state["head"])
        for name, array in arrays.items():
            array[: self.num_stored] = state["rows"][name]
        for name, rows in large.items():
            rows.load(state["rows"][name], self.num_stored)
        self.valid[self.num_stored :] = self.drawable[self.num_stored :] = False
        self.num_drawable = int(np.count_nonzero(self.drawable))
        self.windows = deque(np.asarray(state.get("windows", ())).tolist())

        first_new = self.head
        num_blocks = self.num_rows // self.layout.unroll_length
        self.preceding[:num_blocks] = state["preceding"][:num_blocks]
        if len(state["last_key"]) == self.layout.num_streams:
            self.last_key[:] = state["last_key"]
            self.last_sequence[:] = state["last_sequence"]
            self.chain_length[:] = state.get("chain_length", 0)
            self.preceding[num_blocks:] = state["preceding"][num_blocks:]
            self.age[self.num_rows :] = state["tail_ages"]
            for key, tails in state["tails"].items():
                self.observation[key][self._tail(np.arange(self.layout.num_streams))] = tails
        else:
            self.last_key[:] = self.last_sequence[:] = -1
            self.chain_length[:] = 0
            self._end_chains(state["last_key"], state["tails"])
        return first_new

    def check_valid(self) -> None:
        """Check every invariant, slowly."""
        length = self.layout.unroll_length
        stored_places = np.arange(len(self.valid)) < self.num_stored
        assert self.head % length == 0
        assert not self.valid[~stored_places].any()
        assert not self.drawable[~stored_places].any()
        assert self.num_drawable == np.count_nonzero(self.drawable)
        tails = self._tail(np.arange(self.layout.num_streams))
        assert np.array_equal(self.following[tails], tails)

        stored = np.arange(self.head - self.num_stored, self.head).reshape(-1, length)
        followed = []
        for block in stored:
            row = self.address(block)
            if self.following[row[0]] == row[0]:  # a stub
                assert not (self.valid | self.drawable)[row].any()
                assert np.array_equal(self.following[row], row)
                continue
            assert np.array_equal(self.following[row[:-1]], row[1:])
            end = int(self.following[row[-1]])
            followed.append(end)
            if end < self.num_rows:
                assert end % length == 0
                assert self.keys(np.array([end]))[0] > block[-1], "what follows a row is younger"
            else:
                assert self.last_key[end - self.num_rows] == block[-1]
        assert len(followed) == len(set(followed)), "a row follows two"
        self._check_stacks()
        if self.sequence_length is not None:
            self._check_sequences(self.sequence_length)
        for stream in np.flatnonzero(self.is_stored(self.last_key)):
            last = self.address(self.last_key[stream])
            assert self.following[last] == tails[stream]

    def _check_sequences(self, length: int) -> None:
        """Whether the rows that can be drawn are those of which whole sequences are stored."""
        rows = np.arange(self.num_stored)
        path = self.walk(rows, length)
        moves = (path[1:] != path[:-1]).all(axis=0) & (path[-1] < self.num_rows)
        is_stub = self.following[path[-1]] == path[-1]
        whole = moves & ~is_stub & self._has_whole_stack(rows)
        assert np.array_equal(self.drawable[rows], whole)
        assert len(set(self.windows)) == len(self.windows)

    def _check_stacks(self) -> None:
        """Whether the older frames of every row that can be drawn are stored."""
        rows = np.flatnonzero(self.drawable)
        age = self.age[rows].astype(np.int64)
        while (age > 0).any():
            rows, age = rows[age > 0], age[age > 0]
            older = self.before(rows)
            assert np.array_equal(self.following[older], rows)
            assert (older < self.num_stored).all()
            assert (self.age[older] >= np.minimum(age - 1, self.age[rows])).all()
            rows, age = older, age - 1

    def _shape(self) -> dict[str, int | None]:
        """What the rows of a state can't do without."""
        return {
            "num_rows": self.num_rows,
            "unroll_length": self.layout.unroll_length,
            "stack": self._max_age + 1,  # ages go no further
            "sequence_length": self.sequence_length,
        }

    def _arrays(self) -> dict[str, Array]:
        of_sequences: dict[str, Array] = {}
        if self.sequence_length is not None:
            of_sequences = {
                name: getattr(self, name) for name in ("truncated", "first", "drawable")
            }
        return {
            **of_sequences,
            "action": self.action,
            "reward": self.reward,
            "terminated": self.terminated,
            "valid": self.valid,
            "following": self.following,
            "age": self.age,
        }

    def _large(self) -> dict[str, MemoryRows | DiskRows]:
        return {
            **{f"observation/{key}": rows for key, rows in self.observation.items()},
            **{f"extras/{name}": rows for name, rows in self.extras.items()},
        }

    def _tail(self, streams: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.num_rows + streams

    def _pieces(self, key: int, num_blocks: int) -> list[tuple[slice, slice]]:
        """Where ``num_blocks`` blocks from row ``key`` on stand: which of them, at which addresses.

        They stand together, but for the ring's end.
        """
        length = self.layout.unroll_length
        begin = key % self.num_rows
        before_end = min(num_blocks, (self.num_rows - begin) // length)
        pieces = [(slice(0, before_end), slice(begin, begin + before_end * length))]
        if before_end < num_blocks:
            rest = num_blocks - before_end
            pieces.append((slice(before_end, num_blocks), slice(0, rest * length)))
        return pieces

    def _allocate(self, num_blocks: int) -> NDArray[np.int64]:
        """Addresses ``[num_blocks]`` of the first rows of new blocks in which nothing is valid."""
        length, begin = self.layout.unroll_length, self.head
        self.head += num_blocks * length
        first = self.address(np.arange(begin, self.head, length, dtype=np.int64))
        ends = first + length - 1
        next_rows = self.following[ends]
        stand = next_rows < self.num_rows  # no tails: of a loaded state there may be more of them
        ends, next_rows = ends[stand], next_rows[stand]
        self._give_up(next_rows[self.before(next_rows) == ends])  # behind a stub there is no next
        for _, rows in self._pieces(begin, num_blocks):
            self.num_drawable -= int(np.count_nonzero(self.drawable[rows]))
            self.valid[rows] = self.drawable[rows] = False
            self.following[rows] = np.arange(rows.start + 1, rows.stop + 1)
        return first

    def _link(self, last_key: NDArray[np.int64], first: NDArray[np.int64]) -> None:
        """Let addresses ``first`` follow the rows ``last_key`` where those are still stored."""
        stored = self.is_stored(last_key)
        self.following[self.address(last_key[stored])] = first[stored]

    def _end_chains(self, last_key: NDArray[np.int64], tails: Observation) -> None:
        """Put ``tails``, the observations after the rows ``last_key``, into stubs behind them."""
        stored = self.is_stored(last_key)
        # To make room may overwrite the row that a stub would follow: then nobody walks to it.
        first = self._allocate(int(np.count_nonzero(stored)))
        stubs = first[:, None] + np.arange(self.layout.unroll_length)
        last = self.address(last_key[stored])
        for key, tail in tails.items():
            self.observation[key][first] = tail[stored]
        self.following[stubs] = stubs
        self.preceding[first // self.layout.unroll_length] = last
        self.age[first] = np.minimum(self.age[last] + 1, self._max_age)
        self._link(last_key[stored], first)

    def _note_ages(self, first_B: NDArray[np.int64], unroll: Unroll) -> None:
        """Ages of the new rows and of the tails behind them, and what precedes both."""
        length = self.layout.unroll_length
        streams = unroll.streams
        last_key = self.last_key[streams]
        last = self.address(last_key)
        self.preceding[first_B // length] = last
        self.preceding[self.num_rows // length + streams] = first_B + length - 1
        if self._max_age == 0:
            return  # nothing is stacked, and all ages are 0
        # Where nothing precedes, as old as can be: so no stack of it is whole before a `first`.
        linked = self.is_stored(last_key)
        age_B = np.where(linked, self.age[last], self._max_age)
        _count_ages(age_B, self._max_age, first_B, self._tail(streams), unroll.first, self.age)
        self._give_up(first_B[~linked])

    def _note_sequences(
        self, first_B: NDArray[np.int64], streams: NDArray[np.int64], length: int
    ) -> None:
        """Mark the rows that ``length`` rows have followed by now, and queue the new windows."""
        unroll_length = self.layout.unroll_length
        back_T = np.arange(unroll_length) - length  # where sequences begin that end in these rows
        hops_T = -(back_T // unroll_length)
        block_B = first_B
        blocks_HB = [block_B]  # the new ones, the ones before them, ...; -1 where one is missing
        for _ in range(hops_T.max()):
            last_B = self.before(block_B)
            linked_B = (block_B >= 0) & (self.following[last_B] == block_B)
            block_B = np.where(linked_B, last_B - (unroll_length - 1), -1)
            blocks_HB.append(block_B)
        block_TB = np.stack(blocks_HB)[hops_T]
        start_TB = block_TB + (back_T % unroll_length)[:, None]
        position_TB = self.chain_length[streams] + np.arange(unroll_length)[:, None]
        self.chain_length[streams] += unroll_length

        exists_TB = block_TB >= 0
        starts, positions = start_TB[exists_TB], position_TB[exists_TB]
        whole = self._has_whole_stack(starts)
        starts, positions = starts[whole], positions[whole]
        self.drawable[starts] = True
        self.num_drawable += len(starts)
        while self.windows and self.windows[0] < self.head - self.num_stored:
            self.windows.popleft()
        self.windows.extend(self.keys(starts[positions % length == 0]).tolist())

    def _has_whole_stack(self, addresses: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the older frames of the rows at ``addresses`` are stored."""
        whole, age = np.ones(len(addresses), np.bool_), self.age[addresses]
        for back in range(self._max_age):
            older = self.before(addresses)
            linked = self.following[older] == addresses
            whole &= linked | (age <= back)
            addresses = np.where(linked, older, addresses)
        return whole

    def _give_up(self, addresses: NDArray[np.int64]) -> None:
        """Make rows invalid whose stacks reach back beyond ``addresses``, first of what is left."""
        if self._max_age == 0 or len(addresses) == 0:
            return
        # They are in one block: `ReplayBuffer.build` has made sure that an unroll is that long.
        path = self.walk(addresses, self._max_age - 1)
        reaches_beyond = self.age[path] > np.arange(self._max_age)[:, None]
        cut = path[reaches_beyond & self.drawable[path]]
        self.drawable[cut] = False
        self.num_drawable -= len(cut)
        self._given_up.append(cut)

    def _refuse_misfit(
        self, state: Any, arrays: Mapping[str, Array | MemoryRows | DiskRows]
    ) -> None:
        shape_then = {name: state.get(name) for name in self._shape()}
        now, then = _in_words(self._shape()), _in_words(shape_then)
        if now != then:
            raise CheckpointError(
                f"the checkpoint holds a replay made with {then}, this run has {now}: "
                "resume with the values of the checkpoint"
            )
        layout_now = {name: (a.shape[1:], a.dtype.name) for name, a in arrays.items()}
        layout_then = {name: saved_layout(saved) for name, saved in state["rows"].items()}
        if layout_now != layout_then:
            raise CheckpointError(
                f"the checkpoint holds a replay of rows {layout_then}, "
                f"this run makes {layout_now}: resume with the environment and the "
                "replay.initial_priority that it was made with"
            )


def _in_words(shape: Mapping[str, int | None]) -> str:
    """`BlockRing._shape` for people."""
    words = "replay.capacity={num_rows} unroll_length={unroll_length} frame_stack={stack}"
    if shape["sequence_length"] is not None:
        words += " and sequences of {sequence_length} rows"
    return words.format(**shape)


@compiled
def _keys(addresses: NDArray[np.int64], head: int, num_rows: int, keys: NDArray[np.int64]) -> None:
    """See `BlockRing.keys`."""
    next_address = head % num_rows
    for place in np.ndindex(addresses.shape):
        laps_ago = 1 if addresses[place] >= next_address else 0
        keys[place] = addresses[place] + head - next_address - laps_ago * num_rows


@compiled
def _drawable_at(
    keys: NDArray[np.int64],
    head: int,
    num_rows: int,
    drawable: NDArray[np.bool_],
    places: NDArray[np.int64],
    addresses: NDArray[np.int64],
) -> int:
    """See `BlockRing.drawable_at`; how many there are."""
    count = 0
    for place in range(len(keys)):
        address = keys[place] % num_rows
        if max(0, head - num_rows) <= keys[place] < head and drawable[address]:
            places[count], addresses[count] = place, address
            count += 1
    return count


@compiled
def _count_ages(
    age_B: NDArray[np.int64],
    max_age: int,
    first_B: NDArray[np.int64],
    tail_B: NDArray[np.int64],
    first_TB: NDArray[np.bool_],
    ages: NDArray[np.uint8],
) -> None:
    """Note the ages of new rows and tails in ``ages``, given those of the rows before them."""
    for column in range(len(age_B)):
        age = age_B[column]
        for row in range(len(first_TB)):
            age = 0 if first_TB[row, column] else min(age + 1, max_age)
            ages[first_B[column] + row] = age
        ages[tail_B[column]] = min(age + 1, max_age)


@compiled
def _stack_places(
    addresses_NB: NDArray[np.int64],
    age: NDArray[np.uint8],
    preceding: NDArray[np.int64],
    num_rows: int,
    unroll_length: int,
    places_NBK: NDArray[np.int64],
) -> None:
    """See `BlockRing._stacks_at`."""
    newest = places_NBK.shape[2] - 1
    for step, column in np.ndindex(addresses_NB.shape):
        at = addresses_NB[step, column]
        row = at % unroll_length  # in its block
        num_older = age[at]
        places_NBK[step, column, newest] = at
        for back in range(newest):
            if back < num_older:  # else the episode's first stands in
                if at >= num_rows:  # a tail
                    at = preceding[num_rows // unroll_length + at - num_rows]
                    row = unroll_length - 1
                elif row == 0:
                    at = preceding[at // unroll_length]
                    row = unroll_length - 1
                else:
                    at -= 1
                    row -= 1
            places_NBK[step, column, newest - 1 - back] = at
