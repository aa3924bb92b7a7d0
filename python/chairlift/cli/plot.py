"""The page of plots that `chairlift replay --plot` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chairlift.cli.causes import CAUSES
from chairlift.engine.replay import Run
from chairlift.errors import InvalidSetting

try:
    import plotly.graph_objects as go
    from plotly.offline import get_plotlyjs
except ImportError:
    raise InvalidSetting("--plot needs plotly: pip install 'chairlift[plot]'") from None

MOST_POINTS = 4000
"""Points of a curve; of a longer one every second, third... is drawn."""

_RUNS = ("#7f7f7f", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The runs' colours: grey for what was recorded, then Okabe and Ito's, which the colour-blind can tell apart."""


def write(path: str, runs: Mapping[str, Run]) -> None:
    """Writes the page, which needs nothing else to be shown; raises InvalidSetting where it can't be."""
    figures = [
        _curves("How long requests wait for their first token", "time to first token (s)", "share of requests", _ttft(runs), share=True),
        _curves("How many requests wait to start", "time (s)", "requests", _over_time(runs, "arrived", "started")),
        _curves("How many requests have started and not ended", "time (s)", "requests", _over_time(runs, "started", "ended")),
        _by_cause(runs),
    ]
    plots = "\n".join(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}) for figure in figures)
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>chairlift replay</title>\n'
        f'<script>{get_plotlyjs()}</script></head>\n<body style="max-width: 1100px; margin: auto">\n{plots}\n</body></html>\n'
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidSetting(f"--plot {path}: cannot write there ({error.strerror}); name a file in a directory that exists") from None


def _curves(title: str, x: str, y: str, curves: Mapping[str, tuple[list[float], list[float]]], *, share: bool = False) -> Any:
    figure = go.Figure()
    for index, (name, (xs, ys)) in enumerate(curves.items()):
        line = {"shape": "hv", "color": _RUNS[index % len(_RUNS)], "width": 1.5}
        figure.add_scatter(x=_thin(xs), y=_thin(ys), name=name, mode="lines", line=line)
    _lay_out(figure, title, x, y)
    if share:
        figure.update_yaxes(tickformat=".0%")
    return figure


def _by_cause(runs: Mapping[str, Run]) -> Any:
    figure = go.Figure()
    means = {name: run.causes() for name, run in runs.items()}
    for cause, (label, colour) in CAUSES.items():
        times = [mean.get(cause, 0.0) for mean in means.values()]
        if any(times):
            figure.add_bar(y=list(means), x=times, name=label, orientation="h", marker_color=colour)
    _lay_out(figure, "Where a request's time goes, on average", "seconds per request", "")
    figure.update_layout(barmode="stack", hovermode="closest", yaxis={"autorange": "reversed"}, legend_traceorder="normal")
    return figure


def _lay_out(figure: Any, title: str, x: str, y: str) -> None:
    figure.update_layout(
        title=title, xaxis_title=x, yaxis_title=y, template="plotly_white", hovermode="x unified", showlegend=True, height=420
    )
    figure.update_xaxes(hoverformat=".4~f", rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")


def _ttft(runs: Mapping[str, Run]) -> dict[str, tuple[list[float], list[float]]]:
    """The share of requests with so short a time to first token, or shorter."""
    times = {name: run.ttft() for name, run in runs.items()}
    return {name: ([0.0, *one], [rank / max(1, len(one)) for rank in range(len(one) + 1)]) for name, one in times.items()}


def _over_time(runs: Mapping[str, Run], enter: str, leave: str) -> dict[str, tuple[list[float], list[float]]]:
    """How many requests are between two of their moments, from the first arrival on."""
    return {name: _counts(run, enter, leave) for name, run in runs.items()}


def _counts(run: Run, enter: str, leave: str) -> tuple[list[float], list[float]]:
    began = run.began
    steps = {began: 0}
    for ledger in run.ledgers:
        if ledger[enter] is None:
            continue
        until = ledger["ended"] if ledger[leave] is None else ledger[leave]
        steps[ledger[enter]] = steps.get(ledger[enter], 0) + 1
        steps[until] = steps.get(until, 0) - 1
    times, counts, count = [], [], 0
    for time in sorted(steps):
        count += steps[time]
        times.append((time - began) / 1e6)
        counts.append(float(count))
    return times, counts


def _thin(values: Sequence[float]) -> list[float]:
    every = -(-len(values) // MOST_POINTS)
    return [*values[:: max(1, every)], *values[-1:]]
