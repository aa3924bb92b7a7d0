"""Chairlift beside the best peers: each way of asking by itself, since what runs in process is spared the HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from peers.engines import PEERS, Peer

OURS = {
    "chairlift": "through HTTP",
    "chairlift_int8": "through HTTP",
    "chairlift_in_process": "in process",
    "chairlift_int8_in_process": "in process",
}


@dataclass(frozen=True)
class Line:
    """One of our rows, the quickest peer of the same arithmetic or None, and the quickest of all; output tokens a second."""

    ours: str
    speed: float
    alike: tuple[str, float] | None
    best: tuple[str, float]


def compare(speeds: Mapping[str, float], peers: Mapping[str, Peer] = PEERS) -> list[Line]:
    """A line for each of our rows that was measured beside any peer; `speeds` are output tokens a second, offline."""

    def quickest(wanted: Callable[[Peer], bool]) -> tuple[str, float] | None:
        found = [(name, speed) for name, speed in speeds.items() if not name.startswith("chairlift") and wanted(peers[name])]
        return max(found, key=lambda item: item[1], default=None)

    lines = []
    for name in OURS:
        if name in speeds:
            mine = peers[name]
            best = quickest(lambda peer, mine=mine: peer.serves == mine.serves)
            alike = quickest(lambda peer, mine=mine: peer.serves == mine.serves and peer.arithmetic == mine.arithmetic)
            if best is not None:
                lines.append(Line(name, speeds[name], alike, best))
    return lines


def table(speeds: Mapping[str, float]) -> list[str]:
    """The lines as Markdown; none if nothing can be compared."""
    lines = compare(speeds)
    if not lines:
        return []

    def cells(line: Line, found: tuple[str, float] | None) -> str:
        return "none | |" if found is None else f"{found[0]}, {found[1]:.0f} | {line.speed / found[1]:.2f} |"

    return [
        "| Chairlift | asked | arithmetic | output tokens/s | best peer of all | to it | best of the same arithmetic | to it |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {line.ours} | {OURS[line.ours]} | {PEERS[line.ours].arithmetic} | **{line.speed:.0f}** | "
            f"{cells(line, line.best)} {cells(line, line.alike)}"
            for line in lines
        ),
    ]
