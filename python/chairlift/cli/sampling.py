"""The sampling flags of `generate` and `chat`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from chairlift.sampling import SamplingParams


def sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SamplingParams` that the flags set; raises InvalidRequest for a value that is not allowed."""
    # --seed is the engine's: one seed for all requests would make equal prompts draw alike.
    names = {field.name for field in fields(SamplingParams)} - {"max_tokens", "seed"}
    chosen = {name: given[name] for name in names if given.get(name) is not None} | {"max_tokens": given["max_tokens"]}
    SamplingParams(**chosen)
    return chosen
