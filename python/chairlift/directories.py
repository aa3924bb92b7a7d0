"""Directories that settings name."""

from __future__ import annotations

import os
from pathlib import Path

from chairlift.errors import InvalidSetting


def private_directory(flag: str, directory: str) -> Path:
    """Creates a directory for this user alone, unless it exists. Raises InvalidSetting if files cannot be created in it."""
    path = Path(directory)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except FileExistsError:
        raise InvalidSetting(f"{flag} {directory}: this is a file, name a directory") from None
    except OSError as error:
        raise InvalidSetting(f"{flag} {directory}: {error.strerror or error}") from None
    return path
