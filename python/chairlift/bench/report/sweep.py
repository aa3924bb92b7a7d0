"""The HTML page of a sweep: latency by load, the knee, and throughput against speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chairlift.bench.figures import Goodput
from chairlift.bench.report.page import Page
from chairlift.bench.report.plot import Axis, Curve, Plot, duration
from chairlift.bench.report.serving import GLOSSARY
from chairlift.bench.sweep import Point, knee, notes


def page(points: Sequence[Point], settings: Mapping[str, Any], goodput: Goodput | None, *, closed: bool) -> Page:
    """The page of points, ordered by load. With `closed` (closed loop), loads are concurrencies instead of rates."""
    points = [point for point in points if point.figures.completed]
    load = "requests at a time" if closed else "requests a second"
    made = Page("Load sweep", str(settings.get("when", "")))
    best = knee(points)
    if goodput is not None:
        made.text(
            f"No load met the targets ({goodput})."
            if best is None
            else f"The largest load that met the targets ({goodput}) is {best.load:.3g} {load}."
        )
    made.notes(notes(points))
    made.table(
        [load, "requests", "failed", "served/s", "tokens/s", "TTFT p50", "p95", "p99", "TPOT p50", "p95", "ITL p99", "met"],
        [_row(point) for point in points],
        None if best is None else points.index(best),
    )
    made.heading("By load")
    loads = [point.load for point in points]
    served = [point.figures.rate(point.figures.completed) for point in points]
    curves = [Curve("served", loads, served)]
    if not closed:
        curves.append(Curve("offered", [0.0, *loads], [0.0, *loads], colour=6, dashed=True))
    if goodput is not None:
        good = [point.figures.rate(point.figures.good or 0) for point in points]
        curves.append(Curve("met the targets", loads, good, colour=2))
    x = Axis(load)
    marks = () if best is None else ((best.load, "knee"),)
    made.plots(
        [
            Plot(
                "Requests a second",
                "The server is saturated where the curve leaves the dashed line or bends.",
                x,
                Axis("requests a second"),
                curves,
                marks,
            ),
            _latency("TTFT", "ttft", points, x, marks, "It rises steeply once the server is saturated."),
            _latency("TPOT", "tpot", points, x, marks, "It rises with the batch size."),
            pareto(points, load),
        ]
    )
    made.heading("Settings")
    made.words({key: value for key, value in settings.items() if value is not None})
    made.heading("Terms")
    made.words(GLOSSARY)
    return made


def pareto(points: Sequence[Point], load: str) -> Plot:
    """Total throughput against speed for each user."""
    timed = [point for point in points if point.figures.latencies["tpot"].percentile(50) > 0]
    curve = Curve(
        "",
        [1 / point.figures.latencies["tpot"].percentile(50) for point in timed],
        [point.figures.rate(point.figures.output_tokens) for point in timed],
        "line",
        labels=[f"{point.load:.3g}" for point in timed],
    )
    dots = Curve("", curve.xs, curve.ys, "dots", 1)
    caption = f"Each dot is a load, labelled with its {load}. Up is more throughput, right is faster for each user."
    return Plot(
        "Throughput against speed",
        caption,
        Axis("output tokens a second for each user (1 / TPOT p50)"),
        Axis("output tokens a second"),
        [curve, dots],
    )


def _latency(title: str, key: str, points: Sequence[Point], x: Axis, marks: Sequence[tuple[float, str]], caption: str) -> Plot:
    loads = [point.load for point in points]
    curves = [
        Curve(f"p{percent}", loads, [point.figures.latencies[key].percentile(percent) for point in points], colour=colour)
        for colour, percent in enumerate((50, 95, 99))
    ]
    return Plot(title, caption, x, Axis(title, "s", log=True), curves, marks)


def _row(point: Point) -> list[str]:
    figures = point.figures
    ttft, tpot = figures.latencies["ttft"], figures.latencies["tpot"]
    return [
        f"{point.load:.3g}",
        f"{figures.requests}",
        f"{figures.failed}",
        f"{figures.rate(figures.completed):.2f}",
        f"{figures.rate(figures.output_tokens):,.0f}",
        *(duration(ttft.percentile(percent)) for percent in (50, 95, 99)),
        *(duration(tpot.percentile(percent)) for percent in (50, 95)),
        duration(figures.latencies["itl"].percentile(99)),
        "" if figures.attainment is None else f"{figures.attainment:.1%}",
    ]
