"""The causes of a ledger, as they are shown."""

from __future__ import annotations

CAUSES = {
    "wait_rows": ("waits: max_num_seqs run already", "#67000d"),
    "wait_tokens": ("waits: the step has no tokens left", "#a50f15"),
    "wait_blocks": ("waits: too few free KV blocks", "#cb181d"),
    "wait_batch": ("waits for its batch", "#ef3b2c"),
    "wait_order": ("waits: others go first by policy", "#fb6a4a"),
    "wait_share": ("waits: its tenant had its share", "#fc9272"),
    "wait_step": ("waits for the step under way", "#fcbba1"),
    "wait_sibling": ("waits for its sibling's prompt", "#fee0d2"),
    "prefill": ("its prompt is computed, alone", "#08519c"),
    "prefill_shared": ("its prompt is computed, with others", "#6baed6"),
    "decode": ("its output is computed", "#006d2c"),
    "decode_shared": ("its output is computed, beside others' prompts", "#74c476"),
    "stalled": ("runs, but the step has no tokens for it", "#fed976"),
    "preempted": ("lost its blocks", "#54278f"),
    "swapped": ("lost its blocks to host memory", "#807dba"),
    "recompute": ("computed again", "#bcbddc"),
}
"""What each cause of a ledger means, and its colour: waiting red, prompts blue, outputs green, preemption purple."""
