"""`--policy FILE.py:NAME`: a policy in Python, for commands that simulate."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from chairlift.errors import InvalidSetting


def accept(parser: argparse.ArgumentParser) -> None:
    """Lets the parser's `--policy` take a file."""
    action: Any = next(action for action in parser._actions if action.dest == "scheduling_policy")
    parse = action.type
    action.type = lambda text: load(text) if is_file(text) else parse(text)
    action.help += "; or FILE.py:NAME, a policy in Python (docs/lab.md)"


def named(text: str) -> str:
    """The name of a policy, of which a file is loaded."""
    return load(text) if is_file(text) else text


def is_file(text: str) -> bool:
    """Whether it names a policy in a file."""
    return ".py:" in text


def load(text: str) -> str:
    """Loads a policy and returns its name. Raises ArgumentTypeError."""
    from chairlift.sim.policy import load

    try:
        with contextlib.redirect_stdout(sys.stderr):  # the command's output may be read by a program
            return load(text)
    except InvalidSetting as error:
        raise argparse.ArgumentTypeError(str(error)) from None
