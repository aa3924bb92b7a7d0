"""Seconds from the start of `chairlift serve` to the first token of an answer, with the default model, and the size of an installation.

    python benches/start.py [--python PYTHON] [--runs 9]       writes benches/results/start.md

PYTHON is that of an environment with chairlift or chairlift-cpu, by default this one. The model is downloaded before. CPU seconds are
those of the server's and the engine's process until they end.
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
import time
from pathlib import Path

from scheduler import machine

ROOT = Path(__file__).parent.parent
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


def start(python: str) -> tuple[float, float, float]:
    """Seconds until the server listens, until the first token's answer, and of CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    command = [python, "-P", "-m", "chairlift", "serve", "--port", "0", "--device", "cpu"]
    # As where users install it, Python's files are compiled once.
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stderr is not None
        try:
            address = listening(process)
            listened = time.perf_counter() - began
            connection = http.client.HTTPConnection(address)
            connection.request("POST", "/v1/chat/completions", BODY, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            answered = time.perf_counter() - began
            if answer.status != 200:
                raise SystemExit(text.decode())
        finally:
            process.terminate()
        process.stderr.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return listened, answered, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
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
    lines += ["| | median | least | most |", "|---|---|---|---|"]
    for name, values in zip(("listening", "first token answered", "CPU time"), zip(*runs, strict=True), strict=True):
        lines.append(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    (ROOT / "benches" / "results" / "start.md").write_text(text)


if __name__ == "__main__":
    main()
