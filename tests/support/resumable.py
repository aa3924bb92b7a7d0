"""Requests of all kinds that another engine can go on with, and their answers without what depends on the time."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from events import objects
from served import Served, bare

TOKENS = 40
CHAT = {"messages": [{"role": "user", "content": "Say it."}], "max_tokens": TOKENS, "seed": 5, "temperature": 3}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
PROMPT = {"prompt": "The chairlift", "max_tokens": TOKENS, "ignore_eos": True}
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {**PROMPT, "temperature": 0}),
    "seeded": ("/v1/completions", {**PROMPT, "seed": 3, "temperature": 3, "top_p": 0.95}),
    "several": ("/v1/completions", {**PROMPT, "seed": 4, "temperature": 3, "n": 3, "logprobs": 3}),
    "echo": ("/v1/completions", {**PROMPT, "seed": 8, "temperature": 3, "echo": True, "logprobs": 1}),
    "penalties": ("/v1/completions", {**PROMPT, **PENALTIES, "temperature": 0, "logit_bias": {"65": 4}}),
    "stop": ("/v1/completions", {**PROMPT, "seed": 6, "temperature": 3, "stop": ["zz", "aa"], "min_tokens": 20, "ignore_eos": False}),
    "schema": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
    "chat": ("/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
    "messages": ("/v1/messages", CHAT),
    "responses": ("/v1/responses", {"input": "Say it.", "max_output_tokens": TOKENS, "temperature": 0}),
}
RANKED = ("/v1/completions", {**PROMPT, "seed": 9, "temperature": 3, "n": 2, "best_of": 4})


def merged(reported: Any, into: dict[str, Any], path: str = "") -> dict[str, Any]:
    """What an event says, added to what the earlier ones said: how tokens are grouped into events depends on the time."""
    if isinstance(reported, dict):
        kind = reported.get("type", "")
        place = f"{path}/{'' if kind == 'function' else kind}{reported.get('index', '')}"
        for name, value in reported.items():
            if name not in ("metrics", "usage", "sequence_number"):
                merged(value, into, f"{place}.{name}")
    elif isinstance(reported, list):
        into.setdefault(path, []).extend(bare(reported))
        if path.endswith((".choices", ".tool_calls")):
            del into[path]
            for one in reported:
                merged(one, into, path)
    elif isinstance(reported, str):
        # Names and roles repeat with the events, texts go on.
        goes_on = path.endswith((".text", ".content", ".arguments", ".delta", ".partial_json"))
        into[path] = into.get(path, "") + reported if goes_on else reported
    elif reported is not None:
        into[path] = reported
    return into


def ask(server: Served, path: str, body: dict[str, Any], stream: bool = True) -> Any:
    """A client's answer, without ids and times."""
    usage = {"stream_options": {"include_usage": True}} if stream and "completions" in path else {}
    reported = server.http.post(path, json={**body, "stream": stream, **usage})
    assert reported.status_code == 200, reported.text
    if not stream:
        return bare(reported.json()) | {"metrics": None, "usage": reported.json()["usage"]["completion_tokens"]}
    events = objects(reported.text)
    assert not any("error" in event for event in events), reported.text
    whole: dict[str, Any] = {}
    for event in events:
        merged(bare(event), whole)
        if event.get("usage"):
            whole["tokens"] = event["usage"].get("completion_tokens", event["usage"].get("output_tokens"))
    return whole


def requested(server: Served, threads: ThreadPoolExecutor) -> dict[str, Any]:
    """The answers to all kinds of requests at a time, streams and one that is ranked at its end."""
    answers = {kind: threads.submit(ask, server, *request) for kind, request in KINDS.items()}
    answers["ranked"] = threads.submit(ask, server, *RANKED, stream=False)
    return {kind: answer.result() for kind, answer in answers.items()}


def order(server: Served, **fields: object) -> None:
    """Orders the engine's end."""
    write_order(server.directory, **fields)


def write_order(directory: Path, **fields: object) -> None:
    """Orders the end of the engines that look into this directory."""
    new = directory / "order"
    new.write_text(json.dumps({"signal": signal.SIGKILL, **fields}))
    new.rename(directory / "gate")


def metric(server: Served, name: str) -> float:
    """The sum of a metric's samples."""
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"chairlift_{name}{{"))
