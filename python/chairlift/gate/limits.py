"""What an upstream says of itself, on the pages of vLLM, SGLang, llama.cpp and Chairlift."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

log = logging.getLogger("chairlift")

LLAMA_CPP_SLOTS = 4
"""Slots of a llama.cpp server without `--parallel`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an upstream says of itself; None for what it does not say."""

    kv_tokens: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None


def of_metrics(page: str) -> Limits:
    """From the metrics of vLLM and Chairlift (`cache_config_info`), and of SGLang (`max_total_num_tokens`)."""
    found = Limits()
    models: dict[str, dict[str, Limits]] = {}
    """The limits of each engine, by the names of its model and its own: an upstream may have several engines."""
    try:
        for family in text_string_to_metric_families(page):
            stem = family.name.partition(":")[2] or family.name.removeprefix("chairlift_")
            for sample in family.samples:
                if stem == "cache_config_info":
                    label = {name: _positive(value) for name, value in sample.labels.items()}
                    blocks, size = label.get("num_gpu_blocks"), label.get("block_size")
                    tokens = blocks * size if blocks and size else None
                    engines = models.setdefault(sample.labels.get("model_name", ""), {})
                    engines[sample.labels.get("engine", "")] = Limits(tokens, label.get("max_model_len"), label.get("max_num_seqs"))
                elif stem == "max_total_num_tokens":
                    found = merged(found, Limits(_positive(sample.value)))
    except ValueError:
        log.debug("the upstream's /metrics is no page of Prometheus")
    return merged(_together([*next(iter(models.values()), {}).values()]), found)


def of_sglang(info: Any) -> Limits:
    """From SGLang's /get_server_info."""
    fields = info if isinstance(info, Mapping) else {}
    limits = Limits(_positive(fields.get("max_total_num_tokens")), _positive(fields.get("context_length")))
    return merged(limits, Limits(max_num_seqs=_positive(fields.get("max_running_requests"))))


def of_llama_cpp(props: Any) -> Limits:
    """From /props of llama.cpp's server. The page does not tell whether slots share KV: they do by default, but not with `--parallel`."""
    fields = props if isinstance(props, Mapping) else {}
    settings, slots = fields.get("default_generation_settings"), _positive(fields.get("total_slots"))
    context = _positive(settings.get("n_ctx")) if isinstance(settings, Mapping) else None
    if not context or not slots:
        return Limits(None, context, slots)
    tokens = context * (1 if slots == LLAMA_CPP_SLOTS else slots)
    if slots > 1:
        log.info(
            "llama.cpp does not tell whether its %d slots share KV: set --upstream-kv-tokens if they do not hold %d tokens", slots, tokens
        )
    return Limits(tokens, context, slots)


def of_models(models: Any) -> Limits:
    """From /v1/models, where vLLM says the context."""
    data = models.get("data") if isinstance(models, Mapping) else None
    first = data[0] if isinstance(data, list) and data and isinstance(data[0], Mapping) else {}
    return Limits(max_model_len=_positive(first.get("max_model_len")))


def merged(known: Limits, more: Limits) -> Limits:
    """What is known, and of the rest what `more` says."""
    return Limits(known.kv_tokens or more.kv_tokens, known.max_model_len or more.max_model_len, known.max_num_seqs or more.max_num_seqs)


def _together(engines: Sequence[Limits]) -> Limits:
    """The limits of engines that share the requests of one model."""
    tokens, slots = (sum(getattr(one, name) or 0 for one in engines) for name in ("kv_tokens", "max_num_seqs"))
    lengths = [one.max_model_len for one in engines if one.max_model_len]
    return Limits(tokens or None, min(lengths, default=None), slots or None)


def _positive(value: Any) -> int | None:
    try:
        number = int(float(value))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number > 0 else None
