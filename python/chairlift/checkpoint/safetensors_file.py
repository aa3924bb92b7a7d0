"""Reads safetensors files: the header, and the bytes of one tensor at a time."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chairlift.checkpoint.lfs_pointer import remedy
from chairlift.checkpoint.positioned_read import read_at
from chairlift.checkpoint.weight_files import INDEX, indexed_files, weight_files
from chairlift.errors import UnsupportedModel

DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
"""The dtypes of tensors, by their names in a header: their usual names and their bytes."""
PACKED_DTYPES = {
    "F8_E4M3": ("uint8", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "I64": ("int64", 8),
}
"""The dtypes of a quantised matrix's tensors, likewise; e4m3 numbers are read as bytes."""
_MAX_HEADER = 100_000_000
"""Most bytes of a header, as in the safetensors package."""
_MAX_NAME = 500
"""Most characters of a tensor's name, which messages repeat."""


class TensorEntry(NamedTuple):
    """One tensor of a file. `start` and `size` are in bytes."""

    dtype: str
    """As in the header."""
    shape: tuple[int, ...]
    start: int
    size: int


class SafetensorsFile:
    """An open safetensors file.

    Tensors are read and not mapped, because access to a mapped file that was truncated kills the process. Format:
    https://huggingface.co/docs/safetensors
    """

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises UnsupportedModel if it is invalid, or the tensors are not the whole file, one after the other."""
        self.path = path
        try:
            self._file = path.open("rb")
            self._size = os.fstat(self._file.fileno()).st_size
            self.tensors = self._read_header()
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise self._corrupt(str(error)) from None

    def data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns the bytes of a tensor, flat uint8. Raises UnsupportedModel if the file was truncated."""
        data = np.empty(self.tensors[name].size, np.uint8)
        self.read(name, data.data, 0)
        return data

    def read(self, name: str, view: memoryview, at: int) -> None:
        """Fills the view with the bytes of a tensor from byte `at` on. Threads may call it at once. Raises UnsupportedModel as `data`."""
        if not read_at(self._file, view, self.tensors[name].start + at):
            raise self._corrupt(f"tensor {name} ends beyond it: it became shorter while it was read")

    def _read_header(self) -> dict[str, TensorEntry]:
        length = int.from_bytes(self._file.read(8), "little")
        if self._size < 8 or length > min(self._size - 8, _MAX_HEADER):
            raise ValueError(f"the header takes {length} bytes of {self._size}")
        header = json.loads(self._file.read(length).decode(), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("the header is not a table of tensors")
        header.pop("__metadata__", None)
        entries = {name: self._entry(name, 8 + length, **fields) for name, fields in header.items()}
        end = 8 + length
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)):
            if entry.start != end:
                raise ValueError(f"tensor {name} begins at byte {entry.start}, and the one before it ends at {end}")
            end += entry.size
        if end != self._size:
            raise ValueError(f"the tensors end at byte {end} of {self._size}")
        return entries

    def _entry(self, name: str, data_start: int, *, dtype: str, shape: list[int], data_offsets: list[int]) -> TensorEntry:
        if len(name) > _MAX_NAME or not name.isprintable():
            raise ValueError(f"a tensor has the name {name!r:.50}")
        start, end = data_offsets
        if not all(type(number) is int and number >= 0 for number in (start, end, *shape)) or start > end:
            raise ValueError(f"tensor {name} has the shape {shape} and the offsets {data_offsets}")
        if data_start + end > self._size:
            raise ValueError(f"tensor {name} ends at byte {data_start + end} of {self._size}")
        known = DTYPES | PACKED_DTYPES
        if dtype in known and end - start != math.prod(shape) * known[dtype][1]:
            raise ValueError(f"tensor {name} of shape {shape} and dtype {dtype} has {end - start} bytes")
        return TensorEntry(dtype, tuple(shape), data_start + start, end - start)

    def _corrupt(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path} cannot be read as safetensors ({reason}): {remedy(self.path)}")


def tensor_files(directory: Path) -> dict[str, SafetensorsFile]:
    """Returns the safetensors file of each tensor of the model in `directory`.

    The index says which file counts if two hold a tensor of one name. Raises UnsupportedModel if it does not, and as `weight_files` does.
    """
    index, found = directory / INDEX, dict[str, SafetensorsFile]()
    named = indexed_files(index) if index.exists() else {}
    files = {path.name: SafetensorsFile(path) for path in weight_files(directory)}
    for file in files.values():
        for name in file.tensors:
            chosen = files.get(named.get(name, ""), file)
            chosen = chosen if name in chosen.tensors else file
            if (other := found.setdefault(name, chosen)) is not chosen:
                raise UnsupportedModel(f"{chosen.path} and {other.path.name} both hold tensor {name}: remove one")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of a JSON text. Raises ValueError for a name that occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


Array = np.ndarray[Any, np.dtype[Any]]
"""A tensor: float32, float16, the bits of bfloat16 as uint16, or integers."""


def as_float32(array: Array) -> NDArray[np.float32]:
    """Returns a tensor's values in fp32."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def as_array(file: SafetensorsFile, name: str, index: int | None = None) -> Array:
    """Returns a tensor in the file's dtype, bfloat16 as its bits; or entry `index` of its first dimension alone."""
    entry = file.tensors[name]
    dtype = (DTYPES | PACKED_DTYPES)[entry.dtype][0].replace("bfloat16", "uint16")
    shape = entry.shape if index is None else entry.shape[1:]
    array: Array = np.empty(shape, dtype)
    file.read(name, array.reshape(-1).view(np.uint8).data, (index or 0) * array.nbytes)
    return array
