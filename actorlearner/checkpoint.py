"""Named states to one directory and back: checksummed, atomic, rotated. Nothing is pickled.

A run keeps its checkpoints like this::

    <run_dir>/checkpoints/
        latest                      name of the newest, for people and scripts
        best                        name of the one that was evaluated best, weights only
        step_000000010000/
            manifest.json           what this is, and size and SHA-256 of each file below
            manifest.sha256         guards the manifest; `sha256sum -c` reads it
            agent.safetensors       the arrays of the state named "agent"
            agent.json              the rest of it, with references to the arrays
            replay.NAME.page        a file that the state named "replay" brought: a hard link, which
                                    other checkpoints may share
            config.yaml             texts of the caller
        best_000000008000/          likewise

A checkpoint is written beside its place, synced to disk and renamed, so whatever bears the name of
a step is complete, unless the disk lost it; a checksum tells.

A *state* is a tree of dicts, lists and tuples. Its leaves are None, bools, ints, floats, strings,
NumPy arrays and scalars, torch tensors, and what `statetree` has for large ones; each comes back as
the kind and dtype it was, tensors on the CPU. Dict keys may be any of these but arrays, tensors and
files; all dicts come back as plain ones.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import platform
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import safetensors
import safetensors.torch

from actorlearner.contracts import CheckpointError
from actorlearner.statetree import Packed, StoredFile, decode

FORMAT = 2
"""Version of the layout above; a higher one is refused."""

Pace: TypeAlias = Callable[[], object]

_SYNC_BYTES = 32 << 20
"""Not all at the end: while a file system syncs, whoever logs a line may have to wait."""

_FOLDER = "checkpoints"
_LATEST = "latest"
_BEST = "best"
_MANIFEST = "manifest.json"
_MANIFEST_SUM = "manifest.sha256"
_SAVING = "saving.tmp"
_REPLACED = ".replaced"
_ABANDONED = ".abandoned"
_STEP = re.compile(r"step_(\d+)")
_BEST_STEP = re.compile(r"best_(\d+)")
_LIBRARIES = ("actorlearner", "torch", "numpy", "gymnasium")

_UNREADABLE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    safetensors.SafetensorError,
)
"""What reading a file can raise that is not what it should be, though its checksum is right."""

_log = logging.getLogger(__name__)


class _DamagedError(CheckpointError):
    """A checkpoint that an older one can stand in for."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file must be.

    Attributes:
        size_bytes: its length.
        sha256: of its content, in hexadecimal.
    """

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        format: version of the layout.
        env_steps: where the training stood.
        written_at: UTC in ISO 8601, so that text order is time order.
        versions: of Python and the libraries.
        info: the caller's own facts.
        files: each file but the manifest, by name.
    """

    format: int
    env_steps: int
    written_at: str
    versions: dict[str, str]
    info: dict[str, Any]
    files: dict[str, FileRecord]

    @property
    def states(self) -> set[str]:
        """Names of the states that it holds."""
        ending = ".safetensors"
        return {name.removesuffix(ending) for name in self.files if name.endswith(ending)}

    def files_of(self, states: Collection[str]) -> list[str]:
        """Those files that ``states`` consist of, and those that belong to no state."""
        others = tuple(f"{name}." for name in self.states.difference(states))
        return [name for name in self.files if not name.startswith(others)]


# ------------------------------------------------------------------------------------- saving


