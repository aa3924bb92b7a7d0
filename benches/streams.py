"""Streams of tokens from one server process to 256 clients, with a model that answers at once; beside it a bare Starlette app.

    python benches/streams.py            writes benches/results/streams.md; takes about two minutes

The peer needs pip install httptools.

The engine is real but for its model (`--load-format none`). Where steps are paced the server can send each token alone, or fall behind
and send several in one event; without a pace it always does the latter. The peer sends events of the same bytes, one a `yield`, and
does nothing else: what uvicorn and Starlette can do at most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pages import ROOT, machine, write
from peers.machine import cpu_seconds
from servers import server

CLIENTS = 256
TOKENS = 300
PACES = (12.8, 6.4, 0.0)
"""Milliseconds of a step: 20,000 tokens a second for 256 streams, 40,000, and as fast as it goes."""

PEER = """
import asyncio, os, sys, time, uvicorn
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route
EVENT = sys.argv[2].encode() + b"\\n\\n"
STEP = float(os.environ["PACED_MS"]) / 1e3
TICK = TICKING = None
async def ticks():
    global TICK
    due = time.monotonic()
    while True:
        TICK = asyncio.get_running_loop().create_future()
        due = max(due + STEP, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        TICK.set_result(None)
async def answer(request):
    await request.body()
    global TICKING
    if STEP and TICKING is None:
        TICKING = asyncio.ensure_future(ticks())
    await asyncio.sleep(0)
    async def events():
        for _ in range(int(sys.argv[3])):
            await (TICK if STEP else asyncio.sleep(0))
            yield EVENT
        yield b"data: [DONE]\\n\\n"
    return StreamingResponse(events(), media_type="text/event-stream")
app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
uvicorn.run(app, port=int(sys.argv[1]), http=sys.argv[4], log_level="warning", access_log=False)
"""


@dataclass
class Run:
    """What one round of streams took."""

    events: int
    seconds: float
    cpu: float
    """Seconds of CPU that the server's process used."""


def streams(port: int, pid: int, tokens: int, clients: int = CLIENTS, header: str = "") -> tuple[Run, bytes]:
    """Opens all streams at once and reads them to their ends; the second is an event from the middle of one.

    `header` is a line that each request has beside the usual ones, with its end.
    """
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True, "temperature": 0}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    head += f"{header}content-length: {len(body)}\r\n\r\n"
    selector = selectors.DefaultSelector()
    for _ in range(clients):
        sock = socket.create_connection(("127.0.0.1", port))
        selector.register(sock, selectors.EVENT_READ)
    cpu, began = cpu_seconds(pid), time.perf_counter()
    for key in list(selector.get_map().values()):
        key.fileobj.sendall(head.encode() + body)  # type: ignore[union-attr]
    events, open_, sample, buffer = 0, clients, b"", bytearray(1 << 18)
    while open_:
        for key, _ in selector.select():
            size = key.fileobj.recv_into(buffer)  # type: ignore[union-attr]
            data = bytes(memoryview(buffer)[:size])
            events += data.count(b"data: ")
            if not sample and data.count(b"data: {") == 1 and b'"content":"' in data and b'"role"' not in data:
                sample = data[data.index(b"data: ") : data.index(b"\n\n")]
            if not size or b"data: [DONE]" in data:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                open_ -= 1
    return Run(events, time.perf_counter() - began, cpu_seconds(pid) - cpu), sample


@contextlib.contextmanager
def paced(pace: float, *command: str) -> Iterator[tuple[int, int]]:
    """Runs a program of Python that serves in steps of `pace` milliseconds, in this folder; yields its port and process id."""
    with server([sys.executable, *command], cwd=ROOT / "benches", environ={"PACED_MS": str(pace)}) as (port, process):
        yield port, process.pid


def chairlift(pace: float) -> tuple[Run, bytes]:
    """The best of three rounds of our server."""
    flags = ["--max-num-seqs", str(CLIENTS), "--max-num-batched-tokens", "4096", "--max-model-len", "2048", "--log-level", "warning"]
    with paced(pace, "paced.py", "serve", "--load-format", "none", "--port", "{port}", *flags) as (port, pid):
        runs = [streams(port, pid, TOKENS) for _ in range(3)]
    return min((run for run, _ in runs), key=lambda run: run.seconds), max((sample for _, sample in runs), key=len)


def peer(event: bytes, http: str, pace: float) -> Run:
    """The best of three rounds of the bare app."""
    with paced(pace, "-c", PEER, "{port}", event.decode(), str(TOKENS), http) as (port, pid):
        return min((streams(port, pid, TOKENS)[0] for _ in range(3)), key=lambda run: run.seconds)


def main() -> None:
    """Runs everything and writes the table."""
    total = CLIENTS * TOKENS
    lines = [
        "# Streams of tokens",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}.",
        f"One server process, {CLIENTS} streams of {TOKENS} tokens each, chat completions, the best of three rounds; the client is one",
        "process that counts events. CPU is the server's process alone, the share is that of the",
        "cheapest bare app at the same pace: 1 would be a server that does nothing beside it.",
        "",
        "| | tokens/s | events/s | tokens an event | CPU, µs a token | CPU, µs an event | the bare app's share |",
        "|---|---|---|---|---|---|---|",
    ]
    for pace in PACES:
        ours, event = chairlift(pace)
        rows = {"chairlift": ours} | {f"bare Starlette, {http}": peer(event, http, pace) for http in ("h11", "httptools")}
        cheapest = min(run.cpu / run.events for name, run in rows.items() if name != "chairlift")
        lines.append(f"| **a step each {pace} ms, {CLIENTS / pace * 1e3:,.0f} tokens/s** |" if pace else "| **as fast as it goes** |")
        for name, run in rows.items():
            lines.append(
                f"| {name} | {total / run.seconds:,.0f} | {run.events / run.seconds:,.0f} | {total / run.events:.2f} | "
                f"{run.cpu / total * 1e6:.1f} | {run.cpu / run.events * 1e6:.1f} | {cheapest / (run.cpu / run.events):.2f} |"
            )
    write("streams.md", lines)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
