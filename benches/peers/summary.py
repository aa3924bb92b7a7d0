"""Chairlift beside the best peers: each way of asking by itself, since what runs in process is spared the HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from peers.engines import OURS, PEERS, Arithmetic, Peer

ENGINES = {
    "chairlift": "Chairlift",
    "vllm": "vLLM",
    "openvino": "OpenVINO GenAI",
    "llama": "llama.cpp",
    "transformers": "transformers",
}
"""Their names by what those of their peers begin with."""


@dataclass(frozen=True)
class Line:
    """One of our rows, the quickest peer of the same arithmetic or None, and the quickest of all; output tokens a second."""

    ours: str
    speed: float
    alike: tuple[str, float] | None
    best: tuple[str, float]


def compare(speeds: Mapping[str, float], peers: Mapping[str, Peer] = PEERS) -> list[Line]:
    """A line for each of our rows that was measured beside any peer; `speeds` are output tokens a second, offline."""

    def quickest(serves: bool, arithmetic: Arithmetic | None = None) -> tuple[str, float] | None:
        others = [name for name in speeds if not name.startswith("chairlift") and peers[name].serves == serves]
        found = [(name, speeds[name]) for name in others if arithmetic in (None, peers[name].arithmetic)]
        return max(found, key=lambda item: item[1], default=None)

    lines = []
    for name in (*OURS, *(f"{name}_in_process" for name in OURS)):
        if name in speeds:
            mine = peers[name]
            best = quickest(mine.serves)
            alike = quickest(mine.serves, mine.arithmetic)
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

    def asked(line: Line) -> str:
        return "through HTTP" if PEERS[line.ours].serves else "in process"

    return [
        "| Chairlift | asked | arithmetic | output tokens/s | best peer of all | to it | best of the same arithmetic | to it |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {line.ours} | {asked(line)} | {PEERS[line.ours].arithmetic} | **{line.speed:.0f}** | "
            f"{cells(line, line.best)} {cells(line, line.alike)}"
            for line in lines
        ),
    ]


def grid(speeds: Mapping[str, float], peers: Mapping[str, Peer] = PEERS) -> list[str]:
    """Each engine in its best setting of each arithmetic, through HTTP / in process, as Markdown."""
    kinds = get_args(Arithmetic)

    def cell(engine: str, arithmetic: str) -> str:
        found = [
            max((s for name, s in speeds.items() if _is(name, engine, arithmetic, serves, peers)), default=None) for serves in (True, False)
        ]
        return " / ".join("-" if speed is None else f"{speed:.0f}" for speed in found) if any(found) else ""

    rows = [(name, [cell(engine, kind) for kind in kinds]) for engine, name in ENGINES.items()]
    return [
        f"| output tokens/s, HTTP / in process | {' | '.join(kinds)} |",
        "|---|" + "---|" * len(kinds),
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows if any(cells)),
    ]


def _is(name: str, engine: str, arithmetic: str, serves: bool, peers: Mapping[str, Peer]) -> bool:
    return name.split("_")[0] == engine and (peers[name].arithmetic, peers[name].serves) == (arithmetic, serves)
