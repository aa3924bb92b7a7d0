"""`chairlift usage`: sums a usage log."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chairlift.cli import flags
from chairlift.cli.printable import printable
from chairlift.errors import InvalidSetting

_EXAMPLES = """\
examples:
  chairlift usage /var/log/chairlift                      by day, tenant and tier
  chairlift usage /var/log/chairlift --by tenant          by tenant
  chairlift usage /var/log/chairlift --by tenant,session  by tenant and session
  chairlift usage /var/log/chairlift --since 2026-11-01 --json
                                                          from the 1st of November, for programs

'chairlift serve --usage-log DIR' writes the log.
"""

_GROUPS = ("day", "tenant", "tier", "model", "session")
_SUMS = {
    "requests": "requests",
    "prompt_tokens": "prompt tokens",
    "cached_tokens": "of them cached",
    "output_tokens": "output tokens",
    "computed_tokens": "computed tokens",
    "compute_seconds": "compute seconds",
    "energy_joules": "joules",
    "block_seconds": "KV block-seconds",
    "held_token_seconds": "held token-seconds",
    "seconds": "seconds",
    "preemptions": "preemptions",
}
"""What is summed, with its heading."""
_OPTIONAL = ("energy_joules", "held_token_seconds")
"""What not every record has: the energy is there if there is a meter, and only live sequences are held."""
_REQUIRED = ("tenant", "tier", "model", *(name for name in list(_SUMS)[1:] if name not in _OPTIONAL))


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "usage", summary, _EXAMPLES, run)
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory of the usage log")
    parser.add_argument(
        "--by",
        type=_groups,
        default=_GROUPS[:3],
        metavar="LIST",
        help=f"group by some of {', '.join(_GROUPS)} (default: {','.join(_GROUPS[:3])})",
    )
    parser.add_argument("--since", type=_day, metavar="DAY", help="first day, in UTC, like 2026-11-01 (default: the first of the log)")
    parser.add_argument("--until", type=_day, metavar="DAY", help="last day (default: today)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the sums, one line for each group."""
    if not args.directory.is_dir():
        raise InvalidSetting(f"{args.directory} is not a directory: name the one that was given to --usage-log")
    console = Console(highlight=False)
    invalid = 0
    sums: dict[tuple[str, ...], dict[str, float]] = {}
    for file in sorted(args.directory.glob("*.jsonl")):
        if not (args.since or "") <= file.stem <= (args.until or "9999") or file.is_dir():
            continue
        for record in _records(file):
            if record is None:
                invalid += 1
                continue
            key = tuple(file.stem if name == "day" else str(record.get(name) or "") for name in args.by)
            group = sums.setdefault(key, dict.fromkeys(_SUMS, 0))
            # A live sequence's own record is of what it held: its lifetime is not the time of a request.
            counted = {**record, "requests": 1} if "held_token_seconds" not in record else {**record, "seconds": 0}
            for name in _SUMS:
                group[name] += counted.get(name, 0)
    if invalid:
        Console(stderr=True).print(f"{invalid} incomplete lines were skipped", style="yellow")
    if args.json:
        rows = [dict(zip(args.by, key, strict=True)) | {name: round(value, 6) for name, value in sums[key].items()} for key in sorted(sums)]
        print(json.dumps(rows, indent=2))
    else:
        _print(console, args.by, sums)
    return 0


def _print(console: Console, by: Sequence[str], sums: dict[tuple[str, ...], dict[str, float]]) -> None:
    """Prints one line for each group, or one paragraph where the lines are wider than the terminal: numbers are never cut."""
    if not sums:
        console.print("no records")
        return
    table = _table(by, sums)
    if console.measure(table, options=console.options.update(max_width=10_000)).maximum <= console.width:
        console.print(table)
        return
    names = _names(sums)
    width = max(len(_SUMS[name]) for name in names)
    for key in sorted(sums):
        lines = [f"{_SUMS[name]:{width}}  {_number(name, sums[key][name])}" for name in names]
        console.print(", ".join(printable(part) or "-" for part in key), *lines, sep="\n  ", markup=False, soft_wrap=True)


def _records(file: Path) -> Iterator[dict[str, Any] | None]:
    """Yields the records of a file; None for a line that was not written whole, because the machine or the disk failed."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            yield record if isinstance(record, dict) and all(name in record for name in _REQUIRED) else None


def _day(text: str) -> str:
    """A day as files are named. Raises argparse.ArgumentTypeError."""
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a day like 2026-11-01, got {text!r:.40}") from None


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in _GROUPS]:
        raise argparse.ArgumentTypeError(f"cannot group by {unknown[0]!r}: expected {', '.join(_GROUPS)}, separated by commas")
    return names


def _names(sums: dict[tuple[str, ...], dict[str, float]]) -> list[str]:
    """What is shown: optional sums only where they are not zero."""
    return [name for name in _SUMS if name not in _OPTIONAL or any(group[name] for group in sums.values())]


def _number(name: str, value: float) -> str:
    """A sum. Seconds and joules have a decimal, so that what few requests used is not 0."""
    return f"{value:,.{1 if name.endswith(('seconds', 'joules')) else 0}f}"


def _table(by: Sequence[str], sums: dict[tuple[str, ...], dict[str, float]]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2))
    for name in by:
        table.add_column(name)
    names = _names(sums)
    for name in names:
        table.add_column(_SUMS[name], justify="right")
    for key in sorted(sums):
        table.add_row(*(Text(printable(part) or "-") for part in key), *(_number(name, sums[key][name]) for name in names))
    return table
