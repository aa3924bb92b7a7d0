"""POST /v1/embeddings, which a model that generates text does not answer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import InvalidRequest
from chairlift.server.service import service_of


async def embeddings(request: Request) -> Response:
    """Says that there are none here, whatever the request; raises InvalidRequest."""
    model = service_of(request).model
    raise InvalidRequest(
        f"{model!r} generates text and gives no embeddings: send this to a server that has an embedding model",
        param="model",
        code="unsupported",
    )
