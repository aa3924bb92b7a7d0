"""`chairlift list`: the models on this machine."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from typing import Any

from chairlift.cli import flags
from chairlift.config import EngineConfig

_EXAMPLES = """\
examples:
  chairlift list                 the models that were downloaded, also by other programs of the Hugging Face hub and by Ollama
  chairlift list --json          the same as JSON

'chairlift show MODEL' describes one, 'chairlift rm MODEL' deletes one. Directories and .gguf files of your own are not listed.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "list", summary, _EXAMPLES, run)
    flags.add_fields(parser, EngineConfig, ("cache_dir",))
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")


def run(args: argparse.Namespace) -> int:
    """Prints one line for each model."""
    from chairlift.checkpoint.downloads import downloads

    found = downloads(args.engine.cache_dir)
    if args.json:
        rows = [
            {"name": one.name, "path": str(one.path), "num_bytes": one.num_bytes, "modified": one.modified, "owner": one.owner.value}
            for one in found
        ]
        print(json.dumps(rows, indent=2))
        return 0
    if not found:
        print("no model is downloaded: 'chairlift pull' downloads the default one")
    width = max((len(one.name) for one in found), default=0)
    for one in found:
        day = datetime.fromtimestamp(one.modified).strftime("%Y-%m-%d")
        print(f"{one.name:{width}}  {one.num_bytes / 1e6:>10,.0f} MB  {day}  {one.path}")
    return 0
