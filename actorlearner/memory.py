"""What there is to be had of memory, disk and cores: the machine's, or what a container leaves.

And how a process that allocates the same again and again keeps its memory.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from actorlearner.cores import usable_cores

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # `mallopt` of malloc.h, the GNU C library's
_LARGEST_KEPT = 2**25  # more than that was refused before version 2.35
_MOST_KEPT = 2**30


def free_memory() -> int:
    """Bytes that this process can still take before Linux kills something.

    What the machine has available, or less if a control group, in which Docker, Slurm and systemd
    put processes, allows less. Page cache that a group could give back counts as free.
    """
    free = psutil.virtual_memory().available
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:  # no Linux
        return free
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            free = min(free, _left(_CGROUPS, path, "memory.max", "memory.current"))
        elif controllers == "memory":
            names = "memory.limit_in_bytes", "memory.usage_in_bytes"
            free = min(free, _left(_CGROUPS / "memory", path, *names))
    return max(0, free)


def keep_freed_memory() -> None:
    """From now on keep what this process frees, up to a gigabyte, for what it allocates next.

    Otherwise the C library gives large blocks back to Linux, and an update, which frees what it
    allocated, has thousands of pages mapped and zeroed anew: a third of its time where it is bad.
    When that happens depends on what was freed before, so that one run may be as much slower than
    the next. Blocks of more than 32 MB are still given back. Does nothing where there is no such
    setting (macOS, musl).
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        library.mallopt(_TRIM_THRESHOLD, _MOST_KEPT)


def core_count() -> int:
    """Cores that this process may use at once: at least 1.

    Those that it is bound to, or fewer if a control group allows less processor time.
    """
    cores = float(len(usable_cores()))
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:  # no Linux
        return int(cores)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            cores = min(cores, _allowed_cores(_CGROUPS, path))
    return max(1, int(cores))


def _allowed_cores(root: Path, path: str) -> float:
    """The least that the group ``path`` and those above it are given; as `_left`."""
    own = root / path.lstrip("/")
    allowed = math.inf
    for group in (own, *own.parents):
        if group.is_relative_to(root):
            with suppress(OSError, ValueError):  # "max", and the root of all groups has no file
                quota_us, period_us = (group / "cpu.max").read_text().split()
                allowed = min(allowed, int(quota_us) / int(period_us))
    return allowed


def free_disk(directory: Path) -> int:
    """Bytes that can still be written below ``directory``, which need not exist."""
    exists = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(exists).free


def _left(root: Path, path: str, limit_name: str, usage_name: str) -> int:
    """The least that the group ``path`` and those above it leave.

    A container may see its own group as the root, while its processes' path is the host's.
    """
    own = root / path.lstrip("/")
    left = 2**63
    for group in (own, *own.parents):
        if group.is_relative_to(root):
            try:
                limit = (group / limit_name).read_text().strip()
                usage = int((group / usage_name).read_text())
                statistics = dict(
                    line.split() for line in (group / "memory.stat").read_text().splitlines()
                )
            except (OSError, ValueError):  # the root of all groups has none of these
                continue
            if limit != "max":
                own_cache = statistics.get("inactive_file", 0)
                cache = int(statistics.get("total_inactive_file", own_cache))
                left = min(left, int(limit) - usage + cache)
    return left
