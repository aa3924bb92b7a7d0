"""Finds the downloaded GGUF files of addresses in the cache: one directory for each address."""

from __future__ import annotations

import hashlib
from pathlib import Path

from chairlift.checkpoint.gguf_parts import parts_of
from chairlift.checkpoint.model_name import FileAddress

SOURCE = "source.json"
"""File beside the downloaded ones: their address, without secrets, and the version of each."""


def address_dir(address: FileAddress, cache: Path) -> Path:
    """Returns the directory of the files of an address in the directory `cache`."""
    return cache / "files" / hashlib.sha256(address.url.encode()).hexdigest()[:16]


def find_file(address: FileAddress, cache: Path) -> Path | None:
    """Returns the downloaded file of an address, the first part of a split one; None if it is not there completely."""
    parts = parts_of(address_dir(address, cache) / address.name)
    return parts[0] if all(part.is_file() for part in parts) else None
