"""The sampling flags of `generate` and `chat`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from chairlift.sampling import SamplingParams


def sampling(given: Mapping[str, Any]) -> SamplingParams:
    """What the flags say, and the defaults for the rest; raises InvalidRequest."""
    # --seed is the engine's: one seed for all requests would make equal prompts draw alike.
    names = {field.name for field in fields(SamplingParams)} - {"max_tokens", "seed"}
    chosen = {name: given[name] for name in names if given.get(name) is not None}
    return SamplingParams(**chosen, max_tokens=given["max_tokens"])
