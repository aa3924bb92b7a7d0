"""The models that are on this machine: the default one, those of the hub and of addresses, and Ollama's."""

from __future__ import annotations

import enum
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chairlift.checkpoint.cache import cache_dir, default_file, hub_dir
from chairlift.checkpoint.file_address import SOURCE, address_dir
from chairlift.checkpoint.gguf_parts import model_files, parts_of, tag_of, tagged
from chairlift.checkpoint.hub_cache import Repository, repositories
from chairlift.checkpoint.hub_model import find_hub_model
from chairlift.checkpoint.hub_settings import own_cache
from chairlift.checkpoint.model_name import FileAddress, HubName, parse_name, shown
from chairlift.checkpoint.ollama_store import OllamaModel, find_ollama_model, ollama_models
from chairlift.config import DEFAULT_MODEL
from chairlift.errors import ModelNotFound


class Owner(enum.Enum):
    """The program whose files they are."""

    CHAIRLIFT = "chairlift"
    HUB = "hub"
    """The cache of the Hugging Face hub, which several programs share."""
    OLLAMA = "ollama"


@dataclass(frozen=True, slots=True)
class Download:
    """A model on this machine. `num_bytes` is what it takes on the disk, `modified` the time of its newest file, in seconds since 1970."""

    name: str
    path: Path
    num_bytes: int
    modified: float
    owner: Owner = Owner.CHAIRLIFT
    repository: Repository | None = None
    """The hub's repository of a GGUF file."""

    def check_deletable(self) -> None:
        """Raises ModelNotFound for a model of Ollama's, which Ollama deletes."""
        if self.owner is Owner.OLLAMA:
            raise ModelNotFound(f"{self.name} belongs to Ollama: 'ollama rm {self.name}' deletes it")

    def delete(self) -> None:
        """Deletes its files. Raises ModelNotFound for a model of Ollama's."""
        self.check_deletable()
        if self.repository is not None:
            self.repository.delete(self.path)
        elif self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink()


def downloads(directory: str | None = None) -> list[Download]:
    """Returns the models by name, of `directory` or of the caches that `cache_dir` and `hub_dir` name, and Ollama's."""
    cache = cache_dir(directory)
    file = default_file(cache)
    found = [_download(DEFAULT_MODEL, file)] if file.is_file() else []
    for repository in repositories(hub_dir(directory)):
        found += _hub_downloads(repository)
    for source in (cache / "files").glob(f"*/{SOURCE}"):
        if any(path != source for path in source.parent.iterdir()):  # otherwise nothing came
            found.append(_download(_address_of(source), source.parent))
    found += map(_ollama_download, ollama_models())
    return sorted(found, key=lambda one: one.name.lower())


def find_download(model: str, directory: str | None = None) -> Download:
    """Returns a model on this machine by its name; raises ModelNotFound if it is not there."""
    name = None if model == DEFAULT_MODEL else parse_name(model)
    path: Path | None = None
    if model == DEFAULT_MODEL:
        path = default_file(cache_dir(directory))
    elif isinstance(name, FileAddress):
        path = address_dir(name, cache_dir(directory))
    elif isinstance(name, HubName):
        repository = Repository(hub_dir(directory), name.repo)
        if name.tag is None and name.file is None and repository.path.is_dir():
            return _whole(repository)
        path = find_hub_model(name, hub_dir(directory))
    found = next((one for one in downloads(directory) if one.path == path), None)
    if found is None and (ollama := find_ollama_model(model)) is not None:
        found = _ollama_download(ollama)
    if found is None:
        raise ModelNotFound(f"there is no downloaded model {shown(model)!r}: 'chairlift list' shows those that there are")
    return found


def delete_model(model: str, directory: str | None = None) -> None:
    """Deletes a downloaded model; raises ModelNotFound if it is not there."""
    find_download(model, directory).delete()


def _hub_downloads(repository: Repository) -> Iterator[Download]:
    """Yields the GGUF models of a repository, the newest of each name; the whole repository if it has another model or only one."""
    models: dict[str, Path] = {}
    others = False
    for snapshot in repository.snapshots():
        files = repository.files(snapshot.name)
        found = model_files(files)
        others |= any(path.suffix == ".safetensors" for path in files)
        for path in found:
            tag = tag_of(path)
            unique = tag is not None and tagged(found, tag)[0] == path
            models[f"{repository.name}:{tag}" if unique else f"{repository.name}/{path}"] = snapshot / path
    for name, model in models.items():
        facts = [part.stat() for part in parts_of(model) if part.is_file()]
        modified = max((one.st_mtime for one in facts), default=0.0)
        yield Download(name, model, sum(one.st_size for one in facts), modified, _owner(repository), repository)
    whole = _whole(repository)
    if others or (not models and whole.num_bytes):  # otherwise nothing came
        yield whole


def _whole(repository: Repository) -> Download:
    return _download(repository.name, repository.path, _owner(repository))


def _owner(repository: Repository) -> Owner:
    return Owner.HUB if repository.cache == own_cache() else Owner.CHAIRLIFT


def _address_of(source: Path) -> str:
    try:
        return str(json.loads(source.read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return source.parent.name


def _ollama_download(model: OllamaModel) -> Download:
    return Download(model.name, model.manifest, model.num_bytes, model.manifest.stat().st_mtime, Owner.OLLAMA)


def _download(name: str, path: Path, owner: Owner = Owner.CHAIRLIFT) -> Download:
    """Describes a file, or a directory with all its files; links of the hub's cache point to files in the same directory."""
    files = [one for one in path.rglob("*") if one.is_file() and not one.is_symlink()] if path.is_dir() else [path]
    facts = [one.stat() for one in files]
    modified = max((one.st_mtime for one in facts), default=path.stat().st_mtime)
    return Download(name, path, sum(one.st_size for one in facts), modified, owner)
