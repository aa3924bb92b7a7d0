"""Kills the engine under streams, many times, and compares what clients get with an undisturbed run.

Each round sends one stream of each kind, kills the engine's process with SIGKILL after a random number of events, and reads the streams to
their ends. Reports lost streams, streams whose text differs, and the longest pause of each stream after the kill.

    python benches/resume.py --kills 1000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

SERVE = """
import sys
from chairlift.cli.main import main
from chairlift.server import engine_keeper
engine_keeper.STABLE_SECONDS = 0
sys.exit(main())
"""
"""`chairlift` that restarts its engine without the pause that grows with each death."""
PROMPT = {"prompt": "The history of the chairlift begins", "max_tokens": 64, "ignore_eos": True, "stream": True}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "year": {"type": "integer"}}, "required": ["name", "year"]}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 1, "temperature": 1},
    "several": {"seed": 2, "temperature": 1, "n": 2},
    "penalties": {"seed": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "schema": {"seed": 4, "ignore_eos": False, "structured_outputs": {"json": SCHEMA}},
}


class Round:
    """One stream of each kind, and the kill in the middle of them."""

    def __init__(self, url: str, kill_after: int | None, engine: int) -> None:
        """`kill_after` is the number of events, of all streams, after which process `engine` is killed; None for never."""
        self._url = url
        self._left = kill_after
        self._engine = engine
        self._lock = threading.Lock()
        self._killed: float | None = None
        self.gaps: list[float] = []
        with ThreadPoolExecutor(len(KINDS)) as threads:
            self.answers = dict(zip(KINDS, threads.map(self._stream, KINDS.values()), strict=True))

    def _stream(self, fields: dict[str, Any]) -> dict[int, str] | None:
        """The texts by choice; None if the stream has no end."""
        texts: dict[int, str] = {}
        ends, last, longest = False, 0.0, 0.0
        with httpx.stream("POST", f"{self._url}/v1/completions", json=PROMPT | fields, timeout=None) as reply:
            for line in reply.iter_lines():
                ends |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    now = time.monotonic()
                    if self._killed is not None and last:
                        longest = max(longest, now - max(last, self._killed))
                    last = now
                    for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                    self._count()
        if longest:
            self.gaps.append(longest)
        return texts if ends else None

    def _count(self) -> None:
        with self._lock:
            if self._left is not None:
                self._left -= 1
                if not self._left:
                    os.kill(self._engine, signal.SIGKILL)
                    self._killed = time.monotonic()


def child(server: int) -> int:
    """The process id of the server's engine."""
    return int(Path(f"/proc/{server}/task/{server}/children").read_text().split()[0])


def wait(url: str) -> None:
    """Returns when the server is ready."""
    while True:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)


def main() -> int:
    """Runs the benchmark. Returns 1 if a stream was lost or differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="number of rounds (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills (default: 0)")
    parser.add_argument("model", nargs="*", help="model and flags of `chairlift serve`, after --")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SERVE, "serve", "--port", str(port), "--log-level", "error", *args.model]
    url, dice = f"http://127.0.0.1:{port}", random.Random(args.seed)
    lost = different = 0
    gaps: list[float] = []
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            wait(url)
            expected = Round(url, None, 0).answers
            for _ in range(args.kills):
                wait(url)
                one = Round(url, dice.randrange(1, 200), child(server.pid))
                gaps += one.gaps
                lost += sum(answer is None for answer in one.answers.values())
                different += sum(answer not in (None, expected[kind]) for kind, answer in one.answers.items())
        finally:
            server.terminate()
    print(f"{args.kills} kills, {args.kills * len(KINDS)} streams: {lost} lost, {different} different")
    if len(gaps) > 1:
        centiles = statistics.quantiles(gaps, n=100)
        print(f"longest pause of a stream after the kill, in seconds: p50 {centiles[49]:.2f}, p99 {centiles[98]:.2f}, of {len(gaps)}")
    return int(bool(lost or different))


if __name__ == "__main__":
    sys.exit(main())
