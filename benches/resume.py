"""Kills the engine under streams, many times, and compares what clients get with an undisturbed run.

Each round sends one stream of each kind, kills the engine's process with SIGKILL after a random number of events, and reads the streams to
their ends. Reports lost streams, streams whose texts or whose numbers of tokens differ, and each stream's longest pause after the kill.
A token that is sent twice or not at all makes a text differ.

    python benches/resume.py [--kills 20] [-- MODEL FLAGS]     prints a table; the default model without MODEL
    python benches/resume.py --kills 1000 --small              with four narrow layers of random weights, which restart and compute sooner
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pages import machine
from servers import child, server

from chairlift.checkpoint.locate import locate
from chairlift.config import DEFAULT_MODEL

SERVE = """
import sys
from chairlift.cli.main import main
from chairlift.server import engine_keeper
engine_keeper.STABLE_SECONDS = 0
sys.exit(main())
"""
"""`chairlift` that restarts its engine without the pause that grows with each death."""
PROMPT = {"prompt": "The history of the chairlift begins", "max_tokens": 64, "ignore_eos": True, "stream": True}
PROMPT |= {"stream_options": {"include_usage": True}}
EVENTS = 200
"""The engine is killed after fewer events than this, of about 300."""
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""The shape of the small model, which has the default model's tokenizer."""
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "year": {"type": "integer"}}, "required": ["name", "year"]}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 1, "temperature": 1},
    "several": {"seed": 2, "temperature": 1, "n": 2},
    "penalties": {"seed": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "schema": {"seed": 4, "ignore_eos": False, "structured_outputs": {"json": SCHEMA}},
}


@dataclass
class Answer:
    """What a client has of a stream."""

    texts: dict[int, str] = field(default_factory=dict)
    """By choice."""
    tokens: int = 0
    """Tokens that `usage` counts."""
    ended: bool = False
    """Whether the stream has an end."""


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

    @property
    def killed(self) -> bool:
        """Whether there were so many events."""
        return self._killed is not None

    def _stream(self, fields: dict[str, Any]) -> Answer:
        answer, last, longest = Answer(), 0.0, 0.0
        with httpx.stream("POST", f"{self._url}/v1/completions", json=PROMPT | fields, timeout=None) as reply:
            for line in reply.iter_lines():
                answer.ended |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    now = time.monotonic()
                    if self._killed is not None and last:
                        longest = max(longest, now - max(last, self._killed))
                    last = now
                    event = json.loads(line.removeprefix("data: "))
                    for choice in event.get("choices", ()):
                        answer.texts[choice["index"]] = answer.texts.get(choice["index"], "") + choice["text"]
                    answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
                    self._count()
        if longest:
            self.gaps.append(longest)
        return answer

    def _count(self) -> None:
        with self._lock:
            if self._left is not None:
                self._left -= 1
                if not self._left:
                    os.kill(self._engine, signal.SIGKILL)
                    self._killed = time.monotonic()


def wait(url: str) -> None:
    """Returns when the server is ready."""
    while True:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)


@contextmanager
def small_model() -> Iterator[list[str]]:
    """The flags that serve a small model of random weights."""
    default = locate(DEFAULT_MODEL)
    with tempfile.TemporaryDirectory() as directory:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (Path(directory) / name).write_bytes((default / name).read_bytes())
        (Path(directory) / "config.json").write_text(json.dumps(json.loads((default / "config.json").read_text()) | SMALL))
        yield [directory, "--load-format", "dummy"]


@dataclass
class Result:
    """What all rounds have shown."""

    rounds: int = 0
    kills: int = 0
    lost: int = 0
    different: int = 0
    gaps: list[float] = field(default_factory=list)

    def add(self, one: Round, expected: dict[str, Answer]) -> None:
        """Compares a round with what is expected."""
        self.rounds += 1
        self.kills += one.killed
        self.gaps += one.gaps
        self.lost += sum(not answer.ended for answer in one.answers.values())
        self.different += sum(answer.ended and answer != expected[kind] for kind, answer in one.answers.items())

    def line(self) -> str:
        """The line of the table."""
        centiles = statistics.quantiles(self.gaps, n=100) if len(self.gaps) > 1 else [float("nan")] * 99
        counts = f"| {self.kills} | {self.rounds * len(KINDS)} | {self.lost} | {self.different} "
        return f"{counts}| {len(self.gaps)} | {centiles[49]:.2f} | {centiles[98]:.2f} | {max(self.gaps, default=float('nan')):.2f} |"


def killed(command: list[str], kills: int, seed: int) -> Result:
    """Runs a server and kills its engine so many times."""
    dice, result = random.Random(seed), Result()
    with server([*command, "--port", "{port}"], log=Path(os.devnull)) as (port, process):
        url = f"http://127.0.0.1:{port}"
        expected = Round(url, None, 0).answers
        while result.kills < kills:
            wait(url)
            result.add(Round(url, dice.randrange(1, EVENTS), child(process.pid)), expected)
            if result.kills % 50 == 0:
                print(result.line(), file=sys.stderr)
    return result


def main() -> int:
    """Runs the benchmark. Returns 1 if a stream was lost or differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="number of kills (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills (default: 0)")
    parser.add_argument("--small", action="store_true", help="a small model of random weights")
    parser.add_argument("model", nargs="*", help="model and flags of `chairlift serve`, after --")
    args = parser.parse_args()
    command = [sys.executable, "-c", SERVE, "serve", "--log-level", "error", *args.model]
    with small_model() as small:
        result = killed([*command, *small] if args.small else command, args.kills, args.seed)
    name = "a small model of random weights" if args.small else " ".join(args.model) or "the default model"
    print(
        f"{time.strftime('%Y-%m-%d')}, {machine()}; {name}, one engine, which is started again after each kill.\n\n"
        "| kills | streams | lost | different | paused by a kill | p50 s | p99 s | max s |\n|---|---|---|---|---|---|---|---|\n"
        + result.line()
    )
    return int(bool(result.lost or result.different))


if __name__ == "__main__":
    sys.exit(main())
