"""Prints what the README's commands print, from a real run with the default model: `python docs/generators/readme_outputs.py`.

Long outputs are shortened in the README by hand, to the lines that it shows.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from running_server import SHARED_FLAGS, Server

from chairlift import LLM, SamplingParams


def answer(server: Server, key: str, name: str, *, kill: bool = False) -> str:
    """Returns the SHA-256 of an answer's text. With `kill` the engine is killed after 21 pieces."""
    text = ""
    for at, piece in enumerate(server.answer(key, name)):
        text += piece
        if kill and at == 20:
            server.kill_engine()
    return hashlib.sha256(text.encode()).hexdigest()


def chairlift(*arguments: str) -> None:
    """Prints a command and what it prints."""
    done = subprocess.run([sys.executable, "-m", "chairlift", *arguments], capture_output=True, text=True, check=True)
    print(f"$ chairlift {' '.join(arguments)}", done.stdout, sep="\n")


def serve(folder: str) -> None:
    """Prints explanations, and the hashes of an answer alone, among others, and with the end of its engine."""
    server = Server(folder, *SHARED_FLAGS, "--journal", f"{folder}/day.journal")
    with contextlib.closing(server), ThreadPoolExecutor(12) as pool:
        server.wait()
        hashes = [answer(server, "KEY1", "alice-1")]
        for number in range(1, 13):
            pool.submit(answer, server, "KEY2", f"bob-{number}")
        time.sleep(1)
        hashes.append(answer(server, "KEY1", "alice-2"))
        pool.shutdown()
        for key, name in (("KEY2", "bob-12"), ("KEY1", "alice-2")):
            print(f"$ chairlift explain {name}", *textwrap.wrap(server.explain(key, name), 140), "", sep="\n")
        hashes.append(answer(server, "KEY1", "alice-3", kill=True))
        print("alone; among twelve others; with the end of the engine", *hashes, "", sep="\n")


def main() -> None:
    """Prints all outputs."""
    with tempfile.TemporaryDirectory() as folder:
        serve(folder)
        journal = min(Path(folder).glob("day.journal*"))  # the first engine's
        chairlift("replay", str(journal), "--set", "max_num_seqs=8,16")
        chairlift("plan", "--modelled-device", "cpu")
    with LLM() as llm, llm.open("Question: is 91 prime? Let us think.") as root:
        paths = root.fork(2)
        llm.generate(list(paths), [SamplingParams(max_tokens=24, seed=seed) for seed in (1, 2)])
        print([round(path.score(mean=True), 2) for path in paths])


if __name__ == "__main__":
    main()
