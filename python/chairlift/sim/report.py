"""The HTML page of one or several results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from chairlift.bench.report.page import Page
from chairlift.bench.report.plot import Axis, Curve, Plot, cdf, duration
from chairlift.sim import table
from chairlift.sim.groups import GROUPS
from chairlift.sim.result import Result
from chairlift.svg import Svg

_POINTS = 400
"""The most points of a curve."""

SIMULATED = (
    "Simulated: the scheduler's decisions are real, and time comes from the device's step times. Clients send their requests at the "
    "trace's times, however they are served."
)
"""The note on simulated results."""


def page(results: Mapping[str, Result], title: str, notes: Sequence[str], base: str | None = None) -> Page:
    """A page of figures, latencies, samples over time, and the time in each state. Each result has its colour.

    Results after the one named `base` are compared with it. Its curves are dashed, so that curves below them are visible.
    """
    made = Page(title)
    made.notes(notes)
    for name, result in results.items():
        if len(results) > 1:
            made.heading(name)
        made.facts(_facts(result))
    made.heading("Latencies")
    made.plots(latencies(results, base))
    made.heading("Over time")
    if any(len(result.replicas) > 1 for result in results.values()):
        made.text("Only the first replica.")
    made.plots(timelines(results, base))
    made.heading("All figures")
    header, *rows = table.cells(results, base)
    made.table(header, rows)
    for name, result in results.items():
        for group in GROUPS:
            if lines := table.group(result.grouped(group), group):
                made.heading(f"By {group}" + (f": {name}" if len(results) > 1 else ""))
                made.table(lines[0], lines[1:])
        made.notes(table.notes(result))
    made.heading("Mean time in each state")
    states = sorted({state for result in results.values() for state in result.states()})
    made.table(["state", *results], [[state, *(duration(one.states().get(state, 0.0)) for one in results.values())] for state in states])
    made.heading("Settings")
    settings = {name: result.config for name, result in results.items()}
    keys = dict.fromkeys(key for config in settings.values() for key in config)
    made.table(["", *settings], [[key, *(_setting(config.get(key)) for config in settings.values())] for key in keys])
    return made


def plot(results: Mapping[str, Result], title: str = "Simulation") -> Svg:
    """Draws the latencies of named results, and their load over time, as one SVG."""
    return page(results, title, []).svg()


def _setting(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def latencies(results: Mapping[str, Result], base: str | None) -> list[Plot]:
    """The distributions of latencies."""

    def plot(title: str, caption: str, of: Callable[[Result], Sequence[float]]) -> Plot:
        curves = [cdf(name, of(result), colour, name == base) for colour, (name, result) in enumerate(results.items())]
        return Plot(title, caption, Axis(title, "s", log=True), Axis("share", "%"), curves)

    percents = np.linspace(100 / _POINTS, 100, _POINTS)

    def itl(result: Result) -> list[float]:
        return [gap for percent in percents if (gap := result.itl(percent)) is not None]

    return [
        plot("TTFT", "Share of requests with at most this time to the first token.", lambda result: _thin(result.ttft())),
        plot("ITL", "Share of gaps between two tokens of at most this length.", itl),
        plot("TPOT", "Share of requests with at most this mean time per output token.", lambda result: _thin(result.tpot())),
        plot("E2EL", "Share of requests with at most this time from arrival to end.", lambda result: _thin(result.e2e())),
    ]


def timelines(results: Mapping[str, Result], base: str | None) -> list[Plot]:
    """The load over time."""
    time = Axis("time into the run", "s")

    def curves(name: str) -> list[Curve]:
        lines = ((label, result.timeline) for label, result in results.items())
        return [
            Curve(label, (line["time"] / 1e6).tolist(), line[name].tolist(), "step", colour, label == base)
            for colour, (label, line) in enumerate(lines)
        ]

    return [
        Plot("Batch", "Sequences in a step.", time, Axis("sequences"), curves("batch")),
        Plot(
            "Waiting",
            "Requests without a batch slot. A line that rises to the end shows overload.",
            time,
            Axis("requests"),
            curves("waiting"),
        ),
        Plot("KV cache", "Blocks held by requests.", time, Axis("blocks"), curves("blocks")),
        Plot("Tokens in a step", "Prompt and output tokens.", time, Axis("tokens"), curves("tokens")),
    ]


def _thin(values: np.ndarray) -> list[float]:
    """The sorted values, or the nearest ranks of `_POINTS` of them."""
    ordered = np.sort(values)
    if len(ordered) > _POINTS:
        ordered = ordered[np.ceil(np.linspace(1 / _POINTS, 1, _POINTS) * len(ordered)).astype(int) - 1]
    return [float(value) for value in ordered]


def _facts(result: Result) -> dict[str, str]:
    figures = result.figures()

    def of(key: str) -> str:
        value = figures[key]
        return "-" if value is None else duration(value)

    return {
        "requests": f"{figures['requests']:,}",
        "requests a second": f"{figures['requests_per_s'] or 0:,.2f}",
        "output tokens a second": f"{figures['tokens_per_s'] or 0:,.0f}",
        "TTFT p50": of("ttft_p50_s"),
        "TTFT p99": of("ttft_p99_s"),
        "ITL p50": of("itl_p50_s"),
        "ITL p99": of("itl_p99_s"),
    }
