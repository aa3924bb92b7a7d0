"""The settings that `chairlift replay` can change, named as their flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any

from chairlift.cli import policy_files
from chairlift.config import EngineConfig
from chairlift.engine.scheduler_settings import FLAGS, HOST, of_flags, to_flags
from chairlift.errors import InvalidSetting
from chairlift.settings import parse_value

NAMES = (*FLAGS, *HOST)

_MAY_BE_NONE = {"static_batch_size", "batch_timeout_ms", "max_num_queued_reqs", "max_num_queued_tokens", "target_itl_ms", "gather_ms"}
_CHECKED_TOGETHER = {"max_num_seqs", "max_num_batched_tokens", "batching", "static_batch_size", "batch_timeout_ms"}
_FIELDS = {field.name: field for field in fields(EngineConfig)}


def parse(text: str) -> tuple[str, list[Any]]:
    """Parses `NAME=VALUE` or `NAME=VALUE,VALUE`: NAME with - or _, VALUE as its flag takes it, or `none` if that is its default.

    Raises argparse.ArgumentTypeError.
    """
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, like max_num_seqs=64, got {text!r:.100}")
    if name not in NAMES:
        raise argparse.ArgumentTypeError(f"{name!r:.100} cannot be changed in a replay; expected one of {', '.join(NAMES)}")
    try:
        return name, [_value(name, value.strip()) for value in values.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}") from None


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Adds `--policy`."""
    help = "short for --set scheduling_policy=NAME; FILE.py:NAME is a policy in Python (docs/lab.md)"
    parser.add_argument("--policy", type=parse_policy, metavar="NAME", help=help)


def parse_policy(text: str) -> tuple[str, list[Any]]:
    """Parses `--policy`: one or more policies."""
    return parse(f"scheduling_policy={','.join(map(policy_files.named, text.split(',')))}")


def _value(name: str, text: str) -> Any:
    if name in HOST:
        value = parse_value(_FIELDS["swap_space"].metadata, "int", text)
        if value < 0:
            raise ValueError(f"must be at least 0, got {value}")
        return value
    if name in _MAY_BE_NONE and text.lower() == "none":
        return None
    return parse_value(_FIELDS[name].metadata, _FIELDS[name].type, text)


def apply(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for `_core.what_if` after `changes`, by flag, to the recorded `config`. Raises InvalidSetting."""
    before = to_flags(config)
    if "batching" in changes:
        before |= {"static_batch_size": None, "batch_timeout_ms": None}
    flags = before | dict(changes)
    try:
        EngineConfig(**{name: flags[name] for name in FLAGS if name in changes or name in _CHECKED_TOGETHER})
    except ValueError as error:
        raise InvalidSetting(f"--set: {error}") from None
    return of_flags(flags)


def format_value(value: Any) -> str:
    """A setting's value as it is written on the command line."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{float(value):.12g}" if isinstance(value, (float, Fraction)) else str(value)
