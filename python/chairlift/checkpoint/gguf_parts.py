"""Finds GGUF files: which file of a directory or a repository is the model, and the parts of a split one."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import TypeVar

P = TypeVar("P", bound=PurePath)

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})(?P<of>-of-)(?P<count>(?!00000)\d{5})(?P<suffix>\.gguf)?", re.IGNORECASE)
_OTHERS = re.compile(r".*(mmproj|imatrix).*|(mtp-|eagle3-|dflash-|dspark-|\._).*", re.IGNORECASE)
"""Files beside a model: image encoders, statistics of quantisation, draft models, and what macOS writes on other disks for each file."""
_PREFERRED = ("Q4_K_M", "Q8_0")
NO_MODELS = ("adapter", "mmproj", "imatrix")
"""Values of `general.type` of files that hold something else."""
_FIRST_BYTES = 1 << 16
"""Bytes of a file in which `holds_model` looks. What it looks for comes first in published files."""
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The scalar types of metadata, as `struct` names them."""
_TEXT = 8
"""The type of texts in metadata."""
_TAG = re.compile(r"[-.]([A-Za-z0-9_]+)$")


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do, whatever its name."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def holds_model(path: Path) -> bool:
    """Whether a GGUF file may hold a model of text by its first metadata, which tell an image encoder, an adapter and statistics."""
    try:
        with path.open("rb") as file:
            head = file.read(_FIRST_BYTES)
        (count,), at = struct.unpack_from("<Q", head, 16), 24

        def text() -> str:
            nonlocal at
            (length,) = struct.unpack_from("<Q", head, at)
            at += 8 + length
            return head[at - length : at].decode("utf-8", "replace")

        for _ in range(count):
            key, (kind,) = text(), struct.unpack_from("<I", head, at)
            at += 4
            if kind != _TEXT:
                at += struct.calcsize("<" + SCALARS[kind])
            elif ((value := text()) in NO_MODELS and key == "general.type") or (value == "clip" and key == "general.architecture"):
                return False
    except (OSError, struct.error, KeyError):
        pass  # a file without an answer is a model, or whoever reads it says what is wrong
    return True


def model_files(files: Iterable[P]) -> list[P]:
    """Returns the models among `files`: first Q4_K_M, then Q8_0, then by name. A split one is its first part, which may be missing."""
    found = sorted({parts_of(path)[0] for path in files if path.suffix.lower() == ".gguf" and not _OTHERS.fullmatch(path.name)})

    def rank(path: P) -> int:
        return next((rank for rank, tag in enumerate(_PREFERRED) if tagged([path], tag)), len(_PREFERRED))

    return sorted(found, key=rank)


def tagged(models: Iterable[P], tag: str) -> list[P]:
    """Returns the models whose path has `tag`, in any case, before a dot or a hyphen, as llama.cpp and Ollama choose them.

    Those come first in which it is a word: F16 means BF16 only where there is no F16.
    """
    found = [path for path in models if re.search(rf"{re.escape(tag)}[.-]", str(path), re.IGNORECASE)]
    return sorted(found, key=lambda path: re.search(rf"(?<![A-Za-z0-9]){re.escape(tag)}[.-]", str(path), re.IGNORECASE) is None)


def tag_of(path: PurePath) -> str | None:
    """Returns the last word of a model's file name, which is its type of weights in most names: `Q4_K_M` of `model-Q4_K_M.gguf`."""
    match = _TAG.search(stem_of(path))
    return match[1] if match else None


def stem_of(path: PurePath) -> str:
    """Returns the name of a model's file without .gguf and without the number of a part."""
    name = path.name[:-5] if path.name.lower().endswith(".gguf") else path.name
    match = _PART.fullmatch(name)
    return match["stem"] if match else name


def parts_of(path: P) -> list[P]:
    """Returns the paths of all parts of the model of which `path` is a part, in order; only `path` if its name is not that of a part."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    numbers = range(1, int(match["count"]) + 1)
    return [path.with_name(f"{match['stem']}-{number:05}{match['of']}{match['count']}{match['suffix'] or ''}") for number in numbers]
