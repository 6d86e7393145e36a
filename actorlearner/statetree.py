"""A state as JSON text and a safetensors file, and back; `checkpoint` says what a state is.

JSON stands for itself, except that an object whose only key starts with "$" stands for what JSON
has no word for: ``{"$tensor": key}``, ``{"$tuple": [...]}``, ``{"$dict": [[key, value], ...]}`` and
so on.

Two kinds of leaf are for what is too large to be copied: a `FrozenArray` is written chunk by chunk
and read as an array; a `StoredFile` is a file already, which goes along as it is.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from actorlearner.contracts import Array

_NUMPY_DTYPES = {
    "bool": "BOOL", "float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""What safetensors calls the dtypes that it and NumPy know."""

_TORCH_DTYPES = {
    torch.bfloat16: ("BF16", torch.int16),
    torch.float8_e4m3fn: ("F8_E4M3", torch.int8),
    torch.float8_e5m2: ("F8_E5M2", torch.int8),
}
"""What it calls those that NumPy does not know, and an integer type of the same size."""


@runtime_checkable
class FrozenArray(Protocol):
    """An array whose owner may change it, while `chunks` tells what it was when it was frozen."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the array."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        ...

    def chunks(self) -> Iterator[Array]:
        """The array, once, in parts along its first axis; each the caller's own."""
        ...


class StoredFile:
    """A file that nobody changes any more.

    Attributes:
        path: of it.
        size_bytes: its length.
        sha256: of its content, in hexadecimal.
    """

    def __init__(self, path: Path, size_bytes: int, sha256: str, synced: bool = False) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.sha256 = sha256
        self._synced = synced

    def sync(self) -> None:
        """See to it that the content is on the disk; the second call costs nothing."""
        if not self._synced:
            descriptor = os.open(self.path, os.O_RDWR)  # Windows syncs no file opened to be read
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._synced = True


class _Entry(NamedTuple):
    """One array of a safetensors file: its dtype's name there, and its values, C-contiguous."""

    dtype: str
    array: Array | FrozenArray

    @property
    def size_bytes(self) -> int:
        return math.prod(self.array.shape) * self.array.dtype.itemsize

    def chunks(self) -> Iterator[Array]:
        """Its bytes, flat."""
        parts = iter([self.array]) if isinstance(self.array, np.ndarray) else self.array.chunks()
        for part in parts:
            yield part.reshape(-1).view(np.uint8)

    def equals(self, other: _Entry) -> bool:
        """Whether dtype, shape and bytes are the same."""
        if (self.dtype, self.array.shape) != (other.dtype, other.array.shape):
            return False
        return all(map(np.array_equal, self.chunks(), other.chunks()))


