"""`chairlift ps`: the models of a running server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from chairlift.cli import flags
from chairlift.cli.remote import add_server, client_key, get_json

HEADING = ("NAME", "STATE", "MEMORY", "RUNNING", "WAITING", "UNLOADED")

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
    models = get_json(args.url, "/dashboard/data", client_key(args))["models"]
    if args.json:
        print(json.dumps(models, indent=2))
        return 0
    rows = [HEADING, *map(model_cells, models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def model_cells(model: Mapping[str, Any]) -> tuple[str, ...]:
    """A model of GET /dashboard/data as cells below `HEADING`."""
    loaded = model["status"] == "loaded"
    memory = f"{model['num_bytes'] / 1e6:,.0f} MB" if loaded and model["num_bytes"] else "-"
    names = ", ".join((model["name"], *model["aliases"]))
    return names, model["status"], memory, str(model["running"]), str(model["waiting"]), _unloaded(model) if loaded else "-"


def _unloaded(model: Mapping[str, Any]) -> str:
    """When a loaded model is unloaded."""
    seconds = model["unload_in_seconds"]
    if seconds is None:
        return "not while in use" if model["requests"] else "stays loaded"
    return f"in {seconds / 60:.0f} min" if seconds >= 90 else f"in {seconds:.0f} s"
