"""Copies a GGUF file with all its tensors in float32."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from chairlift.checkpoint.gguf import open_gguf, read_float32
from chairlift.errors import UnsupportedModel

_VIRTUAL = ("GGUF.", "split.", "general.architecture", "general.file_type", "general.alignment")
"""Keys that the writer of a file makes itself, and those of a split one."""


def float_size(path: Path) -> int:
    """Returns the bytes of the file's tensors in float32; 0 if all have that type already and the file is not split."""
    file = open_gguf(path, vocabulary=False)
    entries = list(file.tensors.values())
    if all(entry.kind == 0 and entry.file == path for entry in entries):
        return 0
    return sum(4 * math.prod(entry.shape) for entry in entries)


def write_float(path: Path, out: Path) -> Path:
    """Writes the copy to `out` and returns it; parts become one file. Raises UnsupportedModel if the gguf package is missing."""
    try:
        import gguf
    except ImportError:
        raise UnsupportedModel("a copy in float32 needs one more package: pip install gguf") from None
    reader = gguf.GGUFReader(path)
    file = open_gguf(path, vocabulary=False)
    writer = gguf.GGUFWriter(out, str(file.get("general.architecture", str)))
    for field in reader.fields.values():
        if not field.name.startswith(_VIRTUAL):
            inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for entry in file.tensors.values():
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), 4 * math.prod(entry.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in file.tensors.values():
        writer.write_tensor_data(read_float32(file, entry))
    writer.close()
    return out
