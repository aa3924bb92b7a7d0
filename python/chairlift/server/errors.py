"""API errors in OpenAI's and Anthropic's formats."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from chairlift.errors import (
    ContextExceeded,
    DeadlineMissed,
    EngineClosed,
    EngineDead,
    InvalidRequest,
    OutOfMemory,
    QueueFull,
    RequestFailed,
    SequenceBusy,
    SequenceDropped,
    TooManySequences,
    WaitTooLong,
    brief,
)
from chairlift.server.registry import Refusal
from chairlift.server.usage import Usage


class ApiError(Exception):
    """An error response: its `status`, OpenAI's error object, and the tokens used."""

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
        admitted: bool = False,
        exceeded: ContextExceeded | None = None,
    ) -> None:
        """`admitted` marks the failure of a request that had been accepted: it does not count as rejected.

        `exceeded` is the cause, if the context is too short.
        """
        super().__init__(message)
        self.status = status
        self.exceeded = exceeded
        self._admitted = admitted
        self.envelope: dict[str, Any] = {"error": {"message": message, "type": type, "param": param, "code": code}}
        if usage is not None:
            self.envelope["usage"] = usage.json()
        self.headers = dict(headers or {})

    @property
    def rejection_reason(self) -> str | None:
        """Why the request was rejected, as a label of the metrics; None for an accepted request that failed."""
        if self._admitted:
            return None
        reason = _CODES.get(self.envelope["error"]["code"]) or _STATUSES.get(self.status)
        return reason or ("invalid" if 400 <= self.status < 500 else None)

    def refusal(self) -> Refusal:
        """Returns what explanations say of a request that was refused with it."""
        return Refusal.of(self.status, self.envelope["error"])

    def in_format(self, envelope: dict[str, Any]) -> ApiError:
        """Returns the same error in another API's format."""
        error = ApiError(self.status, str(self), headers=self.headers)
        error.envelope = envelope
        return error

    def response(self) -> Response:
        """Returns the HTTP response."""
        return Response(json.dumps(self.envelope), self.status, self.headers, "application/json")


_CODES = {"queue_full": "queue_full", "shutting_down": "draining"}
_CODES |= dict.fromkeys(("not_ready", "engine_dead", "engine_stuck", "model_load_failed"), "not_ready")
_STATUSES = {401: "unauthorized", 403: "unauthorized", 413: "too_large", 429: "tenant_limit", 431: "too_large"}


_ANTHROPIC = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_ANTHROPIC |= {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}


def _context_words(error: ContextExceeded, path: str) -> str:
    """Returns the words of the API at `path` for a prompt that is too long: clients recognize them, and shorten the conversation."""
    limit, prompt, answer = error.limit, error.prompt, error.answer
    if path.startswith("/v1/messages"):
        return f"prompt is too long: {prompt} tokens > {min(limit, prompt - 1)} maximum"
    if path.startswith("/v1/responses"):
        return f"Your input exceeds the context window of this model. Please adjust your input and try again. {error}"
    if path.startswith("/api/embed"):
        return f"the input length exceeds the context length of {limit} tokens"
    if path.startswith("/api/"):
        return f"prompt too long; exceeded max context length by {prompt + answer - limit} tokens"
    if path.startswith("/v1/chat/"):
        return str(error).replace("the prompt has", "the messages have").replace("the prompt", "the messages")
    return str(error)


SHARED_PATHS = ("/v1/models", "/v1/files")
"""How the paths begin that OpenAI's and Anthropic's APIs share."""


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's API, whose clients send the header `anthropic-version`."""
    path = scope["path"]
    return path.startswith("/v1/messages") or (
        path.startswith(SHARED_PATHS) and any(name == b"anthropic-version" for name, _ in scope["headers"])
    )


def for_route(error: ApiError, scope: Scope) -> ApiError:
    """Returns the error in the format of the API of a request. On the admin socket requests have no id."""
    path, fields = scope["path"], error.envelope["error"]
    if error.exceeded is not None:
        fields["message"] = _context_words(error.exceeded, path)
    if is_anthropic(scope):
        context = scope.get("state", {}).get("context")
        kind = _ANTHROPIC.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return error.in_format({"type": "error", "error": fields | {"type": kind}, "request_id": context and context.request_id})
    return error.in_format({"error": fields["message"]}) if path.startswith("/api/") else error


_ROUTES = "GET /openapi.json lists all routes. The base URL ends with /v1 for OpenAI's clients, and without it for Anthropic's"


