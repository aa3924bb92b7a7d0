"""Gemma 3 270M Q4_K_M: processor time per output token beside llama.cpp; writes benches/results/gemma_llama_cpp.md.

    python benches/gemma_llama_cpp.py FILE LLAMA_SERVER     the GGUF file (see gemma_gguf.py), and llama.cpp's llama-server

Both run on one thread, in turns, and the time is the process's own: so it can be measured on a machine that others use too, where wall
time and threads that spin at barriers say little. It is not the speed of two threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pages import RESULTS, kernels
from peers.machine import cpu_seconds
from servers import server

from chairlift import LLM, SamplingParams

TURNS = 5
LOADS = ((1, 32), (16, 12))
"""Streams, and tokens of each."""


def prompts(streams: int) -> list[list[int]]:
    """Four tokens each, of which one differs."""
    return [[2, 100 + stream, 200, 300] for stream in range(streams)]


def ask(port: int, prompt: list[int], tokens: int) -> None:
    """One greedy completion by llama-server."""
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        found = json.load(answer)["tokens_predicted"]
    assert found == tokens, f"{found} tokens instead of {tokens}"


def milliseconds(spent: Callable[[], float], work: Callable[[], object], tokens: int) -> float:
    """Processor time of each token."""
    before = spent()
    work()
    return (spent() - before) / tokens * 1e3


def measure(file: Path, port: int, pid: int) -> list[str]:
    """A line of the table for each load."""
    llm = LLM(str(file), threads=1, enable_prefix_caching=False, max_model_len=2048)
    lines = []
    for streams, tokens in LOADS:
        theirs, ours = in_turns(llm, (port, pid), streams, tokens)
        a, b = statistics.median(ours), statistics.median(theirs)
        lines.append(f"| {streams} | {a:.1f} ({min(ours):.1f}) | {b:.1f} ({min(theirs):.1f}) | {b / a:.2f}x |")
    return lines


def in_turns(llm: LLM, peer: tuple[int, int], streams: int, tokens: int) -> tuple[list[float], list[float]]:
    """Milliseconds a token of llama.cpp's and of ours, without the first turn, which warms up."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    theirs, ours = [], []
    port, pid = peer
    with ThreadPoolExecutor(streams) as pool:

        def completions() -> object:
            return list(pool.map(partial(ask, port, tokens=tokens), prompts(streams)))

        for turn in range(TURNS + 1):
            theirs.append(milliseconds(lambda: cpu_seconds(pid), completions, streams * tokens))
            ours.append(milliseconds(time.process_time, lambda: llm.generate(prompts(streams), params), streams * tokens))
            print(streams, turn, f"llama.cpp {theirs[-1]:.2f} chairlift {ours[-1]:.2f}", flush=True)
    return theirs[1:], ours[1:]


def main() -> None:
    """Measures both in turns, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("llama_server", type=Path)
    args = parser.parse_args()
    loads = os.getloadavg()
    command = [str(args.llama_server), "-m", str(args.file), "-t", "1", "-tb", "1", "-c", "32768", "-np", "16", "--port", "{port}"]
    with server([*command, "--no-webui"], "/health", Path(os.devnull)) as (port, process):
        lines = measure(args.file, port, process.pid)
    text = f"""# Gemma 3 270M, Q4_K_M, beside llama.cpp

Written by `benches/gemma_llama_cpp.py`. Processor time in milliseconds per output token on one thread, greedy, short contexts: the median
of {TURNS} turns, the least in parentheses. Chairlift computes with the file's weights in fp32, exactly; llama.cpp rounds activations to
8 bits. Others used the machine: its load average was {loads[0]:.0f} at the start.

Machine: {kernels()}.

| streams | chairlift | llama.cpp | llama.cpp / chairlift |
|---|---|---|---|
{chr(10).join(lines)}
"""
    (RESULTS / "gemma_llama_cpp.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
