"""Finds the files of a model's weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from chairlift.checkpoint.cache import LINK
from chairlift.checkpoint.gguf_parts import parts_of
from chairlift.errors import ModelNotFound, UnsupportedModel

INDEX = "model.safetensors.index.json"
_MAX_NAME = 200
"""Most characters of a file's name. Published names are in ASCII, and disks allow 255 bytes."""


def gguf_link(directory: Path) -> Path | None:
    """Returns the GGUF file, or its first part, of which `directory` was made; None for other directories."""
    link = directory / LINK
    return link.readlink() if link.is_symlink() else None


def weight_files(directory: Path) -> list[Path]:
    """Returns the files with the weights of the model in `directory`.

    They are those of the GGUF file that it was made of, those that the index names, model.safetensors, the files whose names begin with
    `model`, or all safetensors files. Beside these, other files hold the weights in another format, or other weights. Raises ModelNotFound
    if there are none, or if one that the index names is missing, and UnsupportedModel for an invalid index.
    """
    if (source := gguf_link(directory)) is not None:
        return parts_of(source)
    if (index := directory / INDEX).exists():
        paths = [directory / name for name in indexed_names(index)]
        for path in paths:
            if not path.exists():
                raise ModelNotFound(f"{path} is missing, though {index.name} names it: is the download complete?")
        return paths
    chosen = weight_names(path.name for path in directory.glob("*.safetensors"))
    if not chosen:
        raise ModelNotFound(f"{directory} holds no *.safetensors file: convert the weights to safetensors, or use --load-format dummy")
    return [directory / name for name in chosen]


def weight_names(files: Iterable[str]) -> list[str]:
    """Returns the names of the files with weights among the safetensors files of a directory without an index."""
    every = sorted(files)
    if "model.safetensors" in every:
        return ["model.safetensors"]
    return [name for name in every if name.startswith("model")] or every


def indexed_names(index: Path) -> list[str]:
    """Returns the names of the files with weights that an index names. Raises UnsupportedModel for an invalid one."""
    return sorted(set(indexed_files(index).values()))


def indexed_files(index: Path) -> dict[str, str]:
    """Returns the name of the file of each tensor that an index lists. Raises UnsupportedModel for an invalid index."""
    try:
        named: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(named.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnsupportedModel(f"{index} is not an index of safetensors files") from None
    if outside := [name for name in names if not _is_file_name(name)]:
        raise UnsupportedModel(f"{index} names {outside[0]!r:.100}, which is no file of this directory")
    return named


def weight_bytes(model: Path) -> int:
    """Returns the size of the weights in a model's directory, or of a GGUF file with its parts; 0 if there are none here."""
    if model.is_dir() and not model.joinpath("config.json").is_file():
        files = list(model.glob("*.gguf"))
    else:
        try:
            files = weight_files(model) if model.is_dir() else parts_of(model)
        except (ModelNotFound, UnsupportedModel):
            files = []
    return sum(file.stat().st_size for file in files if file.is_file())


def _is_file_name(name: object) -> bool:
    """Whether a name is that of a file in the same directory."""
    return isinstance(name, str) and name.isprintable() and len(name) <= _MAX_NAME and Path(name).name == name and name not in ("", "..")
