"""The page of one run, or of several side by side: how long requests took, and how it went over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chairlift.bench.figures import Figures, Goodput, mean_over_time, over_time
from chairlift.bench.record import Run
from chairlift.bench.report.page import Page
from chairlift.bench.report.plot import Axis, Curve, Plot, cdf, duration

WORDS = {
    "TTFT": "Time to first token: from when a request was due until its answer begins. Waiting, and reading the prompt.",
    "ITL": "Inter-token latency: each gap between two pieces of an answer. Its high percentiles are the stutter that readers see.",
    "TPOT": "Time per output token: the mean gap of one request, without the first token.",
    "E2EL": "End-to-end latency: from when a request was due until its last token.",
    "p50, p99": "The value that 50, or 99, of a hundred are below. Users remember p99.",
    "Goodput": "Requests a second that met all targets. What does not meet them is work, but no use.",
}
"""What the page's words mean."""

NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2el": "E2EL"}

_WINDOWS = 60
"""Windows that a run is cut into for percentiles over time."""


def page(runs: Mapping[str, Run], goodput: Goodput | None = None, title: str = "Serving benchmark") -> Page:
    """The page of runs by their names; the curves of each have a colour."""
    figures = {name: Figures(run.records, goodput) for name, run in runs.items()}
    made = Page(title, " · ".join(str(run.settings.get("when", "")) for run in runs.values()).strip(" ·"))
    for name, run in runs.items():
        found = figures[name]
        if len(runs) > 1:
            made.heading(name)
        made.text(summary(found))
        made.facts(facts(found))
        made.notes(run.notes)
    made.heading("Latencies")
    rows = [
        [f"{name} {label}" if len(runs) > 1 else label, *(duration(value) for value in _line(found, key))]
        for key, label in NAMES.items()
        for name, found in figures.items()
    ]
    made.table(["", "mean", "p50", "p90", "p95", "p99", "longest"], rows)
    made.plots([_cdf(key, figures, goodput) for key in NAMES])
    made.heading("Over time")
    made.plots(timelines(runs))
    failed = [(name, kind, count) for name, found in figures.items() for kind, count in found.failures.most_common()]
    if failed:
        made.heading("Failures")
        made.text("Failed requests are counted here and are in no latency.")
        made.table(["run", "kind", "requests"], [[name, kind, str(count)] for name, kind, count in failed])
    made.heading("How it was measured")
    for name, run in runs.items():
        if len(runs) > 1:
            made.text(name)
        made.words({key: value for key, value in run.settings.items() if value is not None})
    made.heading("Words")
    made.words(WORDS)
    return made


def summary(figures: Figures) -> str:
    """A run in two sentences."""
    if not figures.completed:
        return f"None of {figures.requests} requests was answered."
    ttft, tpot = figures.latencies["ttft"], figures.latencies["tpot"]
    told = (
        f"{figures.completed} of {figures.requests} requests were answered in {duration(figures.duration)}. Half of the answers began "
        f"within {duration(ttft.percentile(50))}, 99 of a hundred within {duration(ttft.percentile(99))}"
    )
    told += f"; from then on half of them had a token every {duration(tpot.percentile(50))} or less." if tpot.values else "."
    if figures.goodput is not None and figures.attainment is not None:
        told += f" {figures.attainment:.1%} of all requests met the targets: {figures.goodput}."
    return told


def facts(figures: Figures) -> dict[str, str]:
    """The numbers of a run that matter most."""
    found = {
        "requests a second": f"{figures.rate(figures.completed):,.2f}",
        "output tokens a second": f"{figures.rate(figures.output_tokens):,.0f}",
        "TTFT p50": duration(figures.latencies["ttft"].percentile(50)),
        "TTFT p99": duration(figures.latencies["ttft"].percentile(99)),
        "TPOT p50": duration(figures.latencies["tpot"].percentile(50)),
        "ITL p99": duration(figures.latencies["itl"].percentile(99)),
    }
    if figures.good is not None:
        found["goodput, requests a second"] = f"{figures.rate(figures.good):,.2f}"
    return found | {"failed": f"{figures.failed:,}"}


def _line(figures: Figures, key: str) -> Sequence[float]:
    latency = figures.latencies[key]
    return (latency.mean, *(latency.percentile(percent) for percent in (50, 90, 95, 99, 100)))


def _cdf(key: str, figures: Mapping[str, Figures], goodput: Goodput | None) -> Plot:
    captions = {
        "ttft": "The share of requests whose answer had begun after so long. Steep and left is good; a long tail waited.",
        "itl": "The share of gaps between pieces that were at most so long. A tail is stutter.",
        "tpot": "The share of requests with at most so much time per token. A reader needs some 100 ms, a coder less.",
        "e2el": "The share of requests that were done after so long: long answers take long.",
    }
    curves = [cdf(name, found.latencies[key].values, colour) for colour, (name, found) in enumerate(figures.items())]
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
        # From when it was due: what waits at the client for a seat, or is late, is in flight for its user.
        sent = mean_over_time([(record.due, record.end) for record in run.records], width)
        begun = mean_over_time([(record.times[0], record.times[-1]) for record in done], width)
        running.append(Curve(f"{prefix}sent", *sent, colour=colour, dashed=True))
        running.append(Curve(f"{prefix}answer has begun", *begun, colour=colour))
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
            "By when requests were due. A line that climbs to the end is a queue that grows: more comes than is served.",
            time,
            Axis("TTFT", "s"),
            ttft,
        ),
        Plot("ITL", "By when the pieces came. Bursts of long prompts show as hills.", time, Axis("ITL", "s"), itl),
        Plot(
            "Requests in flight",
            "On average: all that were due and not done, and those whose answer had begun. The gap between the two waits.",
            time,
            Axis("requests"),
            running,
        ),
        Plot(
            "Output tokens a second",
            "Of all answers together. Flat under load is the most that the server gives.",
            time,
            Axis("tokens a second"),
            tokens,
        ),
    ]
