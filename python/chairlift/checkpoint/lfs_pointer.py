"""Recognizes the pointers that Git LFS leaves in place of large files, to say why a model's file cannot be read."""

from __future__ import annotations

from pathlib import Path

_BEGINNING = b"version https://git-lfs.github.com/spec/"
"""As in https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md."""


def remedy(path: Path, otherwise: str = "is the download complete?") -> str:
    """Returns what the user can do about a file that cannot be read, `otherwise` if it is no pointer."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        is_pointer = False
    return "it is a pointer of Git LFS, run 'git lfs pull' in its directory" if is_pointer else otherwise
