"""Settings of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

from chairlift._core import POLICIES, added_policies
from chairlift.scheduling import LONGEST_MS, TIERS
from chairlift.settings import (
    LARGEST_COUNT,
    LARGEST_SIZE,
    check_choice,
    check_ranges,
    expand_paths,
    flag,
    parse_json_object,
    parse_ms_or_auto,
    parse_paths,
    parse_size,
    parse_weights,
    typed,
)

DEFAULT_SPECULATIVE_TOKENS, MAX_SPECULATIVE_TOKENS = 8, 16
"""Default and maximum number of tokens that speculative decoding proposes per sequence and step."""
MAX_CORPUS_TOKENS = 2**30
"""Maximum number of tokens of finished texts that it looks at."""

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The model that `serve`, `generate`, `chat` and `LLM()` use by default."""

DEFAULT_SLOTS, DEFAULT_STEP_TOKENS = 64, 128
"""Default maximum of sequences and tokens per step, if memory is not short."""
CUDA_SLOTS, CUDA_STEP_TOKENS = 256, 2048
"""The same on a GPU. It needs this many to be busy, and runs a step of this size so quickly that streams hardly notice."""
TILES_STEP_TOKENS, TILES_WEIGHTS = 256, 300_000_000
"""Default maximum of tokens per step on a CPU with matrix tiles, for models with at most TILES_WEIGHTS weights. It is twice
as large with `--cpu-math fast`. Such a step takes some tenths of a second."""

LARGEST_WEIGHT, LARGEST_TIER_WEIGHT = 10_000, 100

LARGEST_GROUP, LARGEST_THREADS = 1024, 4096
_RANGES = {
    **dict.fromkeys(
        (
            *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "static_batch_size", "max_num_queued_reqs"),
            *("max_num_queued_tokens", "block_size", "max_lora_rank"),
        ),
        (1, LARGEST_COUNT),
    ),
    "tensor_parallel_size": (1, LARGEST_GROUP),
    "threads": (1, LARGEST_THREADS),
    "num_kv_blocks": (1, LARGEST_SIZE),
    "kv_cache_memory_bytes": (1, LARGEST_SIZE),
    "prefix_cache_disk": (0, LARGEST_SIZE),
    "swap_space": (0, LARGEST_SIZE),
    "seed": (-(2**63), 2**63 - 1),
}
_IN_FILES = dict.fromkeys(
    ("awq", "awq_marlin", "gptq", "gptq_marlin", "gguf", "compressed-tensors", "bitsandbytes", "modelopt", "mxfp4"),
    "the quantization of a checkpoint is read from its files, so leave the flag out",
)
_PATHS = ("journal", "prefix_cache_dir", "chat_template", "lora_modules")
"""Paths whose `~` is replaced here, because several places open them."""
_DURATIONS = ("batch_timeout_ms", "queue_ageing_ms", "target_itl_ms", "gather_ms", "max_session_wait_ms")
LARGEST_SLOWDOWN = 1000


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


