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
import subprocess
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from peers.machine import TICK, describe

from chairlift import LLM, SamplingParams
from chairlift._core import instruction_sets

RESULT = Path(__file__).parent / "results" / "gemma_llama_cpp.md"
PORT = 18556
TURNS = 5
LOADS = ((1, 32), (16, 12))
"""Streams, and tokens of each."""


def processor_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def prompts(streams: int) -> list[list[int]]:
    """Four tokens each, of which one differs."""
    return [[2, 100 + stream, 200, 300] for stream in range(streams)]


def ask(prompt: list[int], tokens: int) -> None:
    """One greedy completion by llama-server."""
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        found = json.load(answer)["tokens_predicted"]
    assert found == tokens, f"{found} tokens instead of {tokens}"


def until_ready(server: subprocess.Popen[bytes]) -> None:
    """Waits for llama-server. Raises SystemExit if it ends."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise SystemExit("llama-server ended")


def milliseconds(spent: Callable[[], float], work: Callable[[], object], tokens: int) -> float:
    """Processor time of each token."""
    before = spent()
    work()
    return (spent() - before) / tokens * 1e3


def measure(file: Path, server: subprocess.Popen[bytes]) -> list[str]:
    """A line of the table for each load."""
    llm = LLM(str(file), threads=1, enable_prefix_caching=False, max_model_len=2048)
    until_ready(server)
    lines = []
    for streams, tokens in LOADS:
        theirs, ours = in_turns(llm, server, streams, tokens)
        a, b = statistics.median(ours), statistics.median(theirs)
        lines.append(f"| {streams} | {a:.1f} ({min(ours):.1f}) | {b:.1f} ({min(theirs):.1f}) | {b / a:.2f}x |")
    return lines


def in_turns(llm: LLM, server: subprocess.Popen[bytes], streams: int, tokens: int) -> tuple[list[float], list[float]]:
    """Milliseconds a token of llama.cpp's and of ours, without the first turn, which warms up."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    theirs, ours = [], []
    with ThreadPoolExecutor(streams) as pool:

        def completions() -> object:
            return list(pool.map(ask, prompts(streams), [tokens] * streams))

        for turn in range(TURNS + 1):
            theirs.append(milliseconds(lambda: processor_seconds(server.pid), completions, streams * tokens))
            ours.append(milliseconds(time.process_time, lambda: llm.generate(prompts(streams), params), streams * tokens))
            print(streams, turn, f"llama.cpp {theirs[-1]:.2f} chairlift {ours[-1]:.2f}", flush=True)
    return theirs[1:], ours[1:]


def main() -> None:
    """Measures both in turns, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("llama_server", type=Path)
    args = parser.parse_args()
    machine, loads = describe(), os.getloadavg()
    command = [str(args.llama_server), "-m", str(args.file), "-t", "1", "-tb", "1", "-c", "32768", "-np", "16", "--port", str(PORT)]
    with subprocess.Popen([*command, "--no-webui"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            lines = measure(args.file, server)
        finally:
            server.terminate()
    text = f"""# Gemma 3 270M, Q4_K_M, beside llama.cpp

Written by `benches/gemma_llama_cpp.py`. Processor time in milliseconds per output token on one thread, greedy, short contexts: the median
of {TURNS} turns, the least in parentheses. Chairlift computes with the file's weights in fp32, exactly; llama.cpp rounds activations to
8 bits. Others used the machine: its load average was {loads[0]:.0f} at the start.

Machine: {machine["cpu"]}, {machine["cores"]} cores, {instruction_sets()[0]} kernels.

| streams | chairlift | llama.cpp | llama.cpp / chairlift |
|---|---|---|---|
{chr(10).join(lines)}
"""
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
