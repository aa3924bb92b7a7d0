"""Reads a checkpoint's recommended sampling settings from generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidRequest, InvalidSetting
from chairlift.sampling import SamplingParams

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The settings that are applied, as in vLLM. `max_new_tokens` and `do_sample` are ignored."""


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
    try:
        SamplingParams(**settings)
    except InvalidRequest as error:
        raise InvalidSetting(f"{path}: {error}; --generation-config none ignores the file's sampling settings") from None
    return settings
