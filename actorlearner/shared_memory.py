"""Arrays in one anonymous shared block. Nothing here knows what they mean.

The block has no name in any file system, so nothing is left behind whatever kills its owner, and
the size of ``/dev/shm`` (64 MB in Docker) does not bound it. Children get the descriptor while
they are started.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

from actorlearner.contracts import Array, ArraySpec
from actorlearner.memory import free_memory

_ALIGNMENT = 64  # a cache line


class SharedArrays:
    """Named arrays in one block of memory that child processes see too.

    Pickling works only while a `multiprocessing` child is being started: the child then attaches
    to the same memory.

    Attributes:
        arrays: the arrays, by name, zero at first.
    """

    def __init__(self, specs: Mapping[str, ArraySpec]) -> None:
        """Allocate and commit the memory.

        Raises:
            OSError: there isn't enough memory; said now, where later it would be a SIGBUS.
        """
        size = max(1, _offsets(specs)[1])
        if size > free_memory():  # Linux would kill a process instead
            raise OSError(errno.ENOMEM, f"{size:,} bytes of shared memory: there isn't that much")
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("actorlearner", os.MFD_CLOEXEC)
        else:
            descriptor, path = tempfile.mkstemp(prefix="actorlearner-")
            os.unlink(path)
        try:
            os.ftruncate(descriptor, size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            os.close(descriptor)
            raise OSError(
                error.errno, f"{size:,} bytes of shared memory: {error.strerror}"
            ) from error
        self._attach(descriptor, dict(specs))

    def _attach(self, descriptor: int, specs: dict[str, ArraySpec]) -> None:
        offsets, size = _offsets(specs)
        self._descriptor = descriptor
        self._specs = specs
        memory = mmap.mmap(descriptor, max(1, size))
        self.arrays: dict[str, Array] = {
            name: np.frombuffer(
                memory, dtype=spec.dtype, count=math.prod(spec.shape), offset=offsets[name]
            ).reshape(spec.shape)
            for name, spec in specs.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return {"descriptor": DupFd(self._descriptor), "specs": self._specs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._attach(state["descriptor"].detach(), state["specs"])

    def close(self) -> None:
        """Give the descriptor back. Idempotent. The memory goes with the last view of it."""
        self.arrays = {}
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _offsets(specs: Mapping[str, ArraySpec]) -> tuple[dict[str, int], int]:
    """Where each array starts, in bytes, and where the last one ends."""
    offsets, end = {}, 0
    for name, spec in specs.items():
        offsets[name] = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = offsets[name] + math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
    return offsets, end


class DoubleBuffer:
    """One writer, many readers, no lock: readers never see half a write, the writer never waits.

    Two copies of the arrays and a counter of writes begun and finished. Write number ``n`` goes to
    copy ``n % 2``, so the copy of the last finished write is touched only by the write after next:
    a reader that finds that one not yet begun after copying has an undivided copy.
    """

    def __init__(self, specs: Mapping[str, ArraySpec]) -> None:
        """Allocate both copies.

        Args:
            specs: the arrays of one copy.
        """
        self._names = list(specs)
        counters = {"begun": ArraySpec((1,), "int64"), "finished": ArraySpec((1,), "int64")}
        copies = {f"{i}/{name}": spec for i in (0, 1) for name, spec in specs.items()}
        self._shared = SharedArrays({**counters, **copies})

    @property
    def writes(self) -> int:
        """How many writes are finished."""
        return int(self._shared.arrays["finished"][0])

    def write(self, values: Mapping[str, Array]) -> None:
        """Publish ``values`` (every name; shapes as laid out)."""
        arrays = self._shared.arrays
        number = self.writes + 1
        arrays["begun"][0] = number
        _fence()
        for name in self._names:
            np.copyto(arrays[f"{number % 2}/{name}"], values[name], casting="no")
        _fence()
        arrays["finished"][0] = number

    def read(self, into: Mapping[str, Array]) -> int:
        """Copy the last finished write into ``into``; returns its number (0: nothing yet)."""
        arrays = self._shared.arrays
        while True:
            number = self.writes
            _fence()
            for name in self._names:
                np.copyto(into[name], arrays[f"{number % 2}/{name}"], casting="no")
            _fence()
            if arrays["begun"][0] <= number + 1:
                return number

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._shared.close()


_fence_lock = threading.Lock()


def _fence() -> None:
    """Keep memory accesses on their side of this line.

    x86 keeps stores, and loads, in order by itself. Elsewhere a lock does it, taken twice: what is
    before may move into the first holding and what is after into the second, but not past another.
    """
    for _ in range(2):
        with _fence_lock:
            pass
