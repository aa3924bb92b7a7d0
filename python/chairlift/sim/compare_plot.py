"""The plot of a comparison, as a self-contained SVG: the requests on the batch slots over time, under each variant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from chairlift.bench.report.plot import duration, round_numbers
from chairlift.sim.compare import VariantResult
from chairlift.svg import Svg

WIDTH, LEFT, RIGHT = 860, 70, 22
TOP, HEADING, GAP, BOTTOM = 66, 44, 26, 64
"""The width and margins of the plot, the height of a panel's heading, and the gap between panels, in SVG units."""

MAX_SPANS, MAX_SLOTS = 200, 64
"""With more spans or slots, panels show the number of running requests instead of each request."""

_SLOT, _AREA, _QUEUE = 13, 120, 30
"""Heights of a slot, of the area that replaces the slots, and of the queue."""

_COLOURS = ("#4e79a7", "#f0943d", "#59a14f", "#a87bb0", "#d9a927", "#56aaa5", "#d4605f", "#9c7a63")

# The id keeps the style apart from that of the page.
_STYLE = """\
#compare text { font: 12px system-ui, sans-serif; fill: #5b6168 } #compare .small { font-size: 11px }
#compare .big { font-size: 19px; font-weight: 600; fill: #1c1e21 } #compare .name { font-size: 14.5px; font-weight: 600; fill: #1c1e21 }
#compare .callout { font-size: 13px; fill: #1c1e21; paint-order: stroke; stroke: #fff; stroke-width: 5px }
#compare .end { text-anchor: end } #compare .middle { text-anchor: middle }
#compare path { stroke: none; stroke-width: 1 } #compare path.grid { stroke: #d5d9de }
#compare path.done { stroke: #1c1e21; stroke-dasharray: 3 3 } #compare .free { fill: #e9ecef } #compare .idle { fill: #f7d8d2 }
#compare .prompt { fill: #000; fill-opacity: .34 } #compare .queue { fill: #cf8577 } #compare .running { fill: #4e79a7 }
"""


def plot(results: Sequence[VariantResult], title: str, subtitle: str) -> Svg:
    """Draws a panel for each variant over the same time, each with its queue below.

    A slot is a row, and a request a bar on it, darker during prefill. With more than `MAX_SPANS` requests or `MAX_SLOTS` slots, or with
    preemptions, a panel shows the number of running requests instead.
    """
    few = all(len(result.spans) <= MAX_SPANS and result.slots <= MAX_SLOTS for result in results)
    assignments = [result.assign_slots() if few else None for result in results]
    assigned = [assignment for assignment in assignments if assignment is not None]
    scale = TimeScale(max(result.duration for result in results))
    queues = [scale.mean_open(result.spans["arrived"], result.spans["started"]) for result in results]
    longest = max(1.0, *(float(queue.max()) for queue in queues))
    parts, y = list[str](), float(TOP)
    for index, (result, queue) in enumerate(zip(results, queues, strict=True)):
        parts += _heading(result, y)
        top = y + HEADING
        panel, height = _slots(result, assigned[index], top, scale) if len(assigned) == len(results) else _running(result, top, scale)
        floor = top + height + 4 + _QUEUE
        parts += [f'<path class="grid" d="M{x:.1f} {top:.1f}V{floor:.1f}"/>' for x in scale.ticks.values()]
        parts += [*panel, *_queue(queue, floor, longest), *_end(result, results[0], top, floor, scale)]
        y = floor + GAP
    parts += [_text(x, y - GAP + 16, duration(time), "small middle") for time, x in scale.ticks.items()]
    parts += _legend(y + 12, len(assigned) == len(results), any(result.in_batches for result in results))
    height = y + BOTTOM - GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" id="compare" viewBox="0 0 {WIDTH} {height:.0f}" role="img"'
    paper = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8" fill="#fff" stroke="#d5d9de"/>'
    start = [f"<style>\n{_STYLE}</style>", paper, _text(20, 30, title, "big"), _text(20, 50, subtitle)]
    return Svg("\n".join([f'{head} aria-label="{escape(title)}">', *start, *parts, "</svg>"]) + "\n")


class TimeScale:
    """Maps times to x coordinates."""

    def __init__(self, span: float) -> None:
        self._scale = (WIDTH - LEFT - RIGHT) / span
        self._edges = np.linspace(0, span * 1e6, WIDTH - LEFT - RIGHT + 1)
        self.ticks: Mapping[float, float] = {tick: self(tick * 1e6) for tick in round_numbers(0.0, span) if tick <= span}
        """Round times in seconds, with their x coordinates."""

    def __call__(self, microseconds: float) -> float:
        """The x coordinate of a time."""
        return LEFT + microseconds / 1e6 * self._scale

    def mean_open(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.float64]:
        """The mean number of open intervals in each unit of the width."""
        edges = self._edges

        def elapsed(times: NDArray[np.int64]) -> NDArray[np.float64]:
            """For each edge, the sum of the times since each of `times` before it."""
            ordered = np.sort(times)
            before = np.searchsorted(ordered, edges, side="right")
            sums: NDArray[np.float64] = before * edges - np.concatenate([[0], np.cumsum(ordered)])[before]
            return sums

        means: NDArray[np.float64] = np.diff(elapsed(starts) - elapsed(ends)) / np.diff(edges)
        return means


