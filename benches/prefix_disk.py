"""TTFT of a long prompt after a restart, with its KV on disk, beside TTFT of a server that computes it.

    python benches/prefix_disk.py [--rounds 5] [--threads 2] [-- MODEL FLAGS]       prints a table
    python benches/prefix_disk.py --llama-server PATH -- FILE.gguf                  also llama.cpp's saved slots, with the same file

Each round begins with an empty directory (below TMPDIR, which chooses the disk). A server answers a prompt of 4,000 tokens, ends, and is
started again and asked again. Before that the system drops the files' pages from memory, as after a reboot. Each server answers a short
prompt first, which does not count. llama.cpp's TTFT from disk includes the request that restores its slot. Programs take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pages import ROOT, machine
from servers import server

PROMPT, OUTPUT = 4000, 16
"""Tokens."""


@dataclass(frozen=True)
class Answer:
    """What a server answered, and after how many seconds it began."""

    text: str
    ttft: float
    cached: int
    """Tokens of the prompt that were not computed."""


@dataclass(frozen=True)
class Round:
    """One program's answers before and after its restart."""

    computed: Answer
    stored: Answer
    restored: float
    """Seconds of a request that read the disk before the prompt was sent."""
    size: int
    """Bytes on disk."""

    @property
    def from_disk(self) -> float:
        """Seconds to the first token with what is on disk."""
        return self.restored + self.stored.ttft


def ask(url: str, prompt: str | list[int]) -> Answer:
    """Streams a greedy answer."""
    body = {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}
    text, ttft = "", 0.0
    usage: dict[str, Any] = {}
    began = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream_options": {"include_usage": True}}, timeout=None) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += "".join(choice["text"] for choice in event["choices"])
                ttft = ttft or (time.perf_counter() - began if text else 0.0)
                usage = event.get("usage") or usage
    return Answer(text, ttft, usage["prompt_tokens_details"]["cached_tokens"])


def post(url: str, body: dict[str, Any]) -> Any:
    """The JSON that a server replies."""
    return httpx.post(url, json=body, timeout=None).raise_for_status().json()


@contextlib.contextmanager
def served(command: list[str]) -> Iterator[str]:
    """Runs a server until it is left. Yields its URL once it has answered."""
    with server([*command, "--port", "{port}"], "/health") as (port, _):
        url = f"http://127.0.0.1:{port}"
        ask(url, "Hi")
        yield url


def drop_pages(directory: Path) -> int:
    """Makes the system drop its copies of a directory's files in memory. Returns their bytes."""
    size = 0
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size += path.stat().st_size
    return size


def chairlift(serve: list[str], prompt: list[int], directory: Path) -> Round:
    """A round of `chairlift serve --prefix-cache-dir`."""
    command = [*serve, "--prefix-cache-dir", str(directory)]
    with served(command) as url:
        computed = ask(url, prompt)
    size = drop_pages(directory)
    with served(command) as url:
        return Round(computed, ask(url, prompt), 0.0, size)


def llama_cpp(command: list[str], prompt: list[int], directory: Path) -> Round:
    """A round of llama-server, which saves and restores a slot when asked to."""
    command = [*command, "--slot-save-path", str(directory)]
    with served(command) as url:
        computed = ask(url, prompt)
        post(f"{url}/slots/0?action=save", {"filename": "prompt"})
    size = drop_pages(directory)
    with served(command) as url:
        began = time.perf_counter()
        post(f"{url}/slots/0?action=restore", {"filename": "prompt"})
        restored = time.perf_counter() - began
        return Round(computed, ask(url, prompt), restored, size)


def line(name: str, rounds: list[Round]) -> str:
    """A program's line of the table."""
    computed = statistics.median(one.computed.ttft for one in rounds)
    from_disk = statistics.median(one.from_disk for one in rounds)
    ratio = statistics.median(one.computed.ttft / one.from_disk for one in rounds)
    cached, size = min(one.stored.cached for one in rounds), max(one.size for one in rounds)
    equal = sum(one.computed.text == one.stored.text for one in rounds)
    return f"| {name} | {computed:.2f} | {from_disk:.3f} | {ratio:.1f} | {size / 1e6:.0f} | {cached} | {equal} of {len(rounds)} |"


def main() -> int:
    """Runs the benchmark. Returns 1 if an answer of Chairlift's differs after a restart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-server", metavar="PATH")
    parser.add_argument("model", nargs="*", help="model and flags of `chairlift serve`, after --")
    args = parser.parse_args()
    serve = [sys.executable, "-P", "-m", "chairlift", "serve", "--threads", str(args.threads), "--log-level", "error", *args.model]
    programs: dict[str, Callable[[list[int], Path], Round]] = {"Chairlift": lambda prompt, directory: chairlift(serve, prompt, directory)}
    if args.llama_server:
        if not args.model or not args.model[0].endswith(".gguf"):
            parser.error("--llama-server needs a GGUF file after --, which both serve")
        threads = ["--threads", str(args.threads), "--threads-batch", str(args.threads)]
        flags = ["--parallel", "1", "--ctx-size", "8192", *threads, "--cache-ram", "0", "--log-disable"]
        command = [args.llama_server, "--model", args.model[0], "--no-ui", *flags]
        programs["llama.cpp"] = lambda prompt, directory: llama_cpp(command, prompt, directory)
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    with served(serve) as url:
        prompt = post(f"{url}/tokenize", {"prompt": text[: 6 * PROMPT]})["tokens"][:PROMPT]
    rounds: dict[str, list[Round]] = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, measure in programs.items():
            with tempfile.TemporaryDirectory() as directory:
                rounds[name].append(measure(prompt, Path(directory)))
    print(f"# Prefix cache on disk\n\n{machine()}")
    print(
        f"{' '.join(Path(part).name for part in args.model) or 'default model'}, {args.threads} threads; a prompt of {len(prompt)} tokens."
    )
    print(f"TTFT in seconds, medians of {args.rounds} rounds.\n")
    print("| | computed | from disk | ratio | MB on disk | tokens from disk | equal answers |\n|---|---|---|---|---|---|---|")
    for name in programs:
        print(line(name, rounds[name]))
    return int(any(one.computed.text != one.stored.text for one in rounds["Chairlift"]))


if __name__ == "__main__":
    sys.exit(main())
