"""How each peer is started and asked, and what it is expected to take."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from servers import end, free_port
from tokenizers import Tokenizer

from peers.client import Answer, drive
from peers.install import HF, HOME, gguf, llama_bin, openvino_model, python
from peers.workload import Request

THREADS = os.cpu_count() or 1
BATCH = 16
"""Size of a static batch, and slots of llama.cpp's server where the name does not say otherwise."""
LONGEST = 1024
"""Context of a sequence: the longest prompt and answer are 768 together."""
OPENVINO_STEP_TOKENS = 1024
"""Tokens of OpenVINO's steps at most: on a machine with AMX that was a twentieth quicker than 256."""
LIMIT = 900.0
"""Seconds that a run may take."""

Arithmetic = Literal["fp32", "16 bit", "8 bit"]
Run = Callable[[list[Request], float | None], list[Answer]]
"""Answers requests, all sent at once or at a rate a second."""


@dataclass(frozen=True)
class Peer:
    """An engine in one of its settings. `command` has `{port}` in it where it listens."""

    command: list[str]
    weights: str
    """The form that they are kept in."""
    arithmetic: Arithmetic
    """The smallest type that its linear layers multiply in."""
    extra: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    start: float = 5.0
    """Seconds until it is ready, for the estimate."""
    speed: float = 100.0
    """Output tokens a second offline, for the estimate."""
    serves: bool = True
    """Whether it is a server; else it runs in process, and is driven as `orders.py` says."""
    online: bool = True
    """Whether it can take requests as they arrive."""
    some: int | None = None
    """How many of the requests it gets offline, where all would take too long and each costs the same."""

    @contextlib.contextmanager
    def running(self) -> Iterator[tuple[Run, int, float]]:
        """Starts it; yields what runs requests, its session, and how long it took to be ready. All of it ends at the end."""
        port = free_port()
        command = [part.replace("{port}", str(port)) for part in self.command]
        HOME.mkdir(exist_ok=True)
        began = time.perf_counter()
        with (HOME / "last.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log if self.serves else subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self.environ},
                start_new_session=True,
            )
        try:
            if self.serves:
                _await_ready(process, port)
                run: Run = lambda requests, rate: asyncio.run(drive(port, requests, rate, self.extra, LIMIT))  # noqa: E731
            else:
                _expect(process, "ready")
                run = lambda requests, rate: _order(process, requests, rate)  # noqa: E731
            yield run, process.pid, time.perf_counter() - began
        finally:
            end(process)


def _await_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Until a request is answered: 'listening' and 'healthy' mean different things among servers."""
    body = json.dumps({"model": "model", "prompt": [504, 253], "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"})
    refusal = ""
    for _ in range(6000):
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(request, timeout=60):
                return
        except urllib.error.HTTPError as error:
            refusal = error.read().decode(errors="replace")[:500]
            if error.code not in (404, 425, 503):
                break
        except OSError:
            pass
        time.sleep(0.05)
    raise RuntimeError(f"it did not start: {refusal}\n{_log()}")


def _log() -> str:
    return "\n".join((HOME / "last.log").read_text(errors="replace").splitlines()[-25:])


def _expect(process: subprocess.Popen[bytes], word: str | None = None) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().decode().strip()
    if not line or (word is not None and line != word):
        raise RuntimeError(f"it ended, or said {line!r}\n{_log()}")
    return line


def _order(process: subprocess.Popen[bytes], requests: list[Request], rate: float | None) -> list[Answer]:
    assert process.stdin is not None
    due = [0.0 if rate is None else request.arrival / rate for request in requests]
    order = {"prompts": [r.prompt for r in requests], "outputs": [r.output for r in requests], "arrivals": due}
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.flush()
    reply = json.loads(_expect(process))
    tokenizer = Tokenizer.from_file(str(HF / "tokenizer.json"))
    answers = []
    for request, at, times, tokens in zip(requests, due, reply["times"], reply["tokens"], strict=True):
        error = "" if len(tokens) == request.output else f"{len(tokens)} tokens, not {request.output}"
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        answers.append(Answer(at, times, len(tokens), len(request.prompt), text, error))
    return answers


def _llama(kind: str, arithmetic: Arithmetic, seqs: int = BATCH, speed: float = 100.0) -> Peer:
    # Its prompt caches are off: no prompt comes twice, but looking for one costs something.
    flags = ["--cache-ram", "0", "--no-cache-prompt", "--slot-prompt-similarity", "0"]
    return llama_server(gguf(kind), kind, arithmetic, flags, seqs=seqs, speed=speed)


def llama_server(
    file: Path,
    weights: str,
    arithmetic: Arithmetic,
    flags: Sequence[str] = (),
    *,
    seqs: int = BATCH,
    context: int = LONGEST,
    speed: float = 100.0,
) -> Peer:
    """llama.cpp's server with a file, `seqs` slots and `context` tokens for each."""
    size = ["--parallel", str(seqs), "--ctx-size", str(seqs * context), "--threads", str(THREADS), "--threads-batch", str(THREADS)]
    server = [str(llama_bin("llama-server")), "--model", str(file), "--host", "127.0.0.1", "--port", "{port}", "--no-ui", "--log-disable"]
    return Peer([*server, *size, *flags], weights, arithmetic, start=3, speed=speed)


