"""`chairlift pull`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.checkpoint.locate import locate
from chairlift.config import EngineConfig, ServerConfig


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Fetches a model into the cache, and prints where it is."""
    print(locate(engine.model, engine.revision, engine.cache_dir))
    return 0
