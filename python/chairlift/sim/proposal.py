"""Proposes one change of settings an hour, from a server's requests simulated under several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chairlift.bench.report.plot import duration
from chairlift.sim.groups import LENGTH, STOP

HOUR_SECONDS, SETTLE_SECONDS = 3600.0, 300.0
"""A proposal is for the requests that arrived within an hour, made after the time in which the last of them may end."""
MAX_REQUESTS = 50_000
"""The most requests of an hour that are kept. If there are more, only every second, fourth and so on is kept."""
MIN_REQUESTS = 100
"""The fewest answered requests of an hour for a proposal. A tenant with fewer cannot reject a change."""
MIN_COVERED = 0.9
"""The smallest share of the answered requests that must have been simulated."""
MIN_EFFECT = 0.05
"""The smallest relative change of a latency that counts."""
MAX_TPOT_CHANGE = 1.0
"""The largest relative rise of a time per output token."""
SLICES, RESAMPLES, PERCENTS = 12, 200, (2.5, 97.5)
"""The uncertainty is a bootstrap: slices of the hour are drawn again with replacement. `PERCENTS` are the bounds of the interval."""

FIGURES = {
    "ttft_p50_s": ("ttft", 50, "TTFT p50"),
    "ttft_p99_s": ("ttft", 99, "TTFT p99"),
    "time_per_output_token_p50_s": ("time_per_output_token", 50, "TPOT p50"),
    "time_per_output_token_p99_s": ("time_per_output_token", 99, "TPOT p99"),
    "end_to_end_p50_s": ("end_to_end", 50, "end-to-end p50"),
    "end_to_end_p99_s": ("end_to_end", 99, "end-to-end p99"),
}
"""The latency, the percentile and the label of each figure, named as in `groups.figures`."""
_JUDGED = tuple(name for name in FIGURES if not name.startswith("time_per_output_token"))
"""The figures of which a change must improve one, and must not worsen any."""
_COLUMNS = ("tag", "finish", "arrived", "first_token", "ended", "output_tokens")
_ROW = np.dtype([*((name, "<i8") for name in _COLUMNS), ("tenant", "O")])

_IMPARTIAL = ("fcfs", "shortest", "prefix")
"""The policies that may replace each other. The others keep promises to tenants or classes that latencies do not show."""


def candidates(recorded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The changes that are tried, as settings of `_core.Scheduler`; each is of one setting."""
    policy, turns = recorded["scheduling_policy"], recorded["session_turns"]
    changes: list[dict[str, Any]] = [{"scheduling_policy": name} for name in _IMPARTIAL if policy in _IMPARTIAL and name != policy]
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        changes += [{name: recorded[name] // 2}, {name: 2 * recorded[name]}]
    return [*changes, {"session_turns": "named" if turns == "off" else "off"}, {"num_kv_blocks": recorded["num_kv_blocks"] * 5 // 4}]


class Proposals:
    """Keeps the requests of the last hour under the recorded settings and under `changes`, and proposes one of these."""

    def __init__(self, changes: Sequence[Mapping[str, Any]]) -> None:
        self._changes = changes
        self._due = (HOUR_SECONDS + SETTLE_SECONDS) * 1e6
        self._runs: list[list[NDArray[Any]]] = [[np.empty(0, _ROW)] for _ in range(len(changes) + 2)]
        self._stride = 1

    def add(self, runs: Sequence[NDArray[Any]]) -> None:
        """Adds requests that ended: under the recorded settings, with their tenants; under each change; and on the server itself."""
        for ended, kept in zip(runs, self._runs, strict=True):
            rows = np.empty(len(ended), _ROW)
            for column in _COLUMNS:
                rows[column] = ended[column]
            rows["tenant"] = ended["tenant"] if "tenant" in (ended.dtype.names or ()) else ""
            kept.append(self._thinned(rows))
        if max(sum(map(len, kept)) for kept in self._runs) > MAX_REQUESTS:
            self._stride *= 2
            self._runs = [[self._thinned(rows) for rows in kept] for kept in self._runs]

    def next(self, now: float) -> dict[str, object] | None:
        """The proposal for the last hour, if one is due at `now`, in microseconds of the recorded time. See `propose`."""
        if now < self._due:
            return None
        until = now - SETTLE_SECONDS * 1e6
        self._due = now + HOUR_SECONDS * 1e6
        *runs, recorded = (np.concatenate(kept) for kept in self._runs)
        self._runs = [[rows[rows["arrived"] >= until]] for rows in (*runs, recorded)]
        self._stride = 1  # the next hour may have fewer; only its first minutes, kept above, stay thinned
        return propose(self._changes, runs, recorded, until - HOUR_SECONDS * 1e6, until)

    def _thinned(self, rows: NDArray[Any]) -> NDArray[Any]:
        kept: NDArray[Any] = rows[rows["tag"] % self._stride == 0]
        return kept


def propose(
    changes: Sequence[Mapping[str, Any]], runs: Sequence[NDArray[Any]], recorded: NDArray[Any], since: float, until: float
) -> dict[str, object]:
    """The best of the changes for the requests that arrived from `since` to `until` (microseconds), as plain data.

    `runs` are the requests under the recorded settings, with the column tenant, and under each change; `recorded` those of the server. A
    change is proposed if it certainly improves a percentile of TTFT or of the end-to-end latency, worsens none of these by
    `MIN_EFFECT`, and does not double a percentile of ITL, for all requests and for each tenant. Certainly means that the interval of the
    bootstrap is below 0, also if the simulator's own error against the recorded run is added. Of several such changes the one with the
    largest certain gain is proposed; more KV, which needs memory, only if nothing else helps. `settings` is None if there is none, and
    `text` says why.
    """
    answered = _answered(recorded, since, until)
    now = _answered(runs[0], since, until)
    now = now[np.isin(now["tag"], answered["tag"])]
    covered = len(now) / len(answered) if len(answered) else 0.0
    slices = ((now["arrived"] - since) * SLICES / (until - since)).astype(int)
    common: dict[str, object] = {"settings": None, "figures": {}, "requests": len(now), "covered": covered}
    if len(now) < MIN_REQUESTS or covered < MIN_COVERED or len(np.unique(slices)) < SLICES / 2:
        return {
            **common,
            "text": f"too few requests to propose a change of settings: {len(answered):,}, of which {covered:.0%} were simulated",
        }
    before = _latencies(now, now, until - since)
    server = _latencies(now, answered, until - since)
    errors = {name: abs(_change(name, server, before)) for name in FIGURES}
    redrawn = np.random.default_rng(0).multinomial(SLICES, [1 / SLICES] * SLICES, RESAMPLES)
    weights = np.vstack([np.ones(SLICES, int), redrawn])
    groups = _groups(now["tenant"])
    best: tuple[tuple[bool, float], Mapping[str, Any], dict[str, dict[str, float]]] | None = None
    for change, rows in zip(changes, runs[1:], strict=True):
        after = _latencies(now, _answered(rows, since, until), until - since)
        if any(_harms(before, after, group) for group in groups):
            continue
        figures = {name: _effect(name, before, after, slices, weights) | {"simulator_error": errors[name]} for name in FIGURES}
        certain = [figures[name]["high"] + errors[name] for name in _JUDGED if figures[name]["change"] <= -MIN_EFFECT]
        order = "num_kv_blocks" in change, min(certain, default=0.0)
        if order[1] < 0 and (best is None or order < best[0]):
            best = order, change, figures
    if best is None:
        return {**common, "text": f"none of {len(changes)} changes of settings would certainly have served {len(now):,} requests sooner"}
    _, change, figures = best
    settings = ", ".join(f"{name}={value}" for name, value in change.items())
    return {**common, "settings": settings, "figures": figures, "text": _text(settings, figures, len(now))}


def _answered(rows: NDArray[Any], since: float, until: float) -> NDArray[Any]:
    """The requests that arrived in an interval and were answered to their end, by tag."""
    within = (rows["arrived"] >= since) & (rows["arrived"] < until)
    rows = rows[within & np.isin(rows["finish"], (STOP, LENGTH)) & (rows["first_token"] >= 0)]
    return rows[np.argsort(rows["tag"])]


def _latencies(requests: NDArray[Any], rows: NDArray[Any], longest: float) -> dict[str, NDArray[np.float64]]:
    """The latencies that `requests` have in `rows`, in seconds; `longest` (microseconds) for those that are missing there."""
    found = np.isin(requests["tag"], rows["tag"])
    at = np.searchsorted(rows["tag"], requests["tag"][found])
    tokens = requests["output_tokens"]

    def seconds(first: str, last: str) -> NDArray[np.float64]:
        taken: NDArray[np.float64] = np.full(len(requests), longest / 1e6)
        taken[found] = (rows[last][at] - rows[first][at]) / 1e6
        return taken

    # An answer of one token has no time between tokens.
    tpot = np.where(tokens > 1, seconds("first_token", "ended") / np.maximum(1, tokens - 1), np.nan)
    return {"ttft": seconds("arrived", "first_token"), "time_per_output_token": tpot, "end_to_end": seconds("arrived", "ended")}


def _groups(tenants: NDArray[Any]) -> list[NDArray[np.bool_]]:
    """All requests, and those of each tenant that has enough."""
    names, counts = np.unique(tenants, return_counts=True)
    return [np.ones(len(tenants), bool), *(tenants == name for name in names[counts >= MIN_REQUESTS])]


def _harms(before: Mapping[str, NDArray[np.float64]], after: Mapping[str, NDArray[np.float64]], of: NDArray[np.bool_]) -> bool:
    """Whether a percentile of some requests becomes too much worse."""
    limits = {name: MIN_EFFECT if name in _JUDGED else MAX_TPOT_CHANGE for name in FIGURES}
    return any(_change(name, before, after, of) >= limit for name, limit in limits.items())


def _change(
    name: str, before: Mapping[str, NDArray[np.float64]], after: Mapping[str, NDArray[np.float64]], of: NDArray[np.bool_] | None = None
) -> float:
    """The relative change of a figure."""
    latency, percent, _ = FIGURES[name]
    one, other = (values[latency] if of is None else values[latency][of] for values in (before, after))
    weight = np.ones((1, 1), int)
    slices = np.zeros(len(one), int)
    return float(_relative(_percentiles(one, percent, slices, weight), _percentiles(other, percent, slices, weight))[0])


def _effect(
    name: str,
    before: Mapping[str, NDArray[np.float64]],
    after: Mapping[str, NDArray[np.float64]],
    slices: NDArray[Any],
    weights: NDArray[Any],
) -> dict[str, float]:
    """A figure before and after, its relative change and the bounds of that. The first row of `weights` is the hour itself."""
    latency, percent, _ = FIGURES[name]
    old, new = (_percentiles(values[latency], percent, slices, weights) for values in (before, after))
    change, *redrawn = _relative(old, new)
    low, high = np.percentile(redrawn, PERCENTS)
    return {"before": float(old[0]), "after": float(new[0]), "change": float(change), "low": float(low), "high": float(high)}


def _percentiles(values: NDArray[np.float64], percent: float, slices: NDArray[Any], weights: NDArray[Any]) -> NDArray[np.float64]:
    """A percentile by nearest rank for each row of `weights`, which has the weight of each slice. 0 without values."""
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        return np.zeros(len(weights))
    order = known[np.argsort(values[known])]
    counts = np.cumsum(slices[order] == np.arange(weights.shape[1])[:, None], axis=1)
    needed = weights @ counts[:, -1] * percent / 100
    first, last = np.zeros(len(weights), int), np.full(len(weights), len(order) - 1)
    while np.any(first < last):  # all rows at once: the sum for every value would take seconds
        middle = (first + last) // 2
        enough = (weights * counts[:, middle].T).sum(axis=1) >= needed
        first, last = np.where(enough, first, middle + 1), np.where(enough, middle, last)
    return values[order][first]


def _relative(before: Any, after: Any) -> Any:
    return np.where(before > 0, after / np.where(before > 0, before, 1.0) - 1, 0.0)


def _text(settings: str, figures: Mapping[str, Mapping[str, float]], requests: int) -> str:
    """A proposal in a sentence: the figures that change, and the interval of each."""
    changed = [
        f"{label} {duration(one['before'])} to {duration(one['after'])} ({one['change']:+.0%}, {one['low']:+.0%} to {one['high']:+.0%})"
        for (_, _, label), one in zip(FIGURES.values(), figures.values(), strict=True)
        if abs(one["change"]) >= MIN_EFFECT
    ]
    error = max(one["simulator_error"] for one in figures.values())
    return f"{settings} for the last hour's {requests:,} requests: {', '.join(changed)}; the simulator's error is at most {error:.0%}"
