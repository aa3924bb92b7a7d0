"""The page of commands, flags and settings."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import re
from collections import defaultdict
from collections.abc import Iterator

from tables import code, paragraph, table

from chairlift.cli.main import COMMANDS, build_parser
from chairlift.config import EngineConfig
from chairlift.server.config import ServerConfig

_HEAD = """\
# Commands, flags and settings

`chairlift COMMAND --help` shows the same in a terminal, `--help-all` the rarer settings too.

"""
_SETTINGS = """
## Settings

A setting is a flag, an environment variable and a line of the YAML file `--config`. Flags override variables, and variables override the
file. In Python, the settings of engines are keyword arguments with `_` for `-`.
"""

_ENGINE, _SERVER = (
    {field.name: field.metadata["group"] for field in dataclasses.fields(cls) if field.metadata and field.name != "model"}
    for cls in (EngineConfig, ServerConfig)
)
_GROUPS = _ENGINE | _SERVER
"""The headings of the settings. The model has no flag of its own: commands take it in different ways."""


def page() -> str:
    """Returns the page."""
    commands = {name: parser for name, parser in _subparsers(build_parser()) if name in COMMANDS}
    text = _HEAD + table(("command", "purpose"), ((f"[`{name}`](#{name})", COMMANDS[name]) for name in commands)) + _SETTINGS
    groups: dict[str, list[argparse.Action]] = defaultdict(list)
    for action in _arguments(commands["serve"]):
        if action.dest in _GROUPS:
            groups[_GROUPS[action.dest]].append(action)
    for group, actions in groups.items():
        text += f"\n### {group[0].upper()}{group[1:]}\n\n" + table(("flag", "variable", "meaning"), map(_setting, actions))
    for name, command in commands.items():
        text += f"\n## {name}\n\n{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}.\n{_command(command)}"
        for kind, parser in _subparsers(command):
            text += f"\n### {name} {kind}\n{_command(parser)}"
    return text


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Returns the arguments of a command. Those that `--help` hides have no help until `--help-all` restores it."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        parser.parse_args(["--help-all"])
    skipped = argparse._SubParsersAction
    return [action for action in parser._actions if action.dest not in ("help", "help_all") and not isinstance(action, skipped)]


def _command(parser: argparse.ArgumentParser) -> str:
    """Returns a command's own arguments, and the names of the settings that it takes."""
    arguments = _arguments(parser)
    # A setting's flag has no default of its own; `bench` has another --host.
    taken = {action.dest: action for action in arguments if action.dest in _GROUPS and action.default == argparse.SUPPRESS}
    own = [action for action in arguments if action not in taken.values()]
    text = f"\n{table(('argument', 'meaning'), map(_argument, own))}" if own else ""
    listed = []
    if taken.keys() >= _ENGINE.keys():
        listed.append("all of the model, the scheduler and the cache")
        taken = {name: action for name, action in taken.items() if name in _SERVER}
    if taken.keys() >= _SERVER.keys():
        listed, taken = ["all"], {}
    listed += [code(action.option_strings[0]) for _, action in sorted(taken.items())]
    return text + (f"\n[Settings](#settings): {', '.join(listed)}.\n" if listed else "")


def _argument(action: argparse.Action) -> tuple[str, str]:
    meaning, variable = _meaning(action)
    return _names(action), f"{meaning} ({code(variable)})" if variable else meaning


def _setting(action: argparse.Action) -> tuple[str, str, str]:
    meaning, variable = _meaning(action)
    return _names(action), code(variable), meaning


def _names(action: argparse.Action) -> str:
    """Returns an argument's flags and its value."""
    value = action.metavar if isinstance(action.metavar, str) else ""
    if not value and action.nargs != 0:
        value = f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
    return " ".join(filter(None, (", ".join(map(code, action.option_strings)), code(value.replace(",", ", ")))))


def _meaning(action: argparse.Action) -> tuple[str, str]:
    """Returns the help of an argument without the environment variable at its end, and that variable."""
    text = paragraph((action.help or "").replace("%%", "%"))
    match = re.fullmatch(r"(.*?) ?\[([A-Z_]+)\]", text)
    return (match[1], match[2]) if match else (text, "")