@contextmanager
def renamed_params(**names: str) -> Iterator[None]:
    """Puts the client's names of fields, by the engine's, into an InvalidRequest."""
    try:
        yield
    except InvalidRequest as error:
        error.param = names.get(error.param or "", error.param)
        raise


def unavailable(message: str, code: str, retry_after: float, *, admitted: bool = False) -> ApiError:
    """A 503 error that asks the client to retry after `retry_after` seconds. See `ApiError` for `admitted`."""
    return ApiError(503, message, type="server_error", code=code, headers=_retry_after(retry_after), admitted=admitted)


def too_many(message: str, code: str | None, retry_after: float | None, *, param: str | None = None, admitted: bool = False) -> ApiError:
    """A 429 error that asks the client to retry after `retry_after` seconds, if they are known. See `ApiError` for `admitted`."""
    headers = None if retry_after is None else _retry_after(retry_after)
    return ApiError(429, message, type="rate_limit_error", param=param, code=code, headers=headers, admitted=admitted)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(whole_seconds(seconds))}


def whole_seconds(seconds: float) -> int:
    """Rounds a wait up to seconds, of which headers have at least one."""
    return max(1, math.ceil(seconds))


def api_error(error: Exception, route: str = "the request") -> ApiError:
    """Converts an exception to an API error; the text of an unexpected exception is not shown to clients.

    `route` is the method and path, for a route that does not exist.
    """
    match error:
        case ApiError():
            return error
        case SequenceDropped():
            return ApiError(410, str(error), param=error.param, code=error.code)
        case SequenceBusy():
            return ApiError(409, str(error), param=error.param, code=error.code)
        case TooManySequences():
            return too_many(str(error), error.code, error.retry_after, param=error.param)
        case InvalidRequest():
            exceeded = error if isinstance(error, ContextExceeded) else None
            return ApiError(400, str(error), param=error.param, code=error.code, exceeded=exceeded)
        case EngineClosed():
            return unavailable("the server is shutting down, and the answer was not finished in time", "shutting_down", 5)
        case EngineDead():
            # The text may quote the process's last output, which belongs in the log only.
            return unavailable("the engine has stopped; the server's log has the reason", "engine_dead", 5)
        case QueueFull():
            return unavailable(str(error), "queue_full", error.retry_after)
        case WaitTooLong():
            return too_many(str(error), "session_wait", error.retry_after, admitted=True)
        case DeadlineMissed():
            usage = Usage(error.prompt_tokens, error.completion_tokens)
            # OpenAI's clients would retry by themselves, although the deadline has passed.
            headers = {"x-should-retry": "false"}
            return ApiError(504, str(error), type="timeout_error", code="deadline_exceeded", headers=headers, usage=usage)
        case OutOfMemory():
            return unavailable(str(error), "out_of_memory", 5)
        case RequestFailed():
            return ApiError(500, str(error), type="server_error", code="request_failed")
        case HTTPException(status_code=404):
            return ApiError(404, f"{route}: no such route. {_ROUTES}", code="not_found")
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "another method")
            return ApiError(405, f"{route}: this route takes {allowed}", code="method_not_allowed", headers=error.headers)
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
    return ApiError(500, "internal error; the server's log has the details", type="server_error", code="internal_error")


def _allowed_methods(request: Request) -> list[str]:
    """Returns the methods of all routes of a path. Starlette's own error has those of the first."""
    matching = [route for route in request.app.routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in route.methods or ()})


async def handle_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler: counts and registers rejected requests, and returns the error response."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        error.headers = {"Allow": ", ".join(_allowed_methods(request))}
    response = api_error(error, brief(f"{request.method} {request.url.path}")[1:-1])
    if request.method == "POST" and response.rejection_reason is not None:
        service = request.app.state.service
        if not isinstance(error, QueueFull):  # the engine counts those that its own queue rejects
            service.count_rejected(response.rejection_reason, request.scope.get("state", {}).get("model"))
        if "context" in request.scope.get("state", {}):
            service.registry.add_refusal(request.state.tenant, request.state.context.request_id, response.refusal())
    return for_route(response, request.scope).response()


HANDLERS: dict[Any, Any] = dict.fromkeys(
    (ApiError, InvalidRequest, QueueFull, WaitTooLong, DeadlineMissed, EngineDead, OutOfMemory, RequestFailed, HTTPException, Exception),
    handle_error,
)
