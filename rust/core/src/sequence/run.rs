//! A sequence's run: what it had when it was last admitted, and what it lost when it was preempted.

use super::Sequence;
use super::phase::Stage;
use crate::memory::{Computed, Taker};
use crate::request::Time;

/// A sequence's run since it was last admitted.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// Prompt tokens that were cached when the sequence was first admitted.
    pub(super) cached_tokens: u32,
    /// Those of them that requests of the same tenant had computed before, or would have computed.
    pub(super) own_cached_tokens: u32,
    /// Cached prompt tokens that the sequence could not share then for lack of a state: those that the tenant may see.
    pub(super) lost_hit_tokens: u32,
    /// Tokens of the session's blocks that were evicted before the sequence was first admitted, by [`Taker`](crate::Taker).
    pub(super) evicted_for: [u32; Taker::COUNT],
    /// Computed tokens when the sequence was last admitted.
    pub(super) computed_from: u32,
    /// Tokens with lost KV, which the sequence must recompute.
    pub(super) recompute_tokens: u32,
    /// Tokens to compute when the sequence was queued, by the latest cache lookup.
    pub(super) uncached: u32,
    /// The latest plan that had a decoded token of the sequence, if it is in the background and limited, and the place in it.
    pub(super) decoded_in: (u64, usize),
}

impl Sequence {
    /// The sequence's stage until it decodes.
    pub(crate) fn prefill_stage(&self) -> Stage {
        if self.run.recompute_tokens > 0 { Stage::Recompute } else { Stage::Prefill }
    }

    /// Records how many of the session's blocks, of `size` tokens, were evicted before the sequence was first admitted.
    pub(crate) fn note_evicted(&mut self, blocks: [u32; Taker::COUNT], size: u32) {
        self.run.evicted_for = blocks.map(|blocks| blocks.saturating_mul(size));
    }

    pub(crate) fn cached_tokens(&self) -> u32 {
        self.run.cached_tokens
    }

    /// Cached prompt tokens that the tenant may be told of.
    pub(crate) fn own_cached_tokens(&self) -> u32 {
        self.run.own_cached_tokens
    }

    /// Computed tokens when the sequence was last admitted.
    pub(crate) fn computed_from(&self) -> u32 {
        self.run.computed_from
    }

    /// Tokens computed so far, including recomputed ones.
    pub(crate) fn computed_in_all(&self) -> u64 {
        self.account.computed_tokens() + u64::from(self.progress.computed - self.run.computed_from)
    }

    /// Whether the sequence recomputes tokens lost in a preemption.
    pub(crate) fn is_recomputing(&self) -> bool {
        self.run.recompute_tokens > 0 && !self.is_decoding()
    }

    /// Tokens missing from the cache at the latest lookup.
    pub(crate) fn uncached(&self) -> u32 {
        self.run.uncached
    }

    /// The latest plan that had a decoded token of a limited background sequence, and the place in it. The plan is 0 before the first.
    pub(crate) fn decoded_in(&self) -> (u64, usize) {
        self.run.decoded_in
    }

    /// Records that a plan has a decoded token of a limited background sequence.
    pub(crate) fn note_decode(&mut self, plan: u64, place: usize) {
        self.run.decoded_in = (plan, place);
    }

    /// Computes the number of uncached tokens from the chain of cached blocks.
    pub(crate) fn measure_uncached(&mut self, block_size: u32) {
        let cached = self.blocks.usable_len() * block_size as usize;
        self.run.uncached = (self.tokens.len() - cached).max(1) as u32;
    }

    /// Begins a run with `computed` tokens. Returns the number of tokens that the sequence recomputes.
    pub(crate) fn start(&mut self, computed: Computed, now: Time) -> u32 {
        let position = self.queue_position();
        let Computed { tokens: computed, own } = computed;
        self.queue_entry.admit();
        self.progress.computed = computed;
        self.run.computed_from = computed;
        if self.times.started.is_none() {
            self.account.start(position);
            self.times.started = Some(now);
            (self.run.cached_tokens, self.run.own_cached_tokens) = (computed, own);
            self.run.lost_hit_tokens = self.blocks.lost_hit().own;
            return 0;
        }
        let again = self.run.recompute_tokens.saturating_sub(computed);
        self.account.recompute(again);
        again
    }

    /// Ends a run. The computed KV is lost, except for a copy in host memory.
    pub(crate) fn preempt(&mut self, swapped: bool) {
        let Run { computed_from, recompute_tokens, .. } = self.run;
        self.account.compute(self.progress.computed - computed_from);
        self.run.recompute_tokens = if swapped { 0 } else { recompute_tokens.max(self.progress.computed) };
        (self.progress.computed, self.run.computed_from) = (0, 0);
        self.progress.preemptions += 1;
        self.draft.clear();
    }
}
