"""Reads a GGUF file's header: its metadata and the position of each tensor."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from chairlift.checkpoint.gguf_parts import SCALARS, parts_of
from chairlift.checkpoint.lfs_pointer import remedy
from chairlift.checkpoint.positioned_read import read_at
from chairlift.errors import UnsupportedModel

_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS, _MAX_NAME = 4, 200
_FIRST_READ = 1 << 22
"""Bytes of a header to read at once. Most vocabularies fit in one read."""
_MAX_HEADER, _MAX_ENTRIES = 1 << 27, 1 << 24
"""Most bytes of a header, and entries of a list. Gemma 4's vocabulary takes 16 MB, and half a million merges are in it."""
_REMOVED = dict.fromkeys((31, 32, 33), "Q4_0") | dict.fromkeys((36, 37, 38), "IQ4_NL")
"""Types that ggml has removed, with rows in an order for some processors, and those that took their place."""
UNKNOWN_CONTEXT = 4096
"""Context length of a file that says 0, as in Ollama."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a file: `shape` in numpy's order (rows first), `kind` a ggml type, `start` and `size` in bytes."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


class GGUFFile:
    """An open GGUF file of version 2 or 3, with the tensors of all its parts if it is the first one of a split model.

    The `gguf` package's own reader makes an array object for each entry of the vocabulary, which takes seconds. This reader takes a tenth
    of a second. It checks every length in the file and raises UnsupportedModel for invalid data.
    """

    def __init__(self, path: Path, block_size: Callable[[int], tuple[int, int] | None], *, vocabulary: bool = True) -> None:
        """Reads the header. `block_size` returns the elements and bytes of a block of a ggml type; None for an unknown type.

        Without `vocabulary`, lists of texts are skipped, which takes a fifth of the time.
        """
        self.path = path
        self.tensors: dict[str, TensorEntry] = {}
        self._metadata: dict[str, Any] = {}
        self._read: set[str] = set()
        self._block_size, self._vocabulary = block_size, vocabulary
        self._at = 0
        self._header = b""
        # The file is read and not mapped, because access to a mapped file that was truncated kills the process.
        self._file = path.open("rb")
        self._size = os.fstat(self._file.fileno()).st_size
        if self._file.read(4) != b"GGUF":
            raise UnsupportedModel(f"{path} is not a GGUF file: {remedy(path)}")
        try:
            self._read_header()
        except (struct.error, ValueError, OverflowError) as error:
            raise self._corrupt(str(error)) from None
        self._header = b""
        self._parts = {path: self}

    def read_parts(self) -> None:
        """Adds the tensors of the other parts. Raises UnsupportedModel if a part is missing or does not belong to this one."""
        count = self.get("split.count", int) or 1
        if count == 1:
            return
        paths = parts_of(self.path)
        if self.get("split.no", int) != 0 or len(paths) != count:
            raise UnsupportedModel(f"{self.path} is one part of {count}: name the first, whose name ends with -00001-of-{count:05}.gguf")
        for number, path in enumerate(paths[1:], 1):
            if not path.is_file():
                raise UnsupportedModel(f"{path} is missing: the model has {count} parts, which must be in one directory")
            part = GGUFFile(path, self._block_size, vocabulary=False)
            if (part.get("split.no", int), part.get("split.count", int)) != (number, count):
                raise UnsupportedModel(f"{path} is not part {number + 1} of {count}, as its name says: download it again")
            if both := part.tensors.keys() & self.tensors.keys():
                raise UnsupportedModel(f"{path}: tensor {min(both)} is in another part too: download the parts again")
            self.tensors |= part.tensors
            self._parts[path] = part
        total = self.get("split.tensors.count", int)
        if total is not None and total != len(self.tensors):
            raise UnsupportedModel(f"{self.path} and its parts hold {len(self.tensors)} tensors of {total}: download them again")

    def adapt(self, change: Callable[[dict[str, Any], dict[str, TensorEntry]], None]) -> None:
        """Calls `change` with the metadata and the tensors, which it may change."""
        change(self._metadata, self.tensors)

    def value(self, key: str) -> Any:
        """Returns the metadata under `key`, of any type; None if it is missing."""
        self._read.add(key)
        return self._metadata.get(key)

    def keys(self, prefix: str) -> list[str]:
        """Returns the metadata keys that begin with `prefix`."""
        return [key for key in self._metadata if key.startswith(prefix)]

    def unread(self) -> dict[str, Any]:
        """Returns the metadata that has not been read."""
        return {key: value for key, value in self._metadata.items() if key not in self._read}

    def get(self, key: str, kind: type[T]) -> T | None:
        """Returns the metadata under `key`; None if it is missing. Raises UnsupportedModel if it is not of type `kind`."""
        value = self.value(key)
        if value is None or type(value) is kind:
            return value
        raise self._corrupt(f"{key} is {value!r:.50} and not of type {kind.__name__}")

    @property
    def vocab_size(self) -> int:
        """The number of tokens that have an embedding. Raises UnsupportedModel for a file without embeddings."""
        if (embedding := self.tensors.get("token_embd.weight")) is None:
            raise UnsupportedModel(f"{self.path} holds no model: tensor token_embd.weight is missing")
        return embedding.shape[0]

    @property
    def context_length(self) -> int:
        """The most tokens of a text; UNKNOWN_CONTEXT for a file that says 0. Raises UnsupportedModel for a file that says nothing."""
        key = f"{self.get('general.architecture', str)}.context_length"
        return UNKNOWN_CONTEXT if self.value(key) == 0 else self.size(key)

    def size(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer of the metadata. Raises UnsupportedModel if it is missing and has no default."""
        value = self.get(key, int)
        value = default if value is None else value
        if value is None or not 0 < value < 2**31:
            raise self._corrupt(f"{key} is {value}, not a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive real number of the metadata. Raises UnsupportedModel if it is missing and has no default.

        The result is the shortest decimal with the same fp32 value: 1e-05 instead of 9.999999747378752e-06.
        """
        value = self.get(key, float)
        value = default if value is None else value
        if value is None or not 0.0 < value < math.inf:
            raise self._corrupt(f"{key} is {value}, not a positive number")
        return float(str(np.float32(value)))

    def data(self, entry: TensorEntry) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns the tensor's bytes as stored, flat uint8. Raises UnsupportedModel if the file was truncated."""
        data = bytearray(entry.size)
        if not read_at(self._parts[entry.file]._file, memoryview(data), entry.start):
            raise self._corrupt(f"tensor {entry.name} ends beyond it: it became shorter while it was read")
        return np.frombuffer(data, np.uint8)

    def _corrupt(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path} is damaged or incomplete: {reason}; download it again")

    def _read_header(self) -> None:
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            order = " (or written for a big-endian machine)" if version & 0xFFFF == 0 else ""
            raise UnsupportedModel(f"{self.path} is a GGUF file of version {version}{order}; versions 2 and 3 can be read")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        for _ in range(num_keys):
            key = self._name()
            if key in self._metadata:
                raise ValueError(f"the key {key!r} occurs twice")
            self._metadata[key] = self._value(self._number("I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.size("general.alignment", 32)
        if alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment}, not a power of two")
        self._place(entries, alignment)

    def _place(self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> None:
        """Computes each tensor's position. Checks that they follow each other, aligned, and that the file contains them."""
        data_start = _aligned(self._at, alignment)
        expected = 0
        for name, shape, kind, offset in entries:
            if kind in _REMOVED:
                raise UnsupportedModel(
                    f"{self.path}: tensor {name} is of a type that was removed from ggml ({kind}): take the file of type {_REMOVED[kind]}"
                )
            block_size = self._block_size(kind)
            if block_size is None:
                raise UnsupportedModel(f"{self.path}: tensor {name} is of ggml type {kind}, which the gguf package cannot read; update it")
            elements, size = block_size
            if not shape or 0 in shape or shape[-1] % elements or name in self.tensors:
                raise ValueError(f"tensor {name} of shape {list(shape)}")
            entry = TensorEntry(self.path, name, shape, kind, data_start + offset, math.prod(shape) // elements * size)
            if offset != expected:
                raise ValueError(f"tensor {name} begins at byte {offset} of the data, and the one before it ends at {expected}")
            expected += _aligned(entry.size, alignment)
            if entry.start + entry.size > self._size:
                raise ValueError(f"tensor {name} ends at byte {entry.start + entry.size} of {self._size}")
            self.tensors[name] = entry

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._name(), self._number("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"a value of unknown type {kind}")
        kind, length = self._number("I"), self._number("Q")
        if length > _MAX_ENTRIES:
            raise ValueError(f"a list of {length} entries")
        if kind == _STRING:
            return [self._text() for _ in range(length)] if self._vocabulary else self._skip_texts(length)
        if kind not in SCALARS:
            raise ValueError(f"an array of type {kind}")
        dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
        at = self._advance(length * dtype.itemsize)
        return np.frombuffer(self._header, dtype, length, at).tolist()

    def _number(self, code: str) -> Any:
        at = self._advance(struct.calcsize("<" + code))
        (value,) = struct.unpack_from("<" + code, self._header, at)
        return value

    def _text(self) -> str:
        length = self._number("Q")
        at = self._advance(length)
        return self._header[at : at + length].decode("utf-8", "replace")

    def _name(self) -> str:
        """Reads the name of a key or a tensor, which messages repeat."""
        name = self._text()
        if len(name) > _MAX_NAME or not name.isprintable():
            raise ValueError(f"the name {name!r:.50}")
        return name

    def _skip_texts(self, count: int) -> None:
        length, at, header = struct.Struct("<Q").unpack_from, self._at, self._header
        for _ in range(count):
            try:
                (size,) = length(header, at)
            except struct.error:  # this much of the file has not been read
                self._at = at
                self._advance(8)
                header = self._header
                (size,) = length(header, at)
            at += 8 + size
        self._at = at

    def _advance(self, size: int) -> int:
        """Advances by `size` bytes, reads them into `_header` and returns their start. Raises ValueError beyond the header's end."""
        start, end, most = self._at, self._at + size, min(self._size, _MAX_HEADER)
        if end > most:
            raise ValueError(f"{size} bytes at byte {start} of a header of at most {most}")
        if end > len(self._header):
            self._header = os.pread(self._file.fileno(), min(max(end, 2 * len(self._header), _FIRST_READ), most), 0)
            if end > len(self._header):
                raise ValueError("it became shorter while it was read")
        self._at = end
        return start


def _aligned(size: int, alignment: int) -> int:
    """Returns the next multiple of `alignment`."""
    return -(-size // alignment) * alignment
