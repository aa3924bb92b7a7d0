"""Finds a model of the Hugging Face hub in the hub's cache, and says which files of a repository belong to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

from chairlift.checkpoint.gguf_parts import model_files, parts_of, tag_of, tagged
from chairlift.checkpoint.hub_cache import Repository
from chairlift.checkpoint.model_name import HubName
from chairlift.checkpoint.weight_files import INDEX, dense_weights, weight_files, weight_names
from chairlift.errors import ChairliftError, ModelNotFound

T = TypeVar("T")


def find_hub_model(name: HubName, cache: Path) -> Path | None:
    """Returns the model's GGUF file or directory in the hub's cache; None if it is not there completely."""
    repository = Repository(cache, name.repo)
    if name.revision is not None:
        commits = [commit] if (commit := repository.commit(name.revision)) else []
    else:
        current = repository.commit("main")
        others = [path.name for path in reversed(repository.snapshots())]
        commits = sorted(others, key=lambda commit: commit != current)
    for commit in commits:
        try:
            return _in_snapshot(name, repository, commit)
        except ChairliftError:
            continue
    return None


def gguf_model(name: HubName, files: Collection[PurePosixPath]) -> PurePosixPath | None:
    """Returns the GGUF file among a repository's files that a name means; None if it means the safetensors files.

    Raises ModelNotFound if there is none.
    """
    if name.file is not None:
        path = PurePosixPath(name.file)
        if path not in files:
            raise ModelNotFound(f"{name.repo} has no file {name.file}")
        return parts_of(path)[0]
    has_config = PurePosixPath("config.json") in files
    if name.tag is None and has_config and any(path.suffix == ".safetensors" and len(path.parts) == 1 for path in files):
        return None
    models = model_files(files)
    found = models if name.tag is None else tagged(models, name.tag)
    if found:
        return found[0]
    if name.tag is not None:
        known = ", ".join(dict.fromkeys(tag_of(path) or path.name for path in models)) or "no GGUF file"
        raise ModelNotFound(f"{name.repo} has no GGUF file for {name.tag}; it has {known}")
    if has_config:
        return None
    kinds = ", ".join(sorted({path.suffix for path in files if path.suffix})) or "no files"
    raise ModelNotFound(f"{name.repo} has neither safetensors files with a config.json nor a GGUF file, but {kinds}")


def _in_snapshot(name: HubName, repository: Repository, commit: str) -> Path:
    """Returns the model in a snapshot. Raises ModelNotFound or UnsupportedModel if it is not complete."""
    files, snapshot = repository.files(commit), repository.snapshot(commit)
    model = gguf_model(name, files)
    if model is None:
        weight_files(snapshot)
        all_of(name, dict.fromkeys(files, 0), dense_weights(snapshot))
        return snapshot
    all_of(name, dict.fromkeys(files, 0), parts_of(model))
    return snapshot / model


def all_of(name: HubName, files: Mapping[PurePosixPath, T], wanted: Sequence[PurePosixPath]) -> list[T]:
    """Returns the files of these paths. Raises ModelNotFound if one is missing."""
    if missing := [path for path in wanted if path not in files]:
        raise ModelNotFound(f"{name.repo} has no file {missing[0]}, which belongs to the model")
    return [files[path] for path in wanted]


def weights_of(files: Collection[PurePosixPath], snapshot: Path) -> list[PurePosixPath]:
    """Returns the safetensors files that belong to the model. Its JSON files are in the directory `snapshot`."""
    names = weight_names((path.name for path in files if len(path.parts) == 1), snapshot / INDEX)
    return [*map(PurePosixPath, names), *dense_weights(snapshot)]
