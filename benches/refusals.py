"""How soon a full server says no, beside a bare Starlette app that says the same.

    python benches/refusals.py            writes benches/results/refusals.md; takes half a minute

One request runs, in steps of a second, and one waits, as many as may: every other is refused. Milliseconds are those of the client,
from the request's first byte to the answer's last, on one connection or on eight at once.
"""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time

from pages import machine, write
from streams import paced

REFUSALS = 2000
PATH = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "word " * 2000}], "max_tokens": 64, "temperature": 0})

PEER = """
import sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
async def answer(request):
    await request.body()
    return Response(sys.argv[2], 503, {"retry-after": "2"}, "application/json")
uvicorn.run(Starlette(routes=[Route(sys.argv[3], answer, methods=["POST"])]), port=int(sys.argv[1]), http="h11", log_level="warning")
"""


def refused(port: int, count: int) -> tuple[list[float], bytes]:
    """Milliseconds of so many refusals, one after the other, and the last one's body."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    times, text = [], b""
    for _ in range(count):
        began = time.perf_counter()
        connection.request("POST", PATH, BODY, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        times.append((time.perf_counter() - began) * 1e3)
        assert answer.status == 503, (answer.status, text)
    return times, text


def at_once(port: int, clients: int) -> list[float]:
    """The same from several clients."""
    found: list[list[float]] = [[] for _ in range(clients)]

    def one(which: int) -> None:
        found[which] = refused(port, REFUSALS // clients)[0]

    threads = [threading.Thread(target=one, args=(which,)) for which in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [time for times in found for time in times]


def fill(port: int) -> list[http.client.HTTPConnection]:
    """Gives the engine a request to run, and one to keep waiting, as long as their connections live."""
    filling = []
    for _ in range(2):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", PATH, json.dumps({**json.loads(BODY), "max_tokens": 1000}), {"content-type": "application/json"})
        filling.append(connection)
        time.sleep(2.5)
    return filling


def main() -> None:
    """Runs everything and writes the table."""
    flags = ["--max-num-seqs", "1", "--max-num-batched-tokens", "4096", "--max-num-queued-reqs", "1", "--log-level", "error"]
    rows = {}
    with paced(1000, "paced.py", "serve", "--load-format", "none", "--port", "{port}", *flags) as (port, _):
        filling = fill(port)
        refused(port, 100)
        alone, text = refused(port, REFUSALS)
        rows["chairlift"] = alone, at_once(port, 8)
        for connection in filling:
            connection.close()
    with paced(0, "-c", PEER, "{port}", text.decode(), PATH) as (port, _):
        refused(port, 100)
        rows["bare Starlette"] = refused(port, REFUSALS)[0], at_once(port, 8)
    lines = [
        "# Refusals",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}.",
        f"A full server refuses {REFUSALS:,} chat requests of {len(BODY):,} bytes, milliseconds; the client is Python, and on the same",
        "machine.",
        "",
        "| | one client p50 | p99 | eight clients p50 | p99 |",
        "|---|---|---|---|---|",
    ]
    for name, both in rows.items():
        cells = [f"{statistics.quantiles(times, n=100)[which]:.2f}" for times in both for which in (49, 98)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    write("refusals.md", lines)


if __name__ == "__main__":
    main()
