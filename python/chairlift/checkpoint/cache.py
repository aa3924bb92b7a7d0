"""The directories of downloaded and converted models."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chairlift.checkpoint.hub_settings import home_dir, own_cache
from chairlift.errors import ChairliftError

_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk."""
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""File name of the default model."""
LINK = "chairlift.gguf"
"""File name in the directory of a converted model: a symbolic link to the GGUF file, from which the tensors are read."""


def cache_dir(directory: str | None = None) -> Path:
    """Returns `directory`, else $CHAIRLIFT_CACHE_DIR, else $XDG_CACHE_HOME/chairlift, else ~/.cache/chairlift. It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return _named(directory) or (Path(base) if base else home_dir() / ".cache") / "chairlift"


def default_file(cache: Path) -> Path:
    """Returns the path of the default model's GGUF file in the directory `cache`. A file of that name is complete."""
    return cache / DEFAULT_FILE


def hub_dir(directory: str | None = None) -> Path:
    """Returns the directory of Hugging Face hub models: `hub` in what `cache_dir` names, if anything does; else the hub's own cache."""
    if (named := _named(directory)) is not None:
        return named / "hub"
    return own_cache()


def _named(directory: str | None) -> Path | None:
    named = directory or os.environ.get("CHAIRLIFT_CACHE_DIR")
    return Path(named).expanduser().absolute() if named else None


@contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Turns an OSError in the block, which writes below `directory`, into a ChairliftError that names the disk and a remedy."""
    try:
        yield
    except OSError as error:
        remedy = "name another directory with --cache-dir or CHAIRLIFT_CACHE_DIR"
        if error.errno in _FULL:
            mount = _mount(directory)
            free = shutil.disk_usage(mount).free / 1e6
            message = f"not enough disk space to write to {directory} ({free:,.0f} MB free on {mount}): free some there, or {remedy}"
        else:
            message = f"cannot write to {directory} ({error.strerror or error}): {remedy}"
        raise ChairliftError(message) from error


def _mount(path: Path) -> Path:
    """Returns the mount point of the disk that holds, or will hold, `path`."""
    return next(place for place in (path, *path.parents) if place.is_mount())
