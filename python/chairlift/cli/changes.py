"""The settings that `chairlift replay` can change, by the names of their flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any

from chairlift.config import EngineConfig, parse_value
from chairlift.errors import InvalidSetting

FLAGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "num_kv_blocks",
    "enable_prefix_caching",
    "watermark",
    "scheduling_policy",
    "batching",
    "static_batch_size",
    "batch_timeout_ms",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "queue_ageing_ms",
    "target_itl_ms",
)
"""Those that are flags of the engine too, with the same values."""

HOST = ("host_blocks", "swap_ns_per_block")
"""Those of --swap-space, in blocks, since a journal does not tell how large one is: how many, and nanoseconds to copy one."""

NAMES = (*FLAGS, *HOST)

_MAY_BE_NONE = {"static_batch_size", "batch_timeout_ms", "max_num_queued_reqs", "max_num_queued_tokens", "target_itl_ms"}
_CHECKED_TOGETHER = {"max_num_seqs", "max_num_batched_tokens", "batching", "static_batch_size", "batch_timeout_ms"}
_FIELDS = {field.name: field for field in fields(EngineConfig)}


def parse(text: str) -> tuple[str, list[Any]]:
    """Reads `NAME=VALUE` or `NAME=VALUE,VALUE`, NAME with - or _, VALUE as its flag takes it, or `none` where that is the default.

    Raises argparse.ArgumentTypeError.
    """
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, like max_num_seqs=64, got {text!r:.100}")
    if name not in NAMES:
        raise argparse.ArgumentTypeError(f"{name!r:.100} cannot be changed in a replay; what can: {', '.join(NAMES)}")
    try:
        return name, [_value(name, value.strip()) for value in values.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}") from None


def parse_policy(text: str) -> tuple[str, list[Any]]:
    """Reads `--policy`: one or more policies."""
    return parse(f"scheduling_policy={text}")


def _value(name: str, text: str) -> Any:
    if name in HOST:
        value = parse_value(_FIELDS["swap_space"].metadata, "int", text)
        if value < 0:
            raise ValueError(f"must be at least 0, got {value}")
        return value
    if name in _MAY_BE_NONE and text.lower() == "none":
        return None
    return parse_value(_FIELDS[name].metadata, _FIELDS[name].type, text)


def recorded(config: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler's settings, by the names of `_core.Scheduler`, as flags would have set them."""
    # Whether a size was given or is the default cannot be told; one that equals the default goes on following it.
    size = config["batch_size"] if config["batch_size"] != config["max_seqs"] else None

    def milliseconds(time: int | None) -> Fraction | None:
        return None if time is None else Fraction(time, 1000)

    # Fractions are exact: the same integers come out of them again.
    return {
        "max_num_seqs": config["max_seqs"],
        "max_num_batched_tokens": config["max_tokens"],
        "max_model_len": config["max_model_len"],
        "num_kv_blocks": config["num_blocks"],
        "enable_prefix_caching": config["prefix_caching"],
        "watermark": Fraction(config["watermark"], config["num_blocks"] - 1),
        "scheduling_policy": config["policy"],
        "batching": config["batching"],
        "static_batch_size": size,
        "batch_timeout_ms": milliseconds(config["batch_timeout"] or None),
        "max_num_queued_reqs": config["max_queued_reqs"],
        "max_num_queued_tokens": config["max_queued_tokens"],
        "queue_ageing_ms": milliseconds(config["ageing"]),
        "target_itl_ms": milliseconds(config["target_itl"]),
        "host_blocks": config["host_blocks"],
        "swap_ns_per_block": config["swap_ns_per_block"],
    }


def apply(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for `_core.what_if` that make `changes`, by flag, to a recorded `config`; raises InvalidSetting."""
    before = recorded(config)
    if "batching" in changes:
        before |= {"static_batch_size": None, "batch_timeout_ms": None}
    flags = before | dict(changes)
    try:
        EngineConfig(**{name: flags[name] for name in FLAGS if name in changes or name in _CHECKED_TOGETHER})
    except ValueError as error:
        raise InvalidSetting(f"--set: {error}") from None
    return {
        "max_seqs": flags["max_num_seqs"],
        "max_tokens": flags["max_num_batched_tokens"],
        "max_model_len": flags["max_model_len"],
        "num_blocks": flags["num_kv_blocks"],
        "prefix_caching": flags["enable_prefix_caching"],
        "watermark": int(flags["watermark"] * (flags["num_kv_blocks"] - 1)),
        "policy": flags["scheduling_policy"],
        "batching": flags["batching"],
        "batch_size": flags["static_batch_size"],
        "batch_timeout": int((flags["batch_timeout_ms"] or 0) * 1000),
        "max_queued_reqs": flags["max_num_queued_reqs"],
        "max_queued_tokens": flags["max_num_queued_tokens"],
        "ageing": int(flags["queue_ageing_ms"] * 1000),
        "target_itl": None if flags["target_itl_ms"] is None else int(flags["target_itl_ms"] * 1000),
        "host_blocks": flags["host_blocks"],
        "swap_ns_per_block": flags["swap_ns_per_block"],
    }


def shown(value: Any) -> str:
    """A setting's value as it is written on the command line."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{float(value):g}" if isinstance(value, (float, Fraction)) else str(value)