def _vllm_environ() -> dict[str, str]:
    # Left alone it keeps a core for itself and uses one thread.
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}",
        "OMP_NUM_THREADS": str(THREADS),
        "LD_PRELOAD": ":".join(str(path) for path in (*_preloads("libtcmalloc_minimal.so.4"), *_preloads("libiomp5.so"))),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def vllm_server(model: Path, dtype: str, speed: float) -> Peer:
    """vLLM's server with a checkpoint."""
    flags = ["--dtype", dtype, "--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", str(LONGEST)]
    # `vllm serve` does not find its own metadata under the name vllm-cpu.
    module = [str(python("vllm")), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "model"]
    command = [*module, "--host", "127.0.0.1", "--port", "{port}", *flags]
    return Peer(command, dtype, _VLLM_ARITHMETIC[dtype], {}, _vllm_environ(), start=45, speed=speed)


def _vllm_in_process(dtype: str, speed: float) -> Peer:
    command = [str(python("vllm")), _script("vllm"), str(HF), dtype, str(LONGEST)]
    return Peer(command, dtype, _VLLM_ARITHMETIC[dtype], {}, _vllm_environ(), start=40, speed=speed, serves=False, online=False)


_VLLM_ARITHMETIC: dict[str, Arithmetic] = {"float32": "fp32", "bfloat16": "16 bit"}


def _preloads(name: str) -> list[Path]:
    """A library that vLLM's manual says to load first, where the machine or the environment has it."""
    places = [HOME / "vllm/lib", *HOME.glob("vllm/tcmalloc/usr/lib/*-linux-gnu"), *Path("/usr/lib").glob("*-linux-gnu")]
    return [place / name for place in places if (place / name).exists()][:1]


def _script(engine: str) -> str:
    return str(Path(__file__).with_name(f"{engine}_engine.py"))


def openvino_engine(model: Path, weights: str, hint: str, arithmetic: Arithmetic, speed: float) -> Peer:
    """OpenVINO GenAI, in process, with a converted model."""
    command = [str(python("openvino")), _script("openvino"), str(model), hint, str(THREADS), str(OPENVINO_STEP_TOKENS)]
    return Peer(command, f"{weights}, {hint} hint", arithmetic, start=5, speed=speed, serves=False)


def _transformers(mode: str, **facts: Any) -> Peer:
    seqs = 64 if mode == "continuous" else BATCH
    environ = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [str(python("transformers")), _script("transformers"), str(HF), mode, str(seqs), str(THREADS)]
    return Peer(command, "fp32", "fp32", {}, environ, 10, serves=False, **facts)


def _chairlift(weights: str, arithmetic: Arithmetic, flags: list[str], batching: str = "continuous", speed: float = 150.0) -> Peer:
    modes = {
        "continuous": [],
        "static": ["--batching", "static", "--static-batch-size", str(BATCH)],
        "dynamic": ["--batching", "dynamic", "--static-batch-size", str(BATCH), "--batch-timeout-ms", "100"],
    }
    common = ["--no-enable-prefix-caching", *modes[batching], *flags]
    return chairlift_server(gguf("Q4_1"), weights, arithmetic, common, speed=speed)


def chairlift_server(file: Path, weights: str, arithmetic: Arithmetic, flags: Sequence[str] = (), *, speed: float = 150.0) -> Peer:
    """`chairlift serve` with a file."""
    code = "import sys; from chairlift.cli.main import main; sys.exit(main(sys.argv[1:]))"
    serve = [sys.executable, "-c", code, "serve", str(file), "--served-model-name", "model", "--port", "{port}", "--log-level", "warning"]
    return Peer([*serve, *flags], weights, arithmetic, {}, _chairlift_environ(), start=5, speed=speed)


