"""Settings of the HTTP server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from chairlift.scheduling import ROUTINGS
from chairlift.settings import (
    LARGEST_COUNT,
    LARGEST_SIZE,
    check_ranges,
    expand_paths,
    flag,
    parse_duration,
    parse_host_and_port,
    parse_json_object,
    parse_names,
    parse_origins,
    parse_size,
)

_VLLM_PARSERS = {
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "ernie45": "hermes",
    "functiongemma": "gemma",
    "gemma4": "gemma",
    "glm45": "glm",
    "glm47": "glm",
    "granite4": "hermes",
    "hunyuan_a13b": "hunyuan",
    "jamba": "hunyuan",
    "lfm2": "pythonic",
    "llama3_json": "llama",
    "llama4_json": "llama",
    "llama4_pythonic": "pythonic",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "xlam": "llama",
}
"""vLLM's names of tool-call parsers, where they differ."""

_VLLM_REASONING = {
    "cohere_command4": "cohere_command3",
    "ernie45": "granite_thinking_parser",
    **dict.fromkeys(("deepseek_v3", "glm45", "glm47", "kimi_k2", "mimo", "minimax_m2", "nemotron_v3", "olmo3", "step3p5"), "qwen3"),
}
"""vLLM's names of reasoning formats, where several are one."""

_RANGES = {
    "max_loaded_models": (1, LARGEST_COUNT),
    "models_memory": (1, LARGEST_SIZE),
    "replicas": (1, 1024),
    "port": (0, 65535),
    "max_body_size": (1, LARGEST_SIZE),
    "max_data_size": (0, LARGEST_SIZE),
    "shutdown_timeout": (0, 1_000_000),
}


