"""Reads a checkpoint's recommended sampling settings from generation_config.json."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidRequest, InvalidSetting
from chairlift.sampling import LEAST_TOP_P, SamplingParams

log = logging.getLogger("chairlift")

NAME = "generation_config.json"
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The settings that are applied, as in vLLM."""
_KNOWN = re.compile(
    # What the file is, tokens that are read elsewhere, and what each request sets.
    r"_\w+|transformers_version|(?!forced)\w+_token_id|suppress_tokens|do_sample"
    r"|max_(new_tokens|length|time)|num_return_sequences|chat_format|trust_remote_code"
    # What only beam search reads, which num_beams asks for.
    r"|num_beam_groups|early_stopping|length_penalty|diversity_penalty|low_memory|renormalize_logits|remove_invalid_values"
    # How it is computed, with the same result.
    r"|use_cache|cache_\w+|max_cache_len|output_\w+|return_\w+|prefill_chunk_size|\w*compile\w*|continuous_batching_config|use_mtp"
    r"|assistant_\w+|is_assistant|num_assistant_\w+|prompt_lookup_\w+|max_matching_ngram_size|target_lookbehind|speculation_type"
)
"""Settings that are used, or that change no answer."""
_FACTORS = ("typical_p", "guidance_scale", "encoder_repetition_penalty", "num_beams", "min_length", "min_new_tokens")
"""Settings that change nothing if they are 1."""


def recommended_sampling(directory: Path) -> dict[str, Any]:
    """Returns the recommended settings of the model in `directory`, by their names in `SamplingParams`; empty if there are none.

    Raises InvalidSetting if a value is not allowed.
    """
    path, config = directory / NAME, _read(directory)
    settings = {name: config[name] for name in SETTINGS if config.get(name) is not None}
    settings |= {"top_p": LEAST_TOP_P} if settings.get("top_p") == 0 else {}
    if unused := _unused(config):
        log.warning("%s sets %s, which is not used: send what you need with each request", path, ", ".join(unused))
    try:
        SamplingParams(**settings)
    except InvalidRequest as error:
        raise InvalidSetting(f"{path}: {error}; --generation-config none ignores the file's sampling settings") from None
    return settings


def unused_settings(directory: Path) -> list[str]:
    """Returns the settings that may change answers, and that are not used."""
    return _unused(_read(directory))


def _unused(config: Mapping[str, Any]) -> list[str]:
    names = (name for name, value in config.items() if value and not (value == 1 and name in _FACTORS))
    return [name for name in names if name not in SETTINGS and not _KNOWN.fullmatch(name)]


def _read(directory: Path) -> dict[str, Any]:
    """Returns the object in the file; an empty one without a file that can be read: the tokenizer reports a damaged checkpoint."""
    try:
        config = json.loads((directory / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
