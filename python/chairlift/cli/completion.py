"""`chairlift completion`: prints a script with which a shell completes commands and flags."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from chairlift.cli import flags

_EXAMPLES = """\
examples:
  source <(chairlift completion bash)                in ~/.bashrc
  source <(chairlift completion zsh)                 in ~/.zshrc, after compinit
  chairlift completion fish | source                 in ~/.config/fish/config.fish
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its argument."""
    parser = flags.add_command(commands, "completion", summary, _EXAMPLES, run)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to print the script for")


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    commands = list(_walk(import_module("chairlift.cli.main").build_parser()))
    print(_fish(commands) if args.shell == "fish" else _ZSH * (args.shell == "zsh") + _bash(commands))
    return 0


@dataclass(frozen=True)
class _Command:
    path: str
    """Its words without `chairlift`; empty for `chairlift` itself."""
    words: dict[str, str]
    """Its subcommands with their help, and the values that its argument allows."""
    flags: dict[str, list[str] | None]
    """Its flags with the values that they allow: an empty list for any value, None if the flag takes no value."""


def _walk(parser: argparse.ArgumentParser, path: str = "") -> Iterator[_Command]:
    """The command of the parser and all below it."""
    words: dict[str, str] = {}
    options: dict[str, list[str] | None] = {}
    below: list[_Command] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                words[name] = helps.get(name, "")  # an alias has none
                below += _walk(child, f"{path} {name}".lstrip())
        elif not action.option_strings:
            words |= dict.fromkeys(_values(action), "")
        for flag in action.option_strings:
            options[flag] = None if action.nargs == 0 else _values(action)
    yield _Command(path, words, options)
    yield from below


def _values(action: argparse.Action) -> list[str]:
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    metavar = str(action.metavar)
    return metavar[1:-1].split(",") if metavar.startswith("{") else []


_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
"""zsh runs bash's completions."""

_BASH = """\
_chairlift() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command="" words="" word
  for word in "${COMP_WORDS[@]:1:$((COMP_CWORD - 1))}"; do
    case "$command $word" in
      @paths@) command="${command:+$command }$word" ;;
    esac
  done
  case "$command $previous" in
@values@
    *)
      case "$command" in
@words@
      esac
      [[ $words == -* && $current != -* ]] && words="" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _chairlift chairlift"""
"""Without a match bash completes file names."""


def _bash(commands: list[_Command]) -> str:
    paths = [f'"{command.path} {name}"' for command in commands for name in command.words]
    words = [f'        "{command.path}") words="{" ".join([*command.words, *command.flags])}" ;;' for command in commands]
    values = [
        f'    "{command.path} {flag}") words="{" ".join(allowed)}" ;;'
        for command in commands
        for flag, allowed in command.flags.items()
        if allowed is not None
    ]
    return _BASH.replace("@paths@", "|".join(paths)).replace("@values@", "\n".join(values)).replace("@words@", "\n".join(words))


_FISH = """\
function __chairlift_command
  set -l command ""
  for word in (commandline -opc)[2..-1]
    contains -- "$command $word" @paths@; and set command (string trim -- "$command $word")
  end
  test "$command" = "$argv"
end"""


def _fish(commands: list[_Command]) -> str:
    lines = [_FISH.replace("@paths@", " ".join(shlex.quote(f"{command.path} {name}") for command in commands for name in command.words))]
    for command in commands:
        start = f"complete -c chairlift -n {shlex.quote(f'__chairlift_command {command.path}'.rstrip())}"
        lines += [f"{start} -f -a {name} -d {shlex.quote(help)}" for name, help in command.words.items()]
        for flag, allowed in command.flags.items():
            kind = "-l" if flag.startswith("--") else "-s" if len(flag) == 2 else "-o"
            name = f"{kind} {flag.lstrip('-')}"
            value = "" if allowed is None else f" -x -a {shlex.quote(' '.join(allowed))}" if allowed else " -r"
            lines.append(f"{start} {name}{value}")
    return "\n".join(lines)
