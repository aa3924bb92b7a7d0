"""`chairlift explain`: where a request's time went, as a bar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chairlift.cli.remote import ask, client_key
from chairlift.config import EngineConfig, ServerConfig
from chairlift.timeline import STATES, described


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Prints one request's explanation: coloured in a terminal, plain text elsewhere."""
    explanation = ask(given["url"], f"/v1/requests/{quote(given['id'])}/explain", client_key(given))
    show(explanation, Console(highlight=False))
    return 0


def show(explanation: Mapping[str, Any], console: Console) -> None:
    """Prints the paragraph, and for each sequence its bar and what the bar's parts mean; no colours and no bars without a terminal."""
    console.print(Text(explanation["summary"]), soft_wrap=not console.is_terminal)
    sequences = explanation["sequences"]
    longest = max((sum(sequence["states"].values()) for sequence in sequences), default=0.0) or 1.0
    for sequence in sequences:
        console.print()
        if len(sequences) > 1:
            console.print(f"sequence {sequence['tag']}", style="bold")
        causes = sequence["states"]
        ordered = [*(name for name in STATES if name in causes), *(name for name in causes if name not in STATES)]
        parts = [(name, described(name).meaning, described(name).colour, causes[name]) for name in ordered if causes[name]]
        if console.is_terminal:
            console.print(bar([(colour, seconds) for _, _, colour, seconds in parts], longest, console.width))
        legend = Table.grid(padding=(0, 2))
        for cause, meaning, colour, seconds in parts:
            mark = Text("█", style=colour) if console.is_terminal else Text("")
            legend.add_row(mark, Text(f"{seconds * 1e3:,.1f} ms", justify="right"), cause, Text(meaning, style="dim"))
        console.print(legend)


def bar(parts: list[tuple[str, float]], whole: float, width: int) -> Text:
    """A line of `width` cells for `whole` seconds, with a stretch of its colour for each part, at least a cell long."""
    text, done, drawn = Text(), 0.0, 0
    for colour, seconds in parts:
        done += seconds
        end = max(drawn + 1, round(width * done / whole))
        end = min(end, width)
        text.append("█" * (end - drawn), style=colour)
        drawn = end
    return text
