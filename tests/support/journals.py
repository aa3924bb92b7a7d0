"""Journals that the real scheduler wrote, in made-up time."""

import random
from contextlib import suppress

import numpy as np
from core_requests import add

from chairlift import _core

ROWS, TOKENS, BLOCKS, BLOCK, CONTEXT = 4, 32, 41, 4, 128
SHAPES = {
    "input_ids": TOKENS,
    "positions": TOKENS,
    "slot_mapping": TOKENS,
    "query_starts": ROWS + 1,
    "context_lens": ROWS,
    "batch_slots": ROWS,
    "sample_at": TOKENS,
    "sample_slots": TOKENS,
    "copies": 2 * ROWS,
    "block_tables": (ROWS, CONTEXT // BLOCK),
}
PROMPT_TOKEN = 987_654
"""A token of every prompt. No journal may contain it."""


class Seen:
    """A journal, and the timelines, steps and tokens that its recorder saw."""

    def __init__(self):
        self.journal, self.timelines, self.steps, self.tokens = b"", [], [], {}


def watched(*, requests=24, sessions=0, tiers=("default",), tag_of=lambda number: number, **settings) -> Seen:
    """Records requests that arrive faster than they are served. Some share a prefix, and some have a deadline."""
    limits = {"num_kv_blocks": BLOCKS, "max_num_batched_tokens": TOKENS, "max_num_seqs": ROWS, "max_model_len": CONTEXT, "watermark": 2}
    core = _core.Scheduler(block_size=BLOCK, journal=True, **limits | settings)
    buffers = _core.StepBuffers(**{name: np.zeros(shape, np.int32) for name, shape in SHAPES.items()})
    dice, now, seen, tag = random.Random(1), 7_000_000, Seen(), 0
    arrivals = [now + 3500 * i for i in range(requests)]
    while tag < requests or any(core.stats()[name] for name in ("running", "waiting", "swapped")):
        while tag < requests and arrivals[tag] <= now:
            prompt = [PROMPT_TOKEN] * 9 + [1000 + tag * dice.randint(0, 1)] * dice.randint(1, 40)
            tenant, deadline = "few" if tag % 6 == 5 else "many", 40.0 if tag % 8 == 7 else None
            with suppress(_core.QueueFull):
                scheduling = {"tenant": tenant, "deadline_ms": deadline, "session": f"s{tag % sessions}" if sessions else None}
                scheduling |= {"tier": tiers[tag % len(tiers)]}
                add(core, tag_of(tag), np.array(prompt, np.int32), dice.randint(2, 30), [1], arrivals[tag], **scheduling)
            tag += 1
        seen.timelines += core.expire(now)
        if plan := core.plan(buffers, now):
            took = 2000 + 100 * plan.num_tokens
            stats = core.stats()
            seen.steps.append((took, plan.num_seqs, stats["total_blocks"] - stats["free_blocks"]))
            now += took
            outputs = core.commit(plan, np.array([1 if dice.random() < 0.05 else 5 for _ in range(plan.num_samples)], np.int32), now)
            seen.timelines += outputs.ended
            for reported in np.frombuffer(outputs.tags, np.int64).tolist():
                seen.tokens.setdefault(reported, []).append(now)
        else:
            now += 100
        seen.journal += core.journal()
    seen.journal += core.journal()
    return seen