def save(
    run_dir: str | Path,
    env_steps: int,
    states: Mapping[str, Any],
    info: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
    *,
    keep_last: int = 3,
    pace: Pace | None = None,
) -> Path:
    """Write a checkpoint and return its directory.

    At every moment of a save, also a killed one, `find` answers with a complete checkpoint. Older
    ones than the last ``keep_last`` are deleted. Later ones, left by a run that went back to
    an earlier step, are set aside as ``step_*.abandoned``, where only their own path finds them.

    Args:
        run_dir: made if missing. It must have no other writer.
        env_steps: where the training stands.
        states: state trees by name, packed or not.
        info: facts for the manifest, as `json.dumps` takes them, all numbers finite.
        texts: further files by name.
        keep_last: how many checkpoints stay.
        pace: called between parts of the work, to rest.

    Raises:
        ValueError: a name can't be a file of its own, or a number is out of its bounds.
        TypeError: a state holds something that can't be stored; the message says where.
        OSError: it can't be written; the message says how much space was needed.
    """
    if env_steps < 0 or keep_last < 1:
        raise ValueError(f"{env_steps=}, {keep_last=}: must be at least 0 and 1")
    folder = Path(run_dir).absolute() / _FOLDER
    final = folder / f"step_{env_steps:012d}"
    _write_directory(final, _LATEST, env_steps, states, info or {}, texts or {}, pace=pace)
    _rotate(folder, env_steps, keep_last)
    return final


def save_best(
    run_dir: str | Path,
    env_steps: int,
    score: float,
    states: Mapping[str, Any],
    info: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
    *,
    keep_best: int = 1,
    pace: Pace | None = None,
) -> Path | None:
    """Write what was evaluated at ``score``, and return its directory; None if others are better.

    Only if it is better than the worst of ``keep_best``, which then goes; one that is no number, or
    infinite, is not. Training does not go on
    from these: `find` only finds them by their own path, or that of ``best``.

    Args:
        run_dir: see `save`, as for the rest.
        env_steps: where the training stood when it was evaluated.
        score: the higher the better.
        states: see `save`.
        info: see `save`; ``score`` is added.
        texts: see `save`.
        keep_best: how many stay.
        pace: see `save`.

    Raises:
        ValueError, TypeError, OSError: as `save`.
    """
    folder = Path(run_dir).absolute() / _FOLDER
    ranked = _best_in(folder)
    if not math.isfinite(score):
        return None
    if len(ranked) >= keep_best and score <= ranked[keep_best - 1][0]:
        return None
    final = folder / f"best_{env_steps:012d}"
    best = final if not ranked or score > ranked[0][0] else ranked[0][1]
    told = {**(info or {}), "score": score}
    _write_directory(final, _BEST, env_steps, states, told, texts or {}, best.name, pace)
    for _, directory in _best_in(folder)[keep_best:]:
        _discard(directory)
    return final


def forget_best(run_dir: str | Path) -> None:
    """Delete the best ones, of a run that is given up for a new one."""
    folder = Path(run_dir).absolute() / _FOLDER
    if not folder.is_dir():
        return
    (folder / _BEST).unlink(missing_ok=True)
    for directory in folder.glob("best_*"):
        if _BEST_STEP.fullmatch(directory.name):
            shutil.rmtree(directory)


def _best_in(folder: Path) -> list[tuple[float, Path]]:
    """The best ones with their scores, the highest first, the earliest of equals."""
    found = []
    for directory in folder.glob("best_*"):
        if _BEST_STEP.fullmatch(directory.name):
            try:
                score = float(read_manifest(directory).info["score"])
            except (CheckpointError, LookupError, TypeError, ValueError):
                score = -math.inf  # damaged: the first to go
            found.append((score, directory))
    return sorted(found, key=lambda item: (-item[0], item[1].name))


