"""What an engine reports when it has started: its limits, and the decisions that were made."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift import _core
from chairlift.checkpoint.weight_files import weight_bytes
from chairlift.config import EngineConfig
from chairlift.engine.fingerprint import checkpoint_digest, fingerprint

if TYPE_CHECKING:
    from chairlift.runner.interface import Runner

log = logging.getLogger("chairlift")

SHORT_CONTEXT = 512
"""Tokens. A chat template and a short conversation need about as many."""


def start_facts(config: EngineConfig, directory: Path, runner: Runner, eos: Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The limits of an engine and its model, its fingerprint, and its decisions (what, value, reason).

    `sampling` is the checkpoint's recommended sampling.
    """
    decisions = (
        *runner.decisions,
        *_context_decision(config, runner),
        *_speculation_decision(config, runner),
        _sampling_decision(config, sampling),
    )
    digest = checkpoint_digest(directory)
    return {
        "model": config.model,
        "digest": digest,
        # An encoder's sequences have one token more than their texts, which is not computed.
        "max_model_len": runner.max_model_len if runner.generates else runner.max_model_len - 1,
        "max_text_len": None if runner.pooling is None else runner.max_model_len - 1,
        "generates": runner.generates,
        "hidden_size": runner.model_config.hidden_size,
        "num_kv_blocks": runner.num_kv_blocks - 1,
        "block_size": config.block_size,
        "num_bytes": weight_bytes(directory) + runner.kv_cache_bytes,
        # Of these, what the models of a process use together: see kv_sharing.py.
        "shared_bytes": runner.kv_cache_bytes if runner.kv_blocks is not None and config.num_kv_blocks is None else 0,
        "max_num_seqs": runner.max_num_seqs,
        "max_num_batched_tokens": runner.max_num_batched_tokens,
        "determinism": "batch-invariant" if runner.batch_invariant else "best-effort",
        "fingerprint": fingerprint(config, directory, runner, digest) if runner.batch_invariant else None,
        "decisions": [list(decision) for decision in decisions],
        "default_sampling": sampling,
        "vocab_size": runner.model_config.vocab_size,
        "eos_token_ids": eos,
        "energy_method": None if config.energy_meter == "none" else config.energy_meter.partition(":")[0],
    }


def log_start(config: EngineConfig, facts: Mapping[str, Any], phases: Mapping[str, float], total: float) -> None:
    """Logs the decisions and the duration of each phase. "process" is the rest: starting the process and communication."""
    parts = {name: round(seconds, 2) for name, seconds in phases.items()}
    parts = {"process": round(total, 2) - sum(parts.values()), **parts}
    log.info("phase process %.2f s", parts["process"])
    log_decisions(facts["model"], facts["decisions"])
    warn_of_short_context(config, facts)
    log.info("ready in %.2f s: %s", total, " + ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items()))


def log_decisions(model: str, decisions: Sequence[Sequence[str]]) -> None:
    """Logs the model and each decision (what, value, reason) in columns."""
    rows = [("model", model, ""), *decisions]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for what, value, reason in rows:
        log.info("%s", f"{what:{widths[0]}}  {value:{widths[1]}}  {reason}".rstrip())


def warn_of_short_context(config: EngineConfig, facts: Mapping[str, Any]) -> None:
    """Logs a warning if the KV cache, rather than the model or --max-model-len, limits the context to fewer than SHORT_CONTEXT tokens."""
    context = facts["max_model_len"]
    if context >= SHORT_CONTEXT or context != facts["num_kv_blocks"] * facts["block_size"] or config.max_model_len is not None:
        return
    if config.num_kv_blocks is not None:
        remedy = f"raise --num-kv-blocks, which is {config.num_kv_blocks}"
    elif config.kv_cache_memory_bytes is not None:
        remedy = f"raise --kv-cache-memory-bytes, which is {config.kv_cache_memory_bytes}"
    else:
        remedy = "free some memory, or choose a smaller model"
    log.warning("the KV cache holds only %d tokens, which limits prompt and output together: %s", context, remedy)


def _context_decision(config: EngineConfig, runner: Runner) -> list[tuple[str, str, str]]:
    limit = runner.model_config.longest_context
    if config.for_positions(limit) is config:
        return []
    return [("--max-model-len", "not used", f"{config.max_model_len} is for all models, and this one was made for {limit} tokens")]


def _speculation_decision(config: EngineConfig, runner: Runner) -> list[tuple[str, str, str]]:
    if config.speculative_method == "off":
        return []
    if runner.overlaps:
        return [("speculative decoding", "none", "steps overlap: the next one is planned before the last token is known")]
    sources = ["the request's text"]
    if corpus := config.draft_corpus_tokens:
        mebibytes = corpus * _core.CORPUS_BYTES_PER_TOKEN / 2**20
        sources.append(f"{corpus} tokens of finished texts ({mebibytes:.1f} MiB)")
    if config.speculative_method == "auto":
        sources.append("grammars")
    return [("speculative decoding", f"up to {config.num_speculative_tokens} tokens", f"from {', '.join(sources)}")]


def _sampling_decision(config: EngineConfig, sampling: Mapping[str, Any]) -> tuple[str, str, str]:
    if config.generation_config == "none":
        return "default sampling", "temperature 1", "--generation-config says so"
    if not sampling:
        return "default sampling", "temperature 1", "the checkpoint recommends nothing"
    return "default sampling", ", ".join(f"{name} {value:g}" for name, value in sampling.items()), "recommended by the checkpoint"
