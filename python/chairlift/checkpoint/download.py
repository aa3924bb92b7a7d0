"""Downloads files over HTTP with the standard library: waits for busy servers, resumes interrupted downloads, one process at a time."""

from __future__ import annotations

import contextlib
import email.utils
import errno
import fcntl
import hashlib
import http.client
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from chairlift.checkpoint.model_name import shown

TIMEOUT_SECONDS = 30
"""Longest wait for the server's next bytes."""
TRIES = 5
"""Requests in a row that may fail, or bring nothing, before a download fails."""
LONGEST_WAIT = 120.0
"""A server that asks for a longer pause, in seconds, is not waited for."""
_BUSY = (408, 429, 500, 502, 503, 504)
"""Status codes after which the same request may succeed."""

sleep = time.sleep


class Refused(ConnectionError):
    """A server's answer that another request will not change, or not soon.

    `code` is the hub's name of the error, `reason` the server's words, and `pause` the seconds that it asks to be left alone.
    """

    def __init__(self, message: str, status: int, code: str = "", reason: str = "", pause: float | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.reason, self.pause = status, code, reason, pause


class Answer:
    """A response whose body is not read yet, and what the servers on the way to it said about the file."""

    def __init__(self, response: http.client.HTTPResponse, linked_etag: str | None) -> None:
        self._response = response
        self.status, self.headers, self.url = response.status, response.headers, response.url
        self.linked_etag = linked_etag
        """The hub's name of the file, which it says as it redirects to the server that has it."""

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()

    def read(self, size: int) -> bytes:
        """Reads up to `size` bytes. Raises ConnectionError, because an OSError would be taken for one of the disk."""
        try:
            return self._response.read(size)
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(str(error) or type(error).__name__) from None

    @property
    def total(self) -> int | None:
        """The size of the whole file; None if the server does not say it."""
        text = self.headers.get("Content-Range", "").rpartition("/")[2] if self.status == 206 else self.headers.get("Content-Length", "")
        return int(text) if text.isdecimal() and len(text) < 20 else None

    @property
    def validator(self) -> str | None:
        """What tells this version of the file from others: its strong ETag, or the time of its last change."""
        etag: str | None = self.headers.get("ETag")
        return self.headers.get("Last-Modified") if etag is None or etag.startswith("W/") else etag


def opened(url: str, token: str | None = None, *, start: int = 0, validator: str | None = None) -> Answer:
    """Requests a file, from byte `start` on if it is still the version `validator`; the proxy is that of the environment.

    `token` is sent to no other server if this one redirects. Waits for a busy server. Raises ConnectionError, with the reason.
    """
    headers = {"Accept": "text/html, */*", "User-Agent": "chairlift"}
    if start:
        headers |= {"Range": f"bytes={start}-"} | ({"If-Range": validator} if validator else {})
    for attempt in range(TRIES):
        try:
            return _request(url, headers, token)
        except Refused as refusal:
            pause = 2.0**attempt if refusal.pause is None else refusal.pause
            if refusal.status not in _BUSY or pause > LONGEST_WAIT or attempt == TRIES - 1:
                raise
        sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def read_page(url: str, limit: int, token: str | None = None) -> tuple[bytes, Answer]:
    """Returns the body of a small answer, and the answer. Raises ConnectionError, also if the body is longer than `limit` bytes."""
    for attempt in range(TRIES):
        with opened(url, token) as answer:
            try:
                data = answer.read(limit + 1)
            except ConnectionError:
                data = b""
        if len(data) > limit:
            raise Refused(f"{shown(url)} is answered with more than {limit:,} bytes", answer.status)
        if data and answer.total in (None, len(data)):
            return data, answer
        sleep(2.0**attempt - 1)
    raise ConnectionError(f"{shown(url)} is never answered completely")


def _request(url: str, headers: dict[str, str], token: str | None) -> Answer:
    redirects = _Redirects()
    try:
        request = urllib.request.Request(url, headers=headers)
        if token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        response = urllib.request.build_opener(redirects).open(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            code, reason = (error.headers.get(f"X-Error-{name}", "") for name in ("Code", "Message"))
            message = f"{shown(url)} is answered with {error.code} {error.reason}"
            raise Refused(message, error.code, code, reason, _pause(error.headers)) from None
    except Refused:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConnectionError(str(getattr(error, "reason", error)) or type(error).__name__) from None
    return Answer(response, redirects.linked_etag or response.headers.get("X-Linked-Etag"))


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects. The token goes only to the server that was asked, and nothing leaves an encrypted connection."""

    def __init__(self) -> None:
        self.linked_etag: str | None = None

    def redirect_request(self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if new.scheme not in ("https", old.scheme):
            raise Refused(f"{shown(req.full_url)} redirects to {shown(newurl)}, which is not encrypted", code)
        self.linked_etag = headers.get("X-Linked-Etag") or self.linked_etag
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and new[:2] == old[:2] and (token := req.unredirected_hdrs.get("Authorization")):
            request.add_unredirected_header("Authorization", token)
        return request


def _pause(headers: Any) -> float | None:
    """Returns the seconds until a busy server wants to be asked again; None if it does not say."""
    after: str = headers.get("Retry-After", "")
    if after.isdecimal():
        return float(after)
    with contextlib.suppress(ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(after).timestamp() - time.time())
    window = re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))
    return float(window[1]) if window else None


@contextlib.contextmanager
def partial_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file of the first bytes of a download, to append to; other processes wait. It is removed at the end if it is empty."""
    while True:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, path):
                continue  # another process has completed or removed it meanwhile
            try:
                yield file
            finally:
                file.flush()
                if not os.fstat(file.fileno()).st_size and _is_at(file, path):
                    path.unlink()
            return


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def empty(part: IO[bytes]) -> None:
    """Removes what was downloaded."""
    part.seek(0)
    part.truncate()


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_space(directory: Path, num_bytes: int) -> None:
    """Raises an OSError if the disk of `directory` has less space."""
    if shutil.disk_usage(directory).free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def download(
    url: str, part: IO[bytes], size: int, on_bytes: Callable[[int], None], token: str | None = None, validator: str | None = None
) -> str | None:
    """Appends to `part`, which has the first bytes, the rest of a file of `size` bytes. Returns the hub's name of the file, if any.

    Calls on_bytes(bytes so far). A lost connection is opened again as long as there is progress. Raises ConnectionError with the reason;
    an OSError of another kind is one of the disk.
    """
    linked_etag, attempt = None, 0
    part.seek(0, os.SEEK_END)
    if part.tell() > size:
        empty(part)
    on_bytes(part.tell())
    while (start := part.tell()) < size:
        try:
            linked_etag = _append(url, part, size, on_bytes, token, validator)
        except Refused:
            raise
        except ConnectionError:
            attempt = 0 if part.tell() > start else attempt + 1
            if attempt == TRIES:
                raise
            sleep(2.0**attempt - 1)
    return linked_etag


def _append(url: str, part: IO[bytes], size: int, on_bytes: Callable[[int], None], token: str | None, validator: str | None) -> str | None:
    """Appends what the server sends beyond the end of `part`. Raises ConnectionError."""
    with opened(url, token, start=part.tell(), validator=validator) as answer:
        if answer.total not in (None, size):
            raise Refused(f"{shown(url)} has {answer.total:,} bytes, not {size:,}", answer.status)
        if answer.status != 206:  # the server does not resume
            empty(part)
        elif not answer.headers.get("Content-Range", expected := f"bytes {part.tell()}-").startswith(expected):
            raise Refused(f"{shown(url)} is answered with another part of the file than was asked for", answer.status)
        elif validator is not None and answer.validator not in (None, validator):  # the server does not know If-Range
            empty(part)
            raise ConnectionError(f"{shown(url)} changed during the download")
        on_bytes(part.tell())
        while data := answer.read(min(1 << 20, size - part.tell())):
            part.write(data)
            part.flush()
            on_bytes(part.tell())
    if part.tell() < size:
        raise ConnectionError(f"the connection ended after {part.tell()} of {size} bytes")
    return answer.linked_etag
