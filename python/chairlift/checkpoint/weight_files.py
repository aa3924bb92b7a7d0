"""Finds the files of a model's weights."""

from __future__ import annotations

import json
from pathlib import Path

from chairlift.checkpoint.cache import LINK
from chairlift.checkpoint.gguf_parts import parts_of
from chairlift.errors import ModelNotFound, UnsupportedModel

_INDEX = "model.safetensors.index.json"


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
    if (directory / _INDEX).exists():
        return _indexed(directory / _INDEX)
    if (whole := directory / "model.safetensors").is_file():
        return [whole]
    every = sorted(directory.glob("*.safetensors"))
    chosen = [path for path in every if path.name.startswith("model")] or every
    if not chosen:
        raise ModelNotFound(f"{directory} holds no *.safetensors file: convert the weights to safetensors, or use --load-format dummy")
    return chosen


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


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UnsupportedModel(f"{index} is not an index of safetensors files") from None
    if outside := [name for name in names if not isinstance(name, str) or Path(name).name != name or name in ("", "..")]:
        raise UnsupportedModel(f"{index} names {outside[0]!r:.100}, which is no file of this directory")
    paths = [index.with_name(name) for name in names]
    for path in paths:
        if not path.exists():
            raise ModelNotFound(f"{path} is missing, though {index.name} names it: is the download complete?")
    return paths
