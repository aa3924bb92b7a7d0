"""Bodies as clients send them: of each API, with fields that only one of them knows, and in each form that HTTP allows."""

import gzip
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

ASKED = [{"role": "user", "content": "Weather in Köln? \U0001f327"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
FUNCTION = {"name": "weather", "description": "Tells it", "parameters": PARAMETERS, "strict": True}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
PARTS = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}, SOUND]
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
USED = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}}

OPENAI: list[dict[str, Any]] = [
    {"messages": ASKED, "model": "m"},
    {"messages": ASKED, "stream": True, "stream_options": {"include_usage": True}, "user": "u", "metadata": {"a": "b"}, "store": False},
    {"messages": ASKED, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "parallel_tool_calls": True},
    {
        "messages": [
            *ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ]
    },
    {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": PARTS}], "modalities": ["text", "audio"]},
    {"messages": ASKED, "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": PARAMETERS, "strict": True}}},
    {"messages": ASKED, "n": 2, "logprobs": True, "top_logprobs": 5, "logit_bias": {"50256": -100}, "seed": 7, "stop": ["\n\n", "###"]},
    {
        "messages": ASKED,
        "temperature": 1e-7,
        "top_p": 1,
        "frequency_penalty": -2.0,
        "max_completion_tokens": 4096,
        "reasoning_effort": "low",
    },
    {"messages": ASKED, "guided_json": PARAMETERS, "top_k": -1, "min_p": 0.05, "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": ASKED, "cache_prompt": True, "id_slot": -1, "samplers": ["top_k", "min_p"], "grammar": 'root ::= "yes" | "no"'},
    {"messages": ASKED, "prediction": {"type": "content", "content": "rain"}, "service_tier": "flex", "prompt_cache_key": "k"},
    {"messages": ASKED, "functions": [FUNCTION], "function_call": {"name": "weather"}, "stream": True},
]
"""Chat completions of OpenAI's clients, and with the fields of vLLM and llama.cpp."""

ANTHROPIC: list[dict[str, Any]] = [
    {
        "model": "m",
        "max_tokens": 64,
        "messages": ASKED,
        "system": [{"type": "text", "text": "Brief.", "cache_control": {"type": "ephemeral"}}],
    },
    {"model": "m", "max_tokens": 64, "messages": [*ASKED, {"role": "assistant", "content": [USED]}, {"role": "user", "content": [RESULT]}]},
    {"model": "m", "max_tokens": 64, "messages": ASKED, "thinking": {"type": "enabled", "budget_tokens": 32}, "stream": True},
    {
        "model": "m",
        "max_tokens": 64,
        "messages": ASKED,
        "tools": [{"name": "weather", "input_schema": PARAMETERS}, {"type": "web_search_20250305"}],
    },
]

RESPONSES: list[dict[str, Any]] = [
    {"model": "m", "input": "Hello", "instructions": "Be brief.", "store": False, "include": ["reasoning.encrypted_content"]},
    {"model": "m", "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], "stream": True},
    {"model": "m", "input": [{"type": "function_call_output", "call_id": "c", "output": "rain"}], "previous_response_id": "resp_1"},
]

OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["Once", "Twice"], "echo": True, "best_of": 3, "suffix": "end"}),
    ("/v1/completions", {"prompt": [[1, 2, 3], [4]], "max_tokens": 0}),
    ("/completion", {"prompt": ["a", 12, "b"], "n_predict": 8, "stream": True, "timings_per_token": True}),
    ("/infill", {"input_prefix": "def f(", "input_suffix": "\n", "input_extra": [{"filename": "a.py", "text": "x"}]}),
    ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}),
    ("/v1/embeddings", {"input": ["a", ""], "encoding_format": "base64", "dimensions": 8}),
    ("/v1/rerank", {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/api/chat", {"model": "m:latest", "messages": [{"role": "user", "content": "Hi", "images": ["iVBORw0KGgo="]}], "keep_alive": "5m"}),
    ("/tokenize", {"content": "a b", "with_pieces": True}),
    ("/v1/images/generations", {"prompt": "a cat", "size": "1024x1024"}),
]


class Sent(NamedTuple):
    """One request."""

    path: str
    body: bytes
    headers: dict[str, str]


def client_bodies() -> Iterator[Sent]:
    """All of them: each body as compact and as spaced JSON, and one body in other forms."""
    chats = [*(("/v1/chat/completions", body) for body in OPENAI), *(("/v1/messages", body) for body in ANTHROPIC)]
    for path, body in [*chats, *(("/v1/responses", body) for body in RESPONSES), *OTHERS]:
        json_headers = {"content-type": "application/json"}
        yield Sent(path, json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(), json_headers)
        yield Sent(path, json.dumps(body, indent=1).encode() + b"\n", {**json_headers, "x-stainless-lang": "python", "accept": "*/*"})
    plain = json.dumps(OPENAI[0]).encode()
    odd = {
        "gzip": (gzip.compress(plain, mtime=0), {"content-encoding": "gzip"}),
        "byte order mark": (b"\xef\xbb\xbf" + plain, {}),
        "utf-16": (json.dumps(OPENAI[0]).encode("utf-16"), {"content-type": "application/json; charset=utf-16"}),
        "twice": (b'{"messages":[],' + plain[1:], {}),
        "no number": (plain[:-1] + b',"temperature":NaN,"top_p":-Infinity}', {}),
        "lone surrogate": (rb'{"messages":[{"role":"user","content":"\ud800"}]}', {}),
        "control characters": (b'{"messages":[{"role":"user","content":"\x00\x1f"}]}', {}),
        "form": (b"prompt=a&n=1", {"content-type": "application/x-www-form-urlencoded"}),
        "text": (b"Hello", {"content-type": "text/plain"}),
        "nothing": (b"", {}),
        "array": (b"[" + plain + b"]", {}),
        "more after it": (plain + plain, {}),
        "cut": (plain[:-5], {}),
        "deep": (b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}", {}),
        "long": (b'{"messages":[{"role":"user","content":"' + b"word " * 100_000 + b'"}]}', {}),
    }
    for body, headers in odd.values():
        yield Sent("/v1/chat/completions", body, {"content-type": "application/json", **headers})
