"""Texts per second of `LLM.embed` and `POST /v1/embeddings` beside sentence-transformers, of the same encoder on the same threads.

    python benches/embeddings.py MODEL --peer PYTHON [--threads N]       writes benches/results/embeddings.md

PYTHON is that of an environment with sentence-transformers. Texts are runs of words of this repository's pages. Each program runs alone,
after a first run that does not count; the figure is the best of three runs. `encode` of sentence-transformers has its default batch of 32.
The cosine is the least between the two programs' embeddings of a text.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from pages import ROOT, machine, write
from servers import server

SETS = {"short": (200, 4, 12), "medium": (60, 20, 40), "long": (24, 110, 140)}
"""Texts of a set, and the least and most words of each."""
RUNS = 3
PEER = """
import json, sys, time
import numpy, torch
from sentence_transformers import SentenceTransformer, __version__
model, texts, threads, out = sys.argv[1:]
torch.set_num_threads(int(threads))
encoder = SentenceTransformer(model, device="cpu")
seconds = {}
for name, some in json.load(open(texts)).items():
    encoder.encode(some)
    for run in range(3):
        began = time.perf_counter()
        found = encoder.encode(some, normalize_embeddings=True)
        seconds[name] = min(seconds.get(name, 1e9), time.perf_counter() - began)
    numpy.save(f"{out}/{name}.npy", found)
print(json.dumps({"seconds": seconds, "version": f"sentence-transformers {__version__}, torch {torch.__version__}"}))
"""


def texts() -> dict[str, list[str]]:
    """The texts of each set."""
    pages = " ".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    words = re.findall(r"[A-Za-z][A-Za-z',.]*", pages)  # a table's row can have more tokens than the model's limit
    draw = random.Random(0)
    made = {}
    for name, (count, least, most) in SETS.items():
        sizes = [draw.randint(least, most) for _ in range(count)]
        made[name] = [" ".join(words[at : at + size]) for size in sizes for at in [draw.randrange(len(words) - size)]]
    return made


def best(work: Callable[[], object]) -> float:
    """The shortest of some runs, after one that does not count, in seconds."""
    work()
    took = []
    for _ in range(RUNS):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)


def served(model: str, threads: int, sets: dict[str, list[str]]) -> dict[str, float]:
    """Seconds of one request for each set."""
    command = [sys.executable, "-P", "-m", "chairlift", "serve", model, "--port", "{port}", "--threads", str(threads), "--device", "cpu"]
    with server(command, log=Path(os.devnull)) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port)

        def ask(some: list[str]) -> None:
            body = json.dumps({"input": some, "encoding_format": "base64"})
            connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise SystemExit(text.decode())

        return {name: best(lambda some=some: ask(some)) for name, some in sets.items()}  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", required=True, metavar="PYTHON")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    from chairlift import LLM

    sets = texts()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(sets))
        command = [args.peer, "-c", PEER, args.model, str(file), str(args.threads), folder]
        peer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        theirs = {name: np.load(f"{folder}/{name}.npy") for name in sets}
    with LLM(args.model, threads=args.threads, device="cpu") as llm:
        ours = {name: best(lambda some=some: llm.embed(some)) for name, some in sets.items()}  # type: ignore[misc]
        cosine = {name: float((llm.embed(some) * theirs[name]).sum(axis=1).min()) for name, some in sets.items()}
        tokens = {name: sum(len(llm.tokenizer.encode(text)) for text in some) / len(some) for name, some in sets.items()}
    http_seconds = served(args.model, args.threads, sets)
    lines = ["# Embeddings", "", machine(), f"{Path(args.model).name}, {args.threads} threads; {peer['version']}. Texts per second.", ""]
    lines += ["| texts | tokens each | `LLM.embed` | `/v1/embeddings` | sentence-transformers | ratio of `LLM.embed` | least cosine |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, some in sets.items():
        rates = [len(some) / seconds for seconds in (ours[name], http_seconds[name], peer["seconds"][name])]
        figures = " | ".join(f"{rate:,.0f}" for rate in rates)
        lines.append(f"| {len(some)} {name} | {tokens[name]:.0f} | {figures} | {rates[0] / rates[2]:.2f} | {cosine[name]:.6f} |")
    write("embeddings.md", lines)


if __name__ == "__main__":
    main()
