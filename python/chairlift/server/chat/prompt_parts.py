"""The fields of a conversation as hashes, which tell where two conversations differ without keeping either."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from chairlift.server.turns import Part

_RENDERING = frozenset({"tools", "add_generation_prompt", "continue_final_message"})
"""Variables of the chat template that are no settings."""


def parts_of(conversation: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[Part]:
    """Returns the settings, the tools and the messages, each field with the hash of its value, about in the order of the prompt."""
    parts = [(f"settings.{name}", _digest(value)) for name, value in sorted(variables.items()) if name not in _RENDERING]
    for index, tool in enumerate(variables.get("tools") or ()):
        parts += [(_name("tools", index, name), _digest(value)) for name, value in tool["function"].items()]
    for index, message in enumerate(conversation):
        parts += [(_name("messages", index, name), digest) for name, digest in message_parts(message)]
    return parts


def message_parts(message: Mapping[str, Any]) -> list[Part]:
    """Returns the fields of a message. Equal JSON in arguments has equal hashes, however it is written."""
    parts = [("role", _digest(message["role"])), ("content", _digest(message["content"]))]
    if reasoning := message.get("reasoning_content"):
        parts.append(("reasoning", _digest(reasoning)))
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        parts.append((_name("tool_calls", index, "name"), _digest(function["name"])))
        parts.append((_name("tool_calls", index, "arguments"), _digest(normal_json(function["arguments"]))))
        parts.append((_name("tool_calls", index, "id"), _digest(call.get("id"))))
    parts += [(name, _digest(message[name])) for name in ("name", "tool_call_id") if name in message]
    return parts


def answer_keys(message: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[bytes]:
    """Returns the keys of an answer that a client may return as `message` after the message `before`.

    They are the ids of its tool calls. Without calls, it is the hash of its text and of the text before it.
    """
    ids = [call["id"] for call in message.get("tool_calls", ()) if call.get("id")]
    if ids:
        return [_digest(["call", one], 16) for one in ids]
    text = message["content"].strip()
    return [_digest(["text", "" if before is None else before["content"], text], 16)] if text else []


def returned_answers(conversation: Sequence[Mapping[str, Any]], most: int) -> Iterator[list[bytes]]:
    """Yields the keys of the assistant's messages, at most `most` of them, the last one first."""
    for index in range(len(conversation) - 1, -1, -1):
        if conversation[index]["role"] == "assistant":
            yield answer_keys(conversation[index], conversation[index - 1] if index else None)
            most -= 1
            if not most:
                return


def normal_json(value: Any) -> Any:
    """Returns a JSON value with sorted keys and whole numbers as integers. JSON true is no number, as in Python it would be."""
    if isinstance(value, dict):
        return {name: normal_json(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [normal_json(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(value: Any, size: int = 8) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


SYSTEM_ROLE = _digest("system")
"""The hash of a system message's role."""


@lru_cache(maxsize=1 << 14)
def _name(section: str, index: int, field: str) -> str:
    """Returns the name of a field; all turns share one string for it."""
    return f"{section}[{index}].{field}"
