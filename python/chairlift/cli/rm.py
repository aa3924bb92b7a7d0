"""`chairlift rm`: deletes a downloaded model."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from chairlift.cli import flags
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting

_EXAMPLES = """\
examples:
  chairlift rm org/name          delete a downloaded model, after a question
  chairlift rm org/name:Q8_0     delete the GGUF file of this type alone
  chairlift rm org/name --yes    without the question

'chairlift list' shows the downloaded models. Directories and .gguf files of your own and models of Ollama's are never deleted.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "rm", summary, _EXAMPLES, run)
    parser.add_argument("name", metavar="MODEL", help="name of the model, as 'chairlift list' shows it")
    flags.add_fields(parser, EngineConfig, ("cache_dir",))
    parser.add_argument("--yes", action="store_true", help="delete without a question")


def run(args: argparse.Namespace) -> int:
    """Deletes the model. The exit status is 1 if the answer is no."""
    from chairlift.checkpoint.downloads import Owner, find_download

    found = find_download(args.name, args.engine.cache_dir)
    found.check_deletable()
    shared = " of the cache that all programs of the Hugging Face hub share" if found.owner is Owner.HUB else ""
    if not args.yes:
        if not sys.stdin.isatty():
            raise InvalidSetting(f"standard input is no terminal: add --yes to delete {found.path}")
        if input(f"Delete {found.path}{shared} ({found.num_bytes / 1e6:,.0f} MB)? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    found.delete()
    print(f"deleted {found.path}{shared}")
    return 0
