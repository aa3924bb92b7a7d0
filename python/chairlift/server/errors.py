"""Every refusal and failure as OpenAI's error envelope."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import DeadlineMissed, EngineClosed, EngineDead, InvalidRequest, OutOfMemory, QueueFull, RequestFailed
from chairlift.server.refusals import Refusal
from chairlift.server.usage import Usage

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 60


def brief(value: object) -> str:
    """Shows what a client sent in at most about 60 characters a piece, so that no answer is longer than its question."""
    return _brief.repr(value)[:100]


class ApiError(Exception):
    """An answer other than success: `status`, the envelope's four fields, and the tokens that it took all the same."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        usage: Usage | None = None,
        taken: bool = False,
    ) -> None:
        """`taken` if the request had been let in: then it was not turned away, but failed."""
        super().__init__(message)
        self.status = status
        self._taken = taken
        self.envelope: dict[str, Any] = {"error": {"message": message, "type": type, "param": param, "code": code}}
        if usage is not None:
            self.envelope["usage"] = usage.json()
        self.headers = dict(headers or {})

    @property
    def reason(self) -> str | None:
        """Why a request was turned away, as the metrics count it; None if it was not, but failed."""
        if self._taken:
            return None
        known = _CODES.get(self.envelope["error"]["code"]) or _STATUSES.get(self.status)
        return known or ("invalid" if 400 <= self.status < 500 else None)

    def response(self) -> Response:
        """The HTTP response that carries it."""
        return Response(json.dumps(self.envelope), self.status, self.headers, "application/json")


_CODES = {"queue_full": "queue_full", "shutting_down": "draining"}
_CODES |= dict.fromkeys(("not_ready", "engine_dead", "engine_stuck"), "not_ready")
_STATUSES = {401: "unauthorized", 403: "unauthorized", 413: "too_large", 429: "tenant_limit", 431: "too_large"}


class MessagesError(ApiError):
    """The same in Anthropic's envelope."""

    def __init__(self, error: ApiError) -> None:
        told = error.envelope["error"]
        super().__init__(error.status, told["message"], param=told["param"], code=told["code"], headers=error.headers)
        kind = _ANTHROPIC.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        self.envelope = {"type": "error", "error": told | {"type": kind}}


_ANTHROPIC = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_ANTHROPIC |= {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}


def shaped(error: ApiError, path: str) -> ApiError:
    """The error in the envelope that clients of the route at `path` read."""
    return MessagesError(error) if path.startswith("/v1/messages") else error


_ROUTES = "GET /openapi.json lists all routes. The base URL ends with /v1 for OpenAI's clients, and without it for Anthropic's"


def unavailable(message: str, code: str, retry_after: int, *, taken: bool = False) -> ApiError:
    """503: the server cannot serve now; the client may come back after `retry_after` seconds. See `ApiError` for `taken`."""
    return ApiError(503, message, type="server_error", code=code, headers={"retry-after": str(retry_after)}, taken=taken)


def api_error(error: Exception, asked: str = "the request") -> ApiError:
    """Says `error` to a client; what was not raised on purpose is told as an internal error, without its text.

    `asked` is the method and path, for a route that does not exist.
    """
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case EngineClosed():
            return unavailable("the server is shutting down, and the answer was not finished in time", "shutting_down", 5)
        case EngineDead():
            # Its text may quote what the process said as it died, which is for the log.
            return unavailable("the engine has stopped; the server's log has the reason", "engine_dead", 5)
        case QueueFull():
            return unavailable(str(error), "queue_full", max(1, math.ceil(error.retry_after)))
        case DeadlineMissed():
            usage = Usage(error.prompt_tokens, error.completion_tokens)
            # OpenAI's clients would try again by themselves, and whoever waited has gone.
            headers = {"x-should-retry": "false"}
            return ApiError(504, str(error), type="timeout_error", code="deadline_exceeded", headers=headers, usage=usage)
        case OutOfMemory():
            return unavailable(str(error), "out_of_memory", 5)
        case RequestFailed():
            return ApiError(500, str(error), type="server_error", code="request_failed")
        case HTTPException(status_code=404):
            return ApiError(404, f"{asked}: no such route. {_ROUTES}", code="not_found")
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "another method")
            return ApiError(405, f"{asked}: this route takes {allowed}", code="method_not_allowed", headers=error.headers)
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
    return ApiError(500, "internal error; the server's log has the details", type="server_error", code="internal_error")


async def respond(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for all of the above."""
    refusal = api_error(error, brief(f"{request.method} {request.url.path}")[1:-1])
    # Probes are told no without being turned away, and a full queue of the engine's the engine counts.
    if request.method == "POST" and refusal.reason is not None and not isinstance(error, QueueFull):
        request.app.state.service.metrics.rejected(refusal.reason)
    if request.method == "POST" and refusal.reason is not None and "context" in request.scope.get("state", {}):
        refused = Refusal(refusal.status, refusal.envelope["error"])
        request.app.state.service.refusals.add(request.state.tenant, request.state.context.request_id, refused)
    return shaped(refusal, request.url.path).response()


HANDLERS: dict[Any, Any] = dict.fromkeys(
    (ApiError, InvalidRequest, QueueFull, DeadlineMissed, EngineDead, OutOfMemory, RequestFailed, HTTPException, Exception), respond
)
