"""Reads a multipart form with one file, which goes to the disk while it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from chairlift.errors import brief
from chairlift.server.errors import ApiError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

IDLE_SECONDS = 20
"""Seconds without a byte after which an upload fails."""

_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 4096
_MAX_HEADER_BYTES = 8192


@dataclass(slots=True)
class Form:
    """The fields of a form, and the name of its file."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


async def read_form(request: Request, write: Callable[[bytes], Awaitable[None]]) -> Form:
    """Reads the form and passes the content of the part `file` to `write`; raises ApiError and Starlette's ClientDisconnect."""
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    media_type, options = parse_options_header(request.headers.get("content-type", ""))
    if media_type != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError(415, "send the file as multipart/form-data, in the part 'file'", code="unsupported_media_type")
    form = _FormReader()
    try:
        parser = MultipartParser(options[b"boundary"], form.callbacks())
        stream = aiter(request.stream())
        while True:
            async with asyncio.timeout(IDLE_SECONDS):
                data = await anext(stream, None)
            if data is None:
                break
            parser.write(data)
            for piece in form.take():
                await write(piece)
    except TimeoutError:
        message = f"no byte of the file arrived for {IDLE_SECONDS} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None
    except FormParserError as error:
        raise _malformed(str(error)) from None
    if not form.complete:
        raise _malformed("it ends before its last boundary")
    if form.form.filename is None:
        raise ApiError(400, "the form has no part 'file' with a filename", param="file")
    return form.form


class _FormReader:
    """Callbacks of the parser, which collect the fields and the pieces of the file."""

    def __init__(self) -> None:
        self.form = Form()
        self.complete = False
        self._pieces: list[bytes] = []
        self._header = bytearray()
        self._value = bytearray()
        self._header_bytes = 0
        self._disposition = b""
        self._name = ""
        self._field = bytearray()
        self._is_file = False

    def callbacks(self) -> MultipartCallbacks:
        """Returns the callbacks by python-multipart's names."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._complete,
        }

    def take(self) -> list[bytes]:
        """Returns the file's pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _begin(self) -> None:
        self._header_bytes, self._disposition, self._field, self._is_file = 0, b"", bytearray(), False

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._value += data[start:end]

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise _malformed("the headers of a part are too long")

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _headers_finished(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if b"filename" in options:
            if self._name != "file" or self.form.filename is not None:
                raise ApiError(400, f"the form has an unexpected file {brief(self._name)}: send one, named 'file'", param="file")
            self._is_file = True
            self.form.filename = options[b"filename"].decode(errors="replace")
        elif not self._name or self._name in self.form.fields or len(self.form.fields) == _MAX_FIELDS:
            raise _malformed(f"a part without a name, a second {brief(self._name)}, or more than {_MAX_FIELDS} parts")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(data[start:end])
            return
        self._field += data[start:end]
        if len(self._field) > _MAX_FIELD_BYTES:
            raise ApiError(400, f"{brief(self._name)} is longer than {_MAX_FIELD_BYTES} bytes", param=self._name)

    def _end(self) -> None:
        if not self._is_file:
            self.form.fields[self._name] = self._field.decode(errors="replace")

    def _complete(self) -> None:
        self.complete = True


def _malformed(reason: str) -> ApiError:
    # The rest of the body stays unread, so the connection cannot be reused.
    return ApiError(400, f"the form is malformed: {reason}", code="invalid_form", headers={"connection": "close"})
