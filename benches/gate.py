"""What the gate costs: CPU time for each event of a stream, and what it adds to the time to the first and between events.

    python benches/gate.py [--seconds 10]       writes benches/results/gate.md

The upstream is a server that does nothing but send events at a fixed pace. It, the client and the gate share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import aiohttp
from scheduler import machine

ROOT = Path(__file__).parent.parent
STREAMS = {1: 50.0, 64: 50.0, 1000: 5.0}
"""Streams at a time → events a second of each."""
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
            writer.write(b"%x\r\n" % len(EVENT) + EVENT + b"\r\n")
        writer.write(b"0\r\n\r\n")


async def serve_upstream() -> None:
    """Serves until it is killed; prints its port."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=2**20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def run(address: str, streams: int, rate: float, seconds: float) -> tuple[list[float], list[float]]:
    """Runs streams side by side; returns the seconds to the first event of each, and how late each later event comes."""
    first: list[float] = []
    late: list[float] = []
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True, "events": int(seconds * rate), "rate": rate})

    async def one(session: aiohttp.ClientSession, begin: float) -> None:
        await asyncio.sleep(begin)
        sent = time.monotonic()
        async with session.post(f"{address}/v1/chat/completions", data=body, headers={"content-type": "application/json"}) as response:
            count, start = 0, 0.0
            async for data in response.content.iter_any():
                now = time.monotonic()
                if not count:
                    first.append(now - sent)
                    start = now
                count += data.count(b"data:")
                late.append(now - start - (count - 1) / rate)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)) as session:
        await asyncio.gather(*(one(session, index / streams / rate) for index in range(streams)))
    return first, late


def cpu_seconds(pid: int) -> float:
    """CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "chairlift", "gate", "--upstream", direct, "--port", "0", "--max-num-seqs", "2000"]
        gate = subprocess.Popen(command, stderr=log)
        found = None
        while found is None:
            time.sleep(0.1)
            log.seek(0)
            found = re.search(r"listening on (http://[^/]+)", log.read())
    rows = []
    try:
        asyncio.run(run(found[1], 8, 50.0, 1.0))  # imports what the first requests need
        for streams, rate in STREAMS.items():
            without = asyncio.run(run(direct, streams, rate, args.seconds))
            before = cpu_seconds(gate.pid)
            through = asyncio.run(run(found[1], streams, rate, args.seconds))
            spent = (cpu_seconds(gate.pid) - before) / (streams * int(args.seconds * rate))
            times = [f"{median(one[0]) * 1e3:.2f}, {percent(one[0], 0.99):.1f}" for one in (without, through)]
            lateness = [f"{percent(one[1], 0.5):.2f}, {percent(one[1], 0.99):.1f}" for one in (without, through)]
            cells = [f"{streams} x {rate:g}/s", f"{spent * 1e6:.0f}", *times, *lateness]
            rows.append(f"| {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    finally:
        gate.terminate()
        upstream.terminate()
    text = f"""# The gate

Written by benches/gate.py on {machine()}; aiohttp {aiohttp.__version__}. An upstream that only sends events at a pace, the gate and the
client share the machine. Milliseconds at p50 and p99: to the first event, and by which later events are late.

| streams | CPU us an event | first event, direct | through the gate | lateness, direct | through the gate |
|---|---|---|---|---|---|
{chr(10).join(rows)}

The CPU time is that of the gate's server process, requests and its idle work included: a short run of one stream pays for all of it.
"""
    (ROOT / "benches/results/gate.md").write_text(text)


if __name__ == "__main__":
    main()
