"""`chairlift top`: a running server in the terminal."""

from __future__ import annotations

import argparse
import base64
import struct
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from chairlift.cli import flags
from chairlift.cli.printable import printable
from chairlift.cli.ps import HEADING, model_cells
from chairlift.cli.remote import add_server, client_key, get_json
from chairlift.errors import ChairliftError
from chairlift.timeline import describe_state

REFRESH_SECONDS = 0.5

RATES_SECONDS = 1.3
"""Seconds until the server has rates to report; `--once` waits for them."""

PIPED_WIDTH = 120
"""Columns of the output to a file or a pipe."""

_EXAMPLES = """\
examples:
  chairlift top                                      the server at http://127.0.0.1:8000
  chairlift top --url http://10.0.0.7:8000 --api-key SECRET
  chairlift top --model chat                         the engine of one model, on a server with several
  chairlift top --once                               print the state once, for a script

http://127.0.0.1:8000/dashboard shows more in a browser.
"""

_MAX_SESSIONS = 5
"""Sessions that are shown."""
_MAX_MISSES = 4
"""Reasons for cache misses that are shown: those of the most tokens."""
_MAX_SHADOW_GROUPS = 3
"""Tenants and sessions of a shadow's report that are shown: those with the most requests."""

_LATENCIES = {"ttft": "first token", "itl": "between tokens", "queue": "in the queue", "e2e": "whole request"}
_STATES = {"decode": "green", "prefill": "blue", "recompute": "magenta", "stalled": "yellow"}


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "top", summary, _EXAMPLES, run)
    add_server(parser)
    parser.add_argument("--model", metavar="NAME", help="model whose engine is shown, if the server has several (default: the first)")
    parser.add_argument("--once", action="store_true", help="print the current state and exit")


def run(args: argparse.Namespace) -> int:
    """Shows the server's state until Ctrl-C, or once if standard output is no terminal."""
    key = client_key(args)
    path = "/dashboard/data" + (f"?{urlencode({'model': args.model})}" if args.model else "")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH

    def fetch() -> Mapping[str, Any]:
        state: Mapping[str, Any] = get_json(args.url, path, key)
        return state

    state = fetch()
    if args.once or not console.is_terminal:
        if state["ready"]:
            time.sleep(RATES_SECONDS)
            state = fetch()
        console.print(frame(state, console))
        return 0
    with Live(frame(state, console), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_SECONDS)
            try:
                live.update(frame(fetch(), console), refresh=True)
            except ChairliftError as error:  # the server may be restarting
                live.update(Text(str(error), style="red"), refresh=True)


def frame(state: Mapping[str, Any], console: Console) -> RenderableType:
    """The server's state (the body of `GET /dashboard/data`), at most as high as the console if that shows five running sequences."""
    stats, load = state["stats"], state["load"]
    sample = state["samples"][-1] if state["samples"] else {}
    status = "the engine is stuck" if state["stuck"] else _SERVER_STATES[state["state"]]
    title = Text.assemble(
        ("chairlift ", "bold"), state["model"], "  ", (status, "green" if status == "live" else "yellow"), no_wrap=True, overflow="ellipsis"
    )
    values = [(sample.get(name, 0.0), unit) for name, unit in _RATES]
    rates = Text(
        "  ".join(f"{value:,.{1 if 0 < value < 9.95 else 0}f} {unit}" for value, unit in values), no_wrap=True, overflow="ellipsis"
    )
    waiting = stats.get("waiting", 0) + stats.get("swapped", 0)
    parts: list[RenderableType] = [
        *([Text("   ").join((title, rates))] if len(title) + len(rates) + 3 <= console.width else [title, rates]),
        *_models(state, console),
        *_engines(state, console),
        Text(),
        _meter("slots", load["slots"], f"{stats.get('running', 0)} of {stats.get('slots', 0)} running, {waiting} waiting", console),
        _meter("KV", load["kv_cache"], _blocks(state), console),
        _meter("load", load["saturation"], "work that arrived in 10 s, as a share of the capacity", console),
        Text(),
        _beside(_latency(state["latency"], console), _waiting(stats, console), console),
        *_shadow(state.get("shadow"), console),
        *_tiers(state.get("tiers", ()), console),
        *_cache_misses(state.get("cache_misses", ()), console),
        *_sessions(state.get("sessions", ()), console),
        Text(),
    ]
    height = len(console.render_lines(Group(*parts), pad=False))
    limit = max(5, console.height - height - 2) if console.is_terminal else len(state["running"])
    return Group(*parts, _running(state["running"], limit, console))


_SERVER_STATES = {
    "starting": "the model is loading",
    "ready": "live",
    "restarting": "the engine is restarting",
    "failed": "the engine failed to start; the server retries",
    "draining": "shutting down",
    "unloaded": "not loaded: a request loads the model",
    "loading": "the model is loading",
    "load_failed": "the model could not be loaded: the server's log has the reason",
}
_RATES = (("generation", "tokens/s generated"), ("prompt", "tokens/s of prompts"), ("steps", "steps/s"))


