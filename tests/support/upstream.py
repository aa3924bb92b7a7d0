"""A server behind a gate, whose answers the test controls, and a gate before it."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from server_here import wait_until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

ANY = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]


class Upstream:
    """An OpenAI-like server on a free port, in a thread. A chat's content says how it is answered."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        """(method, path with query, headers, body) of each request but those of the gate's start."""
        self.started: list[str] = []
        """The contents of the chats that have arrived, in order."""
        self.cancelled: list[str] = []
        self.running = self.most = 0
        """Chats that run now, and the most at a time."""
        self.go = threading.Semaphore(0)
        """Each chat whose content begins with `wait` ends after an `acquire`."""
        routes = [
            Route("/metrics", lambda request: PlainTextResponse(METRICS)),
            Route("/v1/models", lambda request: Response('{"data":[{"id":"m","max_model_len":4096}]}', media_type="application/json")),
            Route("/health", lambda request: Response()),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/redirect", lambda request: RedirectResponse("/elsewhere", 307), methods=ANY),
            Route("/gzip", self._gzip),
            Route("/{path:path}", self._echo, methods=ANY),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_config=None, lifespan="off", server_header=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def start(self) -> None:
        """Returns when it listens."""
        self._thread.start()
        wait_until(lambda: self._server.started)

    def stop(self) -> None:
        """Closes all connections."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    async def _record(self, request: Request) -> bytes:
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        self.requests.append((request.method, path, dict(request.headers), body))
        return body

    async def _chat(self, request: Request) -> Response:
        raw = await self._record(request)
        try:
            body = json.loads(raw)
            content = str(body["messages"][-1]["content"])
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            return Response(json.dumps({"error": {"code": 400, "message": repr(error)}}), 400, media_type="application/json; charset=utf-8")
        if content == "refuse":
            return Response('{"error":{"message":"no","type":"bad"}}', 418, {"x-reason": "tea"}, "application/json")
        if content == "cut":
            return Response(b"{", headers={"content-length": "100"}, media_type="application/json")
        self.started.append(content)
        if content == "late":
            await asyncio.sleep(0.3)
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
        if content.startswith("long"):  # and never found
            usage |= {"prompt_tokens": 2000, "prompt_tokens_details": {"cached_tokens": 0}}
        if not body.get("stream"):
            await self._run(content, request)
            return Response(json.dumps({"choices": [], "usage": usage}), media_type="application/json")
        return StreamingResponse(self._events(content, usage), media_type="text/event-stream")

    async def _run(self, content: str, request: Request | None = None) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            while content.startswith("wait") and not self.go.acquire(blocking=False):
                await asyncio.sleep(0.005)
                if request is not None and await request.is_disconnected():
                    self.cancelled.append(content)
                    return
        finally:
            self.running -= 1

    async def _events(self, content: str, usage: dict[str, object]):
        try:
            for word in ("one", "two", "three"):
                yield f'data: {{"choices":[{{"delta":{{"content":"{word}"}}}}]}}\n\n'.encode()
            await self._run(content)
            if content == "break":
                raise RuntimeError("the upstream breaks off")
            yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
        except asyncio.CancelledError:
            self.cancelled.append(content)
            raise

    async def _gzip(self, request: Request) -> Response:
        return Response(gzip.compress(b"packed", mtime=0), headers={"content-encoding": "gzip", "x-two": "a"})

    async def _echo(self, request: Request) -> Response:
        body = await self._record(request)
        response = Response(b"echo " + body, 207, media_type="application/octet-stream")
        response.raw_headers.extend([(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")])
        return response


METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="512"} 1.0
"""


@contextmanager
def gate(*upstreams: Upstream, log: Path, **flags: str) -> Iterator[str]:
    """`chairlift gate` in front of them: yields its address. Its output is in the file `log`."""
    addresses = [part for upstream in upstreams for part in ("--upstream", upstream.url)]
    settings = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", value)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "chairlift", "gate", *addresses, "--port", "0", *settings], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: process.poll() is not None or "listening on" in log.read_text(), 60)
        found = re.search(r"listening on (http://\S+)/v1", log.read_text())
        assert found is not None, log.read_text()
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
