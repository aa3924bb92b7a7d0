"""Results as a text table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill

from chairlift.sim.result import Result

WIDTH = 120
"""Characters in a line of text."""

_ROWS = (
    ("requests", "requests", "count"),
    ("finished", "finished", "count"),
    ("missed their deadline", "missed_deadline", "rare"),
    ("refused", "refused", "rare"),
    ("aborted", "aborted", "rare"),
    ("failed", "failed", "rare"),
    ("unfinished", "unfinished", "rare"),
    ("requests a second", "requests_per_s", "rate"),
    ("output tokens a second", "tokens_per_s", "rate"),
    ("prompt tokens a second", "prompt_tokens_per_s", "rate"),
    ("TTFT, p50", "ttft_p50_s", "time"),
    ("      p90", "ttft_p90_s", "time"),
    ("      p99", "ttft_p99_s", "time"),
    ("ITL, p50", "itl_p50_s", "time"),
    ("     p90", "itl_p90_s", "time"),
    ("     p99", "itl_p99_s", "time"),
    ("TPOT, p50", "time_per_output_token_p50_s", "time"),
    ("      p99", "time_per_output_token_p99_s", "time"),
    ("queue time, p50", "queue_p50_s", "time"),
    ("            p99", "queue_p99_s", "time"),
    ("end-to-end latency, p50", "end_to_end_p50_s", "time"),
    ("                    p99", "end_to_end_p99_s", "time"),
    ("batch size, mean", "batch_mean", "rate"),
    ("            max", "batch_max", "count"),
    ("KV cache used, mean", "kv_used_mean", "share"),
    ("               max", "kv_used_max", "share"),
    ("prefix cache hit rate", "prefix_hit_share", "share"),
    ("preemptions by recompute", "preemptions_recompute", "rare"),
    ("preemptions by swap", "preemptions_swap", "rare"),
    ("recomputed tokens", "recomputed_tokens", "rare"),
    ("draft tokens", "draft_tokens", "rare"),
    ("       accepted", "accepted_draft_tokens", "rare"),
    ("steps", "steps", "count"),
)
"""Label, figure and format. A "rare" figure is shown if it is not 0 for all."""

_SESSION_ROWS = (
    ("users", "users", "count"),
    ("requests a second", "requests_per_s", "ratio"),
    ("sessions an hour", "sessions_per_hour", "rate"),
    ("prompt tokens cached", "cached_share", "share"),
    ("TTFT, p50", "ttft_p50_s", "time"),
    ("      p99", "ttft_p99_s", "time"),
    ("longest wait of a turn", "longest_wait_s", "time"),
    ("slowdown over alone, mean", "slowdown_mean", "ratio"),
    ("                     worst", "slowdown_worst", "ratio"),
    ("tokens of all contexts, mean", "context_tokens", "count"),
    ("refused", "refused", "rare"),
)

_GROUP_COLUMNS = (
    ("requests", "requests", "count"),
    ("finished", "finished", "count"),
    ("service", "service", "count"),
    ("cached", "cached_share", "share"),
    ("TTFT p50", "ttft_p50_s", "time"),
    ("p99", "ttft_p99_s", "time"),
    ("TPOT p50", "time_per_output_token_p50_s", "time"),
    ("E2EL p50", "end_to_end_p50_s", "time"),
    ("completed in", "completion_s", "time"),
    ("preempted", "preemptions", "count"),
)

_RUN_COLUMNS = (
    ("requests", "requests", "count"),
    ("TTFT p50", "ttft_p50_s", "time"),
    ("p99", "ttft_p99_s", "time"),
    ("TPOT p50", "time_per_output_token_p50_s", "time"),
    ("p99", "time_per_output_token_p99_s", "time"),
    ("cached", "cached_share", "share"),
    ("preempted", "preemptions", "count"),
)

_MODEL_COLUMNS = (
    ("requests", "requests", "count"),
    ("finished", "finished", "count"),
    ("TTFT p50", "ttft_p50_s", "time"),
    ("p95", "ttft_p95_s", "time"),
    ("ITL p95", "itl_p95_s", "time"),
    ("tokens/s", "tokens_per_s", "rate"),
    ("of the time", "time_share", "share"),
)

REFUSALS = {
    "empty_prompt": "their prompts have no tokens",
    "no_new_tokens": "they ask for no new token",
    "too_long": "longer than the context (max_model_len)",
    "never_fits": "larger than the KV cache (num_kv_blocks)",
    "queue_full": "the queue was full (max_num_queued_reqs, max_num_queued_tokens)",
    "not_held": "the sequence to continue was dropped",
    "held_busy": "another request continued the same sequence",
    "no_parent": "the request to fork had ended",
}
"""Why requests are refused."""


def cells(results: Mapping[str, Result], base: str | None = None) -> list[list[str]]:
    """The table's cells: a header, and a line for each figure with its label and each result's value.

    Each result after the one named `base` is followed by its change from that one.
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


