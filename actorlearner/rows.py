"""Where a ring keeps rows that are large: in memory, or in files behind memory maps.

Both kinds are indexed as an array is, by whole numbers, take whole blocks, and are saved without
being copied first.

Legend of the suffixes: N stacks of K rows for each of B columns; B blocks of T rows.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import secrets
import shutil
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorlearner.compiled import compiled, copy_bytes
from actorlearner.contracts import Array, ArraySpec, CheckpointError
from actorlearner.memory import free_memory
from actorlearner.statetree import StoredFile

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
PAGE_BYTES = 16 << 20
"""About how much of an array makes a file: few files, and little memory for the open page."""


# ------------------------------------------------------------------------------------ in memory


class MemoryRows:
    """Rows in one array."""

    def __init__(self, spec: ArraySpec, num_places: int) -> None:
        """All zero, and there: to touch memory first can take longer than to write to it.

        Args:
            spec: of a row.
            num_places: how many there are.
        """
        self._array = spec.zeros(num_places)
        self._array.fill(0)
        self._row_bytes = self._array[0].nbytes
        self._bytes = self._array.reshape(-1).view(np.uint8)
        # No WeakSet: another thread may drop one while this one looks through them.
        self._frozen: list[weakref.ref[FrozenRows]] = []

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a row."""
        return self._array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """``[num_places, ...]``."""
        return self._array.shape

    def __getitem__(self, addresses: NDArray[np.int64]) -> Array:
        """The rows at ``addresses``, copied."""
        return self._array[addresses]

    def take(self, addresses: NDArray[np.int64], into: Array) -> None:
        """Copy the rows at ``addresses`` (``[N, B, K]``) to ``into`` (contiguous, as many)."""
        assert into.flags.c_contiguous
        assert into.nbytes == addresses.size * self._row_bytes
        _gather(self._bytes, self._row_bytes, addresses, into.reshape(-1).view(np.uint8))

    def __setitem__(self, addresses: NDArray[np.int64], rows: Array) -> None:
        """Write ``rows`` to ``addresses``."""
        for reference in self._frozen:
            if (frozen := reference()) is not None:
                frozen.keep(addresses)
        self._array[addresses] = rows

    def write(self, places: slice, blocks: Array) -> None:
        """Write ``blocks`` (``[B, T, ...]``) to the ``B * T`` rows of ``places``, in that order."""
        for reference in self._frozen:
            if (frozen := reference()) is not None:
                frozen.keep(np.arange(places.start, places.stop))
        # Much faster than by addresses.
        self._array[places].reshape(blocks.shape)[...] = blocks

    def save(self, num_rows: int) -> FrozenRows:
        """The first ``num_rows`` as they are now: a leaf for a checkpoint."""
        frozen = FrozenRows(self._array[:num_rows])
        self._frozen = [r for r in (*self._frozen, weakref.ref(frozen)) if r() is not None]
        return frozen

    def load(self, saved: Any, num_rows: int) -> None:
        """Take the first ``num_rows`` from what either kind of `save` told."""
        for begin, chunk in _saved_chunks(saved, num_rows):
            self[np.arange(begin, begin + len(chunk))] = chunk