@dataclass(frozen=True, slots=True)
class Packed:
    """A state as it goes to disk: JSON text that refers to arrays by key, and to files by name."""

    skeleton: str
    entries: dict[str, _Entry]
    files: dict[str, StoredFile]

    @classmethod
    def of(cls, state: Any, name: str) -> Packed:
        """``state``, which messages call ``name``.

        Raises:
            TypeError: it holds something that can't be stored; the message says where.
        """
        encoder = _Encoder(name)
        tree = encoder.encode(state, ())
        return cls(json.dumps(tree, indent=1) + "\n", encoder.entries, encoder.files)

    def detached(self) -> Packed:
        """With arrays of its own, so that the state may change; frozen ones don't mind."""
        own = {
            key: entry._replace(array=entry.array.copy())
            if isinstance(entry.array, np.ndarray)
            else entry
            for key, entry in self.entries.items()
        }
        return Packed(self.skeleton, own, self.files)

    @property
    def size_bytes(self) -> int:
        """How much of the disk it takes anew, but for the header."""
        return len(self.skeleton) + sum(entry.size_bytes for entry in self.entries.values())

    def safetensors(self) -> Iterator[Any]:
        """The chunks of a safetensors file: length of the header, header, arrays.

        Written here because the library's own writers reorder arrays that are not contiguous
        (NumPy) or refuse tensors that share memory, such as tied weights (torch), and hide a full
        disk from `except OSError`.
        """
        # Widest first keeps every array aligned.
        entries = sorted(self.entries.items(), key=lambda item: -item[1].array.dtype.itemsize)
        header: dict[str, Any] = {}
        end = 0
        for key, entry in entries:
            begin, end = end, end + entry.size_bytes
            shape = entry.array.shape
            header[key] = {"dtype": entry.dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        yield struct.pack("<Q", len(text))
        yield text
        for _, entry in entries:
            yield from entry.chunks()


def alike(one: Any, other: Any) -> bool:
    """Whether both states hold the same.

    Raises:
        TypeError: one holds something that can't be stored.
    """
    a, b = (Packed.of(state, "state") for state in (one, other))
    return a.skeleton == b.skeleton and all(
        entry.equals(b.entries[key]) for key, entry in a.entries.items()
    )


class _Encoder:
    """Turns a state into JSON and collects its arrays."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: dict[str, _Entry] = {}
        self.files: dict[str, StoredFile] = {}

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        """``value`` as JSON; ``path`` leads to it."""
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        if isinstance(value, np.ndarray):
            return self._encode_array("$array", value, path)
        if isinstance(value, np.generic):
            return self._encode_array("$scalar", np.asarray(value), path)
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:  # other readers of JSON lose digits above 2 ** 53
            return value if abs(value) <= 1 << 53 else {"$int": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if type(value) is bytes:
            return self._encode_array("$bytes", np.frombuffer(value, np.uint8), path)
        if type(value) is list:
            return [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]
        if type(value) is tuple:
            return {"$tuple": self.encode(list(value), path)}
        if isinstance(value, dict):
            return self._encode_dict(value, path)
        if isinstance(value, StoredFile):
            name = f"{self.name}.{value.path.name}"
            self.files[name] = value
            return {"$file": name}
        if isinstance(value, FrozenArray) and value.dtype.name in _NUMPY_DTYPES:
            return {"$array": self._add(_Entry(_NUMPY_DTYPES[value.dtype.name], value), path)}
        raise self._refusal(path, f"a {type(value).__name__}")

    def _encode_dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:
        items = {key: self.encode(item, (*path, str(key))) for key, item in value.items()}
        if all(type(key) is str and not key.startswith("$") for key in items):
            return items
        return {"$dict": [[self.encode(k, (*path, "key")), item] for k, item in items.items()]}

    def _encode_tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> Any:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise self._refusal(path, "a sparse or quantised tensor")
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        if tensor.dtype not in _TORCH_DTYPES:
            return self._encode_array("$tensor", tensor.numpy(), path)
        dtype, same_size = _TORCH_DTYPES[tensor.dtype]
        array = np.asarray(tensor.view(same_size).numpy(), order="C")
        return {"$tensor": self._add(_Entry(dtype, array), path)}

    def _encode_array(self, kind: str, array: Array, path: tuple[str, ...]) -> Any:
        array = np.asarray(array, order="C")
        if array.dtype.isnative and array.dtype.name in _NUMPY_DTYPES:
            return {kind: self._add(_Entry(_NUMPY_DTYPES[array.dtype.name], array), path)}
        if array.dtype.hasobject or np.dtype(array.dtype.str) != array.dtype:
            raise self._refusal(path, f"an array of dtype {array.dtype}")
        raw = _Entry("U8", array[..., None].view(np.uint8))
        return {kind: [self._add(raw, path), array.dtype.str]}

    def _add(self, entry: _Entry, path: tuple[str, ...]) -> str:
        key = "/".join(path).encode(errors="backslashreplace").decode()
        while key in self.entries or key in ("", "__metadata__"):
            key += "#"
        self.entries[key] = entry
        return key

    def _refusal(self, path: tuple[str, ...], what: str) -> TypeError:
        return TypeError(f"{'/'.join((self.name, *path))}: a checkpoint can't hold {what}")


def decode(
    node: Any, tensors: Mapping[str, torch.Tensor], file: Callable[[str], StoredFile]
) -> Any:
    """The value that ``node`` stands for.

    Args:
        node: of the skeleton.
        tensors: what it refers to by key.
        file: gives what it refers to by name.
    """
    if isinstance(node, list):
        return [decode(item, tensors, file) for item in node]
    if not isinstance(node, dict):
        return node
    kind = next(iter(node), "")
    if not kind.startswith("$"):
        return {key: decode(item, tensors, file) for key, item in node.items()}
    content = node[kind]
    if kind == "$tuple":
        return tuple(decode(content, tensors, file))
    if kind == "$dict":
        pairs = ((decode(key, tensors, file), decode(item, tensors, file)) for key, item in content)
        return dict(pairs)
    if kind == "$int":
        return int(content, 16)
    if kind == "$float":
        return float(content)
    if kind == "$file":
        return file(content)
    return _decode_array(kind, content, tensors)


def _decode_array(kind: str, content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(content, str):
        if kind == "$tensor":
            return tensors[content]
        array: Array = tensors[content].numpy()
    else:
        key, dtype = content
        array = tensors[key].numpy().view(dtype)[..., 0].copy()
    if kind == "$tensor":
        return torch.from_numpy(array)
    if kind == "$array":
        return array
    if kind == "$bytes":
        return array.tobytes()
    if kind == "$scalar":
        return array[()]
    raise ValueError(f"{kind} stands for nothing")
