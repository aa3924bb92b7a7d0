"""`chairlift help`: the help of a command."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from chairlift.cli import flags

_EXAMPLES = """\
examples:
  chairlift help                 all commands
  chairlift help serve           the same as 'chairlift serve --help'
  chairlift help bench serve     a command of a command
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its argument."""
    parser = flags.add_command(commands, "help", summary, _EXAMPLES, run)
    parser.add_argument("words", nargs="*", metavar="COMMAND", help="the command (default: all)")


def run(args: argparse.Namespace) -> int:
    """Prints the help."""
    status: int = import_module("chairlift.cli.main").main([*args.words, "--help"])
    return status
