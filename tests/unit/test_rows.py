"""Rows in memory and on disk: the same to whoever draws them, and as they were when saved."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actorlearner import checkpoint, rows
from actorlearner.contracts import (
    ArraySpec,
    CheckpointError,
    EnvSpec,
    SampleSpec,
    SequenceSpec,
    SettingError,
    StorePlace,
    StreamLayout,
)
from actorlearner.replay import ReplayBuffer
from actorlearner.rows import DiskRows, FrozenRows, MemoryRows, ReusedMemory
from actorlearner.statetree import StoredFile
from tests.saved import saved
from tests.scripted import LATENTS, ScriptedWorker, stacked_spec

PIXELS = ArraySpec((5,), "uint8")


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 bytes, so that a page is 8 or 100 rows of the scripted environment."""
    monkeypatch.setattr(rows, "PAGE_BYTES", 100)


def numbered(begin: int, count: int) -> np.ndarray[Any, Any]:
    """Rows that tell their number."""
    return np.repeat(np.arange(begin, begin + count) % 251, 5).reshape(-1, 5).astype(np.uint8)


def fill(ring: MemoryRows | DiskRows, num_rows: int, begin: int, count: int) -> None:
    """Write rows ``begin`` and on as a ring of ``num_rows`` does."""
    ring[np.arange(begin, begin + count) % num_rows] = numbered(begin, count)


def content(ring: MemoryRows | DiskRows, num_rows: int) -> np.ndarray[Any, Any]:
    return ring[np.arange(num_rows)]


def write(chunks: Any) -> bytes:
    return b"".join(chunk.tobytes() for chunk in chunks)


# ------------------------------------------------------------------------------------ in memory


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(["uint8", "float32", "bool", "int64"]))
def test_rows_are_taken_as_by_an_index(data: st.DataObject, dtype: str) -> None:
    """In memory: whatever stands together, at the ends too, of rows of any shape."""
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2), "shape of a row"))
    memory = MemoryRows(ArraySpec(shape, dtype), 12)
    generator = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    memory[np.arange(12)] = generator.integers(0, 2 if dtype == "bool" else 99, (12, *shape))
    num_steps, num_columns, stack = data.draw(st.tuples(*[st.integers(1, 4)] * 3), "N, B, K")
    first = generator.integers(0, 12, (num_steps, num_columns, 1))
    jumps = generator.random((num_steps, num_columns, stack)) < 0.3
    index = np.where(jumps, 0, (first + np.arange(stack)).clip(0, 11))
    fewer = index[..., -data.draw(st.integers(1, stack), "of K") :]
    into = np.empty((*fewer.shape, *shape), dtype)
    memory.take(fewer, into)
    assert np.array_equal(into, memory[fewer])


class TestFrozen:
    @settings(max_examples=60, deadline=None)
    @given(
        when=st.lists(st.lists(st.integers(0, 29), max_size=8), max_size=12),
        num_saved=st.integers(0, 30),
    )
    def test_what_is_read_is_what_it_was(self, when: list[list[int]], num_saved: int) -> None:
        """However writes fall between reads."""
        memory = MemoryRows(PIXELS, 30)
        fill(memory, 30, 0, 30)
        frozen = memory.save(num_saved)
        before = content(memory, num_saved)
        parts = frozen.chunks()
        seen = []
        for addresses in when:
            memory[np.array(addresses, np.int64)] = np.full((len(addresses), 5), 255, np.uint8)
            seen.append(next(parts, np.empty((0, 5), np.uint8)))
        seen.extend(parts)
        assert np.array_equal(np.concatenate([before[:0], *seen]), before)

    @pytest.mark.parametrize("num_read", [0, 2, 5])
    def test_blocks_that_are_written_are_kept_too(self, num_read: int) -> None:
        memory = MemoryRows(PIXELS, 30)
        fill(memory, 30, 0, 30)
        before = content(memory, 30)
        parts = memory.save(30).chunks()
        seen = [next(parts) for _ in range(num_read)]
        blocks = np.arange(2 * 6 * 5, dtype=np.uint8).reshape(6, 2, 5).swapaxes(0, 1)
        memory.write(slice(4, 16), blocks)
        assert np.array_equal(np.concatenate([*seen, *parts]), before)
        assert np.array_equal(memory[np.arange(4, 16)], blocks.reshape(12, 5))

    @pytest.fixture(autouse=True)
    def _small_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rows, "_CHUNK_BYTES", 15)

    def test_it_takes_memory_for_what_changes_before_it_is_read(self) -> None:
        memory = MemoryRows(PIXELS, 30)
        frozen = memory.save(30)
        parts = frozen.chunks()
        for _ in range(5):  # 15 rows are read
            next(parts)
        for _ in range(2):
            fill(memory, 30, 10, 10)
        assert sorted(frozen._aside) == [15, 16, 17, 18, 19]
        for _ in parts:
            pass
        assert not frozen._aside
        fill(memory, 30, 0, 30)
        assert not frozen._aside, "all has been read"

    def test_one_that_nobody_reads_costs_nothing(self) -> None:
        memory = MemoryRows(PIXELS, 30)
        for _ in range(3):
            memory.save(30)
        assert [reference() for reference in memory._frozen] == [None]

    def test_beside_a_thread_that_writes(self) -> None:
        spec = ArraySpec((1000,), "uint8")
        memory = MemoryRows(spec, 3000)
        for _ in range(3):
            before = content(memory, 3000)
            frozen = memory.save(3000)
            ended = threading.Event()

            def overwrite(ended: threading.Event = ended) -> None:
                generator = np.random.default_rng(0)
                while not ended.is_set():
                    at = generator.integers(0, 3000, 50)
                    memory[at] = generator.integers(0, 255, (50, 1000), np.uint8)

            thread = threading.Thread(target=overwrite)
            thread.start()
            try:
                assert write(frozen.chunks()) == before.tobytes()
            finally:
                ended.set()
                thread.join()


