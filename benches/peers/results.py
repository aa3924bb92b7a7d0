"""What was measured, run by run, and the numbers that a run comes to."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DISTURBED = 0.03
"""Share of the CPU that others may take before a run counts as disturbed."""

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """All runs that a file holds; a last line cut short by an interrupt does not count."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def append(path: Path, record: Record) -> None:
    """Adds a run to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


Setting = tuple[str, str, str]
Key = tuple[Setting, str, str, int]


def setting(record: Record) -> Setting:
    """What must be equal for two runs to stand in one table: workload, commit and machine, all but its kernel's patches."""
    machine = record["machine"]
    return record["workload"], record["commit"], f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"


def key(record: Record) -> Key:
    """What a run was: its setting, peer and mode, and the number of its repeat."""
    return setting(record), record["peer"], record["mode"], record["repeat"]


def latest(records: list[Record], workload: str) -> list[Record]:
    """Those of a workload that were made at the commit, and on the machine, of the last of them."""
    mine = [record for record in records if record["workload"] == workload]
    return [record for record in mine if setting(record) == setting(mine[-1])]


def chosen(records: Iterable[Record]) -> list[Record]:
    """One run for each key: the one that was disturbed least, of those without failures where there are any."""
    best: dict[Key, Record] = {}
    for record in records:
        if "error" in record:
            continue
        rank = (record["failed"], record["shares"]["others"])
        held = best.get(key(record))
        if held is None or rank < (held["failed"], held["shares"]["others"]):
            best[key(record)] = record
    return list(best.values())


@dataclass(frozen=True)
class Slo:
    """What a request must meet to count in goodput, in seconds."""

    ttft: float = 2.0
    tpot: float = 0.2


def numbers(record: Record, slo: Slo) -> dict[str, float]:
    """A run in numbers: rates a second, times in seconds.

    TTFT counts from when a request was due; TPOT is the mean time of a request's tokens after the first; ITL are all gaps between
    pieces of text, so tokens that arrive together are one.
    """
    answers = [answer for answer in record["answers"] if not answer["error"] and answer["times"]]
    if not answers:
        return {}
    span = max(answer["times"][-1] for answer in answers)
    ttft = np.array([answer["times"][0] - answer["due"] for answer in answers])
    tpot = np.array([(a["times"][-1] - a["times"][0]) / max(1, a["tokens"] - 1) for a in answers])
    gaps = np.concatenate([np.diff(answer["times"]) for answer in answers])
    found = {
        "tokens_s": sum(answer["tokens"] for answer in answers) / span,
        "span": span,
        "goodput": float(((ttft <= slo.ttft) & (tpot <= slo.tpot)).sum()) / span,
        "itl_p99": float(np.percentile(gaps, 99)) if len(gaps) else 0.0,
    }
    for name, values, quantiles in (("ttft", ttft, (50, 95, 99)), ("tpot", tpot, (50, 99))):
        found |= {f"{name}_p{q}": float(np.percentile(values, q)) for q in quantiles}
    return found


def medians(records: list[Record], slo: Slo) -> dict[str, float]:
    """The median of each number over repeats: over those that nobody disturbed, if there are any."""
    quiet = [record for record in records if record["shares"]["others"] <= DISTURBED] or records
    found = [values for record in quiet if (values := numbers(record, slo))]
    return {name: statistics.median(values[name] for values in found) for name in found[0]} if found else {}


def of(records: list[Record], **wanted: Any) -> list[Record]:
    """Those with these values."""
    return [record for record in records if all(record[name] == value for name, value in wanted.items())]


def order(records: list[Record], what: Callable[[Record], Any]) -> list[Any]:
    """The values there are, each once, in the order of their first."""
    return list(dict.fromkeys(what(record) for record in records))


def rates(records: list[Record]) -> list[str]:
    """The modes with arrivals, slowest first."""
    return sorted({record["mode"] for record in records if record["mode"] != "offline"}, key=float)


def agreement(records: list[Record], peer: str, reference: str) -> tuple[int, int]:
    """How many answers of a peer are letter by letter those of another, and of how many; offline, first repeats."""
    texts = [
        {i: a["text"] for i, a in enumerate(r["answers"]) if not a["error"]}
        for p in (peer, reference)
        for r in of(records, peer=p, mode="offline")[:1]
    ]
    if len(texts) < 2:
        return 0, 0
    both = texts[0].keys() & texts[1].keys()
    return sum(texts[0][i] == texts[1][i] for i in both), len(both)