def group(figures: Mapping[str, Mapping[str, float | None]], by: str, limit: int = 20) -> list[list[str]]:
    """A header and a line for each tenant, session or tier of `Result.grouped(by)`, ordered by service; empty for a single one."""
    if len(figures) < 2:
        return []
    shown = sorted(figures, key=lambda name: (-(figures[name]["service"] or 0), name))[:limit]
    lines = _by_name(by, _GROUP_COLUMNS, {name: figures[name] for name in shown})
    if len(figures) > limit:
        lines.append([f"and {len(figures) - limit:,} more", *[""] * len(_GROUP_COLUMNS)])
    return lines


def runs(figures: Mapping[str, Mapping[str, float | None]]) -> list[list[str]]:
    """A header and a line for each run, from `groups.figures`."""
    return _by_name("", _RUN_COLUMNS, figures)


def refusals(refused_for: Mapping[str, int]) -> list[str]:
    """Sentences on why requests were refused."""
    return [f"Refused: {count:,} requests, {REFUSALS[reason]}." for reason, count in sorted(refused_for.items())]


def notes(result: Result) -> list[str]:
    """Sentences on how equally tenants were served, and on why requests were refused."""
    sentences = refusals(result.refused_for)
    if len(set(result.labels("tenant"))) < 2:
        return sentences
    fairness = result.fairness()
    if (index := fairness["jain_index"]) is not None:
        sentences.append(f"Jain's index of the tenants' service by weight: {index:.3f}.")
        if (gap := fairness["service_gap"]) is not None:
            sentences[-1] += f" Between two tenants that both waited it differed by at most {gap:,.0f}."
    return sentences


def models(figures: Mapping[str, Mapping[str, float | None]]) -> list[list[str]]:
    """A header and a line for each of several models, from `ModelsResult.figures`."""
    return _by_name("model", _MODEL_COLUMNS, figures)


def sessions(figures: Mapping[str, float | None]) -> list[list[str]]:
    """A line for each figure of `SessionsResult.figures`."""
    shown = [row for row in _SESSION_ROWS if row[2] != "rare" or figures[row[1]]]
    return [[label, _cell(figures[key], kind, figures[key] or 0)] for label, key, kind in shown]


def text(lines: Sequence[Sequence[str]]) -> str:
    """The lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ([line[0].ljust(widths[0]), *(map(str.rjust, line[1:], widths[1:]))] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def wrapped(sentences: Sequence[str]) -> str:
    """Sentences, each on a new line, wrapped for a terminal."""
    return "\n".join(fill(sentence, WIDTH) for sentence in sentences)


def states(result: Result) -> str:
    """The five states with the most time, with their means."""
    longest = sorted(result.states().items(), key=lambda one: -one[1])[:5]
    return ", ".join(f"{name} {_cell(mean, 'time', mean)}" for name, mean in longest) or "none"


def _by_name(head: str, columns: Sequence[tuple[str, str, str]], figures: Mapping[str, Mapping[str, float | None]]) -> list[list[str]]:
    """A header that begins with `head`, and a line for each name with its figures."""
    lines = ([name or "(none)", *(_cell(one[key], kind, one[key] or 0) for _, key, kind in columns)] for name, one in figures.items())
    return [[head, *(label for label, _, _ in columns)], *lines]


def _cell(value: float | None, kind: str, largest: float) -> str:
    """A value, in the unit that suits `largest`, the largest of its row."""
    if value is None:
        return "-"
    if kind == "time":
        return f"{value:,.2f} s" if largest >= 1 else f"{value * 1000:,.2f} ms"
    if kind == "rate":
        return f"{value:,.{1 if largest >= 10 else 3}f}"
    return {"share": f"{value:.1%}", "ratio": f"{value:,.3f}"}.get(kind, f"{value:,}")


def _change(before: float | None, after: float | None, kind: str) -> str:
    if before is None or after is None:
        return "-"
    if kind == "share":
        return f"{(after - before) * 100:+.1f} pp"
    if before == after:
        return "="
    return f"{after / before - 1:+.1%}" if before else "from 0"
