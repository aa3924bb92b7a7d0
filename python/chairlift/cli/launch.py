"""`chairlift launch`: starts a coding agent that uses a model of this machine."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from chairlift.cli import flags
from chairlift.cli.local_server import MODEL_HELP, add_url, server_for
from chairlift.cli.remote import add_api_key, client_key
from chairlift.errors import InvalidSetting

_EXAMPLES = """\
examples:
  chairlift launch claude                              Claude Code with the model of the server at http://127.0.0.1:8000
  chairlift launch codex --model org/name              Codex; the model is served for as long as it runs
  chairlift launch aider --url http://10.0.0.7:8000 --api-key SECRET
  chairlift launch opencode -- run "What is in this repository?"

The client must be installed. What follows -- is passed to it. Its own settings stay as they are. Agents need a model that can call tools,
with a context of 32,000 tokens or more.
"""


class _Client(NamedTuple):
    program: str
    install: str
    """How to install it."""
    arguments: Callable[[str, str], Sequence[str]]
    """Makes its arguments of the server's address and the model."""
    environment: Callable[[str, str, str], Mapping[str, str]]
    """Makes its variables of the server's address, the model and the key."""


def _claude(url: str, model: str, key: str) -> dict[str, str]:
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    server = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, "ANTHROPIC_API_KEY": ""}
    return {**server, **dict.fromkeys(names, model), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}


def _codex(url: str, model: str) -> list[str]:
    provider = {"name": "chairlift", "base_url": f"{url}/v1", "wire_api": "responses", "env_key": "CHAIRLIFT_KEY"}
    settings = [f"model_providers.chairlift.{name}={json.dumps(value)}" for name, value in provider.items()]
    flags = [word for setting in ('model_provider="chairlift"', *settings) for word in ("-c", setting)]
    return [*flags, "-m", model]


def _opencode(url: str, model: str, key: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {model: {}},
    }
    return {"OPENCODE_CONFIG_CONTENT": json.dumps({"provider": {"chairlift": provider}, "model": f"chairlift/{model}"})}


CLIENTS = {
    "claude": _Client("claude", "npm install -g @anthropic-ai/claude-code", lambda url, model: [], _claude),
    "codex": _Client("codex", "npm install -g @openai/codex", _codex, lambda url, model, key: {"CHAIRLIFT_KEY": key}),
    "opencode": _Client("opencode", "npm install -g opencode-ai", lambda url, model: [], _opencode),
    "aider": _Client(
        "aider",
        "pip install aider-install && aider-install",
        lambda url, model: ["--model", f"openai/{model}"],
        lambda url, model, key: {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key},
    ),
}


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "launch", summary, _EXAMPLES, run)
    parser.add_argument("client", choices=CLIENTS, metavar=f"{{{','.join(CLIENTS)}}}", help="the program to start")
    flags.add_model(parser, MODEL_HELP, positional=False)
    add_url(parser)
    add_api_key(parser)
    parser.set_defaults(passed_on=[])


def run(args: argparse.Namespace) -> int:
    """Starts the client and returns its exit status. Raises InvalidSetting if it is not installed."""
    client = CLIENTS[args.client]
    if (program := shutil.which(client.program)) is None:
        raise InvalidSetting(f"{client.program} is not installed: {client.install}")
    key = client_key(args)
    with server_for(args.model, args.url, key) as (url, model):
        base = url.rstrip("/").removesuffix("/v1")
        command = [program, *client.arguments(base, model), *args.passed_on]
        environment = {**os.environ, **client.environment(base, model, key or "none")}
        return _wait(subprocess.Popen(command, env=environment))


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Waits for the client, which gets Ctrl-C itself."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue
