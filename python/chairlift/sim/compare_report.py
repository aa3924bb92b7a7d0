"""The text and the HTML page of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from chairlift.bench.report.page import Page
from chairlift.bench.report.plot import Axis, Plot, cdf
from chairlift.sim import table
from chairlift.sim.compare import VariantResult

_COLUMNS = (
    ("duration", "duration_s", "time"),
    ("tokens/s", "tokens_per_s", "rate"),
    ("slot utilisation", "slot_utilisation", "share"),
    ("TTFT p50", "ttft_p50_s", "time"),
    ("p95", "ttft_p95_s", "time"),
    ("mean wait", "wait_mean_s", "time"),
    ("not served", "unserved", "rare"),
)
"""The columns of the table: heading, figure and format. A "rare" figure is shown if it is not 0 for all."""


def title(requests: int, results: Sequence[VariantResult]) -> str:
    """The title of the comparison."""
    slots = {result.slots for result in results}
    return f"The same {requests:,} requests" + (f" on the same {slots.pop():,} batch slots" if len(slots) == 1 else "")


def lines(results: Sequence[VariantResult]) -> list[list[str]]:
    """The table's cells: a header and a line for each variant, with its token rate relative to the first variant's."""
    figures = [result.figures() for result in results]
    columns = [column for column in _COLUMNS if column[2] != "rare" or any(one[column[1]] for one in figures)]
    table = [["", *(heading for heading, _, _ in columns)]]
    for result, one in zip(results, figures, strict=True):
        table.append([result.variant.name, *(_cell(one[key], kind) for _, key, kind in columns)])
    if len(results) > 1:
        table[0].insert(3, f"vs {results[0].variant.name}")
        for line, one in zip(table[1:], figures, strict=True):
            line.insert(3, f"{one['tokens_per_s'] / figures[0]['tokens_per_s']:.2f}x")
    return table


def _cell(value: float, kind: str) -> str:
    return {"time": f"{value:,.2f} s", "rate": f"{value:,.0f}", "share": f"{value:.0%}"}.get(kind, f"{value:,}")


def document(result: VariantResult) -> dict[str, Any]:
    """A variant's result as JSON."""
    config = result.variant.config
    named = {"name": result.variant.name, "batching": config.batching, "policy": config.scheduling_policy}
    return named | {"figures": result.figures(), "refused_for": dict(result.refused_for), "policy_failure": result.policy_failure}


def refusals(results: Sequence[VariantResult]) -> list[str]:
    """Sentences on why each variant refused requests."""
    return [f"{result.variant.name}: {sentence}" for result in results for sentence in table.refusals(result.refused_for)]


def page(results: Sequence[VariantResult], svg: str, notes: Sequence[str]) -> Page:
    """The HTML page: the plot `svg`, the table, latency distributions and the variants' descriptions."""
    page = Page("Batching modes compared")
    page.notes([*refusals(results), *notes])
    page.drawing(svg)
    header, *rows = lines(results)
    page.table(header, rows)
    page.plots([_cdf(results, "TTFT", "first_token"), _cdf(results, "E2EL", "ended")])
    page.heading("Variants")
    page.words({result.variant.name: f"{result.variant.title}. {result.variant.description}" for result in results})
    return page


def _cdf(results: Sequence[VariantResult], name: str, until: str) -> Plot:
    """The distribution of the time from arrival to the event `until`."""
    curves = [
        cdf(result.variant.name, np.sort((result.spans[until] - result.spans["arrived"]) / 1e6).tolist(), colour)
        for colour, result in enumerate(results)
    ]
    return Plot(name, f"Share of requests with at most this {name}.", Axis(name, "s"), Axis("share", "%"), curves)
