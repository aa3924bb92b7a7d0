"""The operations of all APIs, and GET /openapi.json: an OpenAPI 3.1 document that is generated from them and their request models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

import chairlift
from chairlift.server.chat.request import ChatRequest
from chairlift.server.errors import SHARED_PATHS
from chairlift.server.http.responses import to_json_bytes
from chairlift.server.routes import sequences
from chairlift.server.routes.anthropic.message_request import CountRequest, MessagesRequest
from chairlift.server.routes.anthropic.messages import count_tokens, messages
from chairlift.server.routes.ollama import chat as ollama
from chairlift.server.routes.ollama import embed as ollama_embed
from chairlift.server.routes.ollama import manage as ollama_manage
from chairlift.server.routes.ollama import models as ollama_models
from chairlift.server.routes.ollama.chat_request import GenerateRequest, OllamaChatRequest
from chairlift.server.routes.ollama.embed import EmbedRequest, OldEmbedRequest
from chairlift.server.routes.openai import batches, files
from chairlift.server.routes.openai.batches import BatchCreateRequest
from chairlift.server.routes.openai.chat import chat_completions
from chairlift.server.routes.openai.completions import completions
from chairlift.server.routes.openai.embeddings import EmbeddingRequest, embeddings
from chairlift.server.routes.openai.models import MAX_PAGE, model, models
from chairlift.server.routes.openai.rerank import RerankRequest, rerank
from chairlift.server.routes.openai.response_request import ResponsesRequest
from chairlift.server.routes.openai.responses import input_tokens, responses
from chairlift.server.routes.ops import status
from chairlift.server.routes.ops.dashboard import dashboard, data
from chairlift.server.routes.ops.explain import explain
from chairlift.server.routes.sequences import (
    SequenceAppendRequest,
    SequenceForkRequest,
    SequenceGenerateRequest,
    SequenceOpenRequest,
    SequenceRewindRequest,
    SequenceUpdateRequest,
)
from chairlift.server.routes.sessions import CloseSessionRequest, close_session
from chairlift.server.routes.tokenize import DetokenizeRequest, TokenizeRequest, detokenize, tokenize, tokenizer_info
from chairlift.server.schema.fields import REQUEST_ID, CompletionRequest
from chairlift.server.schema.response_format import object_schema
from chairlift.server.service import service_of


async def openapi(request: Request) -> Response:
    """Returns the document."""
    names = tuple(name for model in service_of(request).models for name in model.names)
    return Response(await asyncio.to_thread(encoded, names), media_type="application/json")


@cache
def encoded(served: tuple[str, ...]) -> bytes:
    """Returns the document as JSON. The first call takes too long for the event loop."""
    return to_json_bytes(document(served))


class Operation(NamedTuple):
    """A method of a route: how it is served and described."""

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str = ""
    """Empty for a page, which the document leaves out."""
    answer: str = ""
    """The name of the response's schema; empty for a response that is not JSON."""
    request: type[BaseModel] | dict[str, Any] | None = None
    """The request model, or else the JSON schema, of the body; None without a body in JSON."""
    streams: bool = False
    """Whether the response can be a stream."""

    @property
    def described_path(self) -> str:
        """The path in the document."""
        return self.path.replace("/models/{name:path}", "/models/{model}").replace("{name:path}", "{id}")


_RANKED = "Documents ordered by their similarity to a query"

OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/", status.index, "Name, version, model and links", "Index"),
    Operation("POST", "/v1/completions", completions, "Text completion", "Completion", CompletionRequest, True),
    Operation("POST", "/v1/chat/completions", chat_completions, "Chat completion", "ChatCompletion", ChatRequest, True),
    Operation("POST", "/v1/responses", responses, "Chat completion in OpenAI's Responses API", "Response", ResponsesRequest, True),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        input_tokens,
        "Token count of a conversation in OpenAI's format",
        "InputTokens",
        ResponsesRequest,
    ),
    Operation("POST", "/v1/messages", messages, "Chat completion in Anthropic's Messages API", "AnthropicMessage_", MessagesRequest, True),
    Operation(
        "POST", "/v1/messages/count_tokens", count_tokens, "Token count of a conversation in Anthropic's format", "TokenCount", CountRequest
    ),
    Operation("POST", "/v1/sequences", sequences.open_sequence, "New live sequence", "Sequence", SequenceOpenRequest),
    Operation("GET", "/v1/sequences", sequences.list_sequences, "Live sequences of the tenant", "Sequences"),
    Operation("GET", "/v1/sequences/{id}", sequences.get_sequence, "Live sequence with its text", "Sequence"),
    Operation("PATCH", "/v1/sequences/{id}", sequences.update_sequence, "Priority of a live sequence", "Sequence", SequenceUpdateRequest),
    Operation("DELETE", "/v1/sequences/{id}", sequences.delete_sequence, "Drop a live sequence", "DeletedSequence"),
    Operation("POST", "/v1/sequences/{id}/fork", sequences.fork, "Copies of a live sequence", "Sequences", SequenceForkRequest),
    Operation("POST", "/v1/sequences/{id}/append", sequences.append, "Append to a live sequence", "Sequence", SequenceAppendRequest),
    Operation(
        "POST",
        "/v1/sequences/{id}/rewind",
        sequences.rewind,
        "Remove the last tokens of a live sequence",
        "Sequence",
        SequenceRewindRequest,
    ),
    Operation(
        "POST",
        "/v1/sequences/{id}/generate",
        sequences.generate,
        "Generate from a live sequence",
        "SequenceCompletion",
        SequenceGenerateRequest,
        True,
    ),
    Operation("POST", "/close_session", close_session, "End of a session", "ClosedSession", CloseSessionRequest),
    Operation("POST", "/v1/embeddings", embeddings, "Embeddings", "CreateEmbeddingResponse", EmbeddingRequest),
    *(Operation("POST", path, rerank, _RANKED, "Ranking", RerankRequest) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    Operation("POST", "/v1/files", files.create_file, "Upload a file", "File"),
    Operation("GET", "/v1/files", files.list_files, "Files of the tenant", "Files"),
    Operation("GET", "/v1/files/{id}", files.get_file, "File", "File"),
    Operation("DELETE", "/v1/files/{id}", files.delete_file, "Delete a file", "Deleted"),
    Operation("GET", "/v1/files/{id}/content", files.file_content, "Bytes of a file"),
    Operation("POST", "/v1/batches", batches.create_batch, "New batch", "Batch", BatchCreateRequest),
    Operation("GET", "/v1/batches", batches.list_batches, "Batches of the tenant", "Batches"),
    Operation("GET", "/v1/batches/{id}", batches.get_batch, "Batch", "Batch"),
    Operation("POST", "/v1/batches/{id}/cancel", batches.cancel_batch, "Cancel a batch", "Batch"),
    Operation("POST", "/api/chat", ollama.chat, "Chat completion in Ollama's API", "OllamaAnswer", OllamaChatRequest, True),
    Operation("POST", "/api/generate", ollama.generate, "Text completion in Ollama's API", "OllamaAnswer", GenerateRequest, True),
    Operation("POST", "/api/embed", ollama_embed.embed, "Embeddings in Ollama's API", "OllamaEmbeddings", EmbedRequest),
    Operation("POST", "/api/embeddings", ollama_embed.embeddings, "An embedding in Ollama's older API", "OllamaEmbedding", OldEmbedRequest),
    Operation(
        "POST",
        "/api/pull",
        ollama_manage.have,
        "Success for a served model; others are pulled on the admin socket",
        "OllamaStatus",
        {"type": "object"},
    ),
    Operation("DELETE", "/api/delete", ollama_manage.refuse, "Always refused: only on the admin socket"),
    Operation("POST", "/api/show", ollama_models.show, "The served model in Ollama's API", "OllamaModel", ollama_models.ShowRequest),
    Operation("GET", "/api/tags", ollama_models.tags, "Served models in Ollama's API", "OllamaModels"),
    Operation("GET", "/api/ps", ollama_models.ps, "Loaded models in Ollama's API", "OllamaModels"),
    Operation("GET", "/api/version", ollama_models.version, "Version, for Ollama's clients", "Version"),
    Operation("POST", "/tokenize", tokenize, "Tokens of a text or a conversation", "Tokens", TokenizeRequest),
    Operation("POST", "/detokenize", detokenize, "Text of tokens", "Text", DetokenizeRequest),
    Operation("GET", "/tokenizer_info", tokenizer_info, "Control tokens and the chat template", "TokenizerInfo"),
    Operation("GET", "/openapi.json", openapi),
    Operation("GET", "/v1/requests/{name:path}/explain", explain, "Where a request's time went", "Explanation"),
    Operation("GET", "/v1/models", models, "Served models", "Models"),
    Operation("GET", "/v1/models/{name:path}", model, "Served model, by name", "Model"),
    Operation("GET", "/live", status.live, "Whether the process responds", "Status"),
    Operation("GET", "/ready", status.ready, "Whether a request sent now would be served", "Status"),
    Operation("GET", "/health", status.health, "Whether the engine makes progress", "Status"),
    Operation("GET", "/ping", status.health, "As /health", "Status"),
    Operation("GET", "/version", status.version, "Version of chairlift", "Version"),
    Operation("GET", "/metrics", status.metrics, "Prometheus' text format"),
    Operation("GET", "/dashboard", dashboard),
    Operation("GET", "/dashboard/data", data),
)
"""All operations, except those of the admin socket."""

