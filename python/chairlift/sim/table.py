"""Results as a table: the figures by which runs are compared, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill

from chairlift.sim.result import Result

WIDTH = 120
"""Characters of a line of prose."""

_ROWS = (
    ("requests", "requests", "count"),
    ("finished", "finished", "count"),
    ("missed their deadline", "missed_deadline", "rare"),
    ("refused", "refused", "rare"),
    ("given up by their callers", "aborted", "rare"),
    ("failed", "failed", "rare"),
    ("unfinished at the end", "unfinished", "rare"),
    ("requests a second", "requests_per_s", "rate"),
    ("output tokens a second", "tokens_per_s", "rate"),
    ("prompt tokens a second", "prompt_tokens_per_s", "rate"),
    ("time to first token, p50", "ttft_p50_s", "time"),
    ("                     p90", "ttft_p90_s", "time"),
    ("                     p99", "ttft_p99_s", "time"),
    ("time between tokens, p50", "itl_p50_s", "time"),
    ("                     p90", "itl_p90_s", "time"),
    ("                     p99", "itl_p99_s", "time"),
    ("time per output token, p50", "time_per_output_token_p50_s", "time"),
    ("                       p99", "time_per_output_token_p99_s", "time"),
    ("time in queue, p50", "queue_p50_s", "time"),
    ("               p99", "queue_p99_s", "time"),
    ("arrival to end, p50", "end_to_end_p50_s", "time"),
    ("                p99", "end_to_end_p99_s", "time"),
    ("sequences in a step, mean", "batch_mean", "rate"),
    ("                     most", "batch_max", "count"),
    ("KV cache held, mean", "kv_used_mean", "share"),
    ("               most", "kv_used_max", "share"),
    ("prompt tokens found in cache", "prefix_hit_share", "share"),
    ("preemptions, computed again", "preemptions_recompute", "rare"),
    ("             swapped", "preemptions_swap", "rare"),
    ("tokens computed again", "recomputed_tokens", "rare"),
    ("steps", "steps", "count"),
)
"""Label, figure, and how it is written; rare ones are left out where they are 0 for all."""


def cells(results: Mapping[str, Result], base: str | None = None) -> list[list[str]]:
    """A line of names, and one for each figure: its label, and each result's value.

    Each result after the one that `base` names is followed by its change from that one.
    """
    names = list(results)
    first = names.index(base) + 1 if base is not None else len(names)
    figures = [result.figures() for result in results.values()]
    lines = [["", *(cell for at, name in enumerate(names) for cell in ([name, "change"] if at >= first else [name]))]]
    for label, key, kind in _ROWS:
        values = [one[key] for one in figures]
        if kind == "rare" and not any(values):
            continue
        line = [label]
        for at, value in enumerate(values):
            line.append(_cell(value, kind, max(other or 0 for other in values)))
            if at >= first:
                line.append(_change(values[first - 1], value, kind))
        lines.append(line)
    return lines


def tenants(result: Result, most: int = 20) -> list[list[str]]:
    """A line of labels, and one for each tenant, those with the most service first; nothing where there is only one tenant."""
    figures = result.tenant_figures()
    if len(figures) < 2:
        return []
    columns = (("requests", "requests", "count"), ("finished", "finished", "count"), ("service", "service", "count"))
    times = (("TTFT p50", "ttft_p50_s", "time"), ("p99", "ttft_p99_s", "time"), ("to end p50", "end_to_end_p50_s", "time"))
    shown = sorted(figures, key=lambda name: (-(figures[name]["service"] or 0), name))[:most]
    lines = [["tenant", *(label for label, _, _ in (*columns, *times))]]
    for name in shown:
        one = figures[name]
        lines.append([name or "(none)", *(_cell(one[key], kind, one[key] or 0) for _, key, kind in (*columns, *times))])
    if len(figures) > most:
        lines.append([f"and {len(figures) - most:,} more", *[""] * 6])
    return lines


def text(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells with their columns aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ([line[0].ljust(widths[0]), *(map(str.rjust, line[1:], widths[1:]))] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def wrapped(sentences: Sequence[str]) -> str:
    """Sentences for a terminal, each from a line of its own on."""
    return "\n".join(fill(sentence, WIDTH) for sentence in sentences)


def causes(result: Result) -> str:
    """Where a request's time went on average: the five causes that took most."""
    most = sorted(result.causes().items(), key=lambda one: -one[1])[:5]
    return ", ".join(f"{name} {_cell(mean, 'time', mean)}" for name, mean in most) or "nowhere"


def _cell(value: float | None, kind: str, most: float) -> str:
    """A value, in the unit that suits the greatest of its row."""
    if value is None:
        return "-"
    if kind == "time":
        return f"{value:,.2f} s" if most >= 1 else f"{value * 1000:,.2f} ms"
    return {"share": f"{value:.1%}", "rate": f"{value:,.1f}"}.get(kind, f"{value:,}")


def _change(before: float | None, after: float | None, kind: str) -> str:
    if before is None or after is None:
        return "-"
    if kind == "share":
        return f"{(after - before) * 100:+.1f} pp"
    if before == after:
        return "="
    return f"{after / before - 1:+.1%}" if before else "from 0"
