"""Settings as flags: the fields of the config classes, with their environment variables."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from chairlift.cli.suggestions import did_you_mean
from chairlift.config import ENV_PREFIX, EngineConfig, ServerConfig, from_environment, parse_value

C = TypeVar("C")


def command(commands: Any, name: str, help: str, epilog: str) -> argparse.ArgumentParser:
    """Adds a command to argparse's `commands`: its line in the list, which is its description too, and examples."""
    # Short forms of flags would break when a flag is added.
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def add(parser: argparse.ArgumentParser, cls: type, names: Collection[str] | None = None) -> None:
    """Adds a flag for each field of the dataclass `cls` that has help, under its group's heading; `names` are those wanted.

    The field's environment variable is heeded by this command then.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(cls):
        if "help" not in field.metadata or (names is not None and field.name not in names):
            continue
        heading = field.metadata["group"]
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        groups[heading].add_argument(_flag(field), dest=field.name, default=argparse.SUPPRESS, help=_help(field), **_shape(field))
        heed(parser, field.name)


def heed(parser: argparse._ActionsContainer, name: str) -> None:
    """Makes the command heed the environment variable of the setting `name`, for which it has a flag of its own."""
    parser.set_defaults(heeded={*(parser.get_default("heeded") or ()), name})


def read(cls: type[C], arguments: Mapping[str, Any]) -> C:
    """Makes a `cls` of its defaults, the variables that the command heeds, and the flags among `arguments`; the latter win.

    Raises ValueError.
    """
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    flags = {name: value for name, value in arguments.items() if name in names and value is not None}
    return cls(**{**from_environment(cls, arguments.get("heeded", ())), **flags})


def check_variables(arguments: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
    """Raises ValueError for a `CHAIRLIFT_...` variable whose name is nearly one that the command heeds.

    Other unknown variables are ignored: Kubernetes, for one, sets CHAIRLIFT_SERVICE_HOST beside a service named chairlift.
    """
    heeded = arguments.get("heeded", ())
    fields = {field.name for cls in (EngineConfig, ServerConfig) for field in dataclasses.fields(cls)}
    settings = {ENV_PREFIX + name.upper() for name in fields.union(heeded)}
    unknown = [name for name in environ if name.startswith(ENV_PREFIX) and name not in settings]
    for name in unknown:
        # The prefix is a part of what is compared, so names that differ in a word are less similar than this.
        if suggestion := did_you_mean(name, (ENV_PREFIX + one.upper() for one in heeded), 0.9):
            raise ValueError(f"unknown variable {name}{suggestion}")


def _flag(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def _shape(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """What argparse needs beside the name: how the value is read, and what stands for it in the help."""
    kind = str(field.type)
    if "bool" in kind:
        return {"action": argparse.BooleanOptionalAction}

    def parse(text: str) -> Any:
        try:
            return parse_value(field.metadata, field.type, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    choices = field.metadata.get("choices")
    number = "N" if "int" in kind else "SECONDS" if "float" in kind else "TEXT"
    return {"type": parse, "metavar": "{" + ",".join(choices) + "}" if choices else field.metadata.get("metavar", number)}


def _help(field: dataclasses.Field[Any]) -> str:
    value = field.default
    shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
    default = "" if value is None else f" (default: {shown})"
    return f"{field.metadata['help']}{default} [{ENV_PREFIX}{field.name.upper()}]".replace("%", "%%")