_flag = partial(flag, group="server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server, in addition to an engine's."""

    host: str = _flag("127.0.0.1", "address to listen on")
    port: int = _flag(8000, "port to listen on; 0 picks a free one", int)
    served_model_name: str | None = _flag(None, "name that clients use for the model (default: MODEL, or the last part of its path)")
    models: str | None = flag(
        None,
        "TOML file of several models, with a table [NAME] for each: path, aliases, keep_alive, priority, preload, and flags of the engine",
        metavar="FILE",
        group="models",
    )
    max_loaded_models: int | None = flag(None, "models that may be loaded at a time (default: any number)", parse_size, group="models")
    models_memory: int | None = flag(
        None,
        "memory that all loaded models may take, weights and KV caches, like 16G; a larger one is loaded alone (default: no limit)",
        parse_size,
        group="models",
    )
    keep_alive: float = flag(
        300.0,
        "how long one of several models stays loaded after its last request, unless it is preloaded: 5m, 30s, 0, or -1 for ever",
        parse_duration,
        metavar="TIME",
        group="models",
    )
    preload: tuple[str, ...] = flag(
        (),
        "models to load at the start, where there are several; they stay loaded until another needs their place: NAME,NAME or 'all'",
        parse_names,
        metavar="NAMES",
        group="models",
    )
    uds: str | None = _flag(None, "listen on this Unix socket instead of a port", metavar="PATH")
    api_key: str | None = _flag(
        None,
        "key that clients must send as 'Authorization: Bearer KEY' or 'x-api-key: KEY'; NAME=KEY,NAME=KEY gives each tenant its own",
        metavar="KEY",
        secret=True,
    )
    operator_key: str | None = _flag(
        None, "an API key that sees the requests and the metrics of all tenants, and may act for each of them", metavar="KEY", secret=True
    )
    public_metrics: bool = _flag(False, "serve /metrics without an API key: all figures, those of every tenant")
    api_key_file: str | None = _flag(
        None,
        "TOML file with keys, limits and rights, which 'ps' does not show: a table [NAME] for each tenant, with key (or keys), weight, "
        "max_queued, max_requests, group, tiers, operator",
        metavar="FILE",
    )
    cors_allow_origins: tuple[str, ...] | None = _flag(
        None,
        "web pages that may use the server, like https://chat.example,http://localhost:3000, or * for all (default: none)",
        parse_origins,
        metavar="ORIGINS",
        aliases=("--allowed-origins",),
    )
    ssl_certfile: str | None = _flag(None, "certificate chain in PEM format: serves HTTPS", metavar="FILE")
    ssl_keyfile: str | None = _flag(
        None, "the certificate's private key, without a password, if it is not in the same file", metavar="FILE"
    )
    admin_socket: str | None = _flag(
        None,
        "Unix socket, for this user alone, that needs no key: /metrics, /health, /v1/requests/ID/explain, GET /state, POST /drain, "
        "/models, POST /models/restart",
        metavar="PATH",
    )
    replicas: int = _flag(
        1,
        "engines of this machine that serve each model, each in a process of its own; requests of an engine that dies go on in another",
        parse_size,
        metavar="N",
        aliases=(
            "--data-parallel-size",
            "-dp",
        ),
    )
    routing: str = _flag(
        "predicted",
        "which of several engines gets a request: 'predicted', the one that should compute the prompt first, by its load, speed and cached "
        "prefixes; 'lmetric', 'prefix-aware', 'least-loaded' and 'round-robin' are simpler rules (docs/fleet.md)",
        choices=ROUTINGS,
    )
    engine_listen: tuple[str, int] | None = _flag(
        None,
        "where engines of other machines join ('chairlift join'); their traffic is authenticated, not encrypted: use a private network",
        parse_host_and_port,
        metavar="HOST:PORT",
    )
    engine_secret_file: str | None = _flag(
        None, "file with the secret that joining engines must know: 32 bytes or more, readable only by its owner", metavar="FILE"
    )
    ray_address: str | None = _flag(
        None,
        "let Ray Serve run the --replicas engines on the machines of this cluster: 'auto', HOST:PORT, or 'local' for a new one on this "
        "machine; they join at --engine-listen (needs the extra 'fleet')",
        metavar="ADDRESS",
    )
    ray_actor_options: Mapping[str, Any] | None = _flag(
        None,
        'what Ray reserves for each engine, as JSON with Ray\'s names: \'{"num_cpus": 8, "num_gpus": 1}\' (default: one CPU)',
        parse_json_object,
        metavar="JSON",
    )
    ray_autoscaling_config: Mapping[str, Any] | None = _flag(
        None,
        "let Ray Serve add and remove engines, so that their saturation stays near 0.7, as JSON with Ray's names: "
        '\'{"min_replicas": 1, "max_replicas": 4}\' (default: always --replicas engines)',
        parse_json_object,
        metavar="JSON",
    )
    resume: str = _flag(
        "exact",
        "which engine goes on with the answers of one that died: 'exact', one of equal numerics, so that clients get the bytes of an "
        "undisturbed run; 'any'; 'off', none: answers that were not sent yet start over, streams end with an error",
        choices=("exact", "any", "off"),
    )
    max_body_size: int = _flag(2 << 20, "largest body of a request, like 2M; larger ones are refused", parse_size)
    exact_history: bool = _flag(
        True, "when a client returns an earlier answer, use the tokens that were generated instead of tokenizing its text again"
    )
    shutdown_timeout: float = _flag(30.0, "seconds that requests in flight get to finish after SIGTERM", float)
    log_level: str = _flag("info", "how much to log", choices=("debug", "info", "warning", "error"))
    log_format: str = _flag("text", "how a line of the log is written", choices=("text", "json"))
    tool_call_parser: str = _flag(
        "auto",
        "how the model writes tool calls; 'auto' goes by its chat template",
        choices=(
            *("auto", "apertus", "cohere", "command_r", "deepseek", "deepseek_v32", "deepseek_v4", "functionary_v3.1", "functionary_v3.2"),
            *("gemma", "glm", "glm4_0414", "granite", "hermes", "hunyuan", "internlm", "kimi_k2", "llama", "minimax_m2", "mistral"),
            *("nemotron", "olmo3", "openai", "pythonic", "qwen3_coder", "seed_oss"),
        ),
        spellings=_VLLM_PARSERS,
    )
    reasoning_parser: str = _flag(
        "auto",
        "how the model marks its reasoning, by vLLM's names; 'auto' goes by its chat template, 'none' leaves it in the answer",
        choices=(
            *("auto", "none", "apertus", "apriel", "cohere_command3", "deepseek_r1", "gemma4", "granite", "granite_thinking_parser"),
            *("hunyuan_a13b", "mistral", "openai_gptoss", "qwen3", "seed_oss"),
        ),
        spellings=_VLLM_REASONING,
    )
    metrics_alias: str = _flag(
        "none", "'vllm' shows metrics a second time under vLLM's names, where it has them too", choices=("none", "vllm")
    )
    otlp_traces_endpoint: str | None = _flag(
        None, "send a trace of each request here, as OTLP over HTTP; needs the extra 'otel'", metavar="URL"
    )
    tiers: str | None = _flag(
        None, "targets, weights and tenants of the service tiers: TOML with the tables [priority], [default] and [flex]", metavar="FILE"
    )
    shadow_policy: str | None = _flag(
        None,
        "simulate another policy, by its name or as FILE.py:NAME, for the requests of --journal: a separate process does so with 2 % of a "
        "core, and the metrics, the dashboard and 'chairlift top' show the result",
        metavar="POLICY",
    )
    shadow_set: tuple[str, ...] = _flag(
        (),
        "simulate other settings in the same way, by the names of 'chairlift replay --set': NAME=VALUE,NAME=VALUE",
        parse_names,
        metavar="SETTINGS",
    )
    usage_log: str | None = _flag(None, "directory for the usage log: a JSON line for each request, for 'chairlift usage'", metavar="DIR")
    data_dir: str | None = _flag(
        None, "directory for uploaded files and batches, which survive restarts; needed by /v1/files and /v1/batches", metavar="DIR"
    )
    max_data_size: int = _flag(10 << 30, "disk space that uploads and outputs of batches may take, like 10G; more are refused", parse_size)

    def __post_init__(self) -> None:
        """Raises ValueError, naming the flag, for an invalid setting."""
        # Rejected because an unset variable in a script would give a server that looks protected and is not.
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            raise ValueError("--api-key must not be empty, nor begin or end with a space")
        expand_paths(self, ("uds", "admin_socket", "ssl_certfile", "ssl_keyfile", "usage_log", "data_dir"))
        check_ranges(self, _RANGES)
        if self.engine_listen is not None and self.engine_secret_file is None:
            raise ValueError("--engine-listen needs --engine-secret-file: make one with 'openssl rand -hex 32 > FILE; chmod 600 FILE'")
        if self.ray_address is not None and (self.engine_listen is None or self.engine_listen[0] in ("", "0.0.0.0", "::")):
            raise ValueError(
                "--ray-address needs --engine-listen HOST:PORT, with an address of this machine that the cluster's machines reach"
            )
        if self.ray_address is None and (self.ray_actor_options is not None or self.ray_autoscaling_config is not None):
            raise ValueError("--ray-actor-options and --ray-autoscaling-config need --ray-address")
        if self.ray_autoscaling_config is not None and self.replicas > 1:
            raise ValueError("--ray-autoscaling-config says how many engines there are: leave out --replicas")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile needs --ssl-certfile")
        if self.otlp_traces_endpoint is not None and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"--otlp-traces-endpoint: expected a URL like http://127.0.0.1:4318/v1/traces, got {self.otlp_traces_endpoint:.100}"
            )