def _write_directory(
    final: Path,
    pointer: str,
    env_steps: int,
    states: Mapping[str, Any],
    info: Mapping[str, Any],
    texts: Mapping[str, str],
    points_to: str | None = None,
    pace: Pace | None = None,
) -> None:
    """Write a checkpoint at ``final``, and what ``pointer`` points to: itself, unless told."""
    packed = {
        name: state if isinstance(state, Packed) else Packed.of(state, name)
        for name, state in states.items()
    }
    parts = (f"{name}{end}" for name in packed for end in (".safetensors", ".json"))
    _check_names([*texts, *parts, *(name for state in packed.values() for name in state.files)])
    folder = final.parent
    saving = folder / _SAVING
    folder.mkdir(parents=True, exist_ok=True)
    _repair(folder)
    saving.mkdir()
    try:
        files: dict[str, FileRecord] = {}
        for name, state in packed.items():
            arrays, rest = f"{name}.safetensors", f"{name}.json"
            files[arrays] = _write(saving / arrays, state.safetensors(), pace)
            files[rest] = _write(saving / rest, [state.skeleton.encode()])
            for linked, stored in state.files.items():
                if pace is not None:
                    pace()
                stored.sync()
                os.link(stored.path, saving / linked)
                files[linked] = FileRecord(stored.size_bytes, stored.sha256)
        for name, text in texts.items():
            files[name] = _write(saving / name, [text.encode()])
        manifest = Manifest(FORMAT, env_steps, _now(), _versions(), dict(info or {}), files)
        _write_manifest(saving, manifest)
        _sync_directory(saving)
        _put_in_place(saving, final)
        _write_pointer(folder / pointer, points_to or final.name)
    except OSError as error:
        free = shutil.disk_usage(folder).free
        needed = sum(state.size_bytes for state in packed.values())
        reason = f"{error.strerror}; about {needed:,} bytes needed, {free:,} free"
        raise OSError(error.errno, reason, str(final)) from error
    finally:
        shutil.rmtree(saving, ignore_errors=True)


def _check_names(names: Sequence[str]) -> None:
    taken = {_MANIFEST, _MANIFEST_SUM}
    for name in names:
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII) or name in taken:
            raise ValueError(f"{name!r} can't be the name of a file in a checkpoint")
        taken.add(name)


