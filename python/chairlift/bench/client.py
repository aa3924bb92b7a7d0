"""Sends one request to an OpenAI-compatible server and records its stream.

Kinds of failure: `HTTP 429` and the like (refused), `no connection`, `connection lost`, `timed out`, `error in the stream`, `cut off`
(the stream ended without an end), `no tokens`, `no HTTP`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chairlift.bench.http import Address, Events, Http, Malformed, Response, Unreachable
from chairlift.bench.record import Record
from chairlift.bench.workload import Job
from chairlift.errors import ChairliftError

DETAIL = 300
"""The most characters of an error message that a record keeps."""

_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (Unreachable, "no connection"),
    (TimeoutError, "timed out"),
    (OSError, "connection lost"),
    (Malformed, "no HTTP"),
    (Exception, "error in the stream"),
)
"""The kind of failure of each exception."""

_DELTAS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""The fields of a chat delta that can have output tokens."""


@dataclass(frozen=True)
class Target:
    """The server and the settings of its requests. It is pickled for other processes."""

    url: str
    endpoint: str = "/v1/completions"
    model: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of each request's body, such as `temperature` and `ignore_eos`."""
    timeout: float = 3600.0
    """Seconds until a request times out."""
    insecure: bool = False

    @property
    def chat(self) -> bool:
        """Whether requests are chat completions."""
        return self.endpoint.endswith("chat/completions")

    def http(self) -> Http:
        """An HTTP client for the server."""
        return Http(Address.parse(self.url), self.headers, insecure=self.insecure)

    def request(self, http: Http, job: Job, headers: Mapping[str, str] | None = None) -> bytes:
        """The bytes of a job's HTTP request, with `headers` of its own."""
        prompt = {"messages": [{"role": "user", "content": job.prompt()}]} if self.chat else {"prompt": job.prompt()}
        body: dict[str, Any] = {"model": self.model, **prompt, "max_tokens": job.output_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if job.client is not None:
            body["user"] = job.client
        if job.tier != "default":
            body["service_tier"] = job.tier
        own = {**(headers or {}), **({"x-tenant-id": job.tenant} if job.tenant else {})}
        return http.request("POST", self.endpoint, json.dumps(body | dict(self.fields)).encode(), own)


class StreamReader:
    """Parses a response stream into a record. `started` is the start of the run, by the clock of `feed`."""

    def __init__(self, record: Record, *, chat: bool, started: float = 0.0) -> None:
        self._record = record
        self._chat = chat
        self._started = started
        self._events = Events()
        self._error = b""
        self._usage_reported = False
        self._ended = False

    def feed(self, response: Response, body: bytes, now: float) -> None:
        """Parses a part of the body that arrived at `now`."""
        if response.status != 200:
            self._error += body
            return
        for event in self._events.feed(body):
            if event.startswith(b"{"):
                self._event(json.loads(event), now - self._started)
            elif event == b"[DONE]":
                self._ended = True

    def _event(self, event: Mapping[str, Any], now: float) -> None:
        for choice in event.get("choices") or ():
            ended = choice.get("finish_reason") is not None
            self._ended = self._ended or ended
            if self._has_output(choice, ended):
                self._record.times.append(now)
        if usage := event.get("usage"):
            self._record.prompt_tokens = int(usage["prompt_tokens"])
            self._record.output_tokens = int(usage["completion_tokens"])
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self._record.cached_tokens = None if cached is None else int(cached)
            energy = (usage.get("energy") or {}).get("joules")
            self._record.energy_joules = None if energy is None else float(energy)
            self._usage_reported = True
        if error := event.get("error"):
            self._fail("error in the stream", error.get("message", "") if isinstance(error, dict) else str(error))

    def _has_output(self, choice: Mapping[str, Any], ended: bool) -> bool:
        """Whether an event has output tokens. Empty text counts, as part of a character; a role or a finish reason alone does not."""
        if self._chat:
            delta = choice.get("delta") or {}
            return any(delta.get(name) for name in _DELTAS) or not (ended or "role" in delta)
        return bool(choice.get("text")) or not ended

    def finish(self, response: Response) -> None:
        """Completes the record at the end of the response."""
        record = self._record
        record.counted = self._usage_reported
        if not self._usage_reported:
            record.output_tokens = len(record.times)
        if response.status != 200:
            self._fail(f"HTTP {response.status}", _message(self._error))
        elif not self._ended:
            self._fail("cut off", "the stream ended without a finish_reason")
        elif not record.times:
            self._fail("no tokens", "the response is empty")

    def _fail(self, kind: str, detail: str) -> None:
        if self._record.ok:
            self._record.failure, self._record.detail = kind, detail[:DETAIL]


def _message(body: bytes) -> str:
    """The message of an error body, in OpenAI's format or any other."""
    text = body.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text


async def send_request(http: Http, target: Target, request: bytes, record: Record, started: float) -> None:
    """Sends a request and fills its record, failures included. Connects first if there is no idle connection."""
    reader = StreamReader(record, chat=target.chat, started=started)
    record.sent = time.perf_counter() - started
    try:
        async with asyncio.timeout(target.timeout):
            response = await http.exchange(request, reader.feed)
        reader.finish(response)
    except Exception as error:  # a server can send anything
        record.failure = next(name for kind, name in _KINDS if isinstance(error, kind))
        detail = str(error) or (f"no end within {target.timeout:g} s" if isinstance(error, TimeoutError) else repr(error))
        record.detail = detail[:DETAIL]
    record.end = time.perf_counter() - started


async def models(target: Target) -> list[dict[str, Any]]:
    """The models that /v1/models lists. Raises ChairliftError if it lists none."""
    http, body = target.http(), bytearray()
    hint = "check that the server is up and that --base-url is its address"
    try:
        async with asyncio.timeout(60):
            response = await http.exchange(http.request("GET", "/v1/models"), lambda _, data, now: body.extend(data))
        if response.status == 401:
            raise ChairliftError(f"{target.url} requires an API key: set it with --api-key or --header Authorization='Bearer KEY'")
        return [dict(model) for model in json.loads(body)["data"]]
    except OSError as error:
        raise ChairliftError(f"no server at {target.url} ({str(error) or 'not within a minute'}); {hint}") from None
    except (Malformed, ValueError, KeyError, TypeError) as error:
        raise ChairliftError(f"{target.url}/v1/models lists no models ({error}): set --model, or {hint}") from None
    finally:
        http.close()
