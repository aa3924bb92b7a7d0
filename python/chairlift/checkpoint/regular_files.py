"""Refuses FIFOs and devices in place of a model's or an adapter's files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from chairlift.errors import UnsupportedModel

_ENDS = (".json", ".safetensors", ".gguf", ".model", ".jinja", ".txt")
"""How the names of files end that are read. Other files beside them do not matter."""


def check_files(paths: Iterable[Path]) -> None:
    """Raises UnsupportedModel for a FIFO or a device among the files of a model or an adapter. Reading one may never end."""
    for path in paths:
        if path.name.lower().endswith(_ENDS) and path.exists() and not (path.is_file() or path.is_dir()):
            raise UnsupportedModel(f"{path} is no regular file: put the model's own there")