def test_memory_is_there_before_it_is_written_to() -> None:
    """First touch is slow, and a machine that is short of memory shows it before the run."""
    process = psutil.Process()
    before = process.memory_info().rss
    rows_of_100_mib = MemoryRows(ArraySpec((1024,), "uint8"), 100 << 10)
    # Half of it, because what other tests left may go back to the system meanwhile.
    assert process.memory_info().rss - before > 0.5 * (100 << 20)
    assert not rows_of_100_mib[np.array([0, (100 << 10) - 1])].any()


# --------------------------------------------------------------------------------- for batches


class TestReusedMemory:
    SHAPE, KIND = (3, 5), np.dtype("float32")

    def test_nobody_who_lives_has_the_same(self) -> None:
        """Whoever holds a tensor, a part of it, or an array of it keeps it."""
        memory = ReusedMemory()
        held: list[Any] = [
            memory.empty(self.SHAPE, self.KIND)[0],
            memory.empty(self.SHAPE, self.KIND)[0][1],
            memory.empty(self.SHAPE, self.KIND)[0].numpy()[2:],
            memory.empty(self.SHAPE, self.KIND)[1],
            *(memory.empty(self.SHAPE, self.KIND)[0] for _ in range(4)),
        ]
        for number, part in enumerate(held):
            part[...] = number
        assert [float(np.asarray(part).ravel()[0]) for part in held] == [*range(8)]
        assert all((np.asarray(part) == number).all() for number, part in enumerate(held))

    def test_it_is_lent_again(self) -> None:
        memory = ReusedMemory()
        tensor, array = memory.empty(self.SHAPE, self.KIND)
        at = tensor.data_ptr()
        array[...] = 7.0
        assert (tensor == 7.0).all()
        del tensor, array
        taken = np.empty(self.SHAPE, self.KIND)  # where it stood, if it had been given back
        tensor, _ = memory.empty(self.SHAPE, self.KIND)
        assert (tensor.data_ptr(), tensor.shape, tensor.dtype) == (at, self.SHAPE, torch.float32)
        other, _ = memory.empty(self.SHAPE, np.dtype("int32"))
        assert at not in (other.data_ptr(), taken.ctypes.data)

    def test_it_is_pinned_where_cuda_is_in_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[bool] = []

        def empty(*shape: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            asked.append(pin_memory)
            return torch.zeros(*shape, **kwargs)

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch, "empty", empty)
        memory = ReusedMemory()
        tensor, array = memory.empty(self.SHAPE, self.KIND)
        array[...] = 7.0
        assert (tensor == 7.0).all()
        assert asked == [True]
        assert not memory._kept, "PyTorch knows when a copy to the device has ended"


# ------------------------------------------------------------------------------------- on disk


def disk_rows(directory: Path, num_rows: int = 50, num_tails: int = 2) -> DiskRows:
    directory.mkdir(parents=True, exist_ok=True)
    return DiskRows(PIXELS, num_rows, num_tails, directory / "frames")


