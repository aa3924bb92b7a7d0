"""The states of a request's timeline: what each means and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimelineState:
    """One state of a timeline, as explanations, the dashboard and `chairlift top` show it."""

    meaning: str
    colour: str
    waits_for: str | None = None
    """Completes "waiting for ..."; None for states in which the request is computed."""


STATES = {
    "pace": TimelineState(
        "waits: its tenant has taken its share of the server's own time", "#252525", "its tenant's share of the server's time"
    ),
    "receive": TimelineState("the request body is being received", "#525252", "the request body"),
    "tokenize": TimelineState("the request is parsed, templated and tokenized", "#737373", "tokenization"),
    "grammar": TimelineState("its grammar is compiled", "#969696", "its grammar to compile"),
    "lost_engine": TimelineState("was in an engine that ended before it had answered", "#67000d"),
    "read_cache": TimelineState("the KV of its prefix is read from disk", "#525252", "its prefix to be read from disk"),
    "restart": TimelineState("waits for the engine to start", "#3f007d", "the engine to start"),
    "wait_step": TimelineState("waits for the current step to finish", "#8d98a5", "the current step"),
    "wait_slots": TimelineState("waits for a batch slot: max_num_seqs requests are running", "#cf3a3f", "a batch slot"),
    "wait_budget": TimelineState("waits for token budget: the step is full", "#e5751f", "token budget"),
    "wait_blocks": TimelineState("waits for free KV blocks", "#c99700", "KV blocks"),
    "wait_batch": TimelineState("waits for its batch to fill", "#9c7350", "its batch"),
    "wait_policy": TimelineState("waits: the policy puts other requests first", "#c8428f", "requests that the policy puts first"),
    "wait_fairness": TimelineState("waits: its tenant has used its share", "#e08aa9", "its tenant's share"),
    "wait_fork": TimelineState("waits for the shared prompt of its fork group", "#5f93b3", "its shared prompt"),
    "wait_session": TimelineState(
        "waits for the turn of its session: its context does not fit beside others", "#7a8f3a", "its session's turn"
    ),
    "prefill": TimelineState("computes its prompt, alone in the step", "#08519c"),
    "prefill_shared": TimelineState("computes its prompt, in steps with other requests", "#6baed6"),
    "stalled": TimelineState("started, but the step has no token budget for it", "#fed976", "token budget after it started"),
    "preempted": TimelineState("preempted: its KV blocks were freed", "#8250df", "KV blocks after a preemption"),
    "swapped": TimelineState("preempted: its KV blocks are in host memory", "#5746af", "swap-in from host memory"),
    "recompute": TimelineState("recomputes tokens whose KV blocks were freed", "#bcbddc"),
    "decode": TimelineState("generates its output", "#006d2c"),
    "decode_shared": TimelineState("generates its output, in steps with other requests' prefill", "#74c476"),
}
"""Every state by name, in the order of a request's life. The names are the core's (`_core.TIMELINE_STATES`)."""

WAITING = ("grammar", "read_cache", *(name for name in STATES if name.startswith("wait_")), "preempted", "swapped")
"""The states of requests that wait in the engine."""

PREEMPTION_REASONS = {
    "kv_blocks": "for KV blocks",
    "priority": "for a higher priority",
    "fairness": "for a tenant that has used less of its share",
    "shortest": "for a request with less work left",
}
"""Why the scheduler preempts a running sequence; the names are the core's (`_core.PREEMPTION_REASONS`)."""


SERVING_RULES = {
    "tier": "of a more urgent tier",
    "priority": "of a more urgent priority",
    "fairness": "of tenants with less service for their weight",
    "policy": "that the policy puts first",
    "arrival": "that arrived earlier",
    "ageing": "that had waited too long",
    "fit": "that fitted into the free KV blocks while it did not",
    "changed": "that passed it while it waited for a shared prompt, or before its place changed",
}
"""Why one request is served before another; the names are the core's (`_core.SERVING_RULES`)."""


def describe_state(name: str) -> TimelineState:
    """Returns the state called `name`, or a placeholder if another version of the server sent a state that is unknown here."""
    return STATES.get(name) or TimelineState("a state that this version does not know", "#bdbdbd", name)
