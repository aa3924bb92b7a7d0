"""What the gate costs: CPU time for each event of a stream, and what it adds to the time to the first and between events.

    python benches/gate.py [--seconds 10]       writes benches/results/gate.md

The upstream is a server that does nothing but send events at a fixed pace. It, the client and the gate share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
from pages import RESULTS, machine
from servers import server

STREAMS = {1: 50.0, 64: 50.0, 1000: 5.0}
"""Streams at a time → events a second of each."""
STARTS = 50.0
"""Streams that begin in a second."""
CHUNK = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": " word"}}]}
EVENT = b"data: " + json.dumps(CHUNK).encode() + b"\n\n"
METRICS = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000000"} 1.0\n'


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers the requests of one connection. A chat's `events` are its events, and `rate` how many come in a second."""
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        body = await reader.readexactly(int(found[1])) if found else b""
        if b"/chat/completions" not in head:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(METRICS) + METRICS)
            continue
        wanted = json.loads(body)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        began = time.monotonic()
        for index in range(wanted["events"]):
            await asyncio.sleep(began + index / wanted["rate"] - time.monotonic())
            if writer.is_closing():
                return
            writer.write(b"%x\r\n" % len(EVENT) + EVENT + b"\r\n")
        writer.write(b"0\r\n\r\n")


async def serve_upstream() -> None:
    """Serves until it is killed; prints its port."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=2**20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@dataclass
class Run:
    """What streams side by side saw, in seconds."""

    first: list[float]
    """From the request to the first event of each."""
    late: list[float]
    """How late each later event came while all streams ran."""
    event: float
    """CPU time of the gate for each of those events."""
    request: float
    """CPU time of the gate for each stream that began, without that of its events."""


async def run(address: str, streams: int, rate: float, seconds: float, pid: int) -> Run:
    """Begins streams one after the other, STARTS a second, and lets all of them run for `seconds`. The gate is process `pid`."""
    first: list[float] = []
    late: list[float] = []
    begin = streams / STARTS
    events = int((begin + seconds) * rate) + 1
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True, "events": events, "rate": rate})
    seen = 0

    async def one(session: aiohttp.ClientSession, after: float) -> None:
        nonlocal seen
        await asyncio.sleep(after)
        sent = time.monotonic()
        async with session.post(f"{address}/v1/chat/completions", data=body, headers={"content-type": "application/json"}) as response:
            count, start = 0, 0.0
            async for data in response.content.iter_any():
                now = time.monotonic()
                if not count:
                    first.append(now - sent)
                    start = now
                more = data.count(b"data:")
                count, seen = count + more, seen + more
                if len(first) == streams:
                    late.append(now - start - (count - 1) / rate)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)) as session:
        began = cpu_seconds(pid)
        running = [asyncio.create_task(one(session, index / STARTS)) for index in range(streams)]
        while len(first) < streams:
            await asyncio.sleep(0.05)
        cpu, before = cpu_seconds(pid), seen
        await asyncio.sleep(seconds - 0.5)
        each = (cpu_seconds(pid) - cpu) / (seen - before)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return Run(first, late, each, (cpu - began - before * each) / streams)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process's threads."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def percent(values: list[float], share: float) -> float:
    """A percentile in milliseconds."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--upstream", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.upstream:
        asyncio.run(serve_upstream())
        return
    upstream = subprocess.Popen([sys.executable, __file__, "--upstream"], stdout=subprocess.PIPE, text=True)
    assert upstream.stdout is not None
    direct = f"http://127.0.0.1:{upstream.stdout.readline().strip()}"
    command = [sys.executable, "-m", "chairlift", "gate", "--upstream", direct, "--port", "{port}", "--max-num-seqs", "2000"]
    rows = []
    with contextlib.ExitStack() as stack:
        stack.callback(upstream.terminate)
        port, gate = stack.enter_context(server(command, log=Path(os.devnull)))
        through = f"http://127.0.0.1:{port}"
        asyncio.run(run(through, 8, 50.0, 1.0, gate.pid))  # imports what the first requests need
        for streams, rate in STREAMS.items():
            # One stream at a time has one first event: it is repeated.
            rounds, seconds = (20, 1.0) if streams == 1 else (1, args.seconds)
            direct_runs, gate_runs = (
                [asyncio.run(run(address, streams, rate, seconds, gate.pid)) for _ in range(rounds)] for address in (direct, through)
            )
            cells = [
                f"{streams} x {rate:g}/s",
                *(f"{median(getattr(one, name) for one in gate_runs) * 1e6:.0f}" for name in ("event", "request")),
            ]
            for name in ("first", "late"):
                for side in (direct_runs, gate_runs):
                    times = [time for one in side for time in getattr(one, name)]
                    cells.append(f"{percent(times, 0.5):.2f}, {percent(times, 0.99):.1f}")
            rows.append(f"| {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    text = f"""# The gate

Written by benches/gate.py on {machine()}; aiohttp {aiohttp.__version__}. An upstream that only sends events at a pace, the gate and the
client share the machine. Milliseconds at p50 and p99: to the first event, and by which later events are late.

| streams | CPU us an event | and a request | first event, direct | through the gate | lateness, direct | through the gate |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}

{STARTS:g} streams begin in a second. The CPU time is that of the gate's server process: of an event while all streams run, with what the
gate does beside, and of a request while they begin.
"""
    (RESULTS / "gate.md").write_text(text)


if __name__ == "__main__":
    main()
