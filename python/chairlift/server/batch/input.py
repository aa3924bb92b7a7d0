"""Reads and checks a batch's input: one JSON object in each line."""

from __future__ import annotations

import asyncio
import hashlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from chairlift.errors import brief
from chairlift.server.http.body import MAX_VALUES, has_too_many_values
from chairlift.server.storage.batches import BatchRequest, Status
from chairlift.server.storage.storage import Storage

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""The routes that a batch can use."""

MAX_REQUESTS = 50_000
"""OpenAI's limit of a batch."""

_MAX_CUSTOM_ID = 512
_MAX_ERRORS = 100
"""Faults that are reported of one input."""


class InputError(Exception):
    """A fault of one line, or of the input as a whole."""

    def __init__(self, code: str, message: str, param: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.fields = {"code": code, "message": message, "param": param, "line": line}


def read_input(path: Path, endpoint: str | None, max_line: int) -> tuple[list[BatchRequest], list[dict[str, Any]]]:
    """Returns an input's requests and OpenAI's error objects; the input is valid if there are none. Empty lines do not count.

    Without `endpoint`, the requests may use any of `ENDPOINTS`. A line may have `max_line` bytes. Raises OSError.
    """
    requests: list[BatchRequest] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    with path.open("rb") as stream:
        for number, start, text in _lines(stream, max_line):
            try:
                if len(requests) == MAX_REQUESTS:
                    raise InputError("too_many_requests", f"a batch may have {MAX_REQUESTS} requests")
                if len(text) > max_line:
                    raise InputError(
                        "line_too_long", f"the line is longer than {max_line} bytes, the server's --max-body-size", line=number
                    )
                custom_id = _check(text, endpoint, number)
                if custom_id in seen:
                    message = f"the custom_id {brief(custom_id)} is there twice"
                    raise InputError("duplicate_custom_id", message, "custom_id", number)
            except InputError as error:
                errors.append(error.fields)
                if len(errors) == _MAX_ERRORS or len(requests) == MAX_REQUESTS:
                    break
            else:
                seen.add(custom_id)
                requests.append(BatchRequest(number, custom_id, start, len(text)))
    if not requests and not errors:
        errors.append(InputError("empty_file", "the input has no requests").fields)
    return requests, errors


def read_request(path: Path, request: BatchRequest) -> tuple[str, dict[str, Any]]:
    """Returns the route and the body of a request that `read_input` has checked."""
    with path.open("rb") as stream:
        stream.seek(request.start)
        fields = from_json(stream.read(request.length), allow_inf_nan=False)
    return fields["url"], fields["body"]


def _lines(stream: BinaryIO, max_line: int) -> Iterator[tuple[int, int, bytes]]:
    """Yields each line's number, position and text. Of a line that is too long, only the beginning is read into memory."""
    number = start = 0
    while text := stream.readline(max_line + 1):
        number += 1
        length = len(text)
        mark = len(BOM_UTF8) if number == 1 and text.startswith(BOM_UTF8) else 0  # some editors put it before the text
        if text[mark:].strip():
            yield number, start + mark, text[mark:]
        while not text.endswith(b"\n") and (text := stream.readline(1 << 20)):
            length += len(text)
        start += length


def _check(text: bytes, endpoint: str | None, line: int) -> str:
    """Returns a line's custom_id; raises InputError."""
    if has_too_many_values(text):
        raise InputError("invalid_json_line", f"the line has more than {MAX_VALUES} objects, arrays and fields", line=line)
    try:
        fields = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InputError("invalid_json_line", f"the line is not valid JSON: {error}", line=line) from None
    if not isinstance(fields, dict):
        raise InputError("invalid_json_line", "the line must be a JSON object", line=line)
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID or not custom_id.isprintable():
        message = f"custom_id must be a string of 1 to {_MAX_CUSTOM_ID} printable characters, got {brief(custom_id)}"
        raise InputError("invalid_custom_id", message, "custom_id", line)
    if fields.get("method") != "POST":
        raise InputError("invalid_method", f"method must be 'POST', got {brief(fields.get('method'))}", "method", line)
    urls = ENDPOINTS if endpoint is None else (endpoint,)
    if fields.get("url") not in urls:
        raise InputError("invalid_url", f"url must be {' or '.join(map(repr, urls))}, got {brief(fields.get('url'))}", "url", line)
    if not isinstance(fields.get("body"), dict):
        raise InputError("invalid_body", f"body must be a JSON object, got {brief(fields.get('body'))}", "body", line)
    return custom_id


async def import_input(storage: Storage, path: Path, model: str) -> str:
    """Makes a batch of the file at `path` and returns its id.

    If the storage has a batch of the same content for the same model that was interrupted or is complete, returns that one.
    """
    with path.open("rb") as stream:
        digest = (await asyncio.to_thread(hashlib.file_digest, stream, "sha256")).hexdigest()
        metadata = {"sha256": digest, "model": model}
        page, _ = await storage.batches.page("", None, 100)
        for batch in page:
            if batch.fields["metadata"] == metadata and batch.status not in (Status.FAILED, Status.CANCELLED, Status.EXPIRED):
                return batch.id
        stream.seek(0)
        upload = await storage.files.begin("")
        try:
            while data := await asyncio.to_thread(stream.read, 1 << 20):
                await upload.write(data)
            file = await upload.finish(path.name, "batch", None)
        finally:
            await upload.discard()
    return (await storage.batches.create("", file.id, None, metadata, None, window=None)).id