class FrozenRows:
    """What an array was at one moment, while it changes: see `statetree.FrozenArray`.

    Rows that are about to change before they have been read are copied aside, so it takes memory
    for those only. One thread reads; another may change the array.
    """

    def __init__(self, array: Array) -> None:
        """Freeze ``array``, whose owner calls `keep` from now on."""
        self._array = array
        self._lock = threading.Lock()
        self._num_read = 0
        self._aside: dict[int, Array] = {}

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the array."""
        return self._array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self._array.shape

    def keep(self, addresses: NDArray[np.int64]) -> None:
        """Copy the rows at ``addresses`` aside, unless that was done or they have been read."""
        with self._lock:
            at_stake = (addresses >= self._num_read) & (addresses < len(self._array))
            for address in addresses[at_stake].tolist():
                if address not in self._aside:
                    self._aside[address] = self._array[address].copy()

    def chunks(self) -> Iterator[Array]:
        """The array as it was, in parts along its first axis; to be asked for once."""
        row_bytes = self._array.dtype.itemsize * math.prod(self._array.shape[1:])
        step = max(1, _CHUNK_BYTES // max(1, row_bytes))
        for begin in range(0, len(self._array), step):
            with self._lock:
                chunk = self._array[begin : begin + step].copy()
                for address in self._aside.keys() & range(begin, begin + len(chunk)):
                    chunk[address - begin] = self._aside.pop(address)
                self._num_read = begin + len(chunk)
            yield chunk


@compiled
def _gather(
    source: NDArray[np.uint8],
    row_bytes: int,
    addresses_NBK: NDArray[np.int64],
    into: NDArray[np.uint8],
) -> None:
    """See `MemoryRows.take`.

    Column after column: its N stacks of K frames have frames in common, which are still in the
    processor's cache then. Rows that stand together are copied together.
    """
    num_steps, num_columns, stack = addresses_NBK.shape
    for column in range(num_columns):
        for step in range(num_steps):
            begin = 0
            while begin < stack:
                first, count = addresses_NBK[step, column, begin], 1
                while (
                    begin + count < stack
                    and addresses_NBK[step, column, begin + count] == first + count
                ):
                    count += 1
                place = (step * num_columns + column) * stack + begin
                copy_bytes(into, place * row_bytes, source, first * row_bytes, count * row_bytes)
                begin += count


# ------------------------------------------------------------------------------------- on disk


class DiskRows:
    """Rows in files that are written once, *pages*; only the page being written is in memory.

    Rows must be written in the order of their addresses, round and round, as a ring does. A page
    that is begun takes over what the ring has not overwritten yet, and its file goes; when the next
    is begun, it becomes a file again, under another name, and is read through a memory map from
    then on. The tails behind the rows stay in memory.

    A file lives as long as anybody refers to it: this object, or a state that a checkpoint is being
    made of. Checkpoints hold links of their own.

    A page that can't be written, for want of disk, stays in memory until it can.
    """

    def __init__(self, spec: ArraySpec, num_rows: int, num_tails: int, prefix: Path) -> None:
        """Nothing is written yet.

        Args:
            spec: of a row.
            num_rows: in the ring.
            num_tails: places behind it.
            prefix: directory, which exists, and how names of files begin.
        """
        self._row = spec.zeros()
        self._num_rows, self._prefix = num_rows, prefix
        self._page_rows = min(num_rows, max(1, PAGE_BYTES // max(1, self._row.nbytes)))
        begins = [*range(0, num_rows, self._page_rows), num_rows, num_rows + num_tails]
        self._begins = np.array(begins, np.int64)
        self._tail_page = len(begins) - 2
        # The arrays of pages, begun or not, and the tails behind them.
        self._pages = [spec.zeros(0)] * self._tail_page + [spec.zeros(num_tails)]
        self._files: dict[int, StoredFile] = {}
        self._open: int | None = None
        self._unwritten: set[int] = set()
        self._num_files = 0
        # An object that was here before may remove its files when it is collected, later on.
        self._token = secrets.token_hex(4)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a row."""
        return self._row.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """``[num_rows + num_tails, ...]``."""
        return (int(self._begins[-1]), *self._row.shape)

    def __getitem__(self, addresses: NDArray[np.int64]) -> Array:
        """The rows at ``addresses``, copied."""
        rows = np.empty((*addresses.shape, *self._row.shape), self._row.dtype)
        self.take(addresses, rows)
        return rows

    def take(self, addresses: NDArray[np.int64], into: Array) -> None:
        """Copy the rows at ``addresses`` to ``into`` (contiguous, as many)."""
        pages, places = self._places(addresses)
        rows = into.reshape(-1, *self._row.shape)
        for index, (page, place) in enumerate(zip(pages, places, strict=True)):
            rows[index] = self._pages[page][place]

    def __setitem__(self, addresses: NDArray[np.int64], rows: Array) -> None:
        """Write ``rows`` to ``addresses``, which go on from those written last, or are tails."""
        pages, places = self._places(addresses)
        rows = rows.reshape(-1, *self._row.shape)
        for page, place, row in zip(pages, places, rows, strict=True):
            if page not in (self._open, self._tail_page):
                self._begin(page)
            self._pages[page][place] = row

    def write(self, places: slice, blocks: Array) -> None:
        """Write ``blocks`` (``[B, T, ...]``) to the ``B * T`` rows of ``places``, in that order."""
        self[np.arange(places.start, places.stop)] = blocks

    def save(self, num_rows: int) -> dict[str, Any]:
        """The first ``num_rows`` for a checkpoint: files, and an array of the open page.

        Raises:
            OSError: a page can't be written still.
        """
        for page in sorted(self._unwritten):
            self._write(page)
        ends = self._begins[1:].clip(max=num_rows)
        num_pages = int(np.count_nonzero(self._begins[:-2] < num_rows))
        return {
            "shape": list(self.shape),
            "dtype": self.dtype.name,
            "page_rows": self._page_rows,
            "pages": [
                self._files.get(page, self._pages[page][: ends[page] - self._begins[page]])
                for page in range(num_pages)
            ],
        }

    def load(self, saved: Any, num_rows: int) -> None:
        """Take the first ``num_rows`` from what either kind of `save` told.

        The files of a checkpoint are linked, or copied if they are on another file system.
        """
        self._files, self._open, self._unwritten = {}, None, set()
        are_pages = isinstance(saved, dict) and saved["page_rows"] == self._page_rows
        for begin, chunk in _saved_chunks(saved, num_rows):
            page = begin // self._page_rows
            source = saved["pages"][page] if are_pages else None
            if isinstance(source, StoredFile):
                self._adopt(page, source)
            else:
                self[np.arange(begin, begin + len(chunk))] = chunk

    def _places(self, addresses: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Page of each address, and where in it."""
        flat = addresses.ravel()
        pages = np.searchsorted(self._begins, flat, side="right") - 1
        return pages.tolist(), (flat - self._begins[pages]).tolist()

    def _num_in(self, page: int) -> int:
        return int(self._begins[page + 1] - self._begins[page])

    def _begin(self, page: int) -> None:
        """Let ``page`` be written to; the one that was is complete."""
        if self._open is not None:
            self._unwritten.add(self._open)
            self._write_if_possible()
        array = np.zeros((self._num_in(page), *self._row.shape), self._row.dtype)
        array[: len(self._pages[page])] = self._pages[page]
        self._pages[page], self._open = array, page
        self._files.pop(page, None)
        self._unwritten.discard(page)

    def _write_if_possible(self) -> None:
        num_before = len(self._unwritten)
        try:
            for page in sorted(self._unwritten):
                self._write(page)
        except OSError as error:
            if free_memory() < 2 * PAGE_BYTES:
                raise
            if num_before == 1:
                logger.error(
                    "the replay can't be written, and stays in memory until it can: %s", error
                )
        else:
            if num_before > 1:
                logger.warning("the replay can be written again")

    def _write(self, page: int) -> None:
        """Make a file of ``page``, and read it from there from now on."""
        path, content = self._new_path(), self._pages[page].data.cast("B")
        try:
            with path.open("xb") as file:
                file.write(content)
        except OSError:
            _remove(path)
            raise
        self._unwritten.discard(page)
        self._map(page, StoredFile(path, content.nbytes, hashlib.sha256(content).hexdigest()))

    def _adopt(self, page: int, source: StoredFile) -> None:
        path = self._new_path()
        try:
            os.link(source.path, path)
        except OSError:
            shutil.copyfile(source.path, path)
        self._map(page, StoredFile(path, source.size_bytes, source.sha256))

    def _new_path(self) -> Path:
        self._num_files += 1
        name = f"{self._prefix.name}_{self._token}_{self._num_files:09d}.page"
        return self._prefix.with_name(name)

    def _map(self, page: int, file: StoredFile) -> None:
        self._pages[page] = _mapped(file, (self._num_in(page), *self._row.shape), self.dtype)
        self._files[page] = file
        weakref.finalize(file, _remove, file.path)


# --------------------------------------------------------------------------------- for batches


class ReusedMemory:
    """Memory for batches that is lent again when nothing refers to it any more.

    Fresh memory of such sizes comes from the system each time, page by page, which takes longer
    than to fill it. Where CUDA is in use the memory is pinned, for copies to the device beside
    other work; PyTorch keeps that itself, and knows when the copies have ended.
    """

    _NUM_KEPT = 4
    """More than that is lent at once only to somebody who collects batches."""

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._kept: list[tuple[Array, weakref.ref[Array]]] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[torch.Tensor, Array]:
        """A tensor of any content, which shares memory with no other that lives; its array."""
        if torch.cuda.is_initialized():
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
            pinned = torch.empty(shape, dtype=kind, pin_memory=True)
            return pinned, pinned.numpy()
        # The first that is free: the processor's cache has the most of it.
        for place, (array, lent) in enumerate(self._kept):
            if lent() is None and array.shape == shape and array.dtype == dtype:
                del self._kept[place]
                break
        else:
            place, array = len(self._kept), np.empty(shape, dtype)
        view = array.view()  # that the tensor's memory holds on to, for as long as it is used
        if len(self._kept) < self._NUM_KEPT:
            self._kept.insert(place, (array, weakref.ref(view)))
        return torch.from_numpy(view), view


# -------------------------------------------------------------------------------------- shared


def clear_pages(directory: Path) -> None:
    """Remove the pages in ``directory``, and it itself if nothing else is there.

    A killed process leaves them; what checkpoints need of them they hold by themselves.
    """
    for path in directory.glob(f"*_{'[0-9a-f]' * 8}_{'[0-9]' * 9}.page"):
        _remove(path)
    with suppress(OSError):
        directory.rmdir()


def _remove(path: Path) -> None:
    with suppress(OSError):  # Windows keeps what is mapped; the next run clears it away
        path.unlink()


def _mapped(file: StoredFile, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """The content of ``file``, not to be written to."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if file.size_bytes != size_bytes:
        raise CheckpointError(f"{file.path}: is not {size_bytes:,} bytes long, as {shape} takes")
    # NumPy's own would keep a file descriptor open for each, of which there are few.
    content: Array = torch.from_file(
        str(file.path), shared=False, size=size_bytes, dtype=torch.uint8
    ).numpy()
    content.flags.writeable = False
    return content.view(dtype).reshape(shape)


def saved_layout(saved: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a row of what either kind of ``save`` told."""
    if isinstance(saved, dict):
        return tuple(saved["shape"][1:]), saved["dtype"]
    return saved.shape[1:], saved.dtype.name


def _saved_chunks(saved: Any, num_rows: int) -> Iterator[tuple[int, Array]]:
    """What either kind of ``save`` told: where each part begins, and its rows."""
    if not isinstance(saved, dict):
        yield 0, saved[:num_rows]
        return
    shape, dtype = saved_layout(saved)
    for index, page in enumerate(saved["pages"]):
        begin = index * saved["page_rows"]
        if isinstance(page, StoredFile):
            count = min(saved["page_rows"], num_rows - begin)
            yield begin, _mapped(page, (count, *shape), np.dtype(dtype))
        else:
            yield begin, page
