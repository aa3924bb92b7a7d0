"""The text and the HTML page of a plan."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence

from chairlift.bench.report.page import Page
from chairlift.bench.report.plot import Axis, Curve, Plot, duration
from chairlift.config import DEFAULT_MODEL
from chairlift.sim import table
from chairlift.sim.devices import Device, Profile
from chairlift.sim.models_plan import ModelsPlan
from chairlift.sim.plan import Band, Plan, Targets
from chairlift.sim.sessions_plan import SessionsPlan

BOTTLENECKS = {
    "compute": "compute: steps run back to back, and more batch slots, more KV cache or laxer targets add little",
    "slots": "batch slots: requests wait for one of --max-num-seqs",
    "kv": "KV cache: requests wait for free blocks",
    "ttft": "TTFT target: the machine could serve more with a laxer one",
    "itl": "ITL target: the machine could serve more with a laxer one",
}
"""Descriptions of `Plan.bottleneck`."""

DOUBLED = {
    "compute": "a machine twice as fast",
    "slots": "twice the batch slots",
    "kv": "twice the KV cache",
    "ttft": "twice the TTFT target",
    "itl": "twice the ITL target",
}
"""Descriptions of the keys of `Plan.sensitivity`."""


def summary(plan: Plan, on: Device | Profile, model: str, traffic: str, seconds: float, basis: str) -> dict[str, str]:
    """The plan as sentences, by topic; each user sends a request every `seconds` seconds."""
    targets, users, figures = plan.targets, plan.users(seconds), plan.figures
    flags = "".join(f" --{name.replace('_', '-')} {value}" for name, value in plan.settings.items())
    # A profile made from a journal has no model name.
    name = "" if model == DEFAULT_MODEL else f" {shlex.quote(model)}" if model else " MODEL"
    machine = f"{f'{model} on ' if model else ''}{on.name}"
    if not plan.conclusive:
        return _inconclusive(plan, on, machine, traffic) | {"basis": basis}
    lines = {
        "title": f"{machine}: about {_band(plan.capacity)} requests a second",
        "users": f"{users.rate:,.0f} users ({users.low:,.0f} to {users.high:,.0f}) who each send a request every {seconds:g} s",
        "traffic": traffic,
        "targets": _targets(targets),
        "bottleneck": BOTTLENECKS[plan.bottleneck],
        "settings": f"chairlift serve{name}{flags}" if flags else "the defaults; no other settings that were tried serve more",
    }
    if flags:
        lines["default settings"] = f"about {_band(plan.default)} requests a second"
    at = next(point for point in plan.points if point.rate == plan.capacity.rate)
    lines["at that rate"] = (
        f"p{targets.percentile:g} of TTFT {duration(at.ttft)}, of ITL {duration(at.itl)}; mean batch {figures['batch_mean'] or 0:.3g}, "
        f"peak KV cache use {figures['kv_used_max'] or 0:.0%}, {figures['tokens_per_s'] or 0:,.0f} output tokens a second"
    )
    if plan.excluded:
        lines["excluded"] = f"{plan.excluded:,} requests of the trace exceed the longest context"
    return lines | {"range": _range(plan, on), "basis": basis}


def _inconclusive(plan: Plan, on: Device | Profile, machine: str, traffic: str) -> dict[str, str]:
    """The summary of a plan whose range is too wide for a result."""
    if plan.error == 0:
        remedy = "use more requests of the trace (--num-requests), or random arrival times (--no-self-timed)"
    elif isinstance(on, Profile):
        remedy = "end other programs and measure again for longer (chairlift calibrate --seconds 300 -o FILE), or use a larger target"
    else:
        remedy = "measure the machine (chairlift calibrate -o FILE), or use a larger target"
    targets = plan.targets
    return {
        "title": f"{machine}: the measurements do not suffice for a plan",
        "users": f"the largest rate is between {plan.capacity.low:.3g} and {plan.capacity.high:.3g} requests a second",
        "traffic": traffic,
        "targets": _targets(targets),
        "range": _range(plan, on),
        "what to do": remedy,
    }


def _targets(targets: Targets) -> str:
    percent = f"p{targets.percentile:g}"
    return f"{percent} of TTFT within {duration(targets.ttft)}, {percent} of ITL within {duration(targets.itl)}"


def _range(plan: Plan, on: Device | Profile) -> str:
    seeds = f"the lowest and highest of {plan.seeds} seeds" if plan.seeds > 1 else "one run of the trace"
    guess = "" if isinstance(on, Profile) else " (an assumption: this machine was not measured)"
    return f"{seeds}, with steps {plan.error:.1%} slower and faster{guess}"


def _band(band: Band) -> str:
    return f"{band.rate:.3g} ({band.low:.3g} to {band.high:.3g})"


def _sensitivity(plan: Plan) -> list[list[str]]:
    """A row for each doubled resource: its description, the rate and its change."""
    return [[DOUBLED[name], f"{rate:.3g}", f"{rate / plan.capacity.rate - 1:+.0%}"] for name, rate in plan.sensitivity.items()]


def text(plan: Plan, summary: Mapping[str, str]) -> Iterator[str]:
    """The lines of the plan for a terminal."""
    yield f"{summary['title']},"
    yield f"{summary['users']}."
    yield ""
    names = [name for name in summary if name not in ("title", "users", "basis")]
    for name in names:
        yield f"{name.ljust(max(map(len, names)))}  {summary[name]}"
    yield ""
    if plan.conclusive:
        yield "Requests a second with twice as much of one resource:"
        for resource, rate, gain in _sensitivity(plan):
            yield f"  {resource.ljust(max(map(len, DOUBLED.values())))}  {rate:>7}  {gain:>6}"
        yield ""
    yield table.wrapped([summary["basis"]])


def models_text(plan: ModelsPlan, on: str, traffic: str, seconds: float) -> Iterator[str]:
    """The lines of a plan of several models; each user sends a request every `seconds` seconds."""
    targets, band, (model, target) = plan.targets, plan.capacity, plan.limit
    percent = f"p{targets.percentile:g}"
    yield f"{len(plan.figures)} models on {on}: about {_band(band)} requests a second in all,"
    users = (f"{rate * seconds:,.0f}" for rate in (band.rate, band.low, band.high))
    yield "{} users ({} to {}) who each send a request every ".format(*users) + f"{seconds:g} s."
    yield ""
    yield f"traffic  {traffic}"
    yield f"targets  {_targets(targets)}, for each model"
    yield f"limit    {percent} of {target.upper()} of {model}, which is the first to miss its target at a higher rate"
    if plan.excluded:
        yield f"excluded {plan.excluded:,} requests of the trace exceed the longest context of their model"
    yield ""
    rows = [
        [name, f"{one.rate:.3g}", duration(one.ttft), duration(one.itl), f"{plan.figures[name]['time_share'] or 0:.1%}"]
        for name, one in plan.points.items()
    ]
    yield table.text([["model", "requests/s", f"TTFT {percent}", f"ITL {percent}", "of the time"], *rows])


def sessions_text(plan: SessionsPlan, on: Device | Profile, model: str, trace: str, basis: str) -> Iterator[str]:
    """The lines of a plan for sessions of agents."""
    target = plan.target
    yield f"{f'{model} on ' if model else ''}{on.name}: {plan.agents} agents ({plan.low} to {plan.high}), each with one session at a time."
    yield ""
    yield f"traffic  the sessions of {trace}"
    yield f"target   {target.percentile:g} % of the sessions take at most {target.slowdown:g} times as long as alone"
    yield f"range    with steps {plan.error:.1%} slower and faster"
    yield ""
    rows = [
        [
            f"{one['users']:,}",
            *(f"{one[name] or 0:.3g}" for name in ("requests_per_s", "sessions_per_hour")),
            f"{one['cached_share'] or 0:.0%}",
            *(duration(one[name] or 0.0) for name in ("ttft_p50_s", "ttft_p99_s", "longest_wait_s")),
            *("-" if one[name] is None else f"{one[name]:.2f}" for name in ("slowdown", "slowdown_worst")),
        ]
        for one in plan.points
    ]
    heads = ["agents", "requests/s", "sessions/h", "cached", "TTFT p50", "p99", "longest wait", f"slowdown p{target.percentile:g}", "worst"]
    yield table.text([heads, *rows])
    yield ""
    yield "Agents with twice as much of one resource:"
    for name, agents in plan.sensitivity.items():
        yield f"  {DOUBLED[name].ljust(max(map(len, DOUBLED.values())))}  {agents:>5,}"
    yield ""
    yield table.wrapped([basis])


def page(plan: Plan, summary: Mapping[str, str]) -> Page:
    """The HTML page of the plan: latencies by request rate, with their targets."""
    made = Page("Capacity plan")
    made.text(f"{summary['title']}: {summary['users']}.")
    capacity, targets = plan.capacity, plan.targets
    facts = {
        "requests a second": f"{capacity.rate:.3g}",
        "low": f"{capacity.low:.3g}",
        "high": f"{capacity.high:.3g}",
        "bottleneck": {"kv": "KV cache", "ttft": "TTFT target", "itl": "ITL target"}.get(plan.bottleneck, plan.bottleneck),
    }
    made.facts(facts if plan.conclusive else {name: facts[name] for name in ("low", "high")})
    made.words({name: line for name, line in summary.items() if name not in ("title", "users")})
    made.heading("Latency by request rate")
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
        [point.rate for point in plan.points].index(capacity.rate),
    )
    if plan.conclusive:
        made.heading("With twice as much of one resource")
        made.table(["", "requests a second", ""], _sensitivity(plan))
    return made


def _plot(plan: Plan, name: str, percent: str, target: float, latencies: Sequence[float]) -> Plot:
    rates = [point.rate for point in plan.points]
    # The latency of a refused request is infinite and is not drawn.
    drawn = [(rate, latency) for rate, latency in zip(rates, latencies, strict=True) if math.isfinite(latency)]
    curves = [
        Curve(percent, [rate for rate, _ in drawn], [latency for _, latency in drawn]),
        Curve("target", [0.0, rates[-1]], [target, target], colour=1, dashed=True),
    ]
    marks = [(plan.capacity.low, "low"), (plan.capacity.rate, "plan"), (plan.capacity.high, "high")]
    caption = "Median of all seeds. The dashed line is the target. The marks are the planned rate and its range."
    return Plot(f"{name} {percent}", caption, Axis("requests a second"), Axis(name, "s", log=True), curves, marks)
