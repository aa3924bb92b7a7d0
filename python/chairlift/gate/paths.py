"""The paths of the upstreams: which of them generate text, and which a tenant's key may reach."""

from __future__ import annotations

GENERATES = frozenset(
    {
        *(
            "/v1/chat/completions",
            "/v1/chat/completions/batch",
            "/v1/completions",
            "/v1/responses",
            "/v1/responses/compact",
            "/v1/messages",
        ),
        *("/chat/completions", "/completions", "/completion", "/infill", "/generate", "/api/chat", "/api/generate"),
        *("/invocations", "/vertex_generate", "/inference/v1/generate"),
    }
)
"""Paths whose requests generate text. All others are passed on at once."""

CLOSES_SESSION = "/close_session"
"""The path at which a client says that it will not go on with a session, as at SGLang."""

_OF_CLIENTS = GENERATES | {
    *("/", "/health", "/health_generate", "/ping", "/version", "/models", "/v1/models", "/get_model_info", "/model_info", CLOSES_SESSION),
    *("/tokenize", "/detokenize", "/apply-template", "/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/count_tokens"),
    *("/embedding", "/embeddings", "/v1/embeddings", "/v2/embed", "/encode", "/classify", "/v1/classify", "/pooling", "/v1/moderations"),
    *("/rerank", "/reranking", "/v1/rerank", "/v1/reranking", "/v2/rerank", "/score", "/v1/score"),
    *("/api/embed", "/api/embeddings", "/api/show", "/api/tags", "/api/ps", "/api/version"),
}
_BEGINNINGS_OF_CLIENTS = ("/v1/models/", "/v1/responses/", "/v1/audio/", "/v1/images/")


def plain(path: str) -> str:
    """The path without empty parts and dots: a proxy before the upstream may read `//v1/./completions` as this."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


def is_of_clients(path: str) -> bool:
    """Whether a `plain` path serves a client's own requests.

    Others may change the upstream or show others' requests, such as vLLM's /sleep, llama.cpp's /slots, or files of all tenants.
    """
    return path in _OF_CLIENTS or path.startswith(_BEGINNINGS_OF_CLIENTS)
