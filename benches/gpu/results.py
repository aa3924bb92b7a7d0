"""The results of a script: a log of JSON lines, and a page made from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SAME = ("GPU", "SMs", "driver", "CUDA", "torch", "triton", "dry")
"""Facts of the machine that must be equal for a later run to go on with a log."""
NO = "**NO**"
"""Value of a row's column `good` if a check found something wrong."""


class Results:
    """What the parts of one script found.

    Each result is appended to NAME.jsonl as soon as it is known, and NAME.md is written anew from all of them. A run that finds a log of
    the same machine keeps the results of the parts that are done there.

    A line of the log is the machine, or has the name of a `part` and one of: `text`, a paragraph; `table` and `row`; `of` and `more`, what
    is added to the row of that number; `values`, numbers for other parts; `end`, how the part ended.
    """

    def __init__(self, name: str, out: Path, machine: dict[str, Any], again: Callable[[str], bool], lost: Sequence[str] = ()) -> None:
        """Reads the log in `out`, if there is one. Forgets parts that are not done, except `lost`, and those for which `again` is true."""
        self.name, self.machine = name, machine
        self.log, self.page = out / f"{name}.jsonl", out / f"{name}.md"
        kept = [record for record in self._read() if not again(record["part"])]
        done = {record["part"] for record in kept if record.get("end") == "done"}
        self._records = [record for record in kept if record["part"] in {*done, *lost}]
        self.ends: dict[str, str] = {}
        """How the parts ended that have ended: done, wrong, failed or skipped."""
        self.values: dict[str, Any] = {}
        """Numbers that parts left for others."""
        for record in self._records:
            self._note(record)
        self._rows = sum("row" in record for record in self._records)
        self._renumber()
        out.mkdir(parents=True, exist_ok=True)
        self.log.write_text("".join(_line(record) for record in ({"machine": machine}, *self._records)))

    def _read(self) -> list[dict[str, Any]]:
        try:
            lines = self.log.read_text().splitlines()
        except OSError:
            return []
        records = []
        for line in lines:
            try:
                records.append(json.loads(line))
            except ValueError:
                # A run that was killed may leave half a line.
                continue
        machine = records[0].get("machine", {}) if records else {}
        if [machine.get(fact) for fact in SAME] != [self.machine.get(fact) for fact in SAME]:
            print(f"{self.log} is of another machine or other versions: all is run again", flush=True)
            return []
        return [record for record in records if "part" in record]

    def _renumber(self) -> None:
        """Numbers the rows that were kept from 0."""
        numbers: dict[int, int] = {}
        for record in self._records:
            if "row" in record:
                numbers[record["number"]] = record["number"] = len(numbers)
            elif "of" in record:
                record["of"] = numbers[record["of"]]

    def _note(self, record: dict[str, Any]) -> None:
        self.values |= record.get("values", {})
        if "end" in record:
            self.ends[record["part"]] = record["end"]

    def add(self, part: str, **record: Any) -> None:
        """Adds a result of a part to the log and the page."""
        record = {"part": part, **_plain(record)}
        self._records.append(record)
        self._note(record)
        with self.log.open("a") as file:
            file.write(_line(record))
        self.page.write_text(self._render())

    def add_row(self, part: str, table: str, row: dict[str, Any]) -> int:
        """Adds a row to a table and returns its number, with which `add` can complete it."""
        self._rows += 1
        self.add(part, table=table, number=self._rows - 1, row=row)
        return self._rows - 1

    def wrong(self, part: str) -> int:
        """How many checks of a part found something wrong."""
        return sum(record["part"] == part and record.get("row", {}).get("good") == NO for record in self._records)

    def _render(self) -> str:
        tables: dict[str, list[dict[str, Any]]] = {}
        rows: dict[int, dict[str, Any]] = {}
        ends = [record for record in self._records if "end" in record]
        texts = [record["text"] for record in self._records if "text" in record]
        for record in self._records:
            if "row" in record:
                rows[record["number"]] = dict(record["row"])
                tables.setdefault(record["table"], []).append(rows[record["number"]])
            elif "of" in record:
                rows[record["of"]] |= record["more"]
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items() if name != "dry")
        lines = [f"# {self.name.capitalize()}, on a GPU", "", f"Written by `benches/gpu/{self.name}.py`. {facts}."]
        if self.machine["dry"]:
            lines += ["", "**A dry run on a CPU: nothing here is a measurement.**"]
        for text in texts:
            lines += ["", text]
        for title, found in tables.items():
            lines += _table(title, found)
        shown = [{"part": record["part"], "ended": record["end"], "s": record.get("seconds"), "why": record.get("why")} for record in ends]
        return "\n".join([*lines, *_table("Parts", shown)]) + "\n"


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _table(title: str, rows: list[dict[str, Any]]) -> list[str]:
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[cell(row.get(head)).replace("|", "\\|") for head in heads] for row in rows]
    return ["", f"## {title}", "", *(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *cells))]


def cell(value: Any) -> str:
    """A value as the page shows it."""
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


def _plain(value: Any) -> Any:
    """The same for JSON, which has no NaN."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
