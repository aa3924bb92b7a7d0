"""`chairlift top`: a running server in the terminal."""

from __future__ import annotations

import base64
import struct
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from chairlift.cli.remote import ask, client_key
from chairlift.config import EngineConfig, ServerConfig
from chairlift.errors import ChairliftError
from chairlift.timeline import described

SECONDS = 0.5
"""Between two looks."""
SETTLING = 1.3
"""Between the first look and the only one shown with --once: until then there are no rates."""

PIPED_WIDTH = 120
"""Columns of a picture that goes to a file or another program."""

_LATENCIES = {"ttft": "first token", "itl": "between tokens", "queue": "in the queue", "e2e": "whole request"}
_STATES = {"decode": "green", "prefill": "blue", "recompute": "magenta", "stalled": "yellow"}


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Shows the server until Ctrl-C, or once where nobody could see it move."""
    key = client_key(given)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH

    def look() -> Mapping[str, Any]:
        state: Mapping[str, Any] = ask(given["url"], "/dashboard/data", key)
        return state

    state = look()
    if given["once"] or not console.is_terminal:
        if state["ready"]:
            time.sleep(SETTLING)
            state = look()
        console.print(frame(state, console))
        return 0
    with Live(frame(state, console), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(SECONDS)
            try:
                live.update(frame(look(), console), refresh=True)
            except ChairliftError as error:  # it may come back
                live.update(Text(str(error), style="red"), refresh=True)


def frame(state: Mapping[str, Any], console: Console) -> RenderableType:
    """One picture of the server's state, as `GET /dashboard/data` has it, as high as the console."""
    stats, load = state["stats"], state["load"]
    newest = state["samples"][-1] if state["samples"] else {}
    word = "the engine is stuck" if state["stuck"] else _SERVER_STATES[state["state"]]
    rates = "   ".join(f"{newest.get(name, 0.0):,.0f} {unit}" for name, unit in _RATES)
    waiting = stats.get("waiting", 0) + stats.get("swapped", 0)
    parts: list[RenderableType] = [
        Text.assemble(
            ("chairlift ", "bold"),
            state["model"],
            "  ",
            (word, "green" if word == "live" else "yellow"),
            "   ",
            rates,
            no_wrap=True,
            overflow="ellipsis",
        ),
        Text(),
        _meter("rows", load["slots"], f"{stats.get('running', 0)} of {stats.get('slots', 0)} run, {waiting} wait", console),
        _meter("KV", load["kv_cache"], _blocks(state), console),
        _meter("full", load["saturation"], "work that arrived, of what could be served in 10 s", console),
        Text(),
        _beside(_latency(state["latency"]), _causes(stats), console),
        Text(),
    ]
    room = max(5, console.height - 17) if console.is_terminal else len(state["running"])
    parts.append(_rows(state["running"], room, console))
    return Group(*parts)


_SERVER_STATES = {
    "starting": "the model is loading",
    "ready": "live",
    "restarting": "the engine is being started again",
    "failed": "the engine could not be started again: the server goes on trying",
    "draining": "shutting down",
}
_RATES = (("generation", "tokens/s generated"), ("prompt", "of prompts"), ("steps", "steps/s"))


def _meter(name: str, share: float, told: str, console: Console) -> Text:
    width = max(10, min(40, console.width - 60))
    full = round(width * min(1.0, share))
    colour = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    return Text.assemble(
        f"{name:5}",
        ("█" * full, colour),
        ("░" * (width - full), "bright_black"),
        f" {share:4.0%}  ",
        (told, "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )


def _blocks(state: Mapping[str, Any]) -> str:
    """What the KV blocks are, in words."""
    cells = base64.b64decode(state["kv_map"])
    kinds = Counter(min(cell, 3) for (cell,) in struct.iter_unpack("<I", cells))
    names = ("free", "cached", "shared", "held alone")
    total = sum(kinds.values())
    return ", ".join(f"{kinds[kind] / total:.0%} {name}" for kind, name in enumerate(names)) if total else ""


def _beside(left: RenderableType, right: RenderableType, console: Console) -> RenderableType:
    if console.width < 110:
        return Group(left, Text(), right)
    grid = Table.grid(padding=(0, 6))
    grid.add_row(left, right)
    return grid


def _table(*columns: str) -> Table:
    """A table whose columns after the first are numbers if their names end with a space."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column.strip(), justify="right" if column.endswith(" ") else "left", no_wrap=True)
    return table


def _latency(latency: Mapping[str, Any]) -> Table:
    since = f"last {latency['window']:.0f} s" if latency["window"] else "since the start"
    table = _table(f"latency, {since}", "p50 ", "p90 ", "p99 ")
    for key, name in _LATENCIES.items():
        seen = latency.get(key, {})
        table.add_row(name, *(_rounded(seen.get(point)) for point in ("p50", "p90", "p99")))
    return table


def _causes(stats: Mapping[str, Any]) -> Table:
    table = _table("who waits", "requests ", "why")
    causes = stats.get("waiting_by_state", {})
    for cause, count in sorted(causes.items(), key=lambda item: -item[1]):
        state = described(cause)
        table.add_row(Text(cause, style=state.colour), str(count), Text(state.meaning, style="dim"))
    if not causes:
        table.add_row("nobody", "", "")
    return table


def _rows(rows: Sequence[Mapping[str, Any]], room: int, console: Console) -> Table:
    """The first `room` rows; names are cut to what the console leaves for them."""
    longest = max(12, min(48, console.width - 66))
    table = _table("row ", "request", "tenant", "does", "prompt ", "output ", "blocks ", "age ")
    for row in sorted(rows, key=lambda row: int(row["slot"]))[:room]:
        prompt = f"{min(row['computed_tokens'], row['prompt_tokens']):,}/{row['prompt_tokens']:,}"
        does = Text(row["state"], style=_STATES.get(row["state"], ""))
        numbers = (f"{row['output_tokens']:,}", f"{row['blocks']:,}", _seconds(row["age_us"] / 1e6))
        name = row["request"] or f"#{row['tag']}"
        name = name if len(name) <= longest else name[: longest - 1] + "…"
        table.add_row(str(row["slot"]), name, row["tenant"], does, prompt, *numbers)
    if len(rows) > room:
        table.add_row("", f"and {len(rows) - room} more")
    return table


def _rounded(seconds: float | None) -> str:
    """To two digits: percentiles are known to within 5 %."""
    if seconds is None:
        return "-"
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{float(f'{value:.2g}'):g} {unit}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
