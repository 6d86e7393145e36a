"""Shared arrays, and the double buffer under fire."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection

import numpy as np
import pytest
from gymnasium import spaces

from actorlearner.adapter import EnvAdapter
from actorlearner.contracts import ArraySpec
from actorlearner.launch.processes import start_processes
from actorlearner.shared_memory import DoubleBuffer, SharedArrays
from tests.environments import Places

DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64"),
]
STRESS = {"small": ArraySpec((), "int64"), "large": ArraySpec((2000,), "float32")}
READS = 100_000
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_boxes(dtype):
    """Every dtype that a Box may have, through the adapter's spec, into shared memory."""

    class Env(Places):
        observation_space = spaces.Box(0, 1, (3,), np.dtype(dtype).type)

    spec = EnvAdapter(Env(), "Env").spec.observation["observation"]
    shared = SharedArrays({"x": spec})
    assert shared.arrays["x"].dtype == np.dtype(dtype)
    assert shared.arrays["x"].tolist() == [0, 0, 0]
    shared.arrays["x"][:] = [1, 0, 1]
    assert shared.arrays["x"].tolist() == [1, 0, 1]
    shared.close()


def test_arrays_are_aligned_and_apart():
    specs = {f"{dtype}/{n}": ArraySpec((n, 3), dtype) for dtype in DTYPES for n in (0, 1, 7)}
    specs["scalar"] = ArraySpec((), "bool")
    specs["empty"] = ArraySpec((0,), "float64")  # the last, and with no room of its own
    shared = SharedArrays(specs)
    for number, (name, array) in enumerate(shared.arrays.items()):
        assert array.shape == specs[name].shape
        assert array.ctypes.data % 64 == 0
        array[...] = number % 2 if array.dtype == bool else number
    for number, array in enumerate(shared.arrays.values()):
        assert (array == (number % 2 if array.dtype == bool else number)).all()
    shared.close()


@linux
def test_nothing_is_left():
    names, before = set(os.listdir("/dev/shm")), open_descriptors()
    shared = SharedArrays({"x": ArraySpec((1000,), "float32")})
    assert set(os.listdir("/dev/shm")) == names
    view = shared.arrays["x"]
    shared.close()
    shared.close()
    assert shared.arrays == {}
    view[:] = 1  # the memory goes with the last view
    del view
    assert open_descriptors() == before


@linux
def test_more_memory_than_there_is():
    before = open_descriptors()
    with pytest.raises(OSError, match=r"4,611,686,018,427,387,904 bytes of shared memory"):
        SharedArrays({"x": ArraySpec((2**62,), "uint8")})
    assert open_descriptors() == before


def increment(shared: SharedArrays, connection: Connection) -> None:
    shared.arrays["x"] += 1
    connection.send(shared.arrays["y"].tolist())


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_children_see_the_same_memory(start_method):
    context = start_processes(start_method)
    shared = SharedArrays({"x": ArraySpec((2,), "float16"), "y": ArraySpec((), "bool")})
    shared.arrays["x"][:], shared.arrays["y"][...] = [1, 2], True
    ours, theirs = context.Pipe()
    process = context.Process(target=increment, args=(shared, theirs))
    process.start()
    assert ours.recv() is True
    process.join()
    assert shared.arrays["x"].tolist() == [2, 3]
    process.close()
    ours.close()
    theirs.close()
    shared.close()


def test_double_buffer_in_turns():
    buffer = DoubleBuffer({"x": ArraySpec((2,), "float32"), "y": ArraySpec((), "int64")})
    into = {"x": np.zeros(2, "f4"), "y": np.zeros((), "i8")}
    assert buffer.read(into) == buffer.writes == 0
    for number in range(1, 6):
        buffer.write({"x": np.full(2, number, "f4"), "y": np.array(10 * number)})
        assert buffer.read(into) == buffer.writes == number
        assert into["x"].tolist() == [number, number]
        assert into["y"] == 10 * number
    with pytest.raises(TypeError, match="Cannot cast"):
        buffer.write({"x": np.zeros(2, "f8"), "y": np.array(0)})
    buffer.close()
    buffer.close()


def read_often(buffer: DoubleBuffer, connection: Connection) -> None:
    """Read under fire; says what was wrong, or how many different writes were seen."""
    into = {name: spec.zeros() for name, spec in STRESS.items()}
    last, seen = 0, 0
    for _ in range(READS):
        number = buffer.read(into)
        values = {float(into["small"]), float(into["large"].min()), float(into["large"].max())}
        if values != {float(number)} or number < last:
            connection.send(f"write {number} after {last} held {values}")
            return
        seen += number > last
        last = number
    connection.send(seen)


@linux
def test_readers_never_see_half_a_write():
    """Three readers, 10^5 reads each, while every write changes every number."""
    buffer = DoubleBuffer(STRESS)
    context = start_processes("forkserver")
    readers = []
    for _ in range(3):
        ours, theirs = context.Pipe()
        process = context.Process(target=read_often, args=(buffer, theirs))
        process.start()
        theirs.close()
        readers.append((process, ours))
    number, deadline = 0, time.monotonic() + 40
    while not all(ours.poll() for _, ours in readers) and time.monotonic() < deadline:
        for _ in range(200):
            number += 1
            buffer.write(
                {"small": np.array(number), "large": np.full(2000, number % 2**24, "float32")}
            )
    answers = [ours.recv() for _, ours in readers]
    for process, ours in readers:
        process.join()
        process.close()
        ours.close()
    buffer.close()
    assert number < 2**24  # beyond, float32 can't count
    assert all(isinstance(seen, int) for seen in answers), answers
    assert sum(answers) > 100, "hardly any read met a write"
    assert multiprocessing.active_children() == []
