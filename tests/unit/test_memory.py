"""Free memory, by the machine and by control groups."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from actorlearner import memory
from actorlearner.memory import core_count, free_memory

MIB = 2**20
VERSION_2 = "memory.max", "memory.current", "inactive_file"
VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 1,000 MiB available whose groups lie in the path returned."""
    available = psutil.virtual_memory()._replace(available=1_000 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_CGROUPS", tmp_path / "own")
    return tmp_path


def group(
    path: Path, names: tuple[str, str, str], limit: int | str, usage: int, cache: int = 0
) -> None:
    """A group with these bytes."""
    path.mkdir(parents=True, exist_ok=True)
    (path / names[0]).write_text(f"{limit}\n")
    (path / names[1]).write_text(f"{usage}\n")
    inactive = (
        f"inactive_file {cache}\n"
        if names == VERSION_2
        else f"inactive_file 7\n{names[2]} {cache}\n"
    )
    (path / "memory.stat").write_text(f"anon 5\n{inactive}")


def test_without_groups_it_is_the_machines(groups: Path) -> None:
    assert free_memory() == 1_000 * MIB


@pytest.mark.parametrize("names", [VERSION_1, VERSION_2], ids=["v1", "v2"])
class TestGroups:
    def enter(self, groups: Path, names: tuple[str, str, str], path: str) -> Path:
        """Put this process into ``path``; the root of its hierarchy."""
        is_first = names == VERSION_1
        line = f"4:memory:{path}\n0::/\n" if is_first else f"1:cpu:/x\n0::{path}\n"
        (groups / "own").write_text(line)
        return groups / "memory" if is_first else groups

    def test_what_a_group_leaves(self, groups: Path, names: tuple[str, str, str]) -> None:
        root = self.enter(groups, names, "/job")
        group(root / "job", names, 300 * MIB, 120 * MIB, cache=20 * MIB)
        assert free_memory() == 200 * MIB

    def test_a_group_above_may_be_tighter(self, groups: Path, names: tuple[str, str, str]) -> None:
        root = self.enter(groups, names, "/job/step")
        group(root / "job" / "step", names, 300 * MIB, 0)
        group(root / "job", names, 50 * MIB, 40 * MIB)
        assert free_memory() == 10 * MIB

    def test_a_container_sees_its_group_as_the_root(
        self, groups: Path, names: tuple[str, str, str]
    ) -> None:
        root = self.enter(groups, names, "/docker/abc")
        group(root, names, 64 * MIB, 0)
        assert free_memory() == 64 * MIB

    def test_a_loose_limit_changes_nothing(self, groups: Path, names: tuple[str, str, str]) -> None:
        root = self.enter(groups, names, "/")
        group(root, names, 2**63 - 4096 if names == VERSION_1 else "max", 0)
        assert free_memory() == 1_000 * MIB

    def test_a_group_over_its_limit_leaves_nothing(
        self, groups: Path, names: tuple[str, str, str]
    ) -> None:
        root = self.enter(groups, names, "/")
        group(root, names, MIB, 2 * MIB)
        assert free_memory() == 0


@pytest.mark.parametrize(
    ("parent", "own", "wanted"),
    [
        (None, None, 6),
        ("max 100000", "250000 100000", 2),
        ("150000 50000", "max 100000", 3),
        ("150000 50000", "250000 100000", 2),
        (None, "20000 100000", 1),
        (None, "900000 100000", 6),
    ],
)
def test_cores_that_may_be_used(
    groups: Path, monkeypatch: pytest.MonkeyPatch, parent: str | None, own: str | None, wanted: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    (groups / "own").write_text("1:memory:/x\n0::/job/task\n")
    (groups / "job" / "task").mkdir(parents=True)
    for path, text in ((groups / "job", parent), (groups / "job" / "task", own)):
        if text is not None:
            (path / "cpu.max").write_text(f"{text}\n")
    assert core_count() == wanted
