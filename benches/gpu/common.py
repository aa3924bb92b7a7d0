"""What the scripts for a GPU share: what the machine is, how things are timed, a limit of time, and the page that is written."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from pack import EXTENSION_MODULE
from results import Results, cell

ROOT = Path(__file__).parents[2]
NEEDED = ("numpy", "torch", "triton", "transformers", "tokenizers", "safetensors", "jinja2", "msgpack", "pydantic", "rich")
"""What chairlift and its peers import."""
DRY_GIB = 24
"""Memory that a dry run pretends to have."""
COLD = 200e6
"""Bytes that calls go through in turn, so that none finds what it reads in the L2 cache of 50 or 60 MB."""
SMALL = 60 * 2**30
"""Bytes of memory below which a device gets the sizes for 24 GB cards."""


LOST, LEFT = "CHAIRLIFT_LOST_PARTS", "CHAIRLIFT_SECONDS_LEFT"
"""Variables with which a process that lost the device tells the one that goes on which parts to leave out, and what time is left."""


class OutOfTime(BaseException):
    """Something took longer than it was given. Not an Exception, which libraries catch to go on."""


@dataclass
class Run:
    """One run of a script: its settings, how long it may take, and its results so far.

    A script is a sequence of parts. A part that an earlier run has done is not run again, so that a script which was cut short goes on.
    """

    results: Results
    seconds: float
    dry: bool
    memory: float
    """Bytes of the device."""
    only: tuple[str, ...] = ()
    """Beginnings of the names of the parts to run, even if they are done; empty: all."""
    lost: tuple[str, ...] = ()
    """Parts after which the device was lost to a process; the one that goes on does not run them again."""
    began: float = field(default_factory=time.monotonic)
    flags: dict[str, Any] = field(default_factory=dict)
    """The script's own flags."""
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called before another process goes on."""
    _part: str = ""
    _parts: list[str] = field(default_factory=list)

    @property
    def device(self) -> str:
        """Where things run: on the CPU when it is dry."""
        return "cpu" if self.dry else "cuda"

    @property
    def small(self) -> bool:
        """Whether the device has too little memory for two copies of an 8B model: a 4090, an L4, an A10."""
        return self.memory < SMALL

    @property
    def left(self) -> float:
        """Seconds; a dry run may take any time, for other work may slow it."""
        return math.inf if self.dry else self.seconds - (time.monotonic() - self.began)

    def selects(self, name: str) -> bool:
        """Whether `--only` names a part; it names all if it is not given."""
        return name.startswith(self.only or "")

    def part(self, name: str, work: Callable[[], object], *, needs: float = 10, most: float = math.inf) -> bool:
        """Runs a part unless it is done, not selected, or less than `needs` seconds are left; returns whether it is done.

        It may take `most` seconds. What fails is written down, and the script goes on; a dry run ends there.
        """
        self._parts.append(name)
        if self.results.ends.get(name) == "done":
            print(f"{name}: done by an earlier run", flush=True)
            return True
        if name in self.lost or not self.selects(name):
            return False
        self._part, began = name, time.monotonic()
        if self.left < needs:
            self._end("skipped", began, f"{max(0, self.left):.0f} s are left and it needs {needs:.0f}")
            return False
        print(f"== {name}, {self.left:.0f} s left", flush=True)
        try:
            with _limit(math.inf if self.dry else min(most, max(1, self.left - 5))):
                work()
        except (Exception, OutOfTime) as error:
            self._end("failed", began, f"{type(error).__name__}: {str(error).strip()[:300] or 'no message'}".replace("\n", " "))
            if self.dry:
                raise
            if not isinstance(error, OutOfTime):
                traceback.print_exception(error, limit=-6)
            if device_is_lost():
                self._go_on_in_another_process(name)
            free()
            return False
        wrong = self.results.wrong(name)
        self._end("wrong" if wrong else "done", began, f"{wrong} checks" if wrong else None)
        return not wrong

    def _go_on_in_another_process(self, name: str) -> None:
        """Replaces this process, in which every call of CUDA would fail from now on."""
        print(f"== the device is lost to this process after {name}: another goes on", flush=True)
        for call in self.at_end:
            call()
        state = {LOST: ",".join((*self.lost, name)), LEFT: f"{self.left:.0f}"}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | state)

    def _end(self, end: str, began: float, why: str | None) -> None:
        seconds = time.monotonic() - began
        self.results.add(self._part, end=end, seconds=round(seconds, 1), why=why)
        print(f"== {self._part}: {end}, {seconds:.1f} s{f' ({why})' if why else ''}", flush=True)

    @contextlib.contextmanager
    def tried(self, what: str, seconds: float = math.inf) -> Iterator[None]:
        """Goes on after a step of a part that fails, or takes longer than `seconds` or than the run has left; the page says why."""
        try:
            with _limit(math.inf if self.dry else min(seconds, max(1, self.left - 5))):
                yield
        except (Exception, OutOfTime) as error:
            if self.dry or device_is_lost():
                raise
            self.say(f"Failed: {what}: {type(error).__name__}: {str(error).strip()[:300] or 'no message'}".replace("\n", " "))
            free()

    def say(self, text: str) -> None:
        """Puts a paragraph on the page, and prints it."""
        print(text, flush=True)
        self.results.add(self._part, text=text)

    def row(self, table: str, row: dict[str, Any]) -> int:
        """Adds a row to the table of that title and returns its number."""
        print(f"{table}: {_words(row)}", flush=True)
        return self.results.add_row(self._part, table, row)

    def more(self, number: int, more: dict[str, Any]) -> None:
        """Adds columns to a row."""
        print(f"  {_words(more)}", flush=True)
        self.results.add(self._part, of=number, more=more)

    def keep(self, **values: Any) -> None:
        """Keeps numbers for other parts, and for later runs, in `results.values`."""
        self.results.add(self._part, values=values)

    def finish(self) -> int:
        """Prints how the parts ended; returns 1 if one found something wrong or failed, else 0."""
        ends = {name: self.results.ends[name] for name in self._parts if name in self.results.ends}
        for end in ("wrong", "failed", "skipped"):
            if named := [name for name, how in ends.items() if how == end]:
                print(f"{end.upper()}: {', '.join(named)}", flush=True)
        print(f"{self.results.name}: {sum(how == 'done' for how in ends.values())} of {len(ends)} parts are done", flush=True)
        return int(any(how in ("wrong", "failed") for how in ends.values()))


def _words(row: dict[str, Any]) -> str:
    return ", ".join(f"{key} {cell(value)}" for key, value in row.items())


def begin(name: str, description: str, minutes: float, **flags: str | bool) -> Run:
    """Reads the command line, checks that all is there, fixes seeds, and notes the machine. Ends the process if something is missing.

    `flags` are the script's own: a flag with a value has its help, one without has False. Their values are in the run's `flags`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benches" / "results" / "gpu", help="directory of the log and the page")
    parser.add_argument("--minutes", type=float, default=minutes, help=f"what does not fit is skipped (default: {minutes:g})")
    parser.add_argument("--only", metavar="NAME[,NAME]", help="parts whose names begin so, even if they are done; the others are not run")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU, kernels in Triton's interpreter: is the script in order?")
    for flag, words in flags.items():
        if words is False:
            parser.add_argument(f"--{flag}", action="store_true")
        else:
            parser.add_argument(f"--{flag}", help=str(words))
    given = parser.parse_args()
    # As any end of the process does, this ends the processes that the script started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    if given.dry:
        # Triton asks when a kernel is defined.
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    facts = {**_check(given.dry), "dry": given.dry}
    only = tuple(part for part in (given.only or "").split(",") if part)
    lost = tuple(part for part in os.environ.pop(LOST, "").split(",") if part)
    results = Results(name, given.out, facts, again=lambda part: part not in lost and bool(only) and part.startswith(only), lost=lost)
    seconds = float(os.environ.pop(LEFT, 60 * given.minutes))
    run = Run(results, seconds, given.dry, facts.get("GiB", DRY_GIB) * 2**30, only, lost)
    run.flags = {flag: getattr(given, flag) for flag in flags}
    import torch

    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    print(_words(facts), flush=True)
    return run


