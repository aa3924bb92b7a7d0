"""What a piece of a stream costs the client of `chairlift bench`, beside httpx and beside a reader that only counts.

    python benches/client.py             writes benches/results/client.md; takes about two minutes
    python benches/client.py --quick     a short look, which writes nothing

A bare Starlette app sends one event at a time to each of 32 streams; its server needs pip install httptools. CPU is that of the client's
process alone. httpx is given the same parsing as ours, so that the difference is the HTTP; the reader that counts does nothing else, and
is what asyncio and the system take.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
from pages import machine, write
from streams import PEER, paced

from chairlift.bench import load
from chairlift.bench.client import StreamReader, Target
from chairlift.bench.http import Response
from chairlift.bench.record import Record
from chairlift.bench.workload import Job

STREAMS = 32
PACE_MS = 10.0
"""Milliseconds between two pieces of a stream: long enough that each comes alone."""

PATH = "/v1/chat/completions"
EVENT = (
    'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}'
)

Client = Callable[[int, bytes], Coroutine[Any, Any, int]]
"""Reads all streams of the server on a port, each asked for with these bytes, and returns how many pieces there were."""


def target(port: int) -> Target:
    return Target(f"http://127.0.0.1:{port}", PATH, "m")


async def ours(port: int, request: bytes) -> int:
    """The client of `chairlift bench`."""
    records, _ = await load.drive(target(port), [Job(1, 1, text="hi", due=0.0)] * STREAMS)
    return sum(len(record.times) for record in records)


async def general(port: int, request: bytes) -> int:
    """httpx, and our parsing."""

    async def one(client: httpx.AsyncClient) -> int:
        response, record = Response(), Record(0.0)
        response.status = 200
        answer = StreamReader(record, chat=True)
        async with client.stream("POST", f"http://127.0.0.1:{port}{PATH}", content=request.partition(b"\r\n\r\n")[2]) as stream:
            async for body in stream.aiter_raw():
                answer.feed(response, body, time.perf_counter())
        return len(record.times)

    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(limits=limits, timeout=None) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(STREAMS))))


class Counter(asyncio.Protocol):
    """Counts events, and does nothing else."""

    def __init__(self, request: bytes) -> None:
        self.request, self.events, self.over = request, 0, asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: {")
        if b"data: [DONE]" in data:
            self.transport.close()
            self.over.set_result(self.events)


async def counting(port: int, request: bytes) -> int:
    """The floor."""
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Counter(request), "127.0.0.1", port) for _ in range(STREAMS)]
    return sum(await asyncio.gather(*(counter.over for _, counter in made)))


CLIENTS: dict[str, Client] = {"chairlift bench": ours, "httpx, the same parsing": general, "a reader that counts": counting}


def cost(client: Client, port: int) -> tuple[float, int]:
    """Microseconds of the client's CPU for a piece, and how many pieces came."""

    async def run() -> tuple[float, int]:
        where = target(port)
        request = where.request(where.http(), Job(1, 1, text="hi"))
        began = time.process_time()
        pieces = await client(port, request)
        if not pieces:
            raise SystemExit("the server sent nothing: is httptools installed?")
        return (time.process_time() - began) / pieces * 1e6, pieces

    return asyncio.run(run())


def main() -> None:
    """Runs everything and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the pieces, once; nothing is written")
    quick = parser.parse_args().quick
    tokens, rounds = (100, 1) if quick else (1000, 3)
    with paced(PACE_MS, "-c", PEER, "{port}", EVENT, str(tokens), "httptools") as (port, _):
        # In turns, so that what disturbs the machine disturbs them all.
        found = [{name: cost(client, port) for name, client in CLIENTS.items()} for _ in range(rounds)]
    best = {name: min(costs[name] for costs in found) for name in CLIENTS}
    floor, _ = best["a reader that counts"]
    lines = [
        "# The client of chairlift bench",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}; httpx {httpx.__version__}.",
        f"{STREAMS} streams of {tokens} pieces, one each {PACE_MS:g} ms, from a bare Starlette app; the best of {rounds}.",
        "CPU is that of the client's process alone; a core of it reads at most so many pieces a second.",
        "",
        "| client | CPU, µs a piece | pieces a second and core | of the floor |",
        "|---|---|---|---|",
        *(f"| {name} | {took:.1f} | {1e6 / took:,.0f} | {took / floor:.2f} |" for name, (took, _) in best.items()),
    ]
    for name, (_, pieces) in best.items():
        assert pieces == STREAMS * tokens, f"{name}: {pieces} pieces"
    if quick:
        print("\n".join(lines))
    else:
        write("client.md", lines)


if __name__ == "__main__":
    main()