def _chairlift_in_process(weights: str, arithmetic: Arithmetic, settings: dict[str, Any], speed: float) -> Peer:
    command = [sys.executable, _script("chairlift"), str(gguf("Q4_1")), json.dumps(settings)]
    return Peer(command, weights, arithmetic, {}, _chairlift_environ(), start=5, speed=speed, serves=False, online=False)


def _chairlift_environ() -> dict[str, str]:
    source = Path(__file__).parent.parent.parent / "python"
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH", "")]))}


def _flags(settings: dict[str, Any]) -> list[str]:
    words = ((f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)) for name, value in settings.items())
    return [word for pair in words for word in pair]


F32 = ["--dtype", "float32", "--quantization", "none"]
F16 = ["--dtype", "float16", "--quantization", "none"]
INT8 = ["--quantization", "int8"]
TILES = "amx_bf16" in Path("/proc/cpuinfo").read_text()
FAST: Arithmetic = "16 bit" if TILES else "8 bit"
"""The arithmetic of `--cpu-math fast` on this machine."""
DEFAULT: Arithmetic = "fp32" if TILES else "16 bit"
"""The arithmetic of the default on this machine."""

OURS: dict[str, tuple[Arithmetic, dict[str, Any], float]] = {
    "chairlift": (DEFAULT, {}, 300),
    "chairlift_undrafted": (DEFAULT, {"speculative_config": {"method": "off"}}, 300),
    "chairlift_exact": ("fp32", {"cpu_math": "exact"}, 250),
    "chairlift_int8": ("8 bit", {"quantization": "int8"}, 400),
    "chairlift_fast": (FAST, {"cpu_math": "fast"}, 400),
}
"""Arithmetic, settings and speed of our peers, each of which there is as a server and in process."""

PEERS: dict[str, Peer] = {
    **{name: _chairlift("Q4_1", arithmetic, _flags(settings), speed=speed) for name, (arithmetic, settings, speed) in OURS.items()},
    "vllm_f32": vllm_server(HF, "float32", 150),
    "vllm_bf16": vllm_server(HF, "bfloat16", 200),
    "llama_q4_1": _llama("Q4_1", "8 bit", speed=83),
    "llama_q8_0": _llama("Q8_0", "8 bit", speed=118),
    "llama_f16": _llama("F16", "16 bit", speed=120),
    "llama_f16_32": _llama("F16", "16 bit", 32, speed=120),
    "llama_bf16": _llama("BF16", "16 bit", speed=120),
    "llama_f32": _llama("F32", "fp32", speed=90),
    **{f"{name}_in_process": _chairlift_in_process("Q4_1", *settings) for name, settings in OURS.items()},
    "openvino_f32": openvino_engine(openvino_model("fp16"), "fp16", "f32", "fp32", 250),
    "openvino_bf16": openvino_engine(openvino_model("fp16"), "fp16", "bf16", "16 bit", 300),
    "openvino_int8_f32": openvino_engine(openvino_model("int8"), "int8", "f32", "8 bit", 300),
    "openvino_int8_bf16": openvino_engine(openvino_model("int8"), "int8", "bf16", "8 bit", 300),
    "vllm_f32_in_process": _vllm_in_process("float32", 150),
    "vllm_bf16_in_process": _vllm_in_process("bfloat16", 200),
    "transformers_one_by_one": _transformers("one_by_one", speed=17, online=False, some=12),
    "transformers_static16": _transformers("static", speed=26, online=False),
    "transformers_continuous": _transformers("continuous", speed=35),
    "chairlift_f32": _chairlift("fp32", "fp32", F32),
    "chairlift_f32_static": _chairlift("fp32", "fp32", F32, "static", speed=80),
    "chairlift_f32_dynamic": _chairlift("fp32", "fp32", F32, "dynamic", speed=80),
    "chairlift_f16": _chairlift("f16", "fp32", F16),
    "chairlift_f16_static": _chairlift("f16", "fp32", F16, "static", speed=80),
    "chairlift_f16_dynamic": _chairlift("f16", "fp32", F16, "dynamic", speed=80),
    "chairlift_int8_static": _chairlift("Q4_1", "8 bit", INT8, "static", speed=110),
    "chairlift_int8_dynamic": _chairlift("Q4_1", "8 bit", INT8, "dynamic", speed=110),
}
"""Every peer by its name. `chairlift` is `chairlift serve` with nothing chosen."""


def flagged(name: str, *flags: str) -> Peer:
    """A peer with more flags. A flag that it has already gets the new value."""
    return replace(PEERS[name], command=[*PEERS[name].command, *flags])
