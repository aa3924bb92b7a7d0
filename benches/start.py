"""Seconds from the start of `chairlift serve` to the first token of an answer, with the default model, and the size of an installation.

    python benches/start.py [--python PYTHON] [--runs 9]       writes benches/results/start.md
    python benches/start.py --7b                               writes benches/results/start_7b.md

PYTHON is that of an environment with chairlift or chairlift-cpu, by default this one. The model is downloaded before. CPU seconds are
those of the server's and the engine's process until they end. With --7b the model is a file of random weights in Mistral 7B's shape,
Q4_K_M, which is read before; the memory is that of both processes after the answer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import random_gguf
from pages import machine, write
from peers.machine import session_memory
from random_gguf import Q4, Q6, Tensors

BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
SIZE = """
import importlib.metadata, pathlib, sysconfig
folder = pathlib.Path(sysconfig.get_path("purelib"))
names = {dist.name for dist in importlib.metadata.distributions()}
size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
print("chairlift-cpu" if "chairlift-cpu" in names else "chairlift", round(size / 1e6), sep=", ")
"""


def listening(process: subprocess.Popen[str]) -> str:
    """Waits until a server listens; returns its host and port."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"listening on http://([^/]+)", line):
            return found[1]
    raise SystemExit("the server did not start")


class Start(NamedTuple):
    """One start: seconds until the server listens, until the first token's answer, and of CPU time; memory in MB."""

    listening: float
    answered: float
    cpu: float
    anonymous: float
    resident: float


def start(python: str, *model: str, body: str = BODY, route: str = "/v1/chat/completions") -> Start:
    """Starts a server, asks for one token and ends it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    command = [python, "-P", "-m", "chairlift", "serve", *model, "--port", "0", "--device", "cpu"]
    # As where users install it, Python's files are compiled once.
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True) as process:
        assert process.stderr is not None
        try:
            address = listening(process)
            listened = time.perf_counter() - began
            connection = http.client.HTTPConnection(address)
            connection.request("POST", route, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            answered = time.perf_counter() - began
            if answer.status != 200:
                raise SystemExit(text.decode())
            anonymous, resident = session_memory(process.pid)
        finally:
            process.terminate()
        process.stderr.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Start(listened, answered, cpu, anonymous, resident)


def write_7b(to: Path) -> None:
    """Writes a file in Mistral 7B's shape, with the types of llama.cpp's Q4_K_M."""
    hidden, inner, layers, vocabulary = 4096, 14336, 32, 32768
    metadata: dict[str, float] = {"context_length": 32768, "embedding_length": hidden, "block_count": layers, "feed_forward_length": inner}
    metadata |= {"attention.head_count": 32, "attention.head_count_kv": 8, "attention.layer_norm_rms_epsilon": 1e-5}
    metadata |= {"rope.freq_base": 1e6, "rope.dimension_count": 128, "vocab_size": vocabulary}
    tensors: Tensors = {"token_embd.weight": ((vocabulary, hidden), Q4), "output.weight": ((vocabulary, hidden), Q6)}
    tensors["output_norm.weight"] = ((hidden,), None)
    for layer in range(layers):
        # Half of the layers have more bits for these.
        more = Q6 if layer % 2 else Q4
        parts = random_gguf.attention_tensors(hidden, (32, 8, 128), norms=False) | random_gguf.mlp_tensors(hidden, inner)
        parts |= {"attn_v.weight": ((1024, hidden), more), "ffn_down.weight": ((hidden, inner), more)}
        parts |= {"attn_norm.weight": ((hidden,), None), "ffn_norm.weight": ((hidden,), None)}
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in parts.items()}
    random_gguf.write(to, "llama", metadata, tensors)


def measure_7b(python: str, runs: int) -> None:
    """Writes what a start of the 7B takes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "7b-Q4_K_M.gguf"
        write_7b(file)
        size = file.stat().st_size / 1e6
        body = json.dumps({"prompt": [5, 6, 7, 8], "max_tokens": 1})
        starts = [start(python, str(file), body=body, route="/v1/completions") for _ in range(runs + 1)][1:]
    lines = [
        "# Start of a 7B",
        "",
        machine(),
        f"{runs} starts of `chairlift serve` with a Q4_K_M file of {size:,.0f} MB, random weights, in memory before; seconds.",
        "Anonymous memory is what the processes own, after the answer; the file is mapped beside it.",
        "",
        *table(starts),
    ]
    lines.append(row("anonymous memory / file", [one.anonymous / size for one in starts]))
    lines.append(row("all memory, MB", [one.resident for one in starts], ",.0f"))
    write("start_7b.md", lines)


def table(starts: list[Start]) -> list[str]:
    """A table of the seconds of some starts."""
    lines = ["| | median | least | most |", "|---|---|---|---|"]
    names = ("listening", "first token answered", "CPU time")
    return lines + [row(name, list(values)) for name, values in zip(names, zip(*starts, strict=True), strict=False)]


def row(name: str, values: list[float], form: str = ".2f") -> str:
    """A line of a table."""
    return f"| {name} | {statistics.median(values):{form}} | {min(values):{form}} | {max(values):{form}} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--7b", action="store_true", dest="large")
    args = parser.parse_args()
    if args.large:
        return measure_7b(args.python, args.runs)
    size = subprocess.run([args.python, "-P", "-c", SIZE], check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run([args.python, "-P", "-m", "chairlift", "pull"], check=True)
    start(args.python)  # compiles Python's files and reads the model into memory
    runs = [start(args.python) for _ in range(args.runs)]
    lines = [
        "# Start",
        "",
        machine(),
        f"{size} MB of site-packages; {args.runs} starts of `chairlift serve` with the default model, seconds.",
        "",
    ]
    write("start.md", [*lines, *table(runs)])


if __name__ == "__main__":
    main()
