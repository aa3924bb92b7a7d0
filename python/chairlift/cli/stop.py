"""`chairlift stop`: unloads a model of a running server."""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import quote

from chairlift.cli import flags
from chairlift.cli.remote import add_server, client_key, get_json, post_json
from chairlift.errors import ChairliftError

_EXAMPLES = """\
examples:
  chairlift stop chat            unload the model `chat` of the server at http://127.0.0.1:8000 when it is idle

The next request loads the model again. The server refuses to unload a model that it preloads.
The server itself stops with Ctrl-C or SIGTERM.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "stop", summary, _EXAMPLES, run)
    parser.add_argument("name", metavar="MODEL", help="name of the model, as 'chairlift ps' shows it")
    add_server(parser)


def run(args: argparse.Namespace) -> int:
    """Asks the server to unload the model, as Ollama's clients do. Raises ChairliftError if the model stays loaded."""
    key = client_key(args)
    before = {one["id"]: one["status"] for one in get_json(args.url, "/v1/models", key)["data"]}.get(args.name)
    answer = post_json(args.url, "/api/generate", key, {"model": args.name, "prompt": "", "keep_alive": 0})
    name = answer["model"]
    status = get_json(args.url, f"/v1/models/{quote(name)}", key)["status"]
    if status == "not loaded":
        print(f"{name} was not loaded already" if before == status else f"{name} is unloaded")
        return 0
    if status != "loaded":
        print(f"{name} is {status}")
        return 0
    if answer["done_reason"] == "load":
        reason = "the server preloads it, or the key is not the operator's"
        raise ChairliftError(f"{name} stays loaded, because {reason} (POST /models/unload on its admin socket unloads it)")
    row = next(one for one in get_json(args.url, "/api/ps", key)["models"] if one["name"] == name)
    print(f"{name} is unloaded when its {row['requests']} requests have ended")
    return 0
