"""The HTML page of one or several benchmark runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chairlift.bench.figures import Figures, Goodput, mean_over_time, over_time
from chairlift.bench.record import Run
from chairlift.bench.report.page import Page
from chairlift.bench.report.plot import Axis, Curve, Plot, cdf, duration

GLOSSARY = {
    "TTFT": "Time to first token, from the due time of a request: queueing and prefill.",
    "ITL": "Inter-token latency: each gap between two stream events. Its high percentiles are visible as stutter.",
    "TPOT": "Time per output token: the mean gap of one request, without the first token.",
    "E2EL": "End-to-end latency, from the due time of a request to its last token.",
    "p50, p99": "The median, and the value below which 99 % lie.",
    "Goodput": "Requests a second that met all targets.",
}
"""The terms of the page."""

NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2el": "E2EL"}

_WINDOWS = 60
"""The number of windows for percentiles over time."""


def page(runs: Mapping[str, Run], goodput: Goodput | None = None, title: str = "Serving benchmark") -> Page:
    """The page of named runs. Each has its colour."""
    figures = {name: Figures(run.records, goodput) for name, run in runs.items()}
    made = Page(title, " · ".join(str(run.settings.get("when", "")) for run in runs.values()).strip(" ·"))
    for name, run in runs.items():
        run_figures = figures[name]
        if len(runs) > 1:
            made.heading(name)
        made.text(summary(run_figures))
        made.facts(facts(run_figures))
        made.notes(run.notes)
    made.heading("Latencies")
    rows = [
        [f"{name} {label}" if len(runs) > 1 else label, *(duration(value) for value in _line(one, key))]
        for key, label in NAMES.items()
        for name, one in figures.items()
    ]
    made.table(["", "mean", "p50", "p90", "p95", "p99", "max"], rows)
    made.plots([_cdf(key, figures, goodput) for key in NAMES])
    made.heading("Over time")
    made.plots(timelines(runs))
    failed = [(name, kind, count) for name, one in figures.items() for kind, count in one.failures.most_common()]
    if failed:
        made.heading("Failures")
        made.text("Latencies do not include failed requests.")
        made.table(["run", "kind", "requests"], [[name, kind, str(count)] for name, kind, count in failed])
    made.heading("Settings")
    for name, run in runs.items():
        if len(runs) > 1:
            made.text(name)
        made.words({key: value for key, value in run.settings.items() if value is not None})
    made.heading("Terms")
    made.words(GLOSSARY)
    return made


def summary(figures: Figures) -> str:
    """One or two sentences on a run."""
    if not figures.completed:
        return f"None of {figures.requests} requests succeeded."
    ttft, tpot = figures.latencies["ttft"], figures.latencies["tpot"]
    text = (
        f"{figures.completed} of {figures.requests} requests succeeded in {duration(figures.duration)}. TTFT: median "
        f"{duration(ttft.percentile(50))}, p99 {duration(ttft.percentile(99))}."
    )
    text += f" Median TPOT: {duration(tpot.percentile(50))}." if tpot.values else ""
    if figures.goodput is not None and figures.attainment is not None:
        text += f" {figures.attainment:.1%} of all requests met the targets: {figures.goodput}."
    return text


def facts(figures: Figures) -> dict[str, str]:
    """The key figures of a run."""
    result = {
        "requests a second": f"{figures.rate(figures.completed):,.2f}",
        "output tokens a second": f"{figures.rate(figures.output_tokens):,.0f}",
        "TTFT p50": duration(figures.latencies["ttft"].percentile(50)),
        "TTFT p99": duration(figures.latencies["ttft"].percentile(99)),
        "TPOT p50": duration(figures.latencies["tpot"].percentile(50)),
        "ITL p99": duration(figures.latencies["itl"].percentile(99)),
    }
    if figures.good is not None:
        result["goodput, requests a second"] = f"{figures.rate(figures.good):,.2f}"
    return result | {"failed": f"{figures.failed:,}"}


def _line(figures: Figures, key: str) -> Sequence[float]:
    latency = figures.latencies[key]
    return (latency.mean, *(latency.percentile(percent) for percent in (50, 90, 95, 99, 100)))


def _cdf(key: str, figures: Mapping[str, Figures], goodput: Goodput | None) -> Plot:
    captions = {
        "ttft": "Share of requests with at most this time to the first token. A long tail is queueing.",
        "itl": "Share of gaps between stream events of at most this length. A long tail is stutter.",
        "tpot": "Share of requests with at most this mean time per token. A reader needs about 100 ms.",
        "e2el": "Share of requests with at most this time from due time to last token.",
    }
    curves = [cdf(name, one.latencies[key].values, colour) for colour, (name, one) in enumerate(figures.items())]
    limit = goodput.limits.get(key) if goodput else None
    marks = () if limit is None else ((limit / 1e3, "target"),)
    return Plot(NAMES[key], captions[key], Axis(NAMES[key], "s", log=True), Axis("share", "%"), curves, marks)


def timelines(runs: Mapping[str, Run]) -> list[Plot]:
    """TTFT, ITL, requests in flight and tokens a second over the time of the run."""
    ttft: list[Curve] = []
    itl: list[Curve] = []
    running: list[Curve] = []
    tokens: list[Curve] = []
    for colour, (name, run) in enumerate(runs.items()):
        done = [record for record in run.records if record.ok]
        width = max(max((record.end for record in run.records), default=1.0) / _WINDOWS, 1e-6)
        firsts = [(record.due, record.ttft) for record in done]
        gaps = [(at, gap) for record in done for at, gap in zip(record.times[1:], record.itls, strict=True)]
        prefix = f"{name} " if len(runs) > 1 else ""
        for curves, points in ((ttft, firsts), (itl, gaps)):
            curves += [Curve(f"{prefix}p50", *over_time(points, width, 50), colour=colour, dashed=True)]
            curves += [Curve(f"{prefix}p99", *over_time(points, width, 99), colour=colour)]
        # In flight from the due time on, including the wait at the client.
        sent = mean_over_time([(record.due, record.end) for record in run.records], width)
        begun = mean_over_time([(record.times[0], record.times[-1]) for record in done], width)
        running.append(Curve(f"{prefix}in flight", *sent, colour=colour, dashed=True))
        running.append(Curve(f"{prefix}streaming", *begun, colour=colour))
        counts: dict[int, float] = {}
        for record in done:
            for at in record.times:
                counts[int(at / width)] = counts.get(int(at / width), 0.0) + record.output_tokens / len(record.times)
        windows = range(max(counts, default=-1) + 1)
        rates = [counts.get(window, 0.0) / width for window in windows]
        tokens.append(Curve(name, [window * width for window in windows], rates, "step", colour))
    time = Axis("time into the run", "s")
    return [
        Plot(
            "TTFT",
            "By due time. A line that rises to the end is a growing queue: the server is overloaded.",
            time,
            Axis("TTFT", "s"),
            ttft,
        ),
        Plot("ITL", "By arrival of the events. Bursts of long prompts raise it.", time, Axis("ITL", "s"), itl),
        Plot(
            "Requests in flight",
            "Mean number of requests in flight, and of those that are streaming. The others wait for their first token.",
            time,
            Axis("requests"),
            running,
        ),
        Plot(
            "Output tokens a second",
            "Of all requests. A plateau under load is the capacity of the server.",
            time,
            Axis("tokens a second"),
            tokens,
        ),
    ]
