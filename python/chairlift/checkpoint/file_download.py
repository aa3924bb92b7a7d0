"""Downloads the GGUF file of an address, with its parts, into the cache."""

from __future__ import annotations

import hashlib
import json
import os
import re
import urllib.parse
from pathlib import Path

from chairlift.checkpoint.cache import writing_to
from chairlift.checkpoint.download import Refused, check_space, download, empty, opened, partial_file, sha256_of
from chairlift.checkpoint.file_address import SOURCE, address_dir
from chairlift.checkpoint.gguf_parts import is_gguf, parts_of
from chairlift.checkpoint.model_name import FileAddress, shown
from chairlift.checkpoint.progress import Progress, download_bar
from chairlift.errors import ModelNotFound


def download_file(address: FileAddress, cache: Path, progress: Progress) -> Path:
    """Returns the file of an address, the first part of a split one, after downloading what is missing or newer there.

    An interrupted download goes on if the server still has the same version. Raises ModelNotFound, or ChairliftError if the disk is full.
    """
    parts = parts_of(address_dir(address, cache) / address.name)
    with writing_to(cache):
        parts[0].parent.mkdir(parents=True, exist_ok=True)
        _note(parts[0].parent, address, {})  # now, so that 'chairlift list' and 'rm' know an interrupted download too
        for part in parts:
            split = urllib.parse.urlsplit(address.url)
            path = split.path.rpartition("/")[0] + "/" + urllib.parse.quote(part.name)
            url = urllib.parse.urlunsplit(split._replace(path=path))
            try:
                _note(part.parent, address, {part.name: _fetch(url, part, progress)})
            except ConnectionError as error:
                reason = str(error) if isinstance(error, Refused) else f"{shown(url)} cannot be downloaded: {error}"
                raise ModelNotFound(reason) from None
    return parts[0]


def _fetch(url: str, target: Path, progress: Progress) -> str | None:
    """Downloads one file unless this version of it is there; returns the version. Raises ConnectionError and ModelNotFound."""
    with opened(url) as answer:
        size, version = answer.total, answer.validator
    if size is None:
        raise ModelNotFound(f"{shown(url)} cannot be downloaded: the server does not say how large the file is")
    name = hashlib.sha256((version or "").encode()).hexdigest()[:12]
    with partial_file(target.with_name(f".{target.name}.{name}.part")) as part:
        if target.is_file() and (target.stat().st_size, _versions(target.parent).get(target.name)) == (size, version):
            return version
        if version is None:
            empty(part)  # nothing tells whether the file is still the same
        check_space(target.parent, size - part.tell())
        with download_bar(target.name, size, progress) as set_done:
            digest = (download(url, part, size, set_done, validator=version) or "").strip('"')
        begun = Path(part.name)
        if not is_gguf(begun):
            empty(part)
            raise ModelNotFound(f"{shown(url)} is no GGUF file")
        if re.fullmatch(r"[0-9a-f]{64}", digest) and digest != sha256_of(begun):
            empty(part)
            raise ModelNotFound(f"{shown(url)} as downloaded is not the file that its server names (its digest differs)")
        os.fsync(part.fileno())
        os.replace(begun, target)
    return version


def _note(directory: Path, address: FileAddress, versions: dict[str, str | None]) -> None:
    """Writes down the address of the files of a directory, and the versions of some."""
    source = {"url": str(address), "versions": {**_versions(directory), **versions}}
    (directory / SOURCE).write_text(json.dumps(source) + "\n")


def _versions(directory: Path) -> dict[str, str | None]:
    """Returns the versions of the downloaded files by name."""
    try:
        versions: dict[str, str | None] = json.loads((directory / SOURCE).read_text())["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return versions
