"""/v1/batches."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from chairlift.engine.validation import check_embeds
from chairlift.errors import InvalidRequest, brief
from chairlift.server.batch.input import ENDPOINTS
from chairlift.server.errors import ApiError
from chairlift.server.http.body import read_fields
from chairlift.server.http.responses import Json, ignored_header
from chairlift.server.routes.openai.files import check_lifetime, page_of, page_size
from chairlift.server.schema.fields import Fields
from chairlift.server.service import service_of


class ExpiresAfter(BaseModel, strict=True):
    """When the output files of a batch expire."""

    anchor: str
    seconds: int


class BatchCreateRequest(Fields):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = (
        None
    )
    output_expires_after: ExpiresAfter | None = None


async def create_batch(request: Request) -> Response:
    """Creates a batch of an uploaded file."""
    service = service_of(request)
    storage = service.data
    body, ignored = await read_fields(request, BatchCreateRequest, queued=False, computes=False)
    if body.endpoint == "/v1/embeddings" and len(service.models) == 1:
        check_embeds((await service.use(request, None)).engine.info)
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}, got {brief(body.endpoint)}", param="endpoint")
    if body.completion_window != "24h":
        raise InvalidRequest(f"completion_window must be '24h', got {brief(body.completion_window)}", param="completion_window")
    expires = body.output_expires_after
    lifetime = None if expires is None else check_lifetime("output_expires_after", expires.anchor, expires.seconds)
    tenant = request.state.tenant
    try:
        file = await storage.files.get(tenant, body.input_file_id)
    except ApiError as error:
        raise ApiError(404, str(error), param="input_file_id", code="file_not_found") from None
    if file.purpose != "batch":
        raise InvalidRequest(f"the file's purpose is {file.purpose!r}, a batch needs 'batch'", param="input_file_id")
    batch = await storage.batches.create(tenant, file.id, body.endpoint, body.metadata, lifetime)
    return Json(batch.json(), headers=ignored_header(ignored))


async def list_batches(request: Request) -> Response:
    """Lists the tenant's batches, newest first."""
    query = request.query_params
    limit = page_size(query.get("limit"), 20, 100)
    page, more = await service_of(request).data.batches.page(request.state.tenant, query.get("after"), limit)
    return page_of([batch.json() for batch in page], more)


async def get_batch(request: Request) -> Response:
    """Returns a batch."""
    return Json((await service_of(request).data.batches.get(request.state.tenant, request.path_params["id"])).json())


async def cancel_batch(request: Request) -> Response:
    """Cancels a batch. Its finished requests stay in the output."""
    return Json((await service_of(request).data.batches.cancel(request.state.tenant, request.path_params["id"])).json())
