"""The page of a plan: latencies by the rate, beside their targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from chairlift.bench.report.page import Page
from chairlift.bench.report.plot import Axis, Curve, Plot, duration
from chairlift.sim.plan import Plan


def page(plan: Plan, told: Mapping[str, str], more: Sequence[Sequence[str]]) -> Page:
    """`told` are its words, the title among them; `more` says what more of something would bring."""
    made = Page("How many users fit")
    made.text(f"{told['title']}: {told['users']}.")
    most, targets = plan.most, plan.targets
    made.facts(
        {
            "requests a second": f"{most.rate:.3g}",
            "at the least": f"{most.low:.3g}",
            "at the most": f"{most.high:.3g}",
            "binds": {"kv": "KV cache", "ttft": "TTFT target", "itl": "ITL target"}.get(plan.binds, plan.binds),
        }
    )
    made.words({name: words for name, words in told.items() if name not in ("title", "users")})
    made.heading("By the rate")
    percent = f"p{targets.percentile:g}"
    made.plots(
        [
            _plot(plan, "TTFT", percent, targets.ttft, [point.ttft for point in plan.points]),
            _plot(plan, "ITL", percent, targets.itl, [point.itl for point in plan.points]),
        ]
    )
    made.table(
        ["requests a second", f"TTFT {percent}", f"ITL {percent}"],
        [[f"{point.rate:.3g}", duration(point.ttft), duration(point.itl)] for point in plan.points],
        [point.rate for point in plan.points].index(most.rate),
    )
    made.heading("With more of one thing")
    made.table(["", "requests a second", ""], more)
    return made


def _plot(plan: Plan, name: str, percent: str, target: float, latencies: Sequence[float]) -> Plot:
    rates = [point.rate for point in plan.points]
    # A request that is refused has waited for ever, which is no place in a plot.
    drawn = [(rate, latency) for rate, latency in zip(rates, latencies, strict=True) if math.isfinite(latency)]
    curves = [
        Curve(percent, [rate for rate, _ in drawn], [latency for _, latency in drawn]),
        Curve("target", [0.0, rates[-1]], [target, target], colour=1, dashed=True),
    ]
    marks = [(plan.most.low, "low"), (plan.most.rate, "plan"), (plan.most.high, "high")]
    caption = (
        "The medians of all spells. Where the curve crosses the dashed line, the target ends it; the marks are the plan and its range."
    )
    return Plot(f"{name} {percent}", caption, Axis("requests a second"), Axis(name, "s", log=True), curves, marks)
