"""Explains in sentences where a request's time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chairlift.outputs import Timeline
from chairlift.timeline import PREEMPTION_REASONS, SERVING_RULES, STATES

_ACTIVITIES = {"receive": "receiving the request body", "tokenize": "tokenizing", "preempted": "preempted", "swapped": "swapped out"}
"""What the one-line summary says instead of "waiting for ..."."""
_WORK = {"prefill": "prompt", "recompute": "recompute", "decode": "output"}
_ENDS = {"error": "; it failed", "deadline": "; it missed its deadline", "abort": "; its client disconnected"}

TenantNames = Mapping[int, str]
"""Tenants of other sequences by the engine's number of the sequence, as far as they are known."""


def summary_line(timeline: Timeline, tenants: TenantNames | None = None) -> str:
    """Sums up one sequence, as in `2.31 s: 1.80 s waiting for KV blocks, 0.21 s prefill (0.05 s shared), 0.30 s decode`."""
    states = timeline.states
    parts = [
        (states.get(name, 0.0), _ACTIVITIES.get(name, f"waiting for {state.waits_for}"))
        for name, state in STATES.items()
        if state.waits_for
    ]
    for work in _WORK:
        shared = states.get(f"{work}_shared", 0.0)
        parts.append((_work_seconds(timeline, work), f"{work} ({_time(shared)} shared)" if shared else work))
    listed = ", ".join(f"{_time(seconds)} {phrase}" for seconds, phrase in parts if seconds)
    total = _time(sum(states.values())) + (" so far" if timeline.finish is None else "")
    return total + (f": {listed}" if listed else "") + _preemptions(timeline, tenants or {}) + _ENDS.get(timeline.finish or "", "")


def summary_text(timelines: Sequence[Timeline], tenants: TenantNames | None = None) -> str:
    """Sums up a request by its sequence that took longest.

    As in `Waited 412 ms: 300 ms for KV blocks, 112 ms behind tenant a; preempted once by tenant b (swapped). Computed for 350 ms:
    50 ms prompt (57 tokens), 300 ms output (24 tokens). Ended after 762 ms (length).`
    """
    longest = max(timelines, key=lambda timeline: sum(timeline.states.values()))
    waits: dict[str, float] = {}
    for name, state in STATES.items():
        if state.waits_for:
            phrase = _queued_behind(longest) if name in ("wait_policy", "wait_fairness") else f"for {state.waits_for}"
            waits[phrase] = waits.get(phrase, 0.0) + longest.states.get(name, 0.0)
    works = {f"{noun}{_tokens(longest, work)}": _work_seconds(longest, work) for work, noun in _WORK.items()}
    waited, computed = _sum("Waited", waits, "Did not wait"), _sum("Computed for", works, "Nothing was computed")
    sentences = [waited + _preempted_by(longest, tenants or {}), *_served_before(longest), computed]
    if longest.finish is None:
        sentences.append(f"Arrived {_ms(sum(longest.states.values()))} ago and is still running")
    else:
        sentences.append(f"Ended after {_ms(sum(longest.states.values()))} ({longest.finish})")
    if len(timelines) > 1:
        sentences[0] = f"The longest of {len(timelines)} sequences: {sentences[0][0].lower()}{sentences[0][1:]}"
    return ". ".join(sentences) + "."


def summary_before_submission(states: Mapping[str, float]) -> str:
    """Sums up a request that is not in the engine yet, as in `Waited 12 ms: 11 ms for tokenization, 1.0 ms for the request body. ...`."""
    waited = _sum("Waited", {f"for {STATES[state].waits_for}": seconds for state, seconds in states.items()}, "Did not wait")
    return f"{waited}. It is being tokenized. Arrived {_ms(sum(states.values()))} ago and is still running."


def _sum(verb: str, parts: Mapping[str, float], none: str) -> str:
    """As in `Waited 412 ms: 300 ms for this, 112 ms for that`."""
    nonzero = {phrase: seconds for phrase, seconds in parts.items() if seconds > 0}
    if not nonzero:
        return none
    listed = ", ".join(f"{_ms(seconds)} {phrase}" for phrase, seconds in sorted(nonzero.items(), key=lambda part: -part[1]))
    return f"{verb} {_ms(sum(nonzero.values()))}: {listed}"


def _work_seconds(timeline: Timeline, work: str) -> float:
    return timeline.states.get(work, 0.0) + timeline.states.get(f"{work}_shared", 0.0)


def _tokens(timeline: Timeline, work: str) -> str:
    if work == "recompute":
        return f" ({_count_tokens(timeline.recomputed_tokens)})"
    if work == "decode":
        accepted = f", {timeline.accepted_draft_tokens} of them drafted" if timeline.accepted_draft_tokens else ""
        return f" ({_count_tokens(timeline.output_tokens)}{accepted})"
    cached = f", {timeline.cached_tokens} of them cached" if timeline.cached_tokens else ""
    lost = f", {timeline.lost_hit_tokens} cached without a state" if timeline.lost_hit_tokens else ""
    return f" ({_count_tokens(timeline.prompt_tokens)}{cached}{lost})"


def _count_tokens(tokens: int) -> str:
    return f"{tokens} token{'s' * (tokens != 1)}"


def _queued_behind(timeline: Timeline) -> str:
    """Names the tenant whose requests ran for most of the time that this one queued."""
    first = next(iter(timeline.queued_behind), "")
    return f"behind tenant {first}" if first else "behind other requests"


def _served_before(timeline: Timeline) -> list[str]:
    """As in `12 requests started before it: 10 of a more urgent tier, 2 that arrived earlier`; nothing if there were none."""
    served = timeline.served_before
    if not served:
        return []
    listed = ", ".join(f"{count} {SERVING_RULES.get(rule, rule)}" for rule, count in sorted(served.items(), key=lambda one: -one[1]))
    total = sum(served.values())
    return [f"{total} request{'s' * (total != 1)} started before it: {listed}"]


def _preempted_by(timeline: Timeline, tenants: TenantNames) -> str:
    if not timeline.preemptions:
        return ""
    others = dict.fromkeys(f"tenant {tenants[tag]}" if tenants.get(tag) else f"request {tag}" for tag in timeline.preempted_by)
    by = f" by {' and '.join(others)}" if others else ""
    return f"; preempted {_times(timeline)}{by}{_reasons(timeline)} ({_swapped_or_recomputed(timeline)})"


def _preemptions(timeline: Timeline, tenants: TenantNames) -> str:
    if not timeline.preemptions:
        return ""
    by = [f"{tag} of tenant {tenants[tag]}" if tenants.get(tag) else str(tag) for tag in timeline.preempted_by]
    # A sequence that was preempted because it needed a block itself names no other request.
    others = f", for request{'s' * (len(by) > 1)} {' and '.join(by)}" if by else ""
    return f"; preempted {_times(timeline)}{_reasons(timeline)} ({_swapped_or_recomputed(timeline)}){others}"


def _reasons(timeline: Timeline) -> str:
    phrases = [PREEMPTION_REASONS.get(reason, reason) for reason in timeline.preempted_for]
    return f" {' and '.join(phrases)}" if phrases else ""


def _times(timeline: Timeline) -> str:
    return {1: "once", 2: "twice"}.get(timeline.preemptions, f"{timeline.preemptions} times")


def _swapped_or_recomputed(timeline: Timeline) -> str:
    return {0: "recomputed", timeline.preemptions: "swapped"}.get(timeline.swaps, f"{timeline.swaps} of them swapped")


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"


def _ms(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.0095 else f"{seconds * 1e3:.1f} ms"
