"""The types of the settings that `LLM` and `AsyncEngine` take as keyword arguments, for editors and type checkers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypedDict


class Settings(TypedDict, total=False):
    """The fields of `EngineConfig` without `model`. `help(LLM)` describes them."""

    tokenizer: str | None
    chat_template: str | None
    revision: str | None
    cache_dir: str | None
    generation_config: str
    load_format: str
    device: str
    runner: str
    tensor_parallel_size: int
    threads: int | None
    cpu_isa: str
    cpu_math: str
    dtype: str
    quantization: str
    enforce_eager: bool
    enable_lora: bool
    lora_modules: Mapping[str, str] | None
    max_lora_rank: int
    seed: int
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    scheduling_policy: str
    tenant_weights: Mapping[str, int] | None
    tier_weights: Mapping[str, int] | None
    speculative_config: Mapping[str, str | int] | None
    draft_corpus_tokens: int
    batching: str
    static_batch_size: int | None
    batch_timeout_ms: float | None
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    queue_ageing_ms: float
    target_itl_ms: float | None
    background_slowdown: float
    gather_ms: float | None
    session_turns: str
    max_session_wait_ms: float
    journal: str | None
    energy_meter: str
    block_size: int
    num_kv_blocks: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    kv_cache_dtype: str
    enable_prefix_caching: bool
    prefix_cache_dir: str | None
    prefix_cache_disk: int
    swap_space: int
    watermark: float
    kv_reservation: str


class ModelSettings(Settings, total=False):
    """The fields of `EngineConfig`."""

    model: str | os.PathLike[str]
