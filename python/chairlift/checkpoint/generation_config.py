"""Reads a checkpoint's recommended sampling settings from generation_config.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidRequest, InvalidSetting
from chairlift.sampling import SamplingParams

log = logging.getLogger("chairlift")

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The settings that are applied, as in vLLM. `max_new_tokens` and `do_sample` are ignored."""
UNUSED = (
    *("stop_strings", "bad_words_ids", "begin_suppress_tokens", "forced_bos_token_id", "sequence_bias", "min_length", "min_new_tokens"),
    *("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "exponential_decay_length_penalty"),
    *("guidance_scale", "penalty_alpha", "dola_layers", "num_beams", "watermarking_config"),
)
"""Settings that would change answers and are reported instead."""


def recommended_sampling(directory: Path) -> dict[str, Any]:
    """Returns the recommended settings of the model in `directory`, by their names in `SamplingParams`; empty if there are none.

    Raises InvalidSetting if a value is not allowed.
    """
    path = directory / "generation_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # the tokenizer reports a damaged checkpoint
    if not isinstance(config, dict):
        return {}
    settings = {name: config[name] for name in SETTINGS if config.get(name) is not None}
    if unused := [name for name in UNUSED if config.get(name) not in (None, 0, 1, "", [], {})]:
        log.warning("%s sets %s, which is not used: send what you need with each request", path, ", ".join(unused))
    try:
        SamplingParams(**settings)
    except InvalidRequest as error:
        raise InvalidSetting(f"{path}: {error}; --generation-config none ignores the file's sampling settings") from None
    return settings
