"""The downloaded models in the cache: the default model and those of the Hugging Face hub."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from chairlift.checkpoint.cache import cache_dir, hub_dir
from chairlift.checkpoint.pull import default_file
from chairlift.config import DEFAULT_MODEL
from chairlift.errors import ModelNotFound

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Download:
    """A downloaded model. `num_bytes` is what it takes on the disk, `modified` the time of its newest file, in seconds since 1970."""

    name: str
    path: Path
    num_bytes: int
    modified: float

    def delete(self) -> None:
        """Deletes its files."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink()


def downloads(directory: str | None = None) -> list[Download]:
    """Returns the downloaded models by name, of `directory` or of the caches that `cache_dir` and `hub_dir` name."""
    file = default_file(cache_dir(directory))
    found = [_download(DEFAULT_MODEL, file)] if file.is_file() else []
    cache = hub_cache(directory)
    for path in cache.glob("models--*--*") if cache else ():
        found.append(_download(path.name.removeprefix("models--").replace("--", "/"), path))
    return sorted(found, key=lambda one: one.name.lower())


def find_download(model: str, directory: str | None = None) -> Download:
    """Returns a downloaded model; raises ModelNotFound if it is not there."""
    check_remote(model)
    found = next((one for one in downloads(directory) if one.name == model), None)
    if found is None:
        raise ModelNotFound(f"there is no downloaded model {model!r}: 'chairlift list' shows those that there are")
    return found


def delete_model(model: str, directory: str | None = None) -> None:
    """Deletes a downloaded model; raises ModelNotFound if it is not there."""
    find_download(model, directory).delete()


def check_remote(model: str) -> None:
    """Raises ModelNotFound if `model` is neither DEFAULT_MODEL nor a name of the hub."""
    if model != DEFAULT_MODEL and not is_hub_name(model):
        raise ModelNotFound(f"{model!r} is neither {DEFAULT_MODEL} nor a model of the Hugging Face hub (organisation/model)")


def is_hub_name(model: str) -> bool:
    """Whether `model` has the form of a name on the hub."""
    return _HUB_NAME.fullmatch(model) is not None and not model.startswith(".")


def hub_cache(directory: str | None = None) -> Path | None:
    """Returns the directory of hub models; None if it is the hub's own cache, and the package that knows its place is not installed."""
    if (named := hub_dir(directory)) is not None:
        return named
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    return Path(constants.HF_HUB_CACHE)


def _download(name: str, path: Path) -> Download:
    """Describes a file, or a model's directory of the hub's cache, where files of snapshots are links."""
    files = [one for one in path.rglob("*") if one.is_file() and not one.is_symlink()] if path.is_dir() else [path]
    facts = [one.stat() for one in files]
    modified = max((one.st_mtime for one in facts), default=path.stat().st_mtime)
    return Download(name, path, sum(one.st_size for one in facts), modified)
