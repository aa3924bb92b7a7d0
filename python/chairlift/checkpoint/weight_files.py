"""Finds the files of a model's weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePosixPath

from chairlift.checkpoint.cache import LINK
from chairlift.checkpoint.gguf_parts import parts_of
from chairlift.checkpoint.info import CheckpointInfo
from chairlift.errors import ModelNotFound, UnsupportedModel

log = logging.getLogger("chairlift")

INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
"""The file of a model or a module whose weights are in one."""
_MAX_NAME = 200
"""Most characters of a file's name. Published names are in ASCII, and disks allow 255 bytes."""


def gguf_link(directory: Path) -> Path | None:
    """Returns the GGUF file, or its first part, of which `directory` was made; None for other directories."""
    link = directory / LINK
    return link.readlink() if link.is_symlink() else None


def weight_files(directory: Path) -> list[Path]:
    """Returns the files with the weights of the model in `directory`.

    They are those of the GGUF file that it was made of, or those that `weight_names` says. Raises ModelNotFound if there are none, or if
    one that the index names is missing, and UnsupportedModel for an invalid index.
    """
    if (source := gguf_link(directory)) is not None:
        return parts_of(source)
    index = directory / INDEX
    paths = [directory / name for name in weight_names((path.name for path in directory.glob("*")), index)]
    if not paths:
        raise ModelNotFound(f"{directory} holds no *.safetensors file: convert the weights to safetensors, or use --load-format dummy")
    for path in paths:
        if not path.exists():
            why = f"is a link to {path.readlink()}, which is missing" if path.is_symlink() else f"is missing, though {index.name} names it"
            raise ModelNotFound(f"{path} {why}: is the download complete?")
    return paths


def weight_names(files: Iterable[str], index: Path) -> list[str]:
    """Returns the names of the files with weights among the `files` of a model. Raises UnsupportedModel for an invalid index.

    They are those that the index names, model.safetensors, the files whose names begin with `model`, or all safetensors files. Beside
    these, other files hold the weights in another format, or other weights. An index that names missing files is not used if there is a
    model.safetensors: programs that quantise a model may leave the index of the model that they read.
    """
    every = set(files)
    if index.name in every:
        names = sorted(set(indexed_files(index).values()))
        missing = [name for name in names if name not in every]
        if not missing or _WHOLE not in every:
            return names
        _report_index(index, missing[0])
    if _WHOLE in every:
        return [_WHOLE]
    found = sorted(name for name in every if name.endswith(".safetensors") and not name.startswith("._"))  # which macOS writes
    return [name for name in found if name.startswith("model")] or found


@cache
def _report_index(index: Path, missing: str) -> None:
    """Logs once that an index is not used."""
    log.warning("%s names %s, which is missing: the weights are those of %s", index, missing, _WHOLE)


def dense_weights(directory: Path) -> list[PurePosixPath]:
    """Returns the paths of the weights of sentence-transformers' dense layers, as modules.json in a model's directory names them."""
    try:
        modules = json.loads((directory / "modules.json").read_text(encoding="utf-8"))
        return [PurePosixPath(module["path"], _WHOLE) for module in modules if str(module["type"]).rpartition(".")[2] == "Dense"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # whoever loads the model reads it again, and says what is wrong


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
    if _holds_gguf(model):
        files = list(model.glob("*.gguf"))
    else:
        try:
            files = weight_files(model) if model.is_dir() else parts_of(model)
        except (ModelNotFound, UnsupportedModel):
            files = []
    return sum(file.stat().st_size for file in files if file.is_file())


def info_before_load(model: Path) -> CheckpointInfo:
    """Returns what a model's config.json tells of it, or that it is a GGUF file. The figures of the weights are not read."""
    if model.is_file() or _holds_gguf(model):
        return CheckpointInfo(weight_format="gguf")
    try:
        match json.loads((model / "config.json").read_bytes()) if (model / "config.json").is_file() else None:
            case {"architectures": [str(architecture), *_]}:
                return CheckpointInfo(architecture=architecture, weight_format="safetensors")
    except (OSError, ValueError, RecursionError):  # a load says what is wrong
        pass
    return CheckpointInfo()


def _holds_gguf(model: Path) -> bool:
    return model.is_dir() and not model.joinpath("config.json").is_file() and any(model.glob("*.gguf"))


def _is_file_name(name: object) -> bool:
    """Whether a name is that of a file in the same directory."""
    return isinstance(name, str) and name.isprintable() and len(name) <= _MAX_NAME and Path(name).name == name and name not in ("", "..")
