"""Bodies of requests that make as much work as a body can: 2 MB of one kind of value, in one field of one route."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

SIZE = 1_900_000
"""Bytes of a value, a little less than the longest body."""
MOST = 95_000
"""Objects, arrays and fields of a value, a little fewer than are allowed."""

SAID = [{"role": "user", "content": "a"}]
FUNCTION = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(230)}}


class Hostile(NamedTuple):
    """One request: its path and body, and what they are in words."""

    path: str
    start: str
    value: str
    name: str

    @property
    def body(self) -> bytes:
        """The JSON. It is made when it is sent: making all of them takes seconds."""
        return self.start.encode() + value_json(self.value) + b"}"


def many(element: Any) -> list[Any]:
    """A list of as many elements as fit."""
    text = json.dumps(element)
    values = sum(map(text.count, "[{:"))
    return [element] * min(SIZE // (len(text) + 2), MOST // values if values else SIZE)


@cache
def values() -> dict[str, Any]:
    """Values by their names."""
    part = {"type": "text", "text": "abc"}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {
        "text": "7" * SIZE,
        "white space": " " * SIZE,
        "control tokens": "<|end|>" * (SIZE // 7),
        "empty lists": many([]),
        "integers": many(1),
        "floats": many(1.5),
        "nulls": many(None),
        "texts": many("ab"),
        "empty texts": many(""),
        "objects": many({"a": 1}),
        "parts": many(part),
        "fields": {f"k{i}": 1 for i in range(MOST)},
        "too many lists": [[]] * (SIZE // 4),
        "short messages": many(SAID[0]),
        "messages": [{"role": "user", "content": "a" * 400}] * 4096,
        "a message of parts": [{"role": "user", "content": many(part)[:-10]}],
        "calls": [{"role": "assistant", "content": None, "tool_calls": [call] * 120}] * 100,
        "tools": [{"type": "function", "function": {"name": f"f{i}", "parameters": FUNCTION}} for i in range(128)],
        "Anthropic's tools": [{"name": f"f{i}", "input_schema": FUNCTION} for i in range(128)],
        "a schema": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": {f"p{i}": {} for i in range(45_000)}}}},
    }


@cache
def value_json(name: str) -> bytes:
    """The JSON of a value."""
    return json.dumps(values()[name]).encode()


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": (
        {"prompt": "a", "max_tokens": 2},
        "prompt stop logit_bias bad_words allowed_token_ids stop_token_ids response_format",
    ),
    "/v1/chat/completions": (
        {"messages": SAID, "max_tokens": 2},
        "messages tools functions documents chat_template_kwargs response_format logit_bias tool_choice stop",
    ),
    "/v1/responses": ({"input": "a", "max_output_tokens": 2}, "input tools instructions text metadata tool_choice"),
    "/v1/messages": ({"messages": SAID, "max_tokens": 2}, "messages system tools metadata stop_sequences tool_choice"),
    "/v1/messages/count_tokens": ({"messages": SAID}, "messages system tools"),
    "/v1/responses/input_tokens": ({"input": "a"}, "input tools instructions"),
    "/v1/embeddings": ({"input": "a"}, "input"),
    "/v1/rerank": ({"query": "a", "documents": ["a"]}, "query documents"),
    "/api/generate": ({"prompt": "a", "options": {"num_predict": 2}}, "prompt system format options images"),
    "/api/chat": ({"messages": SAID, "options": {"num_predict": 2}}, "messages tools format options"),
    "/api/embed": ({"input": "a"}, "input"),
    "/tokenize": ({"prompt": "a"}, "prompt messages tools"),
    "/detokenize": ({"tokens": [1]}, "tokens"),
    "/v1/sequences": ({"prompt": "a"}, "prompt messages tools"),
    "/v1/batches": ({"input_file_id": "a", "endpoint": "/v1/completions", "completion_window": "24h"}, "metadata input_file_id"),
}
"""By path: a small valid body, and the fields that are replaced; each body is also sent with one unknown field."""


def hostile_bodies() -> Iterator[Hostile]:
    """All of them."""
    for path, (body, fields) in FIELDS.items():
        for field in (*fields.split(), "unknown"):
            rest = json.dumps({name: value for name, value in body.items() if name != field} | {"model": None})[:-1]
            for name in values():
                yield Hostile(path, f'{rest},"{field}":', name, f"{name} as {field} of {path}")
