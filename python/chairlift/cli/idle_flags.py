"""Flags of `serve` that have no effect beside the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

from chairlift.config import EngineConfig
from chairlift.server.config import ServerConfig


def _weighs(config: EngineConfig) -> bool:
    """Whether weights count, here or when the journal is replayed with another policy."""
    return config.scheduling_policy in ("fair", "vtc") or config.journal is not None


def _takes_turns(config: EngineConfig) -> bool:
    return config.enable_prefix_caching and config.session_turns != "off"


OF_ENGINES: dict[str, tuple[str, Callable[[EngineConfig], bool]]] = {
    "max_lora_rank": ("without --enable-lora", lambda config: config.enable_lora),
    "tenant_weights": ("without --scheduling-policy fair or vtc", _weighs),
    "tier_weights": ("without --scheduling-policy fair or vtc", _weighs),
    "session_turns": ("with --no-enable-prefix-caching", lambda config: config.enable_prefix_caching or config.session_turns == "off"),
    "max_session_wait_ms": ("where no sessions take turns", _takes_turns),
    "prefix_cache_disk": ("without --prefix-cache-dir", lambda config: config.prefix_cache_dir is not None),
    "enforce_eager": ("with --device cpu", lambda config: config.device != "cpu"),
    "gpu_memory_utilization": ("with --device cpu", lambda config: config.device != "cpu"),
}
"""Settings of an engine: what leaves each without effect, and whether it has one."""
OF_SERVERS: dict[str, tuple[str, Callable[[ServerConfig], bool]]] = {
    **dict.fromkeys(("host", "port"), ("with --uds", lambda server: server.uds is None)),
    "public_metrics": ("without API keys", lambda server: any((server.api_key, server.api_key_file, server.operator_key))),
    "routing": ("without --replicas or --engine-listen", lambda server: server.replicas > 1 or server.engine_listen is not None),
    "engine_secret_file": ("without --engine-listen", lambda server: server.engine_listen is not None),
    "max_data_size": ("without --data-dir", lambda server: server.data_dir is not None),
}
"""The same of the server."""


def find(engine: EngineConfig, server: ServerConfig, configs: Sequence[EngineConfig]) -> list[str]:
    """Describes each setting without effect, like `--max-data-size without --data-dir`.

    `engine` has the settings for all models, and `configs` are those of each. A setting with its default value is not described.
    """
    idle = [(name, why) for name, (why, used) in OF_ENGINES.items() if _is_set(engine, name) and not any(map(used, configs))]
    idle += [(name, why) for name, (why, used) in OF_SERVERS.items() if _is_set(server, name) and not used(server)]
    if _is_set(server, "keep_alive") and len(configs) == 1:
        idle.append(("keep_alive", "with one model"))
    return [f"--{name.replace('_', '-')} {why}" for name, why in idle]


def _is_set(settings: EngineConfig | ServerConfig, name: str) -> bool:
    return any(getattr(settings, name) != field.default for field in fields(settings) if field.name == name)
