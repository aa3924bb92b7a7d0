//! The limit of blocks with memory, which changes while several models share bytes.

use super::Scheduler;
use crate::batch::{Growth, growth};
use crate::config::Reservation;
use crate::memory::{BlockId, BlocksUsed};
use crate::request::Time;

impl Scheduler {
    /// Sets the most blocks that may have memory. Returns the limit that applies: at least the blocks of one sequence of
    /// the maximum length, and at most all blocks but the scratch block. Under [`Reservation::MaxTokens`] it also covers
    /// what is held and reserved.
    ///
    /// Cached blocks beyond the limit are evicted, and held sequences. Running sequences keep their blocks and get no more
    /// until they hold less than the limit.
    pub fn set_block_limit(&mut self, blocks: u32, now: Time) -> u32 {
        self.accounts.tick(now);
        let reserved = self.reserved_blocks();
        let (least, most) = (self.config.least_blocks() as usize, self.config.usable_blocks() as usize);
        let asked = (blocks as usize).clamp(least, most);
        while self.kv.held() + reserved.unwrap_or(0) > asked && self.evict_one_held() {}
        let limit = reserved.map_or(asked, |reserved| asked.max(self.kv.held() + reserved));
        self.kv.set_limit(limit);
        self.running.retry_refused();
        limit as u32
    }

    /// Evicts all cached blocks that no running sequence uses, and those of held sequences. The turns of sessions without requests end.
    pub fn evict_cached(&mut self, now: Time) {
        self.accounts.tick(now);
        self.sessions.park_excess(0, now, &mut self.kv);
        while self.evict_one_held() {}
        let limit = self.kv.limit();
        self.kv.set_limit(0);
        self.kv.set_limit(limit);
        self.running.retry_refused();
    }

    /// The blocks without memory that were given back since the last call: see [`set_block_limit`](Self::set_block_limit).
    /// All planned steps must have run. The caller discards the content of the blocks before the next step.
    pub fn take_given_back(&mut self) -> Vec<BlockId> {
        if self.steps.owes_copies() { Vec::new() } else { self.kv.take_given_back() }
    }

    /// How many blocks are in use and how many could be. O(slots).
    ///
    /// The need of waiting requests is an estimate: their prompts, as far as there are slots, without what is cached.
    pub fn blocks_used(&self) -> BlocksUsed {
        let running: usize = self.running_seqs().map(|seq| seq.blocks.held()).sum();
        // Sequences may share blocks, and other blocks may belong to held sequences, which can be evicted.
        let held = running.min(self.kv.held());
        let (backlog, slots) = (self.waiting.backlog(), self.running.free_slots());
        let prompts = (backlog.reqs as usize).min(slots);
        let tokens = backlog.prompt_tokens * prompts as u64 / u64::from(backlog.reqs.max(1));
        let returning = self.waiting.kinds().returning.min(slots - prompts);
        let each = held / self.running.len().max(1);
        let coming = (tokens / u64::from(self.config.block_size)) as usize + prompts + returning * (each + 1);
        // The contexts of active sessions are in use between two requests too.
        let wanted = held.max(self.blocks_in_use()) + coming + growth(self.running.len() + prompts + returning);
        BlocksUsed { held: held as u32, kept: self.kv.kept() as u32, wanted: wanted.min(u32::MAX as usize) as u32 }
    }

    /// Blocks that stay free for the running sequences under [`Reservation::MaxTokens`].
    pub(super) fn reserved_blocks(&self) -> Option<usize> {
        let size = self.config.block_size;
        let growth = |seq| Growth::of(seq, seq.blocks.held(), Reservation::MaxTokens, size).whole(size);
        (self.config.kv_reservation == Reservation::MaxTokens).then(|| self.running_seqs().map(growth).sum())
    }
}
