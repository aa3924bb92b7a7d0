"""Describes an engine that has started: its model, its limits, and the decisions of its start."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift import _core
from chairlift.checkpoint.info import CheckpointInfo
from chairlift.checkpoint.weight_files import weight_bytes
from chairlift.config import EngineConfig
from chairlift.engine.fingerprint import checkpoint_digest, fingerprint

if TYPE_CHECKING:
    from chairlift.runner.interface import Runner

log = logging.getLogger("chairlift")

SHORT_CONTEXT = 512
"""Tokens. A chat template and a short conversation need about as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The model of an engine, its limits, and the decisions of its start. An engine that has not started has the defaults."""

    model: str = ""
    """The model as the caller named it."""
    digest: str = ""
    """The hash of the checkpoint's files."""
    checkpoint: CheckpointInfo = field(default_factory=CheckpointInfo)
    fingerprint: str | None = None
    """The hash of what answers depend on; None if they also depend on the batch."""
    determinism: str = "best-effort"
    """"batch-invariant" or "best-effort"."""
    arithmetic: str = ""
    """The format of activations in products: float32, int16, int8, bfloat16, float16 or fp8."""
    generates: bool = True
    recurrent: bool = False
    """Whether it has recurrent layers."""
    max_model_len: int = 0
    max_text_len: int | None = None
    """Most tokens of a text to embed; None if the model computes no embeddings."""
    embedding_size: int = 0
    """The numbers of a text's embedding."""
    score: str | None = None
    """What becomes of the number that a classifier gives to a pair of texts, sigmoid or identity; None for other models."""
    vocab_size: int = 0
    eos_token_ids: Sequence[int] = field(default_factory=list)
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters that the checkpoint recommends."""
    num_kv_blocks: int = 0
    block_size: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    num_bytes: int = 0
    """Bytes of the weights, the KV cache, the recurrent states and the texts that are computed in parts."""
    shared_bytes: int = 0
    """The part of `num_bytes` that the models of a process use together (see `kv_sharing`)."""
    energy_method: str | None = None
    """"powercap" or "nvml"; None without a meter."""
    adapter_digests: Mapping[str, str] = field(default_factory=dict)
    """The hashes of the loaded adapters' files as hex digits, by name."""
    disk_cache: str | None = None
    """The contents of `--prefix-cache-dir`, for the log; None without one."""
    decisions: Sequence[Sequence[str]] = ()
    """(what, value, reason) of each decision."""

    @classmethod
    def unpack(cls, fields: Mapping[str, Any]) -> EngineInfo:
        """Restores what `pack` packed."""
        return cls(**{**fields, "checkpoint": CheckpointInfo(**fields["checkpoint"])})

    @classmethod
    def merged(cls, infos: Sequence[EngineInfo]) -> EngineInfo:
        """Describes several engines of one model as one: sums what they have, and takes the least of what a request may need."""
        texts = [info.max_text_len for info in infos if info.max_text_len is not None]
        return replace(
            infos[0],
            **{
                name: sum(getattr(info, name) for info in infos)
                for name in ("num_kv_blocks", "num_bytes", "shared_bytes", "max_num_seqs", "max_num_batched_tokens")
            },
            max_model_len=min(info.max_model_len for info in infos),
            max_text_len=min(texts, default=None),
        )

    def pack(self) -> dict[str, Any]:
        """The fields, as plain data for a frame."""
        return asdict(self)


def engine_info(
    config: EngineConfig, directory: Path, runner: Runner, checkpoint: CheckpointInfo, eos: Sequence[int], sampling: Mapping[str, Any]
) -> EngineInfo:
    """Describes an engine without adapters and disk cache. `sampling` is the checkpoint's recommended sampling."""
    decisions = (
        *runner.decisions,
        *_context_decision(config, runner),
        *_speculation_decision(config, runner),
        _sampling_decision(config, sampling),
    )
    digest = checkpoint_digest(directory)
    return EngineInfo(
        model=config.model,
        digest=digest,
        checkpoint=checkpoint,
        fingerprint=fingerprint(config, directory, runner, digest) if runner.batch_invariant else None,
        determinism="batch-invariant" if runner.batch_invariant else "best-effort",
        arithmetic=next((value for what, value, _ in runner.decisions if what == "arithmetic"), ""),
        generates=runner.generates,
        recurrent=runner.state_slots > 0,
        # An encoder's sequences have one token more than their texts, which is not computed.
        max_model_len=runner.max_model_len if runner.generates else runner.max_model_len - 1,
        max_text_len=None if runner.pooling is None else runner.max_model_len - 1,
        embedding_size=runner.model_config.embedding_size,
        score=runner.model_config.score,
        vocab_size=runner.model_config.vocab_size,
        eos_token_ids=eos,
        default_sampling=sampling,
        num_kv_blocks=runner.num_kv_blocks - 1,
        block_size=config.block_size,
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        num_bytes=weight_bytes(directory) + runner.kv_cache_bytes + runner.state_bytes + runner.long_texts_bytes,
        shared_bytes=runner.kv_cache_bytes if runner.kv_blocks is not None and config.num_kv_blocks is None else 0,
        energy_method=None if config.energy_meter == "none" else config.energy_meter.partition(":")[0],
        decisions=[list(decision) for decision in decisions],
    )


def log_start(config: EngineConfig, info: EngineInfo, phases: Mapping[str, float], total: float) -> None:
    """Logs the decisions and the duration of each phase. "process" is the rest: starting the process and communication."""
    parts = {name: round(seconds, 2) for name, seconds in phases.items()}
    parts = {"process": round(total, 2) - sum(parts.values()), **parts}
    log.info("phase process %.2f s", parts["process"])
    if info.decisions:
        log_decisions(info)
    warn_of_short_context(config, info)
    log.info("ready in %.2f s: %s", total, " + ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items()))


def log_decisions(info: EngineInfo) -> None:
    """Logs the model and each decision (what, value, reason) in columns."""
    rows = [("model", info.model, ""), *info.decisions]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for what, value, reason in rows:
        log.info("%s", f"{what:{widths[0]}}  {value:{widths[1]}}  {reason}".rstrip())


def warn_of_short_context(config: EngineConfig, info: EngineInfo) -> None:
    """Logs a warning if the KV cache, rather than the model or --max-model-len, limits the context to fewer than SHORT_CONTEXT tokens."""
    context = info.max_model_len
    if context >= SHORT_CONTEXT or context != info.num_kv_blocks * info.block_size or config.max_model_len is not None:
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
    if 0 < runner.state_slots <= runner.max_num_seqs:
        return [("speculative decoding", "none", "no memory is left for the states before rejected tokens")]
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
