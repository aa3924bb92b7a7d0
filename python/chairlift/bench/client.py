"""One request to a server that speaks OpenAI's API, and what came back as a Record.

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
"""Characters that are kept of what a server says to a failure."""

_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (Unreachable, "no connection"),
    (TimeoutError, "timed out"),
    (OSError, "connection lost"),
    (Malformed, "no HTTP"),
    (Exception, "error in the stream"),
)
"""What an exchange that raises is counted as."""

_DELTAS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""What a chat's delta may bring tokens in."""


@dataclass(frozen=True)
class Target:
    """Which server, and how it is asked. It goes to other processes as it is."""

    url: str
    endpoint: str = "/v1/completions"
    model: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What each body has beside the prompt and the lengths: `temperature`, `ignore_eos`."""
    timeout: float = 3600.0
    """Seconds after which a request is given up."""
    insecure: bool = False

    @property
    def chat(self) -> bool:
        """Whether prompts go out as messages."""
        return self.endpoint.endswith("chat/completions")

    def http(self) -> Http:
        """A client of that server."""
        return Http(Address.parse(self.url), self.headers, insecure=self.insecure)

    def request(self, http: Http, job: Job) -> bytes:
        """The bytes that ask for a job."""
        prompt = {"messages": [{"role": "user", "content": job.prompt()}]} if self.chat else {"prompt": job.prompt()}
        body: dict[str, Any] = {"model": self.model, **prompt, "max_tokens": job.output_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if job.client is not None:
            body["user"] = job.client
        return http.request("POST", self.endpoint, json.dumps(body | dict(self.fields)).encode())


class Answer:
    """Reads a stream of completions into a record; `began` is when the run began, by the clock of `take`."""

    def __init__(self, record: Record, *, chat: bool, began: float = 0.0) -> None:
        self._record = record
        self._chat = chat
        self._began = began
        self._events = Events()
        self._error = b""
        self._pieces = 0
        self._told = False
        self._ended = False

    def take(self, response: Response, body: bytes, now: float) -> None:
        """A piece of the body that came at `now`."""
        if response.status != 200:
            self._error += body
            return
        for event in self._events.feed(body):
            if event.startswith(b"{"):
                self._event(json.loads(event), now - self._began)
            elif event == b"[DONE]":
                self._ended = True

    def _event(self, event: Mapping[str, Any], now: float) -> None:
        for choice in event.get("choices") or ():
            ended = choice.get("finish_reason") is not None
            self._ended = self._ended or ended
            if self._brings(choice, ended):
                self._record.times.append(now)
        if usage := event.get("usage"):
            self._record.prompt_tokens = int(usage["prompt_tokens"])
            self._record.output_tokens = int(usage["completion_tokens"])
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self._record.cached_tokens = None if cached is None else int(cached)
            self._told = True
        if error := event.get("error"):
            self._fail("error in the stream", error.get("message", "") if isinstance(error, dict) else str(error))

    def _brings(self, choice: Mapping[str, Any], ended: bool) -> bool:
        """Whether an event brought tokens: text, or none yet of a character that takes several; but a role or an end alone is none."""
        if self._chat:
            delta = choice.get("delta") or {}
            return any(delta.get(name) for name in _DELTAS) or not (ended or "role" in delta)
        return bool(choice.get("text")) or not ended

    def finish(self, response: Response) -> None:
        """The answer is over; tells whether it was one."""
        record = self._record
        record.counted = self._told
        if not self._told:
            record.output_tokens = len(record.times)
        if response.status != 200:
            self._fail(f"HTTP {response.status}", _message(self._error))
        elif not self._ended:
            self._fail("cut off", "the stream ended without a finish_reason")
        elif not record.times:
            self._fail("no tokens", "the answer is empty")

    def _fail(self, kind: str, detail: str) -> None:
        if self._record.ok:
            self._record.failure, self._record.detail = kind, detail[:DETAIL]


def _message(body: bytes) -> str:
    """What an error's body says, in OpenAI's form or any other."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)["error"]
        return str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError):
        return text


async def ask(http: Http, target: Target, request: bytes, record: Record, began: float) -> None:
    """Sends a request and fills its record; whatever goes wrong is in it. Where there is no open connection, making one is part of it."""
    answer = Answer(record, chat=target.chat, began=began)
    record.sent = time.perf_counter() - began
    try:
        async with asyncio.timeout(target.timeout):
            response = await http.exchange(request, answer.take)
        answer.finish(response)
    except Exception as error:  # a server may send anything
        record.failure = next(name for kind, name in _KINDS if isinstance(error, kind))
        told = str(error) or (f"no end after {target.timeout:g} s" if isinstance(error, TimeoutError) else repr(error))
        record.detail = told[:DETAIL]
    record.end = time.perf_counter() - began


async def models(target: Target) -> list[dict[str, Any]]:
    """What the server's /v1/models lists; raises ChairliftError where it doesn't."""
    http, body = target.http(), bytearray()
    hint = "is the server up, and is --base-url its address?"
    try:
        async with asyncio.timeout(60):
            response = await http.exchange(http.request("GET", "/v1/models"), lambda _, data, now: body.extend(data))
        if response.status == 401:
            raise ChairliftError(f"{target.url} wants an API key: give it with --api-key or --header Authorization='Bearer KEY'")
        return [dict(model) for model in json.loads(body)["data"]]
    except OSError as error:
        raise ChairliftError(f"no server answers at {target.url} ({str(error) or 'not within a minute'}); {hint}") from None
    except (Malformed, ValueError, KeyError, TypeError) as error:
        raise ChairliftError(f"{target.url}/v1/models lists no models ({error}): name one with --model; {hint}") from None
    finally:
        http.close()
