"""The states of a request's timeline, as they are shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class State:
    """What a state means, and its colour."""

    meaning: str
    colour: str


STATES = {
    "receive": State("its bytes were on their way", "#525252"),
    "tokenize": State("parsed, template applied, tokenized", "#737373"),
    "grammar": State("its grammar is compiled", "#969696"),
    "restart": State("waits for the engine to start again", "#3f007d"),
    "wait_step": State("waits for the step under way", "#fcbba1"),
    "wait_slots": State("waits: max_num_seqs run already", "#67000d"),
    "wait_budget": State("waits: the step has no tokens left", "#a50f15"),
    "wait_blocks": State("waits: too few free KV blocks", "#cb181d"),
    "wait_batch": State("waits for its batch", "#ef3b2c"),
    "wait_policy": State("waits: others go first by policy", "#fb6a4a"),
    "wait_fairness": State("waits: its tenant had its share", "#fc9272"),
    "wait_fork": State("waits for its sibling's prompt", "#fee0d2"),
    "prefill": State("its prompt is computed, alone", "#08519c"),
    "prefill_shared": State("its prompt is computed, with others", "#6baed6"),
    "stalled": State("runs, but the step has no tokens for it", "#fed976"),
    "preempted": State("lost its blocks", "#54278f"),
    "swapped": State("lost its blocks to host memory", "#807dba"),
    "recompute": State("computed again", "#bcbddc"),
    "decode": State("its output is computed", "#006d2c"),
    "decode_shared": State("its output is computed, beside others' prompts", "#74c476"),
}
"""Every state by its name, in the order of a request's life: preparation grey, waiting red, prompts blue, preemption purple, outputs green.

The names are the core's (`_core.TIMELINE_STATES`)."""

WAITING = (*(name for name in STATES if name.startswith("wait_")), "preempted", "swapped")
"""The states of requests that are in the queue."""


def described(name: str) -> State:
    """The state of this name; one that is not known, of a server of another version, is described by saying so."""
    return STATES.get(name) or State("a state that this version does not know", "#bdbdbd")
