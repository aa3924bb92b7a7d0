"""Settings of the engine and the server. Each field is a flag and an environment variable."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from numbers import Real
from typing import Any

from chairlift.scheduling import TIERS

DEFAULT_SPECULATIVE_TOKENS, MAX_SPECULATIVE_TOKENS = 8, 16
"""Default and maximum number of tokens that speculative decoding proposes per sequence and step."""
MAX_CORPUS_TOKENS = 2**30
"""Maximum number of tokens of finished texts that it looks at."""

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The model that `serve`, `generate`, `chat` and `LLM()` use by default."""

ENV_PREFIX = "CHAIRLIFT_"

DEFAULT_SLOTS, DEFAULT_STEP_TOKENS = 64, 128
"""Default maximum of sequences and tokens per step, if memory is not short."""
CUDA_SLOTS, CUDA_STEP_TOKENS = 256, 2048
"""The same on a GPU. It needs this many to be busy, and runs a step of this size so quickly that streams hardly notice."""

LARGEST_WEIGHT, LARGEST_TIER_WEIGHT = 10_000, 100
ROUTINGS = ("predicted", "lmetric", "prefix-aware", "least-loaded", "round-robin")
"""Which of several engines gets a request: the names of the core's routings."""

LONGEST_MS = 1e10
"""The longest duration that a setting may have, in milliseconds: four months."""

_COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "static_batch_size",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "block_size",
    "num_kv_blocks",
    "kv_cache_memory_bytes",
    "threads",
    "max_lora_rank",
)
_DURATIONS = ("batch_timeout_ms", "queue_ageing_ms", "target_itl_ms", "gather_ms")


def _size(text: str) -> int:
    """Parses `4096`, `32k`, `2G` or `1.5GiB`. Decimal suffixes are lower case k/m/g, binary ones K/M/G or KiB/MiB/GiB."""
    text = text.strip()
    match = re.fullmatch(r"([^a-zA-Z]+)(?:([kmgt])|([KMGT])(?:iB)?)?", text)
    try:
        if match is None:
            raise ValueError
        number, decimal, binary = match.groups()
        return int(float(number) * (1000 ** " kmgt".index(decimal) if decimal else 1024 ** " KMGT".index(binary or " ")))
    except (ValueError, OverflowError):
        raise ValueError(f"not a size: {text!r} (try 4096, 32k or 2G)") from None


_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


def parse_duration(text: str) -> float:
    """Parses `90`, `30s`, `5m`, `1.5h` or `300ms` as seconds; a negative one is infinite. Raises ValueError."""
    match = re.fullmatch(r"\s*(-?[0-9.]+)(ms|s|m|h)?\s*", text)
    try:
        if match is None:
            raise ValueError
        seconds = float(match[1]) * _SECONDS[match[2] or "s"]
    except ValueError:
        raise ValueError(f"not a duration: {text!r:.100} (try 5m, 30s, 0, or -1 for ever)") from None
    return math.inf if seconds < 0 else seconds


