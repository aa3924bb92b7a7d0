"""What a request's body says that scheduling needs: a stand-in for its prompt's tokens, and its limit of output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from chairlift.sampling import MAX_SEQUENCES
from chairlift.server.errors import ApiError
from chairlift.server.http.body import parse
from chairlift.server.turns import Part

BYTES_PER_TOKEN = 4
"""Bytes of JSON that stand for a token. The real number is learned from the upstream's `usage`: see `Estimates`."""

LONGEST_TEXT = 1 << 16
"""Characters of a string above which it may be an image or a sound, unless its field is one of `_TEXTS`."""
_TEXTS = frozenset(
    {
        *("content", "text", "prompt", "prompt_string", "input", "system", "instructions", "output", "arguments", "thinking"),
        *("reasoning", "reasoning_content", "description", "cache_salt"),
    }
)
"""Fields whose strings the upstream reads as text, with spaces or without."""
MAX_PARTS = 4096
"""Parts of a prompt that are hashed, of the beginning."""
DATA_TOKENS = 256
"""Tokens that stand for such data."""
_WORDS = ("the", "and", "you", "for", "not", "but", "all", "can", "her", "was", "one", "our", "out", "day", "get", "has")
"""Words that spell the hash of data: with its space each is BYTES_PER_TOKEN bytes, and one token of most vocabularies."""

SCHEDULING = ("priority", "deadline_ms", "ttft_deadline_ms", "service_tier", "session_id")
"""Fields that the gate reads too: see docs/scheduling.md."""

_BEFORE = ("model", "cache_salt", "system", "instructions", "tools", "functions", "documents", "chat_template_kwargs", "response_format")
"""Fields that templates put before the conversation, so that they are part of its prefix, or that keep prompts from sharing one."""
_CONVERSATION = ("messages", "input", "prompt", "text")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The estimate of a prompt. Two bodies of which one continues the other have prompts of which one continues the other."""

    tokens: np.ndarray
    """int32, ids below `model_files.VOCABULARY`."""
    max_tokens: int | None
    """The longest answer that the client allows."""
    scheduling: Mapping[str, Any]
    """The fields of the body that say how urgent the request is and which session it belongs to, as the client sent them."""
    streamed: bool = False
    """Whether the client asks for a stream of events."""
    answers: int = 1
    """Sequences that the upstream runs at a time for it, at most MAX_SEQUENCES."""
    parts: Sequence[Part] = ()
    """What the prompt is made of, in its order: the fields before the conversation and the messages, each with a hash."""
    has_system_message: bool = False
    """Whether the first message is the system's."""


class TokenIds(bytes):
    """A prompt that the client sent as token ids, of four bytes each."""


@dataclass(frozen=True, slots=True)
class Body:
    """A body that was read: what its prompt is made of, in order, and the rest of the prompt's fields."""

    parts: list[bytes]
    fields: Mapping[str, Any]

    def prompt(self, tokens: np.ndarray) -> Prompt:
        """The prompt with these tokens of its parts."""
        return Prompt(tokens, **self.fields)


def read_prompt(raw: bytes | bytearray) -> Prompt:
    """Estimates the prompt of a body. One that is not a JSON object, or has too many values, is a prompt as it stands."""
    body = read_body(raw)
    return body.prompt(tokens(body.parts))


def read_body(raw: bytes | bytearray) -> Body:
    """Reads a body as `read_prompt` does. The messages after MAX_PARTS are one part."""
    try:
        body = parse(raw)
    except ApiError:
        return Body([bytes(raw)], {"max_tokens": None, "scheduling": {}})
    names = [name for name in _BEFORE if name in body]
    parts, has_system = [_packed(body[name], name) for name in names], False
    for name in _CONVERSATION:
        value = body.get(name)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            messages, rest = value[:MAX_PARTS], value[MAX_PARTS:]
            parts += map(_packed, [*messages, rest] if rest else messages)
            names += (_message(name, index) for index in range(len(messages) + bool(rest)))
            has_system = value[0].get("role") in ("system", "developer")
        elif value is not None:
            is_tokens = isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 32 for one in value)
            parts.append(TokenIds(np.array(value, dtype="<u4").tobytes()) if is_tokens else _packed(value, name))
            names.append(name)
    limits = [body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")]
    limit = next((one for one in limits if type(one) is int and one > 0), None)
    named = islice(zip(names, parts, strict=True), MAX_PARTS)
    fields = {
        "max_tokens": limit,
        "scheduling": {name: body[name] for name in SCHEDULING if name in body},
        "streamed": body.get("stream") is True,
        "answers": _answers(body),
        "parts": [(name, hash(part).to_bytes(8, "little", signed=True)) for name, part in named],
        "has_system_message": has_system,
    }
    return Body(parts, fields)


@lru_cache(maxsize=1 << 12)
def _message(field: str, index: int) -> str:
    """The name of a message; all turns share one string for it."""
    return f"{field}[{index}]"


def _answers(body: Mapping[str, Any]) -> int:
    """Each prompt of a list, or conversation of a batch, has as many answers as `n`, or `best_of` if that is more."""
    each = max([1, *(one for name in ("n", "best_of") if type(one := body.get(name)) is int)])
    prompts = body.get("prompt", body.get("messages"))
    several = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int | dict) else 1
    return min(each * several, MAX_SEQUENCES)


def tokens(parts: list[bytes]) -> np.ndarray:
    """One id for each BYTES_PER_TOKEN bytes of each part, int32. Parts begin at a token, so that a prefix of parts is one of tokens."""
    padded = b"".join(part + b" " * (-len(part) % BYTES_PER_TOKEN) for part in parts)
    words = np.frombuffer(padded, dtype="<u4").astype(np.uint32)
    # Knuth's multiplicative hash spreads all 32 bits over the upper 16.
    return ((words * np.uint32(2654435761)) >> np.uint32(16)).astype(np.int32)


def _packed(value: Any, name: str = "") -> bytes:
    """The bytes that stand for a part of the conversation, the field `name`; much data, such as an image, is replaced by its hash."""
    return json.dumps(_shortened(value, name), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _is_data(value: str) -> bool:
    """Whether a string seems to be an image or a sound: a long `data:` URL, or very long without a space."""
    if value.startswith("data:"):
        return len(value) > DATA_TOKENS * BYTES_PER_TOKEN
    return len(value) > LONGEST_TEXT and " " not in value[:LONGEST_TEXT]


def _shortened(value: Any, name: str) -> Any:
    match value:
        case str() if name not in _TEXTS and _is_data(value):
            digest = hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
            words = "".join(f" {_WORDS[int(digit, 16)]}" for digit in digest)
            return words * (DATA_TOKENS // len(digest))
        case dict():
            return {key: _shortened(item, key) for key, item in value.items()}
        case list():
            return [_shortened(item, name) for item in value]
    return value
