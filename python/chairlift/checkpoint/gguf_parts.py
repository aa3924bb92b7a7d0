"""Finds GGUF files: which file of a directory is the model, and the parts of a split one."""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})(?P<of>-of-)(?P<count>(?!00000)\d{5})(?P<suffix>\.gguf)?", re.IGNORECASE)
_OTHERS = re.compile(r".*(mmproj|imatrix).*|(mtp|eagle3|dflash|dspark)-.*", re.IGNORECASE)
"""Files beside a model: image encoders, statistics of quantisation, draft models."""
_PREFERRED = ("Q4_K_M", "Q8_0")


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do, whatever its name."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def model_files(directory: Path) -> list[Path]:
    """Returns the models among the GGUF files of a directory: first Q4_K_M, then Q8_0, then by name. A split one is its first part."""
    files = sorted(path for path in directory.iterdir() if path.suffix.lower() == ".gguf" and not _OTHERS.fullmatch(path.name))
    first = sorted({parts_of(path)[0] for path in files})  # it may be missing, which its reader reports

    def rank(path: Path) -> int:
        return next((rank for rank, kind in enumerate(_PREFERRED) if kind in path.name.upper()), len(_PREFERRED))

    return sorted(first, key=rank)


def stem_of(path: Path) -> str:
    """Returns the name of a model's file without .gguf and without the number of a part."""
    name = path.name[:-5] if path.name.lower().endswith(".gguf") else path.name
    match = _PART.fullmatch(name)
    return match["stem"] if match else name


def parts_of(path: Path) -> list[Path]:
    """Returns the paths of all parts of the model of which `path` is a part, in order; only `path` if its name is not that of a part."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    numbers = range(1, int(match["count"]) + 1)
    return [path.with_name(f"{match['stem']}-{number:05}{match['of']}{match['count']}{match['suffix'] or ''}") for number in numbers]
