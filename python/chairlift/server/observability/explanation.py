"""A request's ledgers in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chairlift.outputs import Timeline

_WAITS = {
    "receive": "receiving its bytes",
    "tokenize": "tokenizing",
    "grammar": "compiling its grammar",
    "restart": "waiting for the engine to start again",
    "wait_slots": "waiting for a place in the batch",
    "wait_budget": "waiting for room in a step",
    "wait_blocks": "waiting for KV blocks",
    "wait_policy": "waiting for requests that go first",
    "wait_fairness": "waiting while its tenant had its share",
    "wait_batch": "waiting for its batch",
    "wait_step": "waiting for the step under way",
    "wait_fork": "waiting for the prompt that it shares",
    "preempted": "preempted",
    "swapped": "swapped out",
    "stalled": "stalled",
    "recompute": "computing again what was lost",
}
_FOR = {
    "receive": "for its bytes to come",
    "tokenize": "for tokenization",
    "grammar": "for its grammar to be compiled",
    "restart": "for the engine to start again",
    "wait_slots": "for a place in the batch",
    "wait_budget": "for room in a step",
    "wait_blocks": "for KV blocks",
    "wait_policy": "behind {ahead}",
    "wait_fairness": "behind {ahead}",
    "wait_batch": "for its batch",
    "wait_step": "for the step under way",
    "wait_fork": "for the prompt that it shares",
    "preempted": "for its blocks again",
    "swapped": "in the host's memory",
    "stalled": "for room in a step after it had begun",
}
_PREEMPTED_FOR = {
    "kv_blocks": "for want of KV blocks",
    "priority": "for a higher priority",
    "fairness": "for a tenant that was served less",
    "shortest": "for less work",
}
"""Why a running sequence lost its blocks."""
_WORK = {"prefill": "its prompt", "recompute": "what was lost", "decode": "its output"}
_ENDS = {"error": "; it failed", "deadline": "; it missed its deadline", "abort": "; its client left"}

Tenants = Mapping[int, str]
"""Whose sequences others are, by their tags, as far as that is known."""


def sentence(ledger: Timeline, tenants: Tenants | None = None) -> str:
    """Where its time went, as in `2.31 s: 1.80 s waiting for KV blocks, 0.21 s prefill (0.05 s shared), 0.30 s decode`."""
    causes = ledger.states
    parts = [(causes.get(cause, 0.0), words) for cause, words in _WAITS.items()]
    for work in ("prefill", "decode"):
        shared = causes.get(f"{work}_shared", 0.0)
        parts.append((_work(ledger, work), f"{work} ({_time(shared)} shared)" if shared else work))
    told = ", ".join(f"{_time(seconds)} {words}" for seconds, words in parts if seconds)
    life = _time(sum(causes.values())) + (" so far" if ledger.finish is None else "")
    return life + (f": {told}" if told else "") + _preemptions(ledger, tenants or {}) + _ENDS.get(ledger.finish or "", "")


def paragraph(ledgers: Sequence[Timeline], tenants: Tenants | None = None) -> str:
    """A whole request, told by the sequence of it that took longest.

    As in `Waited 412 ms: 300 ms for KV blocks, 112 ms behind tenant a; preempted once by tenant b (swapped). Computed for 350 ms: 50 ms
    its prompt (57 tokens), 300 ms its output (24 tokens). Ended after 762 ms (length).`
    """
    longest = max(ledgers, key=lambda ledger: sum(ledger.states.values()))
    waits: dict[str, float] = {}
    for cause, words in _FOR.items():
        phrase = words.format(ahead=_ahead(longest))
        waits[phrase] = waits.get(phrase, 0.0) + longest.states.get(cause, 0.0)
    works = {f"{words}{_tokens(longest, work)}": _work(longest, work) for work, words in _WORK.items()}
    waited, worked = _sum("Waited", waits, "Did not wait"), _sum("Computed for", works, "Nothing was computed")
    told = [waited + _preempted_by(longest, tenants or {}), worked]
    if longest.finish is None:
        told.append(f"Came {_ms(sum(longest.states.values()))} ago, and goes on")
    else:
        told.append(f"Ended after {_ms(sum(longest.states.values()))} ({longest.finish})")
    if len(ledgers) > 1:
        told[0] = f"The longest of {len(ledgers)} sequences: {told[0][0].lower()}{told[0][1:]}"
    return ". ".join(told) + "."


def preparation(states: Mapping[str, float]) -> str:
    """A request that is not in the engine yet, as in `Waited 12 ms: 11 ms for tokenization, 1.0 ms for its bytes to come. ...`."""
    waited = _sum("Waited", {_FOR[state]: seconds for state, seconds in states.items()}, "Did not wait")
    return f"{waited}. It is being tokenized. Came {_ms(sum(states.values()))} ago, and goes on."


def _sum(verb: str, parts: Mapping[str, float], none: str) -> str:
    """As in `Waited 412 ms: 300 ms for this, 112 ms for that`."""
    taken = {words: seconds for words, seconds in parts.items() if seconds > 0}
    if not taken:
        return none
    told = ", ".join(f"{_ms(seconds)} {words}" for words, seconds in sorted(taken.items(), key=lambda part: -part[1]))
    return f"{verb} {_ms(sum(taken.values()))}: {told}"


def _work(ledger: Timeline, work: str) -> float:
    return ledger.states.get(work, 0.0) + ledger.states.get(f"{work}_shared", 0.0)


def _tokens(ledger: Timeline, work: str) -> str:
    if work == "recompute":
        return f" ({_counted(ledger.recomputed_tokens)})"
    if work == "decode":
        return f" ({_counted(ledger.output_tokens)})"
    cached = f", {ledger.cached_tokens} of them cached" if ledger.cached_tokens else ""
    return f" ({_counted(ledger.prompt_tokens)}{cached})"


def _counted(tokens: int) -> str:
    return f"{tokens} token{'s' * (tokens != 1)}"


def _ahead(ledger: Timeline) -> str:
    """Whose requests ran while it waited: the tenant with most of that time."""
    first = next(iter(ledger.queued_behind), "")
    return f"tenant {first}" if first else "other requests"


def _preempted_by(ledger: Timeline, tenants: Tenants) -> str:
    if not ledger.preemptions:
        return ""
    others = dict.fromkeys(f"tenant {tenants[tag]}" if tenants.get(tag) else f"request {tag}" for tag in ledger.preempted_by)
    return f"; preempted {_times(ledger)}{' by ' + ' and '.join(others) if others else ''}{_why(ledger)} ({_kept(ledger)})"


def _preemptions(ledger: Timeline, tenants: Tenants) -> str:
    if not ledger.preemptions:
        return ""
    by = [f"{tag} of tenant {tenants[tag]}" if tenants.get(tag) else str(tag) for tag in ledger.preempted_by]
    # Where it went for want of a block of its own, nobody is named.
    others = f", for request{'s' * (len(by) > 1)} {' and '.join(by)}" if by else ""
    return f"; preempted {_times(ledger)}{_why(ledger)} ({_kept(ledger)}){others}"


def _why(ledger: Timeline) -> str:
    words = [_PREEMPTED_FOR.get(reason, reason) for reason in ledger.preempted_for]
    return f" {' and '.join(words)}" if words else ""


def _times(ledger: Timeline) -> str:
    return {1: "once", 2: "twice"}.get(ledger.preemptions, f"{ledger.preemptions} times")


def _kept(ledger: Timeline) -> str:
    return {0: "recomputed", ledger.preemptions: "swapped"}.get(ledger.swaps, f"{ledger.swaps} of them swapped")


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"


def _ms(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.0095 else f"{seconds * 1e3:.1f} ms"