def _models(state: Mapping[str, Any], console: Console) -> list[RenderableType]:
    """A row for each model of a server with several."""
    if len(state.get("models", ())) < 2:
        return []
    names = [f"{name.lower()}{' ' if name in ('MEMORY', 'RUNNING', 'WAITING') else ''}" for name in HEADING]
    styles = ["bold" if model["name"] == state["model"] else "" for model in state["models"]]
    rows = [[Text(cell, style) for cell in model_cells(model)] for model, style in zip(state["models"], styles, strict=True)]
    return [Text(), _table(console, names, rows, ("unloaded", "memory "))]


def _engines(state: Mapping[str, Any], console: Console) -> list[RenderableType]:
    """A row for each engine of a model with several. A tenant sees no more than their states."""
    if len(state.get("replicas", ())) < 2:
        return []
    rows = []
    for one in state["replicas"]:
        style = "bold" if one["number"] == state["replica"] else ""
        load = (f"{one['load'][name]:.0%}" for name in ("slots", "kv_cache", "saturation")) if "load" in one else "---"
        counts = (str(one.get(name, "-")) for name in ("running", "waiting"))
        rows.append([Text(cell, style) for cell in (f"engine {one['number']}", one["state"], *counts, *load)])
    return [Text(), _table(console, ("engine", "state", "running ", "waiting ", "slots ", "KV ", "load "), rows)]


def _meter(name: str, share: float, text: str, console: Console) -> Text:
    width = max(10, min(40, console.width - 61))
    filled = round(width * min(1.0, share))
    colour = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    return Text.assemble(
        f"{name:6}",
        ("█" * filled, colour),
        ("░" * (width - filled), "bright_black"),
        f" {share:4.0%}  ",
        (text, "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )


def _blocks(state: Mapping[str, Any]) -> str:
    """The shares of free, cached, shared and exclusive KV blocks, as text."""
    cells = base64.b64decode(state["kv_map"])
    kinds = Counter(min(cell, 3) for (cell,) in struct.iter_unpack("<I", cells))
    names = ("free", "cached", "shared", "exclusive")
    total = sum(kinds.values())
    return ", ".join(f"{kinds[kind] / total:.0%} {name}" for kind, name in enumerate(names) if kinds[kind])


def _beside(left: RenderableType, right: RenderableType, console: Console) -> RenderableType:
    if console.width < 110:
        return Group(left, Text(), right)
    grid = Table.grid(padding=(0, 6))
    grid.add_row(left, right)
    return grid


def _table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str | Text]], minor: Sequence[str] = ()) -> Table:
    """A table without lines. Columns whose names end with a space are right-aligned.

    While the table is wider than the console, it loses a column of `minor`, the first one first. Beside another table these are cut first.
    """
    widths = {name: max(cell_len(str(cell)) for cell in (name.strip(), *cells)) + 2 for name, *cells in zip(columns, *rows, strict=True)}
    dropped = set[str]()
    for name in minor:
        if sum(width for kept, width in widths.items() if kept not in dropped) > console.width:
            dropped.add(name)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        if column not in dropped:
            least = None if column in minor else widths[column] - 2
            table.add_column(column.strip(), justify="right" if column.endswith(" ") else "left", no_wrap=True, min_width=least)
    for row in rows:
        table.add_row(*(cell for column, cell in zip(columns, row, strict=True) if column not in dropped))
    return table


def _latency(latency: Mapping[str, Any], console: Console) -> Table:
    since = f"last {latency['window']:.0f} s" if latency["window"] else "since start"
    percentiles = {name: latency.get(key, {}) for key, name in _LATENCIES.items()}
    rows = [(name, *(_rounded(one.get(point)) for point in ("p50", "p90", "p99"))) for name, one in percentiles.items()]
    return _table(console, (f"latency, {since}", "p50 ", "p90 ", "p99 "), rows)


def _waiting(stats: Mapping[str, Any], console: Console) -> Table:
    rows: list[Sequence[str | Text]] = []
    for name, count in sorted(stats.get("waiting_by_state", {}).items(), key=lambda item: -item[1]):
        state = describe_state(name)
        rows.append((Text(name, style=state.colour), str(count), Text(state.meaning, style="dim")))
    return _table(console, ("waiting", "requests ", "meaning"), rows or [("none", "", "")], ("meaning",))


def _shadow(report: Mapping[str, Any] | None, console: Console) -> list[RenderableType]:
    """What the server would do under other settings, if it simulates that."""
    if report is None:
        return []
    covered = "" if report["covered"] is None else f", {report['covered']:.0%} covered"
    runs = list(report["runs"].items())
    for group in ("tenants", "sessions"):
        if len(report[group]) > 1:
            named = list(report[group].items())[:_MAX_SHADOW_GROUPS]
            runs += [(f"{_shown(name or '(none)', 30)}: {run}", one[run]) for name, one in named for run in ("simulated", "shadow")]
    rows: list[Sequence[str | Text]] = []
    for run, one in runs:
        times = (_rounded(one[key]) for key in ("ttft_p50_s", "ttft_p99_s", "time_per_output_token_p50_s"))
        cached = "-" if one["cached_share"] is None else f"{one['cached_share']:.0%}"
        rows.append((Text(run), f"{one['requests']:,}", *times, cached, f"{one['preemptions']:,}"))
    columns = (f"shadow: {report['settings']}{covered}", "requests ", "TTFT p50 ", "p99 ", "TPOT p50 ", "cached ", "preemptions ")
    failed = [Text(f"the policy failed: {report['failure']}", style="red")] if report["failure"] else []
    proposed = [Text(f"proposal: {report['proposal']['text']}")] if report["proposal"] else []
    return [Text(), _table(console, columns, rows, ("preemptions ", "cached ")), *failed, *proposed]


