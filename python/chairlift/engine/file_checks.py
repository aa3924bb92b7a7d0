"""Checks, before a model is loaded, the files that its engine's settings name."""

from __future__ import annotations

from pathlib import Path

from chairlift.config import EngineConfig
from chairlift.engine.energy import open_meter
from chairlift.engine.journal import check_journal


def check_files(config: EngineConfig) -> None:
    """Raises InvalidSetting, or UnsupportedModel for an adapter, for what would fail once the weights are loaded. Reads no weights."""
    if config.journal is not None:
        check_journal(config.journal)
    if config.prefix_cache_dir is not None:
        from chairlift.engine.prefix_store import store_directory

        store_directory(config.prefix_cache_dir)
    if (meter := open_meter(config.energy_meter, config.tensor_parallel_size)) is not None:
        meter.close()
    if config.lora_modules:
        # Imports numpy.
        from chairlift.checkpoint.adapter import AdapterHeader
        from chairlift.engine.adapters import check_rank

        for path in config.lora_modules.values():
            check_rank(AdapterHeader(Path(path)), config.max_lora_rank)
