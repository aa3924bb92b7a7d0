"""Downloads a file of a package index (PyPI) with the standard library. Resumes interrupted downloads."""

from __future__ import annotations

import html
import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import IO

INDEX = "https://pypi.org/simple"
"""The package index, unless $PIP_INDEX_URL names another."""
TIMEOUT_SECONDS = 30
"""Longest wait for the server's next bytes."""


def download(package: str, name: str, size: int, part: IO[bytes], on_bytes: Callable[[int], None]) -> None:
    """Appends to `part`, which has the first bytes, the rest of the package's file `name` of `size` bytes.

    Calls on_bytes(bytes so far). A lost connection is opened again as long as there is progress. Raises ConnectionError with the host and
    the reason; an OSError of another kind is one of the disk.
    """
    index = os.environ.get("PIP_INDEX_URL", INDEX).rstrip("/")
    try:
        url = _file_url(f"{index}/{package}/", name)
        while (start := part.tell()) < size:
            try:
                _append(url, size, part, on_bytes)
            except ConnectionError:
                if part.tell() == start:
                    raise
    except ConnectionError as error:
        raise ConnectionError(f"{urllib.parse.urlsplit(index).hostname}: {error}") from None


def _file_url(page: str, name: str) -> str:
    """Returns a file's address from the package's page in an index (PEP 503)."""
    with _opened(page) as response:
        text = _read(response).decode(errors="replace")
    for link in re.findall(r'href="([^"]+)"', text):
        url = urllib.parse.urljoin(response.url, html.unescape(link))
        if urllib.parse.urlsplit(url).path.endswith(f"/{name}"):
            return url
    raise ConnectionError(f"it has no {name}")


def _append(url: str, size: int, part: IO[bytes], on_bytes: Callable[[int], None]) -> None:
    """Appends what the server has beyond the end of `part`. Raises ConnectionError."""
    with _opened(url, part.tell()) as response:
        if response.status != 206:  # the server does not resume
            part.truncate(0)
            part.seek(0)
        on_bytes(part.tell())
        while data := _read(response, 1 << 20):
            part.write(data)
            part.flush()
            on_bytes(part.tell())
    if part.tell() < size:
        raise ConnectionError(f"the connection ended after {part.tell()} of {size} bytes")


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
