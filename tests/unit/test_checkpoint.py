"""Checkpoints: exact, complete whenever they are seen, never silently wrong."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
import math
import pickle
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from actorlearner import checkpoint, rows
from actorlearner.contracts import CheckpointError
from actorlearner.statetree import alike
from tests.scripted import ScriptedWorker
from tests.unit.test_rows import make_store

SKIPPED = "skipped a checkpoint"


def save_step(run_dir: Path, env_steps: int, keep_last: int = 10, **states: Any) -> Path:
    """A small checkpoint whose state tells its step."""
    states = states or {"agent": {"weight": torch.full((3,), float(env_steps)), "at": env_steps}}
    texts = {"config.yaml": "workers: 2\n"}
    return checkpoint.save(
        run_dir, env_steps, states, {"env": "CartPole"}, texts, keep_last=keep_last
    )


def round_trip(directory: Path, state: Any) -> Any:
    return checkpoint.load(save_step(directory, 1, state=state), ["state"])["state"]


def assert_same(left: Any, right: Any) -> None:
    """Same kinds, dtypes, shapes, bits and order, all the way down."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert [(type(k), k) for k in left] == [(type(k), k) for k in right]
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        if left.numel():
            raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
            assert torch.equal(*raw)
    elif isinstance(left, np.ndarray | np.generic):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, float):
        assert left.hex() == right.hex()
    else:
        assert left == right


NUMPY_DTYPES = st.sampled_from(
    ["bool", "int8", "uint8", "uint16", "int16", "uint32", "int64", "uint64", "float16", "float32",
     "float64", "complex64", "complex128", ">f4", ">u2", "<U3", "S2", "datetime64[s]"]
)  # fmt: skip
TORCH_DTYPES = st.sampled_from(
    [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int32, torch.int64, torch.float16,
     torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
     torch.float8_e4m3fn, torch.float8_e5m2]
)  # fmt: skip
SHAPES = st_np.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape, dtype = draw(SHAPES), draw(TORCH_DTYPES)
    numbers = np.random.default_rng(draw(st.integers(0, 99))).normal(0, 50, shape)
    tensor = torch.as_tensor(np.abs(numbers)).to(dtype)
    return tensor.transpose(0, -1) if draw(st.booleans()) and tensor.ndim else tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    array = draw(st_np.arrays(draw(NUMPY_DTYPES), draw(SHAPES)))
    return array.T if draw(st.booleans()) else array


KEYS = st.one_of(
    st.text(max_size=5), st.integers(-3, 9), st.sampled_from(["$tensor", "a/b", "__metadata__", ""])
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(2**53, 2**200), st.floats(), st.text(),
    st.binary(max_size=9),
    tensors(), arrays(), arrays().filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[0]),
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda nodes: st.one_of(
        st.lists(nodes, max_size=4),
        st.lists(nodes, max_size=3).map(tuple),
        st.dictionaries(KEYS, nodes, max_size=4),
    ),
    max_leaves=12,
)