def make_store(
    storage: str,
    run_dir: Path,
    *,
    length: int | None = None,
    stack: int = 2,
    prioritized: bool = True,
    capacity: int = 48,
) -> ReplayBuffer:
    """Of 2 streams in unrolls of 4; the disk's has pages that end within unrolls."""
    buffer = ReplayBuffer(
        storage=storage, capacity=capacity, prioritized=prioritized and length is None
    )
    spec = SequenceSpec(16, length, LATENTS) if length else SampleSpec(16, n_step=3)
    place = StorePlace(run_dir / "replay", 1, 0)
    buffer.build(stacked_spec(stack), spec, StreamLayout(2, 4), 100, place)
    return buffer


def assert_same_batch(one: ReplayBuffer, other: ReplayBuffer) -> np.ndarray[Any, Any]:
    batch, twin = one.sample(), other.sample()
    for name in batch.__dataclass_fields__:
        left, right = getattr(batch, name), getattr(twin, name)
        pairs = [(left[k], right[k]) for k in left] if isinstance(left, dict) else [(left, right)]
        for a, b in pairs:
            assert a.dtype == b.dtype
            assert np.array_equal(np.asarray(a), np.asarray(b)), name
    return batch.keys


class TestDisk:
    pytestmark = pytest.mark.usefixtures("small_pages")

    @settings(max_examples=40, deadline=None)
    @example(["01", "01", "000", "reload", "learn", "111", "1111", "swap", "01", "learn"], 0, 3)
    @given(
        operations=st.lists(
            st.sampled_from(["01", "0", "111", "00000", "break", "learn", "reload", "swap"]),
            max_size=25,
        ),
        seed=st.integers(0, 99),
        stack=st.integers(1, 3),
    )
    @pytest.mark.parametrize("length", [None, 5])
    def test_batches_are_those_of_memory(
        self, length: int | None, operations: list[str], seed: int, stack: int
    ) -> None:
        """Bit for bit, over reloads from either kind into either kind."""
        root = Path(tempfile.mkdtemp())
        kinds = ["memory", "disk"]
        stores = [make_store(kind, root, length=length, stack=stack) for kind in kinds]
        workers = [ScriptedWorker([stream], 4, seed=seed + stream) for stream in range(2)]
        try:
            for number, operation in enumerate(operations):
                if operation in ("reload", "swap"):
                    states = [saved(store) for store in stores]
                    stores = [
                        make_store(kind, root / str(number), length=length, stack=stack)
                        for kind in kinds
                    ]
                    for store, state in zip(
                        stores, states if operation == "reload" else states[::-1], strict=True
                    ):
                        store.load_state_dict(state)
                elif operation == "break":
                    workers[0].unroll()
                elif operation == "learn":
                    if stores[0].ready():
                        keys = assert_same_batch(*stores)
                        feedback = (
                            {"priority": np.linspace(0, 2, 16)}
                            if length is None
                            else {"latent": np.full((*keys.shape, 2), number, np.int16)}
                        )
                        for store in stores:
                            store.feed_back(keys, feedback)
                else:
                    for worker in operation:
                        unroll = workers[int(worker)].unroll()
                        for store in stores:
                            store.add(unroll)
                            store.check_valid()
            if stores[0].ready():
                assert_same_batch(*stores)
        finally:
            del stores
            shutil.rmtree(root)

    def test_only_the_open_page_is_in_memory(self, tmp_path: Path) -> None:
        disk = disk_rows(tmp_path)
        fill(disk, 50, 0, 70)
        # 20 rows in a page: the last is shorter, and the ring is in its first again.
        assert [len(page) for page in disk._pages] == [20, 20, 10, 2]
        assert [page.flags.writeable for page in disk._pages] == [True, False, False, True]
        assert np.array_equal(
            content(disk, 50), np.concatenate([numbered(50, 20), numbered(20, 30)])
        )
        fill(disk, 50, 70, 3)
        assert [page.flags.writeable for page in disk._pages] == [False, True, False, True]
        assert len(list(tmp_path.iterdir())) == 2
        sizes = {path.stat().st_size for path in tmp_path.iterdir()}
        assert sizes == {100, 50}

    def test_no_file_descriptor_stays_open(self, tmp_path: Path) -> None:
        before = psutil.Process().num_fds()
        disk = disk_rows(tmp_path, num_rows=2000)
        fill(disk, 2000, 0, 2000)
        assert len(disk._files) == 99
        assert psutil.Process().num_fds() == before

    def test_a_file_lives_as_long_as_it_is_wanted(self, tmp_path: Path) -> None:
        run_dir, live = tmp_path / "run", tmp_path / "run" / "replay"
        disk = disk_rows(live)
        fill(disk, 50, 0, 45)
        checkpoint.save(run_dir, 45, {"replay": {"rows": disk.save(45)}}, keep_last=2)
        inodes = {path.stat().st_ino for path in live.iterdir()}
        kept = run_dir / "checkpoints" / "step_000000000045"
        assert {path.stat().st_ino for path in kept.glob("*.page")} == inodes, "links, not copies"
        held = disk.save(45)  # a checkpoint that is being written
        fill(disk, 50, 45, 60)
        assert all(file.path.exists() for file in held["pages"][:2]), "overwritten, and wanted"
        checkpoint.save(run_dir, 46, {"replay": {"rows": held}})
        del held
        assert inodes.isdisjoint(path.stat().st_ino for path in live.iterdir())
        for env_steps in (105, 106):
            states = {"replay": {"rows": disk.save(50)}}
            checkpoint.save(run_dir, env_steps, states, keep_last=2)
        assert inodes.isdisjoint(path.stat().st_ino for path in run_dir.rglob("*.page"))
        del disk, states
        assert not list(live.iterdir())

    def test_one_that_was_there_before_takes_only_its_own_along(self, tmp_path: Path) -> None:
        """A run that is resumed in the same process: the first replay is collected some time."""
        before, now = disk_rows(tmp_path), disk_rows(tmp_path)
        for disk in (before, now):
            fill(disk, 50, 0, 45)
        del before, disk
        assert len(list(tmp_path.iterdir())) == len(now._files) > 1
        assert all(file.path.exists() for file in now._files.values())

    def test_what_was_saved_stays_as_it_was(self, tmp_path: Path) -> None:
        disk = disk_rows(tmp_path / "replay")
        fill(disk, 50, 0, 77)
        before = content(disk, 50)
        where = checkpoint.save(tmp_path, 77, {"replay": {"rows": disk.save(50)}})
        fill(disk, 50, 77, 200)
        again = disk_rows(tmp_path / "other")
        again.load(checkpoint.load(where, ["replay"])["replay"]["rows"], 50)
        assert np.array_equal(content(again, 50), before)
        fill(again, 50, 77, 60)
        assert np.array_equal(content(again, 50)[37:], numbered(87, 13))
        checkpoint.verify(where)

    def test_a_file_system_in_between_makes_copies(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = disk_rows(tmp_path / "replay")
        fill(disk, 50, 0, 50)
        where = checkpoint.save(tmp_path, 50, {"replay": {"rows": disk.save(50)}})

        def elsewhere(*_: Any) -> None:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(os, "link", elsewhere)
        again = disk_rows(tmp_path / "other")
        again.load(checkpoint.load(where, ["replay"])["replay"]["rows"], 50)
        assert np.array_equal(content(again, 50), content(disk, 50))
        assert {path.stat().st_nlink for path in (tmp_path / "other").iterdir()} == {1}


class TestFullDisk:
    pytestmark = pytest.mark.usefixtures("small_pages")

    def test_rows_stay_in_memory_until_they_can_be_written(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        disk = disk_rows(tmp_path / "frames")
        fill(disk, 50, 0, 25)
        shutil.rmtree(tmp_path / "frames")  # nothing can be written any more, even as root
        fill(disk, 50, 25, 50)
        assert caplog.text.count("stays in memory until it can") == 1
        expected = np.concatenate([numbered(50, 25), numbered(25, 25)])
        assert np.array_equal(content(disk, 50), expected)
        with pytest.raises(FileNotFoundError):
            disk.save(50)
        (tmp_path / "frames").mkdir()
        state = disk.save(50)
        assert [isinstance(page, StoredFile) for page in state["pages"]] == [True, False, True]
        fill(disk, 50, 75, 20)
        assert not disk._unwritten
        for page, file in disk._files.items():
            stored = file.path.read_bytes()
            assert hashlib.sha256(stored).hexdigest() == file.sha256, page
            assert stored == disk._pages[page].tobytes()

    def test_it_ends_where_memory_does(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = disk_rows(tmp_path / "frames")
        shutil.rmtree(tmp_path / "frames")
        monkeypatch.setattr(rows, "free_memory", lambda: 150)
        with pytest.raises(FileNotFoundError):
            fill(disk, 50, 0, 25)


class TestBuild:
    def test_without_a_run_directory(self) -> None:
        with pytest.raises(SettingError, match=r"replay.storage=disk: needs a run directory"):
            ReplayBuffer(storage="disk").build(
                stacked_spec(1), SampleSpec(8), StreamLayout(1, 4), 10
            )

    FRAMES = EnvSpec("Pixels", {"x": ArraySpec((84, 84), "uint8")}, ArraySpec((), "int32", (2,)))

    def need(
        self, run_dir: Path, capacity: int, storage: str = "disk", between: int = 10_000
    ) -> None:
        place = StorePlace(run_dir / "replay", 3, between)
        store = ReplayBuffer(storage=storage, capacity=capacity)
        store.build(self.FRAMES, SampleSpec(8), StreamLayout(1, 4), 10, place)

    def test_need_is_stated_and_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        usage = shutil.disk_usage(tmp_path)._replace(free=7_500_000_000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        run_dir = tmp_path / "run"
        self.need(run_dir, 1_000_000)
        # 1.03 million rows of 7056 bytes, and four copies of a million of 29.
        assert (
            f"The replay needs up to 6.88 GiB of disk with its checkpoints; 6.98 GiB are free for "
            f"{run_dir}." in caplog.text
        )
        assert "The replay takes 27.7 MiB of memory for 1,000,000 rows" in caplog.text
        with pytest.raises(SettingError, match=r"capacity=1100000: needs up to 7.54 GiB of disk"):
            self.need(run_dir, 1_100_000)
        # Each of three checkpoints may hold a million rows of its own, and no more.
        with pytest.raises(SettingError, match=r"needs up to 26.39 GiB of disk"):
            self.need(run_dir, 1_000_000, between=5_000_000)

    def test_what_a_run_has_already_needs_no_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=7_500_000_000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        folder = tmp_path / "checkpoints" / "step_1"
        folder.mkdir(parents=True)
        (folder / "a.page").touch()
        os.truncate(folder / "a.page", 300_000_000)
        os.link(folder / "a.page", folder / "b.page")  # counted once
        self.need(tmp_path, 1_050_000)
        with pytest.raises(SettingError, match=r"7.26 GiB are free"):
            self.need(tmp_path, 1_100_000)

    def test_checkpoints_of_memory_only_warn(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The run may be over before the replay is full."""
        usage = shutil.disk_usage(tmp_path)._replace(free=2_000_000_000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        self.need(tmp_path, 70_000, "memory")
        assert "too small" not in caplog.text
        self.need(tmp_path, 71_000, "memory")
        assert "the disk may become too small for checkpoints" in caplog.text

    @pytest.mark.parametrize("storage", ["memory", "disk"])
    def test_what_a_killed_process_left_goes(self, storage: str, tmp_path: Path) -> None:
        left = tmp_path / "replay" / "observation_0_0123abcd_000000007.page"
        left.parent.mkdir()
        left.write_bytes(b"half")
        make_store(storage, tmp_path)
        assert not left.exists()

    @pytest.mark.parametrize("storage", ["memory", "disk"])
    def test_what_others_keep_there_stays(self, storage: str, tmp_path: Path) -> None:
        """The run directory may be anybody's, such as one with a package called replay."""
        own = tmp_path / "replay" / "my_code.py"
        own.parent.mkdir()
        own.write_text("mine")
        make_store(storage, tmp_path)
        assert own.read_text() == "mine"

    def test_a_file_system_without_hard_links(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
        with pytest.raises(SettingError, match=r"can't have files with hard links: Operation not"):
            make_store("disk", tmp_path)

    def test_a_page_of_another_length_is_refused(self, tmp_path: Path) -> None:
        disk = disk_rows(tmp_path)
        page = StoredFile(tmp_path / "x.page", 10**15, "")
        state = {"shape": [52, 5], "dtype": "uint8", "page_rows": 50, "pages": [page]}
        with pytest.raises(CheckpointError, match="is not 250 bytes long"):
            disk.load(state, 50)


def test_frozen_rows_are_a_leaf_of_a_state(tmp_path: Path) -> None:
    memory = MemoryRows(PIXELS, 30)
    fill(memory, 30, 0, 30)
    frozen = memory.save(20)
    assert isinstance(frozen, FrozenRows)
    where = checkpoint.save(tmp_path, 1, {"a": [frozen, np.arange(3.0)]})
    loaded, _ = checkpoint.load(where, ["a"])["a"]
    assert np.array_equal(loaded, numbered(0, 20))