def _heading(result: VariantResult, y: float) -> Iterator[str]:
    figures, right = result.figures(), WIDTH - RIGHT
    yield _text(LEFT, y + 18, result.variant.title, "name")
    yield _text(LEFT, y + 35, result.variant.description)
    yield _text(right, y + 18, f"{result.duration:,.1f} s", "name end")
    yield _text(right, y + 35, f"slot utilisation {figures['slot_utilisation']:.0%}", "end")


def _slots(result: VariantResult, assigned: Sequence[int], y: float, scale: TimeScale) -> tuple[list[str], float]:
    """The rows of slots, and their height."""
    high = max(4.0, min(_SLOT, 240 / result.slots))
    bar, end = high * 0.85, scale(result.duration * 1e6)
    parts = []
    for slot in range(result.slots):
        parts.append(f'<rect class="free" x="{LEFT}" y="{y + slot * high:.1f}" width="{end - LEFT:.1f}" height="{bar:.1f}"/>')
        if high >= 11 or slot in (0, result.slots - 1):
            parts.append(_text(LEFT - 8, y + slot * high + bar / 2 + 4, f"slot {slot + 1}", "small end"))
    for span, slot, free_at in zip(result.spans, assigned, result.slot_free_at().tolist(), strict=True):
        at = f'y="{y + slot * high:.1f}" height="{bar:.1f}"'
        started, first, ended, free = (scale(time) for time in (span["started"], span["first_token"], span["ended"], free_at))
        if free > ended:
            parts.append(f'<rect class="idle" x="{ended:.1f}" width="{free - ended:.1f}" {at}/>')
        waited = (span["started"] - span["arrived"]) / 1e6
        tooltip = f"request {span['tag'] + 1}: waited {duration(_short(waited))}, {span['output_tokens']} tokens"
        # 0.8 leaves a visible gap between two requests.
        parts.append(
            f'<rect class="request" x="{started:.1f}" width="{max(0.6, ended - started - 0.8):.1f}" {at} rx="1.5" '
            f'fill="{_COLOURS[span["tag"] % len(_COLOURS)]}"><title>{tooltip}</title></rect>'
        )
        parts.append(f'<rect class="prompt" x="{started:.1f}" width="{max(0.0, first - started - 0.8):.1f}" {at} rx="1.5"/>')
    return parts, result.slots * high


def _running(result: VariantResult, y: float, scale: TimeScale) -> tuple[list[str], float]:
    """The area of running requests, and its height."""
    spans, end = result.spans, scale(result.duration * 1e6)
    running = scale.mean_open(spans["started"], spans["ended"])
    idle = running + scale.mean_open(spans["ended"], result.slot_free_at())
    parts = [f'<rect class="free" x="{LEFT}" y="{y:.1f}" width="{end - LEFT:.1f}" height="{_AREA}"/>']
    for kind, counts in (("idle", idle), ("running", running)):
        parts.append(f'<path class="{kind}" d="{_outline(counts * (_AREA / result.slots), y + _AREA)}"/>')
    return [*parts, _text(LEFT - 8, y + 10, f"{result.slots:,}", "small end"), _text(LEFT - 8, y + _AREA, "0", "small end")], _AREA


def _queue(counts: NDArray[np.float64], floor: float, longest: float) -> Iterator[str]:
    """The area of waiting requests."""
    yield f'<path class="queue" d="{_outline(counts * (_QUEUE / longest), floor)}"/>'
    yield _text(LEFT - 8, floor - 15, "waiting,", "small end")
    yield _text(LEFT - 8, floor - 2, f"max {counts.max():,.0f}", "small end")


def _end(result: VariantResult, first: VariantResult, top: float, floor: float, scale: TimeScale) -> Iterator[str]:
    """The line at the end of the run, and the gains relative to the first variant if there is space."""
    x = scale(result.duration * 1e6)
    yield f'<path class="done" d="M{x:.1f} {top - 3:.1f}V{floor:.1f}"/>'
    figures, base = result.figures(), first.figures()
    rate, ttft = figures["tokens_per_s"] / base["tokens_per_s"], base["ttft_p50_s"] / figures["ttft_p50_s"]
    if WIDTH - RIGHT - x > 260 and min(rate, ttft) > 1.05:
        middle = (top + floor - _QUEUE) / 2
        yield _text(x + 14, middle - 4, f"{rate:.1f} times the tokens a second,", "callout")
        yield _text(x + 14, middle + 16, f"median TTFT {ttft:.1f} times shorter", "callout")


def _outline(heights: NDArray[np.float64], floor: float) -> str:
    """The path of an area over the whole width, with points only where the height changes."""
    path, before = f"M{LEFT} {floor:.1f}", f"{floor:.1f}"
    for column, height in enumerate(heights.tolist()):
        if (level := f"{floor - height:.1f}") != before:
            path, before = f"{path}H{LEFT + column}V{level}", level
    return f"{path}H{LEFT + len(heights)}V{floor:.1f}Z"


def _legend(y: float, slots: bool, batches: bool) -> Iterator[str]:
    entries = [(_COLOURS[0], "prompt", "prefill"), (_COLOURS[0], "", "decode")] if slots else [(_COLOURS[0], "", "running requests")]
    entries = [
        *entries,
        *([("", "idle", "finished, slot idle until the batch ends")] if batches else []),
        ("", "free", "free slots"),
        ("", "queue", "waiting requests"),
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
