"""A request's ledger in one plain sentence."""

from __future__ import annotations

from chairlift.outputs import Ledger

_WAITS = {
    "wait_rows": "waiting for a place in the batch",
    "wait_tokens": "waiting for room in a step",
    "wait_blocks": "waiting for KV blocks",
    "wait_order": "waiting for requests that go first",
    "wait_share": "waiting while its tenant had its share",
    "wait_batch": "waiting for its batch",
    "wait_step": "waiting for the step under way",
    "wait_sibling": "waiting for the prompt that it shares",
    "preempted": "preempted",
    "swapped": "swapped out",
    "stalled": "stalled",
    "recompute": "computing again what was lost",
}
_ENDS = {"error": "; it failed", "deadline": "; it missed its deadline", "abort": "; its client left"}


def sentence(ledger: Ledger) -> str:
    """Where its time went, as in `2.31 s: 1.80 s waiting for KV blocks, 0.21 s prefill (0.05 s shared), 0.30 s decode`."""
    causes = ledger.causes
    parts = [(causes.get(cause, 0.0), words) for cause, words in _WAITS.items()]
    for work in ("prefill", "decode"):
        shared = causes.get(f"{work}_shared", 0.0)
        parts.append((causes.get(work, 0.0) + shared, f"{work} ({_time(shared)} shared)" if shared else work))
    told = ", ".join(f"{_time(seconds)} {words}" for seconds, words in parts if seconds)
    life = _time(sum(causes.values())) + (" so far" if ledger.finish is None else "")
    return life + (f": {told}" if told else "") + _preemptions(ledger) + _ENDS.get(ledger.finish or "", "")


def _preemptions(ledger: Ledger) -> str:
    if not ledger.preemptions:
        return ""
    times = {1: "once", 2: "twice"}.get(ledger.preemptions, f"{ledger.preemptions} times")
    kept = {0: "recomputed", ledger.preemptions: "swapped"}.get(ledger.swaps, f"{ledger.swaps} of them swapped")
    by = [str(tag) for tag in ledger.preempted_by]
    # Where it went for want of a block of its own, nobody is named.
    others = f", for request{'s' * (len(by) > 1)} {' and '.join(by)}" if by else ""
    return f"; preempted {times} ({kept}){others}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"
