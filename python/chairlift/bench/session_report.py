"""The figures of replayed sessions: of all, by tenant and tier, and of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chairlift.bench.figures import Figures
from chairlift.bench.session_load import SessionRecord
from chairlift.bench.text_report import WIDTH

GROUPS = ("tenant", "tier")
"""What sessions are grouped by."""
_MOST_ROWS = 10
"""Sessions that the text shows: those with the largest slowdowns."""

_LABELS = {
    "sessions": "Sessions begun:",
    "complete_sessions": "Sessions completed:",
    "sessions_per_hour": "Sessions an hour:",
    "session_seconds_p50": "Median session (s):",
    "slowdown_mean": "Mean slowdown over alone:",
    "slowdown_worst": "Worst slowdown over alone:",
    "longest_wait_s": "Longest wait of a turn (s):",
    "cached_share": "Prompt tokens found in cache (%):",
}
_GROUP_COLUMNS = {
    "sessions": "begun",
    "complete_sessions": "completed",
    "session_seconds_p50": "median (s)",
    "slowdown_mean": "slowdown",
    "slowdown_worst": "worst",
    "longest_wait_s": "longest wait (s)",
    "cached_share": "cached (%)",
}
_REPLAY_COLUMNS = {
    "session": "session",
    "tenant": "tenant",
    "tier": "tier",
    "requests": "requests",
    "seconds": "seconds",
    "slowdown": "slowdown",
    "longest_wait": "longest wait (s)",
    "cached_share": "cached (%)",
}


def session_figures(replays: Sequence[SessionRecord], duration: float) -> dict[str, float | int | None]:
    """Returns the figures of replays: sessions an hour, seconds and slowdowns of complete ones, the longest wait, and the cached share."""
    complete = sorted(replay.ended - replay.began for replay in replays if replay.complete)
    slowdowns = [slowdown for replay in replays if (slowdown := replay.slowdown) is not None]
    done = [record for replay in replays for record in replay.records if record.ok]
    tokens = sum(record.prompt_tokens for record in done)
    return {
        "sessions": len(replays),
        "complete_sessions": len(complete),
        "sessions_per_hour": 3600 * len(complete) / duration if duration else 0.0,
        "session_seconds_p50": complete[len(complete) // 2] if complete else None,
        "slowdown_mean": sum(slowdowns) / len(slowdowns) if slowdowns else None,
        "slowdown_worst": max(slowdowns, default=None),
        "longest_wait_s": max((record.ttft for record in done), default=None),
        "cached_share": sum(record.cached_tokens or 0 for record in done) / tokens if tokens else None,
    }


def grouped(replays: Sequence[SessionRecord], group: str, duration: float) -> dict[str, dict[str, float | int | None]]:
    """Returns the figures of each tenant or tier, by name."""
    names = sorted({getattr(replay, group) for replay in replays})
    return {name: session_figures([one for one in replays if getattr(one, group) == name], duration) for name in names}


def block(replays: Sequence[SessionRecord], duration: float) -> str:
    """Returns the report of the sessions as text."""
    figures = session_figures(replays, duration)
    lines = ["Sessions".center(WIDTH, "-"), *(f"{label:<40} {_cell(name, figures[name])}" for name, label in _LABELS.items())]
    for group in GROUPS:
        if len(found := grouped(replays, group, duration)) > 1:
            rows = [{group: name or "(none)", **one} for name, one in found.items()]
            lines += [f"Sessions by {group}".center(WIDTH, "-"), *_table({group: group, **_GROUP_COLUMNS}, rows)]
    complete = sorted((one.to_json() for one in replays if one.complete), key=lambda one: (one["slowdown"] or 0.0, one["seconds"]))[::-1]
    if complete:
        left_out = {group for group in GROUPS if len({getattr(replay, group) for replay in replays}) == 1}
        columns = {name: label for name, label in _REPLAY_COLUMNS.items() if name not in left_out}
        lines += ["Slowest sessions".center(WIDTH, "-"), *_table(columns, complete[:_MOST_ROWS])]
        if len(complete) > _MOST_ROWS:
            lines.append(f"and {len(complete) - _MOST_ROWS} more")
    return "\n".join([*lines, "=" * WIDTH])


def others_block(figures: Figures) -> str:
    """Returns the report of the requests without a session as text."""
    latencies = {
        f"{name.upper()} p{percent} (ms)": figures.latencies[name].percentile(percent) * 1e3
        for name in ("ttft", "itl")
        for percent in (50, 99)
    }
    row = {"succeeded": figures.completed, "failed": figures.failed, "a second": figures.rate(figures.completed), **latencies}
    return "\n".join(["Without a session".center(WIDTH, "-"), *_table({name: name for name in row}, [row]), "=" * WIDTH])


def _table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a header and the rows, with aligned columns."""
    cells = [list(columns.values()), *([_cell(name, row[name]) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        yield "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])


def _cell(name: str, value: float | int | str | None) -> str:
    if isinstance(value, float):
        return f"{value * 100:.1f}" if name == "cached_share" else f"{value:.2f}"
    return "-" if value is None or value == "" else str(value)
