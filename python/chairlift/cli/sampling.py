"""The flags that `generate` and `chat` share."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from chairlift.cli import flags
from chairlift.config import EngineConfig, ServerConfig
from chairlift.sampling import SamplingParams


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """Adds the flags of sampling; `max_tokens` is the default of `--max-tokens`, None for the rest of the context."""
    group = parser.add_argument_group(
        "sampling", "The defaults of temperature, top-k, top-p, min-p and repetition penalty are the checkpoint's, if it has any."
    )
    shown = "the rest of the context" if max_tokens is None else max_tokens
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"most tokens to generate (default: {shown})")
    group.add_argument("--temperature", type=float, metavar="X", help="sampling temperature; 0 is greedy (default: 1)")
    group.add_argument("--top-k", type=int, metavar="N", help="sample from the N most likely tokens (default: all)")
    group.add_argument("--top-p", type=float, metavar="X", help="sample from the most likely tokens of total probability X (default: 1)")
    group.add_argument("--min-p", type=float, metavar="X", help="drop tokens below X times the highest probability (default: 0)")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="values above 1 penalize repeated tokens (default: 1)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; may be repeated")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the engine, and `--log-level` with a quieter default than the server's."""
    flags.add_fields(parser, EngineConfig)
    levels = ServerConfig.__dataclass_fields__["log_level"].metadata["choices"]
    parser.add_argument("--log-level", choices=levels, default="warning", help="how much to log (default: warning)")


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `SamplingParams` that the flags set. Raises InvalidRequest for an invalid value."""
    # --seed is the engine's: with one seed for all requests, equal prompts would get equal outputs.
    names = {field.name for field in fields(SamplingParams)} - {"max_tokens", "seed"}
    settings = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    settings["max_tokens"] = args.max_tokens
    SamplingParams(**settings)
    return settings