def _name_list(text: str) -> tuple[str, ...]:
    """Parses `chat,embed`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _weights(text: str) -> dict[str, int]:
    """Parses `alice=2,bob=1`. The weights are validated with all other settings."""
    weights = {}
    for item in text.split(","):
        name, equals, weight = item.rpartition("=")
        if not equals or not name.strip() or not weight.strip().isdecimal():
            raise ValueError(f"expected weights like alice=2,bob=1, got {text!r:.100}")
        weights[name.strip()] = int(weight)
    return weights


def _modules(text: str) -> dict[str, str]:
    """Parses `sql=/adapters/sql,chat=/adapters/chat`."""
    modules = {}
    for item in text.split(","):
        name, equals, path = item.partition("=")
        if not equals or not name.strip() or not path.strip():
            raise ValueError(f"expected adapters like sql=/adapters/sql, got {text!r:.100}")
        modules[name.strip()] = path.strip()
    return modules


def _check_speculation(config: Mapping[str, str | int]) -> None:
    """Raises ValueError unless `config` has a known method and a number of tokens that a step can verify."""
    if unknown := config.keys() - {"method", "num_speculative_tokens"}:
        raise ValueError(f"--speculative-config: unknown key {min(unknown)!r}; there are 'method' and 'num_speculative_tokens'")
    if (method := config.get("method", "auto")) not in ("auto", "ngram", "off"):
        raise ValueError(f"--speculative-config: method must be 'auto', 'ngram' or 'off', got {method!r}")
    tokens = config.get("num_speculative_tokens", DEFAULT_SPECULATIVE_TOKENS)
    if type(tokens) is not int or not 1 <= tokens <= MAX_SPECULATIVE_TOKENS:
        raise ValueError(
            f"--speculative-config: num_speculative_tokens must be an integer from 1 to {MAX_SPECULATIVE_TOKENS}, got {tokens!r}"
        )


def _json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object. Its values are validated with all other settings."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text!r:.100}")
    return value


def _duration_or_auto(text: str) -> float:
    """Parses a number of milliseconds; `auto` is the longest."""
    try:
        return LONGEST_MS if text.strip().lower() == "auto" else float(text)
    except ValueError:
        raise ValueError(f"expected a number of milliseconds or auto, got {text!r}") from None


def _origins(text: str) -> tuple[str, ...]:
    """Parses `https://a.example,http://localhost:3000` or `*`."""
    origins = tuple(origin.strip().lower() for origin in text.split(","))
    for origin in origins:
        scheme, separator, host = origin.partition("://")
        if origin != "*" and not (scheme and separator and host and "/" not in host):
            raise ValueError(f"expected origins like https://chat.example,http://localhost:3000, without a path, or *, got {text!r:.100}")
    return origins


def host_and_port(text: str) -> tuple[str, int]:
    """Parses HOST:PORT, or [HOST]:PORT for an IPv6 address. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"expected HOST:PORT, like 10.0.0.1:7000, got {text!r:.100}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _flag(default: Any, help: str, parse: Callable[[str], Any] = str, *, group: str, secret: bool = False, **extra: Any) -> Any:
    """Defines a dataclass field that is the flag `--name` with `help` and `parse`, under the heading `group`."""
    return field(default=default, repr=not secret, metadata={"help": help, "parse": parse, "group": group, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings for loading a model and scheduling its requests."""

    model: str = DEFAULT_MODEL
    tokenizer: str | None = _flag(None, "directory or file of the tokenizer, when it is not beside the weights", group="model")
    chat_template: str | None = _flag(None, "Jinja file of the chat template, instead of the checkpoint's", metavar="FILE", group="model")
    revision: str | None = _flag(None, "branch, tag or commit, for a model of the hub", group="model")
    cache_dir: str | None = _flag(
        None,
        "directory for fetched and converted models (default: ~/.cache/chairlift, and the hub's own cache for models of the hub)",
        metavar="DIR",
        group="model",
    )
    generation_config: str = _flag(
        "auto",
        "'auto': requests that do not set temperature, top_p and the like use what the checkpoint's generation_config.json recommends; "
        "'none': they use temperature 1 and no truncation",
        choices=("auto", "none"),
        group="model",
    )
    load_format: str = _flag(
        "auto",
        "where weights come from; 'dummy' makes random ones from the config alone, 'none' has no model: arbitrary tokens, at once",
        choices=("auto", "dummy", "none"),
        group="model",
    )
    device: str = _flag("auto", "where the model runs", choices=("auto", "cpu", "cuda"), group="model")
    runner: str = _flag(
        "auto",
        "code that computes the model: 'rust' is for CPUs, 'torch' for any device; 'auto' takes Rust where it supports the model",
        choices=("auto", "rust", "torch"),
        group="model",
    )
    tensor_parallel_size: int = _flag(1, "devices, or processes on a CPU, that share each layer of the model", _size, group="model")
    threads: int | None = _flag(
        None,
        "threads that compute (default: one for each physical core that may be used, fewer by a container's quota or OMP_NUM_THREADS)",
        int,
        group="model",
    )
    cpu_isa: str = _flag(
        "auto",
        "instruction set of the CPU kernels; results of two instruction sets can differ in the last bits",
        choices=("auto", "amx", "avx512", "avx2", "neon", "portable"),
        group="model",
    )
    cpu_math: str = _flag(
        "exact",
        "'fast', on a CPU: weights and activations of 8 bits as with --quantization int8, or activations of 16 bits in matrix tiles "
        "(--cpu-isa amx), and KV of 16 bits; other answers. Flags that set a dtype prevail",
        choices=("exact", "fast"),
        group="model",
    )
    dtype: str = _flag(
        "auto",
        "how weights are kept, as in the checkpoint by default, a GGUF file's blocks included; a CPU computes in float32 all the same",
        choices=("auto", "float32", "float16", "bfloat16"),
        group="model",
    )
    quantization: str = _flag(
        "auto",
        "'int8', on a CPU: weights in blocks of 8 bits (or a GGUF file's 4), multiplied by activations of 8 bits: about twice as fast, "
        "perplexity within a percent, other answers; 'auto' does so where the weights would not fit into memory otherwise. "
        "In torch: the layers' weights in 8 bits, half the memory, but slower. "
        "'fp8', on a CUDA device: weights and activations of 8 bits",
        choices=("auto", "none", "int8", "fp8"),
        group="model",
    )
    enforce_eager: bool = _flag(
        False, "launch each step's kernels one by one, without CUDA graphs: slower, but quicker to start, and in less memory", group="model"
    )
    enable_lora: bool = _flag(False, "allow LoRA adapters; requests choose one each", group="model")
    lora_modules: Mapping[str, str] | None = _flag(
        None,
        "adapters to load at start, in peft's format: each has a name and a directory",
        _modules,
        metavar="NAME=PATH",
        group="model",
        nargs="+",
    )
    max_lora_rank: int = _flag(16, "highest rank of an adapter", int, group="model")
    seed: int = _flag(0, "seed of dummy weights, and of requests that name none", int, group="model")
    max_model_len: int | None = _flag(
        None,
        "longest prompt plus output, in tokens (default: what the model was made for, less where memory is short)",
        _size,
        group="model",
    )
    shared_max_model_len: bool = False
    """Whether `max_model_len` is for all models of a server. It is no flag: a server sets it."""
    max_num_seqs: int | None = _flag(
        None,
        f"sequences in one step (default: {DEFAULT_SLOTS}, on a CUDA device {CUDA_SLOTS}; fewer where memory is short)",
        _size,
        group="scheduler",
    )
    max_num_batched_tokens: int | None = _flag(
        None,
        "tokens in one step: longer prompts are computed in chunks "
        f"(default: {DEFAULT_STEP_TOKENS}, on a CUDA device {CUDA_STEP_TOKENS}, or --max-num-seqs; fewer where memory is short)",
        _size,
        group="scheduler",
    )
    scheduling_policy: str = _flag(
        "fcfs",
        "which waiting request goes first: the first to arrive (later ones pass it while it does not fit into the KV cache), the lowest "
        "priority number, the tenant served least, the least slack, the least left to do, the longest cached prefix, the tenant served "
        "least without preemption",
        choices=("fcfs", "priority", "fair", "deadline", "shortest", "prefix", "vtc"),
        group="scheduler",
    )
    tenant_weights: Mapping[str, int] | None = _flag(
        None,
        "shares of tenants under the policies 'fair' and 'vtc', like alice=2,bob=1; 1 for the others",
        _weights,
        metavar="SHARES",
        group="scheduler",
    )
    tier_weights: Mapping[str, int] | None = _flag(
        None,
        "factors of tenants' weights by service tier under the policies 'fair' and 'vtc' (default: priority=4,default=2,flex=1)",
        _weights,
        metavar="SHARES",
        group="scheduler",
    )
    speculative_config: Mapping[str, str | int] | None = _flag(
        None,
        'propose tokens and verify several in one step, as JSON: \'{"method": "auto", "num_speculative_tokens": 8}\'; \'ngram\' looks for '
        "the last tokens in earlier text, 'auto' also proposes the tokens that a grammar forces; the answers are the same (default: auto)",
        _json_object,
        metavar="JSON",
        group="scheduler",
    )
    draft_corpus_tokens: int = _flag(
        0,
        "look for proposed tokens also in finished prompts and answers of the same tenant and cache salt: the last so many tokens of all "
        "tenants, 16 bytes each (0: only in the request's own text)",
        int,
        metavar="TOKENS",
        group="scheduler",
    )
    batching: str = _flag(
        "continuous",
        "when requests join and leave: at every step, or as whole batches, which 'dynamic' does not hold back for long",
        choices=("continuous", "static", "dynamic"),
        group="scheduler",
    )
    static_batch_size: int | None = _flag(
        None, "sequences in a static or dynamic batch (default: --max-num-seqs)", _size, group="scheduler"
    )
    batch_timeout_ms: float | None = _flag(
        None, "how long the first of a dynamic batch waits for the others (default: not at all)", float, metavar="MS", group="scheduler"
    )
    max_num_queued_reqs: int | None = _flag(
        None, "requests that may wait; more are refused (default: any number)", _size, group="scheduler"
    )
    max_num_queued_tokens: int | None = _flag(
        None, "prompt tokens that may wait; more are refused (default: any number)", _size, group="scheduler"
    )
    queue_ageing_ms: float = _flag(
        10_000.0,
        "how long a request may be passed over, or one begun be put off, before it goes first",
        float,
        metavar="MS",
        group="scheduler",
    )
    target_itl_ms: float | None = _flag(
        None,
        "aimed time between two tokens of a request: prompts are computed in smaller chunks for it; default: 3 times the time of a step "
        "without prompts, while one prompt is in progress and none waits",
        float,
        metavar="MS",
        group="scheduler",
    )
    gather_ms: float | None = _flag(
        None,
        "while nothing runs, requests with a 'ttft_deadline_ms' wait this long at most for others, so that steps carry more; 'auto' waits "
        "for half of their deadlines (default: no wait)",
        _duration_or_auto,
        metavar="MS",
        group="scheduler",
    )
    journal: str | None = _flag(
        None, "record what the scheduler is given in this file, without any text, for 'chairlift replay'", metavar="FILE", group="scheduler"
    )
    energy_meter: str = _flag(
        "none",
        "what measures the energy that requests take: 'powercap:DIR' reads Linux's counters, as in powercap:/sys/class/powercap; 'nvml' "
        "reads an NVIDIA device's, and needs pip install 'chairlift[nvml]'",
        metavar="METER",
        group="scheduler",
    )
    block_size: int = _flag(16, "tokens in one block of the KV cache", int, group="cache")
    num_kv_blocks: int | None = _flag(None, "blocks in the KV cache (default: fitted to memory)", _size, group="cache")
    kv_cache_memory_bytes: int | None = _flag(
        None,
        "memory for the KV cache, on a CPU of all models (default: a quarter of what is available, on a CUDA device what "
        "--gpu-memory-utilization leaves)",
        _size,
        group="cache",
    )
    gpu_memory_utilization: float = _flag(
        0.9,
        "share of a CUDA device's memory that this process may take in all: weights, KV cache and what steps need",
        float,
        metavar="X",
        group="cache",
    )
    kv_cache_dtype: str = _flag(
        "auto",
        "how keys and values are kept: 'auto' is float32 on a CPU, and what the weights are in elsewhere; "
        "'int8' is for CPUs, 'fp8' for CUDA devices",
        choices=("auto", "float32", "float16", "int8", "fp8"),
        group="cache",
    )
    enable_prefix_caching: bool = _flag(True, "share the KV blocks of equal prompt beginnings", group="cache")
    prefix_cache_dir: str | None = _flag(
        None,
        "keep the KV blocks of prompt beginnings in this directory, so that a restarted engine need not compute them again; only those of "
        "requests without a cache salt",
        metavar="DIR",
        group="cache",
    )
    prefix_cache_disk: int = _flag(
        20 << 30, "most bytes in that directory; the least recently used blocks are deleted", _size, group="cache"
    )
    swap_space: int = _flag(
        0, "host memory that preempted requests may be moved to, in bytes; without it they are computed again", _size, group="cache"
    )
    watermark: float = _flag(
        0.05,
        "share of the KV blocks kept free when a request is admitted, so that those running can grow",
        float,
        metavar="X",
        group="cache",
    )
    kv_reservation: str = _flag(
        "watermark",
        "which KV blocks must be free for a request to be admitted: 'watermark' keeps --watermark free and preempts when that runs out; "
        "'max-tokens' reserves blocks for all that it may generate, and preempts nobody; 'peak' reserves for the estimated peak of all "
        "running requests",
        choices=("watermark", "max-tokens", "peak"),
        group="cache",
    )

    def __post_init__(self) -> None:
        """Raises ValueError, naming the flag, for an invalid setting."""
        for item in fields(self):
            _check_type(item, getattr(self, item.name))
            choices = item.metadata.get("choices")
            if choices and getattr(self, item.name) not in choices:
                raise ValueError(f"--{item.name.replace('_', '-')}: expected one of {', '.join(choices)}, got {getattr(self, item.name)!r}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        for name in _DURATIONS:
            value = getattr(self, name)
            if value is not None and not 0 < value <= LONGEST_MS:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0 and at most {LONGEST_MS:g}, got {value:g}")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < (self.max_num_seqs or 1):
            raise ValueError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs ({self.max_num_seqs}): "
                "every running sequence needs one token a step"
            )
        if self.lora_modules and not self.enable_lora:
            raise ValueError("--lora-modules needs --enable-lora")
        if self.static_batch_size is not None:
            if self.batching == "continuous":
                raise ValueError("--static-batch-size needs --batching static or --batching dynamic")
            if self.static_batch_size > self.slots:
                raise ValueError(f"--static-batch-size ({self.static_batch_size}) must be at most --max-num-seqs ({self.slots})")
        if self.gather_ms is not None and self.batching != "continuous":
            raise ValueError("--gather-ms needs --batching continuous: the other modes wait for a batch anyway")
        if self.batch_timeout_ms is not None and self.batching != "dynamic":
            raise ValueError("--batch-timeout-ms needs --batching dynamic")
        if self.energy_meter not in ("none", "nvml") and self.energy_meter.removeprefix("powercap:") in ("", self.energy_meter):
            raise ValueError(f"--energy-meter: expected none, nvml or powercap:DIR, got {self.energy_meter!r}")
        if self.swap_space < 0:
            raise ValueError(f"--swap-space must be at least 0, got {self.swap_space}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"--gpu-memory-utilization must be above 0 and at most 1, got {self.gpu_memory_utilization:g}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"--watermark must be at least 0 and below 1, got {self.watermark:g}")
        for tier, weight in (self.tier_weights or {}).items():
            if tier not in TIERS or not 1 <= weight <= LARGEST_TIER_WEIGHT:
                expected = f"{', '.join(TIERS)} with integers from 1 to {LARGEST_TIER_WEIGHT}"
                raise ValueError(f"--tier-weights: expected {expected}, got {tier!r:.100}: {weight}")
        for tenant, weight in (self.tenant_weights or {}).items():
            if not 1 <= weight <= LARGEST_WEIGHT:
                raise ValueError(f"--tenant-weights: {tenant}'s must be an integer from 1 to {LARGEST_WEIGHT}, got {weight}")

        if not 0 <= self.draft_corpus_tokens <= MAX_CORPUS_TOKENS:
            raise ValueError(f"--draft-corpus-tokens must be from 0 to {MAX_CORPUS_TOKENS}, got {self.draft_corpus_tokens}")
        if self.draft_corpus_tokens and self.speculative_method == "off":
            raise ValueError("--draft-corpus-tokens needs --speculative-config with the method 'auto' or 'ngram'")
        if self.speculative_config is not None:
            _check_speculation(self.speculative_config)
            if self.num_speculative_tokens >= self.step_tokens:
                raise ValueError(
                    f"--speculative-config: num_speculative_tokens ({self.num_speculative_tokens}) must be below the tokens of a step "
                    f"(--max-num-batched-tokens {self.step_tokens})"
                )

    @property
    def speculative_method(self) -> str:
        """How tokens are proposed: "auto", "ngram" or "off"."""
        return str((self.speculative_config or {}).get("method", "auto"))

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum number of tokens proposed per sequence and step; 0 without speculative decoding."""
        if self.speculative_method == "off":
            return 0
        if self.speculative_config is None:
            return min(DEFAULT_SPECULATIVE_TOKENS, self.step_tokens - 1)
        return int(self.speculative_config.get("num_speculative_tokens", DEFAULT_SPECULATIVE_TOKENS))

    @property
    def kernels_isa(self) -> str:
        """The CPU kernels' name of the instruction set: that of `cpu_isa`, and of `cpu_math` where tiles multiply."""
        return "amx-bf16" if self.cpu_isa == "amx" and self.cpu_math == "fast" else self.cpu_isa

    def for_positions(self, positions: int) -> EngineConfig:
        """Returns the settings of a model that was made for so many positions.

        A `max_model_len` for all models of a server is left out where this model was made for fewer.
        """
        too_long = self.shared_max_model_len and self.max_model_len is not None and self.max_model_len > positions
        return replace(self, max_model_len=None) if too_long else self

    @property
    def slots(self) -> int:
        """Maximum number of sequences per step, if memory is not short."""
        usual = max(CUDA_SLOTS if self.device == "cuda" else DEFAULT_SLOTS, self.static_batch_size or 0)
        return self.max_num_seqs or min(usual, self.max_num_batched_tokens or usual)

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens per step, if memory is not short."""
        usual = CUDA_STEP_TOKENS if self.device == "cuda" else DEFAULT_STEP_TOKENS
        return self.max_num_batched_tokens or max(usual, self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server, in addition to an engine's."""

    host: str = _flag("127.0.0.1", "address to listen on", group="server")
    port: int = _flag(8000, "port to listen on; 0 picks a free one", int, group="server")
    served_model_name: str | None = _flag(
        None, "name that clients use for the model (default: as given, of a path the last part)", group="server"
    )
    models: str | None = _flag(
        None,
        "serve several models: TOML with a table [NAME] a model, of path, aliases, keep_alive, priority, preload, and flags of the engine",
        metavar="FILE",
        group="models",
    )
    max_loaded_models: int | None = _flag(None, "models that may be loaded at a time (default: any number)", _size, group="models")
    models_memory: int | None = _flag(
        None, "bytes that all loaded models may take, weights and KV caches; a larger one is loaded alone", _size, group="models"
    )
    keep_alive: float = _flag(
        300.0,
        "how long one of several models stays loaded after its last request, unless it is preloaded: 5m, 30s, 0, or -1 for ever",
        parse_duration,
        metavar="TIME",
        group="models",
    )
    preload: tuple[str, ...] = _flag(
        (),
        "those of several models that are loaded at the start, and stay: NAME,NAME or 'all'",
        _name_list,
        metavar="NAMES",
        group="models",
    )
    uds: str | None = _flag(None, "listen on this Unix socket instead of a port", metavar="PATH", group="server")
    api_key: str | None = _flag(
        None,
        "what clients must send as 'Authorization: Bearer KEY' or 'x-api-key: KEY'; NAME=KEY,NAME=KEY gives each tenant its own",
        metavar="KEY",
        group="server",
        secret=True,
    )
    public_metrics: bool = _flag(False, "serve /metrics without an API key: all figures, those of every tenant", group="server")
    api_key_file: str | None = _flag(
        None,
        "keys out of sight of 'ps', and limits: TOML with a table [NAME] a tenant, of key (or keys), weight, max_queued, max_requests",
        metavar="FILE",
        group="server",
    )
    cors_allow_origins: tuple[str, ...] | None = _flag(
        None,
        "web pages that may use the server, like https://chat.example,http://localhost:3000, or * for all (default: none)",
        _origins,
        metavar="ORIGINS",
        group="server",
    )
    ssl_certfile: str | None = _flag(None, "certificate chain in PEM format: serves HTTPS", metavar="FILE", group="server")
    ssl_keyfile: str | None = _flag(
        None, "the certificate's private key, without a password, if it is not in the same file", metavar="FILE", group="server"
    )
    admin_socket: str | None = _flag(
        None,
        "Unix socket, for this user alone, that needs no key: /metrics, /health, /v1/requests/ID/explain, GET /state, POST /drain, "
        "/models, POST /models/restart",
        metavar="PATH",
        group="server",
    )
    replicas: int = _flag(
        1,
        "engines of this machine that serve each model, each in a process of its own; requests of one that dies go on in another",
        _size,
        metavar="N",
        group="server",
    )
    routing: str = _flag(
        "predicted",
        "which of several engines gets a request: 'predicted', the one that should compute the prompt first, by its load, speed and cached "
        "prefixes; 'lmetric', 'prefix-aware', 'least-loaded' and 'round-robin' are simpler rules (docs/fleet.md)",
        choices=ROUTINGS,
        group="server",
    )
    engine_listen: tuple[str, int] | None = _flag(
        None,
        "where engines of other machines join ('chairlift join'); their traffic is authenticated, not encrypted: use a private network",
        host_and_port,
        metavar="HOST:PORT",
        group="server",
    )
    engine_secret_file: str | None = _flag(
        None, "what those engines must know: a file that only its owner may read, with 32 bytes or more", metavar="FILE", group="server"
    )
    ray_address: str | None = _flag(
        None,
        "let Ray Serve run the --replicas engines on the machines of this cluster: 'auto', HOST:PORT, or 'local' for a new one on this "
        "machine; they join at --engine-listen (needs chairlift[fleet])",
        metavar="ADDRESS",
        group="server",
    )
    ray_actor_options: Mapping[str, Any] | None = _flag(
        None,
        'what Ray reserves for each engine, as JSON with Ray\'s names: \'{"num_cpus": 8, "num_gpus": 1}\' (default: one CPU)',
        _json_object,
        metavar="JSON",
        group="server",
    )
    resume: str = _flag(
        "exact",
        "which engine goes on with the answers of one that died: 'exact', one of equal numerics, so that clients get the bytes of an "
        "undisturbed run; 'any'; 'off', none: answers that were not sent yet start over, streams end with an error",
        choices=("exact", "any", "off"),
        group="server",
    )
    max_body_size: int = _flag(2 << 20, "longest body of a request, in bytes; longer ones are refused", _size, group="server")
    shutdown_timeout: float = _flag(30.0, "seconds that requests in flight get to finish after SIGTERM", float, group="server")
    log_level: str = _flag("info", "how much to log", choices=("debug", "info", "warning", "error"), group="server")
    log_format: str = _flag("text", "how a line of the log is written", choices=("text", "json"), group="server")
    tool_call_parser: str = _flag(
        "auto",
        "how the model writes tool calls; 'auto' goes by its chat template",
        choices=("auto", "deepseek", "gemma", "granite", "hermes", "llama", "mistral", "openai", "pythonic"),
        group="server",
    )
    reasoning_parser: str = _flag(
        "auto",
        "how the model marks its reasoning, by vLLM's names; 'auto' goes by its chat template, 'none' leaves it in the answer",
        choices=("auto", "none", "deepseek_r1", "gemma4", "granite", "granite_thinking_parser", "mistral", "openai_gptoss", "qwen3"),
        group="server",
    )
    metrics_alias: str = _flag(
        "none", "'vllm' shows metrics a second time under vLLM's names, where it has them too", choices=("none", "vllm"), group="server"
    )
    otlp_traces_endpoint: str | None = _flag(
        None, "send a trace of each request here, as OTLP over HTTP; needs pip install 'chairlift[otel]'", metavar="URL", group="server"
    )
    tiers: str | None = _flag(
        None,
        "targets, weights and tenants of the service tiers: TOML with the tables [priority], [default] and [flex]",
        metavar="FILE",
        group="server",
    )
    usage_log: str | None = _flag(
        None, "directory for the usage log: a JSON line for each request, for 'chairlift usage'", metavar="DIR", group="server"
    )
    data_dir: str | None = _flag(
        None,
        "directory for uploaded files and batches, which survive restarts; needed by /v1/files and /v1/batches",
        metavar="DIR",
        group="server",
    )
    max_data_size: int = _flag(10 << 30, "bytes that all uploaded files may take; more are refused", _size, group="server")

    def __post_init__(self) -> None:
        """Raises ValueError, naming the flag, for an invalid setting."""
        # Rejected because an unset variable in a script would give a server that looks protected and is not.
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            raise ValueError("--api-key must not be empty, nor begin or end with a space")
        if self.max_loaded_models is not None and self.max_loaded_models < 1:
            raise ValueError(f"--max-loaded-models must be at least 1, got {self.max_loaded_models}")
        if self.replicas < 1:
            raise ValueError(f"--replicas must be at least 1, got {self.replicas}")
        if self.max_body_size < 1:
            raise ValueError(f"--max-body-size must be at least 1, got {self.max_body_size}")
        # The system would silently take the port modulo 65536.
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be from 0 to 65535, got {self.port}")
        if self.engine_listen is not None and self.engine_secret_file is None:
            raise ValueError("--engine-listen needs --engine-secret-file: make one with 'openssl rand -hex 32 > FILE; chmod 600 FILE'")
        if self.ray_address is not None and (self.engine_listen is None or self.engine_listen[0] in ("", "0.0.0.0", "::")):
            raise ValueError(
                "--ray-address needs --engine-listen HOST:PORT, with an address of this machine that the cluster's machines reach"
            )
        if self.ray_actor_options is not None and self.ray_address is None:
            raise ValueError("--ray-actor-options needs --ray-address")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile needs --ssl-certfile")


_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "text"),
    "int": (int, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "Mapping": (Mapping, "a dict"),
}
"""The Python types that a setting's annotation allows, and their description."""


def _check_type(item: Field[Any], value: object) -> None:
    """Raises ValueError if a value given in Python does not have the field's type."""
    annotation = str(item.type)
    if value is None and annotation.endswith("| None"):
        return
    kind, words = _KINDS[annotation.partition(" ")[0].partition("[")[0]]
    right = isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)
    if annotation.startswith("Mapping[str, str]"):
        right = isinstance(value, Mapping) and all(isinstance(text, str) for text in (*value.keys(), *value.values()))
    if annotation.startswith("Mapping[str, int]"):
        words += " of whole numbers"
        right = isinstance(value, Mapping) and all(isinstance(key, str) and isinstance(number, int) for key, number in value.items())
    if not right:
        raise ValueError(f"--{item.name.replace('_', '-')}: expected {words}, got {value!r:.100}")


def from_environment(cls: type, names: Collection[str], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Reads the fields of `cls` in `names` that `CHAIRLIFT_...` variables set. Raises ValueError with the variable's name."""
    found: dict[str, Any] = {}
    for item in fields(cls):
        text = environ.get(ENV_PREFIX + item.name.upper())
        if text is None or item.name not in names:
            continue
        try:
            found[item.name] = parse_value(item.metadata, item.type, text)
        except ValueError as error:
            raise ValueError(f"{ENV_PREFIX}{item.name.upper()}: {error}") from None
    return found


def parse_value(metadata: Mapping[str, Any], annotation: object, text: str) -> Any:
    """Converts the text of a flag or variable to the field's value. Raises ValueError if it is invalid."""
    if "bool" in str(annotation):
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ValueError(f"expected true or false, got {text!r}")
    choices = metadata.get("choices")
    if choices and text not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}, got {text!r}")
    parse = metadata.get("parse", str)
    try:
        return parse(text)
    except ValueError:
        if parse in (int, float):  # their own messages mention literals and bases
            raise ValueError(f"expected a {'whole ' * (parse is int)}number, got {text!r}") from None
        raise