def _tiers(rows: Sequence[Mapping[str, Any]], console: Console) -> list[RenderableType]:
    """A row for each tier, if another than `default` is in use."""
    if all(row["tier"] == "default" for row in rows):
        return []
    cells = []
    for row in rows:
        ttft, itl = (row["latency"].get(name, {}) for name in ("ttft", "itl"))
        times = (_rounded(one.get(point)) for one in (ttft, itl) for point in ("p50", "p99"))
        cells.append((row["tier"], str(row["running"]), str(row["waiting"]), *times))
    return [
        Text(),
        _table(console, ("tier", "running ", "waiting ", "TTFT p50 ", "TTFT p99 ", "ITL p50 ", "ITL p99 "), cells, ("ITL p50 ",)),
    ]


def _sessions(rows: Sequence[Mapping[str, Any]], console: Console) -> list[RenderableType]:
    """The latest sessions. Their names, which clients choose, are cut to the width that is left."""
    if not rows:
        return []
    missed = [_missed(row.get("missed_for", {})) for row in rows[:_MAX_SESSIONS]]
    longest = max(8, min(40, console.width - 79))
    cells: list[Sequence[str | Text]] = []
    for row in rows[:_MAX_SESSIONS]:
        counts = f"{row['turns']:,}", f"{row['prompt_tokens']:,}", f"{row['cached_tokens'] / max(1, row['prompt_tokens']):.0%}"
        times = (_seconds(row[key]) for key in ("waited_s", "turn_wait_s", "compute_s", "quiet_s"))
        cells.append((Text(_shown(row["session"], longest)), Text(row["tenant"]), *counts, f"{row['output_tokens']:,}", *times))
    columns = ["session", "tenant", "turns ", "prompts ", "cached ", "output ", "waited ", "for turns ", "compute ", "quiet "]
    if any(missed):
        columns, cells = [*columns, "missed"], [[*cell, one or "-"] for cell, one in zip(cells, missed, strict=True)]
    return [Text(), _table(console, columns, cells, ("compute ", "for turns ", "tenant", "quiet ", "missed"))]


def _missed(tokens: Mapping[str, int]) -> str:
    """The tokens that a session computed again although the cache had had them, with the reason for most of them."""
    return f"{sum(tokens.values()):,} {max(tokens, key=tokens.__getitem__)}" if tokens else ""


def _cache_misses(rows: Sequence[Mapping[str, Any]], console: Console) -> list[RenderableType]:
    """The reasons for which turns missed the prefix cache."""
    if not rows:
        return []
    cells = [(row["reason"], f"{row['turns']:,}", f"{row['tokens']:,}", Text(row["what"], style="dim")) for row in rows[:_MAX_MISSES]]
    return [Text(), _table(console, ("cache misses", "turns ", "tokens ", "meaning"), cells, ("meaning",))]


def _running(rows: Sequence[Mapping[str, Any]], limit: int, console: Console) -> Table:
    """The first `limit` running sequences. Request ids are cut to the width that is left."""
    longest = max(12, min(48, console.width - 66))
    cells: list[Sequence[str | Text]] = []
    for row in sorted(rows, key=lambda row: int(row["slot"]))[:limit]:
        prompt = f"{min(row['computed_tokens'], row['prompt_tokens']):,}/{row['prompt_tokens']:,}"
        status = Text(row["state"], style=_STATES.get(row["state"], ""))
        numbers = (f"{row['output_tokens']:,}", f"{row['blocks']:,}", _seconds(row["age_us"] / 1e6))
        name = _cut(row["request"] or f"#{row['tag']}", longest)
        cells.append((str(row["slot"]), name, row["tenant"], status, prompt, *numbers))
    columns = ("slot ", "request", "tenant", "state", "prompt ", "output ", "blocks ", "age ")
    table = _table(console, columns, cells, ("blocks ", "tenant", "prompt "))
    if len(rows) > limit:
        table.add_row("", f"and {len(rows) - limit} more")
    return table


def _shown(name: str, longest: int) -> str:
    """A name that a client chose, for a terminal."""
    return _cut(printable(name), longest)


def _cut(name: str, longest: int) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"


def _rounded(seconds: float | None) -> str:
    """Two digits: the percentiles are exact to 5 %."""
    if seconds is None:
        return "-"
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{float(f'{value:.2g}'):g} {unit}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