class TestStateTrees:
    @given(state=TREES)
    @settings(max_examples=150, deadline=None)
    def test_round_trip_is_exact(
        self, state: Any, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        directory = tmp_path_factory.mktemp("tree")
        assert_same(round_trip(directory, state), state)
        shutil.rmtree(directory)

    @given(one=TREES, other=TREES)
    @example(one=np.array(False), other=np.array(0, np.int8))  # the same bytes
    @example(one=np.zeros(0), other=np.zeros((0, 2)))
    @example(one=torch.zeros(2, 3), other=torch.zeros(3, 2))
    @settings(max_examples=150, deadline=None)
    def test_states_are_alike_where_nothing_differs(self, one: Any, other: Any) -> None:
        try:
            assert_same(one, other)
        except AssertionError:
            assert not alike([one, 1], [other, 1])
        assert alike([one, 1], copy.deepcopy([one, 1]))
        assert not alike([one, np.zeros(2)], [one, np.array([0, -0.0])])

    def test_colliding_paths_stay_apart(self, tmp_path: Path) -> None:
        state = {
            "a": {"b": torch.tensor(1)},
            "a/b": torch.tensor(2),
            1: np.array(3),
            "1": np.array(4),
            "__metadata__": np.array(5),
            "": np.array(6),
        }
        assert_same(round_trip(tmp_path, state), state)

    def test_special_numbers(self, tmp_path: Path) -> None:
        state = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 2**53 + 1, -(10**5000), True, 1]
        assert_same(round_trip(tmp_path, state), state)

    def test_other_layouts_of_memory(self, tmp_path: Path) -> None:
        weight = torch.arange(6.0).reshape(2, 3)
        state = {
            "transposed": np.arange(6).reshape(2, 3).T,
            "strided": np.arange(9)[::2],
            "tied": weight,
            "tied too": weight,
            "view": weight[:, 1],
            "parameter": torch.nn.Parameter(weight.T).detach(),
            "conjugate": torch.tensor([1 + 2j]).conj().resolve_conj(),
        }
        assert_same(round_trip(tmp_path, state), state)
        loaded = round_trip(tmp_path, {"parameter": torch.nn.Parameter(weight)})
        assert torch.equal(loaded["parameter"], weight)

    def test_random_generators(self, tmp_path: Path) -> None:
        generators = {"pcg": np.random.PCG64(7), "mt": np.random.MT19937(7)}
        torch_state = torch.Generator().manual_seed(3).get_state()
        state = {
            **{name: generator.state for name, generator in generators.items()},
            "python": random.Random(5).getstate(),
            "torch": torch_state,
        }
        loaded = round_trip(tmp_path, state)
        assert_same(loaded, state)
        ours, theirs = np.random.PCG64(0), np.random.PCG64(7)
        ours.state = loaded["pcg"]
        assert ours.random_raw(4).tolist() == theirs.random_raw(4).tolist()

    def test_adam_goes_on_bit_by_bit(self, tmp_path: Path) -> None:
        def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(0)
            module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
            return module, torch.optim.AdamW(module.parameters(), lr=0.1, amsgrad=True)

        def learn(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
            for step in range(steps):
                batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
                optimizer.zero_grad()
                module(batch).square().sum().backward()
                optimizer.step()

        module, optimizer = make()
        learn(module, optimizer, 3)
        states = {"agent": module.state_dict(), "optimizer": optimizer.state_dict()}
        directory = save_step(tmp_path, 3, **states)
        loaded = checkpoint.load(directory, states)
        assert_same(loaded["optimizer"], optimizer.state_dict())
        resumed, resumed_optimizer = make()
        resumed.load_state_dict(loaded["agent"])
        resumed_optimizer.load_state_dict(loaded["optimizer"])
        learn(module, optimizer, 2)
        learn(resumed, resumed_optimizer, 2)
        assert_same(dict(resumed.state_dict()), dict(module.state_dict()))
        assert_same(resumed_optimizer.state_dict(), optimizer.state_dict())

    def test_parameters_bear_their_own_names_in_the_file(self, tmp_path: Path) -> None:
        module = torch.nn.Linear(2, 3).to(torch.bfloat16)
        directory = save_step(tmp_path, 1, agent=OrderedDict(module.state_dict()))
        tensors = safetensors.torch.load_file(directory / "agent.safetensors")
        assert set(tensors) == {"weight", "bias"}
        assert_same(tensors["weight"], module.weight.data)

    def test_loaded_arrays_are_aligned(self, tmp_path: Path) -> None:
        dtypes = (torch.bool, torch.float64, torch.bfloat16, torch.float32)
        loaded = round_trip(tmp_path, [torch.zeros(3, dtype=dtype) for dtype in dtypes])
        assert [tensor.data_ptr() % tensor.itemsize for tensor in loaded] == [0] * len(dtypes)

    def test_what_was_loaded_may_be_changed(self, tmp_path: Path) -> None:
        directory = save_step(tmp_path, 1, s=[torch.zeros(3), np.zeros(3), np.zeros(3, ">f4")])
        for array in checkpoint.load(directory, ["s"])["s"]:
            array[0] = 5
        assert_same(checkpoint.load(directory, ["s"])["s"][0], torch.zeros(3))

    @pytest.mark.parametrize(
        ("value", "what"),
        [
            (object(), "a object"),
            ({1, 2}, "a set"),
            (np.array([object()]), "dtype object"),
            (np.zeros(2, [("a", "f4")]), "dtype"),
            (torch.zeros(2).to_sparse(), "sparse"),
            (logging.INFO.__class__, "a type"),
            (signal.SIGINT, "a Signals"),
        ],
    )
    def test_refuses_what_it_can_not_give_back(self, tmp_path: Path, value: Any, what: str) -> None:
        with pytest.raises(TypeError, match=rf"agent/layers/0: a checkpoint can't hold .*{what}"):
            checkpoint.save(tmp_path, 1, {"agent": {"layers": [value]}})
        with pytest.raises(CheckpointError):
            checkpoint.find(tmp_path)


class TestSave:
    def test_layout_and_manifest(self, tmp_path: Path) -> None:
        directory = save_step(tmp_path, 12_000)
        assert directory == tmp_path / "checkpoints" / "step_000000012000"
        folder = {path.name for path in directory.parent.iterdir()}
        assert folder == {"latest", directory.name}
        assert (directory.parent / "latest").read_text() == "step_000000012000\n"
        content = json.loads((directory / "manifest.json").read_text())
        assert content["env_steps"] == 12_000
        assert content["info"] == {"env": "CartPole"}
        assert content["versions"]["torch"] == torch.__version__
        assert content["versions"]["numpy"] == np.__version__
        assert {"python", "gymnasium", "actorlearner"} <= set(content["versions"])
        assert set(content["files"]) == {"agent.safetensors", "agent.json", "config.yaml"}
        for name, record in content["files"].items():
            body = (directory / name).read_bytes()
            assert record == {"size_bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
        assert (directory / "config.yaml").read_text() == "workers: 2\n"
        manifest = checkpoint.read_manifest(directory)
        assert (manifest.env_steps, manifest.info) == (12_000, {"env": "CartPole"})

    @pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs coreutils")
    def test_the_manifest_can_be_checked_by_hand(self, tmp_path: Path) -> None:
        directory = save_step(tmp_path, 1)
        command = ["sha256sum", "-c", "manifest.sha256"]
        assert (
            subprocess.run(command, cwd=directory, capture_output=True, check=False).returncode == 0
        )

    def test_keeps_the_last(self, tmp_path: Path) -> None:
        for env_steps in (9_000, 9_999, 10_000, 11_000):
            save_step(tmp_path, env_steps, keep_last=2)
        names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
        assert names == ["step_000000010000", "step_000000011000"]

    def test_a_save_after_going_back_is_the_newest(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save_step(tmp_path, 5_000, keep_last=2)
        save_step(tmp_path, 9_000, keep_last=2)
        newest = save_step(tmp_path, 6_000, keep_last=2)
        assert checkpoint.find(tmp_path) == newest
        assert "set aside" in caplog.text
        aside = tmp_path / "checkpoints" / "step_000000009000.abandoned"
        assert checkpoint.load(checkpoint.find(aside), ["agent"])["agent"]["at"] == 9_000

    def test_the_same_step_again_replaces(self, tmp_path: Path) -> None:
        save_step(tmp_path, 7, agent={"try": 1})
        directory = save_step(tmp_path, 7, agent={"try": 2})
        assert checkpoint.load(checkpoint.find(tmp_path), ["agent"])["agent"] == {"try": 2}
        assert {p.name for p in directory.parent.iterdir()} == {"latest", directory.name}

    @pytest.mark.parametrize("nth_rename", [0, 1])
    def test_the_same_step_again_killed_between_the_renames(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth_rename: int
    ) -> None:
        save_step(tmp_path, 7, agent={"try": 1})
        rename = Path.rename
        calls: list[Path] = []

        def dying_rename(self: Path, target: Path) -> Path:
            if len(calls) == nth_rename:
                raise KeyboardInterrupt
            calls.append(target)
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", dying_rename)
        with pytest.raises(KeyboardInterrupt):
            save_step(tmp_path, 7, agent={"try": 2})
        monkeypatch.undo()
        survivor = checkpoint.find(tmp_path)
        assert checkpoint.load(survivor, ["agent"])["agent"] == {"try": 1}
        directory = save_step(tmp_path, 8, agent={"try": 3})
        names = {path.name for path in directory.parent.iterdir()}
        assert names == {"latest", "step_000000000007", "step_000000000008"}

    def test_clears_what_a_killed_save_left(self, tmp_path: Path) -> None:
        folder = tmp_path / "checkpoints"
        (folder / "saving.tmp").mkdir(parents=True)
        (folder / "saving.tmp" / "agent.safetensors").write_bytes(b"half")
        (folder / "latest.tmp").write_text("half")
        directory = save_step(tmp_path, 1)
        assert {path.name for path in folder.iterdir()} == {"latest", directory.name}

    def test_a_full_disk_leaves_the_one_before(self, tmp_path: Path) -> None:
        before = save_step(tmp_path, 1)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(OSError, match=r"4,000,\d+ bytes needed, [\d,]+ free") as caught:
                save_step(tmp_path, 2, agent=np.zeros(1_000_000, np.float32))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "step_000000000002" in str(caught.value)
        assert checkpoint.find(tmp_path) == before
        assert not (tmp_path / "checkpoints" / "saving.tmp").exists()

    @pytest.mark.parametrize("name", ["../agent", "a/b", "", "manifest", ".hidden", "a\nb"])
    def test_refuses_names_that_are_no_files_of_its_own(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ValueError, match="can't be the name"):
            checkpoint.save(tmp_path, 1, {name: {}})
        with pytest.raises(ValueError, match="can't be the name"):
            checkpoint.save(tmp_path, 1, {"agent": {}}, texts={"agent.json": "", name: ""})

    def test_refuses_numbers_out_of_bounds(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="keep_last=0"):
            checkpoint.save(tmp_path, 1, {}, keep_last=0)
        with pytest.raises(ValueError, match="env_steps=-1"):
            checkpoint.save(tmp_path, -1, {})


SAVER = """
import hashlib, shutil, sys
from itertools import count
from pathlib import Path
import torch
from actorlearner import checkpoint
from actorlearner.statetree import StoredFile
torch.set_num_threads(1)
run_dir, first = Path(sys.argv[1]), int(sys.argv[2])
shutil.rmtree(run_dir / "replay", ignore_errors=True)
(run_dir / "replay").mkdir(parents=True)
pages = []
print("ready", flush=True)
for i in count(first):
    # Every step is saved twice, so that kills hit replacements too.
    states = {name: {"step": i // 2, "w": torch.full((30_000,), i // 2)} for name in ("a", "b")}
    path, content = run_dir / "replay" / f"{i}.page", b"%d" % i * 10_000
    path.write_bytes(content)
    pages.append(StoredFile(path, len(content), hashlib.sha256(content).hexdigest()))
    if len(pages) > 3:
        pages.pop(0).path.unlink()
    states["b"]["pages"] = {i - len(pages) + 1 + n: page for n, page in enumerate(pages)}
    checkpoint.save(run_dir, i // 2, states, keep_last=2)
    print(i // 2, flush=True)
"""


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_kill_in_the_middle_of_saves_never_leaves_a_broken_checkpoint(
    kills: int, tmp_path: Path
) -> None:
    draw, first, hit_a_save = random.Random(1), 0, 0
    for _ in range(kills):
        command = [sys.executable, "-c", SAVER, str(tmp_path), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            if first == 0:
                assert process.stdout.readline() == "0\n"
            time.sleep(draw.uniform(0, 0.08))
            process.kill()
            finished = [int(line) for line in process.stdout.read().split("\n")[:-1]]
        directory = checkpoint.find(tmp_path)
        step = checkpoint.read_manifest(directory).env_steps
        assert step >= max(finished, default=first // 2 - 1)
        states = checkpoint.load(directory, ["a", "b"])
        for state in states.values():
            assert state["step"] == step
            assert bool((state["w"] == step).all())
        assert max(states["b"]["pages"]) // 2 == step
        for number, page in states["b"]["pages"].items():
            assert page.path.parent == directory
            assert page.path.read_bytes() == b"%d" % number * 10_000
        leftovers = {path.name for path in directory.parent.iterdir()}
        hit_a_save += any(
            not name.startswith("step_") or "." in name for name in leftovers - {"latest"}
        )
        first = 2 * (step + 1)
    # A few may all miss; where they don't, it is the same test.
    assert hit_a_save or kills < 10, "no kill came in the middle of a save: nothing is proved"


FILES = ["manifest.json", "manifest.sha256", "agent.json", "agent.safetensors", "config.yaml"]


class TestFind:
    def test_every_way_to_name_a_checkpoint(self, tmp_path: Path) -> None:
        save_step(tmp_path, 1)
        directory = save_step(tmp_path, 2)
        files = list(directory.iterdir())
        assert {path.name for path in files} == set(FILES)
        for path in (tmp_path, directory, directory.parent, directory.parent / "latest", *files):
            assert checkpoint.find(path) == directory

    def test_relative_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        directory = save_step(tmp_path, 2)
        monkeypatch.chdir(tmp_path)
        assert checkpoint.find(".") == directory

    def test_number_order_and_not_text_order(self, tmp_path: Path) -> None:
        for env_steps in (9_999, 10_000):
            directory = save_step(tmp_path, env_steps)
            directory.rename(directory.with_name(f"step_{env_steps}"))
        assert checkpoint.find(tmp_path).name == "step_10000"

    def test_number_order_and_not_time_order(self, tmp_path: Path) -> None:
        newest = save_step(tmp_path / "other", 10_000)
        save_step(tmp_path, 9_999)
        shutil.move(newest, tmp_path / "checkpoints" / newest.name)
        (tmp_path / "checkpoints" / "latest").unlink()
        assert checkpoint.find(tmp_path).name == newest.name

    def test_junk_is_ignored(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        directory = save_step(tmp_path, 5)
        folder = directory.parent
        (folder / "step_abc.pt").write_bytes(b"junk")
        (folder / "step_99999").write_bytes(b"a file")
        (folder / "step_99999 (copy)").mkdir()
        (folder / "xstep_99999").mkdir()
        (folder / "saving.tmp").mkdir()
        (folder / "latest").write_bytes(b"\xff\x00 nonsense")
        assert checkpoint.find(tmp_path) == directory
        assert not caplog.records

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("harm", ["flip", "truncate", "extend", "empty", "delete"])
    def test_a_damaged_file_never_loads_and_the_one_before_is_used(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, harm: str
    ) -> None:
        before, newest = save_step(tmp_path, 1), save_step(tmp_path, 2)
        path = newest / name
        content = path.read_bytes()
        for position in range(0, len(content), max(1, len(content) // 6)):
            flipped = bytes([content[position] ^ 4])
            harmed = {
                "flip": content[:position] + flipped + content[position + 1 :],
                "truncate": content[:position],
                "extend": content + b"\n",
                "empty": b"",
            }
            path.unlink(missing_ok=True)
            if harm != "delete":
                path.write_bytes(harmed[harm])
            caplog.clear()
            assert checkpoint.find(tmp_path) == before
            assert SKIPPED in caplog.text
            assert str(newest) in caplog.text
            with pytest.raises(CheckpointError, match=f"{newest}: (damaged|incomplete)"):
                checkpoint.find(newest)
            if name != "config.yaml":
                with pytest.raises(CheckpointError, match=str(newest)):
                    checkpoint.load(newest, ["agent"])
        path.write_bytes(content)
        assert checkpoint.find(tmp_path) == newest

    def test_all_damaged(self, tmp_path: Path) -> None:
        for env_steps in (1, 2):
            (save_step(tmp_path, env_steps) / "agent.json").unlink()
        with pytest.raises(
            CheckpointError, match=f"{tmp_path}: all of its checkpoints are damaged"
        ):
            checkpoint.find(tmp_path)

    def test_reasons(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "model.pt").write_bytes(b"")
        (tmp_path / "step_000000000001").mkdir()
        monkeypatch.chdir(tmp_path)
        for path, reason in {
            "missing": "there is no such file or directory",
            "empty": "an empty directory",
            "other": "neither a checkpoint nor a run",
            "other/model.pt": "not a file of a checkpoint",
            "step_000000000001": "incomplete",
        }.items():
            with pytest.raises(CheckpointError, match=f"^{tmp_path / path}: {reason}"):
                checkpoint.find(path)

    def test_a_newer_format_is_refused_and_not_skipped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save_step(tmp_path, 1)
        monkeypatch.setattr(checkpoint, "FORMAT", 3)
        newest = save_step(tmp_path, 2)
        monkeypatch.undo()
        for path in (newest, tmp_path):
            with pytest.raises(CheckpointError, match=f"{newest}: written in format 3"):
                checkpoint.find(path)

    @pytest.mark.parametrize("name", ["../../secret.json", "/etc/hostname", "link.json"])
    def test_a_path_out_of_the_directory_is_refused(self, tmp_path: Path, name: str) -> None:
        directory = save_step(tmp_path, 1)
        outside = tmp_path / "secret.json"
        outside.write_text("{}")
        (directory / "link.json").symlink_to(outside)
        content = json.loads((directory / "manifest.json").read_text())
        digest = hashlib.sha256((directory / name).read_bytes()).hexdigest()
        size = len((directory / name).read_bytes())
        content["files"][name] = {"size_bytes": size, "sha256": digest}
        text = json.dumps(content)
        (directory / "manifest.json").write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        (directory / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
        with pytest.raises(CheckpointError, match="leads out of it"):
            checkpoint.find(directory)

    def test_load_says_what_there_is(self, tmp_path: Path) -> None:
        directory = save_step(tmp_path, 1)
        with pytest.raises(CheckpointError, match=r"holds no 'replay', only agent"):
            checkpoint.load(directory, ["agent", "replay"])


def reseal(directory: Path) -> None:
    """Make a manifest that every file fits, as whoever plants one can."""
    content = json.loads((directory / "manifest.json").read_text())
    for name in content["files"]:
        body = (directory / name).read_bytes()
        digest = hashlib.sha256(body).hexdigest()
        content["files"][name] = {"size_bytes": len(body), "sha256": digest}
    text = json.dumps(content)
    (directory / "manifest.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (directory / "manifest.sha256").write_text(f"{digest}  manifest.json\n")


def header(**entry: Any) -> bytes:
    text = json.dumps({"weight": entry}).encode()
    return struct.pack("<Q", len(text)) + text


class Planted:
    """Does harm where it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("planted"),)


PLANTED = {
    "a pickle": ("agent.safetensors", pickle.dumps(Planted())),
    "a pickle as text": ("agent.json", pickle.dumps(Planted(), protocol=0)),
    "a giant array": (
        "agent.safetensors",
        header(dtype="F32", shape=[1 << 40], data_offsets=[0, 1 << 42]),
    ),
    "a giant array in no bytes": (
        "agent.safetensors",
        header(dtype="F32", shape=[1 << 62, 4], data_offsets=[0, 0]),
    ),
    "a giant header": ("agent.safetensors", struct.pack("<Q", 1 << 62)),
    "a header of another type": ("agent.safetensors", header(dtype="PICKLE", shape=[], x=[0, 0])),
    "a deep tree": ("agent.json", b"[" * 100_000 + b"]" * 100_000),
    "objects": ("agent.json", b'{"$array": ["weight", "O"]}'),
    "an unknown kind": ("agent.json", b'{"$eval": "weight"}'),
    "a file that is not listed": ("agent.json", b'{"$file": "../../../../etc/passwd"}'),
    "half a page": ("agent.json", b'{"$file": 3}'),
}


class TestSecurity:
    @pytest.mark.parametrize("name", PLANTED)
    def test_what_was_planted_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """Though every checksum is right."""
        monkeypatch.chdir(tmp_path)
        directory = save_step(tmp_path, 1)
        file, content = PLANTED[name]
        (directory / file).write_bytes(content)
        reseal(directory)
        with pytest.raises(CheckpointError, match=f"{directory}: damaged: agent can't be read"):
            checkpoint.load(directory, ["agent"])
        assert not (tmp_path / "planted").exists()

    def test_files_beside_a_checkpoint_are_not_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        directory = save_step(tmp_path, 1)
        for name in ("agent.pt", "agent.pkl", "replay.safetensors", "optimizers.json"):
            (directory / name).write_bytes(pickle.dumps(Planted()))
        assert set(checkpoint.load(checkpoint.find(directory), ["agent"])) == {"agent"}
        assert not (tmp_path / "planted").exists()

    def test_links_within_the_directory_are_refused_too(self, tmp_path: Path) -> None:
        directory = save_step(tmp_path, 1)
        (directory / "agent.json").rename(directory / "other.json")
        (directory / "agent.json").symlink_to(directory / "other.json")
        with pytest.raises(CheckpointError, match=r"'agent\.json' leads out of it"):
            checkpoint.find(directory)

    @pytest.mark.parametrize("name", ["latest", "best"])
    def test_a_pointer_out_of_the_directory_is_refused(self, tmp_path: Path, name: str) -> None:
        elsewhere = save_step(tmp_path / "other", 1)
        pointer = save_step(tmp_path / "run", 1).parent / name
        for text in (f"../../other/checkpoints/{elsewhere.name}", str(elsewhere), "..", "a\0b"):
            pointer.write_text(text)
            with pytest.raises(CheckpointError, match=f"{pointer}: not a file of a checkpoint"):
                checkpoint.find(pointer)


class TestMutations:
    """Of two checkpoints of a replay on disk, which share some files."""

    @pytest.fixture
    def both(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
        monkeypatch.setattr(rows, "PAGE_BYTES", 100)
        buffer = make_store("disk", tmp_path)
        worker = ScriptedWorker([0, 1], 4)
        found = []
        for env_steps in (1, 2):
            for _ in range(4):
                buffer.add(worker.unroll())
            agent = {"weight": torch.full((3,), env_steps)}
            states = {"agent": agent, "replay": buffer.state_dict()}
            found.append(save_step(tmp_path, env_steps, **states))
        return found[0], found[1]

    def test_every_file_with_every_harm(
        self, tmp_path: Path, both: tuple[Path, Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        """The page that is harmed is a copy: else the harm would be the other's too."""
        before, newest = both
        files = sorted(newest.iterdir())
        assert {path.stat().st_nlink for path in files if path.suffix == ".page"} == {1, 2}
        assert sum(path.suffix == ".page" for path in files) >= 4
        contents = {path: path.read_bytes() for path in files}
        assert len(set(contents.values())) == len(files)
        for path, content in contents.items():
            others = [other for other in contents.values() if other != content]
            older = before / path.name
            middle = len(content) // 2
            harms: list[bytes | None] = [
                None,
                b"",
                content[:-1],
                content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
                content + b"\0",
                bytes(len(content)),
                *others,
            ]
            if older.exists() and older.read_bytes() != content:
                harms.append(older.read_bytes())
            for harm in harms:
                path.unlink()
                if harm is not None:
                    path.write_bytes(harm)
                caplog.clear()
                with pytest.raises(CheckpointError, match=f"{newest}: (damaged|incomplete)"):
                    checkpoint.find(newest)
                assert checkpoint.find(tmp_path) == before
                assert SKIPPED in caplog.text
                state = path.name.partition(".")[0]
                if state in ("agent", "replay"):
                    with pytest.raises(CheckpointError, match=str(newest)):
                        checkpoint.load(newest, [state])
                path.unlink(missing_ok=True)
                path.write_bytes(content)
            assert checkpoint.find(tmp_path) == newest

    def test_every_pair_swapped(self, both: tuple[Path, Path]) -> None:
        _, newest = both

        def swap(one: Path, other: Path) -> None:
            aside = newest.with_name("aside")
            one.rename(aside)
            other.rename(one)
            aside.rename(other)

        for pair in itertools.combinations(sorted(newest.iterdir()), 2):
            swap(*pair)
            with pytest.raises(CheckpointError, match=f"{newest}: damaged"):
                checkpoint.find(newest)
            swap(*pair)
        checkpoint.verify(newest)

    def test_a_file_that_both_share_is_damaged_for_both(
        self, tmp_path: Path, both: tuple[Path, Path]
    ) -> None:
        before, newest = both
        shared = {path.stat().st_ino for path in before.iterdir()}
        path = next(path for path in newest.iterdir() if path.stat().st_ino in shared)
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(CheckpointError, match=r"all of its checkpoints are damaged \(2\)"):
            checkpoint.find(tmp_path)
        assert checkpoint.find(tmp_path, ["agent"]) == newest, "weights can still be had"

    def test_only_what_is_to_be_read_is_verified(self, both: tuple[Path, Path]) -> None:
        _, newest = both
        for path in newest.glob("replay.*"):
            path.unlink()
        assert checkpoint.find(newest.parent.parent, ["agent"]) == newest
        assert checkpoint.load(newest, ["agent"])["agent"]["weight"].tolist() == [2, 2, 2]
        with pytest.raises(CheckpointError, match="incomplete"):
            checkpoint.find(newest, ["agent", "replay"])
        (newest / "agent.json").write_bytes(b"{}")
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.find(newest, ["agent"])


class TestBest:
    def best(self, run_dir: Path, env_steps: int, score: float, keep_best: int = 1) -> Path | None:
        return checkpoint.save_best(
            run_dir, env_steps, score, {"agent": {"at": env_steps}}, keep_best=keep_best
        )

    def at(self, run_dir: Path) -> list[int]:
        """Env steps of those that are kept; the one that ``best`` names first."""
        folder = run_dir / "checkpoints"
        where = checkpoint.find(folder / "best")
        kept = sorted(int(path.name[5:]) for path in folder.glob("best_*"))
        first = checkpoint.load(where, ["agent"])["agent"]["at"]
        return [first, *(step for step in kept if step != first)]

    def test_the_highest_scores_stay(self, tmp_path: Path) -> None:
        told = []
        for env_steps, score in enumerate([1.0, 3.0, 2.0, 2.0, math.nan, -math.inf, 3.0, 5.0]):
            self.best(tmp_path, env_steps, score, keep_best=2)
            told.append(self.at(tmp_path))
        # Of equals the earlier one stays.
        assert told == [[0], [1, 0], [1, 2], [1, 2], [1, 2], [1, 2], [1, 6], [7, 1]]

    def test_none_if_others_are_better(self, tmp_path: Path) -> None:
        assert self.best(tmp_path, 10, 1.0) is not None
        assert self.best(tmp_path, 20, 1.0) is None
        assert self.best(tmp_path, 20, 1.5) == tmp_path / "checkpoints" / "best_000000000020"
        assert self.at(tmp_path) == [20]

    def test_training_never_goes_on_from_it_unasked(self, tmp_path: Path) -> None:
        step = save_step(tmp_path, 5)
        self.best(tmp_path, 10, 1.0)
        assert checkpoint.find(tmp_path) == checkpoint.newest_run(tmp_path) == step
        save_step(tmp_path, 6, keep_last=1)
        assert self.at(tmp_path) == [10], "it is not rotated"
        assert checkpoint.find(step.parent / "latest").name == "step_000000000006"

    def test_a_damaged_one_goes_first(self, tmp_path: Path) -> None:
        for env_steps in (1, 2):
            self.best(tmp_path, env_steps, 5.0 + env_steps, keep_best=2)
        (tmp_path / "checkpoints" / "best_000000000002" / "manifest.json").write_bytes(b"")
        self.best(tmp_path, 3, 0.0, keep_best=2)
        assert self.at(tmp_path) == [1, 3]

    def test_a_new_run_forgets_them(self, tmp_path: Path) -> None:
        checkpoint.forget_best(tmp_path)
        self.best(tmp_path, 1, 5.0)
        checkpoint.forget_best(tmp_path)
        assert not list((tmp_path / "checkpoints").iterdir())


class TestNewestRun:
    def test_the_last_written_wins_over_the_longest(self, tmp_path: Path) -> None:
        save_step(tmp_path / "dqn" / "monday", 9_000)
        newest = save_step(tmp_path / "dqn" / "tuesday", 100)
        assert checkpoint.newest_run(tmp_path) == newest
        assert checkpoint.newest_run(tmp_path / "dqn") == newest
        assert checkpoint.newest_run(tmp_path / "dqn" / "tuesday") == newest
        assert newest.parent.parent == tmp_path / "dqn" / "tuesday"

    def test_damaged_ones_are_skipped(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        older = save_step(tmp_path / "monday", 9_000)
        for env_steps, name in ((100, "agent.safetensors"), (200, "manifest.json")):
            (save_step(tmp_path / "tuesday", env_steps) / name).write_bytes(b"")
        assert checkpoint.newest_run(tmp_path) == older
        assert caplog.text.count(SKIPPED) == 2

    def test_none(self, tmp_path: Path) -> None:
        assert checkpoint.newest_run(tmp_path) is None
        assert checkpoint.newest_run(tmp_path / "missing") is None


class TestRefuseUsed:
    def test_a_run_of_ones_own_however_it_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = save_step(tmp_path / "mine", 1)
        kept = tmp_path / "mine" / "kept" / directory.name
        shutil.copytree(directory, kept)
        monkeypatch.chdir(tmp_path)
        ways = [
            tmp_path / "mine", "mine", directory.parent, directory, directory / "agent.json", kept
        ]  # fmt: skip
        for way in ways:
            for run_dir in (tmp_path / "mine", "mine"):
                checkpoint.refuse_used(run_dir, way)

    def test_the_run_of_another(self, tmp_path: Path) -> None:
        for name in ("theirs", "mine"):
            directory = save_step(tmp_path / name, 1)
        for way in (None, tmp_path / "mine", directory, directory / "agent.json"):
            with pytest.raises(CheckpointError, match=r"theirs: holds the checkpoints of another"):
                checkpoint.refuse_used(tmp_path / "theirs", way)

    def test_what_holds_no_checkpoint(self, tmp_path: Path) -> None:
        """Perhaps since the first save was killed."""
        save_step(tmp_path / "mine", 1)
        (tmp_path / "empty" / "checkpoints" / "saving.tmp").mkdir(parents=True)
        for name in ("missing", "empty"):
            for way in (None, tmp_path / "mine"):
                checkpoint.refuse_used(tmp_path / name, way)
