"""The page of what came of requests, or of several runs of them side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from chairlift.bench.report.page import Page
from chairlift.bench.report.plot import Axis, Curve, Plot, cdf, duration
from chairlift.sim import table
from chairlift.sim.result import Result

_POINTS = 400
"""Points of a curve."""

SIMULATED = (
    "Simulated: the scheduler's decisions are those that it would have made, and time is what the machine's step times say. Callers are "
    "taken to come when they came, however they were served."
)
"""What the reader of a simulation has to know."""


def page(results: Mapping[str, Result], title: str, notes: Sequence[str], base: str | None = None) -> Page:
    """Figures, latencies, the machine over time, and where requests' time went; the curves of each result have a colour.

    Results after the one that `base` names are compared with it; its curves are dashed, so that what they cover is seen.
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
        made.text("Of the first replica.")
    made.plots(timelines(results, base))
    made.heading("All figures")
    header, *rows = table.cells(results, base)
    made.table(header, rows)
    made.heading("Where a request's time went, on average")
    causes = sorted({cause for result in results.values() for cause in result.causes()})
    made.table(["cause", *results], [[cause, *(duration(one.causes().get(cause, 0.0)) for one in results.values())] for cause in causes])
    made.heading("Settings")
    settings = {name: result.config for name, result in results.items()}
    keys = dict.fromkeys(key for config in settings.values() for key in config)
    made.table(["", *settings], [[key, *(_setting(config.get(key)) for config in settings.values())] for key in keys])
    return made


def _setting(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def latencies(results: Mapping[str, Result], base: str | None) -> list[Plot]:
    """The share of requests, or of tokens, with so short a time."""

    def plot(title: str, caption: str, of: Callable[[Result], Sequence[float]]) -> Plot:
        curves = [cdf(name, of(result), colour, name == base) for colour, (name, result) in enumerate(results.items())]
        return Plot(title, caption, Axis(title, "s", log=True), Axis("share", "%"), curves)

    percents = np.linspace(100 / _POINTS, 100, _POINTS)

    def itl(result: Result) -> list[float]:
        return [gap for percent in percents if (gap := result.itl(percent)) is not None]

    return [
        plot("TTFT", "The share of requests whose answer had begun after so long.", lambda result: _thin(result.ttft())),
        plot("ITL", "The share of gaps between two tokens that were so long at most.", itl),
        plot("TPOT", "The share of requests with so much time per token at most.", lambda result: _thin(result.tpot())),
        plot("E2EL", "The share of requests that were done after so long.", lambda result: _thin(result.e2e())),
    ]


def timelines(results: Mapping[str, Result], base: str | None) -> list[Plot]:
    """How full the machine was."""
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
            "Requests without a seat. A line that climbs to the end: more comes than is served.",
            time,
            Axis("requests"),
            curves("waiting"),
        ),
        Plot("KV cache", "Blocks that requests hold.", time, Axis("blocks"), curves("blocks")),
        Plot("Tokens in a step", "Of prompts and of answers.", time, Axis("tokens"), curves("tokens")),
    ]


def _thin(values: np.ndarray) -> list[float]:
    """Sorted values, as many as a curve has points: its nearest ranks."""
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