_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "pattern": REQUEST_ID}}
_MALFORMED = {400: "Invalid request", 408: "Timeout while reading the body", 413: "Body too large", 415: "Body is not JSON"}
_REJECTED = {401: "No valid API key", 403: "Foreign web page", 404: "Not found", 431: "Too many headers"}
_LIMITED = {429: "Tenant's limit reached", 500: "Request failed", 503: "Unavailable: see Retry-After", 504: "Deadline missed"}


def document(served: tuple[str, ...]) -> dict[str, Any]:
    """Returns the OpenAPI document of a server with models of the names `served`."""
    requests = {operation.request for operation in OPERATIONS if isinstance(operation.request, type)}
    template = "#/components/schemas/{model}"
    _, schemas = models_json_schema([(model, "validation") for model in requests], ref_template=template)
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        if operation.summary:
            paths.setdefault(operation.described_path, {})[operation.method.lower()] = _described(operation, served)
    return {
        "openapi": "3.1.0",
        "info": {"title": "chairlift", "version": chairlift.__version__, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "security": [{}, {"bearer": []}, {"apiKey": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], **_RESPONSES},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _described(operation: Operation, served: tuple[str, ...]) -> dict[str, Any]:
    match operation.method, operation.path:
        case "POST", "/v1/files":
            return _upload(operation.summary)
        case _, "/api/delete":
            return _operation(operation.summary, None, _REJECTED, "OllamaError")
        case _, "/metrics":
            return _operation(operation.summary, {"text/plain": {"schema": _STRING}}, _REJECTED)
    return _get(operation, served) if operation.request is None else _post(operation)


def _post(operation: Operation) -> dict[str, Any]:
    path, request = operation.path, operation.request
    content = {"application/json": {"schema": _ref(operation.answer)}}
    if operation.streams:
        content["application/x-ndjson" if path.startswith("/api/") else "text/event-stream"] = {"schema": _STRING}
    in_use = {409: "In use", 410: "Dropped while it was generated"} if "{id}" in path else {}
    described = _operation(operation.summary, content, _MALFORMED | _REJECTED | _LIMITED | in_use, _error(path))
    schema = _ref(request.__name__) if isinstance(request, type) else request
    required = request not in (SequenceForkRequest, SequenceGenerateRequest)
    body = {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}
    return described | body | ({"parameters": [_ID]} if "{id}" in path else {})


def _upload(summary: str) -> dict[str, Any]:
    failures = _MALFORMED | _REJECTED | {507: "No space"}
    operation = _operation(summary, {"application/json": {"schema": _ref("File")}}, failures, "SharedError")
    schema = object_schema({"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}})
    return operation | {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def _get(operation: Operation, served: tuple[str, ...]) -> dict[str, Any]:
    """Describes an operation without a body. Without an answer in JSON it returns bytes."""
    path, answer = operation.described_path, operation.answer
    content = {"application/json": {"schema": _ref(answer)}} if answer else {"application/octet-stream": {"schema": _STRING}}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [_ID if name == "id" else {**_ID, "name": name, "schema": {"enum": list(served)}} for name in names]
    if path == "/v1/models":
        name, limit = {"enum": list(served)}, {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}
        paging = (("limit", limit), ("after_id", name), ("before_id", name))
        parameters = [{"name": name, "in": "query", "schema": schema} for name, schema in paging]
    failures = {400: _MALFORMED[400], **_REJECTED, 503: _LIMITED[503], **({409: "In use, or ended"} if "{id}" in path else {})}
    described = _operation(operation.summary, content, failures, _error(path))
    if path in ("/health", "/ping"):
        described["responses"]["503"]["content"] = content
    return described | ({"parameters": parameters} if parameters else {})


def _operation(summary: str, content: dict[str, Any] | None, failures: dict[int, str], error: str = "Error") -> dict[str, Any]:
    answers = {"200": {"description": "Success", "content": content}} if content else {}
    error_content = {"application/json": {"schema": _ref(error)}}
    return {
        "summary": summary,
        "responses": answers | {str(status): {"description": text, "content": error_content} for status, text in sorted(failures.items())},
    }


def _error(path: str) -> str:
    """Returns the schema of a route's errors; that of the routes which APIs share depends on the header `anthropic-version`."""
    if path.startswith("/v1/messages"):
        return "AnthropicError"
    return "OllamaError" if path.startswith("/api/") else "SharedError" if path.startswith(SHARED_PATHS) else "Error"


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


def _or_null(type: str) -> dict[str, Any]:
    return {"type": [type, "null"]}


_STRING, _INTEGER, _NUMBER, _OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "object"}
_USAGE = object_schema(
    {"prompt_tokens": _INTEGER, "completion_tokens": _INTEGER, "total_tokens": _INTEGER},
    prompt_tokens_details=object_schema({"cached_tokens": _INTEGER, "cache_write_tokens": _INTEGER}),
)
_COMPUTED = {"determinism": {"enum": ["batch-invariant", "best-effort"]}, "arithmetic": _STRING}
_HEAD = {"id": _STRING, "object": _STRING, "created": _INTEGER, "model": _STRING, **_COMPUTED}
_ENDED = {"index": _INTEGER, "finish_reason": _or_null("string")}
_SEQUENCE = {
    **{"id": _STRING, "object": {"const": "sequence"}, "created": _INTEGER, "expires_at": _or_null("integer")},
    **{"tokens": _INTEGER, "generated_tokens": _INTEGER, "score": {"type": "number"}, "priority": _INTEGER},
}
_ITEMS = ["reasoning", "message", "function_call", "custom_tool_call"]
_FAILURE = {"message": _STRING, "type": _STRING, "param": _or_null("string"), "code": _or_null("string")}

# Schemas of responses: the fields that clients may rely on.
_RESPONSES: dict[str, Any] = {
    "Error": object_schema({"error": object_schema(_FAILURE)}, usage=_USAGE),
    "AnthropicError": object_schema({"type": {"const": "error"}, "error": object_schema(_FAILURE), "request_id": _STRING}),
    "SharedError": {"anyOf": [_ref("Error"), _ref("AnthropicError")]},
    "OllamaError": object_schema({"error": _STRING}),
    "OllamaStatus": object_schema({"status": _STRING}),
    "OllamaAnswer": object_schema(
        {"model": _STRING, "created_at": _STRING, "done": {"const": True}, "done_reason": _STRING},
        message=_OBJECT,
        response=_STRING,
        prompt_eval_count=_INTEGER,
        eval_count=_INTEGER,
    ),
    "OllamaEmbeddings": object_schema({"model": _STRING, "embeddings": _list(_list(_NUMBER))}, prompt_eval_count=_INTEGER),
    "OllamaEmbedding": object_schema({"embedding": _list(_NUMBER)}),
    "OllamaModel": object_schema({"template": _STRING, "capabilities": _list(_STRING), "model_info": _OBJECT}),
    "OllamaModels": object_schema({"models": _list(object_schema({"name": _STRING, "model": _STRING, "modified_at": _STRING}))}),
    "Completion": object_schema(
        {**_HEAD, "choices": _list(object_schema({**_ENDED, "text": _STRING, "logprobs": _or_null("object")})), "usage": _USAGE},
        metrics=_OBJECT,
    ),
    "ChatCompletion": object_schema(
        {**_HEAD, "choices": _list(object_schema({**_ENDED, "message": _OBJECT, "logprobs": _or_null("object")})), "usage": _USAGE},
        metrics=_OBJECT,
    ),
    "CreateEmbeddingResponse": object_schema(
        {
            **_HEAD,
            "data": _list(object_schema({"object": {"const": "embedding"}, "index": _INTEGER, "embedding": {"type": ["array", "string"]}})),
            "usage": object_schema({"prompt_tokens": _INTEGER, "total_tokens": _INTEGER}),
        }
    ),
    "Ranking": object_schema(
        {
            **_HEAD,
            "results": _list(object_schema({"index": _INTEGER, "relevance_score": _NUMBER}, document=_OBJECT)),
            "usage": object_schema({"prompt_tokens": _INTEGER, "total_tokens": _INTEGER}),
        }
    ),
    "Response": object_schema(
        {
            "id": _STRING,
            "object": {"const": "response"},
            "created_at": _INTEGER,
            "status": {"enum": ["completed", "incomplete"]},
            "model": _STRING,
            **_COMPUTED,
            "output": _list(object_schema({"type": {"enum": _ITEMS}, "id": _STRING, "status": _STRING})),
            "usage": object_schema({"input_tokens": _INTEGER, "output_tokens": _INTEGER, "total_tokens": _INTEGER}),
        },
        metrics=_OBJECT,
    ),
    "AnthropicMessage_": object_schema(
        {
            "id": _STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _STRING,
            **_COMPUTED,
            "content": _list(object_schema({"type": {"enum": ["thinking", "text", "tool_use"]}})),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]},
            "stop_sequence": _or_null("string"),
            "stop_details": _or_null("object"),
            "container": _or_null("object"),
            "usage": object_schema(
                {"input_tokens": _INTEGER, "output_tokens": _INTEGER, "output_tokens_details": _or_null("object")},
                server_tool_use=_or_null("object"),
                service_tier=_or_null("string"),
                inference_geo=_or_null("string"),
            ),
        },
        metrics=_OBJECT,
    ),
    "InputTokens": object_schema({"object": {"const": "response.input_tokens"}, "input_tokens": _INTEGER}),
    "TokenCount": object_schema({"input_tokens": _INTEGER}),
    "Tokens": object_schema({"count": _INTEGER, "max_model_len": _INTEGER, "tokens": _list(_INTEGER), "token_strs": _or_null("array")}),
    "Text": object_schema({"prompt": _STRING}),
    "ClosedSession": object_schema({"session_id": _STRING}),
    "Model": object_schema(
        {"id": _STRING, "object": {"const": "model"}, "created": _INTEGER, "max_model_len": _or_null("integer"), "status": _STRING}
    ),
    "Models": object_schema({"object": {"const": "list"}, "data": _list(_ref("Model")), "has_more": {"type": "boolean"}}),
    "File": object_schema(
        {"id": _STRING, "object": {"const": "file"}, "bytes": _INTEGER, "created_at": _INTEGER, "filename": _STRING, "purpose": _STRING},
        expires_at=_or_null("integer"),
    ),
    "Files": object_schema({"object": {"const": "list"}, "data": _list(_ref("File")), "has_more": {"type": "boolean"}}),
    "Deleted": object_schema({"id": _STRING, "object": {"const": "file"}, "deleted": {"const": True}}),
    "Batch": object_schema(
        {"id": _STRING, "object": {"const": "batch"}, "status": _STRING, "input_file_id": _STRING, "request_counts": _OBJECT},
        output_file_id=_or_null("string"),
        error_file_id=_or_null("string"),
    ),
    "Batches": object_schema({"object": {"const": "list"}, "data": _list(_ref("Batch")), "has_more": {"type": "boolean"}}),
    "DeletedSequence": object_schema({"id": _STRING, "object": {"const": "sequence"}, "deleted": {"const": True}}),
    "Sequence": object_schema(_SEQUENCE, text=_STRING),
    "Sequences": object_schema({"object": {"const": "list"}, "data": _list(_ref("Sequence"))}),
    "SequenceCompletion": {"allOf": [_ref("Completion"), object_schema({"sequence": _ref("Sequence")})]},
    "Explanation": object_schema(
        {"id": _STRING, "object": {"const": "request.explanation"}, "sequences": _list(_OBJECT)}, cache_miss=_OBJECT
    ),
    "TokenizerInfo": object_schema({"vocab_size": _INTEGER, "chat_template": _or_null("string")}),
    "Index": object_schema({"name": _STRING, "version": _STRING, "model": _STRING, "links": _OBJECT}),
    "Version": object_schema({"version": _STRING}),
    "Status": object_schema({"status": _STRING}),
}
