"""A gate in this process and servers behind it that answer with any bytes: all in one event loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from chairlift.cli import flags
from chairlift.cli import gate as command
from chairlift.cli.access import Access
from chairlift.cli.main import build_parser
from chairlift.config import EngineConfig
from chairlift.server.config import ServerConfig

METRICS = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="%d"} 1\n'


@dataclass
class Received:
    """A request that a server got."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    """The rest of its connection: it ends when the client is gone."""
    writer: asyncio.StreamWriter

    async def send(self, status: str, body: bytes = b"", *headers: str, length: int | None = None) -> None:
        """Answers with a body, which is said to have `length` bytes if that is given."""
        lines = [f"HTTP/1.1 {status}", f"content-length: {len(body) if length is None else length}", *headers, "", ""]
        await self.send_raw("\r\n".join(lines).encode() + body)

    async def send_raw(self, data: bytes) -> None:
        """Sends bytes, and waits as long as the client reads none."""
        self.writer.write(data)
        await self.writer.drain()


class Server:
    """A server on a free port. `answer` is called for each request but those of the gate's start; its connection is closed after it."""

    def __init__(self, answer: Callable[[Received], Awaitable[None]], *, kv_blocks: int = 512) -> None:
        self.received: list[Received] = []
        self.ready = True
        """Otherwise the status of /health is 503."""
        self._answer, self._kv_blocks = answer, kv_blocks
        self.port = 0

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def chats(self) -> list[Received]:
        """The requests but those for its pages."""
        return [one for one in self.received if one.method == "POST"]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        """Listens in the block, at the same port as before."""
        connections: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.add(task := asyncio.current_task())
            try:
                await self._serve(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                connections.discard(task)
                writer.close()

        async with await asyncio.start_server(connected, "127.0.0.1", self.port) as server:
            self.port = server.sockets[0].getsockname()[1]
            try:
                yield self
            finally:
                for task in connections:
                    task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, target, _ = first.split(" ")
        request = Received(method, target, headers, body, reader, writer)
        if method == "GET" and target == "/health":
            await request.send("200 OK" if self.ready else "503 Service Unavailable", b"", "connection: close")
        elif method == "GET" and target == "/metrics":
            await request.send("200 OK", METRICS % self._kv_blocks, "connection: close")
        elif method == "GET" and "x-chairlift-gate" not in headers:  # the other pages that the gate asks for at its start
            await request.send("404 Not Found", b"", "connection: close")
        else:
            self.received.append(request)
            await self._answer(request)


@asynccontextmanager
async def gate_here(*upstreams: str, **settings: str) -> AsyncIterator[str]:
    """`chairlift gate` in front of these addresses, in this event loop: yields its own."""
    given = ["gate", "--port", "0", *(part for url in upstreams for part in ("--upstream", url))]
    given += [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    args = build_parser("gate").parse_args(given)
    args.engine, args.server = flags.read(EngineConfig, vars(args)), flags.read(ServerConfig, vars(args))
    access = Access.read(args.server)
    with access.listen(args.server, "the upstreams") as listener:
        port = listener.getsockname()[1]
        serving = asyncio.create_task(command._serve(args, access, listener))  # noqa: SLF001
        try:
            ready = asyncio.create_task(_until_ready(port))
            await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                ready.cancel()
                serving.result()
            yield f"http://127.0.0.1:{port}"
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            gc.unfreeze()


def with_gate(*upstreams: str, test: Callable[[str], None], **settings: str) -> None:
    """Runs a test in a thread, with the address of a gate in front of the upstreams."""

    async def main() -> None:
        async with gate_here(*upstreams, **settings) as base:
            await asyncio.to_thread(test, base)

    asyncio.run(main())


async def _until_ready(port: int) -> None:
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /ready HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        if b" 200 " in answer[:16]:
            return
        await asyncio.sleep(0.001)


async def until(condition: Callable[[], object]) -> None:
    """Returns as soon as `condition()` holds; the time is a guard, not a measurement."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)
