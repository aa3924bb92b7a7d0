"""`chairlift run`: chats with a model, which is downloaded and served if need be."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from chairlift.cli import flags
from chairlift.cli.chat import Conversation, answer_from, converse
from chairlift.cli.flags import add_sampling, sampling_settings
from chairlift.cli.local_server import MODEL_HELP, add_url, server_for
from chairlift.cli.remote import add_api_key, client_key
from chairlift.cli.text_input import text_input
from chairlift.errors import ChairliftError, InvalidRequest

_EXAMPLES = """\
examples:
  chairlift run                                      chat with the default model
  chairlift run org/name-GGUF:Q4_K_M                 a model of the Hugging Face hub, downloaded at the first time
  chairlift run ./model.gguf "What is a chairlift?"  one answer
  cat letter.txt | chairlift run MODEL "Summarize this letter."

A running server that has the model answers. Otherwise a server is started, which other programs can use until the chat ends.
'chairlift serve' takes the settings of a server, and 'chairlift chat' those of an engine.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "run", summary, _EXAMPLES, run)
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="a question to answer, instead of a chat")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_url(parser)
    add_api_key(parser)
    add_sampling(parser, max_tokens=None)


def run(args: argparse.Namespace) -> int:
    """Chats until the input ends, or answers one question."""
    sampling = {name: value for name, value in sampling_settings(args).items() if value is not None}
    piped = "" if sys.stdin.isatty() else text_input()
    question = "\n\n".join(part for part in (" ".join(args.prompt), piped.strip()) if part)
    if not question and not sys.stdin.isatty():
        raise InvalidRequest("no question: give one after the model, or on standard input")
    key = client_key(args)
    with server_for(args.model, args.url, key) as (url, model):
        conversation = Conversation(args.system)
        answer = answer_from(url, key, model, conversation, sampling)
        if question:
            answer(question)
        else:
            converse(f"{model} at {url}", conversation, answer, ChairliftError)
    return 0
