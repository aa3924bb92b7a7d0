"""`chairlift explain`: where a request's time went."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chairlift.cli import flags, values
from chairlift.cli.printable import printable
from chairlift.cli.remote import add_server, client_key, get_json
from chairlift.timeline import SERVING_RULES, STATES, describe_state
from chairlift.timeline_plot import plot

_EXAMPLES = """\
examples:
  chairlift explain cmpl-2d383f795c3348aab84c36a20f5df739
  chairlift explain my-own-request-id                as sent in X-Request-Id
  chairlift explain my-own-request-id --output time.svg

The id is 'id' in the answer, and the response header x-request-id. docs/latency.md says what to do about each state.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "explain", summary, _EXAMPLES, run)
    parser.add_argument("id", metavar="ID", help="id of a response, or the X-Request-Id of its request")
    add_server(parser)
    parser.add_argument("--output", type=values.picture, metavar="FILE", help="draw the time in each state, as .svg or .png")


def run(args: argparse.Namespace) -> int:
    """Prints a request's explanation: with colours in a terminal, as plain text elsewhere."""
    explanation = get_json(args.url, f"/v1/requests/{quote(args.id)}/explain", client_key(args))
    show(explanation, Console(highlight=False))
    if args.output is not None:
        plot([one["states"] for one in explanation["sequences"]], explanation["id"]).write(args.output)
    return 0


def show(explanation: Mapping[str, Any], console: Console) -> None:
    """Prints the summary, and each sequence's states with their times. A terminal also gets a coloured bar for each sequence."""
    console.print(Text(explanation["summary"]), soft_wrap=not console.is_terminal)
    if (miss := explanation.get("cache_miss")) is not None:
        for title, text in (("before", miss.get("before")), ("now", miss.get("now")), ("advice", miss["advice"])):
            if text is not None:
                console.print(Text(f"  {title}: {printable(text)}"))
    sequences = explanation["sequences"]
    total = max((sum(sequence["states"].values()) for sequence in sequences), default=0.0) or 1.0
    for sequence in sequences:
        console.print()
        if len(sequences) > 1:
            console.print(f"sequence {sequence['tag']}", style="bold")
        states = sequence["states"]
        ordered = [*(name for name in STATES if name in states), *(name for name in states if name not in STATES)]
        parts = [(name, describe_state(name).meaning, describe_state(name).colour, states[name]) for name in ordered if states[name]]
        if console.is_terminal:
            console.print(bar([(colour, seconds) for _, _, colour, seconds in parts], total, console.width))
        legend = Table.grid(padding=(0, 2))
        for state, meaning, colour, seconds in parts:
            mark = Text("█", style=colour) if console.is_terminal else Text("")
            legend.add_row(mark, Text(f"{seconds * 1e3:,.1f} ms", justify="right"), state, Text(meaning, style="dim"))
        console.print(legend)
        if served := sequence.get("served_first"):
            console.print()
            count = sum(sequence["served_before"].values())
            console.print(f"started before it{f', the first {len(served)} of {count}' if count > len(served) else ''}:")
            for tag, tenant, rule in served:
                console.print(Text(f"  request {tag}{f' of tenant {tenant}' if tenant else ''}, {SERVING_RULES.get(rule, rule)}"))


def bar(parts: list[tuple[str, float]], total: float, width: int) -> Text:
    """A bar of `width` characters for `total` seconds. Each part has at least one character in its colour."""
    text, done, drawn = Text(), 0.0, 0
    for colour, seconds in parts:
        done += seconds
        end = max(drawn + 1, round(width * done / total))
        end = min(end, width)
        text.append("█" * (end - drawn), style=colour)
        drawn = end
    return text
