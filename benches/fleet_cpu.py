"""CPU time of a streamed token: one box, an engine that has joined over TCP, and Ray Serve's HTTP proxy.

    python benches/fleet_cpu.py           writes benches/results/fleet_cpu.md; takes about two minutes
    python benches/fleet_cpu.py --quick   a short look, which writes nothing

It needs chairlift[fleet] and fastapi, and for Ray's HTTP proxy grpcio.

The engines are real but for the model (`--load-format none`), with a step each 20 ms, so that each token is sent alone. Of two engines, the
session's header sends all streams to the one that has joined. Behind Ray Serve's proxy a replica sends events of the same bytes at the
same pace and does nothing else. All is on one machine, over loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from pages import ROOT, machine, write
from peers.machine import cpu_seconds
from servers import child, free_port
from streams import paced, streams

STREAMS = 16
PACE_MS = 20.0
FLAGS = ["--load-format", "none", "--max-num-seqs", str(STREAMS), "--max-num-batched-tokens", "1024", "--max-model-len", "2048"]
FLAGS += ["--log-level", "warning", "--threads", "1"]
SERVE = """
import asyncio, json, os, sys, ray
from ray import serve
from starlette.responses import StreamingResponse

@serve.deployment(max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.1})
class Tokens:
    def __init__(self, event, tokens, step):
        self.event, self.tokens, self.step, self.tick, self.ticking = event, tokens, step, None, None

    async def ticks(self):
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self.tick = loop.create_future()
            due = max(due + self.step, loop.time())
            await asyncio.sleep(due - loop.time())
            self.tick.set_result(None)

    async def events(self):
        for _ in range(self.tokens):
            await self.tick
            yield self.event
        yield b"data: [DONE]\\n\\n"

    async def __call__(self, request):
        if self.ticking is None:
            self.ticking = asyncio.ensure_future(self.ticks())
        await request.body()
        return StreamingResponse(self.events(), media_type="text/event-stream")

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(Tokens.bind(sys.argv[2].encode() + b"\\n\\n", int(sys.argv[3]), float(sys.argv[4]) / 1e3))
print("ready", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""

Measure = Callable[[], dict[str, float]]
"""Runs all streams once. Returns the microseconds of CPU a token, by process."""


def cost(port: int, pids: dict[str, int], tokens: int, header: str = "") -> tuple[dict[str, float], bytes]:
    """Microseconds of CPU a token of each process in a round of streams, and an event."""
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    run, event = streams(port, next(iter(pids.values())), tokens, STREAMS, header)
    if run.events < STREAMS * tokens:
        raise SystemExit(f"{run.events} events for {STREAMS * tokens} tokens: the machine is too busy to send each token alone")
    return {name: (cpu_seconds(pid) - before[name]) / (STREAMS * tokens) * 1e6 for name, pid in pids.items()}, event


@contextlib.contextmanager
def one_box(tokens: int) -> Iterator[tuple[Measure, bytes]]:
    """A server and its engine. Yields an event too."""
    with paced(PACE_MS, "paced.py", "serve", "--port", "{port}", *FLAGS) as (port, pid):
        pids = {"server": pid, "engine": child(pid)}
        _, event = cost(port, pids, 20)
        yield lambda: cost(port, pids, tokens)[0], event


@contextlib.contextmanager
def joined(tokens: int) -> Iterator[Measure]:
    """A server and an engine that has joined."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (directory / "secret").write_text("0123456789abcdef" * 4)
        (directory / "secret").chmod(0o600)
        address = f"127.0.0.1:{free_port()}"
        secret = ["--engine-secret-file", str(directory / "secret")]
        flags = [*FLAGS, "--engine-listen", address, *secret, "--admin-socket", str(directory / "admin")]
        port, pid = stack.enter_context(paced(PACE_MS, "paced.py", "serve", "--port", "{port}", *flags))
        command = [sys.executable, "paced.py", "join", address, *secret]
        joining = stack.enter_context(subprocess.Popen(command, env={**os.environ, "PACED_MS": str(PACE_MS)}, cwd=ROOT / "benches"))
        stack.callback(joining.send_signal, signal.SIGTERM)
        admin = stack.enter_context(httpx.Client(transport=httpx.HTTPTransport(uds=str(directory / "admin")), base_url="http://admin"))
        while [one["state"] for one in admin.get("/models").json()["models"][0]["replicas"]] != ["ready", "ready"]:
            time.sleep(0.1)
        pids = {"server": pid, "engine": child(joining.pid)}
        for session in range(100):
            header = f"x-session-id: {session}\r\n"
            own = cpu_seconds(child(pid))
            taken, _ = cost(port, pids, 50, header)
            if cpu_seconds(child(pid)) - own < taken["engine"] * 1e-6 * STREAMS * 50 / 4:
                break  # the streams of this session go to the engine that has joined
        else:
            raise SystemExit("no session goes to the engine that has joined")
        yield lambda: cost(port, pids, tokens, header)[0]


@contextlib.contextmanager
def ray_serve(event: bytes, tokens: int) -> Iterator[Measure]:
    """Ray Serve's proxy and a replica."""
    port = free_port()
    mark = f"CHAIRLIFT_BENCH_{port}"
    command = [sys.executable, "-c", SERVE, str(port), event.decode(), str(tokens), str(PACE_MS)]
    environment = {**os.environ, mark: "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise SystemExit("Ray Serve did not start: is fastapi installed?")
        try:
            pids = {name: cluster_process(mark, title) for name, title in (("Ray's proxy", b"ProxyActor"), ("replica", b"ServeReplica"))}
            yield lambda: cost(port, pids, tokens)[0]
        finally:
            process.stdin.close()


def cluster_process(mark: str, title: bytes) -> int:
    """The process of this benchmark's cluster with this title."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and title in (entry / "cmdline").read_bytes() and mark.encode() in (entry / "environ").read_bytes():
                return int(entry.name)
    raise SystemExit(f"Ray has no process {title.decode()}")


def line(name: str, found: list[dict[str, float]]) -> str:
    """A line of the table: the round with the least CPU."""
    best = min(found, key=lambda costs: sum(costs.values()))
    front, back = best.values()
    sums = sorted(sum(costs.values()) for costs in found)
    return f"| {name} | {front:.0f} | {back:.0f} | {front + back:.0f} | {sums[0]:.0f} to {sums[-1]:.0f} |"


def main() -> None:
    """Runs everything and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the tokens, once; nothing is written")
    quick = parser.parse_args().quick
    tokens, rounds = (50, 1) if quick else (500, 3)
    import ray

    with one_box(tokens) as (box, event), joined(tokens) as fleet:
        chairlift = [(box(), fleet()) for _ in range(rounds)]
    with ray_serve(event, tokens) as measure:
        peers = [measure() for _ in range(rounds)]
    lines = [
        "# CPU of a streamed token",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}; ray {ray.__version__}.",
        f"{STREAMS} streams of {tokens} tokens, one each {PACE_MS:g} ms; the best of {rounds} rounds. CPU is in µs a token.",
        "The engine has no model. Ray's replica only sends events, and Ray's other processes are not counted.",
        "",
        "| | server or proxy | engine or replica | sum | sums of the rounds |",
        "|---|---|---|---|---|",
        line("one box, engine over a socket pair", [one for one, _ in chairlift]),
        line("an engine that has joined over TCP", [other for _, other in chairlift]),
        line("Ray Serve's HTTP proxy and a replica", peers),
    ]
    if quick:
        print("\n".join(lines))
    else:
        write("fleet_cpu.md", lines)


if __name__ == "__main__":
    main()
