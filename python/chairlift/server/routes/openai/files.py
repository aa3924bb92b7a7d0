"""/v1/files: uploads for batches, and the outputs of batches."""

from __future__ import annotations

import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import brief
from chairlift.server.errors import ApiError
from chairlift.server.http.multipart import read_form
from chairlift.server.http.responses import Json, Pieces
from chairlift.server.service import service_of

logger = logging.getLogger(__name__)

LIFETIMES = (3600, 2_592_000)
"""Shortest and longest lifetime of a file that has one, in seconds."""

_MAX_FILENAME = 255
_MAX_PAGE = 10_000


async def create_file(request: Request) -> Response:
    """Stores an upload."""
    request.state.ticket.admit(queued=False)
    files, bodies = service_of(request).data.files, request.app.state.bodies
    upload = await files.begin(request.state.tenant)
    try:
        async with bodies.arriving(request.state.ticket.tenant.group) as body:

            async def write(piece: bytes) -> None:
                await upload.write(piece)
                bodies.resize(body, upload.buffered)

            form = await read_form(request, write)
        if (purpose := form.fields.get("purpose")) != "batch":
            raise ApiError(400, f"purpose must be 'batch', the only use of files here, got {brief(purpose)}", param="purpose")
        filename = form.filename or "upload"
        if len(filename) > _MAX_FILENAME:
            raise ApiError(400, f"the file's name is longer than {_MAX_FILENAME} characters", param="file")
        anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        lifetime = None
        if anchor is not None or seconds is not None:
            lifetime = check_lifetime(
                "expires_after", anchor, int(seconds) if seconds and seconds.isdecimal() and len(seconds) < 10 else seconds
            )
        return Json((await upload.finish(filename, purpose, lifetime)).json())
    except OSError as error:
        logger.error("an upload failed: %s", error)
        message = (
            "the file could not be stored: delete files of /v1/files, or free space where --data-dir is; the server's log has the reason"
        )
        raise ApiError(507, message, type="server_error", code="insufficient_storage") from None
    finally:
        await upload.discard()


async def list_files(request: Request) -> Response:
    """Lists the tenant's files, newest first."""
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be 'asc' or 'desc', got {brief(order)}", param="order")
    limit = page_size(query.get("limit"), _MAX_PAGE, _MAX_PAGE)
    files = service_of(request).data.files
    page, more = await files.page(request.state.tenant, query.get("purpose"), query.get("after"), limit, order == "desc")
    return page_of([file.json() for file in page], more)


async def get_file(request: Request) -> Response:
    """Returns a file's description."""
    return Json((await service_of(request).data.files.get(request.state.tenant, request.path_params["id"])).json())


async def delete_file(request: Request) -> Response:
    """Deletes a file."""
    id = request.path_params["id"]
    await service_of(request).data.files.delete(request.state.tenant, id)
    return Json({"id": id, "object": "file", "deleted": True})


async def file_content(request: Request) -> Response:
    """Returns a file's bytes."""
    request.state.ticket.admit(queued=False)
    files = service_of(request).data.files
    file = await files.get(request.state.tenant, request.path_params["id"])
    # Never shown as a page of this server: the bytes are a client's.
    headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
    return Pieces(files.content(file), file.bytes, "application/octet-stream", headers)


def page_size(text: str | None, default: int, most: int) -> int:
    """Returns the query's `limit`; raises ApiError."""
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 6 and 1 <= int(text) <= most):
        raise ApiError(400, f"limit must be a number from 1 to {most}, got {brief(text)}", param="limit")
    return int(text)


def page_of(entries: list[dict[str, Any]], more: bool) -> Response:
    """Returns a page of OpenAI's lists."""
    first, last = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    return Json({"object": "list", "data": entries, "first_id": first, "last_id": last, "has_more": more})


def check_lifetime(name: str, anchor: object, seconds: object) -> int:
    """Returns the seconds of an expiration policy; raises ApiError."""
    least, most = LIFETIMES
    if anchor != "created_at" or type(seconds) is not int or not least <= seconds <= most:
        raise ApiError(400, f"{name} needs anchor 'created_at' and seconds from {least} to {most}", param=name)
    return seconds
