"""The text report: vLLM's lines, so that scripts can read it, followed by our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chairlift.bench.figures import Figures

WIDTH = 50
HEADERS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
"""The latencies that the report can show, with vLLM's headings."""


def block(figures: Figures, *, rate: float | None, max_concurrency: int | None, names: Sequence[str], percentiles: Sequence[float]) -> str:
    """The report. `rate` and `max_concurrency` are the settings of the run, None for no limit."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]

    def line(label: str, value: Any) -> None:
        lines.append(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")

    line("Successful requests:", figures.completed)
    line("Failed requests:", figures.failed)
    if max_concurrency is not None:
        line("Maximum request concurrency:", max_concurrency)
    if rate is not None:
        line("Request rate configured (RPS):", float(rate))
    line("Benchmark duration (s):", figures.duration)
    line("Total input tokens:", figures.input_tokens)
    line("Total generated tokens:", figures.output_tokens)
    line("Request throughput (req/s):", figures.rate(figures.completed))
    if figures.good is not None:
        line("Request goodput (req/s):", figures.rate(figures.good))
    line("Output token throughput (tok/s):", figures.rate(figures.output_tokens))
    line("Peak output token throughput (tok/s):", figures.peak_output_rate)
    line("Peak concurrent requests:", float(figures.peak_concurrency))
    line("Total token throughput (tok/s):", figures.rate(figures.input_tokens + figures.output_tokens))
    for name, header in HEADERS.items():
        if name not in names:
            continue
        latency, short = figures.latencies[name], name.upper()
        lines.append(header.center(WIDTH, "-"))
        line(f"Mean {short} (ms):", latency.mean * 1e3)
        line(f"Median {short} (ms):", latency.percentile(50) * 1e3)
        for percent in percentiles:
            line(f"P{percent:g} {short} (ms):", latency.percentile(percent) * 1e3)
    ours: list[tuple[str, Any]] = []
    if figures.attainment is not None:
        ours.append(("Requests that met all targets (%):", figures.attainment * 100))
    if figures.cached_tokens is not None:
        ours.append(("Input tokens found in cache:", figures.cached_tokens))
    if figures.joules_per_token is not None:
        ours.append(("Energy per output token (J):", figures.joules_per_token))
    ours.append(("P99 lateness of sends (ms):", figures.latencies["lag"].percentile(99) * 1e3))
    if max_concurrency is not None and rate is not None:
        ours.append(("P99 client-side queue time (ms):", figures.latencies["wait"].percentile(99) * 1e3))
    ours += [(f"Failed, {kind}:", count) for kind, count in figures.failures.most_common()]
    lines.append("Beyond vLLM's report".center(WIDTH, "-"))
    for label, value in ours:
        line(label, value)
    return "\n".join([*lines, "=" * WIDTH])
