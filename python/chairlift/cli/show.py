"""`chairlift show`: describes a model from its files."""

from __future__ import annotations

import argparse
import json
from typing import Any

from chairlift.cli import flags
from chairlift.config import EngineConfig

_EXAMPLES = """\
examples:
  chairlift show                             the default model
  chairlift show ./llama-3.2-1b-q4_k_m.gguf  a file
  chairlift show org/name --json             a downloaded model of the Hugging Face hub
  chairlift show org/name-GGUF:Q8_0          one of its GGUF files
  chairlift show llama3.2:1b                 a model that Ollama has pulled

Nothing is downloaded, and no weights are read.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "show", summary, _EXAMPLES, run)
    flags.add_model(parser)
    flags.add_fields(parser, EngineConfig, ("revision", "cache_dir"))
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints one line for each fact."""
    from chairlift.checkpoint.locate import locate
    from chairlift.runner.description import describe
    from chairlift.tokenizer import Tokenizer

    config = args.engine
    directory = locate(config.model, config.revision, config.cache_dir, progress=False, download=False)
    facts = describe(directory)
    if "KV cache" in facts:  # it generates text
        tokenizer = Tokenizer(directory)
        facts["chat template"] = "yes" if tokenizer.template_source else "no"
        facts["end tokens"] = " ".join(tokenizer.decode([token], skip_special_tokens=False) for token in sorted(tokenizer.eos_token_ids))
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:{width}}  {fact}")
    return 0
