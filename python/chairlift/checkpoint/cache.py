"""Where fetched and converted models are kept."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chairlift.errors import ChairliftError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says of a full disk."""


def cache_dir(directory: str | None = None) -> Path:
    """`directory`, else $CHAIRLIFT_CACHE_DIR, else $XDG_CACHE_HOME/chairlift, else ~/.cache/chairlift; it need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return _named(directory) or (Path(base) if base else Path.home() / ".cache") / "chairlift"


def hub_dir(directory: str | None = None) -> Path | None:
    """Where models of the Hugging Face hub are kept, if `directory` or $CHAIRLIFT_CACHE_DIR says; None: in the hub's own cache."""
    named = _named(directory)
    return named and named / "hub"


def _named(directory: str | None) -> Path | None:
    named = directory or os.environ.get("CHAIRLIFT_CACHE_DIR")
    return Path(named).expanduser().absolute() if named else None


@contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Turns an OSError of the block, which writes below `directory`, into a ChairliftError that names the disk and what to do."""
    try:
        yield
    except OSError as error:
        remedy = "name another directory with --cache-dir or CHAIRLIFT_CACHE_DIR"
        if error.errno in FULL:
            mount = _mount(directory)
            free = shutil.disk_usage(mount).free / 1e6
            message = f"not enough disk space to write to {directory} ({free:,.0f} MB free on {mount}): free some there, or {remedy}"
        else:
            message = f"cannot write to {directory} ({error.strerror or error}): {remedy}"
        raise ChairliftError(message) from error


def _mount(path: Path) -> Path:
    """Where the disk that holds `path`, or will hold it, is mounted."""
    return next(place for place in (path, *path.parents) if place.is_mount())
