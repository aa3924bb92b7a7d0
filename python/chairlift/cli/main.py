"""The entry of the command line. Only the module of the requested command is imported."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import time
from importlib import import_module
from typing import Any, NoReturn

from chairlift.cli import flags
from chairlift.cli.config_file import read_config
from chairlift.cli.foreign_flags import HINTS
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, InvalidRequest, InvalidSetting, InvalidTrace, did_you_mean
from chairlift.process_log import write_log
from chairlift.server.config import ServerConfig

GROUPS = {
    "run a model here": {
        "run": "chat with a model: download and serve it if necessary",
        "chat": "chat with a model that this command loads, without a server",
        "generate": "generate text from prompts",
        "run-batch": "answer a file of requests, without a server",
    },
    "serve models": {
        "serve": "serve a model over HTTP with OpenAI's API",
        "join": "run an engine of this machine for a server on another one",
        "gate": "schedule requests in front of vLLM, SGLang, llama.cpp or any server with OpenAI's API",
        "launch": "start Claude Code, Codex, OpenCode or aider with a model of this machine",
    },
    "look at a running server": {
        "ps": "list the models of a running server",
        "stop": "unload a model of a running server",
        "top": "show a running server in the terminal",
        "explain": "show where a request's time went",
        "usage": "sum a usage log by day, tenant and tier",
    },
    "manage models": {
        "pull": "download a model",
        "list": "list the downloaded models",
        "show": "describe a model, from its files",
        "verify": "compare a model with transformers or llama.cpp",
        "rm": "delete a downloaded model",
    },
    "measure, simulate and plan": {
        "bench": "benchmark a server, or the engine without a server",
        "calibrate": "measure this machine's step times, for simulate and plan",
        "simulate": "simulate a trace on a modelled device",
        "replay": "replay a recorded journal, as it was or under other settings",
        "shadow": "show what a running server would do under other settings, from its journal",
        "plan": "find how many users a machine can serve, its bottleneck, and the best settings",
        "policy": "begin a scheduling policy in Python, for simulate, compare, replay and shadow",
        "compare": "compare batching modes and scheduling policies on the same requests",
    },
    "help": {
        "doctor": "describe this machine, what runs on it and why other things do not",
        "completion": "print a script with which bash, zsh or fish completes commands and flags",
        "help": "show the help of a command",
    },
}
"""The commands with their help, in the groups and the order of `--help`.

The module `chairlift.cli.NAME`, with `_` for `-`, has the command's flags and its `run(args)`.
"""
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
ALIASES = {"ls": "list"}
"""Ollama's names of commands."""

_EXAMPLES = """\
examples:
  chairlift run                        chat with the default model in this terminal
  chairlift serve                      serve it at http://127.0.0.1:8000/v1
  chairlift serve org/name             serve a model of the Hugging Face hub
  chairlift launch claude              let Claude Code use a model of this machine
  chairlift top                        watch a running server
  chairlift explain ID                 show where a request's time went
  chairlift plan                       estimate how many users fit on this machine, or another

'chairlift COMMAND --help' shows a command's flags.
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with a suggestion for a misspelt flag or command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses the arguments of this command; those that it does not know are an error here, where its flags are known.

        A command with the default `passed_on` gets there what follows `--`.
        """
        own = list(args)
        at = own.index("--") if "--" in own and self.get_default("passed_on") is not None else len(own)
        known, unknown = super().parse_known_args(own[:at], namespace)
        if at < len(own):
            known.passed_on = own[at + 1 :]
        if unknown:
            flag = next((one for one in unknown if one.startswith("-")), "").partition("=")[0]
            hint = f": {HINTS[flag]}" if flag in HINTS else did_you_mean(flag, self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(value, action.choices or ())
            raise

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"chairlift: {message} ('{self.prog} --help' shows what is allowed)\n")


class _Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        import chairlift

        print(f"chairlift {chairlift.__version__}")
        parser.exit()


def build_parser(imported: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line. With `imported`, only that command has its flags; the others have their names and help."""
    parser = _Parser(
        prog="chairlift",
        description="An LLM server for CPUs that shows where the time of each request went.\n\n" + _commands_in_groups(),
        epilog=_EXAMPLES,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("-V", "--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        if imported in (None, name):
            import_module(f"chairlift.cli.{name.replace('-', '_')}").add_parser(commands, summary)
        else:
            commands.add_parser(name, help=summary)
    return parser


def _commands_in_groups() -> str:
    lines = []
    for group, commands in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:12} {summary}" for name, summary in commands.items()), ""]
    return "\n".join(lines).rstrip()


class _HelpFormatter(flags.TextFormatter):
    """Leaves out the list of all commands, which the description has in groups."""

    def add_argument(self, action: argparse.Action) -> None:
        if not isinstance(action, argparse._SubParsersAction):
            super().add_argument(action)


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0, 1 for a failure, 2 for invalid arguments, settings or traces."""
    started = time.perf_counter()
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (None after `>&-` in a shell; it stays open)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: a character that a terminal lacks ends no command
    arguments = sys.argv[1:] if arguments is None else arguments
    # The first positional argument is the command: the flags before it take no values.
    at = next((at for at, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    if arguments[at : at + 1] in [[alias] for alias in ALIASES]:
        arguments = [*arguments[:at], ALIASES[arguments[at]], *arguments[at + 1 :]]
    parser = build_parser("".join(arguments[at : at + 1]))
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    parser.prog = f"{parser.prog} {args.command}"  # errors below refer to the help of this command
    try:
        flags.check_variables(vars(args))
        args.file_places = {}
        args.file_settings = read_config(vars(args), args.file_places)
        args.engine, args.server = flags.read(EngineConfig, vars(args)), flags.read(ServerConfig, vars(args))
    except ValueError as error:
        parser.error(str(error))
    args.started = started
    _configure_logging(args.server)
    return _run(args)


def _configure_logging(server: ServerConfig) -> None:
    as_json = server.log_format == "json"
    write_log(server.log_level, import_module("chairlift.server.observability.logs").JsonFormatter() if as_json else None)


def _run(args: argparse.Namespace) -> int:
    """Calls the command's `run` and turns its exceptions into messages and exit statuses."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by `__main__`; from here on KeyboardInterrupt is caught
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of standard output is gone. Without this, Python's flush at exit would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.server.log_level == "debug":
            raise
        kind = "" if isinstance(error, ChairliftError) else f"{type(error).__name__}: "
        kind = "not enough memory: " if isinstance(error, MemoryError) else kind
        print(f"chairlift: {kind}{error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequest | InvalidSetting | InvalidTrace) else 1


if __name__ == "__main__":
    sys.exit(main())