def _check(dry: bool) -> dict[str, Any]:
    """What the machine is, with versions; ends the process with all that is missing."""
    sys.path.insert(0, str(ROOT / "python"))
    facts: dict[str, Any] = {"python": platform.python_version()}
    missing = []
    for name in NEEDED:
        try:
            version = getattr(importlib.import_module(name), "__version__", "?")
        except ImportError as error:
            missing.append(f"the Python package {name} ({error}): install it, or put a wheel's contents on PYTHONPATH")
            continue
        if name in ("torch", "triton", "transformers"):
            facts[name] = version
    if not any((ROOT / "python" / "chairlift").glob("_core*.so")):
        missing += _build()
    if not missing:
        try:
            importlib.import_module("chairlift._core")
        except ImportError as error:
            missing.append(f"a chairlift._core that loads here ({error}): was it built for this processor and C library?")
    if "torch" in facts and not dry:
        import torch

        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            facts |= {"GPU": properties.name, "SMs": properties.multi_processor_count, "GiB": round(properties.total_memory / 2**30)}
            facts |= {"CUDA": torch.version.cuda, "driver": _driver(), "cores": os.cpu_count()}
        else:
            missing.append("a CUDA device that torch sees (--dry tries the script without one)" + _advice("cuda", "why_no_device"))
        if advice := _advice("launcher", "missing_for_launcher"):
            missing.append(f"for Triton's launcher{advice}")
    if missing:
        print(", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
        sys.exit("missing here:\n" + "\n".join(f"- {what}" for what in missing))
    return facts


def _advice(module: str, function: str) -> str:
    """What a module of chairlift's runner says about the machine, behind a colon; empty if it says nothing, or cannot be imported."""
    try:
        found = getattr(importlib.import_module(f"chairlift.runner.{module}"), function)()
    except ImportError:
        return ""
    return f": {getattr(found, 'text', found)}" if found else ""


def _build() -> list[str]:
    """Builds the extension if there is a toolchain; what is missing otherwise."""
    target = ROOT / "python" / "chairlift" / "_core.abi3.so"
    advice = "build it elsewhere on a like machine (`make build`), and bring that file along"
    if shutil.which("cargo") is None:
        return [f"{target.relative_to(ROOT)}, and no cargo to build it: {advice}"]
    print("building chairlift._core", flush=True)
    command = ["cargo", "build", "--release", "--offline", "-p", "chairlift-python"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | EXTENSION_MODULE, capture_output=True, text=True, check=False)
    if done.returncode:
        return [f"{target.relative_to(ROOT)}, which cargo could not build without a network ({done.stderr.strip()[-300:]}): {advice}"]
    shutil.copy(Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "lib_core.so", target)
    return []


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "?"


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the main thread after so long: a compiler may take minutes."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"took more than {seconds:.0f} s")

    before, began = signal.signal(signal.SIGALRM, ring), time.monotonic()
    outer, _ = signal.setitimer(signal.ITIMER_REAL, 0 if math.isinf(seconds) else max(seconds, 0.1))
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        # One that was set around this one goes on.
        signal.setitimer(signal.ITIMER_REAL, max(0.1, outer - (time.monotonic() - began)) if outer else 0)


def device_is_lost() -> bool:
    """Whether an error of the device stays with this process, as after an access to memory that is not there."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def free() -> None:
    """Gives memory back that nobody holds."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def time_calls(run: Run, calls: Sequence[Callable[[], object]], *, rounds: int = 1, repeats: int = 15, graph: bool = True) -> float:
    """The median seconds of one call, over replays of a CUDA graph of all of them, each `rounds` times; NaN in a dry run.

    Calls work on memory of their own, so that none finds another's in the L2 cache: see `COLD`. In a graph no launch is waited for.
    """
    import torch

    if run.dry:
        calls[0]()
        return math.nan
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    count = rounds * len(calls)

    def once() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    again: Callable[[], object] = once
    if graph:
        kept = torch.cuda.CUDAGraph()
        with torch.cuda.graph(kept):
            once()
        again = kept.replay
    for _ in range(2):
        again()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for start, end in zip(events[::2], events[1::2], strict=True):
        start.record()
        again()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in zip(events[::2], events[1::2], strict=True))
    return float(times[len(times) // 2]) / 1e3 / count


def copies(run: Run, size: float, most: int = 16) -> int:
    """How many buffers of so many bytes it takes for calls to find them cold."""
    return 1 if run.dry else int(min(max(math.ceil(COLD / max(size, 1)), 2), most))


def ceilings(run: Run) -> tuple[float, float]:
    """What the device reaches: bytes a second, read and written by a copy, and FLOP a second of a product of bf16 matrices.

    Measured once by a script, as its part "ceilings"; NaN if that failed.
    """
    import torch

    def measure() -> None:
        size, side = (1 << 12, 64) if run.dry else (2 << 30, 8192)
        source, target = (torch.zeros(size // 4, device=run.device) for _ in range(2))
        a, b = (torch.randn(side, side, device=run.device).bfloat16() for _ in range(2))
        # By a kernel: a copy in a graph is another engine's, and slower.
        copied = 2 * size / time_calls(run, [lambda: torch.neg(source, out=target)])
        computed = 2 * side**3 / time_calls(run, [lambda: a @ b], rounds=4)
        run.keep(copy_bytes_s=copied, bf16_flop_s=computed)
        run.say(f"Ceilings: copy {copied / 1e9:.0f} GB/s, bf16 {side}x{side} product {computed / 1e12:.0f} TFLOP/s.")

    run.part("ceilings", measure)
    copied, computed = (run.results.values.get(name) or math.nan for name in ("copy_bytes_s", "bf16_flop_s"))
    return copied, computed


def write_model(directory: Path, config: dict[str, Any]) -> Path:
    """Makes a model's directory without weights: its config.json, and a tokenizer of bytes, with a word for each id behind those."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate(alphabet + [f"t{i}" for i in range(len(alphabet), config["vocab_size"])])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """The config.json of a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "bfloat16",
    } | more


@contextlib.contextmanager
def steps_overlap(overlaps: bool) -> Iterator[None]:
    """Engines made within run the model in torch, on a CPU too, and plan a step while another runs, or do not."""
    from chairlift.engine import engine as engine_module
    from chairlift.runner.build import build_runner
    from chairlift.runner.torch_backend import TorchBackend

    usual = engine_module._build_runner
    backend = partial(TorchBackend, overlaps=overlaps)
    engine_module._build_runner = lambda config, directory, eos, on_phase: build_runner(config, directory, on_phase, backend)
    try:
        yield
    finally:
        engine_module._build_runner = usual
