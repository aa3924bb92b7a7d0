"""A small streaming client of `/v1/completions`: raw asyncio, so that it costs the machine little beside the server it times."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

from peers.workload import Request


@dataclass
class Answer:
    """What came back for one request; seconds since the run began."""

    due: float
    """When it was to be sent: times count from here, so that a client that is late makes no server look quicker."""
    times: list[float] = field(default_factory=list)
    """When each piece of text arrived: a token, or several where a server sends them together."""
    tokens: int = 0
    prompt_tokens: int = 0
    text: str = ""
    error: str = ""

    def record(self) -> dict[str, Any]:
        """Plain values, times to a tenth of a millisecond."""
        return asdict(self) | {"due": round(self.due, 4), "times": [round(t, 4) for t in self.times]}


def answered(answers: list[Answer]) -> list[Answer]:
    """The same answers. Raises SystemExit if a request failed."""
    if errors := [answer.error for answer in answers if answer.error]:
        raise SystemExit(errors[0])
    return answers


async def drive(port: int, requests: list[Request], rate: float | None, extra: dict[str, Any], limit: float) -> list[Answer]:
    """Sends all requests, at once or at `rate` a second, and waits for the answers, for `limit` seconds at most.

    `extra` are fields of the body that only this server knows.
    """
    began = time.perf_counter()
    answers = [Answer(0.0 if rate is None else request.arrival / rate) for request in requests]
    sending = [_complete(port, request, answer, extra, began) for request, answer in zip(requests, answers, strict=True)]
    try:
        await asyncio.wait_for(asyncio.gather(*sending), limit)
    except TimeoutError:
        for answer in answers:
            answer.error = answer.error or ("" if answer.tokens else f"no end after {limit:.0f} s")
    return answers


async def _complete(port: int, request: Request, answer: Answer, extra: dict[str, Any], began: float) -> None:
    body = {
        "model": "model",
        "prompt": request.prompt,
        "max_tokens": request.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body | extra | request.extra).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    head += f"connection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    await asyncio.sleep(began + answer.due - time.perf_counter())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.encode() + data)
            async for event in _events(reader):
                _take(answer, event, time.perf_counter() - began)
        finally:
            writer.close()
    except (OSError, EOFError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.error and (answer.tokens, answer.prompt_tokens) != (request.output, len(request.prompt)):
        answer.error = f"{answer.prompt_tokens} + {answer.tokens} tokens, not {len(request.prompt)} + {request.output}"


def _take(answer: Answer, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        answer.error = json.dumps(event["error"])
    for choice in event.get("choices") or ():
        text = choice.get("text") or ""
        # A token that is part of a character has no text yet; the empty event of an end has no token.
        if text or choice.get("finish_reason") is None:
            answer.times.append(now)
            answer.text += text
    if usage := event.get("usage"):
        answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].decode()
    if status.split()[1] != "200":
        raise ValueError(f"{status}: {(await reader.read()).decode(errors='replace')[:500]}")
    chunked = b"transfer-encoding: chunked" in head.lower()
    buffer = b""
    async for data in _chunks(reader) if chunked else _blocks(reader):
        buffer += data
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readline(), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _blocks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(1 << 16):
        yield data
