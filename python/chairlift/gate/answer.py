"""What an upstream's answer says while it passes: the times of its tokens, and the usage that it reports."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

KEPT = 1 << 14
"""Bytes of an answer's beginning and of its end in which usage is looked for."""

MAX_COUNT = 1 << 40
"""Tokens above which a count is wrong."""

_EVENTS = {"text/event-stream": b"data:", "application/x-ndjson": b"\n"}
"""What each event of a stream has once, by the content type of the stream."""
_BEFORE_TOKENS = frozenset((b"response.created", b"response.queued", b"response.in_progress", b"message_start", b"ping"))
"""Events that a server may send before it has computed the prompt."""
_LINE_BEGINNING = 64
"""Bytes of a line that say what it is."""

_CALLS_TOOLS = re.compile(
    rb'"(?:finish|stop)_reason": ?"(?:tool_calls|tool_use|function_call)"'  # OpenAI's chat, and Anthropic
    rb'|"type": ?"(?:function_call|custom_tool_call)"'  # the Responses API
    rb'|"tool_calls": ?\[ ?\{'  # Ollama
)

_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class UpstreamUsage:
    """The tokens of one request as the upstream counts them; None for what it does not say."""

    prompt: int | None = None
    cached: int | None = None
    output: int | None = None


class Answer:
    """Looks at the bytes of one answer. It changes nothing and keeps only its beginning and its end."""

    def __init__(self, content_type: str, *, sent: float) -> None:
        """`sent` is when the request was sent, on the monotonic clock: many servers send the head of an answer with its first token."""
        self.sent = sent
        self._event_mark = _EVENTS.get(content_type)
        self._first: float | None = None
        self._last = 0.0
        self.events = 0
        """Events of the stream that have come; about one for each token."""
        self._head = bytearray()
        self._tail = bytearray()
        self._called = False
        """Whether calls of tools were in what the tail has no more."""
        self._event = self._line = b""
        """The name of the event that has begun, and the beginning of a line that has not ended, before the first token."""

    def feed(self, data: bytes) -> None:
        """Looks at the next bytes, which have just arrived."""
        if self._event_mark == b"data:" and data.startswith(b":") and b"data:" not in data:
            return  # a comment, which keeps the connection open while the request waits
        self._last = time.monotonic()
        if self._first is None and self._has_token(data):
            self._first = self._last
        if self._first is not None and self._event_mark is not None:
            self.events += data.count(self._event_mark)
        if len(self._head) < KEPT:
            self._head += data[: KEPT - len(self._head)]
        self._tail += data
        if len(self._tail) > 2 * KEPT:
            self._called = self.calls_tools
            del self._tail[:-KEPT]

    @property
    def streamed(self) -> bool:
        """Whether it comes in events, about one for each token."""
        return self._event_mark is not None

    @property
    def ttft(self) -> float | None:
        """Seconds until the first event that has a token; None before that, and of an answer that is not streamed."""
        return None if self._first is None or not self.streamed else self._first - self.sent

    @property
    def between_tokens(self) -> float | None:
        """Mean seconds between the events of a stream; None without enough of them."""
        if self._first is None or self.events < 3:
            return None
        return (self._last - self._first) / (self.events - 1)

    @property
    def calls_tools(self) -> bool:
        """Whether it ends with calls of tools, so that the client goes on by itself."""
        return self._called or _CALLS_TOOLS.search(self._tail) is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer: those of its usage, else its events."""
        output = self.usage.output
        return self.events if output is None else output

    @cached_property
    def usage(self) -> UpstreamUsage:
        """The usage that the upstream reported, read once, when no more bytes come. Only Anthropic has the prompt at the beginning."""
        found: dict[str, Any] = {}
        for text in (bytes(self._head), bytes(self._tail)):
            found |= _usage(text.decode("utf-8", "replace"))
        cached = found.get("cache_read_input_tokens", _inner(found, "prompt_tokens_details", "input_tokens_details"))
        prompt = found.get("prompt_tokens", found.get("input_tokens"))
        if "cache_read_input_tokens" in found and isinstance(prompt, int):  # Anthropic counts cached tokens apart
            prompt += sum(_count(found.get(name)) or 0 for name in ("cache_read_input_tokens", "cache_creation_input_tokens"))
        output = found.get("completion_tokens", found.get("output_tokens"))
        counted = _count(prompt)
        return UpstreamUsage(counted, _count(cached, MAX_COUNT if counted is None else counted), _count(output))

    def _has_token(self, data: bytes) -> bool:
        """Whether the first token has come with these bytes. An event before it may be long, and come in several parts."""
        if self._event_mark != b"data:":
            return True
        lines = (self._line + data).splitlines(keepends=True)
        for line in lines:
            if line.startswith(b"event:"):
                self._event = line[len(b"event:") :].strip()
            elif line.startswith(b"data:") and self._event not in _BEFORE_TOKENS:
                return True
            elif not line.strip():
                self._event = b""
        self._line = b"" if not lines or lines[-1].endswith((b"\n", b"\r")) else lines[-1][:_LINE_BEGINNING]
        return False


def _usage(text: str) -> dict[str, Any]:
    """The last `usage` object in a text, or the counts of Ollama's last line."""
    at = text.rfind('"usage"')
    while at >= 0:
        colon = text.find("{", at)
        if colon >= 0 and text[at + len('"usage"') : colon].strip() == ":":
            try:
                usage = _decode(text, colon)[0]
            except (ValueError, RecursionError):
                usage = None
            if isinstance(usage, dict):
                return usage
        at = text.rfind('"usage"', 0, at)
    if (at := text.rfind('"prompt_eval_count"')) >= 0:
        counts = {"prompt_eval_count": "prompt_tokens", "eval_count": "completion_tokens"}
        return {new: value for old, new in counts.items() if (value := _number_after(text, f'"{old}":')) is not None}
    return {}


def _number_after(text: str, name: str) -> int | None:
    found = re.findall(rf"{name}\s*([0-9]{{1,12}})", text)
    return int(found[-1]) if found else None


def _inner(found: dict[str, Any], *names: str) -> Any:
    details: dict[str, Any] = next((found[name] for name in names if isinstance(found.get(name), dict)), {})
    return details.get("cached_tokens")


def _count(value: Any, most: int = MAX_COUNT) -> int | None:
    return value if type(value) is int and 0 <= value <= most else None
