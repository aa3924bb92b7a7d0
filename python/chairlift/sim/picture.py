"""The picture of a comparison: who sat where, and when, under each way to batch; one SVG that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from chairlift.bench.report.plot import duration, round_numbers
from chairlift.sim.compare import Side

WIDTH, LEFT, RIGHT = 860, 70, 22
TOP, HEAD, GAP, BOTTOM = 66, 44, 26, 64
"""The picture's width and margins, and the room for a panel's heading and between two panels, in units of the SVG."""

MOST_RIDES, MOST_SEATS = 200, 64
"""Rides and seats that can be told apart; of more, how many are aboard is drawn."""

_SEAT, _AREA, _LINE = 13, 120, 30
"""The heights of a seat, of the area in the place of many seats, and of the line of those who wait."""

_COLOURS = ("#4e79a7", "#f0943d", "#59a14f", "#a87bb0", "#d9a927", "#56aaa5", "#d4605f", "#9c7a63")

# By the id, so that a page's own style changes nothing here.
_STYLE = """\
#compare text { font: 12px system-ui, sans-serif; fill: #5b6168 } #compare .small { font-size: 11px }
#compare .big { font-size: 19px; font-weight: 600; fill: #1c1e21 } #compare .name { font-size: 14.5px; font-weight: 600; fill: #1c1e21 }
#compare .told { font-size: 13px; fill: #1c1e21; paint-order: stroke; stroke: #fff; stroke-width: 5px }
#compare .end { text-anchor: end } #compare .middle { text-anchor: middle }
#compare path { stroke: none; stroke-width: 1 } #compare path.grid { stroke: #d5d9de }
#compare path.done { stroke: #1c1e21; stroke-dasharray: 3 3 } #compare .free { fill: #e9ecef } #compare .kept { fill: #f7d8d2 }
#compare .prompt { fill: #000; fill-opacity: .34 } #compare .line { fill: #cf8577 } #compare .aboard { fill: #4e79a7 }
"""


def picture(sides: Sequence[Side], title: str, subtitle: str) -> str:
    """Draws the sides one below the other, over the same time, with how many wait in line below each.

    Each seat is a row, and each ride a bar on it that is darker while its prompt is read. Of more than `MOST_RIDES` or `MOST_SEATS`, or
    where some lost their seats on the way, how many are aboard is drawn in their stead.
    """
    few = all(len(side.rides) <= MOST_RIDES and side.seats <= MOST_SEATS for side in sides)
    seatings = [side.seating() if few else None for side in sides]
    seats = [seating for seating in seatings if seating is not None]
    across = _Across(max(side.span for side in sides))
    lines = [across.mean(side.rides["arrived"], side.rides["started"]) for side in sides]
    longest = max(1.0, *(float(line.max()) for line in lines))
    parts, y = list[str](), float(TOP)
    for place, (side, line) in enumerate(zip(sides, lines, strict=True)):
        parts += _heading(side, y)
        drawn, height = _seats(side, seats[place], y + HEAD, across) if len(seats) == len(sides) else _aboard(side, y + HEAD, across)
        floor = y + HEAD + height + 4 + _LINE
        parts += [f'<path class="grid" d="M{x:.1f} {y + HEAD:.1f}V{floor:.1f}"/>' for x in across.ticks.values()]
        parts += [*drawn, *_line(line, floor, longest), *_done(side, sides[0], y + HEAD, floor, across)]
        y = floor + GAP
    parts += [_text(x, y - GAP + 16, duration(time), "small middle") for time, x in across.ticks.items()]
    parts += _legend(y + 12, len(seats) == len(sides), any(side.in_batches for side in sides))
    height = y + BOTTOM - GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" id="compare" viewBox="0 0 {WIDTH} {height:.0f}" role="img"'
    paper = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8" fill="#fff" stroke="#d5d9de"/>'
    told = [f"<style>\n{_STYLE}</style>", paper, _text(20, 30, title, "big"), _text(20, 50, subtitle)]
    return "\n".join([f'{head} aria-label="{escape(title)}">', *told, *parts, "</svg>"]) + "\n"


class _Across:
    """Seconds to places."""

    def __init__(self, span: float) -> None:
        self._scale = (WIDTH - LEFT - RIGHT) / span
        self._edges = np.linspace(0, span * 1e6, WIDTH - LEFT - RIGHT + 1)
        self.ticks: Mapping[float, float] = {tick: self(tick * 1e6) for tick in round_numbers(0.0, span) if tick <= span}
        """Round times, in seconds, and their places."""

    def __call__(self, microseconds: float) -> float:
        return LEFT + microseconds / 1e6 * self._scale

    def mean(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.float64]:
        """How many spans of time are open on average in each unit of the width."""
        edges = self._edges

        def passed(times: NDArray[np.int64]) -> NDArray[np.float64]:
            """The time since each of `times` that lies before an edge, summed."""
            ordered = np.sort(times)
            before = np.searchsorted(ordered, edges, side="right")
            sums: NDArray[np.float64] = before * edges - np.concatenate([[0], np.cumsum(ordered)])[before]
            return sums

        means: NDArray[np.float64] = np.diff(passed(starts) - passed(ends)) / np.diff(edges)
        return means


def _heading(side: Side, y: float) -> Iterator[str]:
    figures, right = side.figures(), WIDTH - RIGHT
    yield _text(LEFT, y + 18, side.variant.title, "name")
    yield _text(LEFT, y + 35, side.variant.words)
    yield _text(right, y + 18, f"all done after {side.span:,.1f} s", "name end")
    yield _text(right, y + 35, f"{figures['seats_used']:.0%} of the seats used", "end")


def _seats(side: Side, seating: Sequence[int], y: float, across: _Across) -> tuple[list[str], float]:
    """The rows of seats, and their height."""
    high = max(4.0, min(_SEAT, 240 / side.seats))
    bar, end = high * 0.85, across(side.span * 1e6)
    parts = []
    for seat in range(side.seats):
        parts.append(f'<rect class="free" x="{LEFT}" y="{y + seat * high:.1f}" width="{end - LEFT:.1f}" height="{bar:.1f}"/>')
        if high >= 11 or seat in (0, side.seats - 1):
            parts.append(_text(LEFT - 8, y + seat * high + bar / 2 + 4, f"seat {seat + 1}", "small end"))
    for ride, seat, until in zip(side.rides, seating, side.held().tolist(), strict=True):
        at = f'y="{y + seat * high:.1f}" height="{bar:.1f}"'
        begun, first, ended, kept = (across(time) for time in (ride["started"], ride["first_token"], ride["ended"], until))
        if kept > ended:
            parts.append(f'<rect class="kept" x="{ended:.1f}" width="{kept - ended:.1f}" {at}/>')
        waited = (ride["started"] - ride["arrived"]) / 1e6
        told = f"request {ride['tag'] + 1}: waits {duration(_short(waited))}, {ride['output_tokens']} tokens"
        # A hair of the ground between one ride and the next.
        parts.append(
            f'<rect class="ride" x="{begun:.1f}" width="{max(0.6, ended - begun - 0.8):.1f}" {at} rx="1.5" '
            f'fill="{_COLOURS[ride["tag"] % len(_COLOURS)]}"><title>{told}</title></rect>'
        )
        parts.append(f'<rect class="prompt" x="{begun:.1f}" width="{max(0.0, first - begun - 0.8):.1f}" {at} rx="1.5"/>')
    return parts, side.seats * high


def _aboard(side: Side, y: float, across: _Across) -> tuple[list[str], float]:
    """How many are aboard, and the height of that."""
    rides, end = side.rides, across(side.span * 1e6)
    aboard = across.mean(rides["started"], rides["ended"])
    kept = aboard + across.mean(rides["ended"], side.held())
    parts = [f'<rect class="free" x="{LEFT}" y="{y:.1f}" width="{end - LEFT:.1f}" height="{_AREA}"/>']
    for kind, counts in (("kept", kept), ("aboard", aboard)):
        parts.append(f'<path class="{kind}" d="{_outline(counts * (_AREA / side.seats), y + _AREA)}"/>')
    return [*parts, _text(LEFT - 8, y + 10, f"{side.seats:,}", "small end"), _text(LEFT - 8, y + _AREA, "0", "small end")], _AREA


def _line(counts: NDArray[np.float64], floor: float, longest: float) -> Iterator[str]:
    """How many wait."""
    yield f'<path class="line" d="{_outline(counts * (_LINE / longest), floor)}"/>'
    yield _text(LEFT - 8, floor - 15, "in line,", "small end")
    yield _text(LEFT - 8, floor - 2, f"up to {counts.max():,.0f}", "small end")


def _done(side: Side, first: Side, top: float, floor: float, across: _Across) -> Iterator[str]:
    """When all were served, and what the machine gained by then."""
    x = across(side.span * 1e6)
    yield f'<path class="done" d="M{x:.1f} {top - 3:.1f}V{floor:.1f}"/>'
    mine, theirs = side.figures(), first.figures()
    rate, begin = mine["tokens_per_s"] / theirs["tokens_per_s"], theirs["ttft_p50_s"] / mine["ttft_p50_s"]
    if WIDTH - RIGHT - x > 260 and min(rate, begin) > 1.05:
        middle = (top + floor - _LINE) / 2
        yield _text(x + 14, middle - 4, f"{rate:.1f} times the tokens a second,", "told")
        yield _text(x + 14, middle + 16, f"{begin:.1f} times as quick to begin an answer", "told")


def _outline(heights: NDArray[np.float64], floor: float) -> str:
    """An area over the whole width; only where its height changes there is a point."""
    path, before = f"M{LEFT} {floor:.1f}", f"{floor:.1f}"
    for place, height in enumerate(heights.tolist()):
        if (level := f"{floor - height:.1f}") != before:
            path, before = f"{path}H{LEFT + place}V{level}", level
    return f"{path}H{LEFT + len(heights)}V{floor:.1f}Z"


def _legend(y: float, seats: bool, batches: bool) -> Iterator[str]:
    ride = [(_COLOURS[0], "prompt", "a request's prompt is read"), (_COLOURS[0], "", "its answer is written")]
    entries = ride if seats else [(_COLOURS[0], "", "requests that run")]
    entries = [
        *entries,
        *([("", "kept", "done: the seat stays empty")] if batches else []),
        ("", "free", "empty seats"),
        ("", "line", "requests that wait"),
    ]
    x = float(LEFT)
    for colour, kind, words in entries:
        for drawn in [f'fill="{colour}"'] * bool(colour) + [f'class="{kind}"'] * bool(kind):
            yield f'<rect x="{x:.1f}" y="{y:.1f}" width="14" height="11" rx="1.5" {drawn}/>'
        yield _text(x + 19, y + 10, words, "small")
        x += 19 + 5.6 * len(words) + 22


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{mark}>{escape(text)}</text>'


def _short(seconds: float) -> float:
    return float(f"{seconds:.3g}")
