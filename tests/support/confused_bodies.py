"""Bodies in which one field has a value of the wrong kind: each wrong value in each field of each route, and in fields of objects."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from chairlift.server.routes.openai.openapi import OPERATIONS

DEEP: Any = "x"
for _ in range(60):
    DEEP = [DEEP]

WRONG: list[str] = [
    *("null", "true", "false", "0", "1", "-1", "2", "1.5", "-0.0", "1e308", "-1e308", "1e-320", "1e400"),
    *("2147483647", "2147483648", "-2147483649", "9223372036854775808", "1" + "0" * 400, "-1" + "0" * 400, "9" * 5000),
    *('""', '" "', '"a"', '"1"', '"null"', '"true"', r'"\ud800"', r'"\u0000"', r'"\ufeff"'),
    *(json.dumps("a" * 300), json.dumps("7" * 20_000)),
    *("[]", "[null]", "[[]]", "[{}]", '[""]', '["a"]', "[0]", "[-1]", "[1.5]", "[1e400]", "[true]"),
    *('[{"type":"text"}]', json.dumps([1] * 5000), "[[0,1],[]]"),
    *("{}", '{"a":1}', '{"":null}', '{"type":"text"}', '{"type":"function"}', '{"-1":0}', '{"a":{"a":{"a":{}}}}'),
    *('{"5":1' + "0" * 400 + "}", json.dumps(DEEP), '{"__class__":"x"}'),
]
"""JSON texts."""

SAID = [{"role": "user", "content": "a"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["a"]},
    "/v2/rerank": {"query": "a", "documents": ["a"]},
    "/rerank": {"query": "a", "documents": ["a"]},
    "/v1/messages": {"messages": SAID, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/v1/responses/input_tokens": {"input": "a"},
    "/api/chat": {"messages": SAID, "options": {"num_predict": 2}, "stream": False},
    "/api/generate": {"prompt": "a", "options": {"num_predict": 2}, "stream": False},
    "/api/show": {},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/batches": {"input_file_id": "a", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/close_session": {"session_id": "a"},
    "/v1/sequences": {"prompt": "a"},
    "/v1/sequences/{id}/fork": {},
    "/v1/sequences/{id}/append": {"text": "a"},
    "/v1/sequences/{id}/rewind": {"count": 0},
    "/v1/sequences/{id}/generate": {"max_tokens": 2},
}
"""A valid body of each route."""

INNER = {
    "messages": ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "function_call"),
    "tools": ("type", "function", "name", "parameters", "input_schema", "custom"),
    "response_format": ("type", "json_schema", "schema"),
    "stream_options": ("include_usage", "continuous_usage_stats"),
    "options": ("num_predict", "temperature", "stop", "seed", "top_k", "num_ctx"),
    "text": ("format", "verbosity"),
    "reasoning": ("effort", "summary"),
    "thinking": ("type", "budget_tokens"),
    "output_config": ("format", "effort"),
    "prompt_cache_options": ("mode", "ttl", "comparison_response_id"),
    "diagnostics": ("previous_message_id",),
}
"""Fields of objects that are tried too, by the field that has the object, or a list of them."""


class Confused(NamedTuple):
    """One request."""

    path: str
    body: bytes

    def __str__(self) -> str:
        return f"{self.path} {self.body[:300]!r}"


def confused_bodies() -> Iterator[Confused]:
    """All of them."""
    for operation in OPERATIONS:
        path, model = operation.path, operation.request
        if operation.method != "POST" or not isinstance(model, type):
            continue
        for field in _fields(model):
            rest = json.dumps({name: value for name, value in BASES[path].items() if name != field})[1:-1]
            before = f"{{{rest}{',' if rest else ''}{json.dumps(field)}:"
            for wrong in WRONG:
                yield Confused(path, f"{before}{wrong}}}".encode())
                for inner in INNER.get(field, ()):
                    value = f'{{"role":"user","content":"a",{json.dumps(inner)}:{wrong}}}'
                    yield Confused(path, f"{before}{f'[{value}]' if field in ('messages', 'tools') else value}}}".encode())


def _fields(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]
