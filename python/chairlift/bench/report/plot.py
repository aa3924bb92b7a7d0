"""Plots as SVG, without a JavaScript library in the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 28, 12, 44
"""The size and margins of a plot, in SVG units."""

MAX_POINTS = 600
"""The most points of a curve."""


@dataclass(frozen=True)
class Curve:
    """A curve. `xs` must ascend for lines and steps."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    kind: str = "line"
    """`line`, `step` (holds a value until the next), or `dots`."""
    colour: int = 0
    """Index of the page's colour."""
    dashed: bool = False
    labels: Sequence[str] = ()
    """Labels of its points."""


@dataclass(frozen=True)
class Axis:
    """An axis: its label and the format of its numbers."""

    label: str
    unit: str = ""
    """`s` for seconds with a suitable unit, `%` for shares of 1, "" for plain numbers."""
    log: bool = False

    def text(self, value: float) -> str:
        """A number in the format of this axis."""
        if self.unit == "s":
            return duration(value)
        return f"{value * 100:g} %" if self.unit == "%" else f"{value:,.10g}"


@dataclass(frozen=True)
class Plot:
    """Curves over two axes, with a title and a caption."""

    title: str
    caption: str
    x: Axis
    y: Axis
    curves: Sequence[Curve]
    marks: Sequence[tuple[float, str]] = field(default=())
    """Labelled vertical lines, such as a target: x and label."""

    def svg(self) -> str:
        """The plot as SVG."""
        xs = [x for curve in self.curves for x in curve.xs] + [x for x, _ in self.marks]
        ys = [y for curve in self.curves for y in curve.ys]
        across = _Scale(self.x, xs, LEFT, WIDTH - RIGHT)
        up = _Scale(self.y, ys, HEIGHT - BOTTOM, TOP)
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">']
        for tick in across.ticks:
            at = across(tick)
            parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
            parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(self.x.text(tick))}</text>')
        for tick in up.ticks:
            at = up(tick)
            parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(self.y.text(tick))}</text>')
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.x.label)}</text>')
        parts.append(f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{escape(self.y.label)}</text>')
        for x, name in self.marks:
            parts.append(f'<path class="mark" d="M{across(x):.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
            at, anchor = (across(x) + 4, "start") if across(x) < 0.8 * WIDTH else (across(x) - 4, "end")
            parts.append(f'<text class="mark" x="{at:.1f}" y="{TOP + 12}" text-anchor="{anchor}">{escape(name)}</text>')
        parts += [_draw(curve, across, up, self) for curve in self.curves]
        return "\n".join([*parts, "</svg>"])


class _Scale:
    """Maps values to coordinates, on a linear or logarithmic scale."""

    def __init__(self, axis: Axis, values: Sequence[float], begin: float, end: float) -> None:
        self._begin, self._end = begin, end
        positive = [value for value in values if value > 0]
        self._log = axis.log and bool(positive)
        if self._log:
            low, high = min(positive), max(positive)
            self.ticks = _decades(low, high)
        else:
            low, high = min([0.0, *values]), max([0.0, *values])
            high = low + 1 if high == low else high
            self.ticks = round_numbers(low, high)
        self._low, self._high = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def __call__(self, value: float) -> float:
        if self._log:
            part = math.log(max(value, self._low) / self._low) / math.log(self._high / self._low)
        else:
            part = (value - self._low) / (self._high - self._low)
        return self._begin + part * (self._end - self._begin)


def round_numbers(low: float, high: float) -> list[float]:
    """About four to eight round numbers that enclose `low` and `high`."""
    size: float = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(step for step in (size, size * 2, size * 5, size * 10) if (high - low) / step <= 6)
    return [index * step for index in range(math.floor(low / step), math.ceil(high / step - 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten that enclose the range, with 2 and 5 times them if it is short."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    if last - first > 3:
        return [10.0**power for power in range(first, last + 1)]
    fine = [factor * 10.0**power for power in range(first, last) for factor in (1, 2, 5)] + [10.0**last]
    begin = max(index for index, tick in enumerate(fine) if tick <= low or index == 0)
    end = next(index for index, tick in enumerate(fine) if tick >= high * (1 - 1e-9) or index == len(fine) - 1)
    return fine[begin : max(end, begin + 1) + 1]


def _draw(curve: Curve, across: _Scale, up: _Scale, plot: Plot) -> str:
    points = thinned(curve)
    places = [(across(x), up(y)) for x, y in points]
    style = f"c{curve.colour % 7}"
    drawn = f"<g><title>{escape(curve.name)}</title>"
    if curve.kind == "dots":
        told = (f"{plot.x.text(_short(x))}, {plot.y.text(_short(y))}" for x, y in points)
        drawn += "".join(
            f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(text)}</title></circle>'
            for (x, y), text in zip(places, told, strict=True)
        )
    elif places:
        path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
        path += "".join(f"H{x:.1f}V{y:.1f}" if curve.kind == "step" else f"L{x:.1f} {y:.1f}" for x, y in places[1:])
        drawn += f'<path class="{style}{" dashed" if curve.dashed else ""}" d="{path}"/>'
    for (x, y), label in zip(places, curve.labels, strict=False):
        drawn += f'<text x="{x + 6:.1f}" y="{y - 6:.1f}">{escape(label)}</text>'
    return drawn + "</g>"


def thinned(curve: Curve) -> list[tuple[float, float]]:
    """At most about `MAX_POINTS` points of a curve, including its peaks."""
    points = list(zip(curve.xs, curve.ys, strict=True))
    if len(points) <= MAX_POINTS:
        return points
    every = -(-len(points) * 2 // MAX_POINTS)
    kept: list[tuple[float, float]] = []
    for index in range(0, len(points), every):
        stretch = points[index : index + every]
        kept += sorted({stretch[0], max(stretch, key=lambda point: point[1])})
    return [*kept, points[-1]]


def cdf(name: str, values: Sequence[float], colour: int = 0, dashed: bool = False) -> Curve:
    """The cumulative distribution of sorted `values`."""
    shares = [(index + 1) / len(values) for index in range(len(values))]
    return Curve(name, values, shares, "step", colour, dashed)


def duration(seconds: float) -> str:
    """A time with a suitable unit."""
    if seconds == 0:
        return "0"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:,.4g} s"


def _short(value: float) -> float:
    return float(f"{value:.4g}")