def _write(path: Path, chunks: Iterable[Any], pace: Pace | None = None) -> FileRecord:
    """Write a new file through to the disk; ``chunks`` are bytes or contiguous uint8 arrays."""
    digest, size, synced = hashlib.sha256(), 0, 0
    with path.open("xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            size += file.write(chunk)
            if size - synced > _SYNC_BYTES:
                file.flush()
                os.fsync(file.fileno())
                synced = size
            if pace is not None:
                pace()
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    text = json.dumps(asdict(manifest), indent=2, allow_nan=False) + "\n"
    record = _write(directory / _MANIFEST, [text.encode()])
    _write(directory / _MANIFEST_SUM, [_sum_line(record.sha256)])


def _sum_line(sha256: str) -> bytes:
    return f"{sha256}  {_MANIFEST}\n".encode()


def _sync_directory(directory: Path) -> None:
    if os.name == "posix":  # elsewhere a directory can't be opened
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(saving: Path, final: Path) -> None:
    """Rename ``saving`` to ``final``; a checkpoint of the same step stays until that is done."""
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():
        final.rename(replaced)
    saving.rename(final)
    _sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_pointer(pointer: Path, name: str) -> None:
    temporary = pointer.with_name(f"{pointer.name}.tmp")
    temporary.unlink(missing_ok=True)
    _write(temporary, [f"{name}\n".encode()])
    temporary.replace(pointer)
    _sync_directory(pointer.parent)


def _repair(folder: Path) -> None:
    """Clear away what killed saves left."""
    if (folder / _SAVING).exists():
        shutil.rmtree(folder / _SAVING)
    for replaced in folder.glob(f"*{_REPLACED}"):
        original = replaced.with_name(replaced.name.removesuffix(_REPLACED))
        if original.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(original)


def _rotate(folder: Path, env_steps: int, keep_last: int) -> None:
    for directory in _steps_in(folder):
        if _step_of(directory) > env_steps:
            aside = directory.with_name(directory.name + _ABANDONED)
            _log.warning("training went back to env step %d: %s is set aside", env_steps, directory)
            shutil.rmtree(aside, ignore_errors=True)
            directory.rename(aside)
    for directory in _steps_in(folder)[keep_last:]:
        _discard(directory)


def _discard(directory: Path) -> None:
    """Delete an old checkpoint; that it can't be is no failure of the new one."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        _log.warning("an old checkpoint can't be deleted: %s", error)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "not installed"
    return versions


# ------------------------------------------------------------------------------------ finding


def find(path: str | Path, states: Collection[str] | None = None) -> Path:
    """The directory of the checkpoint that ``path`` means, every checksum verified.

    Args:
        path: a run directory, which means its newest undamaged checkpoint; a checkpoint directory;
            or a file in one, or ``latest`` or ``best``.
        states: only what these consist of is verified, and needs to be there; None for all.

    Raises:
        CheckpointError: with the absolute path and the reason.
    """
    path = Path(path).absolute()
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or directory")
    if path.is_file():
        directory = path.parent
        if path.name in (_LATEST, _BEST):
            name = path.read_text("utf-8", "replace").strip()
            is_name = _STEP.fullmatch(name) or _BEST_STEP.fullmatch(name)
            directory = directory / name if is_name else directory
        if not _looks_like_checkpoint(directory):
            raise CheckpointError(f"{path}: not a file of a checkpoint")
    else:
        directory = path
    if _looks_like_checkpoint(directory):
        verify(directory, states)
        return directory
    steps = _steps_in(directory / _FOLDER) or _steps_in(directory)
    if not steps:
        is_empty = not any(directory.iterdir())
        what = "an empty directory" if is_empty else "neither a checkpoint nor a run that has one"
        raise CheckpointError(f"{path}: {what}")
    for candidate in steps:
        try:
            verify(candidate, states)
        except _DamagedError as error:
            _log.warning("skipped a checkpoint: %s", error)
        else:
            return candidate
    raise CheckpointError(f"{path}: all of its checkpoints are damaged ({len(steps)})")


def lies_in(path: str | Path | None, run_dir: str | Path | None) -> bool:
    """Whether ``path``, as for `find`, is of the run in ``run_dir``; not if one is None."""
    if path is None or run_dir is None:
        return False
    own = Path(path).absolute()
    return Path(run_dir).absolute() in (own, *own.parents)


def refuse_used(run_dir: str | Path, goes_on_from: str | Path | None) -> None:
    """Raise if ``run_dir`` has checkpoints of another run, which would mix with new ones.

    Args:
        run_dir: where a run wants to save.
        goes_on_from: the checkpoint that it goes on from, as for `find`; None for a new run.

    Raises:
        CheckpointError: it has.
    """
    if _steps_in(Path(run_dir) / _FOLDER) and not lies_in(goes_on_from, run_dir):
        raise CheckpointError(
            f"run_dir={run_dir}: holds the checkpoints of another run; go on from them with "
            f"resume={run_dir}, or choose another run_dir"
        )


def newest_run(root: str | Path) -> Path | None:
    """The checkpoint below ``root`` that was written last, damaged ones skipped; None without one.

    Its run directory is ``.parent.parent``.
    """
    found: list[tuple[str, Path]] = []
    for folder in Path(root).absolute().rglob(_FOLDER):
        for directory in _steps_in(folder):
            try:
                found.append((read_manifest(directory).written_at, directory))
            except _DamagedError as error:
                _log.warning("skipped a checkpoint: %s", error)
    for _, directory in sorted(found, reverse=True):
        try:
            verify(directory)
        except _DamagedError as error:
            _log.warning("skipped a checkpoint: %s", error)
        else:
            return directory
    return None


def read_manifest(directory: str | Path) -> Manifest:
    """The manifest of a checkpoint directory; its other files stay unread.

    Raises:
        CheckpointError: it is missing, damaged or of a newer format.
    """
    directory = Path(directory).absolute()
    try:
        content = (directory / _MANIFEST).read_bytes()
        expected = (directory / _MANIFEST_SUM).read_bytes()
    except OSError as error:
        raise _DamagedError(f"{directory}: incomplete: {error}") from error
    if expected != _sum_line(hashlib.sha256(content).hexdigest()):
        raise _DamagedError(f"{directory}: damaged: the checksum of {_MANIFEST} differs")
    try:
        fields = json.loads(content)
        if fields["format"] > FORMAT:
            raise CheckpointError(
                f"{directory}: written in format {fields['format']} by actorlearner "
                f"{fields['versions']['actorlearner']}; this version reads up to {FORMAT}"
            )
        files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
        return Manifest(**fields, files=files)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _DamagedError(f"{directory}: damaged: {_MANIFEST} is not a manifest") from error


def verify(directory: str | Path, states: Collection[str] | None = None) -> Manifest:
    """Read the files of a checkpoint directory against its manifest, which is returned.

    Args:
        directory: of the checkpoint.
        states: only read what these consist of; None for all.

    Raises:
        CheckpointError: as `read_manifest`, or a file is not what the manifest says.
    """
    directory = Path(directory).absolute()
    manifest = read_manifest(directory)
    for name in manifest.files_of(manifest.states if states is None else states):
        _verify_file(directory, name, manifest)
    return manifest


def _verify_file(directory: Path, name: str, manifest: Manifest) -> Path:
    """The path of file ``name`` of ``manifest``, its content verified."""
    path, record = directory / name, manifest.files[name]
    if path.is_symlink() or path.resolve().parent != directory.resolve():
        raise _DamagedError(f"{directory}: refused: {name!r} leads out of it")
    try:
        status = path.stat()
        if (size := status.st_size) != record.size_bytes:
            wanted = f"{record.size_bytes:,} bytes are needed"
            raise _DamagedError(f"{directory}: damaged: {name} has {size:,} bytes; {wanted}")
        sha256 = _sha256(path, (status.st_ino, size, status.st_mtime_ns))
    except OSError as error:
        raise _DamagedError(f"{directory}: incomplete: {error}") from error
    if sha256 != record.sha256:
        raise _DamagedError(f"{directory}: damaged: the checksum of {name} differs")
    return path


@functools.lru_cache(maxsize=1 << 14)  # a large replay has thousands of files
def _sha256(path: Path, identity: tuple[int, ...]) -> str:
    """Of the file's content, read once: ``identity`` tells whether it may have changed since.

    The time of a change of status is no part of it: another link to the file changes that.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _looks_like_checkpoint(directory: Path) -> bool:
    is_step = _STEP.fullmatch(directory.name) is not None
    return directory.is_dir() and (is_step or (directory / _MANIFEST).exists())


def _step_of(directory: Path) -> int:
    match = _STEP.match(directory.name)
    assert match
    return int(match[1])


def _steps_in(folder: Path) -> list[Path]:
    """The checkpoint directories of ``folder``, newest first, by number and not by text."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if p.is_dir() and _STEP.fullmatch(p.name)]
    names = {directory.name for directory in found}
    for replaced in folder.glob(f"step_*{_REPLACED}"):
        # A save of the same step was killed between its two renames: this one still counts.
        original = replaced.name.removesuffix(_REPLACED)
        if original not in names and _STEP.fullmatch(original):
            found.append(replaced)
    return sorted(found, key=_step_of, reverse=True)


# ------------------------------------------------------------------------------------ loading


def load(directory: str | Path, names: Iterable[str]) -> dict[str, Any]:
    """The states ``names`` of a checkpoint directory, each verified.

    Tensors and arrays may be changed at will; their pages come from the file when first touched.

    Raises:
        CheckpointError: the checkpoint lacks one, is damaged, or is of a newer format.
    """
    directory = Path(directory).absolute()
    manifest = read_manifest(directory)
    states: dict[str, Any] = {}
    for name in names:
        if name not in manifest.states:
            held = ", ".join(sorted(manifest.states)) or "texts"
            raise CheckpointError(f"{directory}: holds no {name!r}, only {held}")
        try:
            tensors = safetensors.torch.load_file(
                _verify_file(directory, f"{name}.safetensors", manifest)
            )
            skeleton = _verify_file(directory, f"{name}.json", manifest).read_text()
            file = functools.partial(_stored_file, directory, manifest=manifest)
            states[name] = decode(json.loads(skeleton), tensors, file)
        except _UNREADABLE as error:
            if isinstance(error, CheckpointError):
                raise
            raise _DamagedError(f"{directory}: damaged: {name} can't be read: {error}") from error
    return states


def _stored_file(directory: Path, name: str, manifest: Manifest) -> StoredFile:
    path, record = _verify_file(directory, name, manifest), manifest.files[name]
    return StoredFile(path, record.size_bytes, record.sha256, synced=True)
