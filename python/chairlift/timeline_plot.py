"""Timelines as a chart: a bar for each sequence, with the time that it spent in each state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from chairlift.svg import Svg
from chairlift.timeline import STATES, describe_state

WIDTH, LEFT, BAR, GAP, LINE = 860, 20, 26, 14, 20
"""The width and margin of the chart, and the heights of a bar, of the space below it and of a line of the legend, in SVG units."""

_STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #5b6168 } .title { font-size: 15px; font-weight: 600; fill: #1c1e21 }
"""


def plot(sequences: Sequence[Mapping[str, float]], title: str = "") -> Svg:
    """Draws the seconds in each state of one or several sequences, in the states' order and to one scale, as a self-contained SVG."""
    total = max((sum(states.values()) for states in sequences), default=0.0) or 1.0
    order = {name: index for index, name in enumerate(STATES)}
    names = sorted({name for states in sequences for name in states if states[name]}, key=lambda name: order.get(name, len(order)))
    parts, y = list[str](), LEFT
    if title:
        y += 14
        parts.append(f'<text class="title" x="{LEFT}" y="{y}">{escape(title)}</text>')
        y += GAP
    for states in sequences:
        x = float(LEFT)
        for name in (name for name in names if states.get(name)):
            across = states[name] / total * (WIDTH - 2 * LEFT)
            label, colour = escape(f"{name}: {_time(states[name])}"), describe_state(name).colour
            box = f'x="{x:.2f}" y="{y}" width="{across:.2f}" height="{BAR}" fill="{colour}"'
            parts.append(f"<rect {box}><title>{label}</title></rect>")
            x += across
        y += BAR + GAP
    for name in names:
        y += LINE
        seconds = " · ".join(_time(states.get(name, 0.0)) for states in sequences)
        parts.append(f'<rect x="{LEFT}" y="{y - 11}" width="12" height="12" fill="{describe_state(name).colour}"/>')
        parts.append(f'<text x="{LEFT + 20}" y="{y}">{escape(name)}: {seconds} — {escape(describe_state(name).meaning)}</text>')
    height = y + LEFT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title or "timeline")}">'
    paper = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return Svg("\n".join([head, f"<style>\n{_STYLE}</style>", paper, *parts, "</svg>"]) + "\n")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