_model, _scheduler, _cache = (partial(flag, group=group) for group in ("model", "scheduler", "cache"))
"""The flags under each heading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings for loading a model and scheduling its requests."""

    model: str = DEFAULT_MODEL
    tokenizer: str | None = _model(None, "directory or file of the tokenizer, when it is not beside the weights")
    chat_template: str | None = _model(None, "Jinja file of the chat template, instead of the checkpoint's", metavar="FILE")
    revision: str | None = _model(None, "branch, tag or commit, for a model of the hub")
    cache_dir: str | None = _model(
        None,
        "directory for fetched and converted models (default: ~/.cache/chairlift, and the hub's own cache for models of the hub)",
        metavar="DIR",
        aliases=("--download-dir",),
    )
    generation_config: str = _model(
        "auto",
        "'auto': requests that do not set temperature, top_p and the like use what the checkpoint's generation_config.json recommends; "
        "'none': they use temperature 1 and no truncation",
        choices=("auto", "none"),
        spellings={"vllm": "none"},
    )
    load_format: str = _model(
        "auto",
        "where weights come from; 'dummy' makes random ones from the config alone, 'none' has no model: arbitrary tokens, at once",
        choices=("auto", "dummy", "none"),
    )
    device: str = _model("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    runner: str = _model(
        "auto",
        "code that computes the model: 'rust' is for CPUs, 'torch' for any device; 'auto' takes Rust where it supports the model",
        choices=("auto", "rust", "torch"),
    )
    tensor_parallel_size: int = _model(
        1, "devices, or processes on a CPU, that share each layer of the model", parse_size, aliases=("-tp",)
    )
    threads: int | None = _model(
        None,
        "threads that compute (default: one for each physical core that may be used, fewer by a container's quota or OMP_NUM_THREADS)",
        int,
    )
    cpu_isa: str = _model(
        "auto",
        "instruction set of the CPU kernels; results of two instruction sets can differ in the last bits",
        choices=("auto", "amx", "vnni", "avx512", "avx2", "neon", "portable"),
    )
    cpu_math: str = _model(
        "auto",
        "arithmetic of the CPU kernels. 'exact': as in float32. 'int16': activations of 16 bits where they multiply a GGUF file's blocks, "
        "and KV in float16; few answers differ. 'fast': products in bfloat16 where the processor has AMX, otherwise weights and "
        "activations of 8 bits as with --quantization int8; KV and attention of 16 bits; other answers. 'auto' is int16 for GGUF files on "
        "processors with AVX-512 VNNI and no AMX, and otherwise exact. Flags that set a dtype prevail",
        choices=("auto", "exact", "int16", "fast"),
    )
    dtype: str = _model(
        "auto",
        "format of the weights; by default that of the checkpoint, a GGUF file's blocks included. --cpu-math sets the arithmetic of a CPU",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    quantization: str = _model(
        "auto",
        "'int8', on a CPU: weights in blocks of 8 bits (or a GGUF file's 4), multiplied by activations of 8 bits: about twice as fast, "
        "perplexity within a percent, other answers; 'auto' does so where the weights would not fit into memory otherwise. "
        "In torch: the layers' weights in 8 bits, half the memory, but slower. "
        "'fp8', on a CUDA device: weights and activations of 8 bits",
        choices=("auto", "none", "int8", "fp8"),
        hints=_IN_FILES,
        aliases=("-q",),
    )
    enforce_eager: bool = _model(
        False, "launch each step's kernels one by one, without CUDA graphs: slower, but quicker to start, and in less memory"
    )
    enable_lora: bool = _model(False, "allow LoRA adapters; requests choose one each")
    lora_modules: Mapping[str, str] | None = _model(
        None,
        "adapters to load at the start: a name and a directory in peft's format, or a GGUF file, for each, like sql=adapters/sql",
        parse_paths,
        metavar="NAME=PATH",
        nargs="+",
    )
    max_lora_rank: int = _model(16, "highest rank of an adapter", int)
    seed: int = _model(0, "seed of dummy weights, and of the seeds of requests that have none", int)
    max_model_len: int | None = _model(
        None, "longest prompt plus output, in tokens (default: what the model was made for, less where memory is short)", parse_size
    )
    shared_max_model_len: bool = False
    """Whether `max_model_len` is for all models of a server. It is no flag: a server sets it."""
    max_num_seqs: int | None = _scheduler(
        None, f"sequences in one step (default: {DEFAULT_SLOTS}, on a CUDA device {CUDA_SLOTS}; fewer where memory is short)", parse_size
    )
    max_num_batched_tokens: int | None = _scheduler(
        None,
        "tokens in one step: longer prompts are computed in chunks "
        f"(default: {DEFAULT_STEP_TOKENS}; {TILES_STEP_TOKENS} for small models on a CPU with AMX, twice as many with --cpu-math fast; "
        f"{CUDA_STEP_TOKENS} on a CUDA device; "
        "at least --max-num-seqs; fewer where memory is short)",
        parse_size,
    )
    scheduling_policy: str = _scheduler(
        "fcfs",
        "which waiting request goes first: " + "; ".join(f"'{name}': {help}" for name, help in POLICIES),
        choices=tuple(name for name, _ in POLICIES),
        more=added_policies,
        aliases=("--policy",),
    )
    tenant_weights: Mapping[str, int] | None = _scheduler(
        None, "shares of tenants under the policies 'fair' and 'vtc', like alice=2,bob=1; 1 for the others", parse_weights, metavar="SHARES"
    )
    tier_weights: Mapping[str, int] | None = _scheduler(
        None,
        "factors of tenants' weights by service tier under the policies 'fair' and 'vtc' (default: priority=4,default=2,flex=1)",
        parse_weights,
        metavar="SHARES",
    )
    speculative_config: Mapping[str, str | int] | None = _scheduler(
        None,
        'propose tokens and verify several in one step, as JSON: \'{"method": "auto", "num_speculative_tokens": 8}\'; \'ngram\' looks for '
        "the last tokens in earlier text, 'auto' also proposes the tokens that a grammar forces; the answers are the same (default: auto)",
        parse_json_object,
        metavar="JSON",
    )
    draft_corpus_tokens: int = _scheduler(
        0,
        "look for proposed tokens also in finished prompts and answers of the same tenant and cache salt: in the last TOKENS tokens of all "
        "tenants together, 16 bytes each (0: only in the request's own text)",
        int,
        metavar="TOKENS",
    )
    batching: str = _scheduler(
        "continuous",
        "when requests join and leave: 'continuous': at every step; 'static': as whole batches; 'dynamic': as whole batches, which start "
        "after --batch-timeout-ms even if they are not full",
        choices=("continuous", "static", "dynamic"),
    )
    static_batch_size: int | None = _scheduler(None, "sequences in a static or dynamic batch (default: --max-num-seqs)", parse_size)
    batch_timeout_ms: float | None = _scheduler(
        None, "longest time that a dynamic batch waits to become full (default: no wait)", float, metavar="MS"
    )
    max_num_queued_reqs: int | None = _scheduler(None, "requests that may wait; more are refused (default: any number)", parse_size)
    max_num_queued_tokens: int | None = _scheduler(None, "prompt tokens that may wait; more are refused (default: any number)", parse_size)
    queue_ageing_ms: float = _scheduler(
        10_000.0, "longest wait of a request, in the queue or with a part of its prompt computed, before it goes first", float, metavar="MS"
    )
    target_itl_ms: float | None = _scheduler(
        None,
        "target for the time between two tokens of a request: prompts are computed in chunks that are small enough; default: 3 times the "
        "time of a step without prompts, or 60 ms if that is more, while one prompt is in progress and none waits",
        float,
        metavar="MS",
    )
    background_slowdown: float = _scheduler(
        3.0,
        "longest step with background requests beside others, as a multiple of the step without them; at least 1",
        float,
        metavar="TIMES",
    )
    gather_ms: float | None = _scheduler(
        None,
        "longest time that a request with a 'ttft_deadline_ms' waits for others while nothing runs, so that steps are fuller; 'auto': half "
        "of its deadline (default: no wait)",
        parse_ms_or_auto,
        metavar="MS",
    )
    session_turns: str = _scheduler(
        "named",
        "which sessions take turns when their contexts do not fit into the KV cache together: 'named': those that requests name; 'all': "
        "also those of requests whose prompt continues an earlier answer; 'off': none",
        choices=("off", "named", "all"),
    )
    max_session_wait_ms: float = _scheduler(510_000.0, "longest wait of a request for its session's turn", float, metavar="MS")
    journal: str | None = _scheduler(
        None, "record the scheduler's inputs in this file, without any text, for 'chairlift replay'", metavar="FILE"
    )
    energy_meter: str = _scheduler(
        "none",
        "what measures the energy that requests take: 'powercap:DIR' reads Linux's counters, as in powercap:/sys/class/powercap; 'nvml' "
        "reads an NVIDIA device's, and needs pip install 'chairlift[nvml]'",
        metavar="METER",
    )
    block_size: int = _cache(16, "tokens in one block of the KV cache", int)
    num_kv_blocks: int | None = _cache(
        None, "blocks in the KV cache (default: fitted to memory)", parse_size, aliases=("--num-gpu-blocks-override",)
    )
    kv_cache_memory_bytes: int | None = _cache(
        None,
        "memory for the KV cache, like 4G; on a CPU for all models together (default: a quarter of the available memory, on a CUDA device "
        "what --gpu-memory-utilization leaves)",
        parse_size,
    )
    gpu_memory_utilization: float = _cache(
        0.9, "share of a CUDA device's memory that this process may take in all: weights, KV cache and what steps need", float, metavar="X"
    )
    kv_cache_dtype: str = _cache(
        "auto",
        "format of keys and values: 'auto' is float32 on a CPU, or 16 bits where --cpu-math is 'int16' or 'fast', and the format of the "
        "weights elsewhere; "
        "'int8' is for CPUs, 'fp8' for CUDA devices; with 'bfloat16' a CPU with AVX-512 BF16 computes attention in it",
        choices=("auto", "float32", "float16", "bfloat16", "int8", "fp8"),
    )
    enable_prefix_caching: bool = _cache(True, "share the KV blocks of equal prompt beginnings")
    prefix_cache_dir: str | None = _cache(
        None,
        "keep the KV blocks of prompt beginnings in this directory, like ~/.cache/chairlift-kv, so that a restarted engine does not "
        "compute them again; only those of requests without a cache salt and without a LoRA adapter",
        metavar="DIR",
    )
    prefix_cache_disk: int = _cache(
        20 << 30, "maximum size of that directory, like 20G; the least recently used blocks are deleted", parse_size
    )
    swap_space: int = _cache(
        0, "host memory for the KV of preempted requests and parked sessions, like 4G; without it their KV is computed again", parse_size
    )
    watermark: float = _cache(
        0.05, "share of the KV blocks kept free when a request is admitted, so that those running can grow", float, metavar="X"
    )
    kv_reservation: str = _cache(
        "watermark",
        "which KV blocks must be free for a request to be admitted: 'watermark' keeps --watermark free and preempts when that runs out; "
        "'max-tokens' reserves blocks for all that it may generate, and preempts nobody; 'peak' reserves for the estimated peak of all "
        "running requests",
        choices=("watermark", "max-tokens", "peak"),
    )

    def __post_init__(self) -> None:
        """Raises ValueError, naming the flag, for an invalid setting."""
        for item in fields(self):
            value = typed(item, getattr(self, item.name))
            object.__setattr__(self, item.name, value)
            try:
                check_choice(item.metadata, value)
            except ValueError as error:
                raise ValueError(f"--{item.name.replace('_', '-')}: {error}") from None
        expand_paths(self, _PATHS)
        check_ranges(self, _RANGES)
        for name in _DURATIONS:
            value = getattr(self, name)
            if value is not None and not 0 < value <= LONGEST_MS:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0 and at most {LONGEST_MS:g}, got {value:g}")
        if not 1 <= self.background_slowdown <= LARGEST_SLOWDOWN:
            raise ValueError(f"--background-slowdown must be at least 1 and at most {LARGEST_SLOWDOWN}, got {self.background_slowdown:g}")
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

    def for_positions(self, positions: int) -> EngineConfig:
        """Returns the settings for a model that was made for this number of `positions`.

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
        return self.step_tokens_from(CUDA_STEP_TOKENS if self.device == "cuda" else DEFAULT_STEP_TOKENS)

    def step_tokens_from(self, default: int) -> int:
        """Maximum number of tokens per step where `default` is usual, if memory is not short."""
        return self.max_num_batched_tokens or max(default, self.slots)
