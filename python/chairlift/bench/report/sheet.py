"""The plots of a page as one SVG file, for documents and notebooks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, MARGIN, TITLE, HEADING, GAP = 1144, 20, 40, 46, 24
"""The width without margins, the margins, the heights of the sheet's title and of a drawing's heading, and gaps, in SVG units."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
"""The colours of curves, as on the page in light mode."""

_STYLE = """\
text { font: 11px system-ui, sans-serif; fill: #62676d } path { fill: none; stroke-width: 1.7 } .grid { stroke: #d9dce0; stroke-width: 1 }
.dashed { stroke-dasharray: 5 3 } path.mark { stroke: #62676d; stroke-dasharray: 2 3 } text.mark { fill: #1c1e21 }
.title { font-size: 18px; font-weight: 600; fill: #1c1e21 } .name { font-size: 14px; font-weight: 600; fill: #1c1e21 }
"""


class Drawing(NamedTuple):
    """An SVG with a heading: its title, its caption, and the names of its curves with their colours."""

    svg: str
    title: str = ""
    caption: str = ""
    key: Sequence[tuple[str, int]] = ()


def sheet(title: str, drawings: Sequence[Drawing]) -> str:
    """Draws the title and the drawings below it as one SVG, two narrow ones side by side."""
    colours = "\n".join(f"path.c{index} {{ stroke: {one} }} circle.c{index} {{ fill: {one} }}" for index, one in enumerate(COLOURS))
    parts = [f"<style>\n{_STYLE}{colours}\n</style>", f'<text class="title" x="{MARGIN}" y="{MARGIN + 16}">{escape(title)}</text>']
    y = bottom = float(MARGIN + TITLE)
    x = edge = float(MARGIN)
    for drawing in drawings:
        width, height = _size(drawing.svg)
        if x + width > MARGIN + WIDTH:
            x, y = float(MARGIN), bottom
        top = y + (HEADING if drawing.title else 0)
        parts += _heading(drawing, x, y) if drawing.title else []
        parts.append(drawing.svg.replace("<svg ", f'<svg x="{x:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" ', 1))
        x, edge, bottom = x + width + GAP, max(edge, x + width), max(bottom, top + height + GAP)
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    size = f"{edge + MARGIN:.0f} {bottom:.0f}"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img">', paper, *parts, "</svg>"]) + "\n"


def _heading(drawing: Drawing, x: float, y: float) -> list[str]:
    key = "".join(f'<tspan dx="14" fill="{COLOURS[colour]}">■ {escape(name)}</tspan>' for name, colour in drawing.key)
    return [
        f'<text class="name" x="{x:.0f}" y="{y + 14:.0f}">{escape(drawing.title)}{key}</text>',
        f'<text x="{x:.0f}" y="{y + 32:.0f}">{escape(drawing.caption)}</text>',
    ]


def _size(svg: str) -> tuple[float, float]:
    """The width and height of an SVG that was drawn here."""
    found = re.search(r'viewBox="0 0 (\S+) ([^"\s]+)"', svg)
    assert found is not None
    return float(found[1]), float(found[2])
