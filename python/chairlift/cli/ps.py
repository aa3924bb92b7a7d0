"""`chairlift ps`: the models of a running server."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from typing import Any

from chairlift.cli import flags
from chairlift.cli.remote import add_server, client_key, get_json

_STAYS_SECONDS = 365 * 86400
"""A model that stays loaded for longer than this is said to stay."""

_EXAMPLES = """\
examples:
  chairlift ps                               the models of the server at http://127.0.0.1:8000
  chairlift ps --url http://10.0.0.7:8000 --api-key SECRET

'chairlift stop MODEL' unloads one. 'chairlift top' shows what a server does.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "ps", summary, _EXAMPLES, run)
    add_server(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints one line for each model."""
    key = client_key(args)
    loaded = {one["name"]: one for one in get_json(args.url, "/api/ps", key)["models"]}
    models = [one for one in get_json(args.url, "/v1/models", key)["data"] if one["id"] == one["root"]]
    rows = [{"name": one["id"], "status": one["status"], **loaded.get(one["id"], {})} for one in models]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:{width}}  {row['status']:10}  {_details(row)}".rstrip())
    return 0


def _details(row: dict[str, Any]) -> str:
    """What a loaded model takes and does."""
    if "expires_at" not in row:
        return ""
    size = "" if row["size"] is None else f"{row['size'] / 1e6:,.0f} MB, "
    return f"{size}{row['context_length']:,} tokens of context, {row['requests']} requests, {_until(row['expires_at'])}"


def _until(time: str) -> str:
    seconds = (datetime.fromisoformat(time) - datetime.now(UTC)).total_seconds()
    return "stays loaded" if seconds > _STAYS_SECONDS else f"unloaded after {max(0, seconds):.0f} s without a request"
